"""Generate rollouts ahead of training. The stages up to generation run early; their batches wait in `lab.buffer`.

    in an iteration of run(n, staleness=k)
    before its prompts      finish_paused   resumes paused responses, until enough groups are complete
    its prompts             from_buffer     takes them from the buffer, with the batches made from them up to generation
    after its generation    fill            generates for later iterations, while this one trains

`finish_paused` and `generate_ahead` call `draw_ahead`; `join_paused` puts resumed and new responses into one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from workbench.algorithms.graph import Graph, Stage
from workbench.algorithms.lab import Lab
from workbench.algorithms.waiting import RESUMED, UNKNOWN, WaitingRollouts, rollouts_of
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table
from workbench.display.interrupts import uninterrupted
from workbench.errors import BadInput
from workbench.messages.metrics import MetricValues, reported
from workbench.stages.group import GroupOperation
from workbench.workers.partial_rollouts import METRICS as PART_METRICS
from workbench.workers.partial_rollouts import check_parts
from workbench.workers.rollout_columns import rollout_metrics


def stages_up_to_generation(graph: Graph) -> tuple[Stage, ...]:
    """Return the stages that generate samples and all stages they depend on, in call order; () if none generates."""
    wanted = {stage.name for stage in graph.stages if stage.samples}
    for stage in reversed(graph.stages):
        if stage.name in wanted:
            wanted.update(stage.inputs)
    return tuple(stage for stage in graph.stages if stage.name in wanted)


def check_can_run_ahead(graph: Graph) -> None:
    """Raise `BadInput` if this graph cannot generate for an iteration before the current iteration has ended."""
    first, *others = stages_up_to_generation(graph) or graph.stages[:1]
    draws = first.role == "prompts" and first.function is None and first is graph.stages[0]
    if not draws or not others or any(stage.updates or stage.role == "prompts" for stage in others):
        raise BadInput(
            f"{graph.title} with staleness",
            "before generation, only lab.prompts.next, as the first stage, and stages that update nothing are allowed; "
            f"here: {', '.join(graph.names)}",
            "leave staleness out",
        )


@contextmanager
def journaling(lab: Lab, stage: Stage) -> Iterator[None]:
    """Write the result of the stage that runs in this block and the algorithm's position to the journal as one entry,
    so that neither this kernel nor a later one repeats an update or draws the same prompts or samples again."""
    whole = isinstance(stage.function, GroupOperation) or stage.role == "prompts"
    with ExitStack() as stack:
        if whole:
            stack.enter_context(uninterrupted())
        if whole or not lab.runner.scheduler.overlaps:  # else a function may wait while other stages end
            stack.enter_context(lab.runner.ownership.one_entry(has_position=whole))
        yield


def check_can_pause(graph: Graph) -> None:
    """Raise `BadInput` if a later call cannot resume the paused responses of this graph."""
    stages = stages_up_to_generation(graph)
    if len(stages) != 2 or stages[1].operation != "generate_sequences":
        raise BadInput(
            f"{graph.title} with pause_after",
            f"only generate_sequences may follow the prompts; here: {', '.join(stage.name for stage in stages[1:])}",
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
    """Run the stages up to generation for the next iteration that has no rollouts; see `Algorithm.draw_ahead`.

    has_run: called with the name of each stage that has run. new_prompts: draw prompts; if False, only resume paused
    responses. generated_before: resume only responses that were last generated before this iteration; None: all paused
    ones. groups: the number of prompts to draw; None: as many as an iteration draws.
    """
    stages, buffer, counters = stages_up_to_generation(graph), lab.buffer, lab.runner.counters
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
            with journaling(lab, stage):
                if stage.role == "prompts":
                    found.made[stage.name] = lab.prompts.ahead(groups or groups_of(stages), found.iteration)
                    buffer.waiting.append(found)
                else:
                    if paused and RESUMED not in found.made:
                        join_paused(lab, stages, found, paused)
                    stage = pausing_stage(stage, found, pause_after)
                    found.made[stage.name], found.generated_in = graph.call(stage, lab, found.made), lab.iteration
                lab.note_position()
            has_run(stage.name)
    finally:
        counters.metrics_ahead = None
    return found.rollouts


def join_paused(lab: Lab, stages: Sequence[Stage], found: WaitingRollouts, paused: Sequence[WaitingRollouts]) -> None:
    """Put paused responses and the new prompts of `found` into one batch; in the buffer `found` replaces `paused`."""
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
        RESUMED: begun.derive("draw", begun.columns, {"iteration": found.iteration}),
    }
    gone = [*map(id, (*paused, found))]
    lab.buffer.waiting = [*(one for one in lab.buffer.waiting if id(one) not in gone), found]


def pausing_stage(stage: Stage, found: WaitingRollouts, pause_after: int | None) -> Stage:
    """Return the generation stage with `pause_after`, and with `resume=True` if `found` resumes paused responses."""
    kwargs = stage.kwargs if pause_after is None else {**stage.kwargs, "pause_after": pause_after}
    if RESUMED not in found.made:
        return replace(stage, kwargs=kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != "samples"}
    return replace(stage, inputs=(RESUMED,), kwargs={**kwargs, "resume": True})


def finish_paused(lab: Lab, graph: Graph, draw: Callable[..., object]) -> None:
    """Resume paused responses until an iteration's groups are complete. draw: resumes all paused responses once."""
    stages, buffer = stages_up_to_generation(graph), lab.buffer
    names = tuple(stage.name for stage in stages)
    while stages and buffer.count(names) < groups_of(stages):
        stopped = any(found.stages == names and RESUMED in found.made and not found.whole for found in buffer.waiting)
        if not stopped and not buffer.part_paused(names):
            break
        draw(new_prompts=False)


def from_buffer(lab: Lab, graph: Graph) -> tuple[dict[str, Any], list[WaitingRollouts]]:
    """Begin an iteration with rollouts from the buffer: return the batches of its stages up to generation, and the
    entries taken out. Too few: the entry whose generation has not ended, if there is one; else {}, []."""
    stages, buffer, counters = stages_up_to_generation(graph), lab.buffer, lab.runner.counters
    names = tuple(stage.name for stage in stages)
    if not stages or stages[0] is not graph.stages[0] or stages[0].role != "prompts":
        return {}, []
    if buffer.count(names) < groups_of(stages):
        begun = [found for found in buffer.waiting if found.stages == names and not found.whole][:1]
        for found in begun:  # its prompts have been drawn; its generation runs in this iteration
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
    if "ending_paused/fraction" in told:  # the calls' metrics also cover responses that were not taken: compute anew
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
    """The number of prompts that an iteration draws. stages: its stages up to generation."""
    first = stages[0]
    return int(first.kwargs.get("n", first.args[0] if first.args else 0))


def generate_ahead(lab: Lab, graph: Graph, staleness: int, draw: Callable[..., object]) -> None:
    """Generate ahead while new rollouts will be at most `staleness` iterations old when an iteration draws them. The
    current iteration has already drawn its own. draw: generates for one more iteration. Each paused response is
    resumed once per iteration."""
    stages, iteration = stages_up_to_generation(graph), lab.iteration
    names, groups, buffer = tuple(stage.name for stage in stages), groups_of(stages), lab.buffer
    while (room := staleness * groups - buffer.count(names, paused=True)) > 0:
        draw(generated_before=iteration, groups=min(room, groups))
    if any(found.made_by(names) and found.generated_in < iteration and found.paused for found in buffer.waiting):
        draw(new_prompts=False, generated_before=iteration)
