"""Times forward and backward passes over rollouts of unequal length, packed and padded, and what logits cost.

    python benchmarks/forward.py [--model smollm2-135m] [--rows 16] [--repeats 2] [--dtype bfloat16]

Lengths are drawn like those of rollouts: prompts of 30 to 150 tokens, short responses (5 to 64) and long ones (20 to
256); both ways cut micro-batches by `Training.micro_batch_tokens`. Prints tokens a second, real ones only, and their
ratio. Then log-probabilities alone against the model's whole logits, on the same padded rows, each in a process of its
own: seconds, and by how much the process's peak memory grew.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from workbench.models.heads import TokenLogProbs, pad_right
from workbench.models.loading import load_causal_lm
from workbench.placement.role_model import AUTOMATIC_TOKENS
from workbench.workers.micro_batches import cut

RESPONSES = {"short": (5, 64), "long": (20, 256)}
BUDGET_TOKENS = AUTOMATIC_TOKENS["cpu"]


def rollouts(rows: int, responses: str) -> list[tuple[Tensor, int]]:
    """(tokens, how many of them are the response) of each row."""
    draw, out = random.Random(0), []
    for _ in range(rows):
        prompt, response = draw.randint(30, 150), draw.randint(*RESPONSES[responses])
        out.append((torch.tensor([draw.randrange(256) for _ in range(prompt + response)]), response))
    return out


def response_positions(rows: list[tuple[Tensor, int]]) -> Tensor:
    """Where, in the rows end to end, the states lie that predict response tokens."""
    ends = torch.tensor([len(tokens) for tokens, _ in rows]).cumsum(0).tolist()
    return torch.cat([torch.arange(end - response - 1, end - 1) for end, (_, response) in zip(ends, rows, strict=True)])


def log_probs_alone(head: TokenLogProbs, rows: list[tuple[Tensor, int]]) -> Tensor:
    """Log-probabilities of all response tokens by our head."""
    ids, positions = torch.cat([tokens for tokens, _ in rows]), response_positions(rows)
    return head(ids, tuple(len(tokens) for tokens, _ in rows), positions, ids[positions + 1])[0]


def whole_logits(head: TokenLogProbs, rows: list[tuple[Tensor, int]]) -> Tensor:
    """The same as a plain call of the model gives them."""
    ids, mask, position_ids = pad_right([tokens for tokens, _ in rows], 0)
    logits = head.model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
    chosen = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    responses = torch.zeros_like(ids[:, 1:], dtype=torch.bool)
    for row, (tokens, response) in enumerate(rows):
        responses[row, len(tokens) - 1 - response : len(tokens) - 1] = True
    return chosen[responses]


Way = Callable[[TokenLogProbs, list[tuple[Tensor, int]]], Tensor]
WAYS: dict[str, Way] = {"log-probs alone": log_probs_alone, "whole logits": whole_logits}


def seconds(
    head: TokenLogProbs, batches: list[list[tuple[Tensor, int]]], way: Way, dtype: str, backward: bool, repeats: int
) -> float:
    """The fastest of some passes over all micro-batches."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        for rows in batches:
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
            with autocast, torch.set_grad_enabled(backward):
                loss = way(head, rows).mean()
            if backward:
                loss.backward()
        taken.append(time.perf_counter() - start)
    head.zero_grad()
    return min(taken)


def packed_and_padded(model: str, count: int, repeats: int, dtype: str) -> None:
    """Print tokens a second of both ways."""
    head = TokenLogProbs(load_causal_lm(model))
    assert head.padded_because is None, head.padded_because
    print(f"{'responses':10} {'pass':18} {'padded':>12} {'packed':>12}  packed / padded")
    for responses in RESPONSES:
        rows = rollouts(count, responses)
        lengths = [len(tokens) for tokens, _ in rows]
        for backward in (False, True):
            best = {"padded": 0.0, "packed": 0.0}
            for _ in range(repeats):  # in turn, so that both see the same machine
                for way in best:
                    head.padded_because = "to compare" if way == "padded" else None
                    groups = cut(lengths, BUDGET_TOKENS, padded=way == "padded")
                    batches = [[rows[i] for i in group] for group in groups]
                    taken = seconds(head, batches, log_probs_alone, dtype, backward, 1)
                    best[way] = max(best[way], sum(lengths) / taken)
            name = "forward + backward" if backward else "forward"
            units = " ".join(f"{tokens_s:8.0f} t/s" for tokens_s in best.values())
            print(f"{responses:10} {name:18} {units}  {best['packed'] / best['padded']:.2f}", flush=True)


def cost(model: str, count: int, repeats: int, dtype: str, way: str, backward: bool) -> tuple[float, int]:
    """(seconds, bytes by which peak memory grew) of one way over one micro-batch."""
    head = TokenLogProbs(load_causal_lm(model))
    rows = rollouts(count, "long")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = seconds(head, [rows], WAYS[way], dtype, backward, repeats)
    return taken, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def logits(model: str, count: int, repeats: int, dtype: str) -> None:
    """Print seconds and memory of both ways, and the ratios."""
    print(f"{'pass':18} " + " ".join(f"{way:>24}" for way in WAYS) + "  time and memory, alone / whole")
    for backward in (False, True):
        found = []
        for way in WAYS:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                found.append(process.submit(cost, model, count, repeats, dtype, way, backward).result())
        cells = " ".join(f"{taken:12.2f} s {peak / 2**20:5.0f} MiB" for taken, peak in found)
        (alone_s, alone_bytes), (whole_s, whole_bytes) = found
        name = "forward + backward" if backward else "forward"
        print(f"{name:18} {cells}  {alone_s / whole_s:.2f} {alone_bytes / max(1, whole_bytes):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    given = parser.parse_args()
    print(f"{given.model}, {given.rows} rows, {given.dtype}, {os.cpu_count()} cores")
    packed_and_padded(given.model, given.rows, given.repeats, given.dtype)
    logits(given.model, min(given.rows, 8), given.repeats, given.dtype)


if __name__ == "__main__":
    main()
