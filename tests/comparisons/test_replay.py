"""`wb.replay`: a run with staleness, pauses and changes in its middle, made again from its log."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.algorithms.graph import Graph, Stage
from workbench.comparisons.run_folder import RunFolder
from workbench.errors import BadInput, NotFound, StageInterrupted

MODELS = {"actor": TINY, "reward": vowels}
LONG = wb.Sampling(max_new_tokens=20, stop_token_ids=tuple(range(0, 256, 16)))


def grpo(lab: wb.Workbench) -> wb.GRPO:
    return wb.GRPO(lab, prompts=2, samples=2, sampling=LONG, correction=wb.Correction())


def same(batch: wb.Batch) -> wb.Batch:
    return batch


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with tiny_lab("first", tmp_path_factory.mktemp("runs"), backend="inline", models=MODELS) as lab:
        algorithm = grpo(lab)
        algorithm.run(1)
        algorithm.run(3, staleness=2, pause_after=4)
        algorithm.clip, algorithm.sampling.temperature = 0.05, 0.7  # type: ignore[misc]
        algorithm.run(1, staleness=1)
        algorithm.run(1)
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)  # by hand: not repeated
        return lab.run_folder


def test_the_draws_and_every_bit_of_the_metrics_are_the_same(recorded: Path, tmp_path: Path) -> None:
    with tiny_lab("again", tmp_path, backend="inline", models=MODELS) as lab:
        frame = wb.replay(recorded, grpo(lab))
        assert frame.index.tolist() == [1, 2, 3, 4, 5, 6] and frame["same_draws"].all()
        assert frame["largest_difference"].tolist() == [0.0] * 6 and not any(frame["only_here"] + frame["only_there"])
        assert frame.attrs["differs"].empty and frame.attrs["left_out"] == []
        assert len(lab.buffer) == 0 and lab.iteration == 6
        assert RunFolder(recorded).series()["samples"].loc[6] == 24  # a response in parts is one
        with expect_error(BadInput, value="replay in iteration 6", rule="at the beginning"):
            wb.replay(recorded, grpo(lab))


def test_an_iteration_in_whose_middle_the_dial_was_turned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Graph.call

    def pressed(graph: Graph, stage: Stage, *given: Any) -> Any:
        if stage.name == "compute_reward":
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return call(graph, stage, *given)

    with tiny_lab("turned", tmp_path, backend="inline", models=MODELS) as lab:
        algorithm = grpo(lab)
        algorithm.run(1)
        monkeypatch.setattr(Graph, "call", pressed)
        with pytest.raises(StageInterrupted):
            algorithm.run(1, staleness=1)
        algorithm.run(1, staleness=3)
        assert len(lab.buffer) == 6
        algorithm.run(3)
        folder = lab.run_folder
    with tiny_lab("again", tmp_path, backend="inline", models=MODELS) as lab:
        frame = wb.replay(folder, grpo(lab))
        assert frame["same_draws"].all() and frame["largest_difference"].tolist() == [0.0] * 5


def test_what_a_recovery_undid_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings of roles and stages are; what is not is named; an evaluation makes no difference."""
    with tiny_lab("back", tmp_path, backend="inline", models=MODELS) as lab:
        algorithm = grpo(lab)
        algorithm.run(1)
        saved = lab.save(tmp_path / "one", models=False).folder
        algorithm.clip = 0.07
        algorithm.run(1, staleness=1)
        lab.actor.training.learning_rate = 2e-3  # which holds, where the stage alone is over
        algorithm.once("update_actor", clip=0.01)
        algorithm.run(1)
        lab.recover(saved)
        algorithm.run(2)
        lab.evaluate(["1+1="])
        folder = lab.run_folder
    with tiny_lab("again", tmp_path, backend="inline", models=MODELS) as lab:
        frame = wb.replay(folder, grpo(lab))
        assert frame["same_draws"].all() and frame["largest_difference"].tolist() == [0.0] * 3
        assert not any(frame["only_there"]) and frame.attrs["left_out"] == []
        wb.RLOO(lab, prompts=2, samples=2, sampling=LONG, kl_coefficient=0.0).run(1)
        folder = lab.run_folder
    with tiny_lab("more", tmp_path, backend="inline", models=MODELS) as lab:
        other = wb.RLOO(lab, prompts=2, samples=2, sampling=LONG, kl_coefficient=0.0)
        with expect_error(BadInput, rule="GRPO ran some of its 4 iterations"):
            wb.replay(folder, other)
    with tiny_lab("first", tmp_path, backend="inline", models=MODELS) as lab:
        algorithm = grpo(lab)
        algorithm.run(1)
        lab.actor.training.learning_rate = 2e-3
        algorithm.replace("update_actor", entropy_coefficient=0.1)
        algorithm.once("update_actor", clip=0.01)
        lab.reward.compute_reward(algorithm.made["generate_sequences"])  # by hand: the iteration is over
        algorithm.run(2)
        lab.reload(reward=lambda response, **row: float(len(response)))
        algorithm.insert(same, after="compute_reward")
        while algorithm.next_stage != "update_actor":
            algorithm.step()
        algorithm.clip = 0.02
        algorithm.iterate()
        folder = lab.run_folder
    with tiny_lab("last", tmp_path, backend="inline", models=MODELS) as lab:
        frame = wb.replay(folder, grpo(lab))
        assert frame["largest_difference"].tolist()[:3] == [0.0] * 3 and frame["largest_difference"][4] > 0
        inserted = "GRPO.same=inserted after compute_reward"
        left_out = ["edited ['reward']", inserted, "GRPO.clip=0.02 in the middle of iteration 4"]
        assert (
            frame.attrs["left_out"] == left_out
            and f"not repeated exactly: {', '.join(left_out)}" in capsys.readouterr().out
        )


