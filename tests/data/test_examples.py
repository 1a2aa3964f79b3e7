"""Demonstrations and pairs from rows of every accepted form to token ids, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.data.example_rows import demonstration, dialogue, pair
from workbench.data.examples import Examples, Kind
from workbench.errors import BadInput
from workbench.models import load_tokenizer, render_prompt
from workbench.models.chat_format import ChatFormat

TINY = "tiny-llama"
USER = {"role": "user", "content": "Hi"}
HI = USER | {"tool_calls": None}
HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Who?\n\nAssistant:"


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def examples(source: Any, kind: Kind = "pairs", **options: Any) -> Examples:
    return Examples(source, kind, tokenizer=load_tokenizer(TINY), **options)


def text(ids: list[int]) -> str:
    return str(load_tokenizer(TINY).decode(ids))


PAIRS: list[tuple[dict[str, Any], Any, tuple[str, str]]] = [
    ({"prompt": "a", "chosen": "b", "rejected": ""}, "a", ("b", "")),
    ({"question": "a", "chosen": [said("b")], "rejected": [said("c")]}, "a", ("b", "c")),
    ({"prompt": [USER], "chosen": "b", "rejected": "c"}, [USER], ("b", "c")),
    ({"chosen": [USER, said("b")], "rejected": [USER, said("c")]}, [USER], ("b", "c")),
    ({"chosen": [USER, said("b")], "rejected": [USER, said("b")]}, [USER], ("b", "b")),
    # UltraFeedback's rows have the prompt twice; Arrow adds the keys of other messages
    ({"prompt": "Hi", "chosen": [HI, said("b")], "rejected": [HI, said("c")]}, [USER], ("b", "c")),
    ({"prompt": [HI], "chosen": [USER, said("b")], "rejected": [USER, said("")]}, [USER], ("b", "")),
    ({"chosen": HH + " I am.", "rejected": HH + " I was."}, HH, (" I am.", " I was.")),
    ({"chosen": HH, "rejected": HH + " I."}, HH, ("", " I.")),
    # the last turns are not alike: what is shared ends with an earlier answer's beginning
    (
        {"chosen": HH + " I.", "rejected": HH.replace("Who", "Why") + " You."},
        "\n\nHuman: Hi\n\nAssistant:",
        (" Hello\n\nHuman: Who?\n\nAssistant: I.", " Hello\n\nHuman: Why?\n\nAssistant: You."),
    ),
    # without turns the answers begin with a whole word
    ({"chosen": "Say it: wonder", "rejected": "Say it: wonderful"}, "Say it: ", ("wonder", "wonderful")),
]


def test_forms_of_pairs() -> None:
    for row, prompt, answers in PAIRS:
        found = pair(row, "row 0")
        assert (found.prompt, found.answers, found.margin) == (prompt, answers, None)


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "a", "response": "b"}, "a", "b"),
        ({"question": "a", "answer": "b"}, "a", "b"),
        ({"prompt": [USER], "completion": [said("b")]}, [USER], "b"),
        ({"prompt": HH, "completion": [said("b")]}, HH, "b"),
        ({"prompt": HH, "completion": [said("b"), USER, said("c")]}, HH, "b\n\nc"),
        ({"messages": [said("0"), USER, said("b"), USER, said("c")]}, [said("0"), USER], "b\n\nc"),
        ({"prompt": "a", "completion": [said("b"), USER, said("c")]}, "a", "b\n\nc"),
    ],
)
def test_forms_of_demonstrations(row: dict[str, Any], prompt: Any, answer: str) -> None:
    found = demonstration(row, "row 0")
    assert (found.prompt, found.answers) == (prompt, (answer,))


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("pairs", {"chosen": "a"}, r"rows.jsonl, line 3 has no 'rejected'"),
        ("pairs", {"prompt": "a", "chosen": 1, "rejected": "b"}, "line 3: 'chosen' is 1"),
        ("pairs", {"prompt": " ", "chosen": "a", "rejected": "b"}, "line 3: 'prompt' is empty"),
        ("pairs", {"prompt": "a", "chosen": [USER], "rejected": "b"}, "line 3: 'chosen' holds 1 messages.*into the"),
        ("pairs", {"prompt": "a", "chosen": "a", "rejected": "b", "margin": "x"}, "line 3: margin='x'"),
        ("pairs", {"chosen": "a b", "rejected": "c d"}, "line 3: chosen and rejected do not begin with the same text"),
        ("pairs", {"chosen": [USER, said("a")], "rejected": [said("b")]}, "line 3: .*differ in more than the last"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.0}, "1 of 2 rows have no margin"),
        ("demonstrations", {"text": "a"}, r"line 3 has 'text'.*\{'prompt': \.\.\., 'response': \.\.\.\}"),
        ("demonstrations", {"messages": [said("a"), USER]}, "line 3: .*do not begin and end with.*'user'"),
        (
            "demonstrations",
            {"prompt": "a", "response": [USER, said("a")]},
            "line 3: .*do not begin and end with.*'user'",
        ),
        ("demonstrations", {"messages": [USER, USER | {"role": "bot"}]}, "line 3: .*have role 'bot' there"),
        ("demonstrations", {"messages": "a"}, "line 3: 'messages' is 'a'"),
        (
            "demonstrations",
            {"messages": [USER, said("") | {"tool_calls": [{"function": "add"}]}]},
            "line 3: 'messages'",
        ),
    ],
)
def test_malformed_rows_are_named_with_the_line(tmp_path: Path, kind: Kind, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "response": "d"}
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(row)}\n")
    with pytest.raises(BadInput, match=message):
        examples(path, kind)


def test_a_dialogue_becomes_the_messages_it_stands_for() -> None:
    assert dialogue(HH) == [USER, said("Hello"), {"role": "user", "content": "Who?"}]
    assert dialogue("Hi\n\nHuman: a") is None
    assert dialogue("plain") is None


def test_tokens_are_those_that_a_rollout_would_have() -> None:
    tokenizer = load_tokenizer(TINY)
    row = examples([{"chosen": HH + " I am.", "rejected": HH + " No."}]).training[0]
    messages = [USER, said("Hello"), {"role": "user", "content": "Who?"}]
    assert row.prompt_ids == render_prompt(tokenizer, messages)
    assert text(row.answer_ids[0]) == "I am.<|eos|>"
    # and together they are the whole conversation by the template
    whole = tokenizer.apply_chat_template([*messages, said("I am.")], tokenize=True, return_dict=False)
    assert row.prompt_ids + row.answer_ids[0] == whole
    plain = examples([{"chosen": HH + " I am.", "rejected": HH + " No."}], chat=False).training[0]
    assert text(plain.prompt_ids) == HH
    assert text(plain.answer_ids[0]) == " I am.<|eos|>"


def test_each_turn_of_the_assistant_is_learned_with_its_reasoning_and_calls() -> None:
    """The tokens that transformers says are the assistant's; a user's and a tool's are read alone."""
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "<|eos|>{% endgeneration %}{% else %}<|user|>{{ m.content }}<|eos|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    add = {"name": "add", "arguments": {"a": 1}}
    call = said("") | {"tool_calls": [{"function": add}]}
    turns = [said("b") | {"reasoning_content": "Hm."}, USER, call, {"role": "tool", "content": "3"}, said("c")]
    filled = said("") | {"tool_calls": [{"function": {**add, "arguments": {"a": 1, "of_another_row": None}}}]}
    read = [said("b") | {"thinking": "Hm."}, USER, filled, *turns[3:]]  # as a table of arrow has it
    both = [{"messages": [USER, *turns]}, {"prompt": USER["content"], "response": read}]
    rows = Examples(both, "demonstrations", tokenizer=tokenizer)
    options: Any = {"return_dict": True, "return_assistant_tokens_mask": True}
    told: Any = [USER, *turns]
    whole: Any = tokenizer.apply_chat_template(told, **options)
    for row in rows.training:
        assert row.prompt_ids + row.answer_ids[0] == whole["input_ids"]
        assert [False] * len(row.prompt_ids) + row.learned == [bool(one) for one in whole["assistant_masks"]]
    pairs = [{"prompt": "a", "chosen": [call], "rejected": [turns[0]]}]
    (pair,) = Examples(pairs, "pairs", tokenizer=tokenizer, chat=False).training
    written = ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|eos|>', "<think>Hm.</think>b<|eos|>"]
    assert [text(ids) for ids in pair.answer_ids] == written
    mask = rows.table(rows.training)["response_mask"]
    assert isinstance(mask, Ragged) and mask.rows()[1].tolist() == rows.training[1].learned
    with expect_error(BadInput, value="^row 0 of a list: the answer", rule="drops 'add'", remedy="the content"):
        examples([{"messages": [USER, call]}], "demonstrations")


