"""The samples: rows of the batches that a workbench keeps, and a response's tokens coloured by one of its columns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import Tensor

from workbench.display.html import bytes_text
from workbench.errors import BadInput, NotFound, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.objectives.losses import CLIPS, clips
from workbench_widgets import sample_pictures as pictures
from workbench_widgets.sample_rows import SampleRows, chosen
from workbench_widgets.token_columns import Sample, derived, derived_names
from workbench_widgets.view import View, button, choice, entry

PAGE_ROWS = 20
GROUP_ROWS = 32
OFFERED = 40  # batches in a choice
# what tokens are coloured by until something else is chosen: the first that there is
FIRST_COLOURS = ("advantages", "kl", "old_log_prob", "rollout_log_prob")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What is looked at: the rows that were found, those of the page, the one that is chosen, and what is beside it.

    columns, beside_columns: numbers by token of the two, with those that follow from them.
    """

    rows: SampleRows
    found: Sequence[int]
    page: Sequence[Sample]
    sample: Sample | None
    columns: dict[str, Tensor]
    beside: Sample | None
    beside_columns: dict[str, Tensor]


class Samples(View):
    """The rows of a batch as a table to sort and to filter, and one of them token by token.

    iteration: whose batches; None: the newest there are. batch: which of them, by name; "": the newest that is whole.
    Of the rows only those shown have their tokens brought here.
    """

    name, title, script = "samples", "Samples", True

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.iteration: int | None = None
        self.batch = self.beside = self.where = self.search = self.sort = self.colour = ""
        self.descending = self.difference = self.group = True
        self.page = self.at = self.start = 0
        self.row: int | None = None
        self._clip: dict[str, float] = {}
        self._note = ""
        self._names: tuple[Hashable, dict[str, str]] = (None, {})
        self._opened: dict[str, SampleRows] = {}

    # --- which batch --------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        return tuple(self.lab.store), len(self.lab.open_runs())

    def batches(self) -> dict[str, str]:
        """Where each batch is that has responses and is whole ("hosts", "file"), by name, newest first."""
        key = self.depends_on()
        if self._names[0] != key:
            store, frame, found = self.lab.store, self.lab.batches(), {}
            places = zip(frame["batch"], frame["where"], strict=True) if len(frame) else ()
            for name, where in reversed(list(places)):
                whole = where == "file" or store.kept(name) is not None
                if where != "gone" and whole and "response_ids" in store.column_names(name):
                    found[name] = where
            self._names = (key, found)
        return self._names[1]

    def shown_batch(self) -> str:
        """The name of the batch that is looked at; `NotFound` where there is none such."""
        names = self.batches()
        if self.batch:
            if self.batch not in names:
                raise NotFound(f"{self.batch} is no longer in the store", "it was released", "choose another batch")
            return self.batch
        of_it = [n for n in names if self.iteration is None or self.lab.store.iteration(n) == self.iteration]
        if not of_it:
            raise NotFound(
                "no batch with responses is in the store", "generation makes one", "lab.actor.generate_sequences(...)"
            )
        return next((name for name in of_it if names[name] == "hosts"), of_it[0])

    def receive(self, iteration: int | None = None, batch: str = "", **_: Any) -> None:
        """Look at the newest batch of an iteration, or at one by name. One that is not kept is said to be gone."""
        self._note = ""
        if iteration is not None and not any(self.lab.store.iteration(n) == iteration for n in self.batches()):
            self._note = (
                f"Iteration {iteration} has no batch with responses in the store: it was released, let go of beyond "
                "lab.store.limit_bytes or limit_batches, or not made by this kernel. Raise the limit before a run, or "
                "hold a batch in a cell. Shown is the newest."
            )
            iteration = None
        self.iteration, self.batch = iteration, batch
        self.page, self.row, self.start = 0, None, 0

    # --- what is looked at --------------------------------------------------------------------------------------------

    def open_rows(self, name: str) -> SampleRows:
        """The rows of a batch, kept for as long as it is among the two that were looked at last."""
        if name not in self._opened:
            self._opened = {**dict(list(self._opened.items())[-1:]), name: SampleRows(self.lab, name)}
        return self._opened[name]

    def look(self) -> Looked:
        """What is to be drawn; brings what is missing of it."""
        rows = self.open_rows(self.shown_batch())
        found = rows.find(self.where, self.search, self.sort, self.descending)
        self.page = min(self.page, max(0, (len(found) - 1) // PAGE_ROWS))
        page = rows.samples(found[self.page * PAGE_ROWS : (self.page + 1) * PAGE_ROWS])
        if self.row is not None and self.row < rows.rows:
            sample: Sample | None = rows.samples([self.row])[0]
        else:
            sample = page[0] if page else None
        beside = None
        if sample is not None and self.beside in self.batches():
            beside = self.open_rows(self.beside).counterpart(sample, rows)
        return Looked(
            rows=rows,
            found=found,
            page=page,
            sample=sample,
            columns={} if sample is None else derived(sample, beside, *self.clip),
            beside=beside,
            beside_columns={} if beside is None else derived(beside, None, *self.clip),
        )

    @property
    def clip(self) -> tuple[float, float]:
        """How far below and above 1 a ratio may be: as set here, else as the algorithm has it, else PPO's."""
        algorithm = self.lab.algorithm
        loss, *given = (getattr(algorithm, name, None) for name in ("loss", "clip", "clip_high"))
        low, high = clips(loss if loss in CLIPS else "ppo", *given)
        return self._clip.get("low", low), self._clip.get("high", high)

    def colours(self, looked: Looked | None = None) -> list[str]:
        """The columns that tokens can be coloured by."""
        rows = (looked or self.look()).rows
        beside = self._opened[self.beside].token_names if self.beside in self._opened else ()
        return [*rows.token_names, *derived_names(rows.token_names, beside), "response_mask"]

    def colour_of(self, looked: Looked) -> str:
        """The column that tokens are coloured by."""
        there = self.colours(looked)
        return self.colour if self.colour in there else next((c for c in FIRST_COLOURS if c in there), there[0])

    # --- how it is drawn ----------------------------------------------------------------------------------------------

    def controls(self) -> str:
        names, store = self.batches(), self.lab.store
        offered = list(names)[:OFFERED]
        iterations = dict.fromkeys(str(i) for n in names if (i := store.iteration(n)) is not None)
        of_it = [n for n in offered if self.iteration is None or store.iteration(n) == self.iteration]
        try:
            looked = self.look()
            now, colours, colour = looked.rows.name, self.colours(looked), self.colour_of(looked)
        except WorkbenchError:
            now, colours, colour = "none", [self.colour], self.colour
        others = {"": "nothing", **{n: n for n in dict.fromkeys([*offered, *filter(None, [self.beside])]) if n != now}}
        low, high = self.clip
        batches = {"": f"newest ({now if not self.batch else 'follows'})"}
        batches |= {n: n for n in dict.fromkeys([*of_it, *filter(None, [self.batch])])}
        return "".join(
            [
                choice("iteration", "iteration", {"": "newest", **{i: i for i in iterations}}, _text(self.iteration)),
                choice("batch", "batch", batches, self.batch),
                entry("rows where", "where", self.where, kind="search", size=13),
                entry("with text", "search", self.search, kind="search", size=7),
                choice("colour by", "colour", colours, colour),
                choice("beside", "beside", others, self.beside),
                entry("difference", "difference", self.difference, kind="checkbox") if self.beside else "",
                entry("group", "group", self.group, kind="checkbox"),
                entry("clip below", "clip", low, kind="number", size=4, side="low"),
                entry("above", "clip", high, kind="number", size=4, side="high"),
            ]
        )

    def picture(self) -> str:
        return self._html(live=False)

    def payload(self, *, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
        return {"html": self._html(live=True)}, []

    def _html(self, *, live: bool) -> str:
        note = f'<p role="alert">{escape(self._note)}</p>' if self._note else ""
        try:
            looked = self.look()
        except WorkbenchError as error:
            return f'{note}<p role="alert">{escape(str(error))}</p>'
        parts = [note, self._head(looked, live), pictures.page_table(looked, self.sort, self.descending, live=live)]
        if looked.sample is not None:
            parts.append(
                pictures.sample_picture(
                    looked, self.colour_of(looked), self.beside, at=self.at, start=self.start,
                    difference=self.difference, clip=self.clip, lab=self.lab, live=live,
                )
            )  # fmt: skip
            if self.group:
                parts.append(self._group(looked, looked.sample, live))
        return "".join(parts)

    def _head(self, looked: Looked, live: bool) -> str:
        rows, found = looked.rows, len(looked.found)
        pages = max(1, -(-found // PAGE_ROWS))
        turn = ""
        if live and pages > 1:
            turn = " ".join(
                [
                    button("Previous rows", "page", off="this is the first page" if not self.page else "", by=-1),
                    button("Next rows", "page", off="" if self.page + 1 < pages else "this is the last page", by=1),
                ]
            )
        known = ", ".join(
            f"{key} {value}" for key, value in rows.meta.items() if key in ("iteration", "weights_version")
        )
        filtered = f"{found} of {rows.rows} rows" if self.where or self.search else f"{rows.rows} rows"
        brought = f"{bytes_text(rows.brought_bytes)} of it brought here: numbers of all rows, tokens of those looked at"
        return (
            f"<div><b>{escape(rows.name)}</b>{f' ({escape(known)})' if known else ''}: {filtered}, "
            f'page {self.page + 1} of {pages} {turn} <small style="opacity:.75">{brought}</small></div>'
        )

    def _group(self, looked: Looked, sample: Sample, live: bool) -> str:
        rows = looked.rows.group(sample.row)
        if len(rows) < 2:
            return ""
        numbers = looked.rows.numbers.loc[rows]
        if "rewards" in numbers:
            numbers = numbers.sort_values("rewards", ascending=False, kind="stable")
        members = looked.rows.samples(list(numbers.index[:GROUP_ROWS]))
        return pictures.group_table(members, numbers, sample, lab=self.lab, live=live)

    def text(self) -> str:
        try:
            looked = self.look()
        except WorkbenchError as error:
            return f"samples: {error}"
        lines = [f"{looked.rows.name}: {len(looked.found)} rows"]
        for sample in looked.page:
            reward = f" rewards {sample.values['rewards']:.4g}" if "rewards" in sample.values else ""
            lines.append(f"  {sample.row}{reward} {shown(self.lab.decode(sample.token_ids), 50)}")
        return "\n".join(lines)

    # --- actions ------------------------------------------------------------------------------------------------------

    def on_iteration(self, value: str) -> None:
        self.receive(iteration=int(value) if value else None)

    def on_batch(self, value: str) -> None:
        self._note, self.batch = "", value

    def on_where(self, value: str) -> None:
        chosen(self.open_rows(self.shown_batch()).numbers, value)  # what is no expression changes nothing
        self.where, self.page = value.strip(), 0

    def on_search(self, value: str) -> None:
        self.search, self.page = value, 0

    def on_sort(self, column: str) -> None:
        self.descending = not self.descending if column == self.sort else True
        self.sort, self.page = column, 0

    def on_page(self, by: int) -> None:
        self.page = max(0, self.page + by)

    def on_row(self, row: int) -> None:
        self.row, self.at, self.start = row, 0, 0

    def on_token(self, at: int, side: int = 0) -> None:
        self.at = at  # of both responses, where two are side by side

    def on_window(self, start: int) -> None:
        self.at = self.start = max(0, start)

    def on_colour(self, value: str) -> None:
        self.colour = value

    def on_beside(self, value: str) -> None:
        self.beside, self.start = value, 0

    def on_difference(self, value: bool) -> None:
        self.difference = value

    def on_group(self, value: bool) -> None:
        self.group = value

    def on_clip(self, side: str, value: str) -> None:
        try:
            self._clip = {**self._clip, side: abs(float(value))}
        except ValueError as error:
            raise BadInput(f"a clip range of {value!r}", "must be a number such as 0.2") from error


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
