"""The placement editor: roles as cards in pools, a draft of another placement, its cost, and the move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest
from typing import Any, NamedTuple

from workbench.display import devices as pools
from workbench.display.html import Markup, bytes_text, folded, seconds_text, table
from workbench.display.palette import RoleStyle, role_styles
from workbench.errors import BadInput, NotFound, WorkbenchError
from workbench.errors.plain_text import said
from workbench.placement import ENVIRONMENT, ROLLOUT, Placement, Pool
from workbench.placement.change import SIGNS, PlacementChange
from workbench.placement.placement import named_placements
from workbench_widgets.view import View, button, entry, whole_number

# Iterations that generation runs ahead -> the name of the fastest placement
SUGGESTED = {0: ("fastest", "second", "third"), 1: ("staleness=1",)}


@dataclass(frozen=True)
class Offer:
    """An offered placement and its changes. placement, change: None if it is impossible; why: the reason. predicted_s:
    seconds of an iteration; None if it is not predicted; unpredicted: the reason."""

    name: str
    placement: Placement | None
    why: str = ""
    predicted_s: float | None = None
    unpredicted: str = ""
    change: PlacementChange | None = None


def offers(lab: Any) -> list[Offer]:
    """The named placements; then the fastest ones by the cost model fitted to this workbench (none before
    `lab.calibrate()`); last the fastest one for `run(n, staleness=1)`. Their costs are not computed yet."""
    description = lab.description
    roles = [description.lead, *(role for role in lab.placement.roles if role != description.lead)]
    devices = 1 if description.backend == "inline" else description.devices or lab.placement.devices
    found = []
    for name, placement in named_placements(roles, devices).items():
        if isinstance(placement, BadInput):
            found.append(Offer(name, None, f"{placement.value}: {placement.rule}"))
        else:
            found.append(_predicted(lab, Offer(name, placement)))
    for staleness, names in SUGGESTED.items():
        try:
            fastest = lab.suggest(devices=devices, top=len(names), staleness=staleness)
        except WorkbenchError:
            continue
        # by the same simulation as the others: calls of different pools overlap, which the search ignores
        suggested = [_predicted(lab, Offer("", plan.placement), staleness) for plan in fastest]
        suggested.sort(key=lambda offer: offer.predicted_s or 0.0)
        found += [replace(offer, name=name) for name, offer in zip(names, suggested, strict=False)]
    return found


def _predicted(lab: Any, offer: Offer, staleness: int = 0) -> Offer:
    try:
        return replace(offer, predicted_s=float(lab.predict(offer.placement, staleness=staleness).iteration_s))
    except WorkbenchError as error:
        return replace(offer, unpredicted=str(error))


def same(one: Placement, other: Placement) -> bool:
    """Whether two placements differ only in the order of their pools and roles."""
    pools = [{pool.name: (pool.devices, frozenset(pool.roles)) for pool in each.pools} for each in (one, other)]
    return pools[0] == pools[1] and (one.layouts, one.environments) == (other.layouts, other.environments)


class Question(NamedTuple):
    """placement: the one asked about; live: the one to move from. state: other inputs of the answer; offers: other
    inputs of the offers' costs."""

    placement: Placement
    live: Placement
    state: Hashable
    offers: Hashable


class Costs:
    """Answers the newest question, then computes the costs of the offers, in a thread because hosts may be slow. count:
    of answers so far."""

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self.count = 0
        self.offers: list[Offer] = []
        self._offered: Hashable = None
        self._answer: tuple[Question, PlacementChange | str] | None = None
        self._wanted: Question | None = None
        self._thread: threading.Thread | None = None  # that of the newest question
        self._lock = threading.Lock()

    def want(self, question: Question) -> None:
        """Start to answer a question; returns at once."""
        if question != self._wanted:
            self._wanted = question
            self._thread = threading.Thread(target=self._find, args=(question,), name="workbench-costs", daemon=True)
            self._thread.start()

    def answer(self, question: Question) -> PlacementChange | str | None:
        """What the placement would change, or why it is impossible; None if not known yet."""
        answered = self._answer
        return answered[1] if answered is not None and answered[0] == question else None

    def offers_are_of(self, question: Question) -> bool:
        """Whether the offers' costs were computed from the question's live placement."""
        return self._offered == (question.live, question.offers)

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is answered; returns whether that happened within the time."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _find(self, question: Question) -> None:
        with self._lock:
            if question == self._wanted:  # else a newer one waits
                self._answer = question, self._diff(question.placement)
                self.count += 1
            if question == self._wanted and not self.offers_are_of(question):
                self.offers = [self._priced(offer) for offer in offers(self._lab)]
                self._offered = question.live, question.offers
                self.count += 1

    def _priced(self, offer: Offer) -> Offer:
        found = offer.why if offer.placement is None else self._diff(offer.placement)
        return replace(offer, why=found) if isinstance(found, str) else replace(offer, change=found)

    def _diff(self, placement: Placement) -> PlacementChange | str:
        try:
            change: PlacementChange = self._lab.diff(placement)
        except Exception as error:  # also of hosts that end meanwhile: shown where the answer would be
            return str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {said(error)}"
        return change


