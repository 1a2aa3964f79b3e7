"""Rollout workers beside an actor of another pool, all in this process: versions, errors, what asks the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import workbench as wb
from tests.cases import TINY, hosts_of, stored, tiny_lab, vowels
from tests.expected import expect_error
from tests.light import Together
from workbench.backends.starting import begin_loading, settle
from workbench.batches.columns import Ragged
from workbench.config.description import Description
from workbench.controller import Workbench
from workbench.errors import BadInput, NotFound, StageError, SyncError
from workbench.resharding.patches import Patch
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.weight_transition import PatchDecision

POOLS: dict[str, Any] = {"train": (1, ["actor", "reference", "reward"]), "rollout": (1, ["rollout"])}
MODELS: dict[str, Any] = {"actor": TINY, "reference": TINY, "reward": vowels}
TRAINING = wb.Training(engine="torch", learning_rate=1e-2, minibatches=2, micro_batch_tokens=256)


def described(models: dict[str, Any], pools: dict[str, Any], **options: Any) -> Description:
    placement = wb.Placement.of(pools)
    given: dict[str, Any] = {
        "training": TRAINING, "generation": wb.Generation(engine="transformers", max_model_tokens=192),
        "prompts": "arithmetic/test", "dtype": "float32", "seed": 0, "address": None, "device": "cpu", "backend": "ray",
    }  # fmt: skip
    return Description.of(
        "apart", models=models, placement=placement, devices=placement.devices, **{**given, **options}
    )


@contextmanager
def apart(runs: Path, models: dict[str, Any], **options: Any) -> Iterator[Any]:
    """A workbench of two pools of one rank each, whose hosts are in this process."""
    threads, grouped = torch.get_num_threads(), dist.is_initialized()
    lab = Workbench(replace(described(models, POOLS, **options), backend="inline"), runs)
    lab.hosts.backend = Together()
    lab.hosts.backend.start(lab.hosts.infos)
    settle(lab.hosts.backend, begin_loading(lab.hosts.backend, lab.hosts.infos, lab.description, print), print)
    torch.set_num_threads(threads)
    try:
        with lab:
            yield lab
    finally:
        if dist.is_initialized() and not grouped:  # vLLM's
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def lab(runs: Path) -> Iterator[Any]:
    with apart(runs, MODELS) as lab:
        yield lab


def worker(lab: Any, role: str) -> Any:
    return next(host.workers[role] for host in hosts_of(lab).values() if role in host.workers)


def published(lab: Any) -> int:
    return int(lab.topology()["host_published_bytes"].max())


def train(lab: Any, batch: wb.Batch) -> None:
    batch = lab.reward.compute_reward(lab.actor.compute_log_prob(batch))
    lab.actor.update_actor(lab.compute_advantages(batch, estimator="rloo"))


def responses(batch: wb.Batch) -> list[list[int]]:
    column = batch.fetch(["response_ids"])["response_ids"]
    assert isinstance(column, Ragged)
    return [row.tolist() for row in column.rows()]


def drawn(lab: Any) -> list[list[list[int]]]:
    """The responses of three iterations, each after an update of the one before."""
    found = []
    for iteration in range(3):
        batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=10, temperature=0.9)
        assert batch.meta["weights_version"] == lab.weights["actor"].steps == 2 * iteration
        greedy = lab.actor.generate_sequences(batch.select("prompt_ids", "prompt_uid"), temperature=0, max_new_tokens=6)
        lab.actor.compute_log_prob(greedy)
        assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4
        found += [responses(batch), responses(greedy)]
        train(lab, batch)
    return found


def test_the_responses_are_those_of_an_actor_that_generates_itself(runs: Path) -> None:
    """Equal seeds and weights: also after updates, and with an algorithm's own lines."""
    options: dict[str, Any] = {"training": {"learning_rate": 1e-2}, "models": MODELS}
    with tiny_lab("together", runs, backend="inline", **options) as together, apart(runs, MODELS) as lab:
        expected = drawn(together)
        assert drawn(lab) == expected
        assert len({str(one) for one in expected}) == len(expected)
        assert lab.last_metrics["generate_sequences"]  # reported as ever
        both = [
            wb.GRPO(one, prompts=2, samples=2, sampling=wb.Sampling(max_new_tokens=6)).run(2) for one in (together, lab)
        ]
        mine, theirs = (frame["update_actor/grad_norm"].tolist() for frame in both)
        assert theirs == pytest.approx(mine, rel=1e-4)
        assert published(lab) == 0


