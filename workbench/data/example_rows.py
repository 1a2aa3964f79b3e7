"""Reads rows of a data set as examples: a prompt and its answer (a demonstration), the same with a rating (feedback),
or a prompt and two answers (a pair)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.data.prompt_rows import Conversation, Message, chat_messages, conversation_of, messages_of
from workbench.data.readers import Row
from workbench.data.user_functions import MOST, is_flag
from workbench.errors import BadInput
from workbench.errors.plain_text import shown

PROMPTS = ("prompt", "question")
RESPONSES = ("response", "completion", "answer")
LABELS = ("label", "desirable")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, kw_only=True)
class Example:
    """The content of one row.

    prompt: a text, or the messages before the answer. answers: the response; for a pair, the chosen and the rejected
    answer. turns: for each answer its messages, if they are more than a text. margin: for a pair, how much more the
    chosen answer is preferred; None if the row has no margin. desirable: for feedback, whether the answer was rated as
    good. tools: the row's own tools, see `row_tools`.
    """

    prompt: Conversation
    answers: tuple[str, ...]
    turns: tuple[Sequence[Message], ...] = ()
    margin: float | None = None
    desirable: bool = True
    tools: Sequence[Any] = ()


def demonstration(row: Row, where: str, *, rated: bool = False) -> Example:
    """Read a row as a demonstration: the assistant's text is learned; in a conversation, each of its turns after the
    first message.

        {"prompt": text or messages, "response": text or messages}     also "question"; also "completion", "answer"
        {"messages": [..., {"role": "assistant", ...}]}

    rated: read feedback, whose answer is the last message only. where: the row's place, for errors. Raises `BadInput`.
    """
    prompt = next((name for name in PROMPTS if name in row), None)
    response = next((name for name in RESPONSES if name in row), None)
    if prompt and response:
        text, turns = _answer(row[response], where, response, several=not rated)
        return Example(prompt=conversation_of(f"{where}: {prompt!r}", row[prompt]), answers=(text,), turns=(turns,))
    if "messages" in row:
        messages = messages_of(f"{where}: 'messages'", row["messages"])
        answers = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
        first = answers[-1 if rated else 0] if answers else len(messages) - 1
        text, turns = _said(messages[first:], where)
        return Example(prompt=messages[:first], answers=(text,), turns=(turns,))
    raise BadInput(
        f"{where} has {', '.join(map(repr, row)) or 'no columns'}",
        "a demonstration is {'prompt': ..., 'response': ...} or {'messages': [...]}",
        "rename its columns, or drop the row",
    )


def feedback(row: Row, where: str) -> Example:
    """Read a row as a rated answer (the last message of a conversation): like `demonstration`, with a "label" (or
    "desirable") that says whether the answer is good: true or false (1 or 0).

        {"prompt": text or messages, "completion": text, "label": true}

    where: the row's place, for errors. Raises `BadInput`.
    """
    label = next((name for name in LABELS if name in row), None)
    if label is None or not is_flag(row[label]):
        found = f"has {', '.join(map(repr, row)) or 'no columns'}" if label is None else f"{label}={shown(row[label])}"
        raise BadInput(
            f"{where}: {found}",
            "feedback is {'prompt': ..., 'response': ..., 'label': true or false}",
            "add a column 'label': whether the answer is good; write a pair as two rows",
        )
    return replace(demonstration(row, where, rated=True), desirable=bool(row[label]))


def pair(row: Row, where: str) -> Example:
    """Read a row as a preference pair.

        {"prompt": text or messages, "chosen": text, "rejected": text}
        {"chosen": text, "rejected": text}                 whole dialogues: their common beginning is the prompt
        {"chosen": messages, "rejected": messages}         the same; a "prompt" with which both begin may stand beside

    With a prompt, an answer may also be one message of the assistant. Optional: "margin", a number.
    Raises `BadInput`, with the row's place.
    """
    missing = [name for name in ("chosen", "rejected") if name not in row]
    if missing:
        raise BadInput(
            f"{where} has no {missing[0]!r}, but {', '.join(map(repr, row)) or 'no columns'}",
            "a pair is {'prompt': ..., 'chosen': ..., 'rejected': ...}, or has no prompt, if both answers begin "
            "with it",
            "rename its columns, or drop the row",
        )
    margin = row.get("margin")
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if margin is not None and not (is_number and abs(margin) <= MOST):
        raise BadInput(f"{where}: margin={shown(margin)}", "a margin is a finite number", "correct it")
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = next((name for name in PROMPTS if name in row), None)
    if prompt and not _begin_with(row[prompt], chosen, rejected):
        both = [_answer(row[name], where, name) for name in ("chosen", "rejected")]
        return _pair(conversation_of(f"{where}: {prompt!r}", row[prompt]), both, margin)
    if isinstance(chosen, str) and isinstance(rejected, str):
        start = _shared_text(chosen, rejected)
        if not chosen[:start].strip():
            raise BadInput(
                f"{where}: chosen and rejected do not begin with the same text",
                "without a 'prompt', the text that both begin with is the prompt",
                "add a column 'prompt', or drop the row",
            )
        return Example(prompt=chosen[:start], answers=(chosen[start:], rejected[start:]), margin=margin)
    turns = [messages_of(f"{where}: {name!r}", row[name]) for name in ("chosen", "rejected")]
    shared = _shared(*turns)
    # equal dialogues have the answer in common as well; it does not belong to the prompt
    shared = min(shared, len(turns[0]) - 1, len(turns[1]) - 1)
    if shared < 1 or any(len(t) != shared + 1 or t[-1]["role"] != "assistant" for t in turns):
        raise BadInput(
            f"{where}: chosen and rejected differ in more than the last message",
            "without a 'prompt', both must have the same messages before the assistant's last one",
            "add a column 'prompt', or drop the row",
        )
    return _pair(turns[0][:shared], [_said(messages[-1:], where) for messages in turns], margin)


def _begin_with(prompt: Any, *answers: Any) -> bool:
    """Whether each answer is a dialogue that begins with the prompt, as UltraFeedback's are."""
    opening = chat_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    return opening is not None and all((chat_messages(one) or [])[: len(opening)] == opening for one in answers)


