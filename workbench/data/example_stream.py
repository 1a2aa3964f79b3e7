"""`lab.demonstrations(...)`, `lab.feedback(...)` and `lab.pairs(...)`: batches for supervised training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import torch

from workbench.batches.batch import Batch
from workbench.data.examples import Examples, Kind, Tokenized
from workbench.data.prompt_stream import Feed
from workbench.data.sources import Source
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.checked_calls import checks_calls
from workbench.support.named_fields import check_names
from workbench.support.validation import Rule, whole


@checks_calls("examples")
class ExampleStream:
    """Draws batches of demonstrations, feedback or pairs, in an order that only the seed decides.

        pairs = lab.pairs("pairs.jsonl", held_out=200)
        batch = pairs.next(64)
        lab.reward.compute_pair_rewards(pairs.held_out)
        lab.last_metrics["compute_pair_rewards"]  # the accuracy on them

    options: as of `Examples`. first: its state before anything was drawn. len() is the number of rows in one epoch.
    """

    def __init__(
        self, feed: Feed, source: Source, kind: Kind, *, seed: int, tokenizer: Any, options: Mapping[str, Any]
    ) -> None:
        parameters = inspect.signature(Examples).parameters.values()
        known = [p for p in parameters if p.name not in ("source", "kind", "tokenizer")]
        check_names(f"lab.{kind}", known, options)
        self._feed, self.drawn = feed, 0
        self.examples = Examples(source, kind, tokenizer=tokenizer, **{"seed": seed, **options})
        self.first = self.state

    def next(self, n: int) -> Batch:
        """The next n rows for training as a batch, and with it the next iteration. Columns: see `Examples.table`."""
        if self.examples.kind == "feedback" and n == 1:
            raise BadInput(
                "a batch of one row of feedback",
                "the reference point of KTO is estimated with the answers of other rows of the batch",
                "draw at least 2 rows",
            )
        self._feed.before_iteration()
        rows = self.examples.next(n)
        self._feed.begin_iteration()
        return self._put(rows, {"iteration": self._feed.iteration})

    @property
    def state(self) -> dict[str, Any]:
        """Where it stands, and of what, as plain values."""
        return {"kind": self.examples.kind, "drawn": self.drawn, "examples": self.examples.state_dict()}

    def take_up(self, state: Mapping[str, Any]) -> bool:
        """Go on where a stream of the same rows stood; whether `state` is of one."""
        now = {**self.examples.state_dict(), "position": state["examples"]["position"]}
        if state["kind"] != self.examples.kind or state["examples"] != now:
            return False
        self.examples.load_state_dict(state["examples"])
        self.drawn = state["drawn"]
        return True

    @functools.cached_property
    def held_out(self) -> Batch:
        """All rows that are held out, as one batch."""
        if not self.examples.held_out:
            raise BadInput(f"{self!r}", "no rows are held out", f"lab.{self.examples.kind}(..., held_out=200)")
        # of no iteration: what is measured on it is reported under the one in which that is done
        return self._put(self.examples.held_out, {})

    def _put(self, rows: list[Tokenized], meta: Mapping[str, int]) -> Batch:
        table = self.examples.table(rows)
        table["prompt_uid"] = torch.arange(self.drawn, self.drawn + len(rows))
        self.drawn += len(rows)
        return self._feed.put(table, meta=meta, owner=self.examples.kind)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its batches."""
        return (*self.examples.columns, "prompt_uid")

    @staticmethod
    def check(stream: ExampleStream, kind: Kind, rows: int, name: str = "rows") -> None:
        """Raise `BadInput` unless `stream` draws rows of that kind, and can draw so many different ones. name: of the
        field that says how many."""
        if stream.examples.kind != kind:
            raise BadInput(f"{kind}={shown(stream)}", f"must be {kind}", f"make them with lab.{kind}(source)")
        whole(name, rows)
        if rows > len(stream):
            fewer = "" if kind == "feedback" and len(stream) == 1 else f", or {name}={len(stream)}"
            raise BadInput(
                f"{name}={rows} of {stream!r}",
                f"a batch has each row once, and it has {len(stream)} to train on",
                f"give more data{fewer}",
            )

    def __len__(self) -> int:
        return len(self.examples.training)

    def __repr__(self) -> str:
        return repr(self.examples)


Demonstrations = Annotated[ExampleStream, Rule("must be demonstrations", "make them with lab.demonstrations(source)")]
Feedback = Annotated[ExampleStream, Rule("must be feedback", "make it with lab.feedback(source)")]
Pairs = Annotated[ExampleStream, Rule("must be pairs", "make them with lab.pairs(source)")]
