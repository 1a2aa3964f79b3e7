"""An iteration is split at generation: what comes up to it may run ahead of training, and waits in `lab.buffer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from workbench.algorithms.buffer import rollouts_of
from workbench.algorithms.graph import Graph, Stage
from workbench.algorithms.lab import Lab
from workbench.algorithms.marks import unmarked
from workbench.algorithms.waiting import UNKNOWN, WaitingRollouts
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
    stages = front(graph)
    rule = "an iteration runs ahead up to its generation: lab.prompts.next, and stages that update nothing, before it"
    if not stages:
        raise BadInput(f"{graph.title} with staleness", f"{rule}; none of its stages generates", "leave staleness out")
    first, *others = stages
    if first.role != "prompts" or first.function is not None or first is not graph.stages[0]:
        raise BadInput(f"{graph.title} with staleness", f"{rule}; it begins with {first.name!r}", "leave staleness out")
    wrong = [stage.name for stage in others if stage.updates or stage.role == "prompts"]
    if wrong:
        raise BadInput(f"{graph.title} with staleness", f"{rule}; {wrong[0]!r} comes before", "leave staleness out")


def draw_ahead(lab: Lab, graph: Graph, has_run: Callable[[str], None]) -> Batch:
    """Make the stages up to generation for the next iteration that lacks rollouts; see `Algorithm.draw_ahead`.

    has_run: told of each stage that was made.
    """
    stages = front(graph)
    found = _begun(lab, tuple(stage.name for stage in stages))
    counters = lab.runner.counters
    reported, counters.last_metrics = counters.last_metrics, found.metrics
    try:
        for stage in stages:
            if stage.name not in found.made:
                _make(lab, graph, stage, found)
                has_run(stage.name)
    finally:
        counters.last_metrics = reported
    return found.rollouts


def _begun(lab: Lab, stages: tuple[str, ...]) -> WaitingRollouts:
    """What waits and is not whole, as it was interrupted; else one more."""
    waiting = lab.buffer.waiting
    for found in waiting:
        if found.stages == stages and not found.whole:
            return found
    last = max([lab.iteration, *(found.iteration for found in waiting)])
    return WaitingRollouts(iteration=last + 1, stages=stages)


def _make(lab: Lab, graph: Graph, stage: Stage, found: WaitingRollouts) -> None:
    """Run one stage. A later kernel has its batch as soon as it is over: it draws no other prompts, nor other
    samples."""
    if stage.role == "prompts":
        with uninterrupted(), lab.runner.ownership.together():
            made = lab.prompts.ahead(groups_of([stage]), found.iteration)
            found.made[stage.name] = made
            lab.buffer.waiting.append(found)
            lab.note_position()
        return
    take = partial(found.made.__setitem__, stage.name)
    operation = isinstance(stage.function, GroupOperation)
    with (
        uninterrupted() if operation else nullcontext(),
        lab.runner.handing_over(stage.operation, take) if operation else nullcontext(),
    ):
        found.made[stage.name] = graph.call(stage, lab, found.made)
        lab.note_position()


def drawn(lab: Lab, graph: Graph) -> tuple[dict[str, Any], list[WaitingRollouts]]:
    """Begin an iteration with rollouts that wait: what its stages up to generation made, and what left the buffer.
    Nothing where too few wait."""
    stages = front(graph)
    names = tuple(stage.name for stage in stages)
    if not stages or stages[0] is not graph.stages[0] or stages[0].role != "prompts":
        return {}, []
    buffer, groups = lab.buffer, groups_of(stages)
    begun = [found for found in buffer.waiting if found.stages == names and not found.whole]
    if buffer.count(names) >= groups:
        chosen = buffer.choose(groups, names)
        found = rollouts_of(chosen, lab.iteration + 1)
        lab.prompts.begin()
        taken = buffer.take_out(chosen)
        _report(lab, found)
        return dict(found.made), taken
    if begun:  # its prompts are drawn; it generates now
        lab.prompts.begin()
        buffer.waiting.remove(begun[0])
        lab.runner.counters.last_metrics.update(begun[0].metrics)
        return dict(begun[0].made), begun[:1]
    return {}, []


def groups_of(stages: Sequence[Stage]) -> int:
    """How many prompts an iteration draws. stages: those up to generation."""
    first = stages[0]
    return int(unmarked(first.kwargs.get("n", first.args[0] if first.args else 0)))


def fill(lab: Lab, graph: Graph, staleness: int, draw: Callable[[], object]) -> None:
    """Generate ahead as long as rollouts that are begun now are at most so many iterations behind when they are drawn.
    The rollouts of the iteration under way have been drawn. draw: generates for one more iteration."""
    stages = front(graph)
    names, groups = tuple(stage.name for stage in stages), groups_of(stages)
    while lab.buffer.count(names) + groups <= staleness * groups:
        draw()


def _report(lab: Lab, found: WaitingRollouts) -> None:
    """Have the iteration's metrics say how old its rollouts are, and log the draw."""
    counters, versions = lab.runner.counters, found.rows["weights_version"]
    counters.last_metrics.update(found.metrics)
    if found.version != UNKNOWN and "actor" in lab.weights:
        ages = lab.weights["actor"].steps - versions
        lab.report("buffer", {"age_steps/mean": float(ages.mean()), "age_steps/max": float(ages.max())})
    lab.telemetry.append_event(
        "drawn from the buffer", iteration=counters.iteration, of_iteration=found.iteration, prompts=found.groups(),
        weights_versions=sorted(set(versions.tolist())), waiting=len(lab.buffer),
    )  # fmt: skip
