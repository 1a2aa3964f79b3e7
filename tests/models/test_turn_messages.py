"""Turns of an assistant as messages, in the formats of several families."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import TINY
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.models.tokenizers import load_tokenizer
from workbench.models.turn_messages import FORMATS, TurnReader, response_template

ADD = {"name": "add", "arguments": {"a": 1}}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


def read(tokenizer: Any, text: str, form: Any = None, lead: str = "") -> dict[str, Any]:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False)) if text else []

    return TurnReader(tokenizer, form, [SCHEMA]).message(encode(text), lead_ids=encode(lead))


def called(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", ())]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|eos|>'),
        ("hermes", 'Well.<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'),
        ("hermes", 'Well.<tool_call>{"name": "add", "arguments": {"a": 1}}'),  # cut behind the call
        ("mistral", 'Well.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]<|eos|>'),
        ("mistral", 'Well.[TOOL_CALLS]add[ARGS]{"a": 1}'),
        ("llama3_json", 'Well.<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eos|>'),
        ("llama3_json", 'Well.<|python_tag|>{"type": "function", "function": "add", "parameters": {"a": 1}}<|eos|>'),
        (
            "qwen3_coder",
            "Well.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_each_format_gives_the_same_message(tokenizer: Any, form: str, text: str) -> None:
    call = {"id": "call00000", "type": "function", "function": ADD}
    assert read(tokenizer, text, form) == {"role": "assistant", "content": "Well.", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
        ),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "b"}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]b[ARGS]{}'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name": "b"}'),
    ],
)
def test_several_calls_come_in_their_order(tokenizer: Any, form: str, text: str) -> None:
    message = read(tokenizer, text, form)
    assert called(message) == [ADD, {"name": "b", "arguments": {}}]
    assert [call["id"] for call in message["tool_calls"]] == ["call00000", "call00001"]


def test_arguments_have_the_types_of_the_schema(tokenizer: Any) -> None:
    text = "<tool_call><function=add><parameter=a>12</parameter><parameter=b>12</parameter></function></tool_call>"
    assert called(read(tokenizer, text, "qwen3_coder")) == [{"name": "add", "arguments": {"a": 12, "b": "12"}}]


@pytest.mark.parametrize(
    ("form", "text", "error"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "not JSON"),
        ("hermes", "<tool_call></tool_call>", "the call is empty"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name of a function"),
        ("hermes", "<tool_call>7</tool_call>", "no name of a function"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments of add are not an object"),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', r"'\ud800', has half a character"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": 7}</tool_call>', "has half a character"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ["\\ud800"]}}</tool_call>', "have half"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"\\udfff": 1}}</tool_call>', "have half a character"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON"),
        ("mistral", "[TOOL_CALLS]add(1)", "not JSON"),
    ],
)
def test_what_is_no_call_is_told_and_the_others_are_kept(tokenizer: Any, form: str, text: str, error: str) -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' if form == "hermes" else ""
    message = read(tokenizer, good + text, form)
    assert called(message) == ([ADD] if good else [])
    (wrong,) = message["invalid_tool_calls"]
    assert error in wrong["error"] and 'a call is {"name"' in wrong["error"]


def test_reasoning_is_taken_apart_also_where_the_prompt_has_begun_it(tokenizer: Any) -> None:
    expected = {"role": "assistant", "content": "Yes.", "reasoning_content": "so"}
    assert read(tokenizer, "<think>so</think>\n\nYes.<|eos|>") == expected
    assert read(tokenizer, "so</think>\n\nYes.<|eos|>", lead="<|assistant|><think>\n") == expected
    assert read(tokenizer, "so, it thinks still", lead="<think>") == {
        "role": "assistant", "content": "", "reasoning_content": "so, it thinks still",
    }  # fmt: skip
    assert read(tokenizer, "Yes.<|tool|>", lead="<think>\n\n</think>\n\n") == {"role": "assistant", "content": "Yes."}


def test_the_format_is_the_tokenizers_or_that_of_its_template(tokenizer: Any) -> None:
    own = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "(", "close": ")"},
            "tool_calls": {
                "open_pattern": r"call:(?P<name>\w+)", "close": ";", "content": "json", "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }  # fmt: skip
    for template, form in (
        ("", "hermes"),
        ("... <tool_call> ...", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|start_header_id|>", "llama3_json"),
    ):
        other = load_tokenizer(TINY)
        other.chat_template = template
        assert response_template(other, None) is FORMATS[form]
    other.response_template = own
    expected = {"role": "assistant", "content": "Hm", "reasoning_content": "so"}
    call = {"id": "call00000", "type": "function", "function": ADD}
    text = 'o)Hmcall:add{"a": 1};'
    assert read(other, text, lead="<|user|>x(<|eos|><|assistant|>(s") == {**expected, "tool_calls": [call]}
    assert read(tokenizer, text, own, "<|assistant|>(s") == {**expected, "tool_calls": [call]}
    broken = read(other, "call:add{;")
    assert broken["content"] == "call:add{;" and "json" in broken["invalid_tool_calls"][0]["error"].lower()


def test_unknown_formats_are_refused(tokenizer: Any) -> None:
    with expect_error(
        BadInput, value="tool_format='hermez'", rule="must be one of", remedy="write tool_format='hermes'"
    ):
        TurnReader(tokenizer, "hermez")
    with expect_error(BadInput, rule="rejects it as a response template: Unknown keys"):
        TurnReader(tokenizer, {"field": {}})