def test_what_the_template_leaves_out_is_told_and_roles_that_it_does_not_know_are_refused() -> None:
    """A role goes into most templates as it stands, so that a data set's own name for a user would be learned from."""
    call = {"type": "function", "function": {"name": "add", "arguments": "{"}}
    row = {
        "messages": [{**USER, "function_call": "add"}, said("b")],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    assert "the chat template leaves out 'function_call', 'tools'" in repr(examples([row], "demonstrations"))
    for count, rows in ((1, "in 1 row"), (2, "in 2 rows")):
        told = repr(examples([{**row, "tools": "[{"}] * count, "demonstrations"))
        assert f"{rows} 'tools' is left out, because it holds no JSON schemas" in told
    kinds: list[tuple[str, Kind]] = [("human", "demonstrations"), ("robot", "feedback")]
    for role, kind in kinds:
        strange = {"messages": [{**USER, "role": role}, USER, said("b")], "label": True}
        with expect_error(BadInput, value=f"^row 1 of a list: role '{role}'", remedy="'human' is 'user'"):
            examples([{**row, "label": True}, strange], kind)
    with expect_error(BadInput, value="^row 0 of a list", rule="arguments by name or as their JSON"):
        examples([{"messages": [USER, {**said(""), "tool_calls": [call]}]}], "demonstrations")


@pytest.mark.parametrize("strict", [False, True])
def test_two_turns_of_the_assistant_in_a_row_are_written_as_the_template_does_or_refused(strict: bool) -> None:
    tokenizer: Any = load_tokenizer(TINY)
    if strict:
        refuse = (
            "{% if loop.index0 % 2 != (message.role == 'assistant') %}{{ raise_exception('alternate') }}{% endif %}"
        )
        tokenizer.chat_template = tokenizer.chat_template.replace("in messages %}", "in messages %}" + refuse, 1)
    turns = [USER, said("b"), said("c")]
    rows: list[tuple[Kind, Any]] = [
        ("demonstrations", {"messages": turns}),
        ("pairs", {"chosen": turns, "rejected": [*turns[:2], said("d")]}),
    ]
    for kind, row in rows:
        if strict:
            with expect_error(BadInput, value="^row 0 of a list: messages", rule="alternate"):
                Examples([row], kind, tokenizer=tokenizer)
            continue
        found = Examples([row], kind, tokenizer=tokenizer).training[0]
        whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
        assert found.prompt_ids + found.answer_ids[0] == whole


def test_an_answer_ends_as_a_turn_of_the_template_does() -> None:
    """Where that is another token than the tokenizer's EOS; a plain text ends with the latter."""
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|unk|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    for chat, end in ((None, "<|unk|>"), (False, "<|eos|>")):
        rows = Examples([{"prompt": "a", "response": "b"}], "demonstrations", tokenizer=tokenizer, chat=chat)
        assert text(rows.training[0].answer_ids[0]) == f"b{end}"
    for end in ("<|unk|>", "<|eos|>"):  # of a conversation that was rendered before
        both = [{"prompt": "a", "chosen": f"b{end}", "rejected": f"c{end}"}]
        (pair,) = Examples(both, "pairs", tokenizer=tokenizer, chat=False).training
        assert [text(ids) for ids in pair.answer_ids] == [f"b{end}", f"c{end}"]


def test_white_space_of_answers_is_what_the_template_leaves() -> None:
    """Code begins with blanks: it is trained as it stands, unless the template trims; a pair may differ in blanks."""
    code, plain = "    return x + 1\n", "return x + 1"
    trims = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|eos|>{% endfor %}"
    head = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    for template, written, kept in (
        (trims.replace(" | trim", "") + head, code, 1),
        (trims.replace("trim", "replace('    ', '')") + head, plain + "\n", 1),
        (trims + head, plain, 0),
    ):
        tokenizer = load_tokenizer(TINY)
        tokenizer.chat_template = template
        for prompt in ("a", [USER]):
            rows = Examples([{"prompt": prompt, "response": code}], "demonstrations", tokenizer=tokenizer).training
            messages = [USER | {"content": "a"} if prompt == "a" else USER, said(code)]
            whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
            assert rows[0].prompt_ids + rows[0].answer_ids[0] == whole
            assert text(rows[0].answer_ids[0]) == f"{written}<|eos|>"
        both = [{"prompt": "a", "chosen": code, "rejected": other} for other in (plain, "another")]
        pairs = Examples(both, "pairs", tokenizer=tokenizer)
        assert (len(pairs.training), pairs.equal) == (1 + kept, 1 - kept)
    with expect_error(BadInput, rule="at least", remedy="answers differ"):
        examples([{"prompt": "a", "chosen": "b", "rejected": "b"}])
    blank = Examples([{"prompt": "a", "response": "  "}], "demonstrations", tokenizer=load_tokenizer(TINY))
    assert text(blank.training[0].answer_ids[0]) == "  <|eos|>"
    asked = "\n\nHuman: f?\n\nAssistant: "
    both = [{"chosen": asked + other, "rejected": asked + plain} for other in (code, plain)]
    pairs = Examples(both, "pairs", tokenizer=load_tokenizer(TINY))  # the form's own blank is no part of the answer
    assert [text(ids) for ids in pairs.training[0].answer_ids] == [f"{code}<|eos|>", f"{plain}<|eos|>"]
    assert pairs.equal == 1


def test_a_template_that_takes_reasoning_out_takes_none_out_of_an_answer() -> None:
    """White space behind the answer changes nothing of that."""
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] | trim }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    for answer in ("<think>b</think>c", "<think>b</think>c\n"):
        rows = Examples([{"prompt": "a", "response": answer}], "demonstrations", tokenizer=tokenizer)
        assert text(rows.training[0].answer_ids[0]) == "<think>b</think>c<|eos|>"


