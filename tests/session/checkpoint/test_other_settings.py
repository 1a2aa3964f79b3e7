"""A checkpoint that is restored with other defaults: they hold for every role that had not set its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from tests.cases import TINY
from tests.expected import expect_error
from workbench.errors import BadInput

OWN = wb.Training(engine="torch", learning_rate=2e-4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an actor that follows the defaults, a critic with settings of its own, and a reward model that is run."""
    folder = tmp_path_factory.mktemp("saved")
    generation = wb.Generation(engine="transformers", max_model_tokens=64)
    models = {"actor": TINY, "critic": wb.Model(TINY, training=OWN), "reward": TINY}
    with wb.open(
        "settings", models=models, backend="inline", runs=folder, prompts=["a", "b"], generation=generation,
        training=wb.Training(engine="torch"),
    ) as lab:  # fmt: skip
        lab.actor.training.learning_rate = 3e-5
        lab.save(folder / "checkpoint", models=False)
    return folder / "checkpoint"


def test_without_changes_all_is_as_it_was(saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with wb.restore(saved, runs=tmp_path) as lab:
        models = lab.description.models
        assert [models[role].trained for role in ("actor", "critic", "reward")] == [True, True, False]
        assert lab.actor.training.learning_rate == 3e-5 and models["critic"].training == OWN
    assert "settings that differ" not in capfd.readouterr().out


def test_new_defaults_hold_for_roles_that_follow_them(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    generation = wb.Generation(engine="transformers", max_model_tokens=32)
    training = wb.Training(engine="torch", learning_rate=5e-4)
    with wb.restore(saved, runs=tmp_path, training=training, generation=generation, dtype="bfloat16") as lab:
        models = lab.description.models
        assert lab.actor.training.learning_rate == 5e-4  # newer than the value that was assigned
        assert lab.actor.training.max_grad_norm == training.max_grad_norm
        assert models["critic"].training == OWN and models["critic"].dtype == "bfloat16"
        assert models["actor"].generation == generation and not models["reward"].trained
        assert lab.description.defaults["training"] == training
        # the engine has it, not the description alone
        batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4, seed=0)
        assert batch.fetch(["response_ids"])["response_ids"].lengths.max() <= 4
    said = capfd.readouterr().out
    assert "actor/training/learning_rate = 0.0005 (was 3e-05)" in said and "critic/dtype = bfloat16" in said
    assert "critic/training" not in said and "reward/training" not in said


def test_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    with expect_error(BadInput, value="role 'actor'", remedy="declare the model that was saved"):
        wb.restore(saved, runs=tmp_path, models={"actor": "tiny-qwen2", "critic": TINY, "reward": TINY})
