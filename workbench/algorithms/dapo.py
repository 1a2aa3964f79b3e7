"""DAPO (Yu et al. 2025, arXiv:2503.14476): GRPO with a higher upper clip, dynamic sampling and a token-level mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import GroupSize, RolloutAlgorithm, is_ready
from workbench.algorithms.waiting import concat_rollouts
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, numbers_in, ragged_in
from workbench.objectives.estimators import response_scores
from workbench.objectives.groups import with_variance
from workbench.support.intervals import clustered_half_width
from workbench.support.validation import NonNegativeInt


@dataclass
class DAPO(RolloutAlgorithm):
    """`DAPO(lab).run(n)`: n iterations of the lines in `define`.

    Differences from GRPO: unequal clip bounds, a mean over all tokens of the batch, a penalty for responses that reach
    the length limit, dynamic sampling (see `dynamic_sampling`), and no KL.

    prompts: prompts per update. samples: at least 2. rounds: how often an iteration may draw more prompts.
    overlong_buffer: the penalty grows from 0 to 1 over this many tokens before `sampling.max_new_tokens`; None: a
    fifth of `max_new_tokens`, as in the paper; 0: no penalty. Other fields: as in `PPO`.
    """

    samples: GroupSize = 8
    rounds: NonNegativeInt = 3
    overlong_buffer: int | None = None
    clip: float = 0.2
    clip_high: float = 0.28
    _keep_rows = ("dynamic_sampling",)

    def define(self, lab: Lab) -> None:
        longest = self.sampling.max_new_tokens
        buffer = longest // 5 if self.overlong_buffer is None else self.overlong_buffer
        batch = lab.prompts.next(self.prompts)
        batch = lab.actor.generate_sequences(batch, samples=self.samples, **asdict(self.sampling))
        batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
        batch = lab.apply(self.dynamic_sampling, batch)
        on_policy = self.on_policy()
        if not on_policy:
            batch = lab.actor.compute_log_prob(batch)
        batch = lab.compute_advantages(batch, estimator="grpo", overlong_buffer=buffer, max_response_tokens=longest)
        lab.actor.update_actor(
            batch,
            clip=self.clip,
            clip_high=self.clip_high,
            epochs=self.epochs,
            aggregation="token-mean",
            correction=self.correction,
            on_policy=on_policy,
        )

    def dynamic_sampling(self, batch: Batch) -> Batch:
        """Keep groups whose rewards differ, and draw more prompts until the batch has its size again. Rewards of failed
        rows do not count.

        Further prompts go through the graph's stages before this one, edits included. If groups are still missing after
        `rounds` further draws, groups without variance fill the batch up to its size, spread so that each minibatch has
        its share of them. They only teach the overlong penalty, where their responses differ in it; with no penalty,
        they make every step smaller by their share of the tokens.
        Metrics: `rounds`, `kept/fraction` (rows of groups with variance among all rows drawn), `filled/fraction` (rows
        of groups without variance in the batch), and `rewards/mean`, `rewards/interval95` and `failed/fraction` over
        all draws; the stages before this one report these for the last draw only.

        If a further draw fails or is stopped, the same call continues it: until this stage has ended, the batches of
        the draws are in `made` beside those of the stages, under names like "compute_reward (draw 2)".
        """
        lab, graph, wanted = self.lab, self.graph(), batch.rows
        first, *before = graph.stages[: graph.names.index("dynamic_sampling")]
        source = graph["dynamic_sampling"].inputs[0]
        kept, others, scores = list[Batch](), list[Batch](), list[tuple[Tensor, Tensor]]()
        drawn = rows = rounds = 0
        kept_made = self.made if self.made.get(source) is batch and not lab.telemetry.aside else {}
        further: list[str] = []  # names of the further draws' stages in `kept_made`
        while True:
            scores_N, varied_N, uids_N = _varied(batch)
            scores.append((scores_N, uids_N))
            drawn, rows = drawn + batch.rows, rows + int(varied_N.sum())
            for wanted_N, part in ((varied_N, kept), (~varied_N, others)):
                if wanted_N.any():
                    part.append(batch.take(np.flatnonzero(wanted_N.numpy())))
            if rows >= wanted or rounds == self.rounds:
                break
            rounds += 1
            made = dict[str, Any]()
            for stage in (first, *before):
                further.append(name := f"{stage.name} (draw {rounds + 1})")
                if name not in kept_made or not is_ready(kept_made[name]):
                    kept_made[name] = lab.prompts.more(self.prompts) if stage is first else stage.call(lab, made)
                made[stage.name] = kept_made[name]
            batch = made[source]
        valid = sum(len(scores_N) for scores_N, _ in scores)
        shares = {
            "kept/fraction": rows / drawn,
            "filled/fraction": max(0, wanted - rows) / wanted,
            "failed/fraction": 1 - valid / drawn,
        }
        lab.report("dynamic_sampling", {"rounds": rounds, **shares, **_means(scores)})
        whole = concat_rollouts([*kept, *others])
        whole = whole.take(np.arange(min(wanted, whole.rows)))
        uids = numbers_in(whole.fetch(["prompt_uid"]), "prompt_uid")
        dealt = whole.take(_spread(uids.numpy(), min(rows, wanted)))
        for name in further:
            del kept_made[name]
        return dealt


def _spread(uids: np.ndarray, kept: int) -> np.ndarray:
    """Return an order of rows that spreads the groups after the first `kept` rows evenly among the groups before.

    uids: each row's prompt; the rows of a prompt are contiguous.
    """
    groups = np.split(np.arange(len(uids)), np.flatnonzero(np.diff(uids)) + 1)
    first = sum(group[0] < kept for group in groups)
    places = [(np.arange(count) + 0.5) / max(1, count) for count in (first, len(groups) - first)]
    return np.concatenate([groups[i] for i in np.argsort(np.concatenate(places), kind="stable")])


def _means(drawn: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the mean score of all draws (0 if there is none) and half the width of its 95% interval. drawn: scores and
    prompt uids of each draw."""
    scores_N, uids_N = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    _, groups_N = uids_N.unique(return_inverse=True)
    totals, counts = (torch.bincount(groups_N, weights).tolist() for weights in (scores_N.double(), None))
    half = clustered_half_width(totals, counts)
    mean = float(scores_N.double().sum()) / max(1, len(scores_N))
    return {"rewards/mean": mean, **({} if math.isnan(half) else {"rewards/interval95": half})}


def _varied(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the score of each valid response; for each response, whether the valid responses to its prompt have
    different scores; and the prompt uid of each valid response."""
    status = ["valid"] if "valid" in batch.names else []
    table = batch.fetch(["rewards", "prompt_uid", "response_mask", *status])
    rewards, uids = table["rewards"], numbers_in(table, "prompt_uid")
    rewards = rewards.pad() if isinstance(rewards, Ragged) else numbers_in(table, "rewards")
    scores_N = response_scores(rewards, ragged_in(table, "response_mask").pad())
    valid_N = torch.as_tensor(table["valid"]).bool() if status else torch.ones(len(scores_N), dtype=torch.bool)
    scores_N, scored_N = scores_N[valid_N], uids[valid_N]
    return scores_N, torch.isin(uids, scored_N[with_variance(scores_N, scored_N)]), scored_N
