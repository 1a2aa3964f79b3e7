"""An iteration is split at generation: what comes up to it may run ahead of training, and waits in `lab.buffer`.

    in an iteration of run(n, staleness=k)
    before its prompts      finish_paused   goes on with responses that paused, until enough groups are whole
    its prompts             from_buffer     takes them, and all that was made of them up to generation
    after its generation    fill            generates for iterations to come, beside training

The first and the last do so by `draw_ahead`; `join_paused` puts responses that go on and new ones into one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from workbench.algorithms.graph import Graph, Stage
from workbench.algorithms.lab import Lab
from workbench.algorithms.waiting import BEGUN, UNKNOWN, WaitingRollouts, rollouts_of
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table
from workbench.display.interrupts import uninterrupted
from workbench.errors import BadInput
from workbench.messages.metrics import MetricValues, reported
from workbench.stages.group import GroupOperation
from workbench.workers.partial_rollouts import METRICS as PART_METRICS
from workbench.workers.partial_rollouts import check_parts
from workbench.workers.rollout_columns import rollout_metrics


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


def check_can_pause(graph: Graph) -> None:
    """Raise `BadInput` where responses of this graph cannot go on in a later call."""
    stages = front(graph)
    if len(stages) != 2 or stages[1].operation != "generate_sequences":
        raise BadInput(
            f"{graph.title} with pause_after",
            f"prompts are followed by one generation; here by {', '.join(stage.name for stage in stages[1:])}",
            "leave pause_after out",
        )
    check_parts({**stages[1].arguments, "pause_after": 1, "resume": True})


def draw_ahead(
    lab: Lab,
    graph: Graph,
    has_run: Callable[[str], None],
    pause_after: int | None = None,
    new_prompts: bool = True,
    generated_before: int | None = None,
    groups: int | None = None,
) -> Batch:
    """Make the stages up to generation for the next iteration that lacks rollouts; see `Algorithm.draw_ahead`.

    has_run: called with the name of each stage that was made. new_prompts: draw prompts; else only go on with what
    paused. generated_before: go on with what was generated before this iteration; None: with all that paused. groups:
    as many prompts; None: those of an iteration.
    """
    stages, buffer, counters = front(graph), lab.buffer, lab.runner.counters
    names = tuple(stage.name for stage in stages)
    paused = buffer.part_paused(names, generated_before)
    last = max([lab.iteration, *(found.iteration for found in buffer.waiting)])
    interrupted = (found for found in buffer.waiting if found.stages == names and not found.whole)
    found = next(interrupted, WaitingRollouts(iteration=last + new_prompts, stages=names))
    counters.metrics_ahead = found.metrics
    try:
        for stage in stages:
            if stage.name in found.made or (stage.role == "prompts" and not new_prompts):
                continue
            with keeping(lab, stage):
                if stage.role == "prompts":
                    found.made[stage.name] = lab.prompts.ahead(groups or groups_of(stages), found.iteration)
                    buffer.waiting.append(found)
                else:
                    if paused and BEGUN not in found.made:
                        join_paused(lab, stages, found, paused)
                    stage = in_part(stage, found, pause_after)
                    found.made[stage.name], found.generated_in = graph.call(stage, lab, found.made), lab.iteration
                lab.note_position()
            has_run(stage.name)
    finally:
        counters.metrics_ahead = None
    return found.rollouts


def join_paused(lab: Lab, stages: Sequence[Stage], found: WaitingRollouts, paused: Sequence[WaitingRollouts]) -> None:
    """Have responses that paused go on beside those that `found` begins; what it is of then waits in their place."""
    prompts, generation = stages
    rows = [one.made[generation.name] for one in paused]
    asked = [one.made[prompts.name] for one in paused]
    if prompts.name in found.made:
        asked.append(found.made[prompts.name])
        new = asked[-1].repeat(int(generation.kwargs.get("samples", 1)))
        lists: list[list[Any]] = [[] for _ in range(new.rows)]
        nothing: Table = {
            **dict.fromkeys(("response_ids", "token_versions"), Ragged.of(lists, torch.int64)),
            "response_mask": Ragged.of(lists, torch.bool),
            "rollout_log_prob": Ragged.of(lists, torch.float32),
            "ending": ["paused"] * new.rows,
            "finished": torch.zeros(new.rows, dtype=torch.bool),
            "sample_seed": torch.zeros(new.rows, dtype=torch.int64),
        }
        rows.append(new.join(lab.put(nothing)))
    begun = Batch.concat(rows)
    found.made = {
        prompts.name: Batch.concat(asked),
        BEGUN: begun.derive("draw", begun.columns, {"iteration": found.iteration}),
    }
    gone = [*map(id, (*paused, found))]
    lab.buffer.waiting = [*(one for one in lab.buffer.waiting if id(one) not in gone), found]


def in_part(stage: Stage, found: WaitingRollouts, pause_after: int | None) -> Stage:
    """The generation of `found` as it is called where responses pause, or go on."""
    kwargs = stage.kwargs if pause_after is None else {**stage.kwargs, "pause_after": pause_after}
    if BEGUN not in found.made:
        return replace(stage, kwargs=kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != "samples"}
    return replace(stage, inputs=(BEGUN,), kwargs={**kwargs, "resume": True})


def finish_paused(lab: Lab, graph: Graph, draw: Callable[..., object]) -> None:
    """Go on with responses that paused until the groups of an iteration are whole. draw: goes on with all of them."""
    stages, buffer = front(graph), lab.buffer
    names = tuple(stage.name for stage in stages)
    while stages and buffer.count(names) < groups_of(stages):
        stopped = any(found.stages == names and BEGUN in found.made and not found.whole for found in buffer.waiting)
        if not stopped and not buffer.part_paused(names):
            break
        draw(new_prompts=False)


def from_buffer(lab: Lab, graph: Graph) -> tuple[dict[str, Any], list[WaitingRollouts]]:
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
    told = found.metrics.get(names[-1], MetricValues())
    if "ending_paused/fraction" in told:  # they are of the other responses of those calls, too
        of_these = reported(rollout_metrics(found.rollouts.fetch(["response_mask", "ending"])))
        kept = {name: value for name, value in told.items() if name not in PART_METRICS}
        counters.last_metrics[names[-1]] = MetricValues({**kept, **of_these})
    versions = found.rows["weights_version"]
    if found.version != UNKNOWN and "actor" in lab.weights:
        ages = lab.weights["actor"].steps - versions
        lab.report("buffer", {"age_steps/mean": float(ages.mean()), "age_steps/max": float(ages.max())})
    lab.telemetry.append_event(
        "drawn from the buffer", iteration=counters.iteration, of_iteration=found.iteration,
        prompts=list(found.versions()), weights_versions=sorted(set(versions.tolist())), waiting=len(lab.buffer),
    )  # fmt: skip
    return dict(found.made), taken


def groups_of(stages: Sequence[Stage]) -> int:
    """How many prompts an iteration draws. stages: those up to generation."""
    first = stages[0]
    return int(first.kwargs.get("n", first.args[0] if first.args else 0))


def fill(lab: Lab, graph: Graph, staleness: int, draw: Callable[..., object]) -> None:
    """Generate ahead as long as rollouts that are begun now are at most so many iterations behind when they are drawn.
    The rollouts of the iteration under way have been drawn. draw: generates for one more iteration. Responses that have
    paused are given one more part an iteration."""
    stages, iteration = front(graph), lab.iteration
    names, groups, buffer = tuple(stage.name for stage in stages), groups_of(stages), lab.buffer
    while (room := staleness * groups - buffer.count(names, paused=True)) > 0:
        draw(generated_before=iteration, groups=min(room, groups))
    if any(found.made_by(names) and found.generated_in < iteration and found.paused for found in buffer.waiting):
        draw(new_prompts=False, generated_before=iteration)
