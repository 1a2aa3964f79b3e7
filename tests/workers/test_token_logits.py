"""Losses that read logits or hidden states: they give the gradients of what is built in, and of autograd on the whole
model; however rows, ranks, layers and the vocabulary are cut, the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.engines.training_ranks import run_ranks
from tests.workers.logits_ranks import LOSSES, entropy_of, gradients, of_hidden_states, of_some_positions, with_entropy
from tests.workers.update_ranks import ROWS, shard_of
from workbench.batches.columns import Ragged
from workbench.errors import StageError
from workbench.models.loading import load_causal_lm
from workbench.objectives.kl import divergence
from workbench.placement import Layout
from workbench.workers.gradients import Sketch
from workbench.workers.user_loss import Logits

CUT = [
    ("torch", Layout(d=2), 2), ("zero1", Layout(d=2), 2), ("zero3", Layout(d=2), 2),
    ("torch", Layout(t=2), 3), ("torch", Layout(p=2), 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models, training = {"actor": TINY, "teacher": "tiny-llama"}, {"minibatches": 1, "micro_batch_tokens": 32}
    folder = tmp_path_factory.mktemp("runs")
    with tiny_lab("logits", folder, backend="inline", models=models, training=training) as lab:
        yield lab


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (found,) = gradients([("torch", Layout(), ROWS)])
    return found


def by_autograd(loss: Any) -> dict[str, Tensor]:
    """The gradient of a loss, token-mean, on transformers' model, a row at a time and without padding."""
    network, shard = (
        load_causal_lm("tiny-llama", dtype=torch.float32, device="cpu").eval(),
        shard_of([*range(ROWS)], ()),
    )
    rows = {name: column.rows() for name, column in shard.columns.items() if isinstance(column, Ragged)}
    mask, total = torch.cat(rows["response_mask"]), torch.zeros(())
    for row in range(ROWS):
        prompt, response = rows["prompt_ids"][row], rows["response_ids"][row]
        output = network(input_ids=torch.cat([prompt, response])[None], output_hidden_states=True)
        logits = output.logits[0, len(prompt) - 1 : -1]
        log_prob = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        hidden, advantages = output.hidden_states[-1][0, len(prompt) - 1 : -1], rows["advantages"][row]
        if loss is of_hidden_states:
            tokens = of_hidden_states(log_prob, hidden, advantages)
        else:
            tokens = torch.where(advantages > 0, logits[:, :2].square().sum(-1) * advantages, 0.0)
        total = total + tokens[rows["response_mask"][row].bool()].sum()
    (total / mask.sum()).backward()
    return {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}


def apart(one: dict[str, Any], two: dict[str, Any]) -> float:
    """The largest relative distance of the gradients of weights."""
    assert one.keys() == two.keys()
    whole = max(float(sketch.norm()) for sketch in one.values())
    return max(float((one[name] - two[name]).norm()) for name in one) / whole


def test_an_entropy_bonus_by_hand_is_the_built_in_one(alone: dict[str, Any]) -> None:
    built_in, by_hand = alone["built in"], alone["by hand"]
    assert by_hand["share"] == pytest.approx(built_in["share"], rel=1e-6)
    assert apart(built_in["sketches"], by_hand["sketches"]) < 1e-6


@pytest.mark.parametrize("name", ["hidden", "some"])
def test_the_gradient_is_that_of_autograd_on_the_whole_model(alone: dict[str, Any], name: str) -> None:
    expected = by_autograd(LOSSES[name]["loss"])
    sketches = {n: torch.tensor(Sketch.of(n, gradient).buckets) for n, gradient in expected.items()}
    assert apart(sketches, {n: alone[name]["sketches"][n] for n in sketches}) < 1e-5
    for other in alone[name]["sketches"].keys() - sketches.keys():  # no head's
        assert not alone[name]["sketches"][other].any()


def test_micro_batches_do_not_change_it(alone: dict[str, Any]) -> None:
    (cut,) = gradients([("torch", Layout(), 1)])
    for name in LOSSES:
        assert cut[name]["share"] == pytest.approx(alone[name]["share"], rel=1e-5)
        assert apart(alone[name]["sketches"], cut[name]["sketches"]) < 1e-5


@pytest.mark.slow
def test_engines_and_layouts_do_not_change_it(alone: dict[str, Any]) -> None:
    ranks = run_ranks(gradients, 2, CUT)
    for number, case in enumerate(CUT):
        for name in LOSSES:
            share = sum(rank[number][name]["share"] for rank in ranks)
            assert share == pytest.approx(alone[name]["share"], rel=1e-5), (case, name)
            for rank in ranks:
                assert apart(alone[name]["sketches"], rank[number][name]["sketches"]) < 1e-5, (case, name)


