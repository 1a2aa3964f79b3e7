"""`Training.head_dtype="float32"`: logits are products of fp32, in training, scoring and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, hosts_of, tiny_lab, vowels
from tests.engines.training_ranks import run_ranks
from tests.expected import expect_error
from tests.workers.head_ranks import Headed, run_headed
from workbench.errors import BadInput
from workbench.models.heads import TokenLogProbs
from workbench.models.loading import load_causal_lm
from workbench.models.logits import compute_in_float32
from workbench.placement import Layout
from workbench.placement.memory import activation_bytes
from workbench.placement.role_model import RoleModel

BF16 = {"actor": wb.Model(TINY, dtype="bfloat16"), "reference": wb.Model(TINY, dtype="bfloat16"), "reward": vowels}


def test_roles_score_as_models_that_compute_so(tmp_path: Path) -> None:
    """To the last bit: the actor as `lab.mismatch` computes it from fp32 weights, the reference from bf16 ones."""
    training = {"head_dtype": "float32"}
    with tiny_lab("head", tmp_path, models=BF16, training=training, backend="inline") as lab:
        batch = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=9, seed=3)
        old = lab.actor.compute_log_prob(batch).fetch(["old_log_prob"])["old_log_prob"]
        ref = lab.reference.compute_ref_log_prob(batch).fetch(["ref_log_prob"])["ref_log_prob"]
        tokens = lab.mismatch(batch).tokens
        assert (tokens["bfloat16_head32"] == old.values.double().numpy()).all()
        assert (tokens["bfloat16"] != tokens["bfloat16_head32"]).any()
        generator = hosts_of(lab)["shared-0"].workers["actor"].generator
        with torch.no_grad(), generator._autocast():  # it samples from the trainer's own module
            assert generator._model(torch.tensor([[1, 40]])).logits.dtype == torch.float32
        module = TokenLogProbs(load_causal_lm(TINY, dtype=torch.bfloat16))
        head: Any = module.model.get_output_embeddings()
        head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), head.weight.float())
        row = batch.fetch(["prompt_ids", "response_ids"])
        prompt, response = (row[name].rows()[0] for name in ("prompt_ids", "response_ids"))
        ids, start = torch.cat([prompt, response]), len(prompt) - 1
        with torch.no_grad():
            expected, _ = module(ids, [len(ids)], torch.arange(start, len(ids) - 1), response)
        torch.testing.assert_close(ref.rows()[0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_product_in_fp32(stored: torch.dtype) -> None:
    """To the last bit, with fp32 weights under autocast and with weights held in bf16."""
    gradients = []
    for by_hand in (False, True):
        module = TokenLogProbs(load_causal_lm(TINY, dtype=stored), float32_head=not by_hand)
        head: Any = module.model.get_output_embeddings()
        if by_hand:

            def product(hidden: torch.Tensor, head: Any = head) -> torch.Tensor:
                with torch.autocast("cpu", enabled=False):
                    return torch.nn.functional.linear(hidden.float(), head.weight.float())

            head.forward = product
        with torch.autocast("cpu", torch.bfloat16, enabled=stored == torch.float32):
            log_probs, entropy = module(torch.arange(8, 24), [16], torch.arange(15), torch.arange(9, 24), 0.7, True)
        (log_probs.sum() + entropy.sum()).backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 5
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@pytest.mark.slow
def test_a_step_is_the_same_in_every_layout() -> None:
    """Of an actor in bf16 with an fp32 head: 1 and 2 ranks, the vocabulary cut over 2, ZeRO-3 with bf16 weights."""
    cases = [Headed(), Headed(engine="zero3")]
    ((plain, zero, same),) = run_ranks(run_headed, 1, [*cases, Headed(head_dtype="same")])
    both = run_ranks(run_headed, 2, [*cases, Headed(layout=Layout(1, 2, 1))])
    for rank in both:
        for found, expected in zip(rank, (plain, zero, plain), strict=True):
            assert found["norm"] == pytest.approx(expected["norm"], rel=0.02)
            assert found["head"] == torch.float32
    assert same["head"] == torch.bfloat16 and same["norm"] == pytest.approx(plain["norm"], rel=0.1)


def test_what_is_refused() -> None:
    with expect_error(BadInput, remedy=r"write Training\(head_dtype='float32'\)"):
        wb.Generation(engine="transformers", head_dtype="float32")
    model = load_causal_lm("tiny-llama")
    model.set_output_embeddings(torch.nn.Bilinear(2, 2, 2))
    with expect_error(BadInput, value="an output head of type Bilinear"):
        compute_in_float32(model)


@pytest.mark.parametrize(("engine", "weights"), [("torch", 0), ("zero2", 1)])
def test_the_memory_of_a_pass_has_the_copies(engine: str, weights: int) -> None:
    config = load_causal_lm(TINY).config
    config.vocab_size = 50_000
    found = []
    for head_dtype in ("same", "float32"):
        training = wb.Training(
            engine="torch" if engine == "torch" else "deepspeed", zero_stage=2, head_dtype=head_dtype,
            micro_batch_tokens=64, activation_checkpointing=True,
        )  # fmt: skip
        role = RoleModel(config=config, head="lm", dtype="bfloat16", training=training, trained=True)
        found.append(activation_bytes(role, Layout(), 0))
    table = config.vocab_size * config.hidden_size * 4
    assert found[1] - found[0] == 64 * config.vocab_size * 2 + weights * table
