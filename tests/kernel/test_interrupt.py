"""The stop button during each stage, in a real kernel: the message, and that the same cell again is right."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.kernel.interrupting import STAGES, Interrupting

RAY = 'tiny_lab("interrupts", Path("runs"), placement=wb.Placement.colocate(devices=2), if_exists="replace")'
INLINE = 'tiny_lab("interrupts", Path("runs"), backend="inline", if_exists="replace")'


@pytest.fixture(
    scope="module", params=[pytest.param(RAY, id="ray"), pytest.param(INLINE, id="inline", marks=pytest.mark.thorough)]
)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupting]:
    asked = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    stages = [stage for stage in STAGES if any(params.get("stage") == stage for params in asked)]
    kernel = Interrupting(tmp_path_factory.mktemp("kernel"), request.param, stages)
    yield kernel
    kernel.close()
    assert kernel.met or not stages, "every stage had ended before it was interrupted"


GATE = ("generate_sequences", "compute_reward", "update_actor")


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=[] if stage in GATE else pytest.mark.thorough) for stage in STAGES]
)
def test_the_next_cell_is_right(kernel: Interrupting, stage: str) -> None:
    trial = kernel.trial(stage, kernel.took_s[stage] * 0.4)
    assert trial.right
    after = trial.said.startswith("KeyboardInterrupt") and "workbench/" not in trial.said  # in IPython's own last lines
    assert after or trial.said.startswith(("StageInterrupted", "CancelledError", "done before")), trial.said
    if stage.startswith("update") and "after optimizer step" in trial.said:
        assert "to continue with step" in trial.said


STOPPED = """
import os, signal
@wb.limits(own_process=False)
def stop(prompt, response, **row):
    os.kill(os.getpid(), signal.SIGINT)
    return 1.0
other = tiny_lab("one-cell", Path("runs"), backend="inline", if_exists="replace")
"""


def test_a_cell_that_makes_its_algorithm_is_told_that_it_would_make_another(kernel: Interrupting) -> None:
    kernel.run(STOPPED)
    try:
        _check_what_is_told(kernel)
    finally:
        kernel.run("other.close()")


def _check_what_is_told(kernel: Interrupting) -> None:
    for made, said in (
        ("wb.PPO(other, reward=stop).run(2)", "begins a new iteration: create it in a separate cell"),
        (
            "ppo = wb.PPO(other, reward=stop)\nppo.run(2)",
            "begins a new iteration: call ppo.run(...) in another cell",
        ),
        ("ppo.run(2)", "run the same call again to continue; if"),
    ):
        error, _ = kernel.cell(made)
        assert said in " ".join(error.split()), error


@pytest.mark.thorough
def test_at_random_moments(kernel: Interrupting) -> None:
    dice = random.Random(5)
    for _ in range(4):
        trial = kernel.random_trial(dice.choice(list(kernel.took_s)), dice)
        assert trial.right, trial