def test_what_each_stage_took_is_repeated_or_named(tmp_path: Path) -> None:
    with tiny_lab("turns", tmp_path, backend="inline", models=MODELS) as lab:
        algorithm, other = grpo(lab), grpo(lab)
        algorithm.run(2, staleness=1)
        saved = lab.save(tmp_path / "two", models=False).folder
        algorithm.run(1, staleness=1)
        lab.recover(saved)
        algorithm.run(2)  # nothing ahead
        lab.actor.training.take({"schedule": "cosine", "total_steps": 40})  # neither alone
        algorithm.replace("update_actor", epochs=2)
        algorithm.run(1)
        other.clip = 0.01
        other.replace("update_actor", epochs=1)
        other.run(1)
        algorithm.run(1)
        folder = lab.run_folder
    with tiny_lab("again", tmp_path, backend="inline", models=MODELS) as lab:
        frame = wb.replay(folder, grpo(lab))
        assert frame["largest_difference"].tolist() == [0.0] * 7 and frame.attrs["left_out"] == []
    with tiny_lab("named", tmp_path, backend="inline", models=MODELS) as lab:
        algorithm = grpo(lab)
        while algorithm.next_stage != "update_actor":
            algorithm.step()
        saved = lab.save(tmp_path / "in one", models=False).folder
        algorithm.iterate()
        lab.actor.training.learning_rate = 3e-3  # stays when the roles are put back
        lab.recover(saved)
        algorithm.iterate()
        algorithm.replace("update_actor", epochs=2)
        algorithm.loss = lambda log_prob, old_log_prob, advantages: -(log_prob - old_log_prob).exp() * advantages
        algorithm.run(1)
        grpo(lab).run(1)
        folder = lab.run_folder
    with tiny_lab("last", tmp_path, backend="inline", models=MODELS) as lab:
        left_out = wb.replay(folder, grpo(lab)).attrs["left_out"]
        assert left_out[0] == "lab.actor.training with {'learning_rate': 0.003} in the middle of iteration 1"
        assert left_out[1].startswith("GRPO.loss=function ")
        assert left_out[2:] == ["GRPO.update_actor without its earlier epochs"]