def test_rollout_workers_of_their_own_take_the_weights_as_they_are(lab: Any) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=8)
    version = lab.weights["actor"].steps
    train(lab, batch)
    stale = lab.rollout.generate_sequences(lab.prompts.next(4), max_new_tokens=8)
    assert (stale.meta["weights_version"], lab.weights["actor"].steps) == (version, version + 2)
    assert lab.actor.check_sync()[0] > 1e-3  # shows it, and mends nothing
    (synced,) = lab.actor.sync_weights()
    assert synced["sync_gap/mean"] < 1e-5
    assert (
        synced["sync/received_bytes"]
        == lab.traffic("weights").minimum_bytes / lab.transfers("weights")["run"].nunique()
    )
    assert lab.rollout.sync_weights() == [{}]
    assert lab.weights["rollout"] == lab.weights["actor"]
    assert (
        lab.rollout.generate_sequences(stale.select("prompt_ids", "prompt_uid")).meta["weights_version"] == version + 2
    )
    assert lab.actor.check_sync()[0] < 1e-5
    before = len(lab.transfers("weights"))
    lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
    assert len(lab.transfers("weights")) == before  # nothing to send
    with expect_error(BadInput, value="strategy='v'.*with rollout workers", remedy=r"call sync_weights\(\)"):
        lab.actor.sync_weights(strategy="v")


def test_calls_ahead_of_an_update_are_of_its_version(lab: Any) -> None:
    """Submitted lines are carried out as the same lines one by one would be."""
    first = lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=8)
    version = first.meta["weights_version"]
    with lab.overlap():
        ahead = lab.rollout.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
        train(lab, first)
        after = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
        again = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
        train(lab, lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=4))
        last = lab.actor.generate_sequences.submit(lab.prompts.next(4), max_new_tokens=4)
    versions = [batch.meta["weights_version"] for batch in (ahead, after, again, last.result())]
    assert versions == [version, version + 2, version + 2, version + 4]
    assert published(lab) == 0


def test_what_goes_back_is_sent_again(lab: Any) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=8, seed=3)
    digests = lab.actor.weight_digests()
    with lab.kept("actor"):
        train(lab, batch)
        lab.actor.sync_weights()
    assert lab.weights["rollout"] != lab.weights["actor"]
    again = lab.actor.generate_sequences(batch.select("prompt_ids", "prompt_uid"), max_new_tokens=8, seed=3)
    assert again.meta["weights_version"] == batch.meta["weights_version"]
    assert responses(again) == responses(batch)
    assert lab.actor.weight_digests() == digests
    with lab.reuse():
        kept = lab.actor.generate_sequences(batch.select("prompt_ids", "prompt_uid"), max_new_tokens=8, seed=3)
        train(lab, batch)
        new = lab.actor.generate_sequences(batch.select("prompt_ids", "prompt_uid"), max_new_tokens=8, seed=3)
    assert responses(kept) == responses(again) != responses(new)
    arms = lab.compare(batch, {"a": wb.GRPO(lab, prompts=4, samples=2), "b": wb.RLOO(lab, prompts=4, samples=2)})
    assert all(arm.metrics["update_actor/grad_norm"] >= 0 for arm in arms.arms)


