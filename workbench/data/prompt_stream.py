"""`lab.prompts`: draws a workbench's batches of prompts."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import pandas as pd
import torch

from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table
from workbench.batches.schema import ScoredRows
from workbench.data.ledger import Ledger, ledger_frame, versions_frame
from workbench.data.prompt_rows import PromptRow, row_tools
from workbench.data.prompts import Prompts
from workbench.data.sources import PROMPT_COLUMNS
from workbench.data.streamed_prompts import StreamedPrompts
from workbench.display.interrupts import stoppable, uninterrupted
from workbench.display.tokens import WrittenTokens
from workbench.errors import BadInput
from workbench.errors.containing import must_propagate
from workbench.errors.plain_text import said, shown
from workbench.settings.engines import Generation
from workbench.support.assigned import AssignedFunction
from workbench.support.calls.pickling import name_of
from workbench.support.checked_calls import checks_calls
from workbench.support.named_fields import NamedAttributes, check_names
from workbench.support.validation import FINITE, Number, checked, whole

Order = Callable[["pd.DataFrame"], Any]
RULE = (
    "it must return the ledger's rows to draw, in order (a frame or their index), or a Series with True or False, "
    "or with a weight (finite, at least 0), for each row"
)
EXAMPLE = "lab.prompts.order = lambda ledger: ledger.sort_values('pass_rate', na_position='first')"


def chosen_rows(order: Order, ledger: pd.DataFrame, n: int, seed: tuple[int, ...]) -> list[Any]:
    """Return the index labels of the ledger's n rows to draw next: the first n rows of the function's result, repeated
    from its beginning if there are fewer. By weights, draws without replacement, with proportional probabilities.

    seed: for draws by weights. Raises `BadInput` if the function raises, or returns no valid choice of rows.
    """
    called = f"lab.prompts.order = {name_of(order)}"
    given = ledger.copy()
    try:
        found = order(given)
    except BaseException as error:
        if must_propagate(error):
            raise
        raise BadInput(
            f"{called} raised {type(error).__name__}: {said(error)}", RULE, f"correct it, for example: {EXAMPLE}"
        ) from error
    rows = _rows(called, found, ledger, n, seed)
    if not rows:
        raise BadInput(
            f"{called} chose none of {len(ledger)} prompts",
            "at least one row must be left; a prompt without responses has rates of NaN, which fail all comparisons",
            "keep such prompts too: ledger[ledger.pass_rate.isna() | ledger.pass_rate.between(0.2, 0.8)]",
        )
    return [rows[i % len(rows)] for i in range(n)]


def _rows(called: str, found: Any, ledger: pd.DataFrame, n: int, seed: tuple[int, ...]) -> list[Any]:
    if isinstance(found, pd.DataFrame):
        found = found.index
    if not isinstance(found, pd.Series | pd.Index | list | tuple | np.ndarray):
        raise _wrong(called, shown(found))
    rows = found.index if isinstance(found, pd.Series) else pd.Index(found, dtype=object)
    known = rows.isin(ledger.index) if rows.nlevels == 1 else np.zeros(len(rows), bool)
    if not known.all():
        raise _wrong(called, f"a row {shown(rows[int(np.argmin(known))])} that the ledger does not have")
    if not isinstance(found, pd.Series):
        return list(rows)
    if rows.has_duplicates:
        raise _wrong(called, "a Series that has a row twice")
    found = found.reindex(ledger.index)
    if pd.api.types.is_bool_dtype(found.dropna().infer_objects().dtype):
        return list(ledger.index[(found == True).to_numpy()])  # noqa: E712 (NaN is False)
    return _by_weight(called, found, n, seed)


def _by_weight(called: str, weights: pd.Series, n: int, seed: tuple[int, ...]) -> list[Any]:
    """Draw by Gumbel's trick: the n largest log(w) - log(-log(u)) are a draw without replacement with weights w."""
    try:
        values = weights.fillna(0.0).to_numpy(dtype=np.float64)
    except (TypeError, ValueError):
        raise _wrong(called, f"a Series of {weights.dtype}") from None
    if not (np.isfinite(values) & (values >= 0)).all():
        raise _wrong(called, f"a weight of {values[~(np.isfinite(values) & (values >= 0))][0]:g}")
    places = np.flatnonzero(values)
    keys = np.log(values[places]) + np.random.default_rng(seed).gumbel(size=len(places))
    return list(weights.index[places[np.argsort(-keys, kind="stable")[:n]]])


def _wrong(called: str, gave: str) -> BadInput:
    return BadInput(f"{called} gave {gave}", RULE, f"for example {EXAMPLE}")


