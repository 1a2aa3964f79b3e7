from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases import TINY, tiny_lab
from workbench.data.examples import Examples
from workbench.data.prompts import Prompts
from workbench.models import load_tokenizer, render_prompt
from workbench.models.chat_format import template_warnings

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}END{% endif %}{% endfor %}"


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(TINY)


def doubts(tokenizer: Any, text: str = "2 + 3?") -> list[str]:
    return template_warnings(tokenizer, render_prompt(tokenizer, text), text)


def test_a_tokenizer_that_is_right_gives_no_doubt(tokenizer: Any) -> None:
    assert doubts(tokenizer) == template_warnings(tokenizer) == []


@pytest.mark.parametrize(("end", "doubted"), [("\n### End\n", True), ("", False), ("\n", False), ("{eos}\n", False)])
def test_an_end_of_turn_at_which_generation_does_not_stop(tokenizer: Any, end: str, doubted: bool) -> None:
    tokenizer.chat_template = TURNS.replace("END", end.replace("{eos}", tokenizer.eos_token))
    said = doubts(tokenizer)
    assert bool(said) is doubted
    if doubted:
        assert "'### End', not a special token" in said[0] and "wb.Sampling(stop=['### End'])" in said[0]


@pytest.mark.parametrize("times", [1, 2])
def test_a_doubled_bos(tokenizer: Any, times: int) -> None:
    assert tokenizer.bos_token
    tokenizer.chat_template = tokenizer.bos_token * times + "{{ messages[0].content }}"
    said = doubts(tokenizer)
    assert bool(said) is (times == 2)
    if said:
        assert "prompts begin with two" in said[0] and "chat_template in the model's folder" in said[0]


def test_a_tokenizer_that_changes_texts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    said = doubts(tokenizer, "Add ONE to 2.")
    assert len(said) == 1 and "'Add ONE to 2.' is decoded as 'add one to 2.'" in said[0]


def test_opening_says_what_of_the_rows_the_template_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = [{"messages": [*turns, {"role": "tool", "content": "5"}], "tools": [call]}]
    rows += [{"messages": [turns[0]], "tools": tools} for tools in (None, "[{not json", None, None)]
    tiny_lab("left-out", tmp_path, backend="inline", models={"actor": TINY}, prompts=rows).close()
    said = capsys.readouterr().out
    assert "the model does not see 'tool_calls', 'tools' of rows, which the chat template of" in said
    assert "column 'tools' of 1 rows is not shown to the model: it is not a list of JSON schemas" in said


def test_opening_says_how_columns_were_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": [{"role": "user", "content": "2 + 3?"}], "reward_model": {"ground_truth": "5"}}]
    tiny_lab("said", tmp_path, backend="inline", models={"actor": TINY}, prompts=rows).close()
    assert "prompts are read as verl's columns: the answer is reward_model['ground_truth']" in capsys.readouterr().out


RENDERED = (
    "<|user|>\n2 + 3?<|end|>\n<|assistant|>\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2 + 3?<|eot_id|>",
    "<s> [INST] 2 + 3? [/INST]",
)


@pytest.mark.parametrize("text", RENDERED)
def test_a_text_that_went_through_a_template_already(tokenizer: Any, text: str) -> None:
    rows = ["What does <|im_start|>user mean?", text, text]
    pairs = [{"prompt": row, "chosen": "5", "rejected": "6"} for row in rows]
    for read in (lambda **chat: Prompts(rows, tokenizer=tokenizer, **chat),
                 lambda **chat: Examples(pairs, "pairs", tokenizer=tokenizer, **chat)):  # fmt: skip
        with pytest.warns(UserWarning, match=r"row 1 of a list has .* Give chat=False") as told:
            read()
        assert len(told) == 1
        read(chat=False)  # warns of nothing


@pytest.mark.parametrize("text", ["<|im_start|>user", "[INST", "Explain: <|im_start|>user\nHi<|im_end|>", "<|eos|>"])
def test_a_text_about_templates_is_no_rendered_text(tokenizer: Any, text: str) -> None:
    Prompts([text], tokenizer=tokenizer)  # warns of nothing
