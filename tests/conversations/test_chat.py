"""Conversations by hand, with a real policy and environment on the inline backend."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import workbench as wb
from tests.calculator import SUMS, answer, sums
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.conversations.chat import Chat
from workbench.conversations.credit import Value
from workbench.errors import BadInput, RolloutError

END = {**SUMS, 36: 17.0}  # most turns end soon


class Counting:
    """Answers with the number of the turn; the reward is 1 where a turn has a 7. Over after three turns."""

    def reset(self, prompt: str, sample_seed: int) -> str:
        self.turns, self.seed = 0, sample_seed
        return "go "

    def step(self, response: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"<{self.turns}>", float("7" in response), self.turns == 3


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab(
        "by-hand", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY, "critic": TINY},
        training={"minibatches": 1},
    ) as lab:  # fmt: skip
        yield lab


def sampling(**changes: Any) -> wb.Sampling:
    return wb.Sampling(**sums(environment=Counting, logit_bias=END, max_turns=5, max_new_tokens=96, **changes))


@pytest.fixture
def chat(lab: wb.Workbench) -> Chat:
    return lab.conversation("1+1=", sampling=sampling(), seed=3)


def rows(batch: wb.Batch, name: str) -> list[list[Any]]:
    column = batch.fetch([name])[name]
    assert isinstance(column, Ragged)
    return [row.tolist() for row in column.rows()]


def test_a_turn_at_a_time(lab: wb.Workbench, chat: Chat) -> None:
    assert lab.decode(chat.tree.first_ids) == "go " and not chat.ended
    turns = [chat.step(), chat.step()]
    assert [lab.decode(turn.answer_ids) for turn in turns] == ["<1>", "<2>"]
    assert [turn.reward for turn in turns] == [float("7" in lab.decode(turn.token_ids)) for turn in turns]
    assert [turn.text for turn in turns] == [lab.decode(turn.token_ids) for turn in turns]
    assert repr(turns[0]) == f"<Turn 0: {turns[0].text!r} -> '<1>', reward {turns[0].reward:g}>"
    assert chat.here == 1 and [turn.number for turn in chat.path] == [0, 1]
    assert "&lt;2&gt;" in chat._repr_html_() and repr(chat) == "<Chat: 2 turns here, 2 in the tree>"
    chat.finish()
    assert chat.ended == "done" and len(chat.path) == 3
    with expect_error(BadInput, rule="the environment has ended the conversation"):
        chat.step()
    assert chat.go(None).here is None and not chat.ended


def test_only_the_newest_conversations_keep_a_process(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.conversations.MOST_OPEN", 2)
    others = set(psutil.Process().children())
    chat = lab.conversation("1+1=", sampling=sampling(), seed=3)
    (own,) = set(psutil.Process().children()) - others
    chat.step()
    for seed in range(2):
        assert own.is_running()
        lab.conversation("1+1=", sampling=sampling(), seed=seed)
    assert not own.is_running()
    assert lab.decode(chat.step().answer_ids) == "<2>"


def test_a_conversation_that_waits_for_an_answer_is_not_closed(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.conversations.MOST_OPEN", 1)
    asked, free, closed = threading.Event(), threading.Event(), threading.Event()

    @wb.limits(own_process=False)
    class Slow(Counting):
        def step(self, response: str) -> tuple[str, float, bool]:
            asked.set()
            free.wait()
            return super().step(response)

        def close(self) -> None:
            closed.set()

    chat = lab.conversation("1+1=", environment=Slow, sampling=sampling(), seed=3)
    with ThreadPoolExecutor() as threads:
        turn = threads.submit(chat.step)
        try:
            asked.wait()
            lab.conversation("1+1=", sampling=sampling())
            assert not closed.is_set()
            with expect_error(BadInput, value=r"close\(\) while the environment answers"):
                chat.close()
        finally:
            free.set()
        assert lab.decode(turn.result().answer_ids) == "<1>"
    lab.conversation("1+1=", sampling=sampling())
    assert closed.is_set()
    assert lab.decode(chat.step().answer_ids) == "<2>"


def test_the_same_seed_takes_the_same_turns_and_training_sees_nothing(lab: wb.Workbench) -> None:
    before = (lab.iteration, dict(lab.last_metrics), dict(lab.runner.counters.draws), set(lab.store))
    one, two, other = (lab.conversation("1+1=", sampling=sampling(), seed=seed).finish() for seed in (3, 3, 4))
    assert [turn.token_ids for turn in one.path] == [turn.token_ids for turn in two.path]
    assert [turn.token_ids for turn in one.path] != [turn.token_ids for turn in other.path]
    assert before == (lab.iteration, dict(lab.last_metrics), dict(lab.runner.counters.draws), set(lab.store))


def test_log_probs_are_those_of_the_policy_behind_what_it_read(lab: wb.Workbench) -> None:
    ends = tuple(range(8, 200))  # most tokens end a turn: without a bias, which the trainer does not know of
    given = wb.Sampling(environment=Counting, max_new_tokens=64, max_turns=3, stop_token_ids=ends)
    chat = lab.conversation("1+1=", sampling=given)
    chat.step()
    chat.edit(0, answer="a hand's word ")
    chat.finish()
    batch = lab.actor.compute_log_prob(chat.batch())
    (mask,), (sampled,), (trained,) = (rows(batch, n) for n in ("response_mask", "rollout_log_prob", "old_log_prob"))
    pairs = [(one, two) for one, two, counts in zip(sampled, trained, mask, strict=True) if counts]
    assert len(pairs) == sum(len(turn.token_ids) for turn in chat.path[1:]) > 1
    assert [one for one, _ in pairs] == pytest.approx([two for _, two in pairs], abs=1e-4)


def test_a_turn_that_is_edited_is_answered_and_the_old_one_stays(lab: wb.Workbench, chat: Chat) -> None:
    old = [chat.step(), chat.step()]
    new = chat.edit(1, "3+4=")
    assert lab.decode(new.token_ids) == "3+4=" and new.reward == 0 and lab.decode(new.answer_ids) == "<2>"
    assert (new.parent, new.written_by, new.ending) == (0, "hand", "stop")
    assert chat.edit(1, "7=").reward == 1.0
    assert chat.tree.children(0)[0] == old[1] and len(chat.tree.children(0)) == 3
    ended = chat.edit(0, "no stop")
    assert ended.ending == "eos" and ended.token_ids[-1] == lab.runner.batches.tokenizer.eos_token_id
    chat.go(old[1])
    assert [turn.number for turn in chat.path] == [0, 1]


def test_an_answer_that_is_edited_is_what_the_policy_reads(lab: wb.Workbench, chat: Chat) -> None:
    chat.step()
    edited = chat.edit(0, answer="<eleven>")
    assert lab.decode(edited.answer_ids) == "<eleven>" and lab.decode(edited.own_ids) == "<1>"
    assert edited.token_ids == chat.tree.turns[0].token_ids and edited.written_by == "policy"
    chat.step()
    assert lab.decode(chat.tree.tokens(chat.path)).startswith("go ")
    assert "<eleven>" in lab.decode(chat.tree.tokens(chat.path))


def test_what_a_hand_was_in_is_not_trained(lab: wb.Workbench, chat: Chat) -> None:
    chat.step()
    chat.step()
    chat.edit(1, "3+4=")
    chat.finish()
    first, _, last = (len(turn.token_ids) for turn in chat.path)
    batch = chat.batch()
    (mask,), (starts,), (ends,) = (rows(batch, name) for name in ("response_mask", "turn_starts", "turn_ends"))
    assert [sum(mask[start:end]) for start, end in zip(starts, ends, strict=True)] == [0, 0, last]
    assert sum(mask) == last
    with_first = rows(chat.batch(before_edits=True), "response_mask")[0]
    assert sum(with_first) == first + last and sum(with_first[starts[1] : ends[1]]) == 0
    assert batch.turns().text.tolist()[1] == "3+4=" and batch.turns().trained.tolist() == [False, False, True]
    scored = lab.compute_advantages(batch.rename(environment_rewards="rewards"), estimator="reinforce_turn")
    advantages = rows(scored, "advantages")[0]
    assert not any(advantages[: starts[2]])
    chat.go(chat.path[1])
    with expect_error(BadInput, value="without a token to train"):
        chat.batch()
    assert len(chat.values()) == 2  # the critic looks at all of them


def test_a_fork_is_the_value_of_where_it_begins(lab: wb.Workbench, chat: Chat) -> None:
    chat.finish()
    fork = chat.fork(6, at=1)
    assert len(fork.df) == 6 and list(fork.df) == ["leaf", "turns", "return", "ending", "text"]
    for leaf, found in zip(fork.leaves, fork.returns, strict=True):
        behind = chat.tree.path(leaf.number)[1:]
        assert all(turn.parent is not None for turn in behind) and behind[0].parent == 0
        assert found == sum(float("7" in lab.decode(turn.token_ids)) for turn in behind)
        assert leaf.done and len(behind) == 2  # its environment had been told the first turn
        assert lab.decode(behind[0].answer_ids) == "<2>"
    assert fork.value.mean == pytest.approx(sum(fork.returns) / 6)
    half = 2.570582 * float(torch.tensor(fork.returns).std()) / math.sqrt(6)
    assert (fork.value.low, fork.value.high) == pytest.approx(
        (fork.value.mean - half, fork.value.mean + half), rel=1e-4
    )
    # beside it what the critic says of the same place
    values = chat.values()
    assert fork.critic == pytest.approx(values.critic_value[1], abs=1e-5)
    assert values.value[1] == fork.value.mean and values.forked.tolist() == [0, 6, 0]
    assert chat.here == 2  # it has not moved
    more = chat.fork(2, at=1)
    assert chat.value(1) == Value.of([*fork.returns, *more.returns])
    # of a turn with forks before and behind it, the advantage
    chat.fork(3, at=2)
    values = chat.values()
    assert chat.advantage(1) == pytest.approx(values.reward[1] + values.value[2] - values.value[1])
    assert "advantage" in chat._repr_html_()


def test_a_reward_function_scores_branches_that_have_ended(tmp_path: Path) -> None:
    def sevens(response: str, environment_rewards: list[float], **row: Any) -> float:
        return response.count("7") + 0.5 * sum(environment_rewards)

    models = {"actor": TINY, "reward": sevens}
    with tiny_lab("scored", tmp_path, backend="inline", models=models, training={"minibatches": 1}) as lab:
        chat = lab.conversation("1+1=", sampling=sampling(), seed=3)
        own = [chat.step().reward for _ in range(2)]
        assert own == [float("7" in turn.text) for turn in chat.path]  # the environment's: it goes on
        chat.finish()
        fork = chat.fork(6, at=1)
        for leaf, value in zip([chat.path[-1], *fork.leaves], [None, *fork.returns], strict=True):
            batch = chat.batch(leaf, before_edits=True)
            (rewards,) = rows(batch, "turn_rewards")
            given = [float("7" in turn.text) for turn in chat.tree.path(leaf.number)]
            expected = sevens(batch.df()["response_text"][0], given)
            assert sum(rewards) == expected
            assert value is None or value == expected - own[0]
        assert len(set(fork.returns)) > 1
        chat.train(*fork.leaves)
    made = itertools.count(1)

    @wb.limits(own_process=False)
    def fails(prompt: str, response: str) -> float:
        return 3.0 if next(made) % 4 else 1 / 0

    with tiny_lab("failed", tmp_path, backend="inline", models={"actor": TINY, "reward": fails}) as lab:
        fork = lab.conversation("1+1=", sampling=sampling(), seed=3).fork(6)
        assert fork.failed == 1 and fork.returns == [3.0] * 5  # it has no return, not 0
    models = {"actor": TINY, "reward": wb.verifiers.arithmetic}  # which takes an answer, and the row has none
    with tiny_lab("unscored", tmp_path, backend="inline", models=models) as lab:
        with pytest.warns(RuntimeWarning, match=r"takes 'answer'.* Only the environment's rewards are used"):
            chat = lab.conversation("1+1=", sampling=sampling(), seed=3).finish()
        assert chat.path[-1].reward == float("7" in chat.path[-1].text)


def test_one_can_go_on_from_a_continuation_and_train_on_all_of_them(lab: wb.Workbench, chat: Chat) -> None:
    chat.step()
    fork = chat.fork(4)
    chat.go(fork.leaves[0].parent)
    chat.step()  # behind a turn of the fork: the environment is told its turns again
    assert len(chat.path) == 3 and chat.path[1].number == fork.leaves[0].parent
    batch = chat.batch(*fork.leaves)
    starts, mask = rows(batch, "turn_starts"), rows(batch, "response_mask")
    # the first turn is in all of them, and trained in none
    assert all(
        not any(of_row[: start[1]]) and any(of_row[start[1] :]) for of_row, start in zip(mask, starts, strict=True)
    )
    assert len(set(torch.as_tensor(batch.fetch(["prompt_uid"])["prompt_uid"]).tolist())) == 1
    with lab.kept("actor"):
        steps = lab.weights["actor"].steps
        metrics = chat.train(*fork.leaves, estimator="reinforce_turn", clip=0.1)
        assert lab.weights["actor"].steps == steps + 1
    assert math.isfinite(float(metrics["loss"])) and chat.train.__doc__


class Pleased(Counting):
    def step(self, response: str) -> tuple[str, float, bool]:
        answer, _, done = super().step(response)
        return answer, 1.0, done


def test_training_raises_the_chance_of_a_branch_that_was_rewarded(lab: wb.Workbench) -> None:
    chat = lab.conversation("1+1=", environment=Pleased, sampling=sampling(), seed=3).finish()
    taken = chat.batch()

    def chance() -> float:
        batch = lab.actor.compute_log_prob(taken)
        return sum(
            x
            for x, counts in zip(rows(batch, "old_log_prob")[0], rows(batch, "response_mask")[0], strict=True)
            if counts
        )

    with lab.kept("actor"):
        before = chance()
        for _ in range(3):
            chat.train(estimator="reinforce_turn")
        assert chance() > before


def test_the_value_behind_a_branch_that_goes_on_is_the_critics(lab: wb.Workbench, chat: Chat) -> None:
    chat.step()
    assert not chat.ended
    for estimator in ("reinforce_turn", "grpo", lambda rewards: rewards):
        with expect_error(
            BadInput, value="turn 0, which has not ended", rule="whole return", remedy=r"chat.finish\(\) first"
        ):
            chat.train(estimator=estimator)
    names = ("prompt_ids", "response_ids", "response_mask", "values")
    with lab.kept("actor"), lab.kept("critic"):
        table = lab.critic.compute_values(chat.batch()).fetch(names)
        returns = Ragged.of([[2.0] * len(row) for row in rows(chat.batch(), "response_ids")], torch.float32)
        lab.critic.update_critic(lab.put({**table, "returns": returns}), epochs=3, clip=None)  # a new one's are all 0
        batch = lab.critic.compute_values(chat.batch(), final=True)
        behind = float(torch.as_tensor(batch.fetch(["final_values"])["final_values"]))
        first = rows(batch, "values")[0][len(chat.tree.first_ids)]
        assert abs(behind) > 0.01
        metrics = chat.train()
    assert float(metrics["loss"]) == pytest.approx(first - behind - chat.path[0].reward, abs=1e-5)  # less the advantage
    chat.finish()
    with lab.kept("actor"):
        chat.train(estimator="reinforce_turn")


def test_a_branch_that_goes_on_needs_a_critic(tmp_path: Path) -> None:
    with tiny_lab("alone", tmp_path, backend="inline", models={"actor": TINY}, training={"minibatches": 1}) as lab:
        chat = lab.conversation("1+1=", sampling=sampling(), seed=3)
        chat.step()
        with expect_error(BadInput, rule="reinforce_turn needs the whole return"):
            chat.train()
        chat.finish()
        assert math.isfinite(float(chat.train()["loss"]))


def test_an_environment_that_answers_otherwise_is_found(lab: wb.Workbench) -> None:
    class Moody:
        count = 0

        def step(self, response: str) -> tuple[str, float, bool]:
            Moody.count += 1
            return f"<{Moody.count}>", float(Moody.count), False

    chat = lab.conversation("1+1=", environment=Moody, sampling=sampling(), seed=1)
    chat.step()
    chat.step()
    with expect_error(RolloutError, value="gave another answer to turn 0", rule="older than the newest eight, replays"):
        chat.edit(1, "3=")
    assert len(chat.path) == 2
    # a fork behind the last turn, where the first environment still is: those of the hosts find it
    chat = lab.conversation("1+1=", environment=Moody, sampling=sampling(), seed=1)
    chat.step()
    fork = chat.fork(4)  # the first environment of their process begins to count anew, and answers as the notebook's
    assert fork.failed == 3 and len(fork.df) == 1
    assert "3 failed" in fork._repr_html_()


def test_an_environment_that_fails_leaves_the_chat_as_it_was(lab: wb.Workbench) -> None:
    class Broken:
        def step(self, response: str) -> tuple[str, float, bool]:
            if "7" in response:
                raise ValueError("no sevens")
            return "ok ", 0.0, False

    chat = lab.conversation(
        "1+1=", environment=Broken, sampling=dataclasses.replace(sampling(), logit_bias={24: 15.0, 36: 15.0})
    )
    chat.step()
    with expect_error(RolloutError, value="no sevens"):
        chat.edit(0, "7=")
    assert chat.here == 0 and len(chat.tree.turns) == 1
    assert len(chat.finish().path) > 1  # with a new environment


def test_without_an_environment_one_talks_with_the_policy(lab: wb.Workbench) -> None:
    chat = lab.conversation("1+1=", sampling=wb.Sampling(logit_bias=END, stop=("=",), max_new_tokens=96, max_turns=3))
    first = chat.step()
    second = chat.say("3+<|eos|>4=")
    heard = lab.decode(chat.path[0].answer_ids)
    assert "<|user|>3+<|eos|>4=" in heard and heard.endswith("<|assistant|>") and chat.path[0].text == first.text
    assert [turn.written_by for turn in chat.path] == ["policy"] * 2 and not chat.ended
    batch = chat.batch(before_edits=True)
    ids, mask = rows(batch, "response_ids")[0], rows(batch, "response_mask")[0]
    assert [one for one, own in zip(ids, mask, strict=True) if own] == [*first.token_ids, *second.token_ids]
    with expect_error(BadInput, rule="the policy does not answer itself", remedy=r"chat\.say"):
        chat.step()
    assert len(chat.finish().path) == 2 and chat.fork(2, at=1).turns == [1, 1]


def test_arguments(lab: wb.Workbench, chat: Chat) -> None:
    with expect_error(BadInput, value="before the first turn"):
        chat.say("3+4=")
    with expect_error(BadInput, rule="begins with one row"):
        lab.conversation(lab.prompts.next(2), sampling=sampling())
    with expect_error(BadInput, rule="begins with a prompt"):
        lab.conversation(3, sampling=sampling())
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1="}]
    spoken = [lab.conversation(row, sampling=sampling()) for row in (messages, {"prompt": messages})]
    assert spoken[0].tree.prompt_ids == spoken[1].tree.prompt_ids
    with expect_error(BadInput, value="gamma"):
        lab.conversation("1+1=", sampling=sampling(), gamma=2.0)
    with expect_error(BadInput, rule="the tree has turns none yet"):
        chat.go(0)
    with expect_error(BadInput, value="a branch without a turn"):
        chat.batch()
    chat.step()
    with expect_error(BadInput, rule="the branch has 1 turns"):
        chat.edit(1, "x")
    with expect_error(BadInput, rule="another text for the turn, or another answer"):
        chat.edit(0)
    with expect_error(BadInput, rule="there is room for"):
        chat.edit(0, "x" * 500)
    with expect_error(BadInput, rule="give 0 to 1"):
        chat.fork(2, at=2)
    with expect_error(BadInput, rule="must be a text, or messages"):
        chat.edit(0, answer=3)
    chat.edit(0, answer=[{"role": "user", "content": "<|user|>"}])
    assert chat.path[0].answer.count("<|user|>") == 2 and chat.path[0].answer_ids.count(4) == 1  # the template's
    with expect_error(BadInput, rule="without lone surrogates"):
        chat.edit(0, answer=[{"role": "us\ud800er", "content": "a"}])
    for wrong in ({"text": "\ud800"}, {"answer": "\ud800"}):
        with expect_error(BadInput, rule="half"):
            chat.edit(0, **wrong)


def test_limits_end_a_branch(lab: wb.Workbench) -> None:
    short = dataclasses.replace(sampling(), max_turns=2)
    chat = lab.conversation("1+1=", sampling=short).finish()
    assert chat.ended == "max_turns" and len(chat.path) == 2
    with expect_error(BadInput, rule="it has max_turns=2 turns already"):
        chat.fork(2)
    chat = lab.conversation("1+1=", sampling=dataclasses.replace(sampling(), max_new_tokens=6)).finish()
    assert chat.ended == "max_tokens"
    calls = dataclasses.replace(sampling(), max_calls=0, max_seconds=0.001)

    class Calls(Counting):
        tool_format = "hermes"

    chat = lab.conversation("1+1=", environment=Calls, sampling=calls)
    assert not chat.step().limit  # the time that a hand takes is no limit
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert chat.edit(0, call).limit == "max_calls" and chat.ended == "max_calls"
    with expect_error(BadInput, rule="more than max_calls=0 tool calls"):
        chat.step()


def test_a_row_of_a_batch_brings_its_columns(lab: wb.Workbench) -> None:
    class Asks:
        def reset(self, prompt: str, answer: str) -> str:
            return f"{answer} "

        def step(self, response: str) -> tuple[str, float, bool]:
            return "", 0.0, True

    prompts = lab.prompts.next(1)
    chat = lab.conversation(prompts, environment=Asks, sampling=sampling())
    assert lab.decode(chat.tree.first_ids) == f"{prompts.df(['answer'])['answer'][0]} "
    assert chat.step().done and chat.ended == "done"
    assert chat.batch().df(["answer"]).equals(prompts.df(["answer"]))


def test_the_interval_of_one_return_and_of_equal_ones() -> None:
    assert math.isnan(Value.of([1.0]).low) and Value.of([2.0, 2.0]) == Value(mean=2.0, low=2.0, high=2.0, n=2)


def test_a_turn_that_is_told_by_hand_is_answered_as_in_generation(lab: wb.Workbench) -> None:
    given, prompts = sums(logit_bias=END), lab.prompts.next(1)
    turns = lab.actor.generate_sequences(prompts, seed=3, **given).turns()
    chat = lab.conversation(prompts, sampling=wb.Sampling(**given))
    chat.step()
    chat.edit(0, turns.text[0])
    assert chat.path[0].reward == pytest.approx(answer(turns.text[0])[1])
