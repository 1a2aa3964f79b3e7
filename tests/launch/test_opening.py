"""Opening on the inline backend: what is refused, what a failure says, whose workbench a name is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.backends import registry
from workbench.config.description import Description
from workbench.errors import BadInput, StageError
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.critic import CriticWorker


class BrokenCritic(CriticWorker):
    def __init__(self, *args: Any) -> None:
        raise OSError("the head's file is torn")


class CountedActor(ActorWorker):
    built = 0

    def __init__(self, *args: Any) -> None:
        type(self).built += 1
        super().__init__(*args)


def models(**changed: Any) -> dict[str, Any]:
    return {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels, **changed}


def test_a_role_that_does_not_load_is_named_and_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="loading critic failed on pool shared, rank 0: OSError: the head's") as caught:
        tiny_lab("torn", tmp_path, backend="inline", models=models(critic=wb.Model(TINY, worker=BrokenCritic)))
    assert isinstance(caught.value.__cause__, OSError)
    assert wb.ls() == []
    with tiny_lab("torn", tmp_path, backend="inline"):
        assert [row["name"] for row in wb.ls()] == ["torn"]


def test_prompts_that_leave_no_room_are_refused_before_anything_is_loaded_or_replaced(tmp_path: Path) -> None:
    CountedActor.built = 0
    changed = models(actor=wb.Model(TINY, worker=CountedActor))
    long = [{"prompt": "short"}, {"prompt": "much too long " * 200}]
    options: dict[str, Any] = {"backend": "inline", "models": changed}
    with tiny_lab("room", tmp_path, **options) as lab:
        settings = {"source": long, "max_prompt_tokens": 100_000}
        with pytest.raises(BadInput, match=r"row 1 has \d+ tokens.*max_model_tokens=192.*max_prompt_tokens"):
            tiny_lab("room", tmp_path, **options, prompts=settings, if_exists="replace")
        assert CountedActor.built == 1
        assert lab.prompts.next(1).rows == 1  # it lives on
    with tiny_lab("room", tmp_path, **options, prompts={**settings, "max_prompt_tokens": 150}) as lab:
        assert len(lab.prompts.source or []) == 1


def test_a_cluster_elsewhere_needs_to_be_told_the_device(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"address='10.1.2.3:6379' without device=.*device='cuda'"):
        tiny_lab("far", tmp_path, address="10.1.2.3:6379")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_the_device_decides_the_dtype(device: str, dtype: str) -> None:
    """And the description says which, as what is saved or attached goes by that."""

    def described(**given: Any) -> Description:
        return Description.of(
            "far", models={"actor": wb.Model(TINY), "reference": wb.Model(TINY, dtype="float32")}, device=device,
            address="10.1.2.3:6379", backend="ray", placement=None, prompts="arithmetic", training=None,
            generation=None, devices=None, seed=0, **given,
        )  # fmt: skip

    description = described(dtype=None)
    assert description.defaults["dtype"] == description.models["actor"].dtype == dtype
    assert description.models["reference"].dtype == "float32"
    assert description.digest == described(dtype=dtype).digest
    assert described(dtype="float32").models["actor"].dtype == "float32"


def test_closing_removes_only_its_own_name(tmp_path: Path) -> None:
    first = tiny_lab("name", tmp_path, backend="inline")
    second = tiny_lab("name", tmp_path, backend="inline", if_exists="replace", seed=1)
    assert first.description.id != second.description.id
    first.close()
    assert registry.opened["name"] is second
    assert second.prompts.next(1).rows == 1
    second.close()
    assert wb.ls() == []


def test_equal_descriptions_attach_and_others_do_not(tmp_path: Path) -> None:
    class Weighted:
        def __init__(self, weight: float) -> None:
            self.weight = weight

        def __call__(self, prompt: str, response: str, **row: Any) -> float:
            return self.weight

    with tiny_lab("same", tmp_path, backend="inline", models=models(reward=Weighted(1.0))) as lab:
        assert tiny_lab("same", tmp_path, backend="inline", models=models(reward=Weighted(1.0))) is lab
        with pytest.raises(wb.errors.NameTaken, match=r"another description: models\['reward'\] would differ"):
            tiny_lab("same", tmp_path, backend="inline", models=models(reward=Weighted(2.0)))
        changed: dict[str, Any] = {"training": {"minibatches": 4}, "seed": 7}
        with pytest.raises(wb.errors.NameTaken, match=r"description: (seed, training|training, seed) would differ"):
            tiny_lab("same", tmp_path, backend="inline", models=models(reward=Weighted(1.0)), **changed)
        assert replace(lab.description, id="another").digest == lab.description.digest
