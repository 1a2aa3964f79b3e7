"""Parses a harness's requests. A field is honoured, or refused with an error in OpenAI's form: value, rule, remedy. No
field that would change what is sampled is ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.errors.plain_text import shown
from workbench.models.tokenizers import has_texts, is_text
from workbench.settings.engines import Sampling

MODEL = "policy"  # the one model that is served
Kind = Literal["chat", "text"]

# The stage's settings. Recorded tokens were sampled with them, so a request may repeat but not change them.
OF_STAGE = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip
# Fields that may have only these values, which ask for nothing.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
}
REMEDIES = {"n": "send n requests", "logprobs": "leave it out: the batch has them in its column rollout_log_prob"}
# Fields that do not affect the answer.
WITHOUT_EFFECT = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
OF_BOTH = ("model", "max_tokens", "stop", "stream", "stream_options")
OWN: Mapping[Kind, tuple[str, ...]] = {
    "chat": (*OF_BOTH, "messages", "max_completion_tokens", "tools", "tool_choice"),
    "text": (*OF_BOTH, "prompt"),
}
UNICODE = "all its texts must be Unicode, without halves of surrogate pairs", "leave the broken characters out"
MOST_STOPS = 16
MOST_TOOLS = 128


class Refused(Exception):
    """A request's refusal, sent as an error in OpenAI's form. status: of HTTP. code: short, for programs."""

    def __init__(
        self, value: str, rule: str = "", remedy: str = "", *,
        status: int = 400, param: str | None = None, code: str = "invalid_value",
    ) -> None:  # fmt: skip
        super().__init__(f"{value}{rule and f': {rule}'}{remedy and f'; {remedy}'}")
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def wrong_key() -> Refused:
    """Return the refusal of a request whose key is unknown, or no longer valid."""
    return Refused("the API key is wrong", "use the one that came with the address", status=401, code="wrong_key")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that can be honoured. messages: of a chat, as the chat template takes them. tools: the JSON schemas of
    offered tools. prompt: of a completion, a text or token ids. most_tokens: None: as many as there is room for. stop:
    None: the stage's. stream: answer with server-sent events, the first of which has the whole answer. usage: add a
    last event that counts tokens."""

    kind: Kind
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] = ""
    most_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stream: bool = False
    usage: bool = False


