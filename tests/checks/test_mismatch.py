"""`lab.mismatch`: each precision is that of the model which computes in it, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.checks.mismatch import Mismatch
from workbench.errors import BadInput
from workbench.settings.precision import PRECISIONS


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models: dict[str, Any] = {"actor": TINY, "reference": wb.Model(TINY, dtype="bfloat16")}
    with tiny_lab("mismatch", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


@pytest.fixture(scope="module")
def batch(lab: wb.Workbench) -> Any:
    return lab.actor.generate_sequences(lab.prompts.next(5), max_new_tokens=11, seed=3, temperature=0.7)


def column(batch: Any, name: str) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = batch.fetch([name])[name].values.double().numpy()
    return values


def test_each_precision_is_that_of_a_model_which_computes_in_it(lab: wb.Workbench, batch: Any) -> None:
    before = lab.actor.weight_digests()
    found = lab.mismatch(batch)
    assert lab.actor.weight_digests() == before and found.base == "rollout"
    tokens = found.tokens
    assert list(tokens.columns) == ["row", "token", "token_id", "rollout", *PRECISIONS]
    assert (tokens["rollout"] == column(batch, "rollout_log_prob")).all()
    # the trainer itself, and a frozen model that is held in bf16
    assert (tokens["float32"] == column(lab.actor.compute_log_prob(batch), "old_log_prob")).all()
    assert (tokens["bfloat16_engine"] == column(lab.reference.compute_ref_log_prob(batch), "ref_log_prob")).all()
    means = found.df["mean_gap"]
    assert means["float32"] < 1e-5 < means["float16"] < means["bfloat16"] and means["bfloat16_engine"] > 1e-3
    assert not {name for name in lab.batches()["columns"].explode() if str(name).startswith("log_prob_")}


def test_autocast_is_that_of_a_trainer_in_bfloat16(lab: wb.Workbench, batch: Any, tmp_path: Path) -> None:
    models = {"actor": wb.Model(TINY, dtype="bfloat16")}
    with tiny_lab("bf16", tmp_path, backend="inline", models=models) as other:
        theirs = other.actor.compute_log_prob(other.put(batch.fetch(), meta=batch.meta))
        assert (lab.mismatch(batch).tokens["bfloat16"] == column(theirs, "old_log_prob")).all()


def test_logits_in_float32_are_products_of_float32(lab: wb.Workbench, batch: Any) -> None:
    """Held in bf16 and scored in fp32, the head adds no rounding: the float64 product of the same states is as near."""
    from workbench.workers.roles.reference import computing_in

    module = lab.hosts.backend._hosts["shared-0"].workers["actor"].engine.module  # type: ignore[attr-defined]
    head, seen = module.model.get_output_embeddings(), []
    ids = torch.arange(8, 24)
    with torch.no_grad(), computing_in(module, PRECISIONS["bfloat16_engine_head32"]):
        hidden = module.hidden_states(ids, [16])
        seen.append(head(hidden))
    exact = hidden.double() @ head.weight.double().T
    assert hidden.dtype == torch.bfloat16 and seen[0].dtype == torch.float32
    assert (seen[0] - exact).abs().max() < 1e-5
    assert (head(hidden.float()).bfloat16() - exact).abs().max() > 1e-4  # what rounding the logits would cost


def test_a_merged_adapter_is_that_of_a_model_with_the_sum_as_weights(tmp_path: Path) -> None:
    models = {"actor": wb.Model(TINY, adapter=wb.LoRA(rank=4))}
    with tiny_lab("adapter", tmp_path, backend="inline", models=models, training={"minibatches": 1}) as lab:
        batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=9, seed=3))
        mask = batch.fetch(["response_mask"])["response_mask"]
        lab.actor.update_actor(lab.put({**batch.fetch(), "advantages": mask.like(torch.ones(len(mask.values)))}))
        adapter = {name: digest for name, digest in lab.actor.weight_digests()[0].items() if "lora" in name}
        found = lab.mismatch(batch).tokens.set_index(["row", "token"])
        again = {name: digest for name, digest in lab.actor.weight_digests()[0].items() if "lora" in name}
        assert adapter == again and adapter
        native = column(lab.actor.compute_log_prob(batch), "old_log_prob")
        assert (found["float32"] == native).all()
        lab.actor.save_model(tmp_path / "sum")
        lab.add("reference", wb.Model(str(tmp_path / "sum"), dtype="bfloat16"))
        merged = column(lab.reference.compute_ref_log_prob(batch), "ref_log_prob")
        assert (found["bfloat16_engine_merged"] == merged).all() and (found["bfloat16_engine"] != merged).any()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_same_numbers_on_two_ranks_and_none_where_a_model_is_cut(
    lab: wb.Workbench, batch: Any, tmp_path: Path
) -> None:
    placement = wb.Placement.of({"two": (2, ["actor"])})
    with tiny_lab("two-ranks", tmp_path, models={"actor": TINY}, placement=placement) as two:
        table = two.put(batch.take(range(4)).fetch(), meta=batch.meta)
        pd.testing.assert_frame_equal(lab.mismatch(batch.take(range(4))).tokens, two.mismatch(table).tokens)
        two.actor.relayout((1, 2, 1))
        with expect_error(BadInput, value="a model that is sharded over ranks"):
            two.mismatch(table)


def test_rollouts_of_some_tokens_only_are_held_against_a_precision(lab: wb.Workbench) -> None:
    """The engine's numbers are of the distribution that it sampled from, whatever the precision."""
    batch = lab.actor.generate_sequences(lab.prompts.next(3), max_new_tokens=5, seed=3, top_p=0.3)
    found = lab.mismatch(batch, {"float32": wb.Precision(), "bfloat16": wb.Precision(dtype="bfloat16")})
    assert found.base == "float32" and list(found.df.index) == ["bfloat16"]


