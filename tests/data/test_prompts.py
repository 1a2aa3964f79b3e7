from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.expected import expect_error
from workbench.data.prompt_rows import PromptRow
from workbench.data.prompts import Prompts
from workbench.errors import BadInput
from workbench.models import load_tokenizer, render_prompt

TEXTS = [f"prompt number {i}" for i in range(10)]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte, and a chat template."""
    return load_tokenizer("tiny-llama")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def indices(rows: list[PromptRow]) -> list[int]:
    return [row.index for row in rows]


def test_a_row_carries_text_ids_and_the_other_columns(tokenizer: Any) -> None:
    prompts = Prompts([{"level": 1, "prompt": "2 + 3 = ?", "answer": "5"}], tokenizer=tokenizer)
    (row,) = prompts.next(1)
    assert row == PromptRow(0, "2 + 3 = ?", render_prompt(tokenizer, "2 + 3 = ?"), {"level": 1, "answer": "5"})


def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(tokenizer: Any) -> None:
    prompts = Prompts(TEXTS, tokenizer=tokenizer, seed=3)
    drawn = indices(prompts.next(4) + prompts.next(13) + prompts.next(1) + prompts.next(12))
    epochs = [drawn[:10], drawn[10:20], drawn[20:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert (prompts.position, prompts.epoch) == (30, 3)


def test_the_order_depends_on_the_seed_and_not_on_how_it_is_drawn(tokenizer: Any) -> None:
    def order(seed: int, *counts: int) -> list[int]:
        prompts = Prompts(TEXTS, tokenizer=tokenizer, seed=seed)
        return indices([row for n in counts for row in prompts.next(n)])

    assert order(0, 25) == order(0, 1, 9, 15) == order(0, *[1] * 25)
    assert order(0, 25) != order(1, 25)


def test_the_order_of_a_seed_stays_what_it_was(tokenizer: Any) -> None:
    # A saved position means the same prompts only as long as numpy's permutation does.
    assert indices(Prompts(TEXTS, tokenizer=tokenizer, seed=0).next(10)) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]


def test_without_shuffle_rows_come_as_they_lie(tokenizer: Any) -> None:
    prompts = Prompts(TEXTS, tokenizer=tokenizer, shuffle=False)
    assert indices(prompts.next(12)) == [*range(10), 0, 1]


def test_resumed_prompts_go_on_where_the_saved_ones_stood(tokenizer: Any) -> None:
    for taken in [0, 1, 9, 10, 11, 37]:
        first = Prompts(TEXTS, tokenizer=tokenizer, seed=5)
        if taken:
            first.next(taken)
        state = json.loads(json.dumps(first.state_dict()))
        second = Prompts(TEXTS, tokenizer=tokenizer, seed=5)
        second.next(7)
        second.load_state_dict(state)
        assert second.position == taken
        assert second.next(23) == first.next(23)


@pytest.mark.parametrize(
    ("source", "options", "differs"),
    [
        (TEXTS, {"seed": 1}, "seed"),
        (TEXTS, {"shuffle": False}, "shuffle"),
        (TEXTS[:9], {}, "token ids"),
        (TEXTS, {"chat": False}, "token ids"),
        (TEXTS[:9], {"seed": 1}, "seed, token ids"),
    ],
)
def test_other_prompts_refuse_the_state(tokenizer: Any, source: Any, options: Any, differs: str) -> None:
    state = Prompts(TEXTS, tokenizer=tokenizer).state_dict()
    other = Prompts(source, tokenizer=tokenizer, **options)
    with pytest.raises(BadInput, match=f"differ in {differs}\\."):
        other.load_state_dict(state)
    assert other.position == 0


def test_a_state_that_is_none_is_refused(tokenizer: Any) -> None:
    prompts = Prompts(TEXTS, tokenizer=tokenizer)
    with expect_error(BadInput, value="differ in seed, shuffle, token ids"):
        prompts.load_state_dict({})


NAMED: list[tuple[Any, str | None, str]] = [
    ({"question": "q", "answer": "a"}, None, "q"),
    ({"text": "t", "question": "q"}, "text", "t"),
    ({"messages": [user("m")], "question": "q"}, None, "q"),
    ({"prompt": [SYSTEM, user("m")], "answer": "a"}, None, "m"),
    ({"problem": "p", "solution": "s", "answer": "a"}, None, "p"),  # of MATH-500 and AIME
    ({"messages": [user("one"), {"role": "assistant", "content": "two"}, user("three")]}, None, "three"),
]


def test_the_prompt_column_is_found_or_named(tokenizer: Any) -> None:
    for row, column, prompt in NAMED:
        (found,) = Prompts([row], tokenizer=tokenizer, prompt_column=column).next(1)
        assert found.prompt == prompt
        assert len(found.extra) == len(row) - 1


def test_the_chat_template_is_used_as_asked(tokenizer: Any) -> None:
    def ids(row: Any, chat: bool | None) -> list[int]:
        return Prompts([{"prompt": row}], tokenizer=tokenizer, chat=chat).next(1)[0].prompt_ids

    assert tokenizer.decode(ids("Hi", False)) == "Hi"
    assert ids("Hi", None) == ids("Hi", True) == ids([user("Hi")], None)
    assert tokenizer.decode(ids([SYSTEM, user("Hi")], None)).index("Be brief.") > 0
    with expect_error(BadInput, value="messages with chat=False"):
        ids([user("Hi")], False)


def test_overlong_rows_are_dropped_and_counted(tokenizer: Any) -> None:
    source = ["short", "x" * 31, "y" * 30, "z" * 99]
    prompts = Prompts(source, tokenizer=tokenizer, chat=False, max_prompt_tokens=30)
    assert sorted(indices(prompts.next(2))) == [0, 2]
    assert (len(prompts), prompts.dropped, prompts.cut) == (2, 2, 0)
    assert prompts.summary == "2 prompts, 2 over 30 tokens dropped"
    assert Prompts(source, tokenizer=tokenizer, chat=False).summary == "4 prompts, none over 512 tokens"


def test_the_template_counts_towards_the_length(tokenizer: Any) -> None:
    whole = len(render_prompt(tokenizer, "x" * 20))
    assert whole > 20
    assert Prompts(["a", "x" * 20], tokenizer=tokenizer, max_prompt_tokens=whole).dropped == 0
    assert Prompts(["a", "x" * 20], tokenizer=tokenizer, max_prompt_tokens=whole - 1).dropped == 1


def test_cut_keeps_the_end_of_a_text(tokenizer: Any) -> None:
    prompts = Prompts(
        ["0123456789", "ab"], tokenizer=tokenizer, chat=False, max_prompt_tokens=4, overlong="cut", shuffle=False
    )
    first, second = prompts.next(2)
    assert (first.prompt, tokenizer.decode(first.prompt_ids)) == ("6789", "6789")
    assert second.prompt == "ab"
    assert prompts.summary == "2 prompts, 1 over 4 tokens cut"


def test_cut_never_splits_a_character(tokenizer: Any) -> None:
    (row,) = Prompts(["ab字字"], tokenizer=tokenizer, chat=False, max_prompt_tokens=5, overlong="cut").next(1)
    assert row.prompt == tokenizer.decode(row.prompt_ids) == "字"


def test_cut_leaves_template_and_earlier_turns_whole(tokenizer: Any) -> None:
    turns = [SYSTEM, user("earlier"), {"role": "assistant", "content": "yes"}]
    row = {"messages": [*turns, user("0123456789")]}
    room = len(render_prompt(tokenizer, [*turns, user("789")]))
    prompts = Prompts([row], tokenizer=tokenizer, max_prompt_tokens=room, overlong="cut")
    (cut,) = prompts.next(1)
    assert cut.prompt == "789"
    assert cut.prompt_ids == render_prompt(tokenizer, [*turns, user("789")])
    assert row["messages"][-1]["content"] == "0123456789"


def test_cut_drops_a_row_whose_template_alone_is_too_long(tokenizer: Any) -> None:
    bare = len(render_prompt(tokenizer, [user("")]))
    long = {"role": "system", "content": "s" * 50}
    rows = [{"messages": [user("hello")]}, {"messages": [long, user("hello")]}]
    prompts = Prompts(rows, tokenizer=tokenizer, max_prompt_tokens=bare + 2, overlong="cut")
    assert prompts.next(1)[0].prompt == "lo"
    assert prompts.summary == f"1 prompt, 1 over {bare + 2} tokens cut, 1 over {bare + 2} tokens dropped"


WRONG: list[tuple[Any, Any, str]] = [
    (
        [{"text": "a", "n": 1}],
        {},
        r"the columns 'text', 'n'\. name .*: prompts=\{\"source\": \.\.\., \"prompt_column\": \"text\"\}",
    ),
    ([{"prompt": "a"}], {"prompt_column": "text"}, r"no column 'text'\. the source has the columns 'prompt'"),
    ([{"prompt": "a"}, {"question": "b"}], {}, "row 1 has no column 'prompt'"),
    (["a", " \n"], {}, "column 'prompt' of row 1 is empty"),
    ([{"prompt": 7}], {}, "column 'prompt' of row 0 is 7"),
    ([{"prompt": ["a"]}], {}, r"of row 0 is \['a'\]\. must be a text, or messages"),
    ([{"messages": [SYSTEM]}], {}, "of row 0 has no user message"),
    ([{"messages": [{"role": "user", "content": [{"type": "image"}]}, user("a")]}], {}, "messages: a list such as"),
    ([{"messages": [{"role": "assistant"}, user("a")]}], {}, "messages: a list such as"),
    ([{"messages": [user("a"), {"role": "assistant", "content": "b"}]}], {}, "ends with the assistant's message"),
    ([{"prompt": "a", "response": "b"}], {}, "row 0 has a column 'response'"),
    ([{"prompt": "a", "last_turn": "b"}], {}, "row 0 has a column 'last_turn'"),
    (
        [{"prompt": "a", "text": "b"}],
        {"prompt_column": "text"},
        "a column 'prompt' beside its prompt column 'text'",
    ),
    (["short", "x" * 40], {"chat": False, "max_prompt_tokens": 30, "overlong": "error"}, "row 1 has 40 tokens"),
    (["x" * 40], {"chat": False, "max_prompt_tokens": 30}, "a list holds only prompts over 30 tokens"),
    (["a"], {"overlong": "left"}, "overlong='left'"),
    (["a"], {"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
    (["a"], {"seed": -1}, "seed=-1"),
]


def test_wrong_input_says_what_would_be_right(tokenizer: Any, subtests: pytest.Subtests) -> None:
    for source, options, message in WRONG:
        with subtests.test(source=source, options=options), pytest.raises(BadInput, match=message):
            Prompts(source, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_next_takes_whole_numbers_and_stays_put_otherwise(tokenizer: Any, n: Any) -> None:
    prompts = Prompts(TEXTS, tokenizer=tokenizer)
    with expect_error(BadInput, value="n="):
        prompts.next(n)
    assert prompts.position == 0


def test_reprs_are_short_escaped_and_do_not_advance(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / f"{'long' * 40}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"<b>{i}</b>" + "x" * 300, "answer": i}) + "\n" for i in range(5)))
    prompts = Prompts(path, tokenizer=tokenizer)
    prompts.next(6)
    assert len(repr(prompts)) < 80
    page = prompts._repr_html_()
    assert "<b>0" not in page
    assert page.count("&lt;b&gt;") == 3
    assert "5 prompts, none over 512 tokens" in page
    assert len(page) < 4000
    assert prompts.position == 6
    assert (
        repr(Prompts("arithmetic/test", tokenizer=tokenizer))
        == "Prompts('arithmetic/test', 200 prompts, epoch 0, next 0)"
    )
    assert "2 prompts, 1 with control tokens as text," in repr(Prompts(["a<|eos|>", "b"], tokenizer=tokenizer))
