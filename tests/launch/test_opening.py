"""Opening on the inline backend: what is refused, what a failure says, whose workbench a name is."""

from __future__ import annotations

import functools
import importlib.util
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.backends import registry
from workbench.backends.ray import RayBackend
from workbench.config import description as description_module
from workbench.config.description import Description
from workbench.data.prompts import Prompts
from workbench.engines.generation.vllm_start import PHASES
from workbench.errors import BadInput, StageError
from workbench.launch import opening
from workbench.models import load_tokenizer
from workbench.models.loading import load_causal_lm
from workbench.telemetry import span
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.critic import CriticWorker
from workbench.workers.worker import Context


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
    with expect_error(StageError, value="loading critic failed on pool shared, rank 0: OSError: the head's") as caught:
        tiny_lab("torn", tmp_path, backend="inline", models=models(critic=wb.Model(TINY, worker=BrokenCritic)))
    assert isinstance(caught.value.__cause__, OSError)
    assert wb.ls() == []
    with tiny_lab("torn", tmp_path, backend="inline"):
        assert [row["name"] for row in wb.ls()] == ["torn"]


def test_ends_of_the_template_and_of_the_tokenizer_that_differ_are_said_and_both_end_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_causal_lm(TINY).save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|unk|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    (end,) = tokenizer.encode("<|unk|>", add_special_tokens=False)
    with tiny_lab("ends", tmp_path, models={"actor": str(tmp_path / "model")}, backend="inline") as lab:
        assert "ends a turn with '<|unk|>', its tokenizer's EOS is '<|eos|>'" in capsys.readouterr().out
        for token in (end, tokenizer.eos_token_id):
            drawn = lab.actor.generate_sequences(lab.prompts.next(2), logit_bias={token: 1e4}).fetch()
            assert drawn["ending"] == ["eos"] * 2
            assert drawn["response_ids"].values.tolist() == [token] * 2
    with tiny_lab("same", tmp_path, backend="inline"):
        assert not capsys.readouterr().out


def test_a_frozen_reward_model_without_a_trained_head_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = wb.Model(TINY, training=wb.Training(engine="torch"))
    with tiny_lab("heads", tmp_path, models={"reward": trained, "cost": TINY}, backend="inline", prompts=None) as lab:
        said = capsys.readouterr().out
        assert f"the cost model {TINY} has no trained score head" in said
        assert "the reward model" not in said
        lab.reward.save_model(tmp_path / "judge")
    capsys.readouterr()
    with tiny_lab("saved", tmp_path, models={"reward": tmp_path / "judge"}, backend="inline", prompts=None):
        assert not capsys.readouterr().out


def test_prompts_that_leave_no_room_are_refused_before_anything_is_loaded_or_replaced(tmp_path: Path) -> None:
    CountedActor.built = 0
    changed = models(actor=wb.Model(TINY, worker=CountedActor))
    long = [{"prompt": "short"}, {"prompt": "much too long " * 200}]
    options: dict[str, Any] = {"backend": "inline", "models": changed}
    with tiny_lab("room", tmp_path, **options) as lab:
        settings = {"source": long, "max_prompt_tokens": 100_000}
        with expect_error(
            BadInput, value=r"row 1 has \d+ tokens", rule="max_model_tokens=192", remedy="max_prompt_tokens"
        ):
            tiny_lab("room", tmp_path, **options, prompts=settings, if_exists="replace")
        assert CountedActor.built == 1
        assert lab.prompts.next(1).rows == 1  # it lives on
    with tiny_lab("room", tmp_path, **options, prompts={**settings, "max_prompt_tokens": 150}) as lab:
        assert isinstance(lab.prompts.source, Prompts) and len(lab.prompts.source) == 1


def test_a_cluster_elsewhere_needs_to_be_told_the_device(tmp_path: Path) -> None:
    with expect_error(BadInput, value="address='10.1.2.3:6379' without device=", remedy="device='cuda'"):
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