def _pair(prompt: Conversation, both: Sequence[tuple[str, Sequence[Message]]], margin: float | None) -> Example:
    answers, turns = zip(*both, strict=True)
    return Example(prompt=prompt, answers=answers, turns=turns, margin=margin)


def dialogue(text: str) -> list[Message] | None:
    """Return the messages of a text whose turns begin with "\\n\\nHuman:" and "\\n\\nAssistant:"; None for other texts.

    Source of the format: HH-RLHF, Bai et al. 2022, https://arxiv.org/abs/2204.05862.
    """
    opening, *turns = _TURN.split(text)
    if opening.strip() or not turns:
        return None
    said = zip(turns[::2], turns[1::2], strict=True)
    messages = [{"role": _SPEAKERS[who], "content": content.strip()} for who, content in said]
    return messages if messages[-1]["content"] else messages[:-1]


def _shared_text(chosen: str, rejected: str) -> int:
    """Return where the answers begin: after the last common "Assistant:", else after the last common white space."""
    shared = chosen[: _shared(chosen, rejected)]
    answers = [turn.end() for turn in _TURN.finditer(shared) if turn[1] == "Assistant"]
    if answers or chosen == rejected:
        return answers[-1] if answers else len(shared.rstrip())
    return max((i + 1 for i, character in enumerate(shared) if character.isspace()), default=0)


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))


def _answer(value: Any, where: str, column: str, *, several: bool = False) -> tuple[str, Sequence[Message]]:
    """Read an answer, see `_said`. value: a text, which may be empty, or one message of the assistant. several: allow
    more messages, see `demonstration`."""
    if isinstance(value, str):
        return value, ()
    messages = messages_of(f"{where}: {column!r}", value)
    if not several and (len(messages) != 1 or messages[0]["role"] != "assistant"):
        rule, remedy = "an answer is one assistant message", "move the messages before it into the prompt"
        raise BadInput(f"{where}: {column!r} holds {len(messages)} messages", rule, remedy)
    return _said(messages, where)


def _said(messages: list[Message], where: str) -> tuple[str, Sequence[Message]]:
    """Return the text of an answer, and its messages if they have more than the text; else ()."""
    roles = [message["role"] for message in messages]
    if {roles[0], roles[-1]} != {"assistant"}:
        wrong = next(role for role in (roles[-1], roles[0]) if role != "assistant")
        raise BadInput(
            f"{where}: its messages do not begin and end with an answer, but have role {wrong!r} there",
            "the last message, and the first of a response, must have the role 'assistant'",
            "correct the role, or drop the row",
        )
    text = "\n\n".join(message["content"] for message in messages if message["role"] == "assistant")
    more = len(messages) > 1 or any(value for key, value in messages[0].items() if key not in ("role", "content"))
    return text, messages if more else ()
