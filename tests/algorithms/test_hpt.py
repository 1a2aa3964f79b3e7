"""HPT: prompts above the gate give exactly GRPO's gradient, the others exactly that of fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import hosts_of, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table, ragged_in
from workbench.errors import BadInput

SAMPLING = wb.Sampling(max_new_tokens=6)
ROWS = [{"prompt": f"{i} and {i}: ", "response": "yes" * (1 + i % 3)} for i in range(8)]


def reward(prompt: str, response: str, demonstration: str, **row: Any) -> float:
    """Prompts with even numbers are solved by some responses; a demonstration is there to read."""
    assert set(demonstration) == set("yes")
    return float(int(prompt[0]) % 2 == 0 and sum(map(ord, response)) % 2)


def nothing(prompt: str, response: str, **row: Any) -> float:
    return 0.0


def everything(prompt: str, response: str, **row: Any) -> float:
    return 0.9


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    # AdamW with so large an eps is plain descent: a step says what the gradient was
    training = {"minibatches": 1, "max_grad_norm": 0.0, "eps": 1e8, "learning_rate": 1e7, "micro_batch_tokens": 64}
    with tiny_lab("hpt", tmp_path_factory.mktemp("runs"), backend="inline", training=training) as lab:
        yield lab


def moved(lab: wb.Workbench, call: Any) -> dict[str, torch.Tensor]:
    """How each weight moves in an update, which is undone."""
    (worker,) = (host.workers["actor"] for host in hosts_of(lab).values() if "actor" in host.workers)
    before = {name: weight.clone() for name, weight in worker.engine.named_weights()}
    with lab.kept("actor"):
        call()
        return {name: weight - before[name] for name, weight in worker.engine.named_weights()}


def test_each_prompt_has_the_gradient_of_its_kind(lab: wb.Workbench) -> None:
    algorithm = wb.HPT(
        lab, lab.demonstrations(ROWS), prompts=8, samples=4, sampling=SAMPLING, reward=reward,
        sft_coefficient=0.7,
    )  # fmt: skip
    with lab.kept("actor"):
        metrics = algorithm.iterate()
    rollouts, chosen = algorithm.made["compute_advantages"], algorithm.made["choose"]
    table, kept = rollouts.fetch(), chosen.fetch()
    uids, scores = torch.as_tensor(table["prompt_uid"]), torch.as_tensor(table["rewards"])
    solved = {int(u) for u in uids if scores[uids == u].sum() > 0}
    assert 0 < len(solved) <= 4 and metrics["choose/demonstrated/fraction"] == 1 - len(solved) / 8
    assert metrics["choose/pass_rate/mean"] == pytest.approx(float(scores.mean()))
    shown = torch.as_tensor(kept["demonstrated"])
    assert uids[shown].tolist() == [u for u in range(8) if u not in solved]
    ids, demonstrations = kept["response_ids"], table["demonstration_ids"]
    assert isinstance(ids, Ragged) and isinstance(demonstrations, Ragged)
    for row, uid in enumerate(uids.tolist()):
        expected = demonstrations.rows()[row] if shown[row] else ids.rows()[row][:0]
        assert uid in solved or torch.equal(ids.rows()[row], expected)

    only = [row for row, uid in enumerate(uids.tolist()) if uid in solved]
    names = ("prompt_ids", "response_ids", "response_mask", "advantages")
    by_rl: Table = {name: table[name].take(only) for name in names}
    rows = shown.nonzero()[:, 0].tolist()
    by_sft: Table = {name: kept[name].take(rows) for name in names[:3]}
    rl, sft = lab.put(by_rl, meta=rollouts.meta), lab.put(by_sft)
    arguments: dict[str, Any] = {"on_policy": True, "aggregation": "fixed-length", "max_response_tokens": 6}
    both = moved(lab, lambda: lab.actor.update_actor(chosen, sft_coefficient=0.7, **arguments))
    of_rl = moved(lab, lambda: lab.actor.update_actor(rl, **arguments))
    of_sft = moved(lab, lambda: lab.actor.update_sft(sft))
    largest = max(float(weight.abs().max()) for weight in both.values())
    for name, weight in both.items():
        torch.testing.assert_close(weight, of_rl[name] + 0.7 * of_sft[name], rtol=0, atol=5e-6 * largest)
    assert max(float(weight.abs().max()) for weight in of_rl.values()) > 0.01 * largest


def test_the_gate(lab: wb.Workbench) -> None:
    """With a gate that none passes it is fine-tuning; where all pass it is GRPO. 0.9 in float32 is below Python's."""
    demonstrations = lab.demonstrations(ROWS)
    for same, coefficient in ((nothing, 1.0), (everything, 0.0)):
        algorithm = wb.HPT(lab, demonstrations, prompts=4, samples=2, sampling=SAMPLING, reward=same, passing=0.9)
        with lab.kept("actor"):
            metrics = algorithm.iterate()
        assert metrics["choose/demonstrated/fraction"] == coefficient
        assert ("update_actor/sft_loss" in metrics) == bool(coefficient) or metrics["update_actor/sft_loss"] == 0
        if coefficient:
            chosen = algorithm.made["choose"]
            table = {name: chosen.fetch()[name] for name in ("prompt_ids", "response_ids", "response_mask")}
            with lab.kept("actor"):
                assert lab.actor.update_sft(lab.put(table))["loss"] == pytest.approx(metrics["update_actor/loss"])


