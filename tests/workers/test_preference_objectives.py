"""IPO, ORPO and KTO in an inline workbench: where they start, what they learn, and the same numbers however rows are
cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, UnknownColumn

PAIRS: list[dict[str, Any]] = [
    {"prompt": f"Question {i}?", "chosen": f"yes, {'very ' * (i % 3)}gladly", "rejected": f"no{'!' * (i % 4)} {i}"}
    for i in range(8)
]
RATED: list[dict[str, Any]] = [
    {"prompt": row["prompt"], "completion": row["chosen" if i % 2 else "rejected"], "label": i % 2 > 0}
    for i, row in enumerate(PAIRS)
]
FAST: dict[str, Any] = {"engine": "torch", "learning_rate": 3e-3, "minibatches": 1, "micro_batch_tokens": 4096}
MODELS: dict[str, Any] = {"actor": TINY, "reference": TINY}


def open_lab(name: str, runs: Path, **training: Any) -> wb.Workbench:
    return tiny_lab(name, runs, models=MODELS, training={**FAST, **training}, backend="inline", prompts=None)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with open_lab("preferences", tmp_path_factory.mktemp("runs")) as lab:
        yield lab


def numbers(batch: wb.Batch, name: str) -> Tensor:
    column = batch.fetch([name])[name]
    assert isinstance(column, Tensor)
    return column


def rows(batch: wb.Batch, name: str) -> list[list[int]]:
    column = batch.fetch([name])[name]
    assert isinstance(column, Ragged)
    return [row.tolist() for row in column.rows()]


def rated(lab: wb.Workbench, n: int = 8) -> wb.Batch:
    return lab.reference.compute_ref_feedback_log_prob(lab.feedback(RATED, shuffle=False).next(n))


def test_ipo_starts_at_its_margin_and_stops_there(lab: wb.Workbench) -> None:
    """The loss at the reference is 1 / (4 beta^2), and training brings h to 1 / (2 beta), not beyond."""
    batch = lab.reference.compute_ref_pair_log_prob(lab.pairs(PAIRS).next(8))
    with lab.kept("actor"):
        first = lab.actor.update_ipo(batch, beta=0.5)
        assert first["loss"] == first["preference_loss"] == pytest.approx(1.0, abs=1e-5)
        for _ in range(40):
            last = lab.actor.update_ipo(batch, beta=0.5)
        assert last["accuracy"] == 1
        assert last["margin"] == pytest.approx(0.5 * 1 / (2 * 0.5), rel=0.2)  # beta h
        lab.actor.compute_pair_log_prob(batch, objective="ipo", beta=0.5)
        held = lab.last_metrics["compute_pair_log_prob"]
        again = lab.actor.update_ipo(batch, beta=0.5)
        assert held["preference_loss"] == pytest.approx(again["loss"], rel=1e-5)
        assert held["accuracy/low"] < held["accuracy"] <= held["accuracy/high"]


def test_orpo_needs_no_reference_and_is_the_formula(lab: wb.Workbench) -> None:
    batch = lab.pairs(PAIRS, shuffle=False).next(8)
    with lab.kept("actor"):
        scored = lab.actor.compute_pair_log_prob(batch, objective="orpo", beta=0.3)
        held = lab.last_metrics["compute_pair_log_prob"]
        first = lab.actor.update_orpo(batch, beta=0.3)
        mean = [
            [float(total) / len(ids) for total, ids in zip(numbers(scored, f"{n}_log_prob"), rows(batch, f"{n}_ids"))]  # noqa: B905
            for n in ("chosen", "rejected")
        ]
        odds = [[math.exp(a) / (1 - math.exp(a)) for a in answers] for answers in mean]
        losses = [-a - 0.3 * math.log(1 / (1 + q / p)) for a, p, q in zip(mean[0], *odds, strict=True)]
        assert first["loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)
        assert first["sft_loss"] == pytest.approx(-sum(mean[0]) / 8, rel=1e-5)
        for name in ("preference_loss", "margin", "accuracy", "chosen_log_odds/mean", "sft_loss"):
            assert held[name] == pytest.approx(first[name], rel=1e-5), name
        for _ in range(10):
            last = lab.actor.update_orpo(batch, beta=0.3)
        assert last["accuracy"] == 1
        assert last["sft_loss"] < 0.5 * first["sft_loss"]


def test_each_prompt_is_paired_with_the_answer_before_it(lab: wb.Workbench) -> None:
    batch = lab.feedback(RATED, shuffle=False).next(8)
    answers = rows(batch, "response_ids")
    assert rows(batch, "mismatched_ids") == [answers[-1], *answers[:-1]]
    assert numbers(batch, "desirable").tolist() == [row["label"] for row in RATED]
    # cut where the other prompt leaves less room
    long = [{"prompt": "a", "response": "b" * 30, "label": 1}, {"prompt": "c" * 30, "response": "d", "label": 0}]
    cut = lab.feedback(long, shuffle=False, max_tokens=40).next(2)
    for prompt, answer in zip(rows(cut, "prompt_ids"), rows(cut, "mismatched_ids"), strict=True):
        assert 0 < len(answer) <= 40 - len(prompt)


def test_kto_starts_at_one_half_and_learns_a_handful(lab: wb.Workbench) -> None:
    batch = rated(lab)
    with lab.kept("actor"):
        first = lab.actor.update_kto(batch, beta=0.5, desirable_weight=1.0, undesirable_weight=2.0)
        bad = sum(not row["label"] for row in RATED)
        assert first["kl"] == 0
        assert first["loss"] == pytest.approx(0.5 * (8 + bad) / 8, abs=1e-6)
        for _ in range(10):
            last = lab.actor.update_kto(batch, beta=0.5, desirable_weight=1.0, undesirable_weight=2.0)
        assert last["loss"] < 0.6 * first["loss"]
        assert last["desirable_rewards/mean"] > 0.5 > -0.5 > last["undesirable_rewards/mean"]


def test_labels_of_one_kind_are_told(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    batch = rated(lab)
    for label, said in ((1, "answers are desirable: KTO learns from both"), (0, "answers are undesirable"), (None, "")):
        table = batch.fetch()
        if label is not None:
            table["desirable"] = torch.full((batch.rows,), label)
        with lab.kept("actor"):
            lab.actor.update_kto(lab.put(table, meta=batch.meta))
        told = capsys.readouterr().err
        assert said in told and ("KTO learns from both kinds" in told) == bool(said)


def test_ktos_reference_point_is_that_of_the_weights_before_each_step(tmp_path: Path) -> None:
    """Two minibatches, one optimizer step each: the second's reference point and loss, by enumeration, are those of the
    weights after the first step."""
    with open_lab("point", tmp_path, minibatches=2) as lab:
        batch = rated(lab)
        for _ in range(6):  # away from the reference, so that the point is above 0
            lab.actor.update_kto(batch, beta=0.2)
        scored = lab.actor.compute_feedback_log_prob(batch, beta=0.2)
        held = lab.last_metrics["compute_feedback_log_prob"]
        gap = numbers(scored, "mismatched_log_prob") - numbers(scored, "ref_mismatched_log_prob")
        assert held["kl"] == pytest.approx(max(0.0, float(gap.double().mean())), rel=1e-5)
        assert held["kl"] > 0.01
        told = lab.actor.update_kto(batch, beta=0.2)
        after = told["kl"] * 2 - told["first_minibatch/kl"]
        half = [slice(0, 4), slice(4, 8)]
        points = [max(0.0, float(gap[rows].double().mean())) for rows in half]
        # which rows are the first minibatch is the deal's choice: one of the halves, or the odd rows
        assert any(told["first_minibatch/kl"] == pytest.approx(point, rel=1e-4) for point in points)
        # the second point moved with the first step
        assert not any(after == pytest.approx(point, rel=1e-4) for point in points)


@pytest.mark.parametrize("micro_batch_tokens", [40, pytest.param(120, marks=pytest.mark.thorough)])
def test_micro_batches_do_not_change_the_updates(lab: wb.Workbench, tmp_path: Path, micro_batch_tokens: int) -> None:
    pairs, feedback = lab.pairs(PAIRS).next(8).fetch(), lab.feedback(RATED).next(8).fetch()
    found = []
    for budget in (4096, micro_batch_tokens):
        with open_lab(f"cut{budget}", tmp_path, micro_batch_tokens=budget, learning_rate=1e-3) as cut:
            batch = cut.reference.compute_ref_pair_log_prob(cut.put(pairs))
            single = cut.reference.compute_ref_feedback_log_prob(cut.put(feedback))
            found.append(
                [cut.actor.update_ipo(batch), cut.actor.update_orpo(batch), cut.actor.update_kto(single, epochs=3)]
            )
    assert found[0][2]["kl"] > 0
    for whole, parts in zip(*found, strict=True):
        assert whole.keys() == parts.keys()
        for name, value in whole.items():
            assert parts[name] == pytest.approx(value, rel=1e-3, abs=5e-5), name


def test_one_step_lowers_the_loss_by_the_square_of_the_gradient(tmp_path: Path) -> None:
    """A finite difference through the whole stage: against the gradient g by a step s, the loss moves by -s |g|^2.

    KTO's reference point moves too, which has no gradient: with as many good answers as bad ones, at the reference, the
    loss does not depend on it.
    """
    step, large = 1e-5, 1e4  # AdamW with so large an eps is plain descent with the rate learning_rate / eps
    training = {"learning_rate": step * large, "max_grad_norm": 0.0, "eps": large, "betas": (0.0, 0.999)}
    with open_lab("slope", tmp_path, **training) as lab:
        pairs = lab.reference.compute_ref_pair_log_prob(lab.pairs(PAIRS).next(8))
        updates = ((lab.actor.update_kto, rated(lab)), (lab.actor.update_ipo, pairs), (lab.actor.update_orpo, pairs))
        for update, batch in updates:
            first, second = update(batch), update(batch)
            assert first["loss"] - second["loss"] == pytest.approx(step * first["grad_norm"] ** 2, rel=0.1)


def test_algorithms_run_their_lines(lab: wb.Workbench) -> None:
    pairs, feedback = lab.pairs(PAIRS, held_out=2), lab.feedback(RATED, held_out=2)
    algorithms: list[tuple[Any, list[str]]] = [
        (wb.IPO(lab, pairs, rows=3), ["pairs", "compute_ref_pair_log_prob", "update_ipo"]),
        (wb.ORPO(lab, pairs, rows=3), ["pairs", "update_orpo"]),
        (wb.KTO(lab, feedback, rows=3), ["feedback", "compute_ref_feedback_log_prob", "update_kto"]),
    ]
    for algorithm, stages in algorithms:
        assert algorithm.graph().names == stages
        with lab.kept("actor"):
            frame = algorithm.run(2)
        assert frame[f"{stages[-1]}/loss"].notna().all()
    scored = lab.actor.compute_feedback_log_prob(lab.reference.compute_ref_feedback_log_prob(feedback.held_out))
    assert scored.rows == 2
    assert lab.last_metrics["compute_feedback_log_prob"]["preference_loss"] == pytest.approx(0.5, abs=1e-6)


def test_what_is_wrong_is_said(lab: wb.Workbench) -> None:
    with expect_error(BadInput, value="row 1 of a list: label='good'", rule="true or false"):
        lab.feedback([RATED[0], {**RATED[1], "label": "good"}])
    with expect_error(BadInput, value="has 'prompt', 'completion'", remedy="a column 'label'"):
        lab.feedback([{"prompt": "a", "completion": "b"}])
    with expect_error(BadInput, value=r"KTO\.rows=1"):
        wb.KTO(lab, lab.feedback(RATED), rows=1)
    alone = lab.feedback(RATED)
    with expect_error(BadInput, value="one row of feedback", remedy="at least 2"):  # its mismatched answer is its own
        alone.next(1)
    assert alone.drawn == 0
    with expect_error(BadInput, remedy=r"make them with lab\.feedback"):
        wb.KTO(lab, lab.pairs(PAIRS), rows=2)
    with expect_error(BadInput, value="beta=0"):
        wb.IPO(lab, lab.pairs(PAIRS), rows=2, beta=0)
    batch = lab.feedback(RATED).next(4)
    with expect_error(UnknownColumn, remedy="run reference.compute_ref_feedback_log_prob first"):
        lab.actor.update_kto(batch)
    table = lab.reference.compute_ref_feedback_log_prob(batch).fetch()
    with expect_error(BadInput, value="'desirable' holds 2"):
        lab.actor.update_kto(lab.put({**table, "desirable": torch.tensor([0, 1, 2, 1])}))
