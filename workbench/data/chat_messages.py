"""Messages of a conversation in a row of a data set, in the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
FORM = (
    "messages are a list such as [{'role': 'user', 'content': 'Hi'}] whose content is text; a message of the assistant "
    "may have 'tool_calls' in its place"
)


def chat_messages(value: Any) -> list[Message] | None:
    """The messages of a value of a data set; None where it holds none.

    Content in parts such as [{"type": "text", "text": "Hi"}] is joined; of a message that only calls tools it is "".
    Keys without a value, which tables of arrow fill in, are left out. `arguments` of a tool call that are JSON text, as
    the API of OpenAI gives them, become a dict.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return None
    found = [_message(one) for one in value]
    return None if None in found else found  # type: ignore[return-value]


def _message(value: Any) -> Message | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return None
    message = {str(key): one for key, one in value.items() if one is not None}
    content = message.get("content")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            return None
        message["tool_calls"] = [_call(call) for call in calls]
        content = "" if calls and content is None else content
    if not isinstance(content, str):
        return None
    return {**message, "content": content}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: one for key, one in call.items() if one is not None}
    function = found.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return found
        if isinstance(arguments, dict):
            found["function"] = {**function, "arguments": arguments}
    return found