def test_an_adapter_in_float32_is_refused_where_vllm_on_a_gpu_would_compute_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(description_module, "device_count", lambda device: 1)

    def described(dtype: str, engine: Any) -> Description:
        return Description.of(
            "one", models={"actor": wb.Model(TINY, adapter=wb.LoRA(rank=2))}, device="cuda", address=None,
            placement=None, prompts="arithmetic", training=None, generation=wb.Generation(engine=engine), devices=None,
            seed=0, dtype=dtype, backend="inline",
        )  # fmt: skip

    described("bfloat16", "vllm")
    described("float32", "transformers")
    with expect_error(BadInput, value="in float32 with Generation.engine='vllm'", remedy="leave dtype out"):
        described("float32", "vllm")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_gpt_oss_is_refused_with_vllm_without_an_adapter(tmp_path: Path) -> None:
    from transformers import AutoConfig

    shape = {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    AutoConfig.for_model("gpt_oss", **shape, num_key_value_heads=2).save_pretrained(tmp_path)
    load_tokenizer(TINY).save_pretrained(tmp_path)
    with expect_error(BadInput, value="a gpt_oss without an adapter", remedy="engine='transformers'"):
        tiny_lab("whole", tmp_path / "runs", generation="vllm", models={"actor": tmp_path}, backend="inline")


def test_more_devices_than_gpus_share_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """As slots share cores: each pool has one, and none of them communicates inside."""
    monkeypatch.setattr(description_module, "device_count", lambda device: 2)

    def described(placement: wb.Placement, devices: int | None, **given: Any) -> Description:
        return Description.of(
            "one", models=dict.fromkeys(("actor", "critic", "reference"), TINY), device="cuda", address=None,
            placement=placement, prompts="arithmetic", training=None, generation=None, devices=devices, seed=0,
            dtype=None, **{"backend": "ray", **given},
        )  # fmt: skip

    split, whole = wb.Placement.split(devices=2), wb.Placement.colocate(devices=2)
    shares = [described(split, devices).gpus for devices in (None, 2, 3, 4, 5)]
    assert shares == [1, 1, 0.5, 0.5, 0.3333]
    assert [info.gpus for info in described(split, 4).hosts(Path())] == [0.5, 0.5]
    assert described(split, 4, elsewhere=True).gpus == described(whole, 2).gpus == 1
    assert described(wb.Placement.colocate(devices=1), 4, backend="inline").gpus == 1
    with expect_error(BadInput, value="of 2 devices, each 0.5 of a GPU", rule="NCCL", remedy="one device"):
        described(whole, 4)
    with expect_error(BadInput, rule="has 2 GPU", remedy="devices=3"):
        described(wb.Placement.standalone(actor=1, critic=1, reference=1), None)
    with expect_error(BadInput, rule="has 2 GPU", remedy="^use fewer"):
        described(wb.Placement.colocate(devices=4), None)


def test_roles_take_turns_only_in_whole_gpus_where_vllm_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description_module, "device_count", lambda device: 1)

    def described(engine: Any, devices: int | None) -> Description:
        return Description.of(
            "one", models={"actor": TINY, "reference": TINY}, device="cuda", address=None, prompts="arithmetic",
            placement=wb.Placement.standalone(actor=1, reference=1) if devices else None, training=None,
            generation=wb.Generation(engine=engine), devices=devices, seed=0, dtype=None, backend="ray",
            share_memory=True,
        )  # fmt: skip

    assert described("transformers", 2).gpus == 0.5
    assert described("vllm", None).takes_turns
    with expect_error(BadInput, value="each device is 0.5 of a GPU", rule="sleeping vLLM", remedy="leave devices= out"):
        described("vllm", 2)


