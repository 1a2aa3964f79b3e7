"""Values of the state after the last token, on rows that fill all positions that a model has learned."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2Model

import workbench as wb
from tests.cases import TINY, tiny_lab
from workbench.batches.columns import Ragged, Table
from workbench.models import load_tokenizer

POSITIONS = 16


def test_final_values_need_no_position_more(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=264, n_positions=POSITIONS, n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    GPT2Model(config).save_pretrained(tmp_path / "gpt2")
    load_tokenizer(TINY).save_pretrained(tmp_path / "gpt2")
    models = {"actor": TINY, "critic": wb.Model(str(tmp_path / "gpt2"))}
    with tiny_lab("positions", tmp_path, models=models, backend="inline") as lab:
        ids = torch.randint(8, 264, (2, POSITIONS))
        responses = Ragged.of([ids[0, 4:], ids[1, 5:12]], torch.int64)
        table: Table = {
            "prompt_ids": Ragged.of([ids[0, :4], ids[1, :5]], torch.int64),
            "response_ids": responses,
            "response_mask": responses.like(torch.ones(19, dtype=torch.bool)),
            "values": responses.like(torch.ones(19)),
            "returns": responses.like(torch.ones(19)),
        }
        batch = lab.put(table)
        lab.critic.update_critic(batch, clip=None)  # the values of a new critic are all 0
        made = lab.critic.compute_values(batch, final=True).fetch(["values", "final_values"])
        plain = lab.critic.compute_values(batch).fetch(["values"])["values"]
        values, final = made["values"], made["final_values"]
        assert isinstance(values, Ragged) and isinstance(plain, Ragged) and isinstance(final, torch.Tensor)
        torch.testing.assert_close(values.values, plain.values)
        assert final.shape == (2,) and final.abs().min() > 0
        # of the row that leaves room: the value before one token more
        longer: Table = {
            "prompt_ids": Ragged.of([ids[1, :5]], torch.int64),
            "response_ids": Ragged.of([ids[1, 5:13]], torch.int64),
        }
        after = lab.critic.compute_values(lab.put(longer)).fetch(["values"])["values"]
        assert isinstance(after, Ragged)
        torch.testing.assert_close(final[1], after.values[-1])
