from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.models import load_tokenizer, render_prompt
from workbench.models.chat_format import written_tokens

MESSAGES = [
    {"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "2 + 3?\nNow."},
    {"role": "assistant", "content": "user"}, {"role": "user", "content": " 字 "},
]  # fmt: skip
TEMPLATE = "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content | trim }}<|unk|>\n{% endfor %}<|user|>assistant\n"


@pytest.fixture
def tokenizer() -> Any:
    found: Any = load_tokenizer(TINY)
    found.chat_template = TEMPLATE
    return found


def by_writer(tokens: Any) -> list[tuple[str, str]]:
    """The text of each stretch of one writer."""
    found: list[tuple[str, str]] = []
    for token in tokens:
        if found and found[-1][0] == token.writer:
            found[-1] = (token.writer, found[-1][1] + token.text)
        else:
            found.append((token.writer, token.text))
    return found


def test_each_token_has_the_one_who_wrote_it(tokenizer: Any) -> None:
    ids = render_prompt(tokenizer, MESSAGES)
    shown = written_tokens(tokenizer, MESSAGES, ids, "p")
    assert [token.token_id for token in shown.tokens] == ids
    said = [(who, text) for who, text in by_writer(shown.tokens) if who != "template"]
    assert said[:3] == [("system", "Be <brief>."), ("user", "2 + 3?\nNow."), ("assistant", "user")]
    assert said[3][0] == "user" and set(said[3][1]) == {"字"}  # each token of a character stands for all of it
    specials = [token.text for token in shown.tokens if token.special]
    assert specials.count("<|unk|>") == 4 and {t.writer for t in shown.tokens if t.special} == {"template"}


def test_a_text_without_a_template_is_the_users(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    shown = written_tokens(tokenizer, "abc", render_prompt(tokenizer, "abc"), "p")
    assert [(who, text) for who, text in by_writer(shown.tokens) if who == "user"] == [("user", "abc")]


def test_ids_whose_text_is_not_known_are_shown_all_the_same(tokenizer: Any) -> None:
    shown = written_tokens(tokenizer, "abc", [9, 10, 11], "p")
    assert {token.writer for token in shown.tokens} == {"other"} and len(shown.df) == 3


def test_special_tokens_and_line_breaks_are_seen(tokenizer: Any) -> None:
    shown = written_tokens(tokenizer, MESSAGES, render_prompt(tokenizer, MESSAGES), "p")
    html = shown._repr_html_()
    assert "&lt;|unk|&gt;" in html and "↵" in html and "<brief>" not in html and "border:1px solid" in html
    assert repr(shown).startswith(f"<p: {len(shown.tokens)} tokens: ") and list(shown.df) == [
        "token_id", "text", "writer", "special",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("shown", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY}) as lab:
        yield lab


def test_a_workbench_shows_what_the_policy_would_read(lab: wb.Workbench) -> None:
    drawn = lab.prompts.source.state_dict() if lab.prompts.source else {}
    for prompt in ("2 + 3?", {"prompt": "2 + 3?"}, [{"role": "user", "content": "2 + 3?"}]):
        shown = lab.prompts.show(prompt)
        assert ("user", "2 + 3?") in by_writer(shown.tokens)
        assert [token.token_id for token in shown.tokens] == render_prompt(lab.runner.batches.tokenizer, "2 + 3?")
    assert lab.prompts.source is not None and lab.prompts.source.state_dict() == drawn
    with expect_error(BadInput, value="a row with text"):
        lab.prompts.show({"text": "2 + 3?"})
    with expect_error(BadInput, value="is empty"):
        lab.prompts.show(" ")


def test_without_prompts_there_is_nothing_to_show(tmp_path: Path) -> None:
    bare = tiny_lab("bare", tmp_path, backend="inline", models={"actor": TINY}, prompts=None)
    with bare as lab, expect_error(BadInput, rule="without prompts="):
        lab.prompts.show("a")
