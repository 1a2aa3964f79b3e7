"""An environment for tests: the policy writes sums, the calculator the results."""

from __future__ import annotations

from typing import Any

import workbench as wb
from workbench.batches.columns import Ragged

EQUALS = 36  # the token "=" of the tiny models, which write a token a byte
# digits, plus and equals are all that is likely: turns such as "3+45="
SUMS = {**dict.fromkeys(range(23, 33), 12.0), 18: 13.0, EQUALS: 15.0}


def value(turn: str) -> int:
    """The sum that a turn asks for."""
    return sum(int(part) for part in turn.removesuffix("=").split("+") if part)


def answer(turn: str) -> tuple[str, float]:
    """What the calculator says to a turn, and the turn's reward."""
    return f"{value(turn) % 1000};", value(turn) % 7 / 7


class Calculator:
    """Answers each turn; over when a sum divides by 5, or the row says after how many turns."""

    def reset(self, prompt: str, sample_seed: int, **row: Any) -> str:
        self.prompt, self.seed = prompt, sample_seed
        return f"#{sample_seed % 10} "

    def step(self, response: str) -> tuple[str, float, bool]:
        observation, reward = answer(response)
        return observation, reward, value(response) % 5 == 0


def sums(**changes: Any) -> dict[str, Any]:
    """Arguments of `generate_sequences`, or fields of `Sampling`, for a conversation with the calculator."""
    return {
        "environment": Calculator, "max_turns": 3, "max_new_tokens": 48, "stop": ("=",), "logit_bias": SUMS, **changes
    }  # fmt: skip


def segments(batch: wb.Batch, column: str = "response_ids") -> list[list[tuple[bool, list[Any]]]]:
    """For each row, its parts in order: whether the policy wrote it, and the part of the column."""
    table = batch.fetch([column, "response_mask"])
    values, masks = table[column], table["response_mask"]
    assert isinstance(values, Ragged) and isinstance(masks, Ragged)
    out: list[list[tuple[bool, list[Any]]]] = []
    for row, mask in zip(values.rows(), masks.rows(), strict=True):
        parts: list[tuple[bool, list[Any]]] = []
        for item, mine in zip(row.tolist(), mask.tolist(), strict=True):
            if not parts or parts[-1][0] != mine:
                parts.append((mine, []))
            parts[-1][1].append(item)
        out.append(parts)
    return out
