"""An iteration is split at generation: what comes up to it may run ahead of training, and waits in `lab.buffer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from workbench.algorithms.buffer import UNKNOWN, WaitingRollouts, rollouts_of
from workbench.algorithms.graph import Graph, Stage
from workbench.algorithms.lab import Lab
from workbench.batches.batch import Batch
from workbench.display.interrupts import uninterrupted
from workbench.errors import BadInput
from workbench.stages.group import GroupOperation


def front(graph: Graph) -> tuple[Stage, ...]:
    """The stages that draw samples, and all that these need, in call order; none where no stage draws samples."""
    wanted = {stage.name for stage in graph.stages if stage.samples}
    for stage in reversed(graph.stages):
        if stage.name in wanted:
            wanted.update(stage.inputs)
    return tuple(stage for stage in graph.stages if stage.name in wanted)


def check_can_run_ahead(graph: Graph) -> None:
    """Raise `BadInput` where no iteration of this graph can be generated before the one under way is over."""
    rule = "an iteration runs ahead up to its generation: lab.prompts.next, and stages that update nothing, before it"
    first, *others = front(graph) or (None,)
    wrong = [stage.name for stage in others if stage.updates or stage.role == "prompts"]
    if first is None:
        reason = "none of its stages generates"
    elif first.role != "prompts" or first.function is not None or first is not graph.stages[0]:
        reason = f"it begins with {first.name!r}"
    elif wrong:
        reason = f"{wrong[0]!r} comes before"
    else:
        return
    raise BadInput(f"{graph.title} with staleness", f"{rule}; {reason}", "leave staleness out")


@contextmanager
def keeping(lab: Lab, stage: Stage) -> Iterator[None]:
    """Run a stage inside, and note the position with its result: the journal has both in one entry, so that no update
    is made twice, also by a later kernel, and no prompts or samples are drawn again."""
    whole = isinstance(stage.function, GroupOperation) or stage.role == "prompts"
    with ExitStack() as stack:
        if whole:
            stack.enter_context(uninterrupted())
        if whole or not lab.runner.scheduler.overlaps:  # a function may wait, while other stages end
            stack.enter_context(lab.runner.ownership.together(has_position=whole))
        yield


def draw_ahead(lab: Lab, graph: Graph, has_run: Callable[[str], None]) -> Batch:
    """Make the stages up to generation for the next iteration that lacks rollouts; see `Algorithm.draw_ahead`.

    has_run: called with the name of each stage that was made.
    """
    stages, waiting, counters = front(graph), lab.buffer.waiting, lab.runner.counters
    names = tuple(stage.name for stage in stages)
    last = max([lab.iteration, *(found.iteration for found in waiting)])
    interrupted = (found for found in waiting if found.stages == names and not found.whole)
    found = next(interrupted, WaitingRollouts(iteration=last + 1, stages=names))
    reported, counters.last_metrics = counters.last_metrics, found.metrics
    try:
        for stage in stages:
            if stage.name in found.made:
                continue
            with keeping(lab, stage):
                if stage.role == "prompts":
                    found.made[stage.name] = lab.prompts.ahead(groups_of(stages), found.iteration)
                    lab.buffer.waiting.append(found)
                else:
                    found.made[stage.name] = graph.call(stage, lab, found.made)
                lab.note_position()
            has_run(stage.name)
    finally:
        counters.last_metrics = reported
    return found.rollouts


def drawn(lab: Lab, graph: Graph) -> tuple[dict[str, Any], list[WaitingRollouts]]:
    """Begin an iteration with rollouts that wait: what its stages up to generation made, and what left the buffer.
    Nothing where too few wait."""
    stages, buffer, counters = front(graph), lab.buffer, lab.runner.counters
    names = tuple(stage.name for stage in stages)
    if not stages or stages[0] is not graph.stages[0] or stages[0].role != "prompts":
        return {}, []
    if buffer.count(names) < groups_of(stages):
        begun = [found for found in buffer.waiting if found.stages == names and not found.whole][:1]
        for found in begun:  # its prompts are drawn; it generates now
            lab.prompts.begin()
            buffer.waiting.remove(found)
            counters.last_metrics.update(found.metrics)
        return dict(begun[0].made) if begun else {}, begun
    chosen = buffer.choose(groups_of(stages), names)
    found = rollouts_of(chosen, lab.iteration + 1)
    lab.prompts.begin()
    taken = buffer.take_out(chosen)
    counters.last_metrics.update(found.metrics)
    versions = found.rows["weights_version"]
    if found.version != UNKNOWN and "actor" in lab.weights:
        ages = lab.weights["actor"].steps - versions
        lab.report("buffer", {"age_steps/mean": float(ages.mean()), "age_steps/max": float(ages.max())})
    lab.telemetry.append_event(
        "drawn from the buffer", iteration=counters.iteration, of_iteration=found.iteration, prompts=found.groups(),
        weights_versions=sorted(set(versions.tolist())), waiting=len(lab.buffer),
    )  # fmt: skip
    return dict(found.made), taken


def groups_of(stages: Sequence[Stage]) -> int:
    """How many prompts an iteration draws. stages: those up to generation."""
    first = stages[0]
    return int(first.kwargs.get("n", first.args[0] if first.args else 0))


def fill(lab: Lab, graph: Graph, staleness: int, draw: Callable[[], object]) -> None:
    """Generate ahead as long as rollouts that are begun now are at most so many iterations behind when they are drawn.
    The rollouts of the iteration under way have been drawn. draw: generates for one more iteration."""
    stages = front(graph)
    names, groups = tuple(stage.name for stage in stages), groups_of(stages)
    while lab.buffer.count(names) + groups <= staleness * groups:
        draw()
