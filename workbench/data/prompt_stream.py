"""`lab.prompts`: where a workbench's batches of prompts come from."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table
from workbench.data.prompts import PromptRow, Prompts
from workbench.display.interrupts import stoppable, uninterrupted
from workbench.errors import BadInput
from workbench.settings.engines import Generation
from workbench.support.checked_calls import checks_calls
from workbench.support.named_fields import check_names


class Feed(Protocol):
    """Where streams of rows put their batches, and whose iterations they begin."""

    @property
    def iteration(self) -> int: ...

    def check_ready(self) -> None:
        """Raise where no batch can be made now."""

    def before_iteration(self) -> None:
        """Called before the rows of a new iteration are drawn."""

    def begin_iteration(self) -> None:
        """Count the next iteration."""

    def put(self, table: Table, *, meta: Mapping[str, Any], owner: str) -> Batch:
        """A batch of columns."""
        ...

    def note_drawn(self) -> None:
        """Keep where the stream stands."""


@checks_calls("lab.prompts")
class PromptStream:
    """`lab.prompts`: draws batches of prompts, in an order that depends on the seed alone."""

    def __init__(self, settings: Any, feed: Feed, *, seed: int, tokenizer: Any, generation: Generation | None) -> None:
        self._feed, self.drawn = feed, 0
        self.state: dict[str, Any] | None = None
        self.source: Prompts | None = None
        if settings is not None:
            options = {"seed": seed, **prompt_options(settings, "prompts=dict")}
            self.source = Prompts(**options, tokenizer=tokenizer)
            self._first = self.source.state_dict()
            check_room(self.source, generation)

    def next(self, n: int) -> Batch:
        """The next n prompts as a batch: `prompt_ids`, `prompt_uid`, `prompt`, and the data set's other columns.

        An iteration begins with it.
        """
        return self._draw(n, begins=True)

    def more(self, n: int) -> Batch:
        """n more prompts for the iteration that `next` began."""
        return self._draw(n, begins=False)

    def go_back(self) -> None:
        """Begin anew, with the first prompts."""
        self.drawn, self.state = 0, None
        if self.source is not None:
            self.source.load_state_dict(self._first)

    def _draw(self, n: int, *, begins: bool) -> Batch:
        self._feed.check_ready()
        if self.source is None:
            raise BadInput(
                "lab.prompts", "this workbench was opened without prompts=", "wb.open(..., prompts='arithmetic')"
            )
        if begins:
            self._feed.before_iteration()
        left = "the prompts are drawn, or none are", "see lab.batches()"
        with stoppable("drawing prompts", left), uninterrupted():
            return self._put(self.source, n, begins=begins)

    def _put(self, source: Prompts, n: int, *, begins: bool) -> Batch:
        rows = source.next(n)
        if begins:
            self._feed.begin_iteration()
        table = prompt_table(rows, self.drawn)
        self.drawn += len(rows)
        self.state = source.state_dict()
        batch = self._feed.put(table, meta={"iteration": self._feed.iteration}, owner="prompts")
        self._feed.note_drawn()
        return batch

    def __repr__(self) -> str:
        return repr(self.source) if self.source else "<no prompts: open with prompts=...>"

    def _repr_html_(self) -> str:
        return self.source._repr_html_() if self.source else repr(self)


def prompt_options(settings: Any, called: str) -> dict[str, Any]:
    """The arguments of `Prompts` from a source, or from a mapping of options, whose names are checked.

    called: the name of the mapping in messages.
    """
    if not isinstance(settings, Mapping):
        return {"source": settings}
    parameters = inspect.signature(Prompts).parameters.values()
    check_names(called, [p for p in parameters if p.name != "tokenizer"], settings)
    return dict(settings)


def prompt_table(rows: Sequence[PromptRow], first_uid: int) -> Table:
    """The columns of a batch of prompts, which are numbered from `first_uid` on."""
    table: Table = {
        "prompt_ids": Ragged.of([row.prompt_ids for row in rows], torch.int64),
        "prompt_uid": torch.arange(first_uid, first_uid + len(rows)),
        "prompt": [row.prompt for row in rows],
    }
    for name in dict.fromkeys(itertools.chain.from_iterable(row.extra for row in rows)):
        if name in table:
            raise BadInput(f"a data set with a column {name!r}", "that name is taken in a batch", "rename the column")
        table[name] = [row.extra.get(name) for row in rows]
    return table


def check_room(prompts: Prompts, generation: Generation | None) -> None:
    """Raise `BadInput` where the longest prompt leaves no room for a response."""
    longest = prompts.longest
    tokens = len(longest.prompt_ids)
    if generation and tokens >= generation.max_model_tokens:
        raise BadInput(
            f"the prompt of row {longest.index} has {tokens} tokens",
            f"prompt and response together have at most Generation.max_model_tokens={generation.max_model_tokens}",
            "raise it, or leave long prompts out with prompts={'source': ..., 'max_prompt_tokens': n}",
        )
