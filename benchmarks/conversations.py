"""Conversations with slow tools: seconds beside the longest conversation, and beside the engine without tools.

A tool answers after 0.05 to 5 s, most of the time soon (log-uniform, drawn from the row's seed). Ideal is the longer
of two times, each measured here: of the longest conversation by itself (its tools' waits, and its tokens at the speed
of a row that is alone), and of the engine for all turns where the tools answer at once.

    make bench NAME=conversations ARGS="--conversations 256"
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import workbench as wb
from benchmarks.models import folder

ENDS = tuple(range(0, 49152, 24))  # a turn has about 24 tokens


def waits_of(seed: int, turns: int) -> list[float]:
    """Seconds that the tool takes for each turn."""
    draw = random.Random(seed)
    return [0.05 * 100 ** draw.random() ** 2 for _ in range(turns)]


class Tool:
    """Answers a number of turns that depends on the row, after its waits times `slow`."""

    def __init__(self, slow: float) -> None:
        self.slow = slow

    def reset(self, prompt: str, sample_seed: int) -> None:
        self.turns = 1 + random.Random(sample_seed).randrange(8)
        self.waits = waits_of(sample_seed, self.turns)

    async def step(self, response: str) -> tuple[str, float, bool]:
        wait_s = self.waits.pop(0)
        await asyncio.sleep(self.slow * wait_s)
        return "\nok\n", wait_s, not self.waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "transformers"))
    options = parser.parse_args()
    rows = options.conversations
    with (
        tempfile.TemporaryDirectory() as runs,
        wb.open(
            "conversations",
            models={"actor": folder(options.model)},
            prompts="arithmetic",
            backend="inline",
            generation=wb.Generation(engine=options.engine, max_model_tokens=512),
            runs=Path(runs),
        ) as lab,
    ):
        prompts = lab.prompts.next(rows)

        def run(slow: float, batch: wb.Batch) -> tuple[float, wb.Batch]:
            began_s = time.monotonic()
            made = lab.actor.generate_sequences(
                batch, environment=functools.partial(Tool, slow), max_turns=8, max_new_tokens=320, seed=1,
                stop_token_ids=ENDS, concurrency=rows, call_timeout_s=60, ignore_eos=True,
            )  # fmt: skip
            return time.monotonic() - began_s, made

        run(0.0, prompts.take([0]))
        engine_s, made = run(0.0, prompts)
        columns: dict[str, Any] = made.fetch(["environment_rewards", "turns"])
        waits_s = [float(row.sum()) for row in columns["environment_rewards"].rows()]
        longest = max(range(rows), key=waits_s.__getitem__)
        longest_s, _ = run(1.0, prompts.take([longest]))
        all_s, _ = run(1.0, prompts)
        in_step_s = sum(
            max((row[turn] for row in _turn_waits(columns) if turn < len(row)), default=0.0) for turn in range(8)
        )
    ideal_s = max(engine_s, longest_s)
    print(f"conversations {rows}, turns {int(columns['turns'].sum())}, tools' seconds {math.fsum(waits_s):.0f}")
    print(f"engine alone                  {engine_s:8.2f} s")
    print(f"longest conversation alone    {longest_s:8.2f} s")
    print(f"all together                  {all_s:8.2f} s, of ideal {ideal_s / all_s:.2f}")
    in_step_s += engine_s
    print(f"turn by turn in step, at best {in_step_s:8.2f} s, of ideal {ideal_s / in_step_s:.2f}")


def _turn_waits(columns: dict[str, Any]) -> list[list[float]]:
    return [[x for x in row.tolist() if x] for row in columns["environment_rewards"].rows()]


if __name__ == "__main__":
    main()
