"""A model that leaves with its card: what the card tells, and that plain transformers and vLLM read the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, NotFound


def saved(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A trained model's folder, and log-probabilities of two responses as the trainer has them."""
    folder = tmp_path / "model"
    with tiny_lab("leaves_it", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
        algorithm = wb.RLOO(lab, prompts=2, samples=4, kl_coefficient=0.0, sampling=wb.Sampling(max_new_tokens=6))
        algorithm.run(2)
        lab.evaluate("arithmetic/test", n=2, samples=2, sampling=wb.Sampling(max_new_tokens=6))
        batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=6))
        lab.actor.save_model(folder, card=wb.model_card(lab), shard_gb=1e-4)
        assert len(list(folder.glob("*.safetensors"))) > 1
        with pytest.raises(BadInput, match="shard_gb"):
            lab.actor.save_model(tmp_path / "none", shard_gb=0)
        with pytest.raises(NotFound, match="role 'critic'"):
            wb.model_card(lab, "critic")
        table = batch.fetch(["prompt_ids", "response_ids", "old_log_prob"])
    columns = {name: column.rows() for name, column in table.items() if isinstance(column, Ragged)}
    rows = [{name: values[n].tolist() for name, values in columns.items()} for n in range(2)]
    return folder, rows


def test_transformers_reads_what_was_saved_and_the_card_tells_of_the_run(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, rows = saved(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder)
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
        mine = log_probs.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        torch.testing.assert_close(mine, torch.tensor(row["old_log_prob"]), atol=1e-5, rtol=0)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name") and '"rloo"' in card
    # 3: the batch that was drawn by hand began one
    for said in ("actor after 3 iterations", "| reward | ", "arithmetic/test/reward_mean", "RLOO/samples | 4",
                 "| commit | ", "prompts/source | arithmetic", "learning_rate", "leaves_it"):  # fmt: skip
        assert said in card.replace("\\_", "_"), said


@pytest.mark.thorough
def test_vllm_reads_what_was_saved(tmp_path: Path) -> None:
    folder, rows = saved(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    code = (
        "import json, sys; from vllm import LLM, SamplingParams\n"
        "rows = json.load(open(sys.argv[2]))\n"
        "llm = LLM(sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=192)\n"
        "ids = [{'prompt_token_ids': r['prompt_ids'] + r['response_ids']} for r in rows]\n"
        "out = llm.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=0))\n"
        "found = [[next(v.logprob for k, v in p.items() if k == i)"
        " for i, p in zip(r['response_ids'], o.prompt_logprobs[len(r['prompt_ids']):])] for r, o in zip(rows, out)]\n"
        "json.dump(found, open(sys.argv[3], 'w'))\n"
    )
    target = tmp_path / "found.json"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    words = [sys.executable, "-c", code, str(folder), str(tmp_path / "rows.json"), str(target)]
    subprocess.run(["env", *(f"{k}={v}" for k, v in environment.items()), *words], check=True, timeout=300)
    for row, found in zip(rows, json.loads(target.read_text()), strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(row["old_log_prob"]), atol=1e-4, rtol=0)
