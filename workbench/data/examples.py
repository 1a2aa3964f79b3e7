"""Demonstrations, rated answers and preference pairs: rows of a source as token ids, for training or held out."""

from __future__ import annotations

import functools
import itertools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table
from workbench.data.example_rows import Example, demonstration, dialogue, feedback, pair
from workbench.data.prompt_rows import Message, contents, row_tools
from workbench.data.prompt_stream import Feed
from workbench.data.prompts import EpochRows
from workbench.data.readers import BadRows, Overlong, Row, Rows, counts
from workbench.data.sources import Source, read_rows
from workbench.data.user_functions import short
from workbench.display.html import table
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models import render_prompt
from workbench.models.chat_format import ChatFormat, with_row_tools
from workbench.models.chat_template import rendered, unread, warn_if_rendered
from workbench.models.control_tokens import encoded, escape
from workbench.models.tokenizers import REASONING, AnswerFormat, render_reply, turn_end
from workbench.support.checked_calls import checked_call, checks_calls
from workbench.support.validation import NonNegativeInt, Rule, Whole, whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Kind = Literal["demonstrations", "feedback", "pairs"]
_READ: dict[Kind, Callable[[Row, str], Example]] = {
    "demonstrations": demonstration,
    "feedback": feedback,
    "pairs": pair,
}
# the columns of token ids, in the order of `Example.answers`
ANSWERS: dict[Kind, tuple[str, ...]] = {
    "demonstrations": ("response",),
    "feedback": ("response",),
    "pairs": ("chosen", "rejected"),
}


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """One row as token ids. An answer ends like a finished rollout: with the chat template's end of a turn if the
    template renders it, else with EOS. An answer of several turns has the same tokens as a rollout with an environment.
    learned: for each token of the first answer, whether it is the assistant's."""

    example: Example
    prompt_ids: list[int]
    answer_ids: tuple[list[int], ...]
    learned: list[bool]

    @property
    def prompt(self) -> str:
        """The text of the prompt; for messages, the text of the last message."""
        given = self.example.prompt
        return given if isinstance(given, str) else str(given[-1]["content"])

    @property
    def tokens(self) -> int:
        """The number of tokens of the prompt and its longest answer."""
        return len(self.prompt_ids) + max(map(len, self.answer_ids))