def test_what_looks_at_the_engine_looks_at_theirs(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        def step(self, response: str) -> tuple[str, float, bool]:
            return "ab", 1.0, False

    talk = lab.actor.generate_sequences(lab.prompts.next(2), environment=Counting, max_turns=2, max_new_tokens=12)
    assert talk.fetch(["turns"])["turns"].max() > 0
    assert lab.evaluate("arithmetic/test", n=2, samples=1)["samples"].tolist() == [1]
    lab.refresh_reference()
    assert lab.reference.weight_digests() == lab.actor.weight_digests()
    report = lab.check()
    report.raise_if_failed()
    assert report["weights"].verdict == "ok"
    assert "21 weights compared" in report["weights"].about
    topology = lab.topology().set_index("role")
    assert topology.loc["rollout", "generation_weights_bytes"] > 0 == topology.loc["actor", "generation_weights_bytes"]
    estimated = lab.estimate().frame().set_index("role")["generation_weights_bytes"]
    assert (estimated == topology["generation_weights_bytes"].reindex(estimated.index)).all()
    assert wb.GRPO(lab).graph()["generate_sequences"].role == "rollout"
    # a weight that is not what it was on the way
    exchange = worker(lab, "actor").context.exchange
    served = exchange.served

    def corrupted(*asked: Any) -> Any:
        wire, sums = served(*asked)
        return [part if isinstance(part, Patch) else (part[0], -part[1]) for part in wire], sums

    train(lab, lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=4))
    monkeypatch.setattr(exchange, "served", corrupted)
    with expect_error(SyncError, value="did not arrive as it was sent: .*from rank 0 of the actor, on rank 0"):
        lab.actor.generate_sequences(lab.prompts.next(4))
    monkeypatch.undo()
    assert lab.syncs().iloc[-1]["verdict"] == "checksum differs"
    assert lab.check("weights", "rollout")["weights"].verdict == "ok"  # synced anew


def test_a_sync_that_fails_leaves_the_actor_alone_and_is_mended(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(lab, lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=4))
    exchange = worker(lab, "actor").context.exchange
    served, asked = exchange.served, []

    def fails_halfway(key: str, *wanted: Any) -> Any:
        asked.append(wanted)
        if len(asked) > 2:
            exchange.release([key])
        return served(key, *wanted)

    monkeypatch.setattr(exchange, "served", fails_halfway)
    with expect_error((NotFound, StageError), value="rollout.receive_weights failed on rank 0", rule="were released"):
        lab.actor.generate_sequences(lab.prompts.next(4))
    monkeypatch.undo()
    with expect_error(SyncError, value="no complete set of weights", remedy=r"lab.actor.sync_weights\(\)"):
        lab.rollout.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
    assert published(lab) == 0
    batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=4)
    assert batch.meta["weights_version"] == lab.weights["actor"].steps
    train(lab, batch)


def test_an_adapter_arrives_beside_the_model(runs: Path) -> None:
    pytest.importorskip("peft")
    with apart(runs, {"actor": wb.Model(TINY, adapter=wb.LoRA(rank=4)), "reward": vowels}) as lab:
        for _ in range(2):
            batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=6)
            lab.actor.compute_log_prob(lab.reference.compute_ref_log_prob(batch))
            assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4
            train(lab, batch)
        assert lab.actor.check_sync()[0] > 1e-4


