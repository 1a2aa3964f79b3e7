"""Updates with KL-Cov and Clip-Cov: tokens of whole minibatches are held back, however these are cut and dealt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.cases import tiny_lab
from tests.engines.training_ranks import run_ranks
from tests.workers.update_ranks import LONGEST, ROWS, context_here, shard_of
from workbench.batches.columns import Ragged
from workbench.errors import BadInput
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.objectives.losses import CovarianceLoss
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.workers.policy_tokens import held_back_tokens
from workbench.workers.roles import ActorWorker

LOSSES: dict[str, CovarianceLoss] = {
    "kl": wb.KLCov(share=0.2, coefficient=0.5),
    "clip": wb.ClipCov(share=0.1, low=0.1, high=3.0),
}


def gradients(rows: int) -> list[dict[str, Any]]:
    """Of both losses on this rank's share of eight rows, in micro-batches of so many rows."""
    context = context_here()
    training = Training(engine="torch", micro_batch_tokens=rows * LONGEST)
    generation = Generation(engine="transformers")
    worker = ActorWorker(Model(name="tiny-llama", dtype="float32", training=training, generation=generation), context)
    data = context.groups.data
    shard = shard_of(list(range(data.rank, ROWS, data.world_size)), (3,))
    found = []
    for loss in LOSSES.values():
        report = worker.measure_gradient(shard, update="update_actor", columns=(), arguments={"loss": loss})
        tokens = held_back_tokens(shard, loss, data)
        found.append({
            "share": sum(minibatch.share for minibatch in report.minibatches),
            "sketches": {n: torch.tensor(s.buckets) for n, s in report.minibatches[0].sketches.items()},
            "tokens": dict(zip(shard.rows.tolist(), tokens.rows(), strict=True)), "metrics": report.metrics,
        })  # fmt: skip
    return found


def test_the_tokens_are_those_of_the_whole_minibatch() -> None:
    shard = shard_of([*range(ROWS)], ())
    halves = Shard(columns=shard.columns, rows=np.arange(ROWS), minibatch_sizes=(3, 5), meta=shard.meta)
    found = held_back_tokens(halves, LOSSES["kl"], context_here().groups.data).rows()
    old, advantages, mask = (halves.ragged(name).rows() for name in ("old_log_prob", "advantages", "response_mask"))
    for rows in (range(3), range(3, 8)):
        places = [(row, t) for row in rows for t in mask[row].nonzero()[:, 0].tolist()]
        log_probs = np.array([float(old[row][t]) for row, t in places])
        of_tokens = np.array([float(advantages[row][t]) for row, t in places])
        parts = (log_probs - log_probs.mean()) * (of_tokens - of_tokens.mean())
        largest = {places[i] for i in np.argsort(-parts)[: int(len(places) * 0.2)]}
        assert {(row, t) for row in rows for t in found[row].nonzero()[:, 0].tolist()} == largest


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_rounding_does_not_change_them(loss: CovarianceLoss) -> None:
    """Another placement, or other micro-batches, round `old_log_prob` differently."""
    shard, data = shard_of([*range(ROWS)], ()), context_here().groups.data
    old = shard.ragged("old_log_prob")
    rounded = Shard(
        columns={**shard.columns, "old_log_prob": old.like(old.values * (1 + torch.finfo(torch.float32).eps))},
        rows=shard.rows, minibatch_sizes=shard.minibatch_sizes, meta=shard.meta,
    )  # fmt: skip
    found, again = (held_back_tokens(given, loss, data).values for given in (shard, rounded))
    assert int(found.sum()) > 3
    assert torch.equal(found, again)


@pytest.mark.slow
def test_micro_batches_and_ranks_do_not_change_it() -> None:
    alone, cut = gradients(ROWS), gradients(1)
    ranks = run_ranks(gradients, 2, 2)
    for number in range(len(LOSSES)):
        whole = torch.cat([*alone[number]["sketches"].values()])
        assert sum(int(row.sum()) for row in alone[number]["tokens"].values()) > 3
        for others in ([cut[number]], [rank[number] for rank in ranks]):
            assert sum(other["share"] for other in others) == pytest.approx(alone[number]["share"], rel=1e-5)
            for other in others:
                assert float((torch.cat([*other["sketches"].values()]) - whole).norm() / whole.norm()) < 1e-5
                assert all(torch.equal(row, alone[number]["tokens"][i]) for i, row in other["tokens"].items())


def test_the_updates_of_an_algorithm(tmp_path: Any) -> None:
    """At pi = pi_old KL-Cov is the policy gradient; later its penalty pulls the chosen tokens back."""
    with tiny_lab("cov", tmp_path, backend="inline") as lab:
        found = wb.GRPO(lab, loss=wb.KLCov(share=0.1), prompts=4, sampling=wb.Sampling(max_new_tokens=6)).run(2)
        assert 0.05 < found["update_actor/held_back_fraction"].min() < 0.11
        batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=4, max_new_tokens=6)
        batch = lab.reward.compute_reward(lab.actor.compute_log_prob(batch))
        batch = lab.compute_advantages(batch, estimator="grpo")
        with pytest.raises(BadInput, match=r"clip.*with loss=KLCov.*no clip"):
            lab.actor.update_actor(batch, loss=wb.KLCov(), clip=0.1)
        with pytest.raises(BadInput, match=r"on_policy=True with loss=ClipCov"):
            lab.actor.update_actor(batch, loss=wb.ClipCov(), on_policy=True)
        with pytest.raises(BadInput, match="chooses tokens over a whole minibatch"):
            lab.check(loss=wb.ClipCov(), batch=batch)
        strong, none = (wb.KLCov(share=1.0, coefficient=c) for c in (5.0, 0.0))
        moved, old = [], batch.fetch(["old_log_prob"])["old_log_prob"]
        for loss in (none, strong):
            with lab.kept("actor"):
                lab.actor.update_actor(batch, loss=loss, epochs=6)
                new = lab.actor.compute_log_prob(batch).fetch(["old_log_prob"])["old_log_prob"]
                assert isinstance(new, Ragged) and isinstance(old, Ragged)
                moved.append(float((new.values - old.values).abs().mean()))
        assert moved[1] < 0.5 * moved[0]
