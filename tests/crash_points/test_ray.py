"""On Ray, at every call of an iteration that changes a file: the kernel ends there and another attaches; it is stopped
there and another takes over; or the stop button is pressed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash_points.cases import ALGORITHM, OTHERS, REST, failures, same, spread
from tests.crash_points.processes import COMPILER, LOST, Kernel, Kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

OPEN = """
lab = tiny_lab("points", Path("runs"), if_exists="replace")
ppo = algorithm(lab)
ppo.iterate()
out = str(lab.save("one").folder)
lab.autosave(1)
"""


MOVE = "lab.move(wb.Placement.of({{'{0}': (1, ['actor', 'critic', 'reference', 'reward'])}}))"


class OnRay:
    """One workbench, which goes back to the end of its first iteration after each trial; what an undisturbed run gives,
    and the points of its second iteration, which a checkpoint ends. driver: the kernel that drives it."""

    def __init__(self, folder: Path) -> None:
        self.kernels = Kernels(folder, os.path.commonpath([folder, os.environ["WORKBENCH_HOME"]]))
        self.driver = self.kernels.start(ALGORITHM)
        self.one = self.driver.run(OPEN)
        self.second, self.third = self.driver.run(REST.format(2)), self.driver.run(REST.format(3))
        self._go_back()
        self.points = self.driver.count("ppo.iterate()")
        self._go_back()

    def _go_back(self) -> None:
        self.driver.run(f"lab.recover({self.one!r}); lab.autosave(1)")

    def _finished_by(self, kernel: Kernel, attach: str) -> None:
        """Another kernel makes the rest of the iteration, and the next one."""
        self.driver = kernel
        kernel.run(f"lab = {attach}\nppo = algorithm(lab)")
        same(kernel.run(REST.format(2)), self.second)
        same(kernel.run(REST.format(3)), self.third)
        self._go_back()

    def ended(self, point: int, *, half: bool = False) -> None:
        """The kernel ends there."""
        self.driver.arm(point, signal.SIGKILL, half=half)
        error, _ = self.driver.try_to("ppo.iterate()")
        if self._reached(point, error == LOST):
            self._finished_by(self.kernels.start(ALGORITHM), "wb.attach('points')")

    def _reached(self, point: int, reached: bool) -> bool:
        """How often transfers and memory are written depends on the moment: of the last points some may not come."""
        if not reached:
            assert self.driver.disarm() < point
            assert point > len(self.points) - 6
            self._go_back()
        return reached

    def taken(self, point: int) -> None:
        """The kernel is slow there; another takes over, and the first goes on only then."""
        slow = self.driver
        slow.arm(point, signal.SIGSTOP)
        slow.begin("ppo.iterate()")
        if not (stopped := slow.wait_until_stopped()):
            slow.answer()  # of the iteration, which made fewer calls
        if not self._reached(point, stopped):
            return
        self._finished_by(self.kernels.start(ALGORITHM), "wb.attach('points', take_over=True)")
        slow.go_on()
        error, _ = slow.answer()
        assert error.startswith("NotDriving: ") or not error, error
        refused, _ = slow.try_to("ppo.step()")
        assert refused.startswith("NotDriving: "), refused
        slow.kill()
        self.driver.run("out = lab.actor.weights_checksum()")  # which the slow one has not touched
        same(self.driver.run(REST.format(2)), self.second)
        self._go_back()

    def recovering(self, point: int) -> None:
        """The kernel ends there, in the middle of `lab.recover`: no stage runs before that has come to its end."""
        self.driver.run(REST.format(2))
        self.driver.arm(point, signal.SIGKILL)
        error, _ = self.driver.try_to(f"lab.recover({self.one!r})")
        if error == LOST:
            self.driver = kernel = self.kernels.start(ALGORITHM)
            kernel.run("lab = wb.attach('points')\nppo = algorithm(lab)")
            error, _ = kernel.try_to("lab.actor.weights_checksum()")
            if error:
                assert error.startswith("HostDied: ") and "a recovery that did not finish" in error, error
            kernel.run(f"lab.recover({self.one!r})")
        same(self.driver.run(REST.format(2)), self.second)
        self._go_back()

    def pressed(self, point: int) -> None:
        """The stop button is pressed there; the same cell goes on."""
        self.driver.arm(point, signal.SIGINT)
        error, _ = self.driver.try_to("ppo.iterate()")
        if not self._reached(point, bool(error)):
            return
        assert error.startswith("StageInterrupted: "), error
        same(self.driver.run(REST.format(2)), self.second)
        same(self.driver.run(REST.format(3)), self.third)
        self._go_back()

    def moving(self, part: int) -> None:
        """Another takes over while the first moves it, after so many tenths of the time: it goes on where it was, or
        where it is then, and the first ends nothing that is the other's."""
        began = time.monotonic()
        self.driver.run(MOVE.format(f"clean{part}"))
        took_s = time.monotonic() - began
        self._go_back()
        first, other = self.driver, self.kernels.start(ALGORITHM)
        first.begin(MOVE.format(f"taken{part}"))
        time.sleep(took_s * part / 10)
        self._finished_by(other, "wb.attach('points', take_over=True)")
        error, _ = first.answer()
        assert error.startswith("NotDriving: ") or not error, error
        first.kill()
        same(self.driver.run(REST.format(2)), self.second)
        self._go_back()

    def killed_moving(self, point: int) -> None:
        """The kernel ends there, in the middle of a move: of the processes of both placements those of one go on."""
        self.driver.arm(point, signal.SIGKILL)
        error, _ = self.driver.try_to(MOVE.format(f"killed{point}"))
        if error != LOST:  # memory is written at other moments: this move had fewer points
            assert not error, error
            assert self.driver.disarm() < point
        else:
            self.driver = kernel = self.kernels.start(ALGORITHM)
            kernel.run("lab = wb.attach('points')\nppo = algorithm(lab)")
        assert not (others := self.driver.run(OTHERS)), others
        same(self.driver.run(REST.format(2)), self.second)
        self._go_back()


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    on_ray = OnRay(tmp_path_factory.mktemp("points"))
    yield on_ray
    on_ray.kernels.start(ALGORITHM).run("wb.stop('points')")
    on_ray.kernels.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_some_points(on_ray: OnRay) -> None:
    assert len(on_ray.points) > 50
    assert not failures(on_ray.ended, spread(on_ray.points, 4))
    assert not failures(on_ray.taken, spread(on_ray.points, 4))
    assert not failures(on_ray.pressed, spread(on_ray.points, 8))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_kernel_ends_as_a_generation_does(on_ray: OnRay) -> None:
    """Before and after each entry of the journal from the drawing of prompts to the stage after the generation: the
    next kernel has its samples, or draws the same."""
    entries = [number for number, call in enumerate(on_ray.points, 1) if call.endswith("journal.pkl")]
    assert not failures(on_ray.ended, entries[:4])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_kernel_ends_at_every_point_of_a_recovery(on_ray: OnRay) -> None:
    points = on_ray.driver.count(f"lab.recover({on_ray.one!r})")
    assert len(points) > 1
    assert not failures(on_ray.recovering, range(1, len(points) + 1))


