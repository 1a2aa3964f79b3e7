"""`wb.ChatFormat`: system prompts, tools, template arguments and prefills, in prompts, demonstrations and pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.data.examples import Examples
from workbench.data.prompt_rows import row_tools
from workbench.data.prompts import Prompts
from workbench.errors import BadInput
from workbench.models import load_tokenizer, render_prompt

TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<quiet>{% endif %}{% endif %}"
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


CHAT = wb.ChatFormat(system="Be brief.", tools=[add], arguments={"enable_thinking": False}, prefill="It is ")
HEAD = "[add]<system>Be brief.<user>2 + 3?<assistant><quiet>It is "


@pytest.fixture
def tokenizer() -> Any:
    found: Any = load_tokenizer(TINY)
    found.chat_template = TEMPLATE
    return found


def test_prompts_demonstrations_and_pairs_are_rendered_alike(tokenizer: Any) -> None:
    (prompt,) = Prompts([{"prompt": "2 + 3?"}], tokenizer=tokenizer, chat=CHAT).next(1)
    assert tokenizer.decode(prompt.prompt_ids) == HEAD
    assert (prompt.prompt, [m["role"] for m in prompt.messages or []]) == ("2 + 3?", ["system", "user"])
    for kind, row, answers in (
        ("demonstrations", {"prompt": "2 + 3?", "response": "It is 5."}, ["5."]),
        ("pairs", {"prompt": "2 + 3?", "chosen": "It is 5.", "rejected": "Six."}, ["5.", "Six."]),
    ):
        (example,) = Examples([row], kind, tokenizer=tokenizer, chat=CHAT).next(1)  # type: ignore[arg-type]
        assert example.prompt_ids == prompt.prompt_ids == render_prompt(tokenizer, "2 + 3?", chat=CHAT)
        assert [tokenizer.decode(ids[:-1]) for ids in example.answer_ids] == answers


@pytest.mark.parametrize("written", [lambda tools: tools, json.dumps])
def test_a_row_may_have_tools_of_its_own(tokenizer: Any, written: Any) -> None:
    tools = [{"type": "function", "function": {"name": "<|eos|>mine", "description": None}}]  # None: a table of arrow
    row = {"messages": [{"role": "user", "content": "2 + 3?"}], "tools": written(tools)}
    for chat, head in ((None, "[<|eos|>mine]<user>2 + 3?<assistant>"), (CHAT, HEAD.replace("add", "<|eos|>mine"))):
        prompts = Prompts([row], tokenizer=tokenizer, chat=chat)
        (prompt,) = prompts.next(1)
        assert tokenizer.decode(prompt.prompt_ids) == head and tokenizer.eos_token_id not in prompt.prompt_ids
        shown = prompts.show(row["messages"], tools=row_tools(row))
        assert [token.token_id for token in shown.tokens] == prompt.prompt_ids
        learned = {**row, "messages": [*row["messages"], {"role": "assistant", "content": "5"}]}
        (example,) = Examples([learned], "demonstrations", tokenizer=tokenizer, chat=chat).next(1)
        assert example.prompt_ids == prompt.prompt_ids
    (plain,) = Prompts([{**row, "tools": ["hammer"]}], tokenizer=tokenizer).next(1)  # a column of that name
    assert tokenizer.decode(plain.prompt_ids) == "<user>2 + 3?<assistant>"


def test_messages_keep_their_own_system_prompt(tokenizer: Any) -> None:
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.decode(render_prompt(tokenizer, own, chat=wb.ChatFormat(system="Be brief."))) == (
        "<system>Be long.<user>Hi<assistant>"
    )


def test_what_is_shown_is_what_is_read(tokenizer: Any) -> None:
    prompts = Prompts([{"prompt": "2 + 3?"}], tokenizer=tokenizer, chat=CHAT)
    shown = prompts.show("2 + 3?")
    assert "".join(token.text for token in shown.tokens) == HEAD
    written = {who: "".join(t.text for t in shown.tokens if t.writer == who) for who in ("system", "user", "assistant")}
    assert written == {"system": "Be brief.", "user": "2 + 3?", "assistant": "It is "}


def test_a_cut_keeps_the_system_prompt(tokenizer: Any) -> None:
    long = [{"prompt": "x" * 200 + "end"}]
    limit = len(tokenizer(HEAD, add_special_tokens=False)["input_ids"]) + 20
    (prompt,) = Prompts(long, tokenizer=tokenizer, chat=CHAT, max_prompt_tokens=limit, overlong="cut").next(1)
    text = tokenizer.decode(prompt.prompt_ids)
    assert text.startswith("[add]<system>Be brief.<user>x") and text.endswith("end<assistant><quiet>It is ")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: wb.ChatFormat(system=""), r"ChatFormat\.system=''.*None"),
        (lambda: wb.ChatFormat(system=5), r"ChatFormat\.system=5"),  # type: ignore[arg-type]
        (lambda: wb.ChatFormat(tools="add"), r"ChatFormat\.tools='add'.*list of functions"),  # type: ignore[arg-type]
        (lambda: wb.ChatFormat(tools=[5]), r"ChatFormat\.tools=\[5\]"),  # type: ignore[list-item]
        (lambda: wb.ChatFormat(tools=[lambda a: a]), "no JSON schema"),
        (lambda: wb.ChatFormat(arguments={"tools": []}), r"workbench itself passes 'tools'"),
        (lambda: wb.ChatFormat(arguments=["a"]), r"ChatFormat\.arguments=\['a'\].*by name"),  # type: ignore[arg-type]
        (lambda: wb.ChatFormat(prefill=None), r"ChatFormat\.prefill=None"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_refused(make: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        make()


@pytest.mark.parametrize(
    ("template", "chat", "says"),
    [
        (None, wb.ChatFormat(), "has no chat template"),
        (
            "{{ messages[-1].content }}",
            wb.ChatFormat(arguments={"enable_thinking": False}),
            "does not read 'enable_thinking'",
        ),
        ("{{ messages[-1].content }}", wb.ChatFormat(tools=[add]), "does not read 'tools'.*system="),
        ("{{ messages[-1].content }}", wb.ChatFormat(system="Be brief."), "does not show it"),
        (TEMPLATE, "yes", r"chat='yes'.*wb\.ChatFormat"),
    ],
)
def test_what_a_template_would_leave_out_is_refused(tokenizer: Any, template: Any, chat: Any, says: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(BadInput, match=says):
        Prompts(["a"], tokenizer=tokenizer, chat=chat)
    with pytest.raises(BadInput, match=says):
        Examples([{"prompt": "a", "response": "b"}], "demonstrations", tokenizer=tokenizer, chat=chat)


def test_a_workbench_draws_trains_and_goes_on_with_it(tmp_path: Path) -> None:
    chat = wb.ChatFormat(system="Be brief.", prefill="It is ")
    source = {"source": ["2 + 3?", "4 + 5?"], "chat": chat}
    with tiny_lab("chat", tmp_path, models={"actor": TINY, "reward": vowels}, backend="inline", prompts=source) as lab:
        text = lab.prompts.next(1).df()["prompt_text"][0]
        assert "Be brief." in text and text.endswith("It is ")
        examples = lab.demonstrations([{"prompt": "2 + 3?", "response": "It is 5."}] * 4, chat=chat)
        assert "Be brief." in examples.next(1).df()["prompt_text"][0]
        saved = lab.save(tmp_path / "saved")
        following = lab.prompts.next(1).df()["prompt_text"][0]
    with wb.restore(saved.folder, runs=tmp_path) as lab:
        assert lab.prompts.next(1).df()["prompt_text"][0] == following