def parse(kind: Kind, body: object, sampling: Sampling) -> Request:
    """Parse a request's JSON. Raises `Refused`."""
    if not isinstance(body, dict):
        raise Refused(f"the body is {type(body).__name__}", "it must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("model", MODEL) != MODEL:
        raise Refused(
            f"model={shown(given['model'])}", f"the one model here is {MODEL!r}", f"write model={MODEL!r}",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip
    for name, value in given.items():
        if name not in (*OWN[kind], *WITHOUT_EFFECT):
            _check_setting(name, value, sampling)
    stream, options = given.get("stream", False), given.get("stream_options")
    if type(stream) is not bool:
        raise Refused(f"stream={shown(stream)}", "must be true or false", param="stream")
    return Request(
        kind=kind,
        messages=_messages(given.get("messages")) if kind == "chat" else (),
        tools=_tools(given) if kind == "chat" else (),
        prompt=_prompt(given.get("prompt")) if kind == "text" else "",
        most_tokens=_most_tokens(given),
        stop=_stop(given.get("stop")),
        stream=stream,
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _check_setting(name: str, value: Any, sampling: Sampling) -> None:
    if name in OF_STAGE:
        mine = getattr(sampling, name)
        if name == "logit_bias":
            mine, value = {str(token): bias for token, bias in (mine or {}).items()}, value or {}
        if type(value) in (int, float, dict) and value == mine:
            return
        raise Refused(
            f"{name}={shown(value)}", f"the server samples with {name}={mine}",
            f"leave it out, or set it for the server: generate_sequences(agent=..., {name}=...), "
            f"lab.serve(sampling=wb.Sampling({name}=...))", param=name, code="unsupported_value",
        )  # fmt: skip
    if name in FIXED:
        if any(type(value) is type(one) and value == one for one in FIXED[name]):
            return
        allowed = " or ".join(repr(one) for one in FIXED[name])
        raise Refused(
            f"{name}={shown(value)}", f"the server accepts only {allowed}", REMEDIES.get(name, "leave it out"),
            param=name, code="unsupported_value",
        )  # fmt: skip
    if name == "seed":
        if sampling.temperature == 0 and type(value) is int:  # nothing is drawn
            return
        raise Refused(
            f"seed={shown(value)}", "sampling uses the stage's seed; the server accepts a seed only at temperature 0",
            "leave it out; for agents set generate_sequences(agent=..., seed=...)",
            param="seed", code="unsupported_value",
        )  # fmt: skip
    raise Refused(
        f"{name}={shown(value)}", "the server does not know this field, or cannot honour it", "leave it out",
        param=name, code="unknown_parameter",
    )  # fmt: skip


def _most_tokens(given: Mapping[str, Any]) -> int | None:
    named = {name: given[name] for name in ("max_completion_tokens", "max_tokens") if name in given}
    for name, value in named.items():
        if type(value) is not int or value < 1:
            raise Refused(f"{name}={shown(value)}", "must be a whole number of at least 1", param=name)
    return min(named.values(), default=None)


def _stop(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(is_text(stop) and stop for stop in stops):
        raise Refused(
            f"stop={shown(value)}", f"must be a text, or a list of at most {MOST_STOPS} texts, none of them empty",
            param="stop",
        )  # fmt: skip
    return tuple(stops)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if is_text(value) and value:
        return str(value)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise Refused(
        f"prompt={shown(value)}", "must be one text that is not empty, or its token ids",
        "send one request for each prompt", param="prompt",
    )  # fmt: skip


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise Refused(f"messages={shown(value)}", "must be a list of at least one message", param="messages")
    return tuple(plain_message(message, number) for number, message in enumerate(value))


def _tools(given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    choice, tools = given.get("tool_choice", "auto"), given.get("tools", [])
    if choice not in ("auto", "none"):
        raise Refused(
            f"tool_choice={shown(choice)}", "the policy decides whether it calls a tool", "write 'auto' or 'none'",
            param="tool_choice", code="unsupported_value",
        )  # fmt: skip
    right = isinstance(tools, list) and len(tools) <= MOST_TOOLS and all(map(_is_tool, tools))
    if not right:
        raise Refused(
            f"tools={shown(tools)}",
            f"must be a list of at most {MOST_TOOLS} {{'type': 'function', 'function': {{'name': ..., ...}}}}",
            param="tools",
        )
    if not has_texts(tools):
        raise Refused("the tools", *UNICODE, param="tools")
    return () if choice == "none" else tuple(tools)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    return isinstance(function, dict) and is_text(function.get("name")) and bool(function["name"])


def plain_message(message: Any, number: int) -> dict[str, Any]:
    """Return a message as the chat template takes it, without empty fields; equal if messages mean the same."""
    param = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"{param}={shown(message)}", "must be an object with a role", param=param)
    plain = {name: value for name, value in message.items() if value not in (None, [], {})}
    plain["content"] = _content(message.get("content"), param)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], param)
    if not has_texts(plain):
        raise Refused(param, *UNICODE, param=param)
    return plain


def _tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Return calls as chat templates take them: a request has arguments as JSON text, a template takes an object."""
    found = []
    try:
        for call in calls:
            name, given = str(call["function"]["name"]), call["function"]["arguments"]
            function = {"name": name, "arguments": json.loads(given) if isinstance(given, str) else given}
            found.append({"id": str(call["id"]), "type": "function", "function": function})
    except (TypeError, KeyError, ValueError, RecursionError):
        raise Refused(
            f"tool_calls of {param}={shown(calls)}", "must be calls as the server sent them", "send them unchanged",
            param=param,
        ) from None  # fmt: skip
    return found


def _content(value: Any, param: str) -> str:
    if value is None:
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        value = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    if not is_text(value):
        raise Refused(f"the content of {param}", "must be a text, or parts of type 'text'", param=param)
    return str(value)