def test_a_divergence_by_hand_is_that_of_distillation(lab: wb.Workbench) -> None:
    """To the teacher's stored distribution over all 264 tokens."""
    size = 264
    table = {name: stored(6)[name] for name in ("prompt_ids", "response_ids", "response_mask")}
    batch = lab.teacher.compute_teacher_log_prob(lab.put(table, meta={"temperature": 0.8}), top_k=size)

    def distilled(logits: Any, mask: Tensor, teacher_ids: Tensor, teacher_log_prob: Tensor) -> Tensor:
        shape = (*mask.shape, size)
        teacher = torch.zeros(shape).scatter(-1, teacher_ids.view(shape).long(), teacher_log_prob.view(shape))
        return logits.map(lambda x, there: divergence(there, x.log_softmax(-1), 0.4), teacher)

    found = []
    for update, arguments in (("update_distill", {"beta": 0.4}), ("update_actor", {"loss": distilled})):
        with lab.kept("actor"):
            metrics = getattr(lab.actor, update)(batch, **arguments)
            found.append((metrics["loss"], metrics["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_it_is_called_for_chosen_positions_alone(lab: wb.Workbench) -> None:
    seen: list[tuple[int, ...]] = []

    def loss(log_prob: Tensor, mask: Tensor, advantages: Tensor, logits: Any) -> Any:
        def first_two(x: Tensor, a: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            assert x.dtype == torch.float32 and bool((a > 0.5).all())
            return x[:, :2]

        where = advantages > 0.5
        found = logits.map(first_two, advantages, where=where if bool(where.any()) else mask & False)
        assert not found[~(where & mask)].any() and found.shape == (*mask.shape, 2)
        return -log_prob + found.sum(-1), {"read": (where & mask).float()}

    table = stored(8)
    advantages = table["advantages"]
    assert isinstance(advantages, Ragged)
    table["advantages"] = advantages.like(advantages.values + (advantages.values > 0.5))
    with lab.kept("actor"):
        metrics = lab.actor.update_actor(lab.put(table, meta={"temperature": 1.0}), loss=loss)
    chosen = int((advantages.values > 0.5).sum())
    assert metrics["read"] == pytest.approx(chosen / len(advantages.values))
    assert seen[0][1] == 264 and chosen <= sum(n for n, _ in seen[1:]) <= 3 * chosen + 8  # again in backward passes


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda logits, mask: logits.map(lambda x: x.sum()), r"returned a float32 tensor of shape \[\] for logits of"),
        (lambda logits, mask: logits.map(entropy_of, where=mask.float()), r"where=a float32 tensor.*it must be a bool"),
        (lambda logits, mask: logits.map(lambda x, k: x.sum(-1), 3.0), r"logits.map with float 3.0.*\[rows, tokens"),
        (lambda logits, mask: logits.mean(-1), r"no attribute 'mean'"),
    ],
)
def test_what_is_refused_before_any_pass(lab: wb.Workbench, call: Any, said: str) -> None:
    def loss(log_prob: Tensor, mask: Tensor, logits: Any) -> Tensor:
        return -log_prob + call(logits, mask)

    with pytest.raises(StageError, match=said):
        lab.actor.update_actor(lab.put(stored(8), meta={"temperature": 1.0}), loss=loss)


def test_a_mask_without_a_token_reads_nothing() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    logits = Logits(mask, lambda numbers, function: function(torch.full((len(numbers), 5), torch.inf), slice(0, 1)))
    assert torch.equal(logits.map(entropy_of), torch.zeros(2, 3))


@pytest.mark.parametrize("loss", [with_entropy, of_some_positions])
def test_the_check_of_a_loss_knows_them(lab: wb.Workbench, loss: Any) -> None:
    """It passes where the loss is right, and finds a gradient that is lost on the way from the logits."""
    batch = lab.put(stored(8), meta={"temperature": 1.0})
    report = lab.check(loss=loss, batch=batch)
    assert {finding.verdict for finding in report} <= {"ok", "not applicable"} and report["gradient"].verdict == "ok"

    def lost(log_prob: Tensor, advantages: Tensor, logits: Any) -> Tensor:
        return -log_prob * advantages - logits.map(lambda x: torch.tensor(entropy_of(x).tolist()).to(x.dtype))

    found = lab.check("gradient", loss=lost, batch=batch)["gradient"]
    assert found.verdict == "failed" and "the gradient of logits is not the derivative of the loss" in found.culprit