@pytest.mark.slow
@pytest.mark.thorough
def test_another_takes_over_during_a_move(on_ray: OnRay) -> None:
    assert not failures(on_ray.moving, (1, 5, 9))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_kernel_ends_during_a_move(on_ray: OnRay) -> None:
    points = on_ray.driver.count(MOVE.format("counted"))
    on_ray._go_back()
    assert not failures(on_ray.killed_moving, spread(points, 3))


@pytest.mark.thorough
def test_the_kernel_ends_at_every_point_of_a_move(on_ray: OnRay) -> None:
    points = on_ray.driver.count(MOVE.format("counted"))
    on_ray._go_back()
    assert not failures(on_ray.killed_moving, range(1, len(points) + 1))


@pytest.mark.thorough
def test_the_kernel_ends_at_every_point(on_ray: OnRay) -> None:
    assert not failures(on_ray.ended, range(1, len(on_ray.points) + 1))


@pytest.mark.thorough
def test_the_kernel_ends_in_the_middle_of_writes(on_ray: OnRay) -> None:
    writes = [number for number, call in enumerate(on_ray.points, 1) if call.startswith("write ")]
    assert not failures(lambda point: on_ray.ended(point, half=True), writes[::4])


@pytest.mark.thorough
def test_another_takes_over_at_every_third_point(on_ray: OnRay) -> None:
    assert not failures(on_ray.taken, range(1, len(on_ray.points) + 1, 3))


@pytest.mark.thorough
def test_the_stop_button_at_every_point(on_ray: OnRay) -> None:
    assert not failures(on_ray.pressed, range(1, len(on_ray.points) + 1))