STILL_WAIT_S = 20.0  # how long a still picture waits for the hosts
NEW_POOL = "new pool"  # no identifier, so no pool has this name
_NEW_POOL = (
    f'<section class="wb-pe-new" data-pool="{NEW_POOL}" aria-label="{NEW_POOL}">'
    f"+ {NEW_POOL}<br>drop a role here</section>"
)


class PlacementEditor(View):
    """Where roles run, and a draft of another placement: its costs by `lab.diff`, and the move by `lab.move`.

    draft: the edited placement; None: the live one. Costs of a draft are always relative to the live placement.
    """

    name, title, script = "placement", "Placement", True

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self._draft: Placement | None = None
        self._before: list[Placement] = []  # what `Undo` goes back to, the last one first to go
        self._costs = Costs(lab)
        self._refused = self._suggested = 0
        self._moving = False

    @property
    def draft(self) -> Placement | None:
        """The edited placement; None if it equals the live one."""
        if self._draft is not None and same(self._draft, self.lab.placement):
            self._draft = None
        return self._draft

    # --- what it shows ------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        return self._refused, self._moving, self._costs.count, self._question()

    def controls(self) -> str:
        draft, answer = self.draft, self._costs.answer(self._question())
        off = ""
        if draft is None:
            off = "there is no draft: drag a role onto another pool"
        elif answer is None:
            off = "asking the hosts what would move"
        elif isinstance(answer, str) or answer.fits is False:
            off = "this change is not possible: see below"
        back = self._before[-1] if self._before else None
        undo, none = f"Undo ({len(self._before)})" if back else "Undo", "" if back else "this view has moved nothing"
        return (
            button("Apply", "apply", drives=True, off=off, title="move the live models to the draft")
            + button("Discard draft", "discard", off="" if draft is not None else "there is no draft")
            + button(undo, "undo", drives=True, off=none, title=f"move back to {back}")
        )

    def payload(self) -> tuple[dict[str, Any], list[bytes]]:
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
        live = self.lab.placement
        # a role that has made its first step has moments to move
        trained = tuple(count > 0 for count in steps)
        return Question(self.draft or live, live, (self.lab.iteration, steps), (trained, self._suggested))

    def _html(self, *, controls: bool) -> str:
        draft, live, answer = self.draft, self.lab.placement, self._costs.answer(self._question())
        change = answer if isinstance(answer, PlacementChange) else None
        parts = [self._head(), self._pools(change, controls=controls)]
        if answer is None:
            parts.append("<p>asking the hosts what would move ...</p>")
        elif isinstance(answer, str):
            parts.append(f"<p>\N{MULTIPLICATION X} {escape(answer)}</p>")
        if change is not None:
            traffic = folded("who sends to whom", change.traffic()._repr_html_()) if change.total_bytes else ""
            told = change.memory_html(moves=False) if draft is None else change.words_html() + traffic
            parts.append(
                f'<section aria-label="{"memory" if draft is None else "what the draft would change"}">{told}</section>'
            )
        there = replace(live, environments=None)  # offers are of devices
        if self._costs.offers_are_of(self._question()):
            parts.append(offers_html(self._costs.offers, there, controls=controls))
        return "".join(parts)

    def _head(self) -> str:
        draft, live = self.draft, escape(str(self.lab.placement))
        lines = [f"<b>live:</b> {live}"]
        if draft is not None:
            lines = [f"<b>draft:</b> {escape(str(draft))}", f'<span style="opacity:.8">live: {live}</span>']
        if self.lab.description.actor_is_reference:
            lines.append("The reference is the actor without its adapter, on the actor's devices.")
        if self.lab.description.backend == "inline":
            lines.append(
                "The inline backend has one process, the kernel, and one device: roles cannot move. "
                "Open the workbench with backend='ray' to move roles."
            )
        return "".join(f"<div>{line}</div>" for line in lines)

    def _devices(self, pool: str) -> list[str]:
        """The devices of a live pool, with their machines if there are several."""
        hosts = self.lab.hosts
        machines = hosts.backend.machines_now()
        several = len(set(machines.values())) > 1
        infos = [info for info in hosts.infos if info.pool == pool]
        return [f"{machines.get(info.name, '')} {info.device}" if several else info.device for info in infos]

    def _pools(self, change: PlacementChange | None, *, controls: bool) -> str:
        shown, live, cuda = self.draft or self.lab.placement, self.lab.placement, self.lab.description.device == "cuda"
        there, styles = {(pool.name, pool.devices) for pool in live.pools}, role_styles([*shown.roles, ENVIRONMENT])
        changed = [role for role in change.roles if role.action != "stays"] if change is not None else []
        notes = {one.role: f"{one.action} from {one.old_pool}" if one.old_pool else one.action for one in changed}
        boxes = list[str]()
        for pool in shown.pools:
            lives = (pool.name, pool.devices) in there
            if lives:
                devices = self._devices(pool.name)
            elif change is not None:
                new = [place for place in zip_longest(change.places, change.machines) if place[0].new]
                devices = [f"{m or ''} {change.device}:{p.device}".strip() for p, m in new if p.pool == pool.name]
            else:  # the hosts have not said yet which are free
                devices = ["a free GPU" if cuda else "a free slot"] * pool.devices
            cards = [
                self._card(role, styles[role], pool, notes.get(role, ""), controls=controls) for role in pool.roles
            ]
            acts, size = (f'data-pool="{escape(pool.name)}"', _size(pool, "devices")) if controls else ("", "")
            note = "" if lives else "new processes"
            boxes.append(pools.box(pool.name, devices, cards, note=note, size=size, attributes=acts))
        if (apart := shown.environments) is not None:
            size = _size(apart, "processes") if controls else f"<span>{apart.devices} processes</span>"
            words = "your environment", "on the CPU, beside the ranks that generate"
            card = pools.card(ENVIRONMENT, styles[ENVIRONMENT], words)
            boxes.append(pools.box(apart.name, [f"process {n}" for n in range(apart.devices)], [card], size=size))
        return pools.side_by_side([*boxes, _NEW_POOL if controls else ""])

    def _card(self, role: str, style: RoleStyle, pool: Pool, note: str, *, controls: bool) -> str:
        shown, groups = self.draft or self.lab.placement, self.lab.groups
        layout = shown.layout_of(role)
        model = "the actor's model" if role == ROLLOUT else groups[role].model if role in groups else ""
        attributes = (
            f'class="wb-pe-card" data-role="{role}" data-key="card-{role}" tabindex="0" role="group" '
            f'aria-roledescription="card" '
            f'aria-label="{role} in pool {escape(pool.name)}{": " + escape(note) if note else ""}" '
            'title="drag it onto a pool; left and right arrows move it"'
        )
        words = model, f"p={layout.p} t={layout.t} d={layout.d}"
        return pools.card(role, style, words, note=note, attributes=attributes if controls else "")

    # --- editing the draft --------------------------------------------------------------------------------------------

    def on_put(self, role: str, value: str) -> None:
        """Put a role into a pool, or into `NEW_POOL`."""
        self._edit(lambda placement: put(placement, role, value, self.lab.placement))

    def on_step(self, role: str, by: int) -> None:
        """Move a role to the previous or the next pool; after the last pool comes a new one."""

        def step(placement: Placement) -> Placement:
            names = [*(pool.name for pool in placement.pools), NEW_POOL]
            at = names.index(placement.pool_of(role).name) + by
            if at < 0:
                raise BadInput(f"{role} before pool {names[0]!r}", "this is the first pool", "move it to the right")
            return put(placement, role, names[at], self.lab.placement)

        self._edit(step)

    def on_resize(self, pool: str, value: Any) -> None:
        self._edit(lambda placement: placement.with_devices(pool, whole_number("devices", value)))

    def on_take(self, name: str) -> None:
        """Take an offered placement as the draft."""
        offer = next((offer for offer in self._costs.offers if offer.name == name), None)
        if offer is None or offer.placement is None:
            raise BadInput(f"plan {name!r}", offer.why if offer else "it is not offered")
        wanted = offer.placement
        self._edit(lambda shown: replace(wanted, environments=shown.environments))

    def on_suggest(self) -> None:
        """Calibrate the workbench by its last iteration, and offer the fastest placements."""
        self.lab.calibrate()
        self._suggested += 1

    def on_discard(self) -> None:
        self._draft = None

    def _edit(self, change: Callable[[Placement], Placement]) -> None:
        """Change the draft; refuses a placement with which this workbench could not be opened."""
        try:
            wanted = change(self.draft or self.lab.placement)
            self.lab.description.placed(wanted)
        except WorkbenchError:
            self._refused += 1
            raise
        self._draft = wanted
        self.driver.outcome = (
            f"draft: {wanted}" if self.draft is not None else "there is no draft: the live placement is shown"
        )

    # --- moving -------------------------------------------------------------------------------------------------------

    def on_apply(self) -> None:
        """Move the live models to the draft."""
        draft = self.draft
        if draft is None:
            raise BadInput("Apply", "there is no draft", "drag a role onto another pool")

        def done(before: Placement) -> None:
            self._before.append(before)
            self._draft = None

        self._move(f"moving to {draft}", draft, done)

    def on_undo(self) -> None:
        """Move back to the placement before the last move from here."""
        if not self._before:
            raise NotFound("a move to undo", "this view has moved nothing")
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
            return told + (f", predicted {change.expected_text}" if change.expected_s else "")

        self.driver.start(what, move)


