"""What FSDP2 and ZeRO-3 hold on a rank is what a `Distribution` says, and goes from there to generation layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import GPT2Config, LlamaConfig

from tests.engines.training_ranks import run_ranks
from tests.expected import expect_error
from tests.resharding.counting import Held, count
from tests.resharding.sharded_ranks import GENERATE, everything
from workbench.errors import BadInput
from workbench.resharding.strategies import ZeroSync
from workbench.resharding.weights import model_weights

RANKS = 4
# Sizes that four ranks do not divide, and one (the single key-value head) that is smaller than four.
CONFIG: Any = LlamaConfig(
    vocab_size=97,
    hidden_size=30,
    intermediate_size=22,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    attention_bias=True,
    tie_word_embeddings=True,
    initializer_range=0.2,
    max_position_embeddings=64,
    use_cache=False,
)


@pytest.mark.thorough  # the same of ZeRO-3 on two ranks: tests/workers/test_syncs_of_shards.py
def test_the_shards_of_fsdp_and_zero_go_to_generation_layouts() -> None:
    found = run_ranks(everything, RANKS, CONFIG, model_weights(CONFIG, dtype="float32"))
    for rank, seen in enumerate(found):
        assert len(seen.wrong) == 2 * (1 + len(GENERATE)) + 2 * len(GENERATE)
        assert {f"rank {rank}, {case}": wrong for case, wrong in seen.wrong.items() if wrong} == {}
        assert seen.clean.sent == seen.clean.received != 0
        assert seen.clean.differ == ()
    for rank in (0, 2, 3):
        assert found[rank].flipped == found[rank].clean
    flipped = found[1].flipped
    assert flipped.sent == found[1].clean.sent != flipped.received
    ((name, source),) = flipped.differ
    assert name.startswith("model.layers.1.")
    assert source == found[1].flipped_from >= 0


@pytest.mark.parametrize("t_g", GENERATE)
@pytest.mark.parametrize("whole", [False, True])
def test_a_sync_of_zero_moves_what_an_independent_count_says(t_g: int, whole: bool) -> None:
    ranks = list(range(RANKS))
    before, after = (
        Held(CONFIG, size, ranks, kind) for size, kind in (((1, 1, 4), "zero"), ((1, t_g, 4 // t_g), "replicas"))
    )
    figures = ZeroSync(model_weights(CONFIG, dtype="float32"), RANKS, t_g, whole=whole).figures()
    expected = count(CONFIG, before, after, ranks, 4, everything=whole, nearest=lambda rank: [ranks])
    assert np.array_equal(figures.matrix, expected.matrix)
    assert np.array_equal(figures.peak_parameter, expected.peak)
    assert np.array_equal(figures.kept_twice, expected.kept)


def test_a_model_whose_cut_is_not_known_goes_whole() -> None:
    config = GPT2Config(vocab_size=40, n_embd=8, n_layer=2, n_head=2, n_positions=16)
    with expect_error(BadInput, value="that cannot be sharded"):
        model_weights(config)
    weights = model_weights(config, unknown="whole")
    plan = ZeroSync(weights, 2, 1)
    assert plan.figures().received.sum() == weights.nbytes  # of what two ranks hold between them, each lacks the rest
