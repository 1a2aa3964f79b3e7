"""Of a run that generates ahead, at calls of an iteration that change a file: the process ends there, or the stop
button is pressed. No stage is done twice, and no rollouts are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash_points.cases import ALGORITHM, failures, same, spread
from tests.crash_points.processes import COMPILER, LOST, Kernel, Kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

AHEAD = (
    ALGORITHM
    + """
def stale(lab, ppo, last):
    while ppo.iteration < last or ppo.under_way:
        ppo.run(1, staleness=1)
    waiting = lab.buffer.df()[["iteration", "prompt_uid", "weights_version", "response_tokens"]]
    return (*state(lab, ppo), waiting.to_dict("list"))
"""
)
REST = "out = stale(lab, ppo, {0})"
KINDS = {"whole": "staleness=1", "in parts": "staleness=2, pause_after=5"}  # the arguments of `run`
OPEN = """
lab = tiny_lab("ahead", Path("runs"), {0})
ppo = algorithm(lab)
ppo.run(1, staleness=1)
out = str(lab.save("one").folder)
"""


class Ahead:
    """A workbench whose second iteration, with the generation for the third, is disturbed. driver: its kernel."""

    def __init__(self, folder: Path, options: str, kind: str) -> None:
        self.code = AHEAD.replace(KINDS["whole"], KINDS[kind])
        self.kernels = Kernels(folder, os.path.commonpath([folder, os.environ["WORKBENCH_HOME"]]))
        self.driver = self.kernels.start(self.code)
        self.one = self.driver.run(OPEN.format(options).replace(KINDS["whole"], KINDS[kind]))
        self.second, self.third = self.driver.run(REST.format(2)), self.driver.run(REST.format(3))
        assert self.second[-1]["iteration"] == [3, 3] or kind == "in parts"
        self.go_back()
        self.points = self.driver.count(REST.format(2))
        self.go_back()

    def go_back(self) -> None:
        self.driver.run(f"lab.recover({self.one!r})")

    def goes_on(self, kernel: Kernel) -> None:
        self.driver = kernel
        same(kernel.run(REST.format(2)), self.second)
        same(kernel.run(REST.format(3)), self.third)
        self.go_back()

    def ended(self, point: int) -> None:
        """The kernel ends there, and another attaches."""
        self.driver.arm(point, signal.SIGKILL)
        error, _ = self.driver.try_to(REST.format(2))
        if error != LOST:  # how often transfers and memory are written depends on the moment
            assert self.driver.disarm() < point and point > len(self.points) - 6
            self.go_back()
            return
        kernel = self.kernels.start(self.code)
        kernel.run("lab = wb.attach('ahead')\nppo = algorithm(lab)")
        self.goes_on(kernel)

    def pressed(self, point: int) -> None:
        """The stop button is pressed there; the same cell goes on."""
        self.driver.arm(point, signal.SIGINT)
        error, _ = self.driver.try_to(REST.format(2))
        if not error:
            assert self.driver.disarm() < point and point > len(self.points) - 6
            self.go_back()
            return
        assert error.startswith("StageInterrupted: "), error
        self.driver.disarm()
        self.goes_on(self.driver)


@pytest.fixture(scope="module", params=KINDS)
def inline(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Ahead]:
    found = Ahead(tmp_path_factory.mktemp("points"), "backend='inline'", request.param)
    yield found
    found.kernels.close()


@pytest.fixture(scope="module", params=KINDS)
def on_ray(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Ahead]:
    found = Ahead(tmp_path_factory.mktemp("points"), "if_exists='replace'", request.param)
    yield found
    found.kernels.start(AHEAD).run("wb.stop('ahead')")
    found.kernels.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_stop_button(inline: Ahead) -> None:
    assert not failures(inline.pressed, spread(inline.points, 5))


@pytest.mark.thorough
def test_the_kernel_ends(on_ray: Ahead) -> None:
    assert not failures(on_ray.ended, spread(on_ray.points, 4))


@pytest.mark.thorough
def test_the_stop_button_at_every_point(inline: Ahead) -> None:
    assert not failures(inline.pressed, range(1, len(inline.points) + 1))


@pytest.mark.thorough
def test_the_stop_button_on_ray(on_ray: Ahead) -> None:
    assert not failures(on_ray.pressed, spread(on_ray.points, 12))


@pytest.mark.thorough
def test_the_kernel_ends_at_every_point(on_ray: Ahead) -> None:
    assert not failures(on_ray.ended, range(1, len(on_ray.points) + 1))
