"""JSON schemas of tools, and how a model is shown them before a conversation begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import BadInput
from workbench.errors.plain_text import plain_text
from workbench.models.chat_template import rendered
from workbench.models.turn_messages import FORMATS, Template, response_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXAMPLE = '''def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """'''
# What Hermes and Qwen 2.5 are shown (https://github.com/NousResearch/Hermes-Function-Calling), for models whose chat
# template has no place for tools.
HERMES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def schema_of(tool: Callable[..., Any] | Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function, from the types of its signature and the texts of its docstring, as chat templates
    take it: {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}. A schema stays
    as it is. Raises `BadInput` for a function without types, or without a description of each argument.
    """
    if isinstance(tool, Mapping):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadInput(
                f"a tool {dict(tool)!r:.60}",
                "a schema is {'type': 'function', 'function': {'name': ..., 'parameters': ...}}",
                "write it so, or give a function",
            )
        return dict(tool)
    from transformers.utils import chat_template_utils

    try:
        schema = chat_template_utils.get_json_schema(tool)
    except Exception as error:  # of many kinds, those of names in annotations among them
        raise BadInput(
            f"a tool {getattr(tool, '__name__', tool)!r:.60}",
            f"no JSON schema can be made of it: {plain_text(str(error), 200).rstrip('.!')}",
            f"give each argument a type, and describe it, as this function does:\n{EXAMPLE}\n    return a + b\n",
        ) from error
    schema["function"].pop("return", None)  # templates that show it are few, and models are not trained on it
    return schema


def with_tools(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: str | Template | None,
) -> str:
    """A conversation up to the assistant's turn, in which the model is shown its tools: by the chat template; or, where
    that has no place for them, by a system message that tells of them as Hermes models are told.

    form: in which calls are read, see `response_template`. Raises `BadInput` where the template has no place, and the
    form is not "hermes".
    """
    if not tools:
        return rendered(tokenizer, messages)
    plain = rendered(tokenizer, messages)
    if (text := rendered(tokenizer, messages, tools=tools)) != plain:
        return text
    if response_template(tokenizer, form) is not FORMATS["hermes"]:
        raise BadInput(
            f"tools for the chat template of {tokenizer.name_or_path!r}",
            "it shows none, and only calls in the format 'hermes' can be told of in a system message",
            "use tool_format='hermes', or set tokenizer.chat_template",
        )
    told = HERMES.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *rest = messages
    if first["role"] != "system":
        return rendered(tokenizer, [{"role": "system", "content": told}, *messages])
    return rendered(tokenizer, [{**first, "content": f"{first['content']}\n\n{told}"}, *rest])
