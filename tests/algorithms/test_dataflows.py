"""The algorithms on an inline workbench: what their stages are told, dynamic sampling, and the adaptive coefficient."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.calculator import Calculator
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.algorithms import ALGORITHMS
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, StageError, StageInterrupted
from workbench.objectives.kl import adaptive_kl_step

COMMON = ("prompt_ids", "response_ids", "response_mask")
SHORT = wb.Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("dataflows", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def test_what_each_algorithm_needs_is_in_the_docs(tmp_path: Path) -> None:
    """The table of docs/algorithms.md, made from the graphs of the algorithms as they are without options."""
    models: dict[str, Any] = dict.fromkeys(("actor", "critic", "reference", "cost_critic", "teacher"), TINY)
    models |= {"reward": wb.Model(TINY, training=wb.Training(engine="torch")), "cost": TINY}
    answers = {"prompt": "a", "response": "b", "chosen": "b", "rejected": "c", "label": True}
    with tiny_lab("needs", tmp_path, backend="inline", models=models) as lab:
        kinds = ("demonstrations", "feedback", "pairs")
        streams: dict[str, Any] = {kind: getattr(lab, kind)([answers] * 64) for kind in kinds}
        lines = []
        for name in sorted(ALGORITHMS):
            kind = getattr(wb, name)
            given = {field.name: streams[field.name] for field in dataclasses.fields(kind) if field.name in streams}
            source = f"lab.{next(iter(given), 'prompts')}"
            if kind is wb.ArCHer:
                given["sampling"] = wb.Sampling(environment=Calculator, max_turns=2)
            stages = kind(lab, **given).graph().stages
            roles = dict.fromkeys(stage.role for stage in stages if stage.role in lab.groups)
            reads = [
                f"`{stage.operation}`: {', '.join(c for c in stage.reads if c not in COMMON) or 'no more'}"
                for stage in stages
                if stage.updates
            ]
            lines.append(f"| `{name}` | {', '.join(roles)} | `{source}` | {'; '.join(reads)} |")
    text = (Path(wb.__file__).parents[1] / "docs" / "algorithms.md").read_text()
    missing = [line for line in lines if line not in text]
    assert not missing, "\n".join(lines)


def test_how_many_samples_and_which_roles(tmp_path: Path) -> None:
    def alone(rewards: torch.Tensor) -> torch.Tensor:
        return rewards + 1

    with tiny_lab("few", tmp_path, backend="inline", models={"actor": TINY, "reward": even}) as lab:
        made = wb.GRPO(lab, prompts=4, samples=1, estimator=alone, sampling=SHORT)
        assert made.iterate()["update_actor/grad_norm"] > 0
        with expect_error(
            BadInput, value="GRPO.samples=1", rule="must be at least 2: the baseline of estimator='grpo'"
        ):
            wb.GRPO(lab, samples=1)
        with expect_error(BadInput, value="RLOO on a workbench without reference", remedy="or give kl_coefficient=0"):
            wb.RLOO(lab)


def even(prompt: str, response: str, **row: Any) -> float:
    """Teaches on about half of the prompts: on the others every response gets 1."""
    return float(len(response)) if sum(map(ord, prompt)) % 2 else 1.0


def nothing(prompt: str, response: str, **row: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("make", "stages"),
    [
        (lambda lab: wb.RLOO(lab, prompts=2, samples=2, sampling=SHORT),
         "compute_log_prob compute_ref_log_prob compute_reward compute_advantages update_actor"),
        (lambda lab: wb.ReinforcePP(lab, prompts=2, samples=2, baseline=True, sampling=SHORT),
         "compute_log_prob compute_ref_log_prob compute_reward compute_advantages update_actor"),
        (lambda lab: wb.DAPO(lab, prompts=2, samples=2, sampling=SHORT),
         "compute_reward dynamic_sampling compute_log_prob compute_advantages update_actor"),
        (lambda lab: wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT, estimator="off_policy_baseline",
                             clip=1.0, clip_high=1e9,
                             correction=wb.Correction(level="sequence", high=8.0, reference_size=1.0)),
         "compute_log_prob compute_gradient_norm compute_reward compute_advantages update_actor"),
        (lambda lab: wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT, estimator="dr_grpo", loss="cispo", clip=1.0,
                             aggregation="fixed-length", kl_coefficient=0.1, kl="k3_corrected"),
         "compute_log_prob compute_ref_log_prob compute_reward compute_advantages update_actor"),
    ],
)  # fmt: skip
def test_an_iteration(lab: wb.Workbench, make: Any, stages: str) -> None:
    algorithm = make(lab)
    numbers = itertools.count()

    def reward(prompt: str, response: str, **row: Any) -> float:
        """No two responses get the same, equal ones neither: every row teaches."""
        return 100.0 * next(numbers) + len(set(response))

    algorithm.reward = reward
    assert algorithm.graph().names == ["prompts", "generate_sequences", *stages.split()]
    steps = lab.weights["actor"].steps
    metrics = algorithm.iterate()
    assert metrics["update_actor/optimizer_steps"] == steps + 2
    assert metrics["update_actor/first_minibatch/ratio/max_deviation"] <= 1e-6
    assert metrics["update_actor/first_minibatch/clip_fraction"] == 0
    assert metrics["update_actor/grad_norm"] > 0
    assert metrics["update_actor/skipped_rows/fraction"] < 1


@pytest.mark.parametrize(
    "make",
    [
        lambda lab: wb.PPO(lab, prompts=4, sampling=SHORT, kl_coefficient=0.0, bootstrap=True),
        lambda lab: wb.DAPO(lab, prompts=2, samples=2, sampling=SHORT, overlong_buffer=0),
    ],
)
def test_every_algorithm_takes_a_correction(lab: wb.Workbench, make: Any) -> None:
    """And those whose penalty is 0 ask no reference."""
    algorithm = make(lab)
    numbers = itertools.count()
    algorithm.reward = lambda prompt, response, **row: float(next(numbers))
    algorithm.correction = wb.Correction(bound="mask")
    metrics = algorithm.iterate()
    assert "compute_ref_log_prob" not in algorithm.graph().names
    assert 0 < metrics["update_actor/correction/effective_sample_size"] <= 1
    assert metrics["compute_log_prob/entropy"] > 0
    if hasattr(algorithm, "sampling"):
        before = algorithm.sampling
        with expect_error(BadInput, value=r"update_actor with Correction.*top_p=0\.9"):
            algorithm.sampling = wb.Sampling(top_p=0.9, max_new_tokens=4)
        assert algorithm.sampling is before
        algorithm.sampling = wb.Sampling(top_p=0.9, max_new_tokens=4, keep_mask=True)
        metrics = algorithm.iterate()
        assert metrics["update_actor/correction/weight/mean"] == pytest.approx(1, abs=1e-3)


def test_a_loss_that_compares_with_rollouts_needs_their_mask(lab: wb.Workbench) -> None:
    def mine(log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -(log_prob - rollout_log_prob).exp() * advantages

    def ours(rewards: torch.Tensor, old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor) -> torch.Tensor:
        return rewards[:, None] * (old_log_prob - rollout_log_prob).exp()

    cut: dict[str, Any] = {"top_p": 0.9, "max_new_tokens": 4}
    with expect_error(BadInput, value=r"update_actor with loss=mine.*top_p=0\.9", remedy="keep_mask=True"):
        wb.GRPO(lab, loss=mine, sampling=wb.Sampling(**cut))
    with expect_error(BadInput, value=r"compute_advantages with estimator=ours.*top_p=0\.9", remedy="keep_mask=True"):
        wb.GRPO(lab, estimator=ours, sampling=wb.Sampling(**cut))
    wb.GRPO(lab, loss=mine, estimator=ours, sampling=wb.Sampling(**cut, keep_mask=True))
    wb.GRPO(lab, estimator=lambda rewards, rollout_log_prob: rewards, sampling=wb.Sampling(**cut))
    batch = lab.actor.generate_sequences(lab.prompts.next(2), **cut)
    batch = lab.reward.compute_reward(lab.actor.compute_log_prob(batch))
    with expect_error(BadInput, value="estimator=ours, which takes 'rollout_log_prob'", remedy="keep_mask=True"):
        lab.compute_advantages(batch, estimator=ours)


def test_settings_that_cannot_be(lab: wb.Workbench) -> None:
    for make, message in (
        (lambda: wb.RLOO(lab, samples=1), "RLOO.samples=1"),
        (lambda: wb.ReinforcePP(lab, baseline=True), r"ReinforcePP\(baseline=True\).samples=1"),
        (lambda: wb.DAPO(lab, samples=1), "DAPO.samples=1"),
        (lambda: wb.DAPO(lab, sampling=SHORT, overlong_buffer=7).graph(), "overlong_buffer=7"),
        (lambda: wb.PPO(lab, kl_target=0.0), "target=0"),
        (lambda: wb.PPO(lab, kl_target=6.0, kl_horizon=3), r"PPO\(kl_horizon=3\) with 16 responses"),
        (
            lambda: wb.PPO(lab, kl_target=0.1, kl_coefficient=0),
            r"kl_target=0\.1, kl_coefficient=0\.0\).*kl_coefficient above",
        ),
        (lambda: wb.GRPO(lab, loss="gspo", dual_clip=3.0), "dual_clip"),
        (lambda: wb.GRPO(lab, loss="trpo").graph(), "loss='trpo'"),
        (lambda: wb.PPO("lab"), r"PPO\('lab'\).*wb\.open"),  # type: ignore[arg-type]
        (lambda: wb.PPO(lab, clips=0.1), r"PPO\(clips=0\.1\).*it takes lab, prompts, .*write clip="),  # type: ignore[call-arg]
        (lambda: wb.PPO(lab, gamma=2.0), r"gamma=2\.0"),
        (lambda: wb.PPO(lab, kl_coefficient=-0.1), r"PPO\.kl_coefficient=-0\.1"),
        (lambda: wb.PPO(lab, entropy_coefficient=math.inf), "entropy_coefficient=inf.*finite"),
        (lambda: wb.GRPO(lab, entropy_coefficient=-math.inf), "entropy_coefficient=-inf.*finite"),
        (lambda: wb.RLOO(lab, kl_coefficient=math.inf), r"RLOO\.kl_coefficient=inf.*finite"),
        (lambda: wb.PPO(lab, kl_target="6"), r"kl_target='6'.*a number, or None"),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadInput, match=message):
            make()
    assert wb.GRPO(lab, clip_high=math.inf).clip_high == math.inf  # no bound


def test_rows_that_minibatches_do_not_divide_are_refused_before_they_are_drawn(lab: wb.Workbench) -> None:
    solved = lab.demonstrations([{"prompt": f"{i}+1=", "response": f"{i + 1}"} for i in range(4)])
    with expect_error(BadInput, value=r"HPT\(prompts=1, samples=3\): update_actor: 3 rows in 2 minibatches"):
        wb.HPT(lab, solved, prompts=1, samples=3, sampling=SHORT)
    algorithm, drawn = wb.PPO(lab, prompts=4, sampling=SHORT), lab.prompts.drawn
    lab.actor.training.minibatches = 3
    try:
        with expect_error(BadInput, value=r"PPO\(prompts=4, samples=1\): update_actor: 4 rows in 3 minibatches"):
            algorithm.step()
    finally:
        lab.actor.training.minibatches = 2
    edited = wb.DAPO(lab, prompts=2, samples=3, sampling=SHORT)  # whose function returns as many rows as it takes
    edited.replace("prompts", n=1)
    with expect_error(BadInput, value="update_actor: 3 rows in 2 minibatches"):
        edited.step()
    assert lab.prompts.drawn == drawn


class TestDynamicSampling:
    def test_more_is_drawn_until_every_group_teaches(self, lab: wb.Workbench) -> None:
        algorithm = wb.DAPO(lab, prompts=4, samples=3, sampling=SHORT, reward=even, rounds=20)
        drawn = lab.prompts.drawn
        while algorithm.next_stage != "dynamic_sampling":
            algorithm.step()
        iteration = lab.iteration
        batch = algorithm.step()
        assert lab.iteration == iteration  # prompts were drawn for the iteration under way
        metrics = lab.last_metrics["dynamic_sampling"]
        assert batch.rows == 12
        assert lab.prompts.drawn == drawn + 4 * (1 + metrics["rounds"])
        assert 1 <= metrics["rounds"] <= 20
        assert metrics["filled/fraction"] == 0
        frame = batch.df(["prompt_uid", "prompt", "rewards"])
        assert frame.groupby("prompt_uid").size().tolist() == [3] * 4
        assert (frame.groupby("prompt_uid")["rewards"].nunique() > 1).all()
        assert all(sum(map(ord, prompt)) % 2 for prompt in frame["prompt"])
        assert 0 < metrics["kept/fraction"] < 1
        recorded = lab.metrics("dynamic_sampling")
        assert recorded["rounds"].to_list()[-1] == metrics["rounds"]
        whole = algorithm.iterate()
        assert whole["compute_advantages/without_variance/fraction"] == 0
        assert whole["dynamic_sampling/rounds"] == recorded["rounds"].to_list()[-1]

    def test_what_is_missing_after_the_last_round_is_filled_up(self, lab: wb.Workbench) -> None:
        algorithm = wb.DAPO(lab, prompts=2, samples=2, sampling=SHORT, reward=nothing, rounds=2, overlong_buffer=0)
        drawn = lab.prompts.drawn
        metrics = algorithm.iterate()
        assert lab.prompts.drawn == drawn + 6
        assert metrics["dynamic_sampling/rounds"] == 2
        assert metrics["dynamic_sampling/filled/fraction"] == 1
        assert metrics["compute_advantages/without_variance/fraction"] == 1
        assert metrics["update_actor/grad_norm"] == 0
        assert algorithm.made["compute_advantages"].rows == 4

    def test_what_fills_up_is_dealt_evenly(self, lab: wb.Workbench) -> None:
        """Minibatches are consecutive rows: each has its share of the groups that teach nothing."""
        differ = itertools.count()

        def first_two(prompt: str, response: str, **row: Any) -> float:
            return float(next(differ)) if prompt in chosen else 1.0

        algorithm = wb.DAPO(lab, prompts=4, samples=2, sampling=SHORT, reward=first_two, rounds=0, overlong_buffer=0)
        chosen: list[str] = []
        chosen += algorithm.step().df(["prompt"])["prompt"].tolist()[:2]
        while algorithm.next_stage != "compute_log_prob":
            algorithm.step()
        batch = algorithm.made["dynamic_sampling"]
        teaching = batch.df(["prompt"])["prompt"].isin(chosen).tolist()
        assert teaching == [True, True, False, False] * 2
        assert lab.last_metrics["dynamic_sampling"]["filled/fraction"] == 0.5

    def test_edits_reach_every_round(self, lab: wb.Workbench) -> None:
        algorithm = wb.DAPO(lab, prompts=2, samples=2, sampling=SHORT, reward=even, rounds=2, overlong_buffer=0)
        calls = []

        @wb.limits(own_process=False)
        def replaced(prompt: str, response: str, **row: Any) -> float:
            calls.append(response)
            return 0.0

        algorithm.replace("compute_reward", function=replaced)
        algorithm.replace("generate_sequences", samples=3, max_new_tokens=4)
        algorithm.insert(lambda batch: batch, after="compute_reward", name="looked_at")
        while algorithm.next_stage != "compute_log_prob":
            algorithm.step()
        assert len(calls) == 3 * 2 * 3
        batch = algorithm.made["dynamic_sampling"]
        assert batch.rows == 6
        assert batch.lengths("response_ids").max() <= 4
        assert lab.last_metrics["dynamic_sampling"]["rounds"] == 2

    @pytest.mark.parametrize("way", ["iterate", "run"])
    def test_a_draw_that_failed_is_gone_on_with(self, lab: wb.Workbench, way: str, tmp_path: Path) -> None:
        calls = itertools.count()

        @wb.limits(own_process=False)
        def breaks_in_the_second_draw(prompt: str, response: str, **row: Any) -> float:
            if next(calls) == 9:
                if way == "run":
                    signal.raise_signal(signal.SIGINT)  # it stops where rows come back
                else:
                    raise ConnectionError("the service is away")
            return 0.0

        algorithm = wb.DAPO(lab, prompts=2, samples=2, sampling=SHORT, reward=breaks_in_the_second_draw, rounds=3)
        drawn = lab.prompts.drawn
        go_on = algorithm.iterate if way == "iterate" else lambda: algorithm.run(1)
        with pytest.raises((StageError, StageInterrupted)):
            go_on()
        assert lab.prompts.drawn == drawn + 6
        if way == "iterate":
            lab.save(tmp_path / "kept")
        go_on()
        assert lab.prompts.drawn == drawn + 8
        if way == "iterate":
            with wb.restore(tmp_path / "kept", name="drawn-again", runs=tmp_path) as again:
                restored = wb.DAPO(again, prompts=2, samples=2, sampling=SHORT, rounds=3, reward=nothing)
                while restored.next_stage != "compute_log_prob":
                    restored.step()
                assert again.prompts.drawn == lab.prompts.drawn

    def test_an_edit_holds_for_draws_that_were_made(self, lab: wb.Workbench) -> None:
        calls = itertools.count()

        @wb.limits(own_process=False)
        def breaks_in_the_third_draw(prompt: str, response: str, **row: Any) -> float:
            if next(calls) >= 8:
                raise ConnectionError("the service is away")
            return 0.0

        @wb.limits(own_process=False)
        def differs(prompt: str, response: str, **row: Any) -> float:
            return float(next(calls))

        algorithm = wb.DAPO(lab, prompts=2, samples=2, sampling=SHORT, reward=breaks_in_the_third_draw, rounds=3)
        with pytest.raises(StageError):
            algorithm.iterate()
        drawn = lab.prompts.drawn
        assert set(algorithm.made) > {"compute_reward (draw 2)", "prompts (draw 3)"}
        algorithm.replace("compute_reward", function=differs)
        metrics = algorithm.iterate()
        assert (metrics["dynamic_sampling/rounds"], metrics["dynamic_sampling/kept/fraction"]) == (0, 1)
        assert lab.prompts.drawn == drawn

    def test_the_penalty_counts_after_the_choice(self, lab: wb.Workbench) -> None:
        """Groups are chosen by the reward itself; the penalty is part of the advantages' reward."""
        algorithm = wb.DAPO(lab, prompts=2, samples=2, sampling=SHORT, reward=nothing, rounds=0, overlong_buffer=6)
        algorithm.iterate()
        table = algorithm.made["compute_advantages"].fetch(["token_rewards", "rewards", "response_ids"])
        rewards, ids, scores = table["token_rewards"], table["response_ids"], table["rewards"]
        assert isinstance(rewards, Ragged) and isinstance(ids, Ragged) and isinstance(scores, torch.Tensor)
        found = torch.stack([row.sum() for row in rewards.rows()])
        assert scores.abs().sum() == 0
        torch.testing.assert_close(found, -ids.lengths / 6)