def test_a_judge_on_a_gpu_has_a_cache_of_a_known_size_and_others_leave_it_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would measure what is free, and raise if another process of the GPU frees memory meanwhile."""
    monkeypatch.setattr(description_module, "device_count", lambda device: 1)
    judge = wb.Judge(TINY, rubric="{response}", parse=len)

    def described(reward: Any) -> Description:
        return Description.of(
            "one", models={"actor": TINY, "critic": TINY, "reward": reward}, device="cuda", address=None, devices=2,
            placement=wb.Placement.of({"play": (1, ["actor"]), "judge": (1, ["critic", "reward"])}),
            prompts="arithmetic", training=None, generation=wb.Generation(engine="vllm", max_model_tokens=128), seed=0,
            dtype=None, backend="ray",
        )  # fmt: skip

    rooms = described(judge).rooms()
    assert rooms["reward"].cache_bytes(40 * 2**30) == rooms["actor"].useful_cache
    alone = described(vowels).rooms()
    assert "reward" not in alone
    with_judge, without = (found["critic"].pass_bytes(40 * 2**30) for found in (rooms, alone))
    assert without - with_judge == rooms["reward"].weights + rooms["reward"].useful_cache


def test_shares_fill_what_the_cluster_has() -> None:
    """Added up as floats, 3 x 0.2 is more than 0.6."""
    backend: Any = object.__new__(RayBackend)
    backend._head, has = None, {"GPU": 0.6}
    backend._ray = SimpleNamespace(cluster_resources=lambda: has, available_resources=lambda: has)
    backend.check([SimpleNamespace(gpus=0.2)] * 3)
    backend.check_free(["a", "b", "c"], 0.2)
    with expect_error(BadInput, value="a placement of 0.8 GPUs", rule="has 0.6"):
        backend.check([SimpleNamespace(gpus=0.2)] * 4)


def test_restoring_more_devices_than_gpus_shares_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_lab("saved", tmp_path, backend="inline") as lab:
        saved = lab.save(tmp_path / "checkpoint")

    @functools.wraps(opening.open)
    def asked(**given: Any) -> Any:
        raise LookupError(given["devices"])

    monkeypatch.setattr(opening, "open", asked)
    monkeypatch.setattr(opening, "device_count", lambda device: {"cuda": 2, "cpu": 16}[device])
    for placement, devices in ((wb.Placement.split(devices=4), 4), (wb.Placement.colocate(devices=1), 2)):
        for device in ("cuda", None):
            with pytest.raises(LookupError, match=f"^{devices}$"):
                wb.restore(saved, backend="ray", device=device, placement=placement)


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
        with expect_error(wb.errors.NameTaken, rule=r"another description: models\['reward'\] would differ"):
            tiny_lab("same", tmp_path, backend="inline", models=models(reward=Weighted(2.0)))
        changed: dict[str, Any] = {"training": {"minibatches": 4}, "seed": 7}
        with expect_error(wb.errors.NameTaken, rule="description: (seed, training|training, seed) would differ"):
            tiny_lab("same", tmp_path, backend="inline", models=models(reward=Weighted(1.0)), **changed)
        assert replace(lab.description, id="another").digest == lab.description.digest


def test_where_the_seconds_of_opening_went(tmp_path: Path) -> None:
    begun = time.time()
    with tiny_lab("spans", tmp_path, backend="inline") as lab:
        took_s = time.time() - begun
        spans = lab.spans()
        assert set(spans["stage"]) == {"open"}
        assert set(zip(spans["pool"], spans["rank"], spans["device"], strict=True)) == {("shared", 0, "cpu:0")}
        assert {"check", "build", "read", "join"} <= set(spans["kind"])
        assert set(spans[spans["kind"] == "build"]["role"]) == {"actor", "critic", "reference", "reward", "numeric"}
        outer, inner = spans[spans["parent"] == ""], spans[spans["parent"] != ""]
        assert begun <= spans["start_s"].min() + 1e-3
        named_s = outer["duration_s"].sum()  # one after the other, and little between them
        assert named_s <= took_s + 0.01
        starts, ends = outer["start_s"].sort_values().to_numpy(), outer["end_s"].sort_values().to_numpy()
        assert (starts[1:] >= ends[:-1] - 1e-3).all()
        for _, child in inner.iterrows():
            around = outer[(outer["kind"] == child["parent"]) & (outer["role"] == child["role"])]
            assert ((around["start_s"] <= child["start_s"]) & (child["end_s"] <= around["end_s"])).any()
        opening = lab.opening()
        assert opening["start_s"].iloc[0] == 0
        assert opening[opening["kind"] == "check"]["note"].to_list() == ["this process"]
        assert "reading tiny-llama-tied" in lab.timeline().svg
        lab.prompts.next(1)
        assert "reading tiny-llama-tied" in lab.timeline().svg  # nothing has run in the iteration that began
        assert lab.timeline().span_count == len(spans)
        lab.actor.generate_sequences(lab.prompts.next(1), max_new_tokens=2)
        assert len(lab.opening()) == len(opening)  # stages are no part of it


# vLLM imports parts of torch that use torch's own deprecated decorators
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_where_the_seconds_of_starting_vllm_went(tmp_path: Path) -> None:
    models = {"actor": TINY, "reward": vowels}
    with tiny_lab("vllm", tmp_path, backend="inline", models=models, engine="deepspeed", generation="vllm") as lab:
        spans = lab.spans()
        inside = spans[(spans["role"] == "actor") & (spans["parent"] != "")]
        (vllm,) = inside[inside["kind"] == "start"].itertuples()
        assert vllm.note == "starting vLLM"
        assert vllm.parent == "build"
        assert {(s.kind, s.note) for s in inside.itertuples() if s.parent == "start"} == {
            ("import", "importing vLLM"), *PHASES.values()
        }  # fmt: skip
        assert "importing DeepSpeed" in set(inside["note"])


def test_what_is_waited_for_is_named(tmp_path: Path) -> None:
    said: list[str] = []

    class Watched(CriticWorker):
        def __init__(self, *args: Any) -> None:
            context: Context = args[1]
            host = context.progress.__self__  # type: ignore[attr-defined]
            with span("read", note="reading something long"):
                said.append(host.status()[0])
            said.append(host.status()[0])
            super().__init__(*args)

    with tiny_lab("named", tmp_path, backend="inline", models=models(critic=wb.Model(TINY, worker=Watched))):
        assert said == ["loading critic: reading something long", "loading critic"]