def test_an_answer_goes_on_where_the_head_of_its_turn_ends() -> None:
    """Also where the template opens a block of reasoning there, or puts an empty one before an answer without."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' and '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|eos|>{% endfor %}{% if add_generation_prompt %}<|assistant|>OPEN"
        "{% if quiet %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    thought = "<think>\nb\n</think>\n\n4"
    for opens, answer, chat, learned in (
        ("", "4", None, "<think>\n\n</think>\n\n4"),
        ("", "4", ChatFormat(arguments={"quiet": True}), "4"),
        ("", "It is 4", ChatFormat(prefill="It is "), "4"),
        ("<think>\n", "4", ChatFormat(prefill="\n</think>\n\n"), "4"),
        ("<think>\n", thought, ChatFormat(prefill="b\n"), "</think>\n\n4"),
        ("", thought, None, thought),
        ("<think>\n", "4", None, "\n</think>\n\n4"),
        ("<think>\n", thought, None, "b\n</think>\n\n4"),
    ):
        tokenizer = load_tokenizer(TINY)
        tokenizer.chat_template = template.replace("OPEN", opens)
        (row,) = Examples(
            [{"prompt": "a", "response": answer}], "demonstrations", tokenizer=tokenizer, chat=chat
        ).training
        assert text(row.answer_ids[0]) == f"{learned}<|eos|>"
        whole: Any = [{"role": "user", "content": "a"}, said(answer)]
        whole = tokenizer.apply_chat_template(whole, tokenize=False)
        assert text(row.prompt_ids + row.answer_ids[0]) == whole or "It is" in answer
    takes_out = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|eos|>{% endfor %}"
    tokenizer.chat_template = takes_out + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    behind = thought.removeprefix("<think>\n")  # what a rollout says
    source: list[dict[str, Any]] = [{"prompt": "a", "response": thought}, {"prompt": "a", "response": behind}]
    for row in Examples(source, "demonstrations", tokenizer=tokenizer).training:
        assert text(row.answer_ids[0]) == f"{behind}<|eos|>"
    with expect_error(
        BadInput, value="^row 2 of a list: the answer .*'4'", rule="inside <think>, but the answer has no reasoning"
    ):
        Examples([*source, {"prompt": "a", "response": "4"}], "demonstrations", tokenizer=tokenizer)


def test_over_long_rows_are_dropped_cut_or_refused() -> None:
    rows = [{"prompt": "p" * n, "chosen": "c" * 10, "rejected": "r"} for n in (5, 50, 500)]
    rows += [{"prompt": "p", "chosen": "c" * 200, "rejected": "r"}, {"prompt": "p", "chosen": "c", "rejected": "c"}]
    filtered = examples(rows, max_tokens=100, shuffle=False)
    assert [len(row.prompt_ids) for row in filtered.training] == [9, 54]
    assert filtered.summary == "2 pairs, 2 over 100 tokens dropped, 1 with equal answers dropped"
    cut = examples(rows, max_tokens=100, overlong="cut", shuffle=False)
    assert (cut.cut, cut.dropped, cut.equal) == (1, 1, 1)
    assert [row.tokens for row in cut.training] == [20, 65, 100]
    last = cut.training[-1]
    # the front is gone but for BOS; the end of the prompt and both answers are whole
    assert text(last.prompt_ids).startswith("<|bos|>ppp") and text(last.prompt_ids).endswith("p<|eos|><|assistant|>")
    assert [text(ids) for ids in last.answer_ids] == ["c" * 10 + "<|eos|>", "r<|eos|>"]
    with expect_error(BadInput, value="row 2 of a list has 515 tokens"):
        examples(rows, max_tokens=100, overlong="error")
    with expect_error(BadInput, value="none is left for training"):
        examples(rows, max_tokens=10)


@pytest.mark.parametrize("chat", [True, False])
def test_rows_over_the_models_length_are_dropped_without_a_warning(monkeypatch: pytest.MonkeyPatch, chat: bool) -> None:
    said: list[Any] = []
    monkeypatch.setattr(logging.getLogger("transformers.tokenization_utils_base"), "warning", said.append)
    long = "x" * 3000  # bytes, of which the tokenizer takes 2048
    rows = [{"prompt": long, "chosen": long, "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert examples(rows, chat=chat).dropped == 1
    assert not said


def test_held_out_prompts_are_never_trained_on() -> None:
    rows = [{"prompt": f"p{i // 2}", "chosen": f"c{i}", "rejected": "r"} for i in range(40)]
    first, second = examples(rows, held_out=11, seed=1), examples(rows, held_out=11, seed=1)
    assert first.held_out == second.held_out
    assert examples(rows, held_out=11, seed=2).held_out != first.held_out
    assert (len(first.held_out), len(first.training)) == (10, 30)  # whole groups of two
    held = {row.example.prompt for row in first.held_out}
    assert not held & {row.example.prompt for row in first.training}
    drawn = first.next(30)
    assert sorted(row.example.answers[0] for row in drawn) == sorted(row.example.answers[0] for row in first.training)
    assert first.epoch == 1


def test_the_order_is_the_seeds_and_can_be_resumed() -> None:
    rows = [{"prompt": f"p{i}", "response": str(i)} for i in range(10)]
    first = examples(rows, "demonstrations", seed=3)
    one = [row.example.answers[0] for row in first.next(7)]
    state = json.loads(json.dumps(first.state_dict()))
    rest = [row.example.answers[0] for row in first.next(7)]
    second = examples(rows, "demonstrations", seed=3)
    second.load_state_dict(state)
    assert [row.example.answers[0] for row in second.next(7)] == rest
    assert sorted(one + rest[:3]) == sorted(str(i) for i in range(10))
    with expect_error(BadInput, value="differ in seed"):
        examples(rows, "demonstrations", seed=4).load_state_dict(state)
    assert [row.example.answers[0] for row in examples(rows, "demonstrations", shuffle=False).next(3)] == list("012")


def test_columns_of_a_batch() -> None:
    pairs = examples([{"prompt": "a", "chosen": "bcd", "rejected": "c", "margin": 2}])
    table = pairs.table(pairs.training)
    assert set(table) == {"prompt", "prompt_ids", "chosen", "chosen_ids", "rejected", "rejected_ids", "margin"}
    assert table["chosen"] == ["bcd"]
    demonstrations = examples("arithmetic", "demonstrations")
    table = demonstrations.table(demonstrations.next(4))
    mask, ids = table["response_mask"], table["response_ids"]
    assert isinstance(mask, Ragged) and isinstance(ids, Ragged)
    assert mask.lengths.tolist() == ids.lengths.tolist()
    assert mask.values.all()
    assert "2000 demonstrations" in repr(demonstrations)