def put(placement: Placement, role: str, pool: str, live: Placement) -> Placement:
    """Put a role into a pool, or into a pool of its own with one device. In the pool where it is live it gets its live
    layout; that pool is created again if the draft lacks it."""
    home = live.pool_of(role) if role in live.roles else None
    names = [other.name for other in placement.pools]
    if pool == NEW_POOL:
        here = placement.pool_of(role)
        if len(here.roles) == 1:
            raise BadInput(
                f"{role} in a new pool", f"it is alone in pool {here.name!r} already", "drag it onto another pool"
            )
        pool = next(name for name in (role, *(f"{role}_{n}" for n in range(2, 99))) if name not in names)
        return placement.with_role(role, pool, devices=1)
    made = placement.with_role(role, pool, home.devices if home and pool not in names else None)
    if home and home.name == pool and live.layout_of(role).size == made.pool_of(role).devices:
        made = made.with_layout(role, live.layout_of(role))
    return made


def _size(pool: Pool, what: str) -> str:
    """A field for a pool's number of devices, or processes."""
    return entry(what, "resize", pool.devices, kind="number", size=3, pool=pool.name)


# --- parts of the picture ---------------------------------------------------------------------------------------------


_COLUMNS = "plan", "placement", "predicted iteration", "bytes to move", "time to move", "room"


