"""However a minibatch is cut, the shares add up to the definition on the whole, and so do their gradients."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.objectives.aggregation import Aggregation, aggregate, denominator

LONGEST = 16
every_mode = pytest.mark.parametrize("how", get_args(Aggregation))


def minibatch(seed: int) -> tuple[Tensor, Tensor]:
    """Per-token losses and a mask of 12 responses, of which one has no valid token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 10, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 11, (12, 1), generator=generator)
    mask = (torch.arange(10) < lengths) & (torch.rand(12, 10, generator=generator) < 0.8)
    mask[4] = False
    return x, mask


def by_definition(x: Tensor, mask: Tensor, how: Aggregation) -> float:
    rows = [[x[i, t].item() for t in range(x.shape[1]) if mask[i, t]] for i in range(len(x)) if mask[i].any()]
    return {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "sequence-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "sequence-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "fixed-length": sum(map(sum, rows)) / (len(rows) * LONGEST),
    }[how]


def test_by_hand() -> None:
    x, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    expected = {
        "token-mean": (4.0, 2.5),
        "sequence-mean-token-mean": (2.0, 3.0),
        "sequence-mean-token-sum": (2.0, 5.0),
        "fixed-length": (10.0, 1.0),
    }
    for how in get_args(Aggregation):
        whole = denominator(mask, how, max_response_tokens=5)
        assert (whole.item(), aggregate(x, mask, how, whole).item()) == expected[how]
        assert aggregate(x, mask, how, whole.item()).item() == expected[how][1]


@every_mode
def test_shares_of_random_micro_batches_add_up(how: Aggregation) -> None:
    for seed in range(5):
        x, mask = minibatch(seed)
        x.requires_grad_()
        whole = denominator(mask, how, LONGEST)
        value = aggregate(x, mask, how, whole)
        assert value.item() == pytest.approx(by_definition(x, mask, how), abs=1e-12)
        (slope,) = torch.autograd.grad(value, x)
        assert (slope[~mask] == 0).all()
        assert (slope[mask] > 0).all()

        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        parts = torch.tensor_split(order, [1, 3, 8])  # as several ranks with several micro-batches each would hold them
        # Each micro-batch is cut to its own longest response, as a worker does.
        cut = [(rows, int(mask[rows].any(0).nonzero().max()) + 1 if mask[rows].any() else 0) for rows in parts]
        total = sum(denominator(mask[rows, :n], how, LONGEST) for rows, n in cut)
        assert total == whole
        shares = torch.stack([aggregate(x[rows, :n], mask[rows, :n], how, total) for rows, n in cut])
        torch.testing.assert_close(shares.sum(), value, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(shares.sum(), x)[0], slope, rtol=0, atol=1e-12)


@every_mode
def test_rows_that_only_fill_up_change_nothing(how: Aggregation) -> None:
    x, mask = minibatch(0)
    fuller_x = torch.cat((x, torch.full((3, 10), torch.nan, dtype=torch.float64)))
    fuller_mask = torch.cat((mask, torch.zeros(3, 10, dtype=torch.bool)))
    whole = denominator(mask, how, LONGEST)
    assert denominator(fuller_mask, how, LONGEST) == whole
    assert aggregate(fuller_x, fuller_mask, how, whole) == aggregate(x, mask, how, whole)


@every_mode
def test_nothing_valid(how: Aggregation) -> None:
    for tokens in [0, 3]:
        x, mask = torch.ones(2, tokens, requires_grad=True), torch.zeros(2, tokens)
        whole = denominator(mask, how, LONGEST)
        share = aggregate(x, mask, how, whole)
        (slope,) = torch.autograd.grad(share, x)
        assert whole == 0
        assert share == 0
        assert not slope.any()


def test_single_precision_stays_single_whatever_the_denominator() -> None:
    x, mask = torch.ones(1, 2), torch.ones(1, 2)
    whole = denominator(mask, "token-mean")
    assert whole.dtype == torch.float64
    assert aggregate(x, mask, "token-mean", whole).dtype == torch.float32
    assert aggregate(x.bfloat16(), mask, "token-mean", whole).dtype == torch.float32


def test_bad_input() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    for call in (lambda: denominator(mask, "mean"), lambda: aggregate(x, mask, "mean", 1.0)):  # type: ignore[arg-type]
        with expect_error(BadInput, value="how='mean'"):
            call()
    with expect_error(BadInput, value=r"mask_BT has shape \[2, 3\], x_BT has shape \[2, 1\]"):
        aggregate(x[:, :1], mask, "token-mean", 1.0)