def test_the_coefficient_follows_its_target(lab: wb.Workbench) -> None:
    algorithm = wb.PPO(lab, prompts=4, sampling=SHORT, kl_coefficient=0.1, kl_target=0.5, kl_horizon=20)
    for _ in range(2):
        before = algorithm.kl_coefficient
        metrics = algorithm.iterate()
        kl = metrics["compute_advantages/reference_kl_per_response"]
        table = algorithm.made["compute_advantages"].fetch(["old_log_prob", "ref_log_prob"])
        old, ref = table["old_log_prob"], table["ref_log_prob"]
        assert isinstance(old, Ragged) and isinstance(ref, Ragged)
        assert kl == pytest.approx(float((old.values - ref.values).sum()) / 4, abs=1e-5)
        assert algorithm.kl_coefficient == adaptive_kl_step(before, kl, 0.5, 4, 20)
        assert algorithm.kl_coefficient != before
    fixed = wb.PPO(lab, prompts=4, sampling=SHORT)
    fixed.iterate()
    assert fixed.kl_coefficient == 0.05


@dataclasses.dataclass
class Own(wb.GRPO):
    """An algorithm of a user, some of whose annotations cannot be evaluated."""

    unknown: Missing | None = None  # type: ignore[name-defined] # noqa: F821
    absent: dataclasses.nothing = 0  # type: ignore[name-defined]
    noted: Annotated[int, {"a": 1}] = 0
    flag: bool = False


