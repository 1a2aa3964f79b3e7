"""Reads an assistant's turn as a message: content, reasoning, and tool calls in the format of the model's family.

    {"role": "assistant", "content": "Let me see.", "reasoning_content": "12 times 7 ...",
     "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 84}}}]}

A message has no entry for a part that its turn lacks, except `content`. Malformed calls are in `invalid_tool_calls`,
each {"text": ..., "error": ...}, so that an environment can tell the model. The message is read from the text; the
tokens of the turn stay as sampled, even if the tokenizer would encode that text differently.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from workbench.errors import BadInput
from workbench.errors.plain_text import plain_text, shown
from workbench.models.chat_template import rendered, template_text
from workbench.models.control_tokens import special_tokens
from workbench.models.tokenizers import REASONING, THINK, has_texts, is_text, turn_end
from workbench.support.validation import one_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Template = Mapping[str, Any]
Message = dict[str, Any]


def _template(call: Template) -> Template:
    """Return transformers' response template for a family's format of calls; `_calls` reads the calls' bodies."""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"\A",  # our formats get no prefix
        "fields": {
            "reasoning_content": {"open": THINK, "close": "</think>"},
            "tool_calls": {"repeats": True, **call},
            "content": {"repeats": True, "join": "", "content_args": {"strip": False}},
        },
    }


# Formats of calls, by the names of vLLM's tool parsers, and (in MARKS) the text in a chat template that identifies
# each.
FORMATS: Mapping[str, Template] = {
    "qwen3_coder": _template({
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }),
    "hermes": _template({"open": "<tool_call>", "close": "</tool_call>"}),
    "mistral": _template({"open": "[TOOL_CALLS]"}),
    "llama3_json": _template({"open_pattern": r"<\|python_tag\|>|\A\s*(?=\{)"}),
}  # fmt: skip
MARKS = {
    "<function=": "qwen3_coder", "<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json",
    "<|start_header_id|>": "llama3_json",
}  # fmt: skip
NEEDED = 'a call is {"name": ..., "arguments": {...}}'


def response_template(tokenizer: PreTrainedTokenizerBase, form: str | Template | None) -> Template:
    """Return the response template for a model's turns. form: one of `FORMATS`, or a response template of transformers;
    None: the tokenizer's own, else the format whose mark is in its chat template, else "hermes".
    """
    if isinstance(form, Mapping):
        return form
    if form is not None:
        one_of("tool_format", form, tuple(FORMATS))
        return FORMATS[form]
    if (own := getattr(tokenizer, "response_template", None)) is not None:
        return dict(own)
    return FORMATS[next((name for mark, name in MARKS.items() if mark in template_text(tokenizer)), "hermes")]


def check_template(template: Template) -> None:
    """Raise `BadInput` if transformers does not accept a response template."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(dict(template))
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(
            f"tool_format={shown(dict(template), 80)}",
            f"transformers rejects it as a response template: {plain_text(str(error), 200)}",
            f"give one of {', '.join(FORMATS)}, or a template as transformers documents it",
        ) from error


class TurnReader:
    """Reads turns of one model as messages. form: see `response_template`. tools: JSON schemas, which give arguments
    their types if the format writes arguments as text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, form: str | Template | None = None, tools: Sequence[Template] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._tools: list[dict[str, Any] | Callable[..., Any]] = [dict(tool) for tool in tools]
        self._template = response_template(tokenizer, form)
        check_template(self._template)

    @functools.cached_property
    def _ends(self) -> frozenset[int]:
        assert self._tokenizer.eos_token_id is not None
        return frozenset({int(self._tokenizer.eos_token_id), turn_end(self._tokenizer)})

    def message(self, token_ids: Sequence[int], *, lead_ids: Sequence[int] = ()) -> Message:
        """Return a turn as a message. lead_ids: the tokens between the assistant's previous turn and this one; their
        end may already begin the turn, if the template opens the reasoning."""
        from transformers.utils.chat_parsing import parse_response

        ids = list(token_ids)
        text = str(self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._ends else ids))
        lead = str(self._tokenizer.decode(list(lead_ids)))
        if self._template in FORMATS.values():
            begun = THINK if lead.rstrip().endswith(THINK) else ""
            text, lead = begun + text, ""
        try:
            found = parse_response(text, dict(self._template), prefix=lead, tools=self._tools)
        except (ValueError, KeyError, TypeError) as error:  # a call that the template cannot read
            found = {"content": text, "invalid_tool_calls": [_invalid(text, plain_text(str(error), 200))]}
        return self._as_message(found)

    def _as_message(self, found: Mapping[str, Any]) -> Message:
        message: Message = {"role": "assistant", "content": self._without_marks(found.get("content") or "")}
        if reasoning := next((found[name] for name in REASONING if found.get(name)), ""):
            message["reasoning_content"] = self._without_marks(reasoning)
        calls, invalid = list[Any](), list(found.get("invalid_tool_calls", ()))
        for part in found.get("tool_calls") or ():
            for call in _calls(part):
                (invalid if "error" in call else calls).append(call)
        if calls:
            message["tool_calls"] = [{"id": f"call{n:05d}", **call} for n, call in enumerate(calls)]
        if invalid:
            message["invalid_tool_calls"] = invalid
        return message

    def _without_marks(self, text: str) -> str:
        for mark in special_tokens(self._tokenizer):
            text = text.replace(mark, "")
        return text.strip()


