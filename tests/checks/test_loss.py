"""`lab.check(loss=, batch=)`: losses that are right pass, and each planted mistake is caught by the finding for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.checks.loss_checks import LOSS_CHECKS
from workbench.checks.report import CheckReport
from workbench.errors import BadInput, UnknownColumn
from workbench.workers.gradients import GradientReport, Minibatch, Sketch, cosine


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models: dict[str, Any] = {"actor": TINY, "critic": TINY}
    training = {"micro_batch_tokens": 128}
    folder = tmp_path_factory.mktemp("runs")
    with tiny_lab("check-loss", folder, backend="inline", models=models, training=training) as lab:
        yield lab


@pytest.fixture(scope="module")
def batch(lab: wb.Workbench) -> wb.Batch:
    """Responses of unequal lengths with holes in their masks, four a prompt."""
    table = stored(16)
    mask = table["response_mask"]
    assert isinstance(mask, Ragged)
    rows = mask.rows()
    for n, row in enumerate(rows):
        row[: n % 4] = False
    columns = {name: table[name] for name in ("prompt_ids", "response_ids", "advantages")}
    rewards, prompts = torch.arange(16) % 3, torch.arange(16) // 4
    more: Table = {"response_mask": Ragged.of(rows, torch.bool), "rewards": rewards.float(), "prompt_uid": prompts}
    return lab.put({**columns, **more}, meta={"temperature": 1.0})


def surrogate(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    """GRPO's loss, as a user writes it."""
    ratio = (log_prob - old_log_prob).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def cispo(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    with torch.no_grad():
        weight = (log_prob - old_log_prob).exp().clamp(max=3)
    return -weight * advantages * log_prob


def with_entropy(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, entropy: Tensor) -> Tensor:
    return surrogate(log_prob, old_log_prob, advantages) - 0.01 * entropy


def mean_of_batch(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    return surrogate(log_prob, old_log_prob, advantages).mean()


def spread_mean(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return surrogate(log_prob, old_log_prob, advantages)[mask].mean().expand(mask.shape)


def mean_without_mask(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    return -(log_prob - old_log_prob).mean(-1, keepdim=True).exp() * advantages


def detached(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    return surrogate(log_prob.detach(), old_log_prob, advantages)


def detached_in_part(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    return surrogate(log_prob.detach(), old_log_prob, advantages) + 0.01 * log_prob


def through_a_list(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.tensor((log_prob - old_log_prob).exp().tolist(), dtype=log_prob.dtype)
    return -ratio * (log_prob - old_log_prob).exp() * advantages


def whitened(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    chosen = advantages[mask]
    return surrogate(log_prob, old_log_prob, (advantages - chosen.mean()) / (chosen.std() + 1e-6))


def gradient_of_others(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    total = log_prob.sum()
    return surrogate(log_prob, old_log_prob, advantages) + 0.01 * (total - total.detach())


def wrong_sign(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    return -surrogate(log_prob, old_log_prob, advantages)


def divided_again(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return surrogate(log_prob, old_log_prob, advantages) / mask.sum(-1, keepdim=True).clamp(min=1)


def not_finite(log_prob: Tensor, advantages: Tensor) -> Tensor:
    return log_prob * (advantages - advantages).log()


def of_sequences(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    mean = ((log_prob - old_log_prob) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return -mean.exp() * advantages


def dropping_tokens(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    return surrogate(log_prob, old_log_prob, advantages) * torch.bernoulli(torch.full_like(log_prob, 0.5))


def overwriting(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    return surrogate(log_prob, old_log_prob, advantages.clamp_(min=0))


def raises(log_prob: Tensor) -> Tensor:
    raise RuntimeError("nothing to see")


@pytest.mark.parametrize(
    "loss",
    ["ppo", with_entropy, *(pytest.param(loss, marks=pytest.mark.thorough) for loss in ("gspo", surrogate, cispo))],
)
def test_a_loss_that_is_right_passes(lab: wb.Workbench, batch: wb.Batch, loss: Any) -> None:
    weights, metrics, names = lab.actor.weight_digests(), lab.last_metrics, batch.names
    report = lab.check(loss=loss, batch=batch)
    assert [finding.check for finding in report] == list(LOSS_CHECKS)
    assert {finding.verdict for finding in report} == {"ok"}, report
    assert lab.actor.weight_digests() == weights and lab.last_metrics == metrics and batch.names == names
    assert "the cosine is " in report["direction"].about and ", to GRPO's " in report["direction"].about


@pytest.mark.parametrize(
    ("loss", "found", "culprit"),
    [
        (mean_of_batch, {"returns"}, "was it summed or averaged"),
        (detached, {"returns"}, "a loss without a gradient"),
        (not_finite, {"returns"}, "row 0, token 0: the loss is not finite"),
        (raises, {"returns"}, "RuntimeError: nothing to see"),
        (dropping_tokens, {"repeats"}, "two calls with the same inputs give different losses"),
        (overwriting, {"repeats"}, "it changes its input 'advantages', which other code reads"),
        (through_a_list, {"gradient"}, "the gradient of log_prob is not the derivative of the loss"),
        (mean_without_mask, {"mask", "micro_batches"}, "changes with numbers outside the mask"),
        pytest.param(
            of_sequences,
            {"mask"},
            r"a token inside the mask: the gradient of log_prob is not finite there; divide by",
            marks=pytest.mark.thorough,
        ),
        (whitened, {"rows", "micro_batches"}, "changes with other rows. Put what depends on several"),
        pytest.param(spread_mean, {"rows"}, "the loss changes with other rows", marks=pytest.mark.thorough),
        pytest.param(gradient_of_others, {"rows", "micro_batches"}, "row ", marks=pytest.mark.thorough),
        (wrong_sign, {"ratio_1", "direction"}, "it is -1 of the policy gradient, cosine -1: the sign is reversed"),
        pytest.param(detached_in_part, {"ratio_1"}, "of the policy gradient, cosine", marks=pytest.mark.thorough),
        (divided_again, {"ratio_1"}, "it is 0.229 of the policy gradient"),
    ],
)
def test_a_planted_mistake_is_caught(
    lab: wb.Workbench, batch: wb.Batch, loss: Any, found: set[str], culprit: str
) -> None:
    report = lab.check(loss=loss, batch=batch)
    failed = {finding.check for finding in report.failed}
    # one that mixes tokens or rows has another gradient at ratio 1 as well, and may point anywhere
    assert found <= failed <= found | {"ratio_1", "mask", "direction", "micro_batches"}, report
    first = next(name for name in LOSS_CHECKS if name in found)
    assert culprit in report[first].culprit


def huber(values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
    near = old_values + (values - old_values).clamp(-0.2, 0.2)
    one, two = (torch.nn.functional.huber_loss(x, returns, reduction="none") for x in (values, near))
    return torch.maximum(one, two)


def test_a_loss_of_a_critic(lab: wb.Workbench, batch: wb.Batch) -> None:
    columns = batch.fetch(["advantages"])
    batch = batch.join(lab.put({"returns": columns["advantages"]}))
    report = lab.check(loss=huber, batch=batch)
    assert {finding.check for finding in report if finding.verdict == "ok"} == {*LOSS_CHECKS} - {"ratio_1"}, report
    assert "to the squared error's" in report["direction"].about
    assert report.batch is not None and "gradient_contribution" in report.batch.names
    gradient = report.batch.fetch(["gradient_contribution"])["gradient_contribution"]
    assert isinstance(gradient, Ragged) and gradient.values.any()
    for loss, found in (
        (lambda values, returns: (returns - values) ** 3, {"direction"}),
        (lambda values, returns: (values - returns.mean()) ** 2, {"rows", "mask"}),
        (lambda values, returns: ((values - returns) ** 2).mean(), {"returns"}),
    ):
        assert found <= {finding.check for finding in lab.check(loss=loss, batch=batch).failed}
    with expect_error(UnknownColumn, value="returns"):
        lab.check(loss=huber, batch=batch.drop("returns"))


def test_some_checks_and_what_is_refused(lab: wb.Workbench, batch: wb.Batch) -> None:
    assert [finding.check for finding in lab.check("rows", "mask", loss=surrogate, batch=batch)] == ["mask", "rows"]
    with expect_error(BadInput, value="check 'ratio'", rule="there are returns, repeats, gradient"):
        lab.check("ratio", loss=surrogate, batch=batch)
    with expect_error(BadInput, value=r"check\(loss=...\) alone", remedy=r"lab.check\(loss=fn, batch=batch\)"):
        lab.check(loss=surrogate)
    with expect_error(BadInput, rule="must be a batch of this workbench"):
        lab.check(loss=surrogate, batch=3)
    with expect_error(BadInput, value="takes 'advantage'", remedy="write 'advantages'"):
        lab.check(loss=lambda log_prob, advantage: log_prob, batch=batch)
    with expect_error(UnknownColumn, value="ref_log_prob"):
        lab.check(loss=lambda log_prob, ref_log_prob: log_prob, batch=batch)
    for loss, why in ((dropping_tokens, "two calls with the same"), (overwriting, "it changes its input 'advantages'")):
        for check in ("gradient", "mask", "rows", "micro_batches"):
            finding = lab.check(check, loss=loss, batch=batch)[check]
            assert finding.verdict == "not applicable" and finding.about.startswith(why)
    report = lab.check("ratio_1", loss=lambda log_prob: -log_prob, batch=batch)
    assert report["ratio_1"].verdict == "not applicable"


def test_what_each_token_adds(lab: wb.Workbench, batch: wb.Batch) -> None:
    report = lab.check("returns", loss=surrogate, batch=batch)
    assert report.batch is not None and set(batch.names) < set(report.batch.names)
    table = report.batch.fetch(["loss_contribution", "gradient_contribution", "advantages", "response_mask"])
    loss, gradient, advantages, mask = (column for column in table.values() if isinstance(column, Ragged))
    # the policy is that of the rollouts
    expected = torch.where(mask.values.bool(), -advantages.values, 0.0) / mask.values.sum()
    torch.testing.assert_close(loss.values, expected)
    torch.testing.assert_close(gradient.values, expected)


def test_rows_that_are_not_valid_have_no_part_in_it(lab: wb.Workbench, batch: wb.Batch) -> None:
    table = batch.fetch()
    valid = torch.tensor([row not in (0, 6, 7) for row in range(16)])
    rewards, old = 10 + torch.arange(16.0) % 3, table["advantages"]
    assert isinstance(old, Ragged)

    def report_of(of_failed: float) -> CheckReport:
        spoilt = {"rewards": torch.where(valid, rewards, of_failed), "valid": valid}
        of_row = torch.where(valid, 0.0, of_failed).repeat_interleave(old.lengths)
        return lab.check(
            loss=surrogate, batch=lab.put({**table, **spoilt, "advantages": old.like(old.values + of_row)})
        )

    report, other = report_of(0.0), report_of(1000.0)
    assert report.ok and repr(report) == repr(other)
    assert other.batch is not None
    columns = other.batch.fetch(["loss_contribution", "gradient_contribution", "response_mask"])
    loss, gradient, mask = (column for column in columns.values() if isinstance(column, Ragged))
    counts = torch.repeat_interleave(valid, mask.lengths) & mask.values.bool()
    expected = torch.where(counts, -old.values, 0.0) / counts.sum()
    torch.testing.assert_close(loss.values, expected)
    torch.testing.assert_close(gradient.values, expected)
    of_grpo = lab.compute_advantages(lab.put({**table, "rewards": rewards * valid, "valid": valid}), estimator="grpo")
    about = lab.check("direction", loss=surrogate, batch=of_grpo)["direction"].about
    assert float(about.rpartition(" ")[2]) > 0.9  # it is GRPO's, but for the mean over responses in place of tokens

    def bad(log_prob: Tensor, advantages: Tensor) -> Tensor:
        return log_prob * torch.where(advantages == advantages[4, 1], -1.0, 1.0).log()

    first = lab.check("returns", loss=bad, batch=report.batch)  # rows have their numbers in the batch
    assert first["returns"].culprit.startswith("row 5, token 1: the loss is not finite")
    with expect_error(BadInput, value="rows are all not valid"):
        lab.check(loss=surrogate, batch=lab.put({**table, "valid": valid & ~valid}))


def test_it_checks_the_batch_of_an_earlier_report(lab: wb.Workbench, batch: wb.Batch) -> None:
    first = lab.check("returns", loss=surrogate, batch=batch)
    second = lab.check("returns", loss=lambda log_prob, advantages: -2 * log_prob * advantages, batch=first.batch)
    assert first.batch is not None and second.batch is not None and second.batch.names == first.batch.names
    name = "gradient_contribution"
    one, two = (found.fetch([name])[name] for found in (first.batch, second.batch))
    assert isinstance(one, Ragged) and isinstance(two, Ragged)
    torch.testing.assert_close(two.values, 2 * one.values)


def test_its_direction_is_that_of_ratio_1_also_on_rollouts_that_were_learned_from(
    lab: wb.Workbench, batch: wb.Batch
) -> None:
    learned = lab.actor.compute_log_prob(batch)
    with lab.kept("actor"):
        for _ in range(3):
            lab.actor.update_actor(learned, epochs=4)
        unclipped = lab.check("direction", loss=lambda log_prob, old_log_prob, advantages: (
            -(log_prob - old_log_prob).exp() * advantages), batch=learned)  # fmt: skip
        assert unclipped.ok and unclipped["direction"].figure < 1e-3
        assert not lab.check("direction", loss=wrong_sign, batch=learned).ok


def test_a_loss_that_moves_nothing_has_no_direction(lab: wb.Workbench, batch: wb.Batch) -> None:
    found = lab.check("direction", loss=lambda log_prob, advantages: 0 * log_prob * advantages, batch=batch)
    assert not found.ok and found["direction"].culprit == "its gradient is 0: a step changes nothing"
    advantages = batch.fetch(["advantages"])["advantages"]
    assert isinstance(advantages, Ragged)
    none = batch.drop("advantages").join(lab.put({"advantages": advantages.like(0 * advantages.values)}))
    (finding,) = lab.check("direction", loss=lambda log_prob: -log_prob, batch=none)
    assert finding.verdict == "not applicable" and "all advantages are 0" in finding.about


def test_a_loss_without_advantages_may_point_anywhere(lab: wb.Workbench, batch: wb.Batch) -> None:
    for sign in (1, -1):
        found = lab.check("direction", loss=lambda log_prob, sign=sign: sign * log_prob, batch=batch)["direction"]
        assert found.verdict == "not applicable" and "its cosine to PPO's gradient is " in found.about
    assert not lab.check("direction", loss=lambda log_prob: 0 * log_prob, batch=batch).ok


def test_rewards_that_do_not_differ_give_no_cosine_to_grpo(
    lab: wb.Workbench, batch: wb.Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = batch.drop("rewards").join(lab.put({"rewards": torch.ones(16)}))
    found = lab.check("direction", loss=surrogate, batch=same)["direction"]
    assert found.verdict == "ok" and "GRPO" not in found.about
    assert "all advantages are 0" not in "".join(capsys.readouterr())


def test_a_column_of_several_numbers_a_token(lab: wb.Workbench, batch: wb.Batch) -> None:
    lengths = batch.lengths("response_mask")
    several = Ragged.of([torch.linspace(0.1, 1, 3 * length) for length in lengths], torch.float32)

    def weighed(log_prob: Tensor, advantages: Tensor, mask: Tensor, several: Tensor, level: Tensor) -> Tensor:
        return -several.view(*mask.shape, 3).mean(-1) * level[:, None] * log_prob * advantages

    own = lab.put({"several": several, "level": [row + 0.5 for row in range(batch.rows)]})
    report = lab.check("returns", "mask", "rows", loss=weighed, batch=batch.join(own))
    assert report.ok, report


def test_the_cosine_is_that_of_the_gradients() -> None:
    draws = torch.Generator().manual_seed(0)

    def gradients() -> dict[str, Tensor]:
        sizes = {"embedding": (264, 32), "layer": (64, 32), "norm": (32,)}
        return {name: torch.randn(size, generator=draws) for name, size in sizes.items()}

    def reports(found: dict[str, Tensor]) -> list[GradientReport]:
        sketches = {name: Sketch.of(name, gradient) for name, gradient in found.items()}
        return [GradientReport(counts=True, metrics={}, minibatches=(Minibatch(0.0, sketches),))]

    one, other = gradients(), gradients()
    for share in (0.0, 0.3, 0.9, 1.0):
        mixed = {name: share * one[name] + math.sqrt(1 - share**2) * other[name] for name in one}
        a, b = (torch.cat([gradient.flatten() for gradient in found.values()]) for found in (one, mixed))
        exact = float(a @ b / a.norm() / b.norm())
        assert cosine(reports(one), reports(mixed)) == pytest.approx(exact, abs=0.1)
    assert cosine(reports(one), reports({name: -gradient for name, gradient in one.items()})) == pytest.approx(-1)
