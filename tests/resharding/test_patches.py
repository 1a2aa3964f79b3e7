"""Patches of weights: exact to the bit, of the bytes that a formula says, wherever slices are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tests.engines.training_ranks import run_ranks
from tests.resharding.counting import Held
from tests.resharding.patch_ranks import patched_syncs
from workbench.placement import Layout
from workbench.resharding.engine import view_of
from workbench.resharding.patches import MOST, Change, Patch, change
from workbench.resharding.plan import WeightShard
from workbench.resharding.strategies import ZeroSync, plan_sync
from workbench.resharding.weights import model_weights

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def moved(old: Tensor, share: float, by: int = 1) -> Tensor:
    """With so many elements changed by at most `by` of their last places."""
    generator = torch.Generator().manual_seed(1)
    bits = old.clone().view(INTEGERS[old.dtype])
    which = torch.rand(old.shape, generator=generator) < share
    bits[which] += torch.randint(1, by + 1, (int(which.sum()),), generator=generator).to(bits.dtype)
    return bits.view(old.dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(INTEGERS[left.dtype]), right.view(INTEGERS[right.dtype]))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("by", [1, 300, 30_000])
@pytest.mark.parametrize("shape", [(9000, 64), (7, 9), (1, 1)], ids=str)
def test_a_patch_makes_the_new_version_of_the_old_one(shape: tuple[int, int], by: int, dtype: torch.dtype) -> None:
    old = torch.randn(shape).to(dtype)
    for share in (0.0, 1e-4, 0.02, 0.2, 0.45):
        new = moved(old, share, by)
        found = change(old, new)
        if found is None:  # of a small one, more than half changed
            assert old.numel() < 100
            continue
        patch = Patch.of(found, old.numel())
        sent = Patch.from_bytes(patch.as_bytes(), old.numel(), old.element_size())
        for one in (patch, sent):
            target = old.clone()
            one.add_to(target)
            assert same_bits(target, new)
        # in a matrix of which it is some columns
        wide = torch.zeros(shape[0], shape[1] + 3, dtype=dtype)
        wide[:, 2 : shape[1] + 2] = old
        patch.add_to(wide[:, 2 : shape[1] + 2])
        assert same_bits(wide[:, 2 : shape[1] + 2].contiguous(), new)
        assert patch.is_bitmap == (share >= 0.2) or old.numel() < 100
        assert max(len(patch.small), len(patch.wide)) == int(
            (old.view(INTEGERS[dtype]) != new.view(INTEGERS[dtype])).sum()
        )
    assert change(old, moved(old, 0.7)) is None or old.numel() == 1


def test_bits_count_and_not_values() -> None:
    old = torch.tensor([[0.0, torch.nan, 1.0, torch.inf, -1.0, 0.5, 2.0, 3.0]])
    new = torch.tensor([[-0.0, torch.nan, 1.0, torch.nan, -1.0, 0.5, 2.0, 3.0]])
    found = change(old, new)
    assert found is not None
    assert found.positions.tolist() == [0, 3]
    Patch.of(found, 8).add_to(old)
    assert same_bits(old, new)


def patch_bytes(elements: float, changed: float, item_bytes: int) -> float:
    """The bytes of a patch of a slice of which so many elements changed, anywhere, by one rounding each: what a plan of
    whole slices becomes. A gap of more than 255 takes more bytes."""
    if changed > MOST * elements:
        return elements * item_bytes
    kept = 1 - changed / max(elements, 1)
    jumps = kept**255 / (1 - kept**255) if kept < 1 else 0.0
    return min(changed * (1 + jumps), elements / 8) + changed


def test_the_bytes_are_those_of_the_formula() -> None:
    """At 1e-6 in bfloat16 about 0.6 % of the elements change, by one rounding: 0.7 % of the bytes."""
    n = 2**20
    for share in (0.001, 0.006, 0.05, 0.3):
        old = torch.randn(1, n).bfloat16()
        found = change(old, moved(old, share))
        assert found is not None
        patch, changed = Patch.of(found, n), len(found.positions)
        gaps = np.diff(found.positions, prepend=-1) - 1
        assert patch.nbytes == min(changed + (gaps // 255).sum(), n // 8) + changed
        assert patch.nbytes == pytest.approx(patch_bytes(n, changed, 2), rel=0.02)
        assert patch.whole_bytes == 2 * n
    assert patch_bytes(n, n, 2) == 2 * n
    assert patch_bytes(n, 0, 2) == 0
    # positions further apart than a byte says
    far = Change(np.array([0, 255, 256 + 255, 100_000]), np.array([1, -1, 5, -128], np.int16))
    assert Patch.of(far, 2 * n).nbytes == 4 + (0 + 0 + 1 + 390) + 4 + 2  # -128 is the sign of a wide one
    target = torch.zeros(1, 2 * n, dtype=torch.bfloat16)
    Patch.of(far, 2 * n).add_to(target)
    assert target.view(torch.int16)[0].nonzero()[:, 0].tolist() == far.positions.tolist()


def test_the_part_of_a_box() -> None:
    """Of a shard of two boxes of a weight [12, 10], in any box inside them."""
    shard = WeightShard(((2, 6, 0, 10), (8, 12, 3, 9)), (64,))
    old = torch.randn(64).bfloat16()
    new = moved(old, 0.3)
    found = change(old, new)
    assert found is not None
    for box in ((2, 6, 0, 10), (3, 5, 0, 10), (2, 6, 4, 7), (9, 12, 3, 9), (8, 10, 5, 6), (10, 10, 3, 9)):
        target = view_of(old, shard, box).clone()
        Patch.of(found.within(shard, box), target.numel()).add_to(target)
        assert same_bits(target, view_of(new, shard, box).contiguous())
    with pytest.raises(ValueError, match="is inside none"):
        found.within(shard, (0, 3, 0, 10))


CONFIG: Any = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, max_position_embeddings=64,
)  # fmt: skip


@pytest.mark.parametrize("how", ["tensor", "pipeline", "zero"])
def test_ranks_send_each_other_what_changed(how: str) -> None:
    """Two ranks that train in slices and generate with whole weights: 40 versions, forgotten once on the way."""
    weights = model_weights(CONFIG, dtype="bfloat16")
    plan: Any
    if how == "zero":
        plan, before = ZeroSync(weights, 2, 1), Held(CONFIG, (1, 1, 2), [0, 1], "zero")
    else:
        layout = Layout(1, 2, 1) if how == "tensor" else Layout(2, 1, 1)
        plan = plan_sync(weights, layout.generating(1), "hybridflow")
        before = Held(CONFIG, (layout.p, layout.t, layout.d), [0, 1])
    assert run_ranks(patched_syncs, 2, plan, weights, CONFIG, before, 1, 40) == [[], []]
