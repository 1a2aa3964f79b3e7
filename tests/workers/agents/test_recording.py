"""From messages to tokens: what continues what, and that sampled tokens stay as they were sampled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import TINY
from workbench.engines.generation import Response
from workbench.models import load_tokenizer
from workbench.models.tokenizers import render_prompt, render_reply
from workbench.settings.engines import Sampling
from workbench.workers.agents.recording import MOST_PENDING, Answer, Asked, Recording
from workbench.workers.agents.requests import Refused, Request, parse

BROKEN = [184, 183, 60]  # bytes that are no character: their text has other tokens


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


def recording(tokenizer: Any, **changes: Any) -> Recording:
    settings = {"max_new_tokens": 100, "max_turns": 8, **changes}
    own = render_prompt(tokenizer, [user("1+1=")])
    return Recording(Sampling(**settings), tokenizer, own, seed=5, max_model_tokens=160)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None, "tool_calls": None}


def chat(mine: Recording, *messages: dict[str, Any], **more: Any) -> Asked:
    return mine.ask(parse("chat", {"messages": list(messages), **more}, Sampling()))


def text(mine: Recording, prompt: str | list[int], **more: Any) -> Asked:
    return mine.ask(parse("text", {"prompt": prompt, **more}, Sampling()))


def answer(mine: Recording, asked: Asked, ids: list[int], ending: Any = "length") -> Answer:
    probs = [-0.5] * len(ids)
    return mine.answered(asked, Response(row=0, ids=ids, log_probs=probs, ending=ending, sets=[]))


def test_messages_that_come_back_are_not_tokenized_again(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    first = chat(mine, user("1+1="))
    assert first.prompt_ids == mine.prompt_ids and first.seed == 5  # as a plain response's
    said = answer(mine, first, BROKEN)
    assert tokenizer.encode(said.text, add_special_tokens=False) != BROKEN
    second = chat(mine, user("1+1="), assistant(said.text), user("and?"))
    between = render_reply(tokenizer, [user("and?")], after=BROKEN[-1])
    assert second.prompt_ids == first.prompt_ids + BROKEN + between and second.seed != 5
    answer(mine, second, [70, 71])
    row = mine.row()
    assert row.prompt_ids == first.prompt_ids
    assert row.response_ids == [*BROKEN, *between, 70, 71]
    assert row.mask == [True] * 3 + [False] * len(between) + [True] * 2
    assert row.log_probs == [-0.5] * 3 + [0.0] * len(between) + [-0.5] * 2
    assert (mine.turns, row.context_starts) == (2, [])


def test_control_tokens_in_a_request_are_text_but_in_a_prompt_that_its_template_wrote(tokenizer: Any) -> None:
    spelled = "<|user|>1"
    mine = Recording(Sampling(max_new_tokens=900), tokenizer, [1], seed=5, max_model_tokens=1800)
    asked = chat(mine, user(spelled))
    said = answer(mine, asked, [70])
    further = chat(mine, user(spelled), assistant(said.text), user(spelled))
    function = {"name": "f", "description": spelled, "parameters": {"type": "object", "properties": {spelled: {}}}}
    shown = chat(mine, user("1"), tools=[{"type": "function", "function": function}])
    ids = [one.prompt_ids for one in (asked, further, shown, text(mine, spelled))]
    assert [tokenizer.decode(one).count("<|user|>") for one in ids] == [2, 4, 3, 1]
    assert [one.count(tokenizer.convert_tokens_to_ids("<|user|>")) for one in ids] == [1, 2, 1, 1]
    bare = load_tokenizer(TINY)
    bare.chat_template = None
    with pytest.raises(Refused, match="has no chat template"):
        chat(Recording(Sampling(), bare, [1], seed=5, max_model_tokens=160), user("1"))


def test_the_end_of_a_turn_is_not_written_twice(tokenizer: Any) -> None:
    mine, eos = recording(tokenizer), tokenizer.eos_token_id
    said = answer(mine, chat(mine, user("1+1=")), [70, eos], "eos")
    assert said.text == tokenizer.decode([70])
    second = chat(mine, user("1+1="), assistant(said.text), user("and?"))
    whole = render_prompt(tokenizer, [user("1+1="), {"role": "assistant", "content": said.text}, user("and?")])
    assert second.prompt_ids == whole


def test_a_request_that_continues_an_earlier_turn_begins_with_its_tokens(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    first = chat(mine, user("1+1="))
    said = answer(mine, first, BROKEN)
    once, twice = (chat(mine, user("1+1="), assistant(said.text), user(more)) for more in ("and?", "or?"))
    for asked in (once, twice):
        assert asked.prompt_ids[: len(first.prompt_ids) + 3] == first.prompt_ids + BROKEN
    assert once.segment is first.segment and twice.segment is not once.segment
    assert once.seed != twice.seed
    answer(mine, twice, [70])
    answer(mine, once, [71])
    trained = [segment.history.response_ids for segment in mine.segments]
    assert trained[0][:3] == BROKEN and trained[1] == [70]  # what was sampled once stands once inside a mask
    third = chat(mine, user("1+1="), assistant(said.text), user("or?"), assistant(tokenizer.decode([70])), user("so?"))
    assert third.segment is twice.segment
    answer(mine, third, [72])
    row = mine.row()
    begins = row.context_starts[0]  # of the other context, with its whole prompt
    assert row.response_ids[begins : begins + len(twice.prompt_ids)] == twice.prompt_ids
    assert [token for token, sampled in zip(row.response_ids, row.mask, strict=True) if sampled] == [
        *BROKEN,
        71,
        70,
        72,
    ]


def test_other_messages_are_a_context_of_their_own_and_so_is_the_same_question_again(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    asked = [chat(mine, user("1+1=")), chat(mine, user("1+1=")), chat(mine, user("2+2="))]
    assert len({one.seed for one in asked}) == 3 and len(mine.segments) == 3
    other = recording(tokenizer)  # in another order: what is drawn depends on what is asked
    late = [chat(other, user("2+2=")), chat(other, user("1+1=")), chat(other, user("1+1="))]
    assert [one.seed for one in late] == [asked[2].seed, asked[0].seed, asked[1].seed]


def test_an_edited_answer_is_another_context(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    said = answer(mine, chat(mine, user("1+1=")), [70, 71])
    edited = chat(mine, user("1+1="), assistant(said.text + "!"), user("and?"))
    assert edited.segment is not mine.segments[0] and not edited.segment.history.response_ids


def test_texts_and_token_ids_are_continued_as_they_were_sampled(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    said = answer(mine, text(mine, "1+1="), BROKEN)
    second = text(mine, "1+1=" + said.text + " so")
    plain = tokenizer.encode("1+1=", add_special_tokens=False)
    new = tokenizer.encode(" so", add_special_tokens=False)
    assert second.prompt_ids == plain + BROKEN + new and second.segment is mine.segments[0]
    ids = recording(tokenizer)
    answer(ids, text(ids, [30, 31]), [70])
    assert text(ids, [30, 31, 70, 32]).segment is ids.segments[0]
    assert text(ids, [30, 31, 70]).segment is not ids.segments[0]  # nothing new: it is asked anew


def test_a_text_goes_on_before_the_end_that_it_did_not_see(tokenizer: Any) -> None:
    mine, eos = recording(tokenizer), tokenizer.eos_token_id
    said = answer(mine, text(mine, "1+1="), [70, eos], "eos")
    second = text(mine, "1+1=" + said.text + " so")
    assert eos not in second.prompt_ids and 70 in second.prompt_ids


def test_a_chat_does_not_continue_a_text_nor_token_ids_a_chat(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    answer(mine, text(mine, "1+1="), [70])
    asked = chat(mine, user("1+1="))
    assert asked.segment is not mine.segments[0] and asked.prompt_ids == mine.prompt_ids
    answer(mine, asked, [71])
    ids = text(mine, [*asked.prompt_ids, 71, 72])
    assert ids.segment not in mine.segments[:2] and ids.new == []


def test_an_error_in_making_tokens_is_a_refusal(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    with pytest.raises(Refused, match="the request could not be tokenized"):
        mine.ask(Request(kind="chat", messages=(user("\ud800"),)))
    assert mine.refused == 1 and not mine.segments and not mine.pending


def test_a_stop_is_sampled_and_not_shown(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    ids = tokenizer.encode("12=", add_special_tokens=False)
    asked = chat(mine, user("1+1="), stop="=")
    assert asked.stop == ("=",)
    assert answer(mine, asked, ids, "stop").text == "12"
    assert mine.row().response_ids == ids


def test_requests_past_a_limit_are_refused(tokenizer: Any) -> None:
    mine = recording(tokenizer, max_turns=40)
    for _ in range(MOST_PENDING):
        chat(mine, user("1+1="))
    with pytest.raises(Refused, match="16 requests of this sample wait") as caught:
        chat(mine, user("1+1="))
    assert caught.value.status == 429
    mine = recording(tokenizer, max_turns=1)
    answer(mine, chat(mine, user("1+1=")), [70])
    with pytest.raises(Refused, match="max_turns=1"):
        chat(mine, user("2+2="))
    assert mine.ending == "max_turns"
    mine = recording(tokenizer)
    with pytest.raises(Refused, match=r"the model reads 160 tokens.*shorten the messages") as caught:
        chat(mine, user("1" * 200))
    assert caught.value.code == "context_length_exceeded" and mine.ending == "max_tokens"


def test_a_dropped_request_leaves_no_trace(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    said = answer(mine, chat(mine, user("1+1=")), [70])
    later = (user("1+1="), assistant(said.text), user("and?"))
    mine.dropped(chat(mine, *later))
    assert mine.row().response_ids == [70]
    again = chat(mine, *later)
    assert again.segment is mine.segments[0]
    mine = recording(tokenizer)
    first = chat(mine, user("1+1="))
    mine.dropped(first)
    assert not mine.segments and chat(mine, user("1+1=")).seed == first.seed  # as if it had not been asked before
    kept, dropped = chat(mine, user("2+2=")), chat(mine, user("2+2="))
    mine.dropped(kept)
    assert chat(mine, user("2+2=")).seed == kept.seed != dropped.seed


ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


def test_calls_of_tools_are_read_from_the_turn_and_come_back_as_they_were_sampled(tokenizer: Any) -> None:
    mine = recording(tokenizer, max_new_tokens=400)
    mine._max_model_tokens = 2000
    first = chat(mine, user("1+1="), tools=[ADD])
    assert '"name": "add"' in tokenizer.decode(first.prompt_ids)
    # with spaces that no writer of JSON would make: rendered anew it would have other tokens
    turn = 'so <tool_call>{"name":   "add", "arguments": {"a": 1}}</tool_call>'
    ids = [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]
    said = answer(mine, first, ids, "eos")
    (call,) = said.tool_calls
    assert (said.text, call["function"]) == ("so", {"name": "add", "arguments": '{"a": 1}'})
    back = {"role": "assistant", "content": said.text, "tool_calls": said.tool_calls}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    second = chat(mine, user("1+1="), back, result, tools=[ADD], parallel_tool_calls=True)
    assert second.prompt_ids[: len(first.prompt_ids) + len(ids)] == first.prompt_ids + ids
    assert second.segment is first.segment
    assert call["id"] not in [one["id"] for one in answer(mine, second, ids, "eos").tool_calls]
    other = chat(mine, user("1+1="), back, result)  # it is shown other tools: another context
    assert other.segment is not first.segment


def test_a_turn_without_a_call_is_its_text_and_no_choice_offers_no_tools(tokenizer: Any) -> None:
    mine = recording(tokenizer)
    mine._max_model_tokens = 2000
    said = answer(mine, chat(mine, user("1+1="), tools=[ADD]), [70, 71])
    assert (said.text, said.tool_calls) == (tokenizer.decode([70, 71]), [])
    assert chat(mine, user("1+1="), tools=[ADD], tool_choice="none").prompt_ids == mine.prompt_ids