def change(adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """B A of each layer."""
    held = {name: weight.detach().float() for name, weight in adapter.items()}
    return {name: held[name.replace("lora_A", "lora_B")] @ held[name] for name in held if "lora_A" in name}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_small_step_of_an_adapter_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """In bfloat16, where a thirtieth of it would be left in the sum; A and B alone travel."""
    pytest.importorskip("peft")
    pytest.importorskip(engine)
    lora, training = wb.LoRA(rank=4, alpha=12), wb.Training(engine="torch", learning_rate=1e-5, minibatches=1)
    settings: dict[str, Any] = {"engine": engine, "max_model_tokens": 192, "kv_cache_gib": 0.05}
    models = {"actor": wb.Model(TINY, adapter=lora), "reward": vowels}
    with apart(tmp_path, models, training=training, generation=wb.Generation(**settings), dtype="bfloat16") as lab:
        generator, trainer = worker(lab, "rollout").generator, worker(lab, "actor").engine
        lab.actor.update_actor(lab.put(stored()))
        (synced,) = lab.actor.sync_weights()
        assert synced["sync_gap/mean"] < 0.02
        n = lab.transfers("weights")["moved_bytes"].sum()
        assert (
            n
            == synced["sync/received_bytes"]
            == lab.syncs().iloc[-1]["taken_bytes"]
            == sum(2 * w.numel() for _, w in trainer.named_adapter())
        )
        assert lab.traffic("weights").minimum_bytes == n
        trained, held = change(dict(trainer.scaled_adapter())), change(generator.readable_weights())
        left, whole = (sum(float((d[name] * trained[name]).sum()) for name in trained) for d in (held, trained))
        assert left / whole == pytest.approx(1, abs=0.01)
        assert lab.check("weights", "rollout")["weights"].verdict == "ok"
        # a part that gets lost in the engine is seen, however small it is
        update = generator.update_weights

        def loses(*given: Any, **more: Any) -> int:
            taken: int = update(*given, **more)
            generator.readable_weights()[
                next(n for n, _ in trainer.named_adapter() if "q_proj.lora_B" in n)
            ].detach().zero_()
            return taken

        monkeypatch.setattr(generator, "update_weights", loses)
        lab.actor.update_actor(lab.put(stored()))
        with expect_error((SyncError, StageError), remedy=r"q_proj\.lora_B\.weight did not arrive"):
            lab.actor.sync_weights()
        monkeypatch.undo()
        assert lab.actor.sync_weights()[0]["sync_gap/mean"] < 0.02


class OwnSampling(ActorWorker):
    def check_sync(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: wb.Placement.of({"a": (2, ["actor", "rollout"])}),
            r"'actor' and 'rollout' in one pool.*leave out 'rollout'",
        ),
        (
            lambda: wb.Placement.of({"a": (1, ["actor"]), "b": (2, ["rollout"])}, layouts={"rollout": (1, 2, 1)}),
            "tensor_parallel_size",
        ),
        (lambda: described({**MODELS, "rollout": TINY}, POOLS), r"models=\{'rollout'.*the actor's model.*placement"),
        (
            lambda: described({"critic": TINY}, {"a": (1, ["critic"]), "b": (1, ["rollout"])}),
            r"'rollout' without an actor.*declare an actor",
        ),
        (
            lambda: described(MODELS, POOLS, generation=wb.Generation(engine="vllm", tensor_parallel_size=2)),
            r"tensor_parallel_size=2 on a pool of 1 devices",
        ),
        (lambda: described({**MODELS, "actor": wb.Model(TINY, worker=OwnSampling)}, POOLS), r"check_sync of its own"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(make: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


BFLOAT16: dict[str, Any] = {
    "models": {"actor": TINY, "reward": vowels}, "dtype": "bfloat16",
    "training": wb.Training(engine="torch", learning_rate=1e-6, minibatches=1),
}  # fmt: skip


def weights_differ(lab: Any) -> tuple[str, ...]:
    """Weights of the rollout workers whose bits are not the actor's, after rounding."""
    trained = {name: weight.bfloat16() for name, weight in worker(lab, "actor").engine.named_weights()}
    rollout = worker(lab, "rollout")
    held = {**rollout._kept, **rollout.generator.live_weights()}
    return tuple(name for name in trained if not torch.equal(held[name], trained[name]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_patches_bring_what_changed(runs: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Where rollout workers have what came before; whole weights after a restored state, a failure, and at first."""
    pytest.importorskip(engine)
    generation = wb.Generation(engine=engine, sync="delta", max_model_tokens=192, kv_cache_gib=0.05)  # type: ignore[arg-type]
    with apart(runs, **BFLOAT16, generation=generation) as lab:

        def synced() -> tuple[bool, int, int]:
            """Whether by patches, the bytes that came, and those of the whole slices."""
            lab.actor.sync_weights()
            row = lab.syncs().iloc[-1]
            assert (row["verdict"], weights_differ(lab)) == ("ok", ())
            assert published(lab) == 0
            return row["strategy"] == "patches", row["moved_bytes"], row["whole_bytes"]

        def step() -> None:
            lab.actor.update_actor(lab.put(stored()))

        step()
        first, whole, of = synced()
        assert (first, whole) == (False, of)
        for _ in range(3):
            step()
            patched, moved, of = synced()
            assert patched
            assert 0 < moved < 0.1 * whole
            assert of == whole
        held, estimated = lab.topology().set_index("role"), lab.estimate().frame().set_index("role")
        copies = held["sync_copy_bytes"]
        assert copies.to_dict() == estimated["sync_copy_bytes"].reindex(copies.index, fill_value=0).to_dict()
        assert copies["actor"] == whole == (copies["rollout"] or whole)  # an engine that is patched in place has none
        with lab.kept("actor"):
            step()
            assert synced()[0]
        assert synced()[:2] == (False, whole)
        step()
        served, asked = worker(lab, "actor").context.exchange.served, list[Any]()

        def fails(*wanted: Any) -> Any:
            asked.append(wanted)
            return served(*wanted) if len(asked) < 3 else 1 / 0

        with monkeypatch.context() as broken:
            broken.setattr(worker(lab, "actor").context.exchange, "served", fails)
            with expect_error(StageError, value="rollout.receive_weights failed on rank 0"):
                lab.actor.sync_weights()
        assert synced()[:2] == (False, whole)
        step()
        assert synced()[0]
        assert lab.check("weights")["weights"].verdict == "ok"  # gives the engine others meanwhile
        step()
        assert not synced()[0]
        if engine == "vllm":
            assert_computes_with_the_layers_that_came(lab)


def assert_computes_with_the_layers_that_came(lab: Any) -> None:
    """After one layer has come, as after all weights, to the last bit. It leaves weights that are nobody's."""
    engine, held = worker(lab, "rollout").generator, worker(lab, "rollout")._kept
    held = held or {name: weight.clone() for name, weight in engine.live_weights().items()}
    layers = {name: re.sub(r"(layers\.\d+\.).*", r"\1", name) for name in held}
    for layer in set(layers.values()):
        for name in (mine := [name for name in held if layers[name] == layer]):
            held[name].mul_(0.9)
        engine.update_weights(((name, held[name]) for name in mine), 9, partial=True)
        by_layer = engine.log_probs(list(range(5, 45)))
        engine.update_weights(held.items(), 9)
        assert torch.equal(by_layer, engine.log_probs(list(range(5, 45)))), layer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_vllm_computes_with_the_layers_that_came_also_where_no_weights_are_tied(runs: Path) -> None:
    pytest.importorskip("vllm")
    generation = wb.Generation(engine="vllm", sync="delta", max_model_tokens=192, kv_cache_gib=0.05)
    with apart(runs, **{**BFLOAT16, "models": {"actor": "tiny-llama", "reward": vowels}}, generation=generation) as lab:
        lab.actor.update_actor(lab.put(stored()))
        lab.actor.sync_weights()
        assert_computes_with_the_layers_that_came(lab)


def test_auto_keeps_what_took_less_time(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three syncs by patches are timed, then three of whole weights, here with a clock that says how they ended."""
    note = PatchDecision.note
    for patched in (True, False):
        with apart(runs / str(patched), **BFLOAT16) as lab:
            # a clock that says how they end
            monkeypatch.setattr(
                PatchDecision,
                "note",
                lambda choice, _, *, patches, best=patched: note(choice, patches != best, patches=patches),
            )
            modes = list[bool]()
            for _ in range(10):
                lab.actor.update_actor(lab.put(stored()))
                lab.actor.sync_weights()
                modes.append(lab.syncs().iloc[-1]["strategy"] == "patches")
            # the first is whole, and so is the one after those that were not kept
            assert modes == [False, True, True, *[False] * (4 if patched else 7), *[True] * (3 if patched else 0)]
            assert bool(worker(lab, "actor")._kept[0]) == patched


def test_where_there_is_no_room_for_a_copy_syncs_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("workbench.workers.roles.sampling.available_bytes", lambda: 100_000)
    generation = wb.Generation(engine="transformers", sync="delta", max_model_tokens=192)
    with apart(tmp_path, **BFLOAT16, generation=generation) as lab:
        for _ in range(3):
            lab.actor.update_actor(lab.put(stored()))
            lab.actor.sync_weights()
        syncs = lab.syncs()
        assert (syncs["moved_bytes"] == syncs["whole_bytes"]).all()
        assert lab.topology()["sync_copy_bytes"].max() == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("each sync sends whole weights: patches need") == 1
