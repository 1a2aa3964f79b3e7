"""What stages made is kept, named and traced back; one batch goes on in several ways from the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.data.prompts import Prompts
from workbench.errors import BadInput, NotFound

SHORT = wb.Sampling(max_new_tokens=6)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    with tiny_lab("store", tmp_path, backend="inline", models=models) as lab:
        yield lab


def rolled_out(lab: wb.Workbench, rows: int = 8) -> wb.Batch:
    batch = lab.actor.generate_sequences(lab.prompts.next(rows // 2), samples=2, max_new_tokens=6)
    batch = lab.reference.compute_ref_log_prob(lab.actor.compute_log_prob(batch))
    return lab.reward.compute_reward(batch)


def test_batches_are_named_listed_and_traced_back(lab: wb.Workbench) -> None:
    batch = rolled_out(lab)
    frame = lab.batches().set_index("batch")
    assert frame["stage"].tolist() == [
        *("prompts", "actor.generate_sequences", "actor.compute_log_prob"),
        *("reference.compute_ref_log_prob", "reward.compute_reward"),
    ]
    assert frame.index[-1] == batch.id
    assert frame.loc[batch.id, "rows"] == 8
    assert frame["held"].tolist() == [False] * 4 + [True]
    one = lab.critic.compute_values(batch)
    two = lab.critic.compute_values(batch)
    assert one.id != two.id  # two branches of one name
    assert lab.batch(one.name).id == two.id
    lineage = lab.lineage(two)
    assert lineage["stage"].tolist()[:2] == ["critic.compute_values", "reward.compute_reward"]
    assert lineage["stage"].tolist()[-1] == "prompts"
    assert one.id not in lineage["batch"].tolist()
    generated = lab.store.origin(frame.index[1])
    assert generated is not None
    assert (generated.weights_version, len(generated.seed)) == (0, 3)


def test_release_frees_what_nobody_holds(lab: wb.Workbench) -> None:
    def held_bytes() -> int:
        return int(lab.topology()["host_batch_bytes"].iloc[0])

    assert held_bytes() == 0
    batch = rolled_out(lab)
    name = batch.name
    full = held_bytes()
    lab.release(name)
    assert held_bytes() == full  # the notebook still holds it
    del batch
    lab.runner.batches.release_unused()
    assert held_bytes() == 0
    with expect_error(NotFound, value="no batch 'batch1' in the store", remedy="lab.batches"):
        lab.batch(name)


def test_beyond_the_limit_what_a_cell_made_is_written_and_what_a_loop_made_is_dropped(lab: wb.Workbench) -> None:
    batch = rolled_out(lab)
    kept, expected = batch.id, batch.df()
    del batch
    wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT).run(1)
    loops = set(lab.batches()["batch"]) - {kept}
    lab.store.limit_bytes = 0
    lab.prompts.next(1)  # letting go happens when something is begun
    lab.actor.generate_sequences(lab.prompts.next(1), max_new_tokens=2)
    frame = lab.batches().set_index("batch")
    assert frame.loc[kept, "where"] == "file"
    assert not any(name in frame.index for name in loops if name.startswith("batch2"))
    assert lab.batch(kept).df().equals(expected)


def test_each_version_that_is_written_comes_back_as_it_was(lab: wb.Workbench) -> None:
    prompts = lab.prompts.next(2)
    generated = lab.actor.generate_sequences(prompts, samples=2, max_new_tokens=6)
    versions = (prompts, generated, lab.actor.compute_log_prob(generated, temperature=0.5))
    names, expected = [batch.id for batch in versions], [(dict(batch.meta), batch.df()) for batch in versions]
    columns = [batch.names for batch in versions]
    del prompts, generated, versions
    for _ in range(2):
        lab.store.limit_bytes = 0
        lab.store.trim(lambda batch, path: batch.save(path))
        lab.store.limit_bytes = 1 << 40
        assert set(lab.batches().set_index("batch").loc[names, "where"]) == {"file"}
        assert [lab.store.column_names(name) for name in names] == columns
        assert {lab.store.iteration(name) for name in names} == {1}
        assert len(list(lab.store.folder.iterdir())) == 3
        for name, (meta, frame) in reversed(list(zip(names, expected, strict=True))):
            batch = lab.batch(name)
            assert batch.id == name and dict(batch.meta) == meta and batch.df().equals(frame)
            del batch
    assert lab.critic.compute_values(lab.batch(names[1])).version > int(names[2].rpartition("v")[2])
    lab.release(names[0].rpartition(" ")[0])
    assert not list(lab.store.folder.iterdir())


BONUS = 0.0


def bonus(prompt: str, response: str, **row: Any) -> float:
    return BONUS


def test_an_unchanged_stage_can_come_from_the_store_and_says_so(
    lab: wb.Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = rolled_out(lab)
    with lab.reuse():
        before = lab.runner.counters.run
        values = lab.critic.compute_values(batch)
        assert capsys.readouterr().err == ""
        again = lab.critic.compute_values(batch)
        assert capsys.readouterr().err == f"critic.compute_values: from the store, as run {before + 1} made it\n"
        assert again.columns["values"].location.same(values.columns["values"].location)
        lab.compute_advantages(values, gamma=0.5)
        lab.compute_advantages(again, gamma=0.9)  # other arguments
        lab.critic.compute_values(batch.take([1, 0]))  # other rows
        advantages = lab.compute_advantages(values)
        lab.critic.update_critic(advantages)
        lab.critic.update_critic(advantages)  # never
        lab.critic.compute_values(batch)  # other weights
        assert capsys.readouterr().err == ""

        def other(prompt: str, response: str, **row: Any) -> float:
            return 1.0

        lab.reward.compute_reward(batch, function=other)  # other code
        global BONUS
        lab.reward.compute_reward(batch, function=bonus)
        BONUS = 1.0  # another number that it reads
        lab.reward.compute_reward(batch, function=bonus)
        assert capsys.readouterr().err == ""
        lab.compute_advantages(again)
        assert "from the store" in capsys.readouterr().err


def test_an_arm_that_trains_on_policy_takes_the_batch_as_it_is(lab: wb.Workbench) -> None:
    """Its `old_log_prob` is of older weights, for arms of one step as for others."""

    def differs(prompt: str, response: str, **row: Any) -> float:
        return float(sum(map(ord, response)) % 7)

    minibatches, lab.actor.training.minibatches = lab.actor.training.minibatches, 1  # else none trains on policy
    batch = rolled_out(lab)
    lab.actor.update_actor(lab.compute_advantages(batch, estimator=lambda rewards: rewards * 0 + 1))
    one = lab.compare(batch, {"one": wb.GRPO(lab, reward=differs), "two": wb.GRPO(lab, reward=differs, epochs=2)})
    name = "update_actor/first_minibatch/ratio/max_deviation"
    assert one["one"].metrics[name] == one["two"].metrics[name] > 0
    lab.actor.training.minibatches = minibatches


def test_arms_start_from_the_same_weights_and_leave_them_as_they_were(lab: wb.Workbench) -> None:
    batch = rolled_out(lab)
    before = (lab.actor.weights_checksum(), lab.critic.weights_checksum())
    sharp = wb.PPO(lab, clip=0.01, epochs=2)
    arms = {
        "ppo": wb.PPO(lab, epochs=2),
        "again": wb.PPO(lab, epochs=2),
        "sharp": sharp,
        "grpo": wb.GRPO(lab, epochs=2),
    }
    comparison = lab.compare(batch, arms)
    assert (lab.actor.weights_checksum(), lab.critic.weights_checksum()) == before
    assert dict(comparison["ppo"].metrics) == dict(comparison["again"].metrics)  # to the last bit
    frame = comparison.df
    assert list(frame.columns) == ["ppo", "again", "sharp", "grpo"]
    name = "update_actor/clip_fraction"
    assert comparison["sharp"].metrics[name] > comparison["ppo"].metrics[name]
    assert frame["grpo"].isna().any()  # it has no critic
    ppo = comparison["ppo"]
    assert ppo.taken == ("prompts", "generate_sequences", "compute_log_prob", "compute_ref_log_prob", "compute_reward")
    assert ppo.ran == ("compute_values", "compute_advantages", "update_critic", "update_actor")
    advantages = comparison.column("advantages")
    assert advantages.shape == (8, 4)
    assert advantages["ppo"].equals(advantages["sharp"])
    assert not advantages["ppo"].equals(advantages["grpo"])
    html = comparison._repr_html_()
    (chart,) = [one for one in comparison.charts() if one.title.startswith("advantages")]
    assert [curve.name for curve in chart.curves] == list(advantages.columns) and chart.ticks == {
        0: "smallest",
        1: "largest",
    }
    assert all(list(curve.y) == sorted(curve.y) for curve in chart.curves)
    assert "The same in all arms that have it: token_rewards, values, rewards" in html
    assert "rewards, mean over each response" not in [one.title for one in comparison.charts()]
    assert "clip_fraction" in html
    # a rollout after a branch samples from the weights of before it
    fresh = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4))
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4
    assert fresh.meta["weights_version"] == 0


def test_prompts_that_an_arm_draws_are_put_back(lab: wb.Workbench) -> None:
    def nothing(prompt: str, response: str, **row: Any) -> float:
        return 0.0

    batch = lab.prompts.next(2)
    before = (lab.prompts.drawn, lab.prompts.state)
    dapo: dict[str, Any] = {"prompts": 2, "samples": 2, "sampling": SHORT, "reward": nothing}
    arms = lab.compare(batch, {name: wb.DAPO(lab, rounds=rounds, **dapo) for name, rounds in (("a", 2), ("b", 1))})
    assert [arms[name].metrics["dynamic_sampling/rounds"] for name in ("a", "b")] == [2, 1]
    assert (lab.prompts.drawn, lab.prompts.state) == before
    again = Prompts("arithmetic/test", tokenizer=lab.runner.batches.tokenizer, seed=lab.seed)
    assert lab.prompts.next(2).fetch(["prompt"])["prompt"] == [row.prompt for row in again.next(4)[2:]]


def test_an_arm_runs_what_its_change_reaches(lab: wb.Workbench) -> None:
    algorithm = wb.PPO(lab, prompts=4, sampling=SHORT)
    algorithm.iterate()
    done = algorithm.made["compute_advantages"]
    same = wb.PPO(lab, prompts=4, sampling=SHORT)
    other = wb.PPO(lab, prompts=4, sampling=SHORT, kl="k3")
    arms = lab.compare(done, {"same": same, "k3": other})
    assert arms["same"].ran == ("update_critic", "update_actor")
    assert arms["k3"].ran == ("compute_advantages", "update_critic", "update_actor")
    with expect_error(BadInput, value=r"arms=\{'x': 'ppo'\}", rule="names to algorithms of this workbench"):
        lab.compare(done, {"x": "ppo"})  # type: ignore[dict-item]


def test_an_arm_of_another_workbench_is_refused_before_any_arm_runs(lab: wb.Workbench, tmp_path: Path) -> None:
    batch, stages = lab.prompts.next(2), lab.runner.counters.run
    with tiny_lab("another", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as another:
        arms = {"here": wb.GRPO(lab, sampling=SHORT), "there": wb.GRPO(another, sampling=SHORT)}
        with expect_error(BadInput, value="arm 'there'", rule="on this workbench"):
            lab.compare(batch, arms)
    assert lab.runner.counters.run == stages


def test_going_back_by_hand(lab: wb.Workbench) -> None:
    batch = lab.compute_advantages(lab.critic.compute_values(rolled_out(lab)))
    before = lab.actor.weights_checksum()
    with lab.kept("actor") as go_back:
        first = lab.actor.update_actor(batch)
        assert lab.actor.weights_checksum() != before
        go_back()
        assert lab.actor.update_actor(batch) == first
    assert lab.actor.weights_checksum() == before
    with expect_error(BadInput, value="role 'actr'"), lab.kept("actr"):
        pass


def test_reuse_gives_no_stale_answer(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    with lab.reuse():
        batch = lab.actor.generate_sequences(lab.prompts.next(2), samples=2, temperature=0.7, max_new_tokens=6)
        cool = lab.actor.compute_log_prob(batch)
        warm = lab.actor.compute_log_prob(cool, temperature=1.3)
        again = lab.actor.compute_log_prob(warm)  # at the rollout's temperature, whatever an earlier stage was told
        assert [b.meta["log_prob_temperature"] for b in (cool, warm, again)] == [0.7, 1.3, 0.7]
        assert again.df(["old_log_prob"]).equals(cool.df(["old_log_prob"]))
        assert not warm.df(["old_log_prob"]).equals(cool.df(["old_log_prob"]))
        batch = lab.compute_advantages(lab.critic.compute_values(lab.reward.compute_reward(cool)))
        capsys.readouterr()
        with lab.overlap():
            lab.critic.update_critic(batch)
            lab.critic.compute_values(batch)  # after the update, though it was asked for before that had ended
        with lab.kept("actor"):
            lab.critic.update_critic(batch)  # not one of the roles that go back
        lab.critic.compute_values(batch)
        assert "compute_values" not in capsys.readouterr().err


def test_a_function_put_into_an_arm_is_run(lab: wb.Workbench) -> None:
    batch = rolled_out(lab)
    arm = wb.GRPO(lab)
    arm.insert(lambda b: b.take([0, 1, 2, 3]), after="generate_sequences", name="first_four")
    comparison = lab.compare(batch, {"all": wb.GRPO(lab), "four": arm})
    assert comparison["four"].ran[0] == "first_four"
    assert (comparison["all"].batch.rows, comparison["four"].batch.rows) == (8, 4)


def test_remax_as_an_arm_draws_its_own_baseline(lab: wb.Workbench) -> None:
    batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=6))
    batch = lab.reward.compute_reward(lab.reference.compute_ref_log_prob(batch))
    (arm,) = lab.compare(batch, {"remax": wb.ReMax(lab)}).arms
    assert arm.ran[:2] == ("generate_greedy", "compute_greedy_reward")
    assert arm.batch.df(["response_ids", "rewards"]).equals(batch.df(["response_ids", "rewards"]))
    assert not arm.batch.df(["rewards"])["rewards"].equals(arm.batch.df(["baseline_rewards"])["baseline_rewards"])


def test_identical_arms_draw_the_same_responses(lab: wb.Workbench) -> None:
    arms = {name: wb.GRPO(lab, samples=2, sampling=SHORT) for name in ("one", "two")}
    comparison = lab.compare(lab.prompts.next(2), arms)
    one, two = (dict(arm.metrics) for arm in comparison.arms)
    two.pop("generate_sequences/sync_gap/mean")  # going back makes the engine take its weights again
    assert one == two


def test_a_batchs_own_methods_are_part_of_its_lineage(lab: wb.Workbench) -> None:
    batch = rolled_out(lab)
    half = batch.take([0, 2, 4, 6]).select("prompt_ids", "response_ids")
    scored = lab.critic.compute_values(half)
    stages = lab.lineage(scored)["stage"].tolist()
    assert stages[:4] == ["critic.compute_values", "batch.select", "batch.take", "reward.compute_reward"]
    assert stages[-1] == "prompts"


def test_metrics_come_from_the_store_with_their_batch(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    batch = rolled_out(lab)
    lab.reward.compute_reward(batch)
    first = lab.last_metrics.pop("compute_reward")
    runs = lab.runner.counters.run
    with lab.reuse():
        lab.reward.compute_reward(batch)
    assert lab.last_metrics["compute_reward"] == first
    assert lab.store.origin(lab.batch(batch.name).id).run <= runs  # type: ignore[union-attr,operator]
    assert "from the store" in capsys.readouterr().err


def test_columns_and_iteration_of_a_batch_are_known_without_waiting(lab: wb.Workbench) -> None:
    batch = rolled_out(lab)
    name, columns = batch.id, batch.names
    assert (lab.store.column_names(name), lab.store.iteration(name)) == (columns, 1)
    with lab.overlap():
        made = lab.critic.compute_values(batch)
        assert "values" in lab.store.column_names(made.id)
    put = lab.put(batch.fetch(["prompt_ids"]))
    assert lab.store.iteration(put.id) is None
    assert (lab.store.column_names("none"), lab.store.iteration("none")) == ((), None)


def test_beyond_the_number_of_batches_the_oldest_go(lab: wb.Workbench) -> None:
    batch = rolled_out(lab)
    held, expected = batch.id, batch.df()
    algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT)
    algorithm.iterate()
    lab.store.limit_batches = 10
    for _ in range(4):
        algorithm.iterate()
    frame = lab.batches().set_index("batch")
    assert (frame["where"] == "hosts").sum() <= 10 + 6  # what the notebook and the last iteration hold stays
    assert held in frame.index
    assert not any(name.startswith("batch2 ") for name in frame.index)  # of a loop over stages: dropped
    assert lab.batch(held).df().equals(expected)
