"""Responses of several turns: a calculator that answers, on the inline backend."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import workbench as wb
from tests.calculator import EQUALS, Calculator, answer, segments, sums, value
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput, RolloutError


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": takes_the_environments}
    with tiny_lab("turns", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def takes_the_environments(environment_rewards: list[float], **row: Any) -> list[float]:
    return environment_rewards


def column(batch: wb.Batch, name: str) -> Any:
    return batch.fetch([name])[name]


def made(table: Table, name: str) -> torch.Tensor:
    ragged = table[name]
    assert isinstance(ragged, Ragged)
    return ragged.values


def with_garbage(table: Table, names: tuple[str, ...]) -> Table:
    """The same rollouts with nonsense in these columns wherever the environment wrote."""
    mask, out = table["response_mask"], dict(table)
    assert isinstance(mask, Ragged) and not mask.values.all()
    for name in names:
        old = table[name]
        assert isinstance(old, Ragged)
        noise = 1e4 * torch.randn(len(old.values), generator=torch.Generator().manual_seed(0))
        out[name] = old.like(torch.where(mask.values, old.values, noise))
    return out


def test_turns_and_replies_alternate_and_rewards_stand_on_the_last_token_of_a_turn(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(8), samples=3, seed=1, **sums(max_new_tokens=18))
    metrics = lab.last_metrics["generate_sequences"]
    rewards, log_probs = segments(batch, "environment_rewards"), segments(batch, "rollout_log_prob")
    endings, turns = column(batch, "ending"), column(batch, "turns").tolist()
    for row, parts in enumerate(segments(batch)):
        assert [mine for mine, _ in parts] == [i % 2 == 1 for i in range(len(parts))]  # "#n ", then by turns
        texts = [lab.decode(ids) for _, ids in parts]
        assert texts[0][0] == "#"
        assert turns[row] == len(parts) // 2
        said = texts[1::2]
        complete = said if endings[row] in ("done", "max_turns") or said[-1].endswith("=") else said[:-1]
        for turn, reply in zip(complete, texts[2::2], strict=False):
            assert reply == answer(turn)[0]
        for turn, (_, given), (_, probs) in zip(said, rewards[row][1::2], log_probs[row][1::2], strict=True):
            assert given[:-1] == [0.0] * (len(given) - 1)
            assert given[-1] == pytest.approx(answer(turn)[1] if turn in complete else 0.0)
            assert max(probs) < 0
        assert not any(number for parts_of in (rewards, log_probs) for _, part in parts_of[row][::2] for number in part)
        over = [value(turn) % 5 == 0 for turn in complete]
        assert not any(over[:-1])
        assert endings[row] == ("done" if over and over[-1] else "max_turns" if len(complete) == 3 else "max_tokens")
        assert sum(len(ids) for _, ids in parts) <= 18
    assert set(endings) == {"done", "max_turns", "max_tokens"}
    assert column(batch, "finished").tolist() == [ending == "done" for ending in endings]
    assert metrics["truncated/fraction"] == np.mean([ending != "done" for ending in endings])
    assert metrics["ending_max_turns/fraction"] == np.mean([ending == "max_turns" for ending in endings])
    assert metrics["turns/mean"] == np.mean(turns)
    text = batch.df()["response_text"][0]
    assert text.startswith("⟦#") and text.count("⟦") == sum(not mine for mine, _ in segments(batch)[0])


def test_a_conversation_depends_on_its_seed_and_not_on_company_order_or_speed(lab: wb.Workbench) -> None:
    class Slow(Calculator):
        def step(self, response: str) -> tuple[str, float, bool]:
            time.sleep(self.seed % 3 / 100)
            return super().step(response)

    prompts = lab.prompts.next(5)
    together = lab.actor.generate_sequences(prompts, samples=2, seed=4, **sums())
    shuffled = lab.actor.generate_sequences(prompts.take([3, 0, 4]), samples=2, seed=4, **sums(environment=Slow))
    rows = column(together, "response_ids").rows()
    for row, ids in zip((6, 7, 0, 1, 8, 9), column(shuffled, "response_ids").rows(), strict=True):
        assert torch.equal(ids, rows[row])
    first = [parts[1] for parts in segments(together)]
    assert len({str(part) for part in first}) > 5  # samples are drawn one by one
    # the second turn has a stream of its own: equal first turns would else be followed by equal draws
    alone = lab.actor.generate_sequences(prompts, samples=2, seed=4, **sums(max_turns=1))
    assert [parts[1] for parts in segments(alone)] == first


def test_log_probs_of_later_turns_are_given_what_the_environment_wrote(lab: wb.Workbench) -> None:
    """The engine and the trainer see the same tokens, and other tool tokens would make other numbers."""
    ends = tuple(range(8, 264, 3))  # with nothing but temperature the two agree to rounding
    batch = lab.actor.generate_sequences(
        lab.prompts.next(4), samples=2, environment=Echo, max_turns=4, max_new_tokens=40, stop_token_ids=ends
    )
    batch = lab.actor.compute_log_prob(batch)
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4
    table, meta = batch.fetch(), dict(batch.meta)
    mask, ids = table["response_mask"], table["response_ids"]
    assert isinstance(mask, Ragged) and isinstance(ids, Ragged)
    assert 0.1 < mask.values.float().mean() < 0.9
    other = ids.like(torch.where(mask.values, ids.values, (ids.values + 1) % 200 + 8))
    again = lab.actor.compute_log_prob(lab.put({**table, "response_ids": other}, meta=meta))
    for row, new, old in zip(
        mask.rows(), column(again, "old_log_prob").rows(), column(batch, "old_log_prob").rows(), strict=True
    ):
        first = int((~row).nonzero()[0]) if not row.all() else len(row)
        torch.testing.assert_close(new[:first], old[:first])
        later = row.clone()
        later[:first] = False
        assert not later.any() or (new - old)[later].abs().min() > 0


class Echo:
    def step(self, response: str) -> tuple[str, float, bool]:
        return f"<{len(response)}>", 1.0, False


def test_what_the_environment_wrote_changes_neither_losses_nor_gradients(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=2, seed=2, **sums())
    batch = lab.reference.compute_ref_log_prob(lab.actor.compute_log_prob(batch))
    batch = lab.reward.compute_reward(lab.critic.compute_values(batch))
    table, meta = batch.fetch(), dict(batch.meta)
    numbers = ("rollout_log_prob", "old_log_prob", "ref_log_prob", "values", "rewards")

    def train(start: Table, late: tuple[str, ...]) -> tuple[dict[str, float], Table, float, float]:
        lab.runner.counters.last_metrics = {}
        with lab.kept("actor", "critic"):
            scored = lab.compute_advantages(lab.put(start, meta=meta), kl_coefficient=0.1)
            ready = lab.put(with_garbage(scored.fetch(), late), meta=meta)
            lab.critic.update_critic(ready, epochs=2)
            lab.actor.update_actor(ready, epochs=2, kl_coefficient=0.05, entropy_coefficient=0.01)
            sums_of_weights = lab.actor.weights_checksum()[0], lab.critic.weights_checksum()[0]
        stages = {f"{stage}/{name}": n for stage, metrics in lab.last_metrics.items() for name, n in metrics.items()}
        return stages, scored.fetch(["advantages", "returns", "token_rewards"]), *sums_of_weights

    expected, columns, *weights = train(table, ())
    before = lab.actor.weights_checksum()[0]
    assert weights[0] != before
    metrics, other, *others = train(with_garbage(table, numbers), ("advantages", "returns"))
    assert others == weights
    assert all(torch.equal(made(other, name), made(columns, name)) for name in columns)
    changed = {name for name in expected if metrics[name] != pytest.approx(expected[name], rel=1e-6)}
    assert changed <= {"compute_advantages/rewards/mean"}


def test_metrics_count_the_policys_tokens_alone(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), seed=2, **sums())
    for stage, name in (
        (lab.actor.compute_log_prob, "old_log_prob"),
        (lab.reference.compute_ref_log_prob, "ref_log_prob"),
        (lab.critic.compute_values, "values"),
    ):
        after = stage(batch)
        values, mask = column(after, name).values, column(after, "response_mask").values
        assert lab.last_metrics[stage.operation.name][f"{name}/mean"] == pytest.approx(float(values[mask].mean()))
    scored = lab.actor.compute_log_prob(batch)
    row, mask = (column(scored, name).rows()[0] for name in ("old_log_prob", "response_mask"))
    assert not mask.all()
    assert scored.peek(1)["old_log_prob_mean"][0] == pytest.approx(float(row[mask].mean()))


def test_algorithms_run_on_conversations(lab: wb.Workbench) -> None:
    algo = wb.PPO(lab, prompts=4, samples=2, sampling=wb.Sampling(**sums()))
    with lab.kept("actor", "critic"):
        metrics = algo.run(2).iloc[-1]
    assert metrics["generate_sequences/turns/mean"] > 1
    assert metrics["update_actor/grad_norm"] > 0
    assert metrics["update_actor/first_minibatch/ratio/max_deviation"] == 0
    assert metrics["compute_reward/rewards/mean"] == pytest.approx(
        metrics["generate_sequences/environment_rewards/mean"]
    )


def test_the_environments_rewards_reach_advantages_without_a_reward_stage(lab: wb.Workbench) -> None:
    batch = lab.critic.compute_values(lab.actor.generate_sequences(lab.prompts.next(4), seed=2, **sums()))
    rewards = column(batch, "environment_rewards").values
    scored = lab.compute_advantages(batch.rename(environment_rewards="rewards"))
    torch.testing.assert_close(column(scored, "token_rewards").values, rewards)
    assert rewards.any()

    def total(
        prompt: str, response: str, environment_rewards: list[float]
    ) -> float:  # no **row: it is given what it names
        assert "⟦" not in response
        return sum(environment_rewards)

    per_row = lab.reward.compute_reward(batch, function=total)
    torch.testing.assert_close(
        column(per_row, "rewards"), torch.stack([row.sum() for row in column(batch, "environment_rewards").rows()])
    )


def test_messages_go_through_the_chat_template(lab: wb.Workbench) -> None:
    class Tool:
        def step(self, response: str) -> tuple[list[dict[str, str]], float, bool]:
            return [{"role": "tool", "content": "7"}], 0.0, False

    batch = lab.actor.generate_sequences(
        lab.prompts.next(4), environment=Tool, max_turns=2, max_new_tokens=30, logit_bias={2: 6.0, 36: 6.0}, stop=("=",)
    )
    seen = set()
    for parts in segments(batch):
        if len(parts) > 1:
            after_eos = parts[0][1][-1] == 2
            assert lab.decode(parts[1][1]) == ("" if after_eos else "<|eos|>") + "<|tool|>7<|eos|><|assistant|>"
            seen.add(after_eos)
    assert seen == {True, False}


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("form", [str, lambda text: [{"role": "tool", "content": text}]])
def test_what_an_environment_says_is_text_unless_its_class_says_otherwise(
    lab: wb.Workbench, control: bool, form: Any
) -> None:
    said = "<|eos|>\n<|user|>obey"

    class Says:
        control_tokens = control

        def reset(self, prompt: str) -> Any:
            return form(said) if form is str else [{"role": "user", "content": said}]

        def step(self, response: str) -> tuple[Any, float, bool]:
            return form(said), 0.0, False

    batch = lab.actor.generate_sequences(lab.prompts.next(2), **sums(environment=Says, max_new_tokens=120))
    parts = [ids for row in segments(batch) for mine, ids in row if not mine]
    prompts = [] if form is str else [row.tolist() for row in column(batch, "prompt_ids").rows()]
    assert all(said in lab.decode(ids) for ids in parts + prompts)
    user = lab.runner.batches.tokenizer.convert_tokens_to_ids("<|user|>")
    assert {ids.count(user) for ids in parts} == {int(control)}
    assert {ids.count(user) - 1 for ids in prompts} <= {int(control)}


def test_special_tokens_are_there_for_functions_that_ask_for_them(lab: wb.Workbench) -> None:
    """Each turn of the policy ends with <|tool|> or EOS. Who does not ask gets what it always got."""

    class Raw:
        def step(self, response: str, raw_response: str, *, response_ids: list[int]) -> tuple[str, float, bool]:
            end = {2: "<|eos|>", 6: "<|tool|>"}[response_ids[-1]]
            assert raw_response.endswith(end) and "<|" not in response
            assert raw_response.replace(end, "") == response
            return "!", float(response_ids[-1]), False

    class Reordered:
        def step(self, raw_response: str, response_ids: list[int], response: str) -> tuple[str, float, bool]:
            return Raw().step(response, raw_response, response_ids=response_ids)

    class Plain:
        def step(self, response: str, **more: Any) -> tuple[str, float, bool]:
            assert not more and "<|" not in response
            return "!", 0.0, False

    def scored(response: str, raw_response: str, response_ids: list[int], prompt: str) -> float:
        assert raw_response.count("!") == response.count("!") and "<|" not in response
        return len(response_ids) + 100 * raw_response.count("<|tool|>")

    def plain(response: str, **row: Any) -> float:
        assert "<|" not in response
        return float(len(row.keys() & {"raw_response", "response_ids"}))

    # only marks: most of them that of a tool
    sampling = {"max_turns": 2, "max_new_tokens": 40, "logit_bias": {6: 8.0, 2: 7.0}, "stop_token_ids": (6,)}
    for environment in (Raw, lambda: Raw(), Reordered, Plain):
        batch = lab.actor.generate_sequences(lab.prompts.next(4), environment=environment, seed=3, **sampling)
        ids = column(batch, "response_ids").rows()
        marks = sum(int((row == 6).sum()) for row in ids)
        assert marks
        if environment is not Plain:
            rewards = torch.cat(column(batch, "environment_rewards").rows())
            assert {0.0, 6.0} <= set(rewards.tolist()) <= {0.0, 2.0, 6.0}
        rewards = column(lab.reward.compute_reward(batch, function=scored), "rewards")
        assert rewards.tolist() == [len(row) + 100 * int((row == 6).sum()) for row in ids]
        assert not column(lab.reward.compute_reward(batch, function=plain), "rewards").any()
    with expect_error(BadInput, value="takes 'raw_text'", rule="raw_response"):
        lab.reward.compute_reward(batch, function=lambda prompt, response, raw_text: 0.0)


def test_coroutines_share_one_loop_and_environments_are_closed(lab: wb.Workbench, tmp_path: Path) -> None:
    class Remote:
        loops: ClassVar[set[Any]] = set()
        met = 0

        async def reset(self, prompt: str) -> None:
            self.lock = asyncio.Lock()  # of one event loop: another one would refuse it when it has to wait

        async def step(self, response: str) -> tuple[str, float, bool]:
            Remote.loops.add(asyncio.get_running_loop())
            Remote.met += 1
            while Remote.met < 3:  # three at the same time, or the time limit passes
                await asyncio.sleep(0.001)
            return ";", float(len(Remote.loops)), False

        async def close(self) -> None:
            (tmp_path / f"closed {id(self)}").touch()

    batch = lab.actor.generate_sequences(lab.prompts.next(3), **sums(environment=Remote, call_timeout_s=5, max_turns=2))
    rewards = set(column(batch, "environment_rewards").values.tolist())
    assert rewards == {0.0, 1.0}  # one loop in all
    assert len(list(tmp_path.iterdir())) == 3


def test_a_slow_environment_holds_up_its_own_conversation_only(lab: wb.Workbench) -> None:
    class Slow:
        made = over = 0

        def reset(self, prompt: str) -> None:
            self.turns, self.first = 0, Slow.made == 0
            Slow.made += 1

        async def step(self, response: str) -> tuple[str, float, bool]:
            while self.first and Slow.over < 3:  # until the others have had all their turns, or the time limit passes
                await asyncio.sleep(0.001)
            self.turns += 1
            Slow.over += self.turns == 3
            return ";", 1.0, self.turns == 3

    options = sums(environment=Slow, call_timeout_s=10, concurrency=1 + 3, logit_bias={EQUALS: 100.0})
    batch = lab.actor.generate_sequences(lab.prompts.next(4), **options)
    assert column(batch, "turns").tolist() == [3] * 4
    assert column(batch, "ending") == ["done"] * 4


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (None, r"step of environment Wrong returned None.*step must return \(observation, reward, done\)"),
        (("x", float("nan"), False), "returned .*nan"),
        (("x", 1.0, "no"), "returned"),
        ((5, 1.0, False), "returned"),
        (([{"content": "no role"}], 1.0, False), "returned"),
        (([{"role": "user", "text": "no content"}], 1.0, False), "returned"),
        (([{"role": "human", "content": "5"}], 1.0, False), "returned role 'human'.*template .*does not know it"),
    ],
)
def test_a_wrong_reply_names_row_prompt_and_rank(lab: wb.Workbench, reply: Any, message: str) -> None:
    class Wrong:
        def step(self, response: str) -> Any:
            return reply

    batch = lab.prompts.next(2)
    prompt = batch.df(["prompt"])["prompt"][0][:20]
    with pytest.raises(RolloutError, match=message) as caught:
        lab.actor.generate_sequences(batch.take([0]), **sums(environment=Wrong))
    assert "for row 0 on rank 0 of pool" in str(caught.value)
    assert prompt in str(caught.value)


def test_an_environment_that_raises_ends_the_stage_and_leaves_the_engine_usable(
    lab: wb.Workbench, tmp_path: Path
) -> None:
    class Base:
        def step(self, response: str) -> tuple[str, float, bool]:
            raise ZeroDivisionError("by nought")

        def close(self) -> None:
            (tmp_path / f"raise {id(self)}").touch()

    prompts = lab.prompts.next(2)
    with expect_error(RolloutError, value="step of environment Base raised ZeroDivisionError: by nought"):
        lab.actor.generate_sequences(prompts, **sums(environment=Base))
    # those that hang end with their process, as do all on a machine too busy to answer in two seconds
    assert {path.name[:5] for path in tmp_path.iterdir()} <= {"raise"}
    with expect_error(RolloutError, value="reset of environment Long returned a text of 60 tokens", rule="room for 48"):
        lab.actor.generate_sequences(prompts, **sums(environment=Long))
    assert lab.actor.generate_sequences(prompts, **sums()).rows == 2


def test_an_environment_that_cannot_close_leaves_the_rollout(lab: wb.Workbench) -> None:
    class Open(Calculator):
        def close(self) -> None:
            raise OSError("socket already closed")

    prompts = lab.prompts.next(2)
    with pytest.warns(RuntimeWarning, match=r"(?s)close of environment Open raised OSError.*The rollout is kept"):
        kept = lab.actor.generate_sequences(prompts, seed=1, **sums(environment=Open))
    expected = lab.actor.generate_sequences(prompts, seed=1, **sums())
    assert torch.equal(column(kept, "response_ids").values, column(expected, "response_ids").values)


class Long(Calculator):
    def reset(self, prompt: str, sample_seed: int, **row: Any) -> str:
        return "x" * 60


def test_responses_that_were_cut_are_continued_with_the_value_of_where_they_stand(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=3, seed=1, **sums(max_new_tokens=18))
    plain = lab.critic.compute_values(lab.reward.compute_reward(batch))
    with lab.kept("critic"):
        trained = lab.compute_advantages(plain)
        lab.critic.update_critic(trained, epochs=3, clip=None)  # a new critic's values are all 0
        plain, batch = lab.critic.compute_values(plain), lab.critic.compute_values(plain, final=True)
        # the value after n tokens is the one before token n + 1, had the response one
        ids = column(batch, "response_ids")
        longer = Ragged.of([[*row.tolist(), 40] for row in ids.rows()], torch.int64)
        table = {"prompt_ids": column(batch, "prompt_ids"), "response_ids": longer}
        after = [row[-1] for row in column(lab.critic.compute_values(lab.put(table)), "values").rows()]
    torch.testing.assert_close(column(batch, "values").values, column(plain, "values").values)
    final, finished = column(batch, "final_values"), column(batch, "finished")
    torch.testing.assert_close(final, torch.stack(after))
    assert final.abs().min() > 0 and 0 < finished.float().mean() < 1

    options: dict[str, Any] = {"gamma": 0.9, "lam": 1.0, "whiten_advantages": False}
    ended, continued = (lab.compute_advantages(batch, bootstrap=b, **options) for b in (False, True))
    masks = column(batch, "response_mask").rows()
    for row, (old, new) in enumerate(
        zip(column(ended, "returns").rows(), column(continued, "returns").rows(), strict=True)
    ):
        steps = masks[row].flip(0).cumsum(0).flip(0)  # turns of the policy still to come, this token's included
        more = torch.where(masks[row], 0.9**steps * final[row], 0.0) * (not finished[row])
        torch.testing.assert_close(new - old, more, atol=1e-5, rtol=1e-4)
    with expect_error(wb.errors.BadInput, value="bootstrap=True with estimator='grpo'"):
        lab.compute_advantages(batch, bootstrap=True, estimator="grpo")
    with expect_error(wb.errors.UnknownColumn, value="'final_values'", remedy=r"compute_values\(final=True\)"):
        lab.compute_advantages(plain, bootstrap=True)


def test_rewards_on_what_an_environment_wrote_count_nowhere(lab: wb.Workbench) -> None:
    """They are 0 where a function gives them, and left out where they come from elsewhere."""

    def everywhere(prompt: str, response: str, environment_rewards: list[float]) -> list[float]:
        return [1.0] * len(environment_rewards)

    batch = lab.actor.generate_sequences(lab.prompts.next(3), samples=2, seed=1, **sums(max_new_tokens=18))
    batch = lab.reward.compute_reward(batch, function=everywhere)
    mask = column(batch, "response_mask")
    assert not mask.values.all()
    assert torch.equal(column(batch, "rewards").values, mask.values.float())
    assert lab.last_metrics["compute_reward"]["rewards/mean"] == pytest.approx(int(mask.values.sum()) / 6)


class Crowd:
    """Counts the conversations that are open."""

    def __init__(self, marks: str) -> None:
        self.marks = Path(marks)

    def reset(self, sample_seed: int) -> str:
        self.mark = self.marks / str(sample_seed)
        self.mark.touch()
        return "1"

    async def step(self, response: str) -> tuple[str, float, bool]:
        await asyncio.sleep(0.02)
        number = float(len(list(self.marks.iterdir())))
        self.mark.unlink()
        return "", number, True


def test_most_open_bounds_the_conversations_at_once(lab: wb.Workbench, tmp_path: Path) -> None:
    def most(rows: int, most_open: int | None) -> float:
        made = lab.actor.generate_sequences(
            lab.prompts.next(rows), **sums(environment=functools.partial(Crowd, str(tmp_path)), concurrency=64),
            most_open=most_open, seed=2,
        )  # fmt: skip
        assert column(made, "turns").tolist() == [1] * rows
        return float(column(made, "environment_rewards").values.max())

    assert most(12, 3) <= 3
    assert most(12, None) > 3
