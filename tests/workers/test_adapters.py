"""An actor with an adapter in an inline workbench: it is its own reference, and generates from what it has learnt."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, hosts_of, stored, tiny_lab, vowels
from tests.expected import expect_error
from tests.tolerances import rounding
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, MissingDependency, StageError
from workbench.models.loading import load_causal_lm

pytest.importorskip("peft")
LORA = wb.LoRA(rank=4, alpha=16)


def lab_of(name: str, runs: Path, lora: wb.LoRA | None = LORA, **options: Any) -> wb.Workbench:
    models = {"actor": wb.Model(TINY, adapter=lora), "critic": TINY, "reward": vowels, **options.pop("models", {})}
    return tiny_lab(name, runs, backend="inline", models=models, **options)


def spread(prompt: str, response: str, **row: Any) -> float:
    """A reward that differs between any two responses."""
    return sum(map(ord, response)) % 7


def rolled_out(lab: wb.Workbench, rows: int = 8, samples: int = 1) -> wb.Batch:
    batch = lab.actor.generate_sequences(lab.prompts.next(rows), samples=samples, max_new_tokens=12, seed=1)
    batch = lab.reference.compute_ref_log_prob(lab.actor.compute_log_prob(batch))
    assert isinstance(batch, wb.Batch)
    return batch


def worker_of(lab: wb.Workbench, role: str = "actor") -> Any:
    return next(host.workers[role] for host in hosts_of(lab).values() if role in host.workers)


def tokens(batch: wb.Batch, *names: str) -> list[torch.Tensor]:
    found = []
    for column in batch.fetch(list(names)).values():
        assert isinstance(column, Ragged)
        found.append(column.values)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def lab(runs: Path) -> Iterator[wb.Workbench]:
    with lab_of("adapted", runs) as lab:
        yield lab


@pytest.mark.parametrize(
    ("engine", "zero_stage", "dtype"),
    [
        ("torch", 0, "bfloat16"),
        ("deepspeed", 3, "float32"),
        pytest.param("torch", 0, "float32", marks=pytest.mark.thorough),
        pytest.param("deepspeed", 1, "bfloat16", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_the_actor_starts_as_its_reference_and_leaves_it(runs: Path, engine: str, zero_stage: int, dtype: str) -> None:
    training = {"zero_stage": zero_stage, "learning_rate": 3e-3}
    name = f"start_{engine}{zero_stage}_{dtype}"
    with lab_of(name, runs, engine=engine, training=training, dtype=dtype) as lab:
        batch = rolled_out(lab)
        old, reference = tokens(batch, "old_log_prob", "ref_log_prob")
        assert torch.equal(old, reference)
        scored = lab.reward.compute_reward(lab.critic.compute_values(batch))
        scored = lab.compute_advantages(scored, kl_coefficient=0.1)
        assert lab.last_metrics["compute_advantages"]["reference_kl"] == 0
        metrics = lab.actor.update_actor(scored, kl_coefficient=0.1, kl="k3", epochs=2)
        assert metrics["first_minibatch/ratio/max_deviation"] == 0
        assert metrics["first_minibatch/kl_loss"] == 0
        assert metrics["kl_loss"] > 0
        # the same rows again: the reference has not moved, to the last bit
        again = lab.reference.compute_ref_log_prob(lab.actor.compute_log_prob(batch))
        moved, still = tokens(again, "old_log_prob", "ref_log_prob")
        assert torch.equal(still, reference)
        assert (moved - still).abs().mean() > 1e-3
        # what is sampled next comes from the merged weights
        fresh = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=12))
        assert lab.last_metrics["generate_sequences"]["sync_gap/mean"] < (1e-5 if dtype == "float32" else 0.05)
        assert lab.last_metrics["compute_log_prob"]["rollout_gap/mean"] < (1e-4 if dtype == "float32" else 0.05)
        assert fresh.rows == 4


def adapter_bytes(rank: int, itemsize: int) -> int:
    """Of A [rank, in] and B [out, rank] beside each linear layer below the head."""
    model = load_causal_lm(TINY)
    layers = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    return itemsize * rank * sum(layer.in_features + layer.out_features for layer in layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("dtype", "rate"), [("float32", 1e-2), pytest.param("bfloat16", 1e-5, marks=pytest.mark.thorough)]
)
def test_vllm_holds_the_adapter_beside_the_model(
    runs: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, rate: float
) -> None:
    """Also a step far below the last place of the weights arrives, bit for bit; only A and B are sent."""
    pytest.importorskip("vllm")
    from workbench.engines.generation import vllm_engine

    lora, training = wb.LoRA(rank=4, alpha=12), {"learning_rate": rate, "minibatches": 1}
    with lab_of(f"vllm_{dtype}", runs, lora, generation="vllm", training=training, dtype=dtype) as lab:
        batch = lab.put(stored())
        sampling: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}
        first = lab.actor.generate_sequences(lab.prompts.next(2), **sampling)
        before = lab.actor.check_sync()[0]
        lab.actor.update_actor(batch)
        stale = lab.actor.check_sync()[0]
        (synced,) = lab.actor.sync_weights()
        assert lab.syncs()["taken_bytes"].iloc[-1] == adapter_bytes(4, 4 if dtype == "float32" else 2)
        assert synced["sync_gap/mean"] < (1e-4 if dtype == "float32" else 0.05)
        if dtype == "float32":
            assert before < 1e-4 < 0.01 < stale
        (found,) = lab.actor.compare_weights()
        assert (found.read, found.differ, found.moved_differ) == (2 * 14, (), ())
        assert found.moved_gap < (1e-4 if dtype == "float32" else 0.05)
        drawn = lab.actor.compute_log_prob(
            lab.actor.generate_sequences(first.select("prompt_ids", "prompt_uid"), **sampling)
        )
        assert lab.last_metrics["compute_log_prob"]["rollout_gap/mean"] < (1e-4 if dtype == "float32" else 0.05)
        now, then = tokens(drawn, "rollout_log_prob")[0], tokens(first, "rollout_log_prob")[0]
        assert dtype == "bfloat16" or not torch.equal(now, then)
        # an adapter that does not arrive whole is seen, however small it is
        give = vllm_engine.give_adapter

        def rounded(runner: Any, tensors: dict[str, torch.Tensor], *rest: Any) -> Any:
            name = next(name for name in tensors if name.endswith("q_proj.lora_B.weight"))
            return give(runner, {**tensors, name: torch.zeros_like(tensors[name])}, *rest)

        monkeypatch.setattr(vllm_engine, "give_adapter", rounded)
        lab.actor.update_actor(batch)
        with expect_error(StageError, remedy=r"q_proj\.lora_B\.weight did not arrive"):
            lab.actor.sync_weights()
        monkeypatch.setattr(vllm_engine, "give_adapter", give)
        assert lab.actor.sync_weights()[0]["sync_gap/mean"] < 0.05


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_an_engine_beside_zero_3_holds_the_adapter(runs: Path) -> None:
    """ZeRO-3 shards the model, so that the engine has a copy; a step far below its last place arrives."""
    training = {"zero_stage": 3, "learning_rate": 1e-5, "minibatches": 1}
    with lab_of("copied", runs, engine="deepspeed", training=training, dtype="bfloat16") as lab:
        lab.actor.update_actor(lab.put(stored()))
        assert lab.actor.sync_weights()[0]["sync_gap/mean"] < 0.02
        assert lab.syncs()["taken_bytes"].iloc[-1] == adapter_bytes(4, 2)
        (found,) = lab.actor.compare_weights()
        assert (found.read, found.differ, found.moved_differ) == (2 * 14, (), ())
        shown, estimated = (f.set_index("role")["generation_weights_bytes"] for f in
                            (lab.topology(), lab.estimate().frame()))  # fmt: skip
        assert shown["actor"] == estimated["actor"]
        assert worker_of(lab).generator.sleep() == shown["actor"]  # as where roles share a GPU
        lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4))
        assert lab.last_metrics["compute_log_prob"]["rollout_gap/mean"] < 0.05


def test_a_declared_reference_is_given_the_sum(runs: Path) -> None:
    with lab_of("refreshed", runs, models={"reference": TINY}, training={"learning_rate": 1e-2}) as lab:
        lab.actor.update_actor(lab.put(stored()))
        batch = rolled_out(lab)
        policy, before = tokens(batch, "old_log_prob", "ref_log_prob")
        lab.refresh_reference()
        (after,) = tokens(lab.reference.compute_ref_log_prob(batch), "ref_log_prob")
        assert (policy - after).abs().max() < 1e-4 < (policy - before).abs().mean()


def test_algorithms_need_no_other_reference(lab: wb.Workbench) -> None:
    for algorithm in (wb.PPO(lab, prompts=4), wb.GRPO(lab, prompts=4, samples=2, kl_coefficient=0.1)):
        metrics = algorithm.run(1)
        assert {"compute_ref_log_prob/ref_log_prob/mean"} <= set(metrics.columns)
    graph = wb.PPO(lab).graph()
    assert graph["compute_ref_log_prob"].role == "reference"
    arms = lab.compare(rolled_out(lab, 4, 2), {"ppo": wb.PPO(lab), "grpo": wb.GRPO(lab, kl_coefficient=0.1)})
    assert arms["ppo"].metrics["update_actor/grad_norm"] > 0


def test_the_store_knows_that_the_reference_stays(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    batch = rolled_out(lab)
    scored = lab.compute_advantages(lab.reward.compute_reward(lab.critic.compute_values(batch)))
    lab.actor.update_actor(scored)
    with lab.reuse():
        lab.reference.compute_ref_log_prob(batch)
        assert "reference.compute_ref_log_prob: from the store" in capsys.readouterr().err
        lab.actor.compute_log_prob(batch)
        assert "from the store" not in capsys.readouterr().err


def test_it_is_shown_whose_bytes_they_are(lab: wb.Workbench, runs: Path) -> None:
    wb.PPO(lab, prompts=4).run(1)  # an optimizer holds nothing before its first step
    shown: Any = lab.topology().set_index("role")
    assert shown.loc["actor", "model"] == f"{TINY} + LoRA(rank=4, alpha=16)"
    assert shown.loc["reference", "model"] == f"{TINY}, the actor without its adapter"
    held = [c for c in shown.columns if c.endswith("_bytes") and not c.startswith("host_")]
    assert shown.loc["reference", held].eq(0).all()
    assert shown.loc["reference", "process"] == shown.loc["actor", "process"]
    assert 0 < shown.loc["actor", "optimizer_bytes"] < shown.loc["critic", "optimizer_bytes"] / 5
    assert repr(lab.reference) == f"<reference: {TINY}, the actor without its adapter on pool shared, 1 rank(s)>"
    assert "without its adapter" in lab._repr_html_()
    assert repr(lab).endswith("critic, reward; reference: the actor>")
    with lab_of("declared", runs, models={"reference": TINY}) as own:
        assert repr(own.reference) == f"<reference: {TINY} on pool shared, 1 rank(s)>"
        own_shown: Any = own.topology().set_index("role")
        assert own_shown.loc["reference", "parameters_bytes"] > 0


def test_what_is_saved_loads_elsewhere(lab: wb.Workbench, runs: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    wb.PPO(lab, prompts=4).run(1)
    (adapter,), (whole,) = lab.actor.save_adapter(runs / "adapter"), lab.actor.save_model(runs / "whole")
    assert json.loads((Path(adapter) / "adapter_config.json").read_text())["r"] == 4
    batch = rolled_out(lab)
    merged = peft.PeftModel.from_pretrained(load_causal_lm(TINY), adapter).merge_and_unload()
    saved = load_causal_lm(whole)
    for name, weight in saved.named_parameters():
        torch.testing.assert_close(weight, merged.get_parameter(name), rtol=1e-6, atol=1e-6)
    with lab_of("saved", runs, None, models={"actor": whole, "reference": TINY}) as other:
        stored = other.put(batch.fetch(), meta=dict(batch.meta))
        again = other.reference.compute_ref_log_prob(other.actor.compute_log_prob(stored))
        for name in ("old_log_prob", "ref_log_prob"):
            torch.testing.assert_close(tokens(again, name)[0], tokens(batch, name)[0], rtol=1e-5, atol=1e-5)
    with expect_error(BadInput, value="is not empty"):
        lab.actor.save_adapter(runs / "adapter")


def test_dpo_starts_at_log_2_in_bfloat16(runs: Path) -> None:
    """A reference that is the actor itself rounds as the actor does."""
    rows = [{"prompt": f"Question {i}?", "chosen": "yes, gladly", "rejected": f"no {i}"} for i in range(8)]
    with lab_of("dpo", runs, dtype="bfloat16", training={"minibatches": 1}) as lab:
        batch = lab.reference.compute_ref_pair_log_prob(lab.pairs(rows).next(8))
        assert lab.actor.update_dpo(batch)["loss"] == pytest.approx(math.log(2), abs=rounding(4))
        assert lab.actor.update_dpo(batch)["loss"] < 0.69


def test_what_cannot_be_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with expect_error(BadInput, value=r"models\['critic'\] with an adapter", rule="only the actor"):
        lab_of("critic", runs, models={"critic": wb.Model(TINY, adapter=LORA)})
    with expect_error(BadInput, value="adapter=16", rule=r"wb\.LoRA"):
        wb.Model(TINY, adapter=16)  # type: ignore[arg-type]
    with expect_error(BadInput, value="loading actor.*'query'", rule="q_proj"):
        lab_of("targets", runs, wb.LoRA(targets=("query",)))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    with expect_error(MissingDependency, value="peft is not installed", remedy=r"pip install -e '.\[lora\]'"):
        lab_of("missing", runs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_an_adapter_that_vllm_cannot_hold_is_refused(runs: Path) -> None:
    pytest.importorskip("vllm")
    with expect_error(BadInput, value="rank=1024", rule="LlamaForCausalLM", remedy="engine='transformers'"):
        lab_of("wide", runs, wb.LoRA(rank=1024), generation="vllm")


def test_an_actor_without_an_adapter_is_no_reference(runs: Path) -> None:
    with lab_of("plain", runs, None) as lab:
        with pytest.raises(AttributeError, match="no reference"):
            lab.reference  # noqa: B018
        with expect_error(BadInput, value="without reference"):
            wb.PPO(lab)
        batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
        with expect_error(BadInput, value="actor.compute_ref_log_prob", remedy="declare a reference"):
            lab.actor.compute_ref_log_prob(batch)
        with expect_error(BadInput, remedy="use save_model"):
            lab.actor.save_adapter(runs / "none")
