"""`lab.buffer`: rollouts that wait to be trained on.

    generation  ── add ──>  iteration 7   iteration 8   iteration 9  ── draw ──>  training
                            4 groups      4 groups      4 groups
                            version 5     version 6     version 7

An algorithm's `run(n, staleness=k)` generates up to k iterations ahead and draws each iteration's rollouts from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


@checks_calls("lab.buffer")
class Buffer:
    """`lab.buffer`: groups of rollouts, oldest first. A group is the responses to one prompt.

    `priority`: None draws the oldest groups first. A function of the frame that `groups()` gives returns a number for
    each group: the largest are drawn first, and equal ones by age. `len` counts groups.
    """

    def __init__(self, counters: Counters, note_change: NoteChange) -> None:
        self._counters = counters
        self._priority = AssignedFunction("lab.buffer.priority", "draws the oldest first", note_change)
        self.waiting: list[WaitingRollouts] = []

    # --- what may start -----------------------------------------------------------------------------------------------

    def may_start(self, groups: PositiveInt, max_staleness: NonNegativeInt) -> bool:
        """Whether generation for one more iteration of so many groups may start, before the rollouts of this iteration
        are drawn: drawn oldest first, they are then at most `max_staleness` iterations behind the weights that they
        train.

        It decides what starts, and nothing else: rollouts that are there are never thrown away for their age.
        """
        return self.count(paused=True) <= groups * max_staleness

    def add(self, batch: Batch) -> None:
        """Have a batch with `response_ids` and `prompt_uid` wait, for `draw`. Raises `UnknownColumn` for other batches.

        An algorithm's `run` draws what it generated itself, by `run` or `draw_ahead`.
        """
        batch.need(("prompt_uid", "response_ids"), "lab.buffer.add")
        iteration = int(batch.meta.get("iteration", self._counters.iteration))
        found = WaitingRollouts(iteration=iteration, made={"added": batch})
        if found.paused:
            raise BadInput(
                f"lab.buffer.add({batch.id}): {len(found.paused)} groups have responses that paused",
                "what waits here is drawn as it is, and nobody goes on with them",
                "lab.actor.generate_sequences(batch, resume=True) first",
            )
        self.waiting.append(found)

    # --- draws --------------------------------------------------------------------------------------------------------

    @property
    def priority(self) -> Priority | None:
        """Which groups are drawn first. After a restore and `wb.attach` it has to be assigned again before a draw."""
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
        """The name of the function that decides, which checkpoints keep, and later kernels."""
        return self._priority.name

    def draw(self, groups: PositiveInt, *, keep: bool = False) -> Batch:
        """A batch of that many whole groups, by `priority`; they leave the buffer. keep: they stay, and may be drawn
        again; `times_drawn` counts it.

        Groups that different weights drew come as one batch, whose meta has the oldest `weights_version`. Raises
        `BadInput` where fewer groups wait, or where they do not have the same columns.
        """
        chosen = self.choose(groups)
        found = rollouts_of(chosen, self._counters.iteration)  # before anything is changed: it may be refused
        if not keep:
            self.take_out(chosen)
        for one, uids in chosen if keep else ():
            one.draw_counts[slice(None) if uids is None else np.isin(one.rows["prompt_uid"], uids)] += 1
        return found.rollouts

    def choose(self, groups: int, stages: Sequence[str] | None = None) -> Chosen:
        """The groups that `draw` would give. stages: only what these made; None: all."""
        self._priority.check(f"lab.buffer.draw({groups})")
        fitting = [found for found in self.waiting if found.made_by(stages) and not found.paused]
        if (there := self.count(stages)) < groups:
            paused = f", and {self.under_way} under way, with responses that have paused" if self.under_way else ""
            raise BadInput(
                f"lab.buffer.draw({groups})", f"{there} groups wait{paused}", "generate first, or draw fewer"
            )
        if self.priority is None and fitting[0].group_count == groups:
            return [(fitting[0], None)]
        places = [(found, uid) for found in fitting for uid in found.versions()]
        order = np.arange(len(places))
        if self.priority is not None:
            frame = self._frame(fitting)
            try:
                given = self.priority(frame)
            except Exception as error:
                raise BadInput(
                    f"lab.buffer.priority raised {said(error)}", "it is given the frame of groups",
                    f"its columns are {', '.join(frame.columns)}",
                ) from error  # fmt: skip
            try:
                numbers = np.asarray(given, dtype=np.float64)
            except (TypeError, ValueError):
                numbers = np.empty(0)
            if numbers.shape != (len(places),) or np.isnan(numbers).any():
                raise BadInput(
                    f"lab.buffer.priority gave {shown(given)}", f"must give one number a group, {len(places)} in all",
                    "return a column of its frame, such as groups.reward.fillna(0)",
                )  # fmt: skip
            order = np.argsort(-numbers, kind="stable")
        chosen = dict[int, tuple[WaitingRollouts, list[int]]]()
        for found, uid in (places[place] for place in sorted(order[:groups].tolist())):
            chosen.setdefault(id(found), (found, []))[1].append(uid)
        return [(found, None if len(uids) == len(found.versions()) else uids) for found, uids in chosen.values()]

    def take_out(self, chosen: Chosen) -> list[WaitingRollouts]:
        """Have groups leave the buffer; what left."""
        taken = [found if uids is None else found.with_groups(uids) for found, uids in chosen]
        for found, uids in chosen:
            place = next(n for n, other in enumerate(self.waiting) if other is found)
            left = [] if uids is None else [uid for uid in found.versions() if uid not in uids]
            self.waiting[place : place + 1] = [found.with_groups(left)] if left else []
        return taken

    def put_back(self, taken: Sequence[WaitingRollouts]) -> None:
        """Have what `take_out` gave wait again, before all others."""
        self.waiting[:0] = taken

    def part_paused(self, stages: Sequence[str], generated_before: int | None = None) -> list[WaitingRollouts]:
        """Part the groups that these stages made, and that are whole, from those with a response that has paused; the
        latter. generated_before: only what was generated before this iteration."""
        waiting, paused = list[WaitingRollouts](), list[WaitingRollouts]()
        for found in self.waiting:
            mine = found.made_by(stages) and (generated_before is None or found.generated_in < generated_before)
            if mine and found.paused:
                others = [uid for uid in found.versions() if uid not in found.paused]
                waiting += [found.with_groups(others)] if others else []
                found = found.with_groups(found.paused) if others else found
                paused.append(found)
            waiting.append(found)
        self.waiting = waiting
        return paused

    def count(self, stages: Sequence[str] | None = None, *, paused: bool = False) -> int:
        """How many groups wait that these stages made; None: all. paused: those with a response that has paused, too;
        it does not wait for responses."""
        made = (found for found in self.waiting if found.made_by(stages))
        return sum(found.group_count for found in made if paused or not found.paused)

    @property
    def under_way(self) -> int:
        """How many groups cannot be drawn yet: a response of theirs has paused, or is generated."""
        begun = (found.group_count for found in self.waiting if found.made and not found.whole)
        return self.count(paused=True) - self.count() + sum(begun)

    def clear(self, *, older_than: NonNegativeInt | None = None) -> int:
        """Throw groups away; how many. older_than: only those whose tokens the actor's weights have left behind by more
        optimizer steps; None: all."""
        kept, most = list[WaitingRollouts](), -1 if older_than is None else older_than
        for found in self.waiting if older_than is not None else ():
            if not found.whole or self.age(found) <= most:
                kept.append(found)
            elif "token_versions" in found.rollouts.names:  # groups of several weights
                young = [uid for uid, version in found.versions().items() if self._steps_since(version) <= most]
                kept += [found.with_groups(young)] if young else []
        before, after = (sum(found.group_count for found in all_ if found.whole) for all_ in (self.waiting, kept))
        self.waiting = kept
        return before - after

    def forget_unmade(self) -> None:
        """Leave out what stages that were stopped, or failed, never made."""
        for found in self.waiting:
            found.forget_unmade()

    # --- looking ------------------------------------------------------------------------------------------------------

    def age(self, found: WaitingRollouts) -> int:
        """Optimizer steps that the actor has taken since the weights that drew it; 0 where these are not known."""
        return self._steps_since(found.version)

    def _steps_since(self, version: int) -> int:
        actor = self._counters.weights.get("actor")
        return 0 if actor is None or version == UNKNOWN else actor.steps - int(version)

    def df(self) -> pd.DataFrame:
        """One row a response: `iteration` (the one that it was generated for last), `prompt_uid`, `weights_version` (of
        each of its tokens, of several the oldest; -1 where it is not known), `age_steps` (optimizer steps of the actor
        since then), `response_tokens`, `reward` (NaN before it is scored), `paused` (it goes on in a later iteration),
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
        """One row a group, oldest first: as `df`, with means over its responses, and `rows`, how many these are."""
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
        ages = [self.age(found) for found in self.waiting if found.whole]
        if not ages:
            return f"<Buffer: {self.under_way} groups under way>" if self.under_way else "<Buffer: nothing waits>"
        told = f"{min(ages)}" if min(ages) == max(ages) else f"{min(ages)} to {max(ages)}"
        paused = f", {self.under_way} under way" if self.under_way else ""
        return f"<Buffer: {len(self)} groups{paused} of {len(ages)} iterations, {told} optimizer steps old>"

    def _repr_html_(self) -> str:
        """A bar for each age of what waits for an iteration, oldest first."""
        frame = self.df()
        if frame.empty:
            return "<div>nothing waits in the buffer</div>"
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
        return svg(drawing, LEFT + BARS + RIGHT, y, "ages of the rollouts that wait")

    # --- for checkpoints and later kernels ----------------------------------------------------------------------------

    def state(self, keep: Callable[[Batch], Mapping[str, Any] | None]) -> list[dict[str, Any]]:
        """What waits, as plain values. keep: how a batch is kept; None: it is not."""
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
        """Go on with what `state` gave, and with `priority_name`. read: the batch that is kept so; None: it is gone."""
        self._priority.go_on(priority)
        self.waiting = []
        for state in states:
            made = {stage: batch for stage, kept in state["made"].items() if (batch := read(kept)) is not None}
            if made:
                self.waiting.append(WaitingRollouts.of_state(state, made))
