"""The placement editor: roles as cards in pools, a draft of another placement, what it would cost, and the move."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import replace
from html import escape
from typing import Any, ClassVar

from workbench.display.html import bytes_text, seconds_text
from workbench.display.pools import Card, PoolBox, pools_html
from workbench.errors import BadInput, NotFound, WorkbenchError
from workbench.placement import ENVIRONMENT, ROLLOUT, Placement, Pool
from workbench_widgets import placement_edits as edits
from workbench_widgets.placement_costs import Answer, Costs, Question
from workbench_widgets.placement_html import change_html, inside_of_card, memory_html, note_of, offers_html
from workbench_widgets.view import View, button, choice, entry

STILL_WAIT_S = 20.0  # how long a still picture waits for the hosts


class PlacementEditor(View):
    """Where roles run, and a draft of another placement: its costs by `lab.diff`, and the move by `lab.move`.

    draft: the placement that is edited; None: the one that there is. It follows what cells move.
    """

    name: ClassVar[str] = "placement"
    title: ClassVar[str] = "Placement"
    script: ClassVar[bool] = True

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self._draft: Placement | None = None
        self._base: Placement = lab.placement  # what there was when the draft was begun
        self._before: list[Placement] = []  # what `Undo` goes back to, the last one first to go
        self._costs = Costs(lab)
        self._opened = ""  # the role whose card is open
        self._refused = self._asked_again = 0
        self._moving = False
        self._numbers: dict[tuple[str, int], tuple[int, ...]] = {}  # devices of drafted pools, as the hosts said last

    @property
    def draft(self) -> Placement | None:
        """What is edited; None where that is the placement that there is."""
        if self._draft is not None and edits.same(self._draft, self.lab.placement):
            self._draft = None
        return self._draft

    # --- what it shows ------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        return self.draft, self._base, self._opened, self._refused, self._moving, self._costs.count, self._question()

    def controls(self) -> str:
        draft, answer = self.draft, self._answer()
        off = ""
        if draft is None:
            off = "nothing is drafted: drag a role onto another pool"
        elif answer is None:
            off = "asking what it would move"
        elif answer.change is None or answer.change.fits is False:
            off = "it cannot be done: see below"
        back = self._before[-1] if self._before else None
        has_rollout = (draft or self.lab.placement).has_rollout
        return "".join(
            [
                button("Apply", "apply", drives=True, off=off, title="move the live models to the draft"),
                button("Discard draft", "discard", off="" if draft is not None else "nothing is drafted"),
                button(
                    f"Undo ({len(self._before)})" if back else "Undo", "undo", drives=True,
                    off="" if back else "nothing was moved from here", title=f"move back to {back}",
                ),
                button(
                    "Drop rollout pool" if has_rollout else "Add rollout pool", "rollout", off=self._no_rollout(),
                    title="whether rollout workers on devices of their own generate for the actor",
                ),
                button("Ask again", "ask_again", title="ask the hosts again what they hold"),
            ]
        )  # fmt: skip

    def payload(self, *, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
        if not self._moving:
            self._costs.want(self._question())
        return {"html": self._html(controls=True), "refused": self._refused}, []

    def picture(self) -> str:
        self._costs.want(self._question())
        self._costs.wait(STILL_WAIT_S)
        return self._html(controls=False)

    def text(self) -> str:
        draft = self.draft
        return f"placement: {self.lab.placement}" + (f"\n  draft: {draft}" if draft else "")

    def _question(self) -> Question:
        steps = tuple(weights.steps for weights in self.lab.weights.values())
        live, asked = self.lab.placement, self._asked_again
        # a role that has made its first step has moments to move
        trained = tuple(count > 0 for count in steps)
        return Question(self.draft or live, live, (self.lab.iteration, steps, asked), (trained, asked))

    def _answer(self) -> Answer | None:
        return self._costs.answer(self._question())

    def _html(self, *, controls: bool) -> str:
        draft, answer = self.draft, self._answer()
        shown = draft or self.lab.placement
        change = None if answer is None else answer.change
        if change is not None:
            self._numbers |= {(p.name, p.devices): change.new_numbers[p.name] for p in change.new.pools}
        boxes = [self._box(pool, answer, controls=controls) for pool in shown.pools]
        if (environments := shown.environments) is not None:
            boxes.append(_box_of_processes(environments, controls=controls))
        parts = [self._head(draft, controls=controls), pools_html(boxes, _NEW_POOL if controls else "")]
        if answer is None:
            parts.append("<p>asking the hosts what it would move ...</p>" if draft else "<p>asking the hosts ...</p>")
        elif answer.error:
            parts.append(f"<p>\N{MULTIPLICATION X} {escape(answer.error)}</p>")
        if change is not None:
            parts.append(change_html(change) if draft is not None else "")
            parts.append(memory_html(change, moves=draft is not None))
        known = self._costs.offers_are_of(self._question())
        there = replace(self.lab.placement, environments=None)  # plans are of devices
        parts.append(offers_html(self._costs.offers, there, known=known, controls=controls))
        return "".join(parts)

    def _head(self, draft: Placement | None, *, controls: bool) -> str:
        there = self.lab.placement
        lines = [f"<b>live:</b> {escape(str(there))}"]
        if draft is not None:
            lines = [
                f"<b>draft:</b> {escape(str(draft))}",
                f'<span style="opacity:.8">live: {escape(str(there))}</span>',
            ]
            if not edits.same(self._base, there):
                keep = button("Keep it", "keep", title="go on with this draft") if controls else ""
                lines.append(
                    f"\N{WARNING SIGN} This draft was made when the placement was {escape(str(self._base))}, and that "
                    f"has changed since: costs and Apply are from what is live. {keep}"
                )
        if self.lab.description.actor_is_reference:
            lines.append("The reference is the actor without its adapter, and stands where the actor does.")
        if self.lab.description.backend == "inline":
            lines.append(
                "The inline backend has one process, the kernel, and one device: roles cannot move. "
                "Open the workbench with backend='ray' for that."
            )
        return "".join(f"<div>{line}</div>" for line in lines)

    def _box(self, pool: Pool, answer: Answer | None, *, controls: bool) -> PoolBox:
        kind, there = self.lab.description.device, {(p.name, p.devices) for p in self.lab.placement.pools}
        lives = (pool.name, pool.devices) in there
        if lives:
            devices = [device for name, device in self.lab.devices() if name == pool.name]
        elif numbers := self._numbers.get((pool.name, pool.devices)):
            devices = [f"{kind}:{n}" for n in numbers]
        else:  # the hosts have not said yet which are free
            devices = ["a free GPU" if kind == "cuda" else "a free slot"] * pool.devices
        note = "" if lives else "new processes"
        cards = [self._card(role, pool, answer, controls=controls) for role in pool.roles]
        if not controls:
            return PoolBox(pool.name, devices, cards, note)
        return PoolBox(
            pool.name, devices, cards, note, f'data-pool="{escape(pool.name)}"', _sizes(pool, "device", "devices")
        )

    def _card(self, role: str, pool: Pool, answer: Answer | None, *, controls: bool) -> Card:
        shown, groups = self.draft or self.lab.placement, self.lab.groups
        layout = shown.layout_of(role)
        sizes = f"p={layout.p} t={layout.t} d={layout.d}"
        model = "the actor's model" if role == ROLLOUT else groups[role].model if role in groups else ""
        note = note_of(role, shown, self.lab.placement)
        if not controls:
            return Card(role, model, sizes, note)
        attributes = (
            f'class="wb-pe-card" data-role="{role}" data-key="card-{role}" tabindex="0" role="group" data-act="open" '
            f"data-given='{escape(json.dumps({'role': role}))}' aria-roledescription=\"card\" "
            f'aria-label="{role} in pool {escape(pool.name)}{": " + escape(note) if note else ""}" '
            'title="drag it onto a pool; left and right arrows move it, Enter opens it, Escape takes it back"'
        )
        pools = {name: name for name in (*(other.name for other in shown.pools), edits.NEW_POOL)}
        inside = choice("pool", "put", pools, pool.name, role=role)
        if role == self._opened:
            ranks = [] if answer is None else [row for row in answer.ranks if row["role"] == role]
            inside += inside_of_card(role, layout, cut=self._can_be_cut(role), ranks=ranks)
        return Card(role, model, sizes, note, attributes, inside)

    def _can_be_cut(self, role: str) -> bool:
        """Whether p and t are its to choose: a function has no model, rollout workers have tensor groups."""
        return role != ROLLOUT and role in self.lab.groups and self.lab.groups[role].spec.name is not None

    def _no_rollout(self) -> str:
        description = self.lab.description
        if "actor" not in description.models or description.generation is None:
            return "no actor that generates is here"
        return ""

    # --- editing the draft --------------------------------------------------------------------------------------------

    def on_put(self, role: str, value: str) -> None:
        """A role into a pool, or `edits.NEW_POOL`."""
        self._edit(lambda placement: edits.put(placement, role, value))

    def on_step(self, role: str, by: int) -> None:
        self._edit(lambda placement: edits.step(placement, role, by))

    def on_take_back(self, role: str) -> None:
        self._edit(lambda placement: edits.take_back(placement, role, self.lab.placement))

    def on_lay_out(self, role: str, axis: str, value: Any) -> None:
        self._edit(lambda placement: edits.lay_out(placement, role, axis, value))

    def on_resize(self, pool: str, value: Any) -> None:
        self._edit(lambda placement: edits.resize(placement, pool, value))

    def on_grow(self, pool: str, by: int) -> None:
        shown = self.draft or self.lab.placement
        sizes = {other.name: other.devices for other in (*shown.pools, shown.environments) if other is not None}
        self._edit(lambda placement: edits.resize(placement, pool, sizes.get(pool, 0) + by))

    def on_rollout(self) -> None:
        self._edit(
            lambda placement: placement.without(ROLLOUT) if placement.has_rollout else edits.with_rollout(placement)
        )

    def on_take(self, name: str) -> None:
        """A plan that is on offer."""
        plan = next((offer.plan for offer in self._costs.offers if offer.plan.name == name), None)
        if plan is None or plan.placement is None:
            raise BadInput(f"plan {name!r}", plan.why if plan else "it is not on offer")
        wanted = plan.placement
        self._edit(lambda shown: replace(wanted, environments=shown.environments))

    def on_suggest(self) -> None:
        """Calibrate the workbench by its last iteration, and offer the quickest placements."""
        self.lab.calibrate()
        self._asked_again += 1

    def on_open(self, role: str) -> None:
        """Open a card, or shut it."""
        self._opened = "" if role == self._opened else role

    def on_keep(self) -> None:
        self._base = self.lab.placement

    def on_discard(self) -> None:
        self._draft = None

    def on_ask_again(self) -> None:
        self._asked_again += 1

    def _edit(self, change: Callable[[Placement], Placement]) -> None:
        """Draft another placement; one that this workbench could not be opened with is refused."""
        before = self.draft
        try:
            wanted = change(before or self.lab.placement)
            self.lab.description.placed(wanted)
        except WorkbenchError:
            self._refused += 1
            raise
        if before is None:
            self._base = self.lab.placement
        self._draft = wanted
        self.driver.outcome = (
            f"draft: {wanted}" if self.draft is not None else "nothing is drafted: all is as it is live"
        )

    # --- moving -------------------------------------------------------------------------------------------------------

    def on_apply(self) -> None:
        """Move the live models to the draft."""
        draft = self.draft
        if draft is None:
            raise BadInput("Apply", "nothing is drafted", "drag a role onto another pool")

        def done(before: Placement) -> None:
            self._before.append(before)
            self._draft = None

        self._move(f"moving to {draft}", draft, done)

    def on_undo(self) -> None:
        """Move back to the placement before the last move from here."""
        if not self._before:
            raise NotFound("a move to undo", "nothing was moved from here")
        self._move(f"moving back to {self._before[-1]}", self._before[-1], lambda _: self._before.pop())

    def _move(self, what: str, placement: Placement, done: Callable[[Placement], object]) -> None:
        def move() -> str:
            before, self._moving = self.lab.placement, True
            try:
                change = self.lab.move(placement)
                done(before)
            finally:
                self._moving = False
            told = f"moved {bytes_text(change.total_bytes)} in {seconds_text(change.took_s)}"
            if change.expected_s:
                told += f", predicted {change.expected_text}"
            return told

        self.driver.start(what, move)


_NEW_POOL = (
    f'<section class="wb-pe-new" data-pool="{edits.NEW_POOL}" aria-label="{edits.NEW_POOL}">'
    f"+ {edits.NEW_POOL}<br>drop a role here</section>"
)


def _sizes(pool: Pool, one: str, many: str) -> str:
    """Controls of how many devices a pool has, or processes."""
    return (
        button("\N{MINUS SIGN}", "grow", title=f"one {one} less for {pool.name}", pool=pool.name, by=-1)
        + entry(many, "resize", pool.devices, kind="number", size=3, pool=pool.name)
        + button("+", "grow", title=f"one {one} more for {pool.name}", pool=pool.name, by=1)
    )


def _box_of_processes(pool: Pool, *, controls: bool) -> PoolBox:
    """The pool of environments: its processes run beside the ranks that generate."""
    names = [f"process {number}" for number in range(pool.devices)]
    card = Card(ENVIRONMENT, "your environment", "on the CPU, beside the ranks that generate")
    head = _sizes(pool, "process", "processes") if controls else f"<span>{pool.devices} processes</span>"
    return PoolBox(pool.name, names, [card], head=head)
