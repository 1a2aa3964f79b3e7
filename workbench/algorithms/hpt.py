"""HPT (Lv et al. 2025, arXiv:2509.04419): RL on prompts that the policy solves, fine-tuning on the other prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm, GroupSize
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged
from workbench.batches.schema import COUNTING
from workbench.data.examples import Demonstrations, ExampleStream
from workbench.data.reward_function import Weight
from workbench.objectives.aggregation import Aggregation
from workbench.objectives.estimators import response_scores
from workbench.settings.engines import Sampling
from workbench.support.validation import Number, PositiveFloat, PositiveInt, Rule
from workbench.workers.sampling_mask import MASK_COLUMNS


@dataclass
class HPT(Algorithm):
    """`HPT(lab, lab.demonstrations("solved.jsonl")).run(n)`: n iterations of the lines in `define`.

    Prompts come from the demonstrations. If the share of a prompt's responses that pass is above `gate`, the policy
    learns from its responses as in GRPO; else from its demonstration as in SFT. Both losses are part of one optimizer
    step, each divided by its own tokens or responses in the minibatch, as in the authors' code:
    loss = loss of the policy + sft_coefficient x loss of fine-tuning.

    prompts: prompts per iteration; samples: responses per prompt (the authors: 8). reward: its function may read
    `demonstration`, the text; a response passes with a reward of at least `passing`. gate: the authors use 0 for a
    stronger model (only prompts without any passing response are fine-tuned), and up to 0.5 for weaker models.
    estimator, loss, clip, aggregation: for the policy's loss, as in `GRPO`; the defaults are Dr. GRPO's, as theirs.
    """

    lab: Lab
    demonstrations: Demonstrations
    prompts: PositiveInt = 4
    samples: GroupSize = 8
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | Mapping[str, Any] | None = None
    reward_weights: Mapping[str, Weight] | None = None
    passing: Number = 1.0
    gate: Annotated[Number, Field(ge=0, lt=1), Rule("must be a share of the responses, in [0, 1)")] = 0.0
    sft_coefficient: PositiveFloat = 1.0
    estimator: str | Callable[..., Any] = "dr_grpo"
    loss: str | Callable[..., Any] = "ppo"
    clip: float | None = None
    epochs: PositiveInt = 1
    aggregation: Aggregation = "fixed-length"
    _keep_rows = ("set_aside", "choose")

    def __post_init__(self) -> None:
        ExampleStream.check(self.demonstrations, "demonstrations", self.prompts, "prompts")
        self.need("reward")

    def define(self, lab: Lab) -> None:
        batch = lab.apply(self.demonstrations.next, n=self.prompts)
        batch = lab.apply(self.set_aside, batch)
        batch = lab.actor.generate_sequences(batch, samples=self.samples, **asdict(self.sampling))
        batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
        if self._reads("old_log_prob", "estimator"):
            batch = lab.actor.compute_log_prob(batch)
        if self._reads("ref_log_prob", "estimator"):
            batch = lab.reference.compute_ref_log_prob(batch)
        batch = lab.compute_advantages(batch, estimator=self.estimator)
        batch = lab.apply(self.choose, batch)  # its rows have no log-probabilities yet
        on_policy = self.on_policy()
        if not on_policy:
            batch = lab.actor.compute_log_prob(batch)
        if self._reads("ref_log_prob", "loss"):
            batch = lab.reference.compute_ref_log_prob(batch)
        lab.actor.update_actor(
            batch,
            loss=self.loss,
            clip=self.clip,
            epochs=self.epochs,
            aggregation=self.aggregation,
            max_response_tokens=self.sampling.max_new_tokens,
            sft_coefficient=self.sft_coefficient,
            on_policy=on_policy,
        )

    def set_aside(self, batch: Batch) -> Batch:
        """Rename the responses of a batch to `demonstration`, `demonstration_ids` and `demonstration_mask`."""
        return batch.rename(**{f"response{end}": f"demonstration{end}" for end in ("", "_ids", "_mask")})

    def choose(self, batch: Batch) -> Batch:
        """Return the rows to learn from. If a prompt's pass rate is above `gate`: its responses. Else: one row with its
        demonstration, marked in `demonstrated`, and rows without tokens, so that the batch keeps its size.

        Metrics: `pass_rate/mean` over all prompts, `demonstrated/fraction` of the prompts.
        """
        given = [f"{of}_{what}" for of in ("response", "demonstration") for what in ("ids", "mask")]
        given += ["advantages", "rewards", "prompt_uid"]
        counting = tuple(name for name in COUNTING if name in batch.names)
        sampled = tuple(name for name in ("rollout_log_prob", *MASK_COLUMNS) if name in batch.names)
        table = batch.fetch([*given, *counting, *sampled])
        columns = {name: column.rows() for name, column in table.items() if isinstance(column, Ragged)}
        rates = self._pass_rates(table)
        prompts = torch.as_tensor(table["prompt_uid"]).tolist()
        demonstrated, seen = torch.zeros(len(prompts), dtype=torch.bool), set[int]()
        for row, prompt in enumerate(prompts):
            if rates[prompt] > self.gate:
                continue
            demonstrated[row] = prompt not in seen
            seen.add(prompt)
            end = None if demonstrated[row] else 0
            for name in ("ids", "mask"):
                columns[f"response_{name}"][row] = columns[f"demonstration_{name}"][row][:end]
            ids = columns["response_ids"][row]
            columns["advantages"][row] = torch.zeros(len(ids))
            for name in sampled:  # an empty sampling mask means that all tokens could be drawn
                columns[name][row] = torch.zeros(0 if name == "sampling_mask_ids" else len(ids))
        made: dict[str, Any] = {"demonstrated": demonstrated, "prompt_uid": torch.tensor(prompts)}
        dtypes = {"response_ids": torch.int64, "response_mask": torch.bool, "advantages": torch.float32}
        dtypes |= {name: torch.int32 if name in MASK_COLUMNS else torch.float32 for name in sampled}
        for name, dtype in dtypes.items():
            made[name] = Ragged.of([row.to(dtype) for row in columns[name]], dtype)
        for name in counting:
            made[name] = torch.as_tensor(table[name]).bool() | demonstrated
        mean, fraction = sum(rates.values()) / len(rates), len(seen) / len(rates)
        self.lab.report("choose", {"pass_rate/mean": mean, "demonstrated/fraction": fraction})
        others = (name for name in batch.names if name not in ("prompt", "prompt_ids", "demonstration"))
        return batch.drop(*others).join(self.lab.put(made, meta=batch.meta))

    def _pass_rates(self, table: Mapping[str, Any]) -> dict[int, float]:
        """Return, by prompt uid, the share of the prompt's valid responses that pass; 0 if none is valid."""
        rewards, mask, uids = table["rewards"], table["response_mask"], table["prompt_uid"]
        scores_N = response_scores(rewards.pad() if isinstance(rewards, Ragged) else rewards, mask.pad())
        valid_N = torch.as_tensor(table.get("valid", torch.ones(len(uids)))).bool()
        passed_N: Tensor = (scores_N.float() >= torch.tensor(self.passing)) & valid_N
        return {
            prompt: int(passed_N[uids == prompt].sum()) / max(int(valid_N[uids == prompt].sum()), 1)
            for prompt in dict.fromkeys(uids.tolist())
        }
