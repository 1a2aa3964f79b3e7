"""How a model is shown its tools."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from tests.cases import TINY
from workbench.errors import BadInput
from workbench.models.tokenizers import load_tokenizer
from workbench.models.turn_messages import schema_of, with_tools

USER = [{"role": "user", "content": "2 + 3?"}]


def add(a: int, b: float = 1.0, way: Literal["up", "down"] = "up") -> float:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
        way: Rounding.
    """
    return a + b


def test_a_schema_comes_from_signature_and_docstring() -> None:
    assert schema_of(add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "number", "description": "The second."},
                    "way": {"type": "string", "enum": ["up", "down"], "description": "Rounding."},
                },
                "required": ["a"],
            },
        },
    }
    assert schema_of(schema_of(add)) == schema_of(add)


def test_what_has_no_schema_is_refused() -> None:
    def untyped(a):
        """Nothing.

        Args:
            a: A.
        """

    def undescribed(a: int) -> None:
        """Nothing."""

    for function, why in ((untyped, "missing a type hint"), (undescribed, "no description"), (len, "no JSON schema")):
        with pytest.raises(BadInput, match=f"(?s)a tool '{function.__name__}'.*{why}.*Args:"):
            schema_of(function)
    with pytest.raises(BadInput, match="a schema is"):
        schema_of({"name": "add"})


def test_the_template_shows_tools_or_a_system_message_does() -> None:
    tokenizer: Any = load_tokenizer(TINY)
    tools = [schema_of(add)]
    shown = with_tools(tokenizer, USER, tools, None)
    assert shown.startswith("<|bos|><|system|># Tools") and shown.endswith("<|user|>2 + 3?<|eos|><|assistant|>")
    line = shown.partition("<tools>\n")[2].partition("\n</tools>")[0].rpartition("<tools>\n")[2]
    assert json.loads(line) == tools[0]
    behind = with_tools(tokenizer, [{"role": "system", "content": "Be brief."}, *USER], tools, "hermes")
    assert behind.startswith("<|bos|><|system|>Be brief.\n\n# Tools")
    assert with_tools(tokenizer, USER, [], None) == "<|bos|><|user|>2 + 3?<|eos|><|assistant|>"
    with pytest.raises(BadInput, match=r"does not show tools.*tool_format='hermes'"):
        with_tools(tokenizer, USER, tools, "mistral")
    tokenizer.chat_template = (
        "{% if tools %}[{{ tools | map(attribute='function.name') | join }}]{% endif %}" + tokenizer.chat_template
    )
    assert with_tools(tokenizer, USER, tools, "mistral") == "[add]<|bos|><|user|>2 + 3?<|eos|><|assistant|>"