def test_the_figures_by_hand() -> None:
    tokens = pd.DataFrame(
        {"row": [0, 0, 1], "token": [0, 1, 0], "token_id": [5, 6, 7], "rollout": [-1.0, -2.0, -3.0],
         "mine": [-1.1, -1.7, -3.0]}
    )  # fmt: skip
    row = Mismatch(tokens, "rollout").df.loc["mine"]
    assert row["mean_gap"] == pytest.approx(0.4 / 3) and row["max_gap"] == pytest.approx(0.3)
    assert row["kl"] == pytest.approx((np.exp(-0.1) - 1 + 0.1 + np.exp(0.3) - 1 - 0.3) / 3)
    assert row["sequence_weight"] == pytest.approx((np.exp(0.2) + 1) / 2)
    assert row["effective_share"] == pytest.approx((np.exp(0.2) + 1) ** 2 / (2 * (np.exp(0.4) + 1)))
    shown = Mismatch(tokens, "rollout")
    assert "3 tokens" in repr(shown) and len(shown.figure()["data"]) == 1


def test_wrong_input(lab: wb.Workbench, batch: Any, tmp_path: Path) -> None:
    for precisions, message in (
        ({}, "must have at least 1 item"),
        ({"a": "bfloat16"}, "must map names to precisions"),
        (["bfloat16"], "must map names to precisions"),
    ):
        with pytest.raises(BadInput, match=message):
            lab.mismatch(batch, precisions)  # type: ignore[arg-type]
    with expect_error(BadInput, value=r"Precision\.dtype='int8'"):
        wb.Precision(dtype="int8")  # type: ignore[arg-type]
    with (
        expect_error(BadInput, value="actor"),
        tiny_lab("judge", tmp_path, backend="inline", models={"critic": TINY}) as other,
    ):
        other.mismatch(batch)


def test_rollouts_of_some_tokens_are_compared_over_the_same_tokens(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=16, seed=3, top_p=0.7, keep_mask=True)
    found = lab.mismatch(batch)
    assert found.base == "rollout" and list(found.tokens.columns)[4:] == [*PRECISIONS, "float32_all_tokens"]
    table = found.df
    assert (
        table["max_gap"]["float32"] < 1e-4 < table["max_gap"]["bfloat16"] < 0.3 < table["max_gap"]["float32_all_tokens"]
    )
    assert table["sequence_weight"]["float32"] == pytest.approx(1, abs=1e-3)
    assert table["sequence_weight"]["float32_all_tokens"] < 0.1 and "float32_all_tokens" in found._repr_html_()
    bare = lab.mismatch(batch.drop("sampling_mask_ids", "sampling_mask_sizes"))
    assert bare.base == "float32" and (bare.tokens["float32"] == found.tokens["float32_all_tokens"]).all()