@pytest.mark.parametrize("given", [{"samples": "8"}, {"noted": "x"}, {"flag": 1}, {"clip": "0.1"}])
def test_one_annotation_that_cannot_be_evaluated_leaves_the_others(lab: wb.Workbench, given: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        Own(lab, **given)
    assert caught.value.value == "Own.{}={!r}".format(*next(iter(given.items())))
    assert Own(lab, prompts=np.int64(4), samples=2, unknown=3, absent="x").prompts == 4  # type: ignore[arg-type]


def surrogate(log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, clip: float = 0.2) -> Any:
    ratio = (log_prob - old_log_prob).exp()
    value = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -value, {"clip_fraction": value != ratio * advantages}


def less_the_mean(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return rewards - torch.stack([rewards[group == prompt].mean() for prompt in group])


def test_an_estimator_that_reads_log_probabilities_gets_them_before_a_single_step(lab: wb.Workbench) -> None:
    def moved(rewards: torch.Tensor, old_log_prob: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
        return rewards - old_log_prob.mean(-1) + 2 * ref_log_prob.mean(-1)

    lab.actor.training.minibatches = 1
    try:
        with lab.kept("actor"):
            algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT, estimator=moved)
            algorithm.run(1)
    finally:
        lab.actor.training.minibatches = 2
    table = algorithm.made["compute_advantages"].fetch(["advantages", "old_log_prob", "ref_log_prob", "rewards"])
    old, ref = (torch.stack([row.mean() for row in table[name].rows()]) for name in ("old_log_prob", "ref_log_prob"))
    advantages = torch.stack([row[0] for row in table["advantages"].rows()])
    torch.testing.assert_close(advantages, table["rewards"] - old + 2 * ref, rtol=1e-5, atol=1e-5)


def test_a_replaced_estimator_names_the_stage_to_insert(lab: wb.Workbench) -> None:
    rloo = wb.RLOO(lab, prompts=2, samples=2, sampling=SHORT, kl_coefficient=0)
    remedy = r"first insert\(lab.reference.compute_ref_log_prob, after='compute_reward'\)"
    with expect_error(BadInput, remedy=remedy):
        rloo.replace("compute_advantages", estimator=lambda rewards, ref_log_prob: rewards)
    with expect_error(
        BadInput, remedy=r"first insert\(lab.critic.compute_values, final=True, after='compute_reward'\)"
    ):
        rloo.replace("compute_advantages", estimator=lambda rewards, final_values: rewards)
    with expect_error(BadInput, value="would read column 'step_ends'", remedy="give the parameter a default"):
        rloo.replace("compute_advantages", estimator=lambda rewards, step_ends: rewards)
    rloo.insert(lab.critic.compute_values, final=True, after="compute_reward")
    rloo.replace("compute_advantages", estimator=lambda rewards, final_values: rewards - final_values)
    with lab.kept("actor"):
        rloo.iterate()


def test_a_field_that_adds_a_stage_in_the_middle_of_an_iteration(lab: wb.Workbench) -> None:
    """The stages behind the new one run again: their batches lack its column."""

    def moved(rewards: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
        return rewards + ref_log_prob.sum(-1)

    with lab.kept("actor"):
        algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT)
        while "compute_reward" not in algorithm.made:
            algorithm.step()
        rollouts = algorithm.made["compute_log_prob"]
        algorithm.estimator = moved
        assert algorithm.next_stage == "compute_ref_log_prob"
        algorithm.iterate()
    assert algorithm.made["compute_log_prob"] is rollouts
    table = algorithm.made["compute_advantages"].fetch(["advantages", "ref_log_prob", "rewards"])
    advantages = torch.stack([row[0] for row in table["advantages"].rows()])
    expected = table["rewards"] + torch.stack([row.sum() for row in table["ref_log_prob"].rows()])
    torch.testing.assert_close(advantages, expected)


def test_a_loss_that_reads_the_reference_gets_it_without_a_penalty(lab: wb.Workbench) -> None:
    def near(log_prob: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
        return (log_prob - ref_log_prob).square()

    def may(log_prob: torch.Tensor, ref_log_prob: torch.Tensor | None = None) -> torch.Tensor:
        return log_prob if ref_log_prob is None else log_prob - ref_log_prob

    for loss, scored in ((near, True), (may, False)):
        ppo = wb.PPO(lab, prompts=2, sampling=SHORT, kl_coefficient=0, loss=loss)
        grpo = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT, loss=loss)
        for algorithm in (ppo, grpo):
            assert ("compute_ref_log_prob" in [stage.name for stage in algorithm.graph().stages]) == scored


def test_a_run_goes_on_after_a_step_that_was_skipped(lab: wb.Workbench) -> None:
    """Its metrics are not finite, and no method of an algorithm refuses them."""
    algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT, loss=lambda log_prob: -log_prob + torch.inf)
    with lab.kept("actor"):
        assert len(algorithm.run(2)) == 2
    assert lab.last_metrics["update_actor"]["skipped/fraction"] == 1.0


def test_functions_in_the_fields_of_algorithms(lab: wb.Workbench) -> None:
    """A loss and an estimator of one's own in the arms of a comparison: the numbers of those with a name."""
    ours: dict[str, Any] = {"prompts": 3, "samples": 4, "sampling": SHORT}
    batch = lab.actor.generate_sequences(lab.prompts.next(3), samples=4, max_new_tokens=6, seed=3)
    arms: dict[str, Any] = {
        "named": wb.GRPO(lab, estimator="dr_grpo", epochs=2, **ours),
        "mine": wb.GRPO(lab, loss=surrogate, estimator=less_the_mean, epochs=2, **ours),
        "ppo": wb.PPO(lab, **ours),
        "my ppo": wb.PPO(lab, loss=surrogate, **ours),
    }
    arms_of = {arm.name: arm for arm in lab.compare(batch, arms).arms}
    for named, mine in (("named", "mine"), ("ppo", "my ppo")):
        expected, found = dict(arms_of[named].metrics), dict(arms_of[mine].metrics)
        # metrics of ratios are those of the rows that are not skipped, and a function's rows never are
        for name in (
            f"update_actor/{part}{name}" for part in ("", "first_minibatch/") for name in ("loss", "grad_norm")
        ):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    algorithm = wb.GRPO(lab, loss=surrogate, estimator=less_the_mean, **ours)
    algorithm.run(1)
    assert 0 <= lab.last_metrics["update_actor"]["clip_fraction"] < 1
    with expect_error(BadInput, value="takes 'advantage'", remedy=r"write 'advantages' \(the nearest\)"):
        wb.GRPO(lab, loss=lambda log_prob, advantage: log_prob, **ours).graph()