def offers_html(offers: Sequence[Offer], live: Placement, *, controls: bool) -> str:
    """A table of the offers. controls: with buttons that take an offer as the draft."""
    rows = []
    for offer in offers:
        change, off, cells = offer.change, offer.why, ["", "", "", "", f"\N{MULTIPLICATION X} {offer.why}"]
        if change is not None:
            off = "it is live" if same(change.new, live) else ""
            iteration = "not predicted" if offer.predicted_s is None else seconds_text(offer.predicted_s)
            room = "live" if off else f"{SIGNS[change.fits]} {change.verdict}"
            cells = [str(change.new), iteration, bytes_text(change.total_bytes), change.expected_text, room]
        row = dict(zip(_COLUMNS, (offer.name, *cells), strict=True))
        take = button(
            "take", "take", off=off, title=f"draft {offer.name}", spoken=f"take {offer.name}", name=offer.name
        )
        rows.append(row | ({"": Markup(take)} if controls else {}))
    suggest, does = "", ""
    if controls:
        told = "fit the cost model to the last iteration, and search for the fastest placements"
        suggest, does = button("Suggest", "suggest", title=told), " Suggest calibrates it by the last iteration."
    reasons = dict.fromkeys(offer.unpredicted for offer in offers if offer.unpredicted)
    notes = "".join(f"<div>No iteration is predicted: {escape(reason)}{does}</div>" for reason in reasons)
    shown = table(rows, caption="named placements, and the fastest by the cost model")
    return f'<section aria-label="plans">{shown}{notes}{suggest}</section>'
