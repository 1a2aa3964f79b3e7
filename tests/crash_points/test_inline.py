"""Inline, at every call of an iteration that changes a file: the process ends there, or the stop button is pressed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash_points.cases import ALGORITHM, REST, failures, same, spread
from tests.crash_points.processes import COMPILER, LOST, Kernel, Kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

OPEN = """
lab = tiny_lab("points", Path(FOLDER), backend="inline", save_every=1)
ppo = algorithm(lab)
ppo.iterate()
out = str(lab.run_folder)
"""


class Inline:
    """What an undisturbed run gives, and the points of its second iteration, which a checkpoint ends."""

    def __init__(self, folder: Path) -> None:
        self.kernels, self._count = Kernels(folder), 0
        kernel, _ = self.opened()
        self.points = kernel.count("ppo.iterate()")
        self.second, self.third = kernel.run(REST.format(2)), kernel.run(REST.format(3))
        kernel.kill()
        self._pressed, _ = self.opened()
        self._one = str(self._pressed.run("out = lab.save('one').folder"))

    def opened(self) -> tuple[Kernel, str]:
        """A kernel with a workbench after its first iteration; the run folder."""
        self._count += 1
        kernel = self.kernels.start(ALGORITHM)
        return kernel, kernel.run(f"FOLDER = 'runs{self._count}'\n{OPEN}")

    def ended(self, point: int, *, half: bool = False) -> None:
        """The process ends there; the next one goes on from the newest checkpoint."""
        kernel, folder = self.opened()
        kernel.arm(point, signal.SIGKILL, half=half)
        assert kernel.try_to("ppo.iterate()") == (LOST, None)
        after = self.kernels.start(ALGORITHM)
        restore = f"lab = wb.restore({folder!r}, runs='after{self._count}')\nppo = algorithm(lab); out = ppo.iteration"
        iteration = after.run(restore)
        assert iteration in (1, 2)
        if iteration == 1:
            same(after.run(REST.format(2)), self.second)
        same(after.run(REST.format(3)), self.third)
        told = after.run(
            f"out = TelemetryStore({folder!r}).metrics()['stage'].tolist()"
        )  # what was written is readable
        assert told.count("update_actor") in (1, 2)
        after.kill()

    def pressed(self, point: int) -> None:
        """The stop button is pressed there; the same cell goes on."""
        kernel = self._pressed
        kernel.run(f"lab.recover({self._one!r}); lab.autosave(1, folder='saved')")
        kernel.arm(point, signal.SIGINT)
        error, _ = kernel.try_to("ppo.iterate()")
        assert kernel.disarm() >= point
        assert error.startswith("StageInterrupted: "), error
        same(kernel.run(REST.format(2)), self.second)
        same(kernel.run(REST.format(3)), self.third)


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inline]:
    inline = Inline(tmp_path_factory.mktemp("points"))
    yield inline
    inline.kernels.close()


@pytest.mark.slow
def test_some_points(inline: Inline) -> None:
    assert len(inline.points) > 30
    assert not failures(inline.ended, spread(inline.points, 2))
    assert not failures(inline.pressed, spread(inline.points, 4))


@pytest.mark.thorough
def test_the_process_ends_at_every_point(inline: Inline) -> None:
    assert not failures(inline.ended, range(1, len(inline.points) + 1))


@pytest.mark.thorough
def test_the_process_ends_in_the_middle_of_every_write(inline: Inline) -> None:
    writes = [number for number, call in enumerate(inline.points, 1) if call.startswith("write ")]
    assert not failures(lambda point: inline.ended(point, half=True), writes)


@pytest.mark.thorough
def test_the_stop_button_at_every_point(inline: Inline) -> None:
    assert not failures(inline.pressed, range(1, len(inline.points) + 1))
