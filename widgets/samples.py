"""Samples: rows of the batches that a workbench keeps, and the tokens of a response coloured by a column."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import Tensor

from workbench.errors import NotFound, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.objectives.losses import CLIPS, clips
from workbench_widgets import sample_pictures as pictures
from workbench_widgets.sample_rows import Sample, SampleRows, beside_columns, chosen
from workbench_widgets.view import View, button, choice, entry

PAGE_ROWS = 20
OFFERED = 40  # batches in a choice
# The default column for colouring tokens: the first that the batch has.
FIRST_COLOURS = ("advantages", "kl", "old_log_prob", "rollout_log_prob", "response_mask")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What is shown: the rows that were found, those of the page, the selected row, and the row beside it.

    columns, beside_columns: numbers by token of the two rows. colour: the column that colours the tokens.
    """

    rows: SampleRows
    found: Sequence[int]
    page: Sequence[Sample]
    sample: Sample | None
    columns: dict[str, Tensor]
    colour: str
    beside: Sample | None
    beside_columns: dict[str, Tensor]


class Samples(View):
    """The rows of a batch as a table to sort and to filter, and one row token by token.

    batch: its name; "": the newest complete one. Only tokens of the shown rows are fetched.
    """

    name, title, script = "samples", "Samples", True
    fields = ("colour",)

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.batch = self.beside = self.where = self.search = self.sort = self.colour = ""
        self.descending = True
        self.page = self.at = self.start = 0
        self.row: int | None = None
        self._note = ""
        self._opened: dict[str, SampleRows] = {}

    # --- which batch --------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        return tuple(self.lab.store), len(self.lab.open_runs())

    def batches(self) -> dict[str, str]:
        """Where each complete batch with responses is stored ("hosts", "file"), by name, newest first."""
        store, frame, found = self.lab.store, self.lab.batches(), {}
        for name, where in zip(frame["batch"][::-1], frame["where"][::-1], strict=True) if len(frame) else ():
            whole = where == "file" or store.kept(name) is not None
            if where != "gone" and whole and "response_ids" in store.column_names(name):
                found[name] = where
        return found

    def shown_batch(self) -> str:
        """The name of the shown batch; raises `NotFound` if it does not exist."""
        names = self.batches()
        if self.batch:
            if self.batch not in names:
                raise NotFound(f"{self.batch} is no longer in the store", "it was released", "choose another batch")
            return self.batch
        if not names:
            raise NotFound(
                "no batch with responses is in the store", "generation makes one", "lab.actor.generate_sequences(...)"
            )
        return next((name for name in names if names[name] == "hosts"), next(iter(names)))

    def receive(self, iteration: int | None = None, batch: str = "", **_: Any) -> None:
        """Show the newest batch of an iteration, or a named batch. Says so if the batch is no longer kept."""
        if iteration is not None:
            batch = next((name for name in self.batches() if self.lab.store.iteration(name) == iteration), "")
        self.batch, self._note = batch, ""
        if iteration is not None and not batch:
            self._note = (
                f"Iteration {iteration} has no batch with responses in the store: it was released, evicted beyond "
                "lab.store.limit_bytes or limit_batches, or not made by this kernel. Raise the limit before a run, or "
                "keep a batch in a variable. The newest is shown."
            )
        self.page, self.row, self.start = 0, None, 0

    # --- what is looked at --------------------------------------------------------------------------------------------

    def open_rows(self, name: str) -> SampleRows:
        """The rows of a batch; those of the last two batches shown are cached."""
        if name not in self._opened:
            self._opened = {**dict(list(self._opened.items())[-1:]), name: SampleRows(self.lab, name)}
        return self._opened[name]

    def look(self) -> Looked:
        """What to draw; fetches the missing parts."""
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
        columns = {} if sample is None else beside_columns(sample, beside, *self.clip)
        theirs = {} if beside is None else beside_columns(beside, None, *self.clip)
        colour = next((name for name in (self.colour, *FIRST_COLOURS) if name in columns), self.colour)
        return Looked(
            rows=rows, found=found, page=page, sample=sample, columns=columns, colour=colour, beside=beside,
            beside_columns=theirs,
        )  # fmt: skip

    @property
    def clip(self) -> tuple[float, float]:
        """The clip range below and above ratio 1: the algorithm's, else PPO's."""
        algorithm = self.lab.algorithm
        loss, *given = (getattr(algorithm, name, None) for name in ("loss", "clip", "clip_high"))
        return clips(loss if loss in CLIPS else "ppo", *given)

    # --- how it is drawn ----------------------------------------------------------------------------------------------

    def controls(self) -> str:
        now, colours, colour = "none", [self.colour], self.colour
        try:
            looked = self.look()
            now, colours, colour = looked.rows.name, list(looked.columns) or colours, looked.colour
        except WorkbenchError:
            pass  # the picture says it
        names = dict.fromkeys([*list(self.batches())[:OFFERED], *filter(None, (self.batch, self.beside))])
        told = {name: f"{name}, iteration {self.lab.store.iteration(name)}" for name in names}
        newest = f"newest ({'follows' if self.batch else now})"
        others = {name: words for name, words in told.items() if name != now}
        return (
            choice("batch", "batch", {"": newest, **told}, self.batch)
            + entry("rows where", "where", self.where, kind="search", size=13)
            + entry("with text", "search", self.search, kind="search", size=7)
            + choice("colour by", "colour", colours, colour)
            + choice("beside", "beside", {"": "nothing", **others}, self.beside)
        )

    def html(self, *, live: bool) -> str:
        note = f'<p role="alert">{escape(self._note)}</p>' if self._note else ""
        try:
            looked = self.look()
        except WorkbenchError as error:
            return f'{note}<p role="alert">{escape(str(error))}</p>'
        parts = [note, self._head(looked, live), pictures.page_table(self, looked, live=live)]
        if looked.sample is not None:
            parts += [pictures.response(self, looked, live=live), pictures.group(self, looked, live=live)]
        return "".join(parts)

    def _head(self, looked: Looked, live: bool) -> str:
        rows, found = looked.rows, len(looked.found)
        pages, turn = max(1, -(-found // PAGE_ROWS)), ""
        if live and pages > 1:
            turn = button("Previous rows", "page", off="" if self.page else "this is the first page", by=-1) + " "
            last = "" if self.page + 1 < pages else "this is the last page"
            turn += button("Next rows", "page", off=last, by=1)
        known = [f"{key} {value}" for key, value in rows.meta.items() if key in ("iteration", "weights_version")]
        filtered = f"{found} of {rows.rows} rows" if self.where or self.search else f"{rows.rows} rows"
        head = f"<b>{escape(rows.name)}</b>" + (escape(f" ({', '.join(known)})") if known else "")
        return f"<div>{head}: {filtered}, page {self.page + 1} of {pages} {turn}</div>"

    def text(self) -> str:
        try:
            looked = self.look()
        except WorkbenchError as error:
            return f"samples: {error}"
        texts = [f"  {sample.row} {shown(self.lab.decode(sample.token_ids), 50)}" for sample in looked.page]
        return "\n".join([f"{looked.rows.name}: {len(looked.found)} rows", *texts])

    # --- actions ------------------------------------------------------------------------------------------------------

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

    def on_beside(self, value: str) -> None:
        self.beside, self.start = value, 0
