"""One number a response token: what a batch has of them, and what follows from it. Pure functions of one row, [T]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.objectives.kl import kl_estimate, ratio_of

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
# What each derived column is made of, and how: shown beside its name.
MEANINGS = {
    "kl": "k1: old_log_prob - ref_log_prob, nats",
    "ratio": "exp(old_log_prob - rollout_log_prob)",
    "new_log_prob": "old_log_prob of the batch beside",
    "new_ratio": "exp(new_log_prob - old_log_prob)",
    "outside_range": "-1 below the clip range, 1 above it: new_ratio, else ratio",
    "clipped": "outside_range where PPO's loss clips: min(r A, clip(r) A) is not r A, of r = new_ratio, A = advantages",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One row of a batch. token_ids: of the response, T of them. mask: which of them the policy chose, bool [T].
    columns: numbers by token, [T] each. values: one number by name. texts: the columns of text."""

    row: int
    prompt: str
    token_ids: Sequence[int]
    mask: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """Of a column over the tokens that the policy chose; NaN where there are none."""
        return float(self.columns[name][self.mask].double().mean())

    def total(self, name: str) -> float:
        """The sum of a column over the tokens that the policy chose."""
        return float(self.columns[name][self.mask].double().sum())


def derived_names(names: Sequence[str], beside: Sequence[str] = ()) -> list[str]:
    """The names that `derived` adds for columns of these names, and of these in the batch beside."""
    found = ["kl"] if {"old_log_prob", "ref_log_prob"} <= set(names) else []
    found += ["ratio"] if {"old_log_prob", "rollout_log_prob"} <= set(names) else []
    found += ["new_log_prob", "new_ratio"] if "old_log_prob" in names and "old_log_prob" in beside else []
    found += ["outside_range"] if {"ratio", "new_ratio"} & set(found) else []
    return found + (["clipped"] if "new_ratio" in found and "advantages" in names else [])


def derived(sample: Sample, beside: Sample | None, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """The columns of a sample with those that follow from them, in fp32 or more; `MEANINGS` has the formulas.

    beside: the same row of another batch. Its numbers count for the tokens up to which both responses are the same, and
    are NaN behind them: there they are those of another text.
    """
    found = dict(sample.columns)
    old, after = found.get("old_log_prob"), None if beside is None else beside.columns.get("old_log_prob")
    if old is not None and "ref_log_prob" in found:
        found["kl"] = kl_estimate(old, found["ref_log_prob"], "k1")
    if old is not None and "rollout_log_prob" in found:
        found["ratio"] = ratio_of(old, found["rollout_log_prob"])
    if old is not None and beside is not None and after is not None:
        found["new_log_prob"] = _of_same(after, common(sample, beside), len(old))
        found["new_ratio"] = ratio_of(found["new_log_prob"], old)
    ratio = found.get("new_ratio", found.get("ratio"))
    if ratio is not None:
        found["outside_range"] = beyond(ratio, clip_low, clip_high)
    if "new_ratio" in found and "advantages" in found:
        outside = found["outside_range"]  # above it is clipped where A > 0, below it where A < 0
        found["clipped"] = torch.where(outside * found["advantages"] > 0, outside, 0.0)
    return found


def beyond(ratio_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """1 where a ratio is above 1 + clip_high, -1 where it is below 1 - clip_low, 0 where it is inside, or NaN."""
    return (ratio_T > 1 + clip_high).float() - (ratio_T < 1 - clip_low).float()


def common(one: Sample, other: Sample) -> int:
    """How many tokens two responses to one prompt have in common, from their start."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.token_ids)))


def difference(theirs_T: Tensor, mine_T: Tensor, same: int) -> Tensor:
    """theirs - mine at the first `same` tokens, NaN behind them; as long as theirs."""
    gap = torch.full((len(theirs_T),), float("nan"), dtype=torch.float64)
    gap[:same] = theirs_T[:same].double() - mine_T[:same].double()
    return gap


def _of_same(theirs_T: Tensor, same: int, length: int) -> Tensor:
    values = torch.full((length,), float("nan"), dtype=theirs_T.dtype)
    values[:same] = theirs_T[:same]
    return values


def token_texts(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token, as it reads behind the one before it: some tokenizers drop a space at the start of a
    text. A token that is a part of a character is its id, in ⟨ ⟩."""
    texts = []
    for n, token in enumerate(token_ids):
        alone = decode([token])
        if n and UNREADABLE not in alone:
            before = decode([token_ids[n - 1]])
            pair = decode([token_ids[n - 1], token])
            alone = pair[len(before) :] if pair.startswith(before) else alone
        texts.append(f"⟨{token}⟩" if UNREADABLE in alone else alone)
    return texts
