"""Columns as other libraries name them, read as the names that are used here.

| recognised by | whose | becomes |
| --- | --- | --- |
| `prompt`, and `reward_model` with a `ground_truth` | verl | `answer` is the ground truth |
| `context_messages`, or `input` | OpenRLHF | `messages`, or `prompt`; `output`, or else a text `label`, is `answer` |
| messages in `prompt` or `messages` | TRL | as they are |
| `instruction` with `output` | Alpaca | `prompt`, with `input` behind it; `answer` |
| `conversations` of `from` and `value` | ShareGPT | `messages` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from workbench.data.rows import Row, Rows

PROMPTS = ("prompt", "question", "messages")
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "function_call": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


class Convention(NamedTuple):
    """name: how it is said. holds: whether a row has such columns. read: the row with the columns used here."""

    name: str
    holds: Callable[[Row], bool]
    read: Callable[[Row], Row]

    def of(self, row: Row) -> Row:
        """The row in our columns; as it is where it lacks some of those of the convention, which is told when it is
        read."""
        return self.read(row) if self.holds(row) else row


def in_our_columns(rows: Rows) -> Rows:
    """The rows in the columns that are used here, where the first one follows a known convention; else as they are."""
    found = convention_of(rows[0])
    if found is not None:
        rows.read_as = found.name
        rows[:] = [found.of(row) for row in rows]
    return rows


def convention_of(row: Row) -> Convention | None:
    """The convention that a row follows; None: the names are those that are used here."""
    return next((one for one in CONVENTIONS if one.holds(row)), None)


def _has_messages(value: object, *keys: str) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(one, Mapping) and all(key in one for key in keys) for one in value)  # type: ignore[attr-defined]


def _without_prompt(row: Row) -> bool:
    return not any(name in row for name in PROMPTS)


def _is_verl(row: Row) -> bool:
    return "prompt" in row and isinstance(row.get("reward_model"), Mapping) and "ground_truth" in row["reward_model"]


def _of_verl(row: Row) -> Row:
    return {"answer": row["reward_model"]["ground_truth"], **row}


def _of_openrlhf(row: Row) -> Row:
    name = "context_messages" if "context_messages" in row else "input"
    prompt = "prompt" if isinstance(row[name], str) or "chosen" in row or "output" in row else "messages"
    found = {prompt: row[name], **{key: value for key, value in row.items() if key not in (name, "output")}}
    answers = [row[key] for key in ("output", "label") if isinstance(row.get(key), str)]
    return {"answer": answers[0], **found} if answers else found


def _of_alpaca(row: Row) -> Row:
    rest = {key: value for key, value in row.items() if key not in ("instruction", "input", "output")}
    more = row.get("input")
    prompt = f"{row['instruction']}\n\n{more}" if isinstance(more, str) and more.strip() else row["instruction"]
    return {"prompt": prompt, "answer": row["output"], **rest}


def _of_sharegpt(row: Row) -> Row:
    rest = {key: value for key, value in row.items() if key != "conversations"}
    messages = [{"role": SPEAKERS[one["from"]], "content": one["value"]} for one in row["conversations"]]
    return {"messages": messages, **rest}


def _is_sharegpt(row: Row) -> bool:
    turns = row.get("conversations")
    return _without_prompt(row) and _has_messages(turns, "from", "value") and all(t["from"] in SPEAKERS for t in turns)  # type: ignore[union-attr]


CONVENTIONS = (
    Convention("verl's columns: the answer is reward_model['ground_truth']", _is_verl, _of_verl),
    Convention(
        "Alpaca's columns: 'instruction' with 'input' is the prompt, 'output' the answer",
        lambda row: _without_prompt(row) and isinstance(row.get("instruction"), str) and "output" in row,
        _of_alpaca,
    ),
    Convention("ShareGPT's 'conversations': messages with 'from' and 'value'", _is_sharegpt, _of_sharegpt),
    Convention(
        "OpenRLHF's columns: 'context_messages' or 'input' is the prompt, 'output' or 'label' the answer",
        lambda row: _without_prompt(row) and ("context_messages" in row or "input" in row),
        _of_openrlhf,
    ),
    Convention(
        "TRL's conversations: messages in 'prompt' or 'messages'",
        lambda row: any(_has_messages(row.get(name), "role", "content") for name in ("prompt", "messages")),
        lambda row: row,
    ),
)
