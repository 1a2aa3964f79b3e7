"""The errors of runs that were interrupted: what was done, and how to go on."""

from __future__ import annotations

from workbench.errors import StageInterrupted
from workbench.messages.replies import UpdatePart

AS_BEFORE = "things are as before the stage"
AGAIN = "run the cell again to go on"


def before_it_began(name: str) -> StageInterrupted:
    """It waited for an input, or for its pool."""
    return StageInterrupted(f"{name} was interrupted before it began", AS_BEFORE, AGAIN)


def as_before(name: str) -> StageInterrupted:
    """It left nothing, and its result was dropped."""
    return StageInterrupted(f"{name} was interrupted", AS_BEFORE, AGAIN)


def after_all_steps(name: str) -> StageInterrupted:
    """An update that had come to its end."""
    return StageInterrupted(
        f"{name} was interrupted after its last optimizer step",
        "the update is done",
        "run the cell again: the same call takes no step, and gives its metrics",
    )


def after(name: str, part: UpdatePart) -> StageInterrupted:
    """An update that was left between two of its steps."""
    if not part.steps:
        return as_before(name)
    return StageInterrupted(
        f"{name} was interrupted after optimizer step {part.steps} of {part.of}",
        "the weights are as after that step",
        f"run the cell again: the same call again goes on with step {part.steps + 1}",
    )


def left_alone(name: str) -> StageInterrupted:
    """Stop was pressed again while its ranks were stopping."""
    return StageInterrupted(
        f"{name} was interrupted twice",
        "its ranks stop at the next place where nothing is half done, and nobody waits for them",
        "run the cell again to go on: the next call waits for them",
    )


def cut_short(name: str, *, updates: bool) -> StageInterrupted:
    """Inline, where the second interrupt ends what this thread computes."""
    if updates:
        rule = "it was left in the middle of an optimizer step: what it updates may be half updated"
        return StageInterrupted(f"{name} was interrupted twice", rule, "go back with lab.recover()")
    return StageInterrupted(f"{name} was interrupted twice", "it was left where it was; its result is dropped", AGAIN)


def stuck(name: str, ranks: str, seconds: float) -> StageInterrupted:
    """Ranks that did not stop."""
    return StageInterrupted(
        f"{name} was to stop, and rank {ranks} showed no progress for {seconds:g} s",
        "it waits in a collective, or for code that does not return: its pool is lost",
        "lab.recover() starts it again, and goes on from the last checkpoint",
    )
