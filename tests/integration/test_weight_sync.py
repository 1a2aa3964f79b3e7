"""Weight syncs of an actor that ranks hold in slices: these meet by a strategy's plan, and the engine has them all."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.cases import tiny_lab
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput
from workbench.models.loading import load_causal_lm, load_config
from workbench.workers.weight_transition import plan_of, trained_slices

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares fp32 engines on the CPU"),
]

TINY = "tiny-llama-tied-4kv"
PROMPTS: Table = {
    "prompt_ids": Ragged.of([[1, 70 + n, 90 + n] for n in range(5)], torch.int64),
    "prompt_uid": torch.arange(5),
    "prompt": [str(n) for n in range(5)],
}
GROUPS = wb.Generation(engine="vllm", tensor_parallel_size=2, max_model_tokens=64, kv_cache_gib=0.05, sync="whole")
ALONE = wb.Generation(engine="transformers", max_model_tokens=64, sync="whole")
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


class Counting:
    """Pays the number of its prompt, after two turns."""

    def reset(self, prompt: str, **row: Any) -> str:
        self.number, self.turns = int(prompt), 0
        return ""

    def step(self, response: str) -> tuple[str, float, bool]:
        self.turns += 1
        return "ab", float(self.number), self.turns == 2


def open_lab(runs: Path, layout: wb.Layout, generation: wb.Generation, engine: Any = "torch") -> wb.Workbench:
    how: dict[str, Any] = {"zero_stage": 3} if layout.p * layout.t == 1 else {"engine": engine}
    return wb.open(
        "cut",
        models={"actor": TINY},
        prompts="arithmetic/test",
        placement=wb.Placement.colocate(layout.size, layouts={"actor": layout}),
        devices=layout.size,
        training=wb.Training(**how, learning_rate=1e-2),
        generation=generation,
        runs=runs,
    )


def drawn(seed: int) -> Table:
    """Prompts with random responses, to learn: weights move far."""
    generator = torch.Generator().manual_seed(seed)
    responses = [torch.randint(8, 264, (6,), generator=generator).tolist() for _ in range(5)]
    mask = Ragged.of([[True] * 6] * 5, torch.bool)
    return PROMPTS | {"response_ids": Ragged.of(responses, torch.int64), "response_mask": mask}


def greedy(lab: wb.Workbench, folder: Path) -> list[list[int]]:
    """The engine's greedy responses, held against the trainer's model, written down and computed with by itself."""
    batch = lab.actor.generate_sequences(lab.put(PROMPTS), temperature=0, max_new_tokens=6, ignore_eos=True)
    assert batch.meta["weights_version"] == lab.weights["actor"].steps
    table = lab.actor.compute_log_prob(batch).fetch(["response_ids", "rollout_log_prob", "old_log_prob"])
    lab.actor.save_model(folder)
    model = load_causal_lm(folder, dtype=torch.float32)
    prompts, (responses, sampled, scored) = PROMPTS["prompt_ids"], (table[name] for name in table)
    assert isinstance(prompts, Ragged) and isinstance(responses, Ragged)
    assert isinstance(sampled, Ragged) and isinstance(scored, Ragged)
    for prompt, response, mine, theirs in zip(
        prompts.rows(), responses.rows(), sampled.rows(), scored.rows(), strict=True
    ):
        with torch.no_grad():
            log_probs = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(1, response[:, None])[:, 0]
        assert (log_probs.amax(-1) - expected).max() < 1e-4  # the likeliest, or one that rounding makes so
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(theirs, expected, atol=1e-4, rtol=0)
    return [row.tolist() for row in responses.rows()]


def synced(lab: wb.Workbench, layout: wb.Layout, generation: wb.Generation, strategy: str) -> dict[str, float]:
    """What a sync says of itself; what the ledger says of it is the plan, pair by pair."""
    known = set(lab.transfers(kind="weights")["run"])
    first, *others = lab.actor.sync_weights(strategy=strategy)
    assert all(other | {"sync_gap/mean": 0} == first | {"sync_gap/mean": 0} for other in others)
    slices = trained_slices(lab.actor.spec, layout)
    assert slices is not None
    plan = plan_of(load_config(TINY), layout, generation, "float32", strategy, slices).figures()
    moved = lab.transfers(kind="weights")
    moved = moved[~moved["run"].isin(known)]
    assert set(moved["stage"]) == {"sync_weights"}
    assert moved["run"].nunique() == 1
    matrix = np.zeros_like(plan.matrix)
    for transfer in moved.itertuples():
        pair = (int(str(name).rpartition("-")[2]) for name in (transfer.source, transfer.destination))
        matrix[tuple(pair)] += transfer.moved_bytes
    assert (matrix == plan.matrix).all()
    assert first["sync/received_bytes"] == plan.received.sum() > 0
    assert first["sync/kept_twice_bytes"] == plan.kept_twice.sum()
    last = lab.syncs().to_dict("records")[-1]
    assert (last["event"], last["strategy"], last["run"]) == ("sync", strategy, moved["run"].max())
    assert last["moved_bytes"] == plan.received.sum()
    assert last["checksum_sent"] == last["checksum_received"] != ""
    return first


@pytest.mark.parametrize(
    ("layout", "generation", "updates"),
    [
        pytest.param(wb.Layout(1, 4, 1), GROUPS, 4, marks=[NEEDS_VLLM, pytest.mark.thorough], id="groups"),
        pytest.param(wb.Layout(1, 2, 1), ALONE, 2, id="tensor"),
        pytest.param(wb.Layout(2, 1, 1), ALONE, 2, id="pipeline", marks=pytest.mark.thorough),
        pytest.param(wb.Layout(1, 1, 2), GROUPS, 2, marks=[NEEDS_VLLM, pytest.mark.thorough], id="zero"),
    ],
)
def test_after_each_update_the_engine_generates_as_the_trainer_would(
    layout: wb.Layout, generation: wb.Generation, updates: int, tmp_path: Path
) -> None:
    with open_lab(tmp_path / "runs", layout, generation) as lab:
        seen = [greedy(lab, tmp_path / "0")]
        for update in range(updates):
            lab.actor.update_sft(lab.put(drawn(update)))
            seen.append(greedy(lab, tmp_path / str(update + 1)))
        assert all(one != other for one, other in itertools.pairwise(seen))
        moved = lab.traffic("weights", stage="generate_sequences")
        assert moved.minimum_bytes == moved.total_bytes > 0
        lab.actor.update_sft(lab.put(drawn(updates)))
        assert set(lab.syncs()["verdict"]) == {"ok"}
        costs, same = {}, []
        for strategy in ("hybridflow", "v", "full"):
            costs[strategy] = synced(lab, layout, generation, strategy)["sync/received_bytes"]
            same.append(greedy(lab, tmp_path / strategy))
        assert same[0] == same[1] == same[2]
        # the first strategy gave the engine the update's weights, the others the same ones again
        assert lab.syncs()["verdict"].to_list()[-6:] == ["ok", "ok", *["synced twice", "ok"] * 2]
        together = generation.tensor_parallel_size if layout.p * layout.t > 1 else 1  # ranks that have the same rows
        assert (costs["hybridflow"] < costs["v"]) == (generation.tensor_parallel_size > 1)
        spans = lab.spans()
        tokens = spans[spans["kind"] == "generate"].groupby("run")["processed_tokens"].agg(["sum", np.count_nonzero])
        assert (
            (tokens == [5 * 6, layout.size // together]).all().all()
        )  # each token counts on one rank, and each replica has its own
        talk = lab.actor.generate_sequences(
            lab.put(PROMPTS), environment=Counting, temperature=0, max_new_tokens=30,
            min_new_tokens=2, stop_token_ids=[9], logit_bias={9: 100.0},
        )  # fmt: skip
        rewards = talk.fetch(["environment_rewards"])["environment_rewards"]
        assert isinstance(rewards, Ragged)
        assert [row.sum().item() for row in rewards.rows()] == [2.0 * number for number in range(5)]


def test_what_no_engine_can_do_is_refused(tmp_path: Path) -> None:
    for layout, t_g, message in (
        (wb.Layout(2, 2, 1, 2, 1), 1, "without pipeline stages.*p_g=1"),
        (wb.Layout(2, 1, 1), 2, r"tensor_parallel_size=2.*divide t.*tensor_parallel_size=1"),
        (wb.Layout(1, 2, 1, 1, 1), 2, r"tensor_parallel_size=2.*tensor_parallel_size=1"),
    ):
        generation = wb.Generation(engine="vllm", tensor_parallel_size=t_g)
        with pytest.raises(BadInput, match=message):
            open_lab(tmp_path, layout, generation)
    with pytest.raises(BadInput, match=r"strategy='all'.*hybridflow"):
        wb.Generation(strategy="all")  # type: ignore[arg-type]
    with tiny_lab("one", tmp_path, backend="inline", models={"actor": TINY}) as lab:
        with pytest.raises(BadInput, match=r"strategy='all'"):
            lab.actor.sync_weights(strategy="all")
        with pytest.raises(BadInput, match=r"p\*t = 1"):
            lab.actor.sync_weights(strategy="v")


@pytest.mark.parametrize(
    "layout",
    [wb.Layout(1, 2, 1), pytest.param(wb.Layout(1, 1, 2), marks=pytest.mark.thorough)],
    ids=["tensor", "zero"],
)
def test_what_did_not_change_is_not_sent(layout: wb.Layout, tmp_path: Path) -> None:
    """In bfloat16 after small steps; whole the first time and after a restored state; each weight to the bit."""
    how: dict[str, Any] = {"zero_stage": 3} if layout.t == 1 else {"engine": "torch"}
    with wb.open(
        "patches", models={"actor": TINY}, prompts="arithmetic/test", devices=2, dtype="bfloat16",
        runs=tmp_path / "runs",
        placement=wb.Placement.colocate(2, layouts={"actor": layout}),
        training=wb.Training(**how, learning_rate=1e-6, minibatches=1),
        generation=wb.Generation(engine="transformers", max_model_tokens=64, sync="delta"),
    ) as lab:  # fmt: skip
        sent = []
        for update in range(4):
            if update == 3:
                with lab.kept("actor"):
                    pass
            lab.actor.update_sft(lab.put(drawn(update)))
            lab.actor.sync_weights()
            last = lab.syncs().iloc[-1]
            assert (last["verdict"], last["checksum_sent"]) == ("ok", last["checksum_received"])
            sent.append(last["moved_bytes"] / last["whole_bytes"])
        assert sent[0] == sent[3] == 1
        assert 0 < sent[1] < 0.1 > sent[2] > 0
        assert all(found.differ == () for found in lab.actor.compare_weights())