def test_functions_get_the_log_probabilities_that_they_read(lab: wb.Workbench) -> None:
    def moved(rewards: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
        return rewards + old_log_prob.sum(-1) - 2 * ref_log_prob.sum(-1)

    seen = list[tuple[Tensor, Tensor]]()

    def near(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        seen.append((log_prob.detach()[mask], ref_log_prob[mask]))
        return (log_prob - ref_log_prob).square()

    algorithm = wb.HPT(
        lab, lab.demonstrations(ROWS), prompts=4, samples=2, sampling=SAMPLING, reward=everything, passing=0.9,
        estimator=moved, loss=near,
    )  # fmt: skip
    with lab.kept("actor"):
        algorithm.iterate()
    table = algorithm.made["compute_advantages"].fetch(["advantages", "old_log_prob", "ref_log_prob", "rewards"])
    old, ref, found = (
        torch.stack([row.sum() if "log" in name else row[0] for row in ragged_in(table, name).rows()])
        for name in ("old_log_prob", "ref_log_prob", "advantages")
    )
    torch.testing.assert_close(found, table["rewards"] + old - 2 * ref, rtol=1e-5, atol=1e-4)
    assert len(seen) > 1 and all(torch.allclose(mine, reference, atol=1e-4) for mine, reference in seen[1:])


def test_what_is_refused(lab: wb.Workbench) -> None:
    with expect_error(BadInput, rule="must be a share of the responses"):
        wb.HPT(lab, lab.demonstrations(ROWS), gate=1.0)
    with expect_error(BadInput, rule="must be demonstrations"):
        wb.HPT(lab, lab.pairs([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4))


def test_rows_that_do_not_count_stay_out_and_sets_of_tokens_stay(lab: wb.Workbench) -> None:
    """Of prompts that pass, the update is GRPO's: a group with one valid row is dropped, a sampling mask is kept."""
    sampling = wb.Sampling(max_new_tokens=6, top_p=0.7, keep_mask=True)
    demonstrations = lab.demonstrations(ROWS)
    algorithm = wb.HPT(lab, demonstrations, prompts=4, samples=4, sampling=sampling, reward=everything)
    batch = lab.apply(algorithm.set_aside, lab.apply(demonstrations.next, n=4))
    batch = lab.actor.generate_sequences(batch, samples=4, **asdict(sampling))
    table = batch.fetch()
    uids = torch.as_tensor(table["prompt_uid"])
    first, last = uids == uids[0], uids == uids[-1]
    table["rewards"] = torch.where(last, 0.0, (torch.arange(len(uids)) % 2).float())
    table["valid"] = ~first | (torch.arange(len(uids)) == 1)  # one valid row of the first prompt, which passes
    batch = lab.compute_advantages(lab.put(table, meta=batch.meta), estimator="dr_grpo")
    chosen = algorithm.choose(batch)
    before, after = batch.fetch(), chosen.fetch()
    shown, counted = torch.as_tensor(after["demonstrated"]), torch.as_tensor(after["counted"]).bool()
    assert int(shown.sum()) == 1 and last[shown].all()
    assert torch.equal(counted, torch.as_tensor(before["counted"]).bool() | shown) and not counted[first].any()
    for name in ("sampling_mask_ids", "sampling_mask_sizes", "rollout_log_prob"):
        one, other = before[name], after[name]
        assert isinstance(one, Ragged) and isinstance(other, Ragged)
        for row, (had, has) in enumerate(zip(one.rows(), other.rows(), strict=True)):
            assert torch.equal(had, has) if not last[row] else not has.any()

    kept: Table = {name: before[name] for name in before if name != "rewards"}
    kept["valid"] = torch.as_tensor(kept["valid"]).bool() & ~last  # GRPO on the other prompts
    arguments: dict[str, Any] = {"aggregation": "fixed-length", "max_response_tokens": 6}
    kept["counted"] = torch.as_tensor(kept["counted"]).bool() & ~last
    found = []
    for rows, coefficient in ((chosen, {"sft_coefficient": 1e-12}), (lab.put(kept, meta=batch.meta), {})):
        with lab.kept("actor"):
            found.append(lab.actor.update_actor(lab.actor.compute_log_prob(rows), **coefficient, **arguments))
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4) and found[0]["grad_norm"] > 0
    assert found[0]["ratio/max_deviation"] < 1e-5
    lab.actor.compute_log_prob(chosen)
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-3  # of what was sampled
    assert found[0]["rollout_ratio/max_deviation"] < 1e-3  # over the tokens that could be drawn
