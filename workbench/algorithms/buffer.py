"""`lab.buffer`: rollouts that wait until an iteration trains on them.

    generation  ── add ──>  iteration 7   iteration 8   iteration 9  ── draw ──>  training
                            4 groups      4 groups      4 groups
                            version 5     version 6     version 7

An algorithm's `run(n, staleness=k)` generates up to k iterations ahead and draws each iteration's rollouts from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.algorithms.waiting import UNKNOWN, Chosen, WaitingRollouts, rollouts_of
from workbench.batches.batch import Batch
from workbench.display.html import svg
from workbench.errors import BadInput
from workbench.errors.plain_text import said, shown
from workbench.stages.ledger import Counters
from workbench.support.assigned import AssignedFunction, NoteChange
from workbench.support.checked_calls import checks_calls
from workbench.support.validation import NonNegativeInt, PositiveInt

LEFT, BARS, RIGHT, LINE, HEAD = 110, 280, 190, 18, 24

if TYPE_CHECKING:
    Priority = Callable[[pd.DataFrame], Any]


@checks_calls("lab.buffer", internal="choose count forget_unmade load part_paused state take_out")
class Buffer:
    """`lab.buffer`: groups of rollouts, oldest first. A group is the responses to one prompt.

    `priority`: None draws the oldest groups first. A function takes the frame of `groups()` and returns a number per
    group: groups with the largest numbers are drawn first, equal numbers by age. `len` counts groups.
    """

    def __init__(self, counters: Counters, note_change: NoteChange) -> None:
        self._counters = counters
        self._priority = AssignedFunction("lab.buffer.priority", "draws the oldest first", note_change)
        self.waiting: list[WaitingRollouts] = []

    # --- start of generation, and additions ---------------------------------------------------------------------------

    def may_start(self, groups: PositiveInt, max_staleness: NonNegativeInt) -> bool:
        """Whether generation of `groups` more groups may start before the current iteration has drawn its rollouts.
        If so, and if the oldest groups are drawn first, the new ones will be at most `max_staleness` iterations older
        than the weights that they train.

        This only limits what starts: rollouts in the buffer are never thrown away for their age.
        """
        return self.count(paused=True) <= groups * max_staleness

    def add(self, batch: Batch) -> None:
        """Put a batch with `response_ids` and `prompt_uid` into the buffer, for `draw`; other batches raise
        `UnknownColumn`. An algorithm's `run` does not draw it: it draws only rollouts that `run` or `draw_ahead` made.
        """
        batch.need(("prompt_uid", "response_ids"), "lab.buffer.add")
        iteration = int(batch.meta.get("iteration", self._counters.iteration))
        found = WaitingRollouts(iteration=iteration, made={"added": batch})
        if found.paused:
            raise BadInput(
                f"lab.buffer.add({batch.id}): {len(found.paused)} groups have paused responses",
                "the buffer returns groups as they were added, and does not continue their responses",
                "finish them first: lab.actor.generate_sequences(batch, resume=True)",
            )
        self.waiting.append(found)

    # --- draws --------------------------------------------------------------------------------------------------------

    @property
    def priority(self) -> Priority | None:
        """The function that orders groups for draws. After a restore or `wb.attach`, assign it again before a draw."""
        return self._priority.function

    @priority.setter
    def priority(self, priority: Priority | None) -> None:
        if priority is not None and not callable(priority):
            raise BadInput(
                f"lab.buffer.priority = {shown(priority)}", "must be a function of the frame of groups, or None",
                "lab.buffer.priority = lambda groups: -groups.age_steps",
            )  # fmt: skip
        self._priority.assign(priority)

    @property
    def priority_name(self) -> str | None:
        """The name of the `priority` function, for checkpoints and later kernels, which cannot keep the function."""
        return self._priority.name

    def draw(self, groups: PositiveInt, *, keep: bool = False) -> Batch:
        """Take `groups` complete groups out of the buffer, by `priority`, and return them as one batch. keep: leave
        them in the buffer, where they can be drawn again; `times_drawn` counts the draws.

        If the groups come from different weights, the batch's meta has the oldest `weights_version`. Raises `BadInput`
        if fewer groups wait, or if the groups do not have the same columns.
        """
        chosen = self.choose(groups)
        found = rollouts_of(chosen, self._counters.iteration)  # first, before any change: this may raise
        if not keep:
            self.take_out(chosen)
        for one, uids in chosen if keep else ():
            one.draw_counts[np.isin(one.rows["prompt_uid"], uids)] += 1
        return found.rollouts

    def choose(self, groups: int, stages: Sequence[str] | None = None) -> Chosen:
        """Return the groups that `draw` would take. stages: only groups made by these stages; None: all groups."""
        self._priority.check(f"lab.buffer.draw({groups})")
        fitting = [found for found in self.waiting if found.made_by(stages) and not found.paused]
        if (there := self.count(stages)) < groups:
            paused = f", and {self.under_way} more have paused responses" if self.under_way else ""
            raise BadInput(
                f"lab.buffer.draw({groups})", f"{there} groups wait{paused}", "generate first, or draw fewer"
            )
        every = ((found, uid) for found in fitting for uid in found.versions())
        if self.priority is None:
            places = list(islice(every, groups))  # no more: others may still be under way, and would be waited for
        else:
            places = list(every)
            frame = self._frame(fitting)
            try:
                given = self.priority(frame)
            except Exception as error:
                raise BadInput(
                    f"lab.buffer.priority raised {said(error)}", "its argument is the frame of groups",
                    f"this frame has the columns {', '.join(frame.columns)}",
                ) from error  # fmt: skip
            try:
                numbers = np.asarray(given, dtype=np.float64)
            except (TypeError, ValueError):
                numbers = np.empty(0)
            if numbers.shape != (len(places),) or np.isnan(numbers).any():
                raise BadInput(
                    f"lab.buffer.priority gave {shown(given)}", f"must return one number a group, {len(places)} in all",
                    "return a column of its frame, such as groups.reward.fillna(0)",
                )  # fmt: skip
            places = [places[place] for place in sorted(np.argsort(-numbers, kind="stable")[:groups].tolist())]
        chosen = dict[int, tuple[WaitingRollouts, list[int]]]()
        for found, uid in places:
            chosen.setdefault(id(found), (found, []))[1].append(uid)
        return list(chosen.values())

    def take_out(self, chosen: Chosen) -> list[WaitingRollouts]:
        """Take groups out of the buffer and return them."""
        taken = [found.with_groups(uids) for found, uids in chosen]
        for found, uids in chosen:
            place = next(n for n, other in enumerate(self.waiting) if other is found)
            left = [uid for uid in found.versions() if uid not in uids]
            self.waiting[place : place + 1] = [found.with_groups(left)] if left else []
        return taken

    def part_paused(self, stages: Sequence[str], generated_before: int | None = None) -> list[WaitingRollouts]:
        """Split complete groups made by these stages from groups with a paused response, and return the latter.
        generated_before: only groups that were last generated before this iteration."""
        waiting, paused = list[WaitingRollouts](), list[WaitingRollouts]()
        for found in self.waiting:
            mine = found.made_by(stages) and (generated_before is None or found.generated_in < generated_before)
            if mine and found.paused:
                others = [uid for uid in found.versions() if uid not in found.paused]
                waiting += [found.with_groups(others)] if others else []
                found = found.with_groups(found.paused)
                paused.append(found)
            waiting.append(found)
        self.waiting = waiting
        return paused

    def count(self, stages: Sequence[str] | None = None, *, paused: bool = False) -> int:
        """The number of waiting groups made by these stages; None: by any. paused: also count groups with a paused
        response; this does not block until responses are generated."""
        made = (found for found in self.waiting if found.made_by(stages))
        return sum(found.group_count for found in made if paused or not found.paused)

    @property
    def under_way(self) -> int:
        """The number of groups that cannot be drawn yet, because a response has paused or is being generated."""
        begun = (found.group_count for found in self.waiting if found.made and not found.whole)
        return self.count(paused=True) - self.count() + sum(begun)

    def clear(self, *, older_than: NonNegativeInt | None = None) -> int:
        """Throw groups away and return how many. older_than: only groups with a token that is more optimizer steps
        older than the actor's weights; None: all."""
        kept, most = list[WaitingRollouts](), -1 if older_than is None else older_than
        for found in self.waiting if older_than is not None else ():
            if not found.whole or self._steps_since(found.version) <= most:
                kept.append(found)
            elif "token_versions" in found.rollouts.names:  # the groups may come from different weights
                young = [uid for uid, version in found.versions().items() if self._steps_since(version) <= most]
                kept += [found.with_groups(young)] if young else []
        before, after = (sum(found.group_count for found in all_ if found.whole) for all_ in (self.waiting, kept))
        self.waiting = kept
        return before - after

    def forget_unmade(self) -> None:
        """Remove batches that will never be made, because their stage was stopped or failed."""
        for found in self.waiting:
            for batch in found.made.values():
                batch.settle(wait=False)
            found.made = {stage: batch for stage, batch in found.made.items() if not batch.pending}

    # --- looking ------------------------------------------------------------------------------------------------------

    def _steps_since(self, version: int) -> int:
        """The actor's optimizer steps since these weights; 0 if they are not known."""
        actor = self._counters.weights.get("actor")
        return 0 if actor is None or version == UNKNOWN else actor.steps - int(version)

    def df(self) -> pd.DataFrame:
        """Return a frame with one row per response: `iteration` (that it was last generated for), `prompt_uid`,
        `weights_version` (the oldest among its tokens; -1 if unknown), `age_steps` (the actor's optimizer steps since
        that version), `response_tokens`, `reward` (NaN before it is scored), `paused` (a later iteration resumes it),
        `times_drawn`, `batch`."""
        rows = [
            (found.iteration, uid, version, self._steps_since(version), *row, found.rollouts.id)
            for found in self.waiting
            if found.whole
            for uid, version, *row in zip(*found.rows.values(), found.draw_counts, strict=True)
        ]
        names = ("iteration", "prompt_uid", "weights_version", "age_steps", "response_tokens", "reward", "paused")
        return pd.DataFrame(rows, columns=[*names, "times_drawn", "batch"])

    def groups(self) -> pd.DataFrame:
        """Return a frame with one row per group, oldest first: columns as in `df`, with means over the group's
        responses, and `rows`, the number of responses."""
        return self._frame([found for found in self.waiting if found.whole])

    def _frame(self, waiting: Sequence[WaitingRollouts]) -> pd.DataFrame:
        rows = []
        for found in waiting:
            for uid, version in found.versions().items():
                here = found.rows["prompt_uid"] == uid
                _, _, tokens, rewards, _ = (column[here] for column in found.rows.values())
                drawn = int(found.draw_counts[here].max())
                means = float(tokens.mean()), float(rewards.mean())
                rows.append((found.iteration, uid, len(tokens), version, self._steps_since(version), *means, drawn))
        names = ("iteration", "prompt_uid", "rows", "weights_version", "age_steps", "response_tokens", "reward")
        return pd.DataFrame(rows, columns=[*names, "times_drawn"])

    def __len__(self) -> int:
        return self.count()

    def __repr__(self) -> str:
        ages = [self._steps_since(found.version) for found in self.waiting if found.whole]
        if not ages:
            return f"<Buffer: {self.under_way} groups under way>" if self.under_way else "<Buffer: empty>"
        told = f"{min(ages)}" if min(ages) == max(ages) else f"{min(ages)} to {max(ages)}"
        paused = f", {self.under_way} under way" if self.under_way else ""
        return f"<Buffer: {len(self)} groups{paused} of {len(ages)} iterations, {told} optimizer steps old>"

    def _repr_html_(self) -> str:
        """A chart of the waiting rollouts' ages, one bar per iteration and age, oldest first."""
        frame = self.df()
        if frame.empty:
            return "<div>the buffer is empty</div>"
        title = "optimizer steps since the weights that generated the rollouts"
        drawing, y = f'<text x="0" y="14" fill="currentColor" font-weight="600">{title}</text>', HEAD
        bars = frame.groupby(["iteration", "age_steps"], sort=False)["paused"].agg(["size", "sum"])
        for (iteration, age), rows, paused in bars.itertuples():
            width = max(1, BARS * age / (frame["age_steps"].max() or 1))
            told = f"{age} steps, {rows} responses" + (f", {paused} paused" if paused else "")
            drawing += (
                f'<text x="0" y="{y + 12}" fill="currentColor">iteration {iteration}</text>'
                f'<rect x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{LINE - 5}" fill="currentColor" '
                f'fill-opacity=".4"/><text x="{LEFT + width + 6:.1f}" y="{y + 12}" fill="currentColor">{told}</text>'
            )
            y += LINE
        return svg(drawing, LEFT + BARS + RIGHT, y, "ages of the waiting rollouts")

    # --- for checkpoints and later kernels ----------------------------------------------------------------------------

    def state(self, keep: Callable[[Batch], Mapping[str, Any] | None]) -> list[dict[str, Any]]:
        """Return the buffer's entries as plain values. keep: returns how a batch is kept; None: it is not kept."""
        states = []
        for found in self.waiting:
            kept = {stage: value for stage, batch in found.made.items() if (value := keep(batch)) is not None}
            if kept:
                states.append(found.state(kept))
        return states

    def load(
        self,
        states: Sequence[Mapping[str, Any]],
        priority: str | None,
        read: Callable[[Mapping[str, Any]], Batch | None],
    ) -> None:
        """Restore entries from `state` and a `priority_name`. read: returns a batch that was kept; None: it is gone."""
        self._priority.go_on(priority)
        self.waiting = []
        for state in states:
            made = {stage: batch for stage, kept in state["made"].items() if (batch := read(kept)) is not None}
            if made:
                self.waiting.append(WaitingRollouts.of_state(state, made))