class Feed(Protocol):
    """The workbench as streams of rows see it: it takes their batches and counts iterations."""

    @property
    def iteration(self) -> int: ...

    @property
    def next_iteration(self) -> int: ...

    def check_ready(self) -> None:
        """Raise an error if no batch can be made now."""

    def before_iteration(self) -> None:
        """Prepare for a new iteration, before its rows are drawn."""

    def begin_iteration(self, *, ahead: bool = False) -> None:
        """Count the next iteration. ahead: its prompts were drawn earlier."""

    def put(self, table: Table, *, meta: Mapping[str, Any], owner: str) -> Batch: ...

    def note_drawn(self) -> None:
        """Record the stream's position."""

    def when_scored(self, tell: Callable[[Mapping[str, Any], Sequence[ScoredRows]], None]) -> None:
        """Call `tell` with the meta and the rewards of each stage that computes rewards."""

    def wait_for_scores(self) -> None:
        """Wait for the running stages that compute rewards."""

    def note_change(self, setting: str, before: Any, after: Any) -> None:
        """Record that a setting was assigned."""


@checks_calls("lab.prompts", internal="ahead begin reset restore snapshot")
class PromptStream(NamedAttributes):
    """`lab.prompts`: draws batches of prompts, in an order that depends only on the seed, or on `order`.

    records: the ledger's counts; None without prompts, and for streamed prompts.
    """

    def __init__(self, settings: Any, feed: Feed, *, seed: int, tokenizer: Any, generation: Generation | None) -> None:
        self._feed, self.drawn, self._seed = feed, 0, seed
        self.source: Prompts | StreamedPrompts | None = None
        self._first: dict[str, Any] | None = None
        self.records: Ledger | None = None
        self._order = AssignedFunction("lab.prompts.order", "draws in the usual order", feed.note_change)
        if settings is not None:
            self.source = prompts_of({"seed": seed, **prompt_options(settings, "prompts=dict")}, tokenizer)
            self._first = self.source.state_dict()
            check_room(self.source, generation)
        if isinstance(self.source, Prompts):
            self.records = Ledger(len(self.source))
            self._rows = {row.index: i for i, row in enumerate(self.source.rows)}
            feed.when_scored(self.records.note_scored)

    def next(self, n: int) -> Batch:
        """Draw the next n prompts as a batch: `prompt_ids`, `prompt_uid`, `prompt`, and the data set's other columns.

        Begins a new iteration; or the last one again, if one of its stages was refused and none has run. `more` draws
        for the iteration that has begun, as in a function that is a stage of an algorithm.
        """
        return self._draw(n, begins=True)

    def more(self, n: int) -> Batch:
        """Draw n more prompts for the iteration that `next` began."""
        return self._draw(n, begins=False)

    def ahead(self, n: int, iteration: int) -> Batch:
        """Draw the next n prompts for a future iteration, which `begin` will begin."""
        return self._draw(n, begins=False, iteration=iteration)

    def begin(self) -> None:
        """Begin the next iteration, whose prompts `ahead` has drawn."""
        self._feed.check_ready()
        self._feed.before_iteration()
        with uninterrupted():
            self._feed.begin_iteration(ahead=True)
            self._feed.note_drawn()

    def show(self, prompt: Any) -> WrittenTokens:
        """Return the tokens that the policy reads for a prompt, each with its writer: the template, or a message's
        role. Special tokens have a frame. `.df` has one row per token.

        prompt: a text, messages, or a row of the source, such as `{"prompt": "2 + 3?"}`. Draws no prompts.
        """
        if self.source is None:
            raise _no_prompts()
        tools = row_tools(prompt) if isinstance(prompt, Mapping) else []
        if isinstance(prompt, Mapping):
            names = [name for name in PROMPT_COLUMNS if name in prompt]
            if not names:
                rule = f"a row needs one of the columns {', '.join(PROMPT_COLUMNS)}"
                raise BadInput(f"a row with {', '.join(map(str, prompt)) or 'no columns'}", rule, "or give text")
            prompt = prompt[names[0]]
        return self.source.show(prompt, tools=tools)

    # --- the ledger ---------------------------------------------------------------------------------------------------

    def ledger(self, by: Literal["prompt", "version"] = "prompt") -> pd.DataFrame:
        """Return a frame with one row per prompt, indexed by `row`, its number in the source, from 0.

        prompt, prompt_tokens: of the prompt. drawn: how often it was drawn; iterations_since: since the last draw.
        responses: how many got a reward, without failed ones; pass_rate: the share with a reward of at least
        `threshold`, pass_low and pass_high: bounds of its Wilson 95 % interval (1927,
        https://doi.org/10.1080/01621459.1927.10502953). reward_mean, reward_variance (unbiased), response_tokens_mean:
        of all responses. last_...: the same for the last draw, whose weights version (in optimizer steps) is
        last_version. The data set's other columns follow; a column whose name is taken becomes `data_NAME`. Unknown
        values are NaN. Rows are in the order in which they would be drawn without `order`.

        by: "version": one row per prompt and weights version, for a prompt's newest 8 versions, with responses, passed,
        pass_rate and its bounds. Scores that come 4 or more iterations after the draw do not count, nor do evaluations,
        greedy responses, and batches that were put or loaded. Raises `BadInput` without prompts or if streamed.
        """
        source, records = self._recorded("lab.prompts.ledger()")
        if by == "version":
            return versions_frame(source, records)
        return ledger_frame(source, records, self._feed.iteration)

    @property
    def order(self) -> Order | None:
        """A function of the ledger's frame that chooses the prompts to draw next; None: each prompt once per epoch.

            lab.prompts.order = lambda ledger: ledger.sort_values("pass_rate", na_position="first")

        The function is called for each draw. It returns the rows to draw in order (a frame, or their index), True or
        False for each row (draws rows with True, in the frame's order), or a weight for each row (a Series; draws
        without replacement, with proportional probabilities). The first n rows are drawn, from the beginning again if
        there are fewer. `ledger.attrs` has n, the coming `iteration`, and a `seed` for random choices. Draws depend
        only on the seed and the ledger, so they are the same after a checkpoint and `wb.attach`; then the function has
        to be assigned again.
        """
        return self._order.function

    @order.setter
    def order(self, order: Order | None) -> None:
        called = f"lab.prompts.order = {shown(order)}"
        if order is not None:
            if not callable(order):
                raise BadInput(called, "must be a function of the ledger's frame, or None", EXAMPLE)
            self._recorded(called)
            self._chosen(order, 1, self._feed.next_iteration)
        self._order.assign(order)

    @property
    def threshold(self) -> float:
        """The smallest reward with which a response passes, for the ledger's rates; a change affects later scores."""
        return self._recorded("lab.prompts.threshold")[1].threshold

    @threshold.setter
    def threshold(self, threshold: float) -> None:
        called = "lab.prompts.threshold"
        records = self._recorded(called)[1]
        before, records.threshold = records.threshold, checked(called, threshold, Annotated[Number, FINITE])
        self._feed.note_change(called, before, records.threshold)

    def _recorded(self, called: str) -> tuple[Prompts, Ledger]:
        """Return the source and its ledger; raise `BadInput` if there is no ledger."""
        if self.source is None:
            raise _no_prompts()
        if self.records is None or not isinstance(self.source, Prompts):
            raise BadInput(
                called, "streamed prompts have no ledger: they may be more than memory can hold",
                "leave stream=True out of prompts=, if the rows fit into memory",
            )  # fmt: skip
        return self.source, self.records

    def _chosen(self, order: Order, n: int, iteration: int) -> list[int]:
        source, records = self._recorded("lab.prompts.order")
        ledger = ledger_frame(source, records, iteration)
        seed = (self._seed, self.drawn)
        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        ledger.attrs = {"n": n, "iteration": iteration, "seed": number}
        return [self._rows[row] for row in chosen_rows(order, ledger, n, seed)]

    # --- where it stands ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any] | None:
        """The stream's position and settings as plain values; None without prompts."""
        if self.source is None:
            return None
        kept = {} if self.records is None else {"order": self._order.name, "threshold": self.records.threshold}
        return {**self.source.state_dict(), **kept}

    def reset(self) -> None:
        self.restore(0, self._first, None)

    def restore(
        self, drawn: int, state: dict[str, Any] | None, ledger: bytes | None, changes: Sequence[bytes] = ()
    ) -> None:
        """Continue from an earlier `drawn` and `state`. ledger, changes: `Ledger.state`, and the changes since; None:
        an empty ledger."""
        self.drawn = drawn
        if self.source is not None and state:
            self.source.load_state_dict(state)
            self._order.go_on(state.get("order"))
        if self.records is not None:
            self.records.threshold = (state or {}).get("threshold", self.records.threshold)
            if ledger is None:
                self.records.clear()
            else:
                self.records.load_state(ledger, changes)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present position and ledger."""
        drawn, ledger = self.drawn, None if self.records is None else self.records.state()
        position = None if self.source is None else self.source.state_dict()
        return lambda: self.restore(drawn, position, ledger)

    def _draw(self, n: int, *, begins: bool, iteration: int | None = None) -> Batch:
        self._feed.check_ready()
        if self.source is None:
            raise _no_prompts()
        whole("n", n)
        self._order.check(f"lab.prompts.{'next' if begins else 'more'}({n})")
        if self._order.function is not None:
            self._feed.wait_for_scores()
        if begins:
            self._feed.before_iteration()
        if iteration is None:
            iteration = self._feed.next_iteration if begins else self._feed.iteration
        left = "all prompts were drawn, or none", "see lab.batches()"
        with stoppable("drawing prompts", left), uninterrupted():
            if self._order.function is not None and isinstance(self.source, Prompts):
                rows = self.source.take(self._chosen(self._order.function, n, iteration))
            else:
                rows = self.source.next(n)
            if begins:
                self._feed.begin_iteration()
            table = prompt_table(rows, self.drawn)
            if self.records is not None:
                places = [self._rows[row.index] for row in rows]
                self.records.note_drawn(places, self.drawn, iteration, self._feed.iteration)
            self.drawn += len(rows)
            batch = self._feed.put(table, meta={"iteration": iteration}, owner="prompts")
            self._feed.note_drawn()
            return batch

    def __repr__(self) -> str:
        return repr(self.source) if self.source else "<no prompts: open with prompts=...>"

    def _repr_html_(self) -> str:
        return self.source._repr_html_() if self.source else repr(self)


def _no_prompts() -> BadInput:
    rule = "this workbench was opened without prompts="
    return BadInput("lab.prompts", rule, "wb.open(..., prompts='arithmetic')")


def prompt_options(settings: Any, called: str) -> dict[str, Any]:
    """Return the arguments of `Prompts` from a source, or from a mapping of options, whose names are checked.

    called: the mapping's name for messages.
    """
    if not isinstance(settings, Mapping) or type(settings).__module__.startswith("datasets."):  # a dict of splits
        return {"source": settings}
    parameters = [p for p in inspect.signature(Prompts).parameters.values() if p.name != "tokenizer"]
    stream = inspect.Parameter("stream", inspect.Parameter.KEYWORD_ONLY, default=False)
    check_names(called, [*parameters, stream], settings)
    return dict(settings)


def prompts_of(options: Mapping[str, Any], tokenizer: Any) -> Prompts | StreamedPrompts:
    """Make prompts from their options; stream=True: from a source that is larger than memory."""
    given = {name: value for name, value in options.items() if name != "stream"}
    kind = StreamedPrompts if checked("stream", options.get("stream", False), bool) else Prompts
    return kind(**given, tokenizer=tokenizer)


def prompt_table(rows: Sequence[PromptRow], first_uid: int) -> Table:
    """Return the columns of a batch of prompts, numbered from `first_uid` on. If some prompts are messages, there is a
    column `messages`, with which an environment can begin."""
    table: Table = {
        "prompt_ids": Ragged.of([row.prompt_ids for row in rows], torch.int64),
        "prompt_uid": torch.arange(first_uid, first_uid + len(rows)),
        "prompt": [row.prompt for row in rows],
    }
    if any(row.messages for row in rows):
        table["messages"] = [row.messages for row in rows]
    for name in dict.fromkeys(itertools.chain.from_iterable(row.extra for row in rows)):
        if name in table:
            raise BadInput(f"a data set with a column {name!r}", "a batch already has this name", "rename the column")
        table[name] = [row.extra.get(name) for row in rows]
    return table


def reading(prompts: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for reading other rows as prompts: `own` options, else those of the workbench's prompts.
    prompts: the argument of `wb.open`."""
    given = prompts if isinstance(prompts, Mapping) else {}
    defaults = {"chat": None, "control_tokens": None, "max_prompt_tokens": 512, "overlong": "filter"}
    return {name: own.get(name, given.get(name, value)) for name, value in defaults.items()}


def check_room(prompts: Prompts | StreamedPrompts, generation: Generation | None) -> None:
    """Raise `BadInput` if the longest prompt, or in a stream the longest allowed one, leaves no room for a response."""
    if isinstance(prompts, StreamedPrompts):
        tokens, given = prompts.max_prompt_tokens, f"max_prompt_tokens={prompts.max_prompt_tokens} with stream=True"
    else:
        longest = max(prompts.rows, key=lambda row: len(row.prompt_ids))
        tokens = len(longest.prompt_ids)
        given = f"the prompt of row {longest.index} has {tokens} tokens"
    if generation and tokens >= generation.max_model_tokens:
        raise BadInput(
            given,
            f"prompt and response together have at most Generation.max_model_tokens={generation.max_model_tokens}",
            "raise it, or leave long prompts out with prompts={'source': ..., 'max_prompt_tokens': n}",
        )