class Examples(EpochRows[Tokenized]):
    """All rows of a source, tokenized once. Only the seed decides the order in which they are drawn.

    source: see `read_rows`. kind: the kind of its rows, see `demonstration`, `feedback` and `pair`.
    max_tokens: for prompt and answer together. overlong: how to treat a longer row: "filter" drops it; "cut" removes
        tokens from the front of the prompt (BOS stays), and drops the row only if its answer alone is too long;
        "error" raises `BadInput`. Both answers of a pair keep the same prompt.
    held_out: the number of rows that are never drawn for training. Rows with equal prompts stay together.
    chat: whether the chat template renders texts, or a `wb.ChatFormat(...)` for it; None: if the tokenizer has a
        template. A prompt in HH-RLHF's format ("\\n\\nHuman: ...\\n\\nAssistant:") then becomes messages.
    control_tokens: whether "<|im_end|>" and the like in a row are control tokens; None: only with chat=False, for texts
        that a template has already rendered. Else they are text, and `with_control_tokens` counts such rows.
    bad_rows: "error": a row of another kind raises `BadInput`; "skip": the row is left out, and `skipped` lists its
        place and the reason.

    Pairs with equal answers are dropped, because nothing can be learned from them. `dropped`, `cut`, `equal` count
    rows. `unread`: parts of rows that the chat template ignores. Raises `BadInput`, with the row's place, for a row of
    another kind.
    """

    @checked_call("examples")
    def __init__(
        self,
        source: Source,
        kind: Kind,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: Annotated[Whole, Field(ge=2)] = 512,
        overlong: Overlong = "filter",
        held_out: NonNegativeInt = 0,
        seed: NonNegativeInt = 0,
        shuffle: bool = True,
        chat: ChatFormat | bool | None = None,
        bad_rows: BadRows = "error",
        control_tokens: bool | None = None,
    ) -> None:
        if isinstance(chat, ChatFormat):
            chat.check(tokenizer)
        self.kind, self.max_tokens, self.overlong = kind, max_tokens, overlong
        self.control_tokens = chat is False if control_tokens is None else control_tokens
        self.dropped = self.cut = self.equal = self.with_control_tokens = self.other_tools = 0
        self.unread = set[str]()
        self._tokenizer, self._chat = tokenizer, bool(tokenizer.chat_template) if chat is None else chat
        self._turn_end, self._warned = turn_end(tokenizer), not (self._chat and tokenizer.chat_template)
        rows = read_rows(source, bad_rows=bad_rows)
        self.name, self.skipped, self.read_as = rows.name, rows.skipped, rows.read_as
        self.held_out, self.training = _split(self._all(rows), held_out, seed)
        self._need_margins()
        if not self.training:
            raise BadInput(
                f"{self.name}: of {len(rows)} rows none is left for training ({self.summary})",
                "at least one row must be left",
                "give more rows or pairs whose answers differ, raise max_tokens, use overlong='cut', or hold out fewer",
            )
        super().__init__(self.training, seed=seed, shuffle=shuffle, called=kind)

    def table(self, rows: Sequence[Tokenized]) -> Table:
        """Return the rows as columns of a batch: `prompt`, `prompt_ids`, each answer as text and as `..._ids`; for
        demonstrations `response_mask`, 1 on the assistant's tokens; for feedback `desirable`, and `mismatched_ids`, for
        KTO's reference point: the answer of the previous row (for the first row, of the last), cut if it is too long
        for this row's prompt; `margin` if the rows have margins."""
        table: Table = {
            "prompt": [row.prompt for row in rows],
            "prompt_ids": Ragged.of([row.prompt_ids for row in rows], torch.int64),
        }
        for i, name in enumerate(ANSWERS[self.kind]):
            table[name] = [row.example.answers[i] for row in rows]
            table[f"{name}_ids"] = ids = Ragged.of([row.answer_ids[i] for row in rows], torch.int64)
            if self.kind == "demonstrations":
                table["response_mask"] = ids.like(torch.tensor([one for row in rows for one in row.learned]))
        if self.kind == "feedback":
            answers = [row.answer_ids[0] for row in (*rows[-1:], *rows[:-1])]
            rooms = [self.max_tokens - len(row.prompt_ids) for row in rows]
            cut = [ids[:room] for ids, room in zip(answers, rooms, strict=True)]
            table["mismatched_ids"] = Ragged.of(cut, torch.int64)
            table["desirable"] = torch.tensor([row.example.desirable for row in rows])
        if self.training and self.training[0].example.margin is not None:  # all rows have a margin, or none has
            table["margin"] = torch.tensor([float(row.example.margin or 0) for row in rows])
        return table

    @property
    def summary(self) -> str:
        """One line about the rows that were read, such as "1588 pairs, 200 held out, 12 over 512 tokens dropped"."""
        told = [f"{len(self.training)} {self.kind}"]
        told += [f"{len(self.held_out)} held out"] if self.held_out else []
        told += counts(f"over {self.max_tokens} tokens", self.cut, self.dropped, self.skipped, self.with_control_tokens)
        told += [f"{self.equal} with equal answers dropped"] if self.equal else []
        rows = f"{self.other_tools} row{'s' * (self.other_tools != 1)}"
        told += [f"in {rows} 'tools' is left out, because it holds no JSON schemas"] if self.other_tools else []
        told += [f"the chat template leaves out {', '.join(map(repr, sorted(self.unread)))}"] if self.unread else []
        return ", ".join(told)

    def __repr__(self) -> str:
        name = reprlib.repr(self.name)[1:-1]
        read = f"; read as {self.read_as}" if self.read_as else ""
        return f"<{name}: {self.summary}; epoch {self.epoch}, next {self.position % len(self.training)}{read}>"

    def numbers_of(self, row: Tokenized) -> list[list[int]]:
        return [[len(ids), *ids] for ids in (row.prompt_ids, *row.answer_ids)]

    def _all(self, rows: Rows) -> list[Tokenized]:
        found = list[Tokenized]()
        for i, row in enumerate(rows):
            try:
                example = replace(_READ[self.kind](row, rows.where(i)), tools=row_tools(row))
                self.other_tools += bool(row.get("tools")) and not example.tools
                found += filter(None, [self._fit(example, rows.where(i))])
            except BadInput as error:
                self.skipped.add(error, rows.where(i))
        return found

    def _fit(self, example: Example, where: str) -> Tokenized | None:
        """Return the row's token ids, with the prompt cut if `overlong` says so; None if the row is dropped."""
        tokenized = self._tokenize(example)
        self._warned = self._warned or warn_if_rendered([*contents(example.prompt), *example.answers], where)
        if len(tokenized.answer_ids) > 1 and tokenized.answer_ids[0] == tokenized.answer_ids[1]:
            self.equal += 1
            return None
        over = tokenized.tokens - self.max_tokens
        if over <= 0:
            return tokenized
        if self.overlong == "error":
            raise BadInput(
                f"{where} has {tokenized.tokens} tokens",
                f"max_tokens is {self.max_tokens}",
                "raise it, or give overlong='filter' or overlong='cut'",
            )
        ids = tokenized.prompt_ids
        start = ids[:1] if ids[0] == self._tokenizer.bos_token_id else []
        rest = ids[len(start) + over :]
        if self.overlong == "filter" or not rest:
            self.dropped += 1
            return None
        self.cut += 1
        return replace(tokenized, prompt_ids=start + rest)

    def _tokenize(self, example: Example) -> Tokenized:
        tokenizer, prompt, answers, tools = self._tokenizer, example.prompt, example.answers, example.tools
        chat = self._chat or not isinstance(prompt, str) or any(example.turns)
        if chat and isinstance(prompt, str) and (turns := dialogue(prompt)):
            prompt, answers = turns, tuple(answer.removeprefix(" ") for answer in answers)
        if isinstance(chat, ChatFormat):
            prompt = chat.messages(prompt)
        said: Sequence[Any] = answers
        if chat:
            given = example.turns or ((),) * len(answers)
            said = [more or [{"role": "assistant", "content": one}] for one, more in zip(answers, given, strict=True)]
            self.unread |= unread(tokenizer, () if isinstance(prompt, str) else prompt, tools)
            self.unread |= unread(tokenizer, itertools.chain(*said), ()).difference(REASONING)
            for one in said:
                whole = [*([] if isinstance(prompt, str) else prompt), *one]
                if any(a["role"] == b["role"] == "assistant" for a, b in itertools.pairwise(whole)):
                    rendered(tokenizer, whole, next_turn=False)  # raises if the template refuses two turns in a row
        if not self.control_tokens:
            before, (prompt, said, tools) = (prompt, said, tools), escape(tokenizer, (prompt, said, tools))
            self.with_control_tokens += before != (prompt, said, tools)
        prompt_ids = render_prompt(tokenizer, prompt, chat=with_row_tools(chat, tools, tokenizer))
        found = [self._turns(one) if chat else self._plain(one) for one in said]
        answer_ids = tuple(ids for ids, _ in found)
        return Tokenized(example=example, prompt_ids=prompt_ids, answer_ids=answer_ids, learned=found[0][1])

    @functools.cached_property
    def _formats(self) -> tuple[AnswerFormat, AnswerFormat]:
        """The formats of a row's first answer, and of later turns, which get no template arguments and no prefill."""
        chat = self._chat if isinstance(self._chat, ChatFormat) else ChatFormat()
        return AnswerFormat(self._tokenizer, chat.arguments, chat.prefill), AnswerFormat(self._tokenizer)

    def _plain(self, answer: str) -> tuple[list[int], list[bool]]:
        ids, eos = encoded(self._tokenizer, answer), self._tokenizer.eos_token_id
        # a text that was rendered earlier may already have its end token
        ids = ids if ids and ids[-1] in (eos, self._turn_end) else [*ids, eos]
        return ids, [True] * len(ids)

    def _turns(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the token ids of messages that begin with an answer, and for each whether it is the assistant's."""
        (first, later), ids, learned, between = self._formats, list[int](), list[bool](), list[Message]()
        for message in messages:
            if message["role"] != "assistant":
                between.append(message)
                continue
            lead = render_reply(self._tokenizer, between, after=ids[-1]) if ids else []
            turn = [*encoded(self._tokenizer, (later if ids else first)(message)), self._turn_end]
            ids += [*lead, *turn]
            learned += [False] * len(lead) + [True] * len(turn)
            between = []
        return ids, learned

    def _need_margins(self) -> None:
        rows = [*self.training, *self.held_out]
        without = sum(row.example.margin is None for row in rows)
        if 0 < without < len(rows):
            raise BadInput(
                f"{self.name}: {without} of {len(rows)} rows have no margin", "all rows need one, or none", "add them"
            )


def _split(rows: list[Tokenized], held_out: int, seed: int) -> tuple[list[Tokenized], list[Tokenized]]:
    """Return (held out, for training), each in the source's order. The seed draws whole groups of equal prompts."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(row.prompt_ids), []).append(i)
    ordered, apart = list(groups.values()), set[int]()
    # three numbers, so that the split does not equal the order of an epoch, which has two
    for g in np.random.default_rng([seed, 0, 1]).permutation(len(ordered)):
        if len(apart) + len(ordered[g]) <= held_out:
            apart.update(ordered[g])
    return [row for i, row in enumerate(rows) if i in apart], [row for i, row in enumerate(rows) if i not in apart]


@checks_calls("examples")
class ExampleStream:
    """Draws batches of demonstrations, feedback or pairs, in an order that depends only on the seed.

        pairs = lab.pairs("pairs.jsonl", held_out=200)
        batch = pairs.next(64)
        lab.reward.compute_pair_rewards(pairs.held_out)
        lab.last_metrics["compute_pair_rewards"]  # the accuracy on them

    options: see `Examples`. first: the state before the first draw. len() is the number of rows in one epoch.
    """

    def __init__(
        self, feed: Feed, source: Source, kind: Kind, *, seed: int, tokenizer: Any, options: Mapping[str, Any]
    ) -> None:
        self._feed, self.drawn = feed, 0
        given = seed if options.get("seed") is None else options["seed"]
        self.examples = Examples(source, kind, tokenizer=tokenizer, **{**options, "seed": given})
        self.first = self.state

    def next(self, n: int) -> Batch:
        """Draw the next n rows for training as a batch, and begin an iteration. Columns: see `Examples.table`."""
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
        """The kind, position and identity of the rows, as plain values."""
        return {"kind": self.examples.kind, "drawn": self.drawn, "examples": self.examples.state_dict()}

    def resume_if_same(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state` if it belongs to a stream of the same rows. Return whether it does."""
        now = {**self.examples.state_dict(), "position": state["examples"]["position"]}
        if state["kind"] != self.examples.kind or state["examples"] != now:
            return False
        self.examples.load_state_dict(state["examples"])
        self.drawn = state["drawn"]
        return True

    @functools.cached_property
    def held_out(self) -> Batch:
        """All held-out rows, as one batch."""
        if not self.examples.held_out:
            raise BadInput(f"{self!r}", "no rows are held out", f"lab.{self.examples.kind}(..., held_out=200)")
        # without an iteration: metrics on this batch are reported under the iteration in which they are computed
        return self._put(self.examples.held_out, {})

    def _put(self, rows: list[Tokenized], meta: Mapping[str, int]) -> Batch:
        table = self.examples.table(rows)
        table["prompt_uid"] = torch.arange(self.drawn, self.drawn + len(rows))
        self.drawn += len(rows)
        return self._feed.put(table, meta=meta, owner=self.examples.kind)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of its batches."""
        return (*self.examples.table(self.examples.training[:1]), "prompt_uid")

    @staticmethod
    def check(stream: ExampleStream, kind: Kind, rows: int, name: str = "rows") -> None:
        """Raise `BadInput` unless `stream` draws rows of that kind, and has at least `rows` rows for training. name:
        the name of the setting for `rows`."""
        if stream.examples.kind != kind:
            raise BadInput(f"{kind}={shown(stream)}", f"must be {kind}", f"make them with lab.{kind}(source)")
        whole(name, rows)
        if rows > len(stream):
            fewer = "" if kind == "feedback" and len(stream) == 1 else f", or {name}={len(stream)}"
            raise BadInput(
                f"{name}={rows} of {stream!r}",
                f"a batch has each row at most once, and there are {len(stream)} rows",
                f"give more data{fewer}",
            )

    def __len__(self) -> int:
        return len(self.examples.training)

    def __repr__(self) -> str:
        return repr(self.examples)

    def _repr_html_(self) -> str:
        following = [self.examples.at(self.examples.position + i) for i in range(min(3, len(self)))]
        rows = [
            {name: short(text, 200) for name, text in zip(
                ("prompt", *ANSWERS[self.examples.kind]), (row.prompt, *row.example.answers), strict=True)}
            for row in following
        ]  # fmt: skip
        return table(rows, caption=repr(self)[1:-1])


Demonstrations = Annotated[ExampleStream, Rule("must be demonstrations", "make them with lab.demonstrations(source)")]
Feedback = Annotated[ExampleStream, Rule("must be feedback", "make it with lab.feedback(source)")]
Pairs = Annotated[ExampleStream, Rule("must be pairs", "make them with lab.pairs(source)")]
