"""Partial rollouts: responses that pause after so many tokens, and continue in a later call with that call's weights.

    call 1   |=====|        call 2   |=====|       call 3   |==|      ending "eos"; the tokens were drawn
    weights version 4       version 5              version 6          by versions 4, 5 and 6: `token_versions`

After Kimi k1.5 (https://arxiv.org/abs/2501.12599, section 2.6.2): a token budget per call keeps the longest responses
from delaying the others. It depends on no clock, so that the same call draws the same tokens everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.batches.columns import Ragged, Table, ragged_in
from workbench.engines.generation import Rollout
from workbench.errors import BadInput
from workbench.messages.metrics import Mean, Metrics
from workbench.messages.shards import Shard
from workbench.settings.engines import Generation
from workbench.workers.rollout_columns import PAUSED, single_turn

COLUMNS = ("token_versions", "sample_seed")  # beside the columns of other rollouts
METRICS = ("ending_paused/fraction", "ended/fraction", "drawn_tokens/mean")  # of a call's new tokens, per row
READS = ("response_ids", "rollout_log_prob", "ending", *COLUMNS)  # columns that a resuming call reads


def in_parts(arguments: Mapping[str, Any]) -> bool:
    """Return whether a call of `generate_sequences` with these arguments pauses responses, or continues them."""
    return bool(arguments.get("pause_after") or arguments.get("resume"))


def check_parts(arguments: Mapping[str, Any]) -> None:
    """Raise `BadInput` for settings that a response in parts cannot have."""
    if not in_parts(arguments):
        if arguments["cache"] != "recomputed":
            raise BadInput(f"cache={arguments['cache']!r}", "only continued responses have it", "also give resume=True")
        return
    off = {"environment": None, "agent": None, "keep_mask": False, "presence_penalty": 0, "frequency_penalty": 0}
    given = [name for name, value in off.items() if arguments[name] != value]
    if given:
        raise BadInput(
            f"{', '.join(given)} with {'pause_after=' if arguments['pause_after'] else 'resume=True'}",
            "a continued response is read as part of the prompt, in which these are not known",
            f"leave {', '.join(given)} out",
        )


def check_cache(arguments: Mapping[str, Any], generation: Generation | None) -> None:
    """Raise `BadInput` if the engine keeps no cache between calls."""
    if arguments["cache"] == "kept" and generation is not None and generation.engine != "vllm":
        raise BadInput(
            f"cache='kept' on engine={generation.engine!r}",
            "this engine drops its cache after each call",
            "leave it out, or use Generation(engine='vllm')",
        )


@dataclass(frozen=True, kw_only=True)
class PartialResponses:
    """The parts of its response that each row of a shard has so far. versions: the weights version of each token."""

    ids: list[list[int]]
    log_probs: list[list[float]]
    versions: list[list[int]]
    endings: list[str]
    seeds: list[int]

    @classmethod
    def of(cls, batch: Shard, seeds: Sequence[int], resume: bool) -> PartialResponses:
        """Read the parts of a shard's responses. seeds: used for rows that begin now, which have no token yet."""
        if not resume:
            nothing: list[list[Any]] = [[] for _ in seeds]
            return cls(
                ids=[*nothing], log_probs=nothing, versions=nothing, endings=[PAUSED] * len(seeds), seeds=[*seeds]
            )
        ids, log_probs, versions = (
            [row.tolist() for row in batch.ragged(name).rows()]
            for name in ("response_ids", "rollout_log_prob", "token_versions")
        )
        endings, own = batch.columns["ending"], batch.numbers("sample_seed").tolist()
        assert isinstance(endings, list)
        return cls(
            ids=ids, log_probs=log_probs, versions=versions, endings=endings,
            seeds=[old if said else new for old, new, said in zip(own, seeds, ids, strict=True)],
        )  # fmt: skip

    @property
    def open(self) -> list[list[int] | None]:
        """The token ids of rows that continue; None for rows that have ended."""
        return [ids if ending == PAUSED else None for ids, ending in zip(self.ids, self.endings, strict=True)]

    def metrics(self, columns: Table) -> Metrics:
        """Return metrics of the tokens that a call has drawn, from the rows' columns after it."""
        endings, log_probs = columns["ending"], ragged_in(columns, "rollout_log_prob")
        assert isinstance(endings, list)
        ended = sum(before == PAUSED != now for before, now in zip(self.endings, endings, strict=True))
        totals = endings.count(PAUSED), ended, len(log_probs.values) - sum(map(len, self.ids))
        return {name: Mean(total=n, count=len(endings)) for name, n in zip(METRICS, totals, strict=True)}

    def columns(self, rollout: Rollout, rows: slice, version: int, most: Sequence[int]) -> Table:
        """Return the columns after a call. rows: the shard's rows in the rollout. most: tokens of each response."""
        ids, log_probs, versions, endings = (
            [*column] for column in (self.ids, self.log_probs, self.versions, self.endings)
        )
        drawn = zip(rollout.response_ids[rows], rollout.log_probs[rows], rollout.endings[rows], strict=True)
        for i, (new_ids, new_log_probs, ending) in enumerate(drawn):
            if endings[i] != PAUSED:
                continue
            ids[i], log_probs[i] = new_ids, log_probs[i] + new_log_probs
            versions[i] = versions[i] + [version] * len(new_log_probs)
            endings[i] = PAUSED if ending == "length" and len(new_ids) < most[i] else ending
        seeds = torch.tensor(self.seeds, dtype=torch.int64)
        own: Table = {"token_versions": Ragged.of(versions, torch.int64), "sample_seed": seeds}
        return single_turn(ids, log_probs, endings) | own