def test_what_adapts_what_replaced_functions_take_and_a_run_that_begins_again(tmp_path: Path) -> None:
    models = {**MODELS, "critic": TINY, "reference": TINY}

    def ppo(lab: wb.Workbench) -> wb.PPO:
        return wb.PPO(lab, prompts=2, sampling=LONG, kl_coefficient=0.1, kl_target=0.01)

    def scored(batch: wb.Batch, bonus: float = 0.0) -> wb.Batch:
        return lab.reward.compute_reward(batch)

    with tiny_lab("adapts", tmp_path, backend="inline", models=models) as lab:
        algorithm = ppo(lab)
        algorithm.run(2)
        algorithm.kl_coefficient = 0.5
        algorithm.replace("compute_reward", scored)
        algorithm.replace("compute_reward", bonus=1.0)
        algorithm.run(1)
        ppo(lab).run(1)
        folder = lab.run_folder
        changed = wb.diff(lab, folder).changes.to_numpy().tolist()
        assert changed.count(["a", 3, "PPO.kl_coefficient=0.5"]) == 1
    with tiny_lab("named", tmp_path, backend="inline", models=models) as lab:
        left_out = wb.replay(folder, ppo(lab)).attrs["left_out"]
        assert left_out[0] == "PPO.kl_coefficient=0.5" and left_out[2] == "PPO.compute_reward.bonus=1.0"
        assert left_out[1].startswith("PPO.compute_reward=") and left_out[3].startswith("another PPO, with a kl_coeff")
    with tiny_lab("begun", tmp_path, backend="inline", models=MODELS) as lab:
        saved = lab.save(tmp_path / "none", models=False).folder
        grpo(lab).run(1)
        lab.recover(saved)
        begun = grpo(lab)
        begun.clip = 0.01
        begun.run(2)
        folder = lab.run_folder
    with tiny_lab("anew", tmp_path, backend="inline", models=MODELS) as lab:
        frame = wb.replay(folder, grpo(lab))
        assert frame["largest_difference"].tolist() == [0.0, 0.0] and frame.attrs["left_out"] == []


def test_what_is_not_the_same_is_said_and_what_cannot_be_replayed_refused(recorded: Path, tmp_path: Path) -> None:
    training = {"learning_rate": 2e-3}
    with tiny_lab("other", tmp_path, backend="inline", models=MODELS, training=training) as lab:
        with expect_error(BadInput, value=r"replay of run first/.* by RLOO", rule="algorithms: GRPO"):
            wb.replay(recorded, wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0))
        with expect_error(BadInput, value="replay of run other/", rule="needs another run"):
            wb.replay(lab, grpo(lab))
        with expect_error(BadInput, value="algorithm=<Workbench other", remedy=r"wb.PPO\(lab"):
            wb.replay(recorded, lab)  # type: ignore[arg-type]
        with expect_error(NotFound, value="no run 'nowhere'"):
            wb.replay("nowhere", grpo(lab))
        frame = wb.replay(recorded, grpo(lab), iterations=2)
        assert frame.index.tolist() == [1, 2] and frame.attrs["differs"].index.tolist()
        assert frame["largest_difference"].gt(0).all() and frame["of"].str.startswith("update_actor/").any()
    with tiny_lab("rows", tmp_path, backend="inline", models=MODELS, prompts=["1+1="] * 8) as lab:
        frame = wb.replay(recorded, grpo(lab), iterations=1)
        assert not frame["same_draws"].any() and "prompts/token ids" in frame.attrs["differs"].index
    with tiny_lab("assigned", tmp_path, backend="inline", models=MODELS) as lab:
        lab.actor.training.learning_rate = 2e-3
        with expect_error(BadInput, value="after lab.actor.training.learning_rate=0.002", rule="at the beginning"):
            wb.replay(recorded, grpo(lab))