def _invalid(text: str, error: str) -> dict[str, str]:
    return {"text": text, "error": error}


def _calls(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the calls of one region of a turn. part: a call that the template has parsed, or a text of JSON values,
    including Mistral's `name[ARGS]{...}`."""
    if not isinstance(part, str):
        yield _call(part, str(part))
        return
    text = part.strip()
    if not text:
        yield _invalid(part, f"the call is empty: {NEEDED}")
    while text:
        name, marked, rest = text.partition("[ARGS]")
        named = bool(marked) and "{" not in name
        try:
            value, end = json.JSONDecoder().raw_decode(rest if named else text)
        except (ValueError, RecursionError) as error:
            yield _invalid(text, f"not JSON ({error}): {NEEDED}")
            return
        if named:
            value = {"name": name.strip(), "arguments": value}
        for one in value if isinstance(value, list) else [value]:
            yield _call(one, text)
        text = (rest if named else text)[end:].lstrip("; \n\t").removeprefix("[TOOL_CALLS]")


def _call(value: Any, text: str) -> dict[str, Any]:
    """Return a call in the form for messages, or in the form for invalid calls with the error."""
    function = value.get("function", value) if isinstance(value, dict) else {}
    if isinstance(function, str):  # {"type": "function", "function": "add", "parameters": {...}}
        function = {**value, "name": function}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        return _invalid(text, f"the call has no name of a function: {NEEDED}")
    if not is_text(name):
        return _invalid(text, f"the name of the function, {name!a:.60}, has half a character: {NEEDED}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return _invalid(text, f"the arguments of {name} are not an object: {NEEDED}")
    if not has_texts(arguments):
        return _invalid(text, f"the arguments of {name} have half a character: {NEEDED}")
    return {"type": "function", "function": {"name": name.strip(), "arguments": arguments or {}}}


EXAMPLE = '''def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """'''
# The system prompt of Hermes and Qwen 2.5 (https://github.com/NousResearch/Hermes-Function-Calling), for models whose
# chat template does not support tools.
HERMES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def schema_of(tool: Callable[..., Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, from its signature's types and its docstring, in the form for chat
    templates: {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}. A schema is
    returned unchanged. Raises `BadInput` for a function without types, or without a description of each argument.
    """
    if isinstance(tool, Mapping):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadInput(
                f"a tool {dict(tool)!r:.60}",
                "a schema is {'type': 'function', 'function': {'name': ..., 'parameters': ...}}",
                "write it in this form, or give a function",
            )
        return dict(tool)
    from pydantic import TypeAdapter
    from transformers.utils import chat_template_utils

    try:
        schema = chat_template_utils.get_json_schema(tool)
        parameters = schema["function"]["parameters"]
        for name, given in parameters["properties"].items():
            shown_as = {key: value for key, value in given.items() if key != "description"}
            if '{"type": "object"}' in json.dumps(shown_as):  # a class, which pydantic describes in more detail
                whole = TypeAdapter(get_type_hints(tool, include_extras=True)[name]).json_schema()
                if classes := whole.pop("$defs", None):
                    parameters.setdefault("$defs", {}).update(classes)
                given |= {**whole, "description": given["description"]}
    except Exception as error:  # of many classes, also NameError for an annotation
        raise BadInput(
            f"a tool {getattr(tool, '__name__', tool)!r:.60}",
            f"no JSON schema can be made from it: {plain_text(str(error), 200).rstrip('.!')}",
            f"give each argument a type, and describe it, as this function does:\n{EXAMPLE}\n    return a + b\n",
        ) from error
    schema["function"].pop("return", None)  # few templates show it, and models are not trained on it
    return schema


def with_tools(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: str | Template | None,
) -> str:
    """Return a conversation up to the assistant's turn that shows the model its tools: by the chat template, or, if it
    does not support tools, by a system message in the form for Hermes models.

    form: the format of calls, see `response_template`. Raises `BadInput` if the template does not support tools and the
    form is not "hermes".
    """
    plain = rendered(tokenizer, messages)
    if not tools:
        return plain
    if (text := rendered(tokenizer, messages, tools=tools)) != plain:
        return text
    if response_template(tokenizer, form) is not FORMATS["hermes"]:
        raise BadInput(
            f"tools for the chat template of {tokenizer.name_or_path!r}",
            "it does not show tools, and a system message can describe only calls in the format 'hermes'",
            "use tool_format='hermes', or set tokenizer.chat_template",
        )
    told = HERMES.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *rest = messages
    if first["role"] != "system":
        return rendered(tokenizer, [{"role": "system", "content": told}, *messages])
    return rendered(tokenizer, [{**first, "content": f"{first['content']}\n\n{told}"}, *rest])
