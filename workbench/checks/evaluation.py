"""`lab.evaluate()`: how the policy does on data that it is not trained on, between two iterations."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.batches.columns import Ragged
from workbench.data.prompt_stream import check_room, prompt_options, prompt_table
from workbench.data.prompts import PromptRow, Prompts
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput
from workbench.objectives.pass_at_k import pass_at_k
from workbench.settings.engines import Sampling
from workbench.stages.isolated import isolated
from workbench.support.validation import whole

if TYPE_CHECKING:
    import pandas as pd

    from workbench.algorithms.lab import Lab


@stoppable("lab.evaluate()", ("training has seen nothing of it", "the same call again evaluates"))
def evaluate(
    lab: Lab,
    data: Any,
    *,
    samples: int,
    sampling: Sampling | None,
    reward: Callable[..., Any] | Mapping[str, Any] | None,
    n: int | None,
    threshold: float,
    seed: int,
) -> pd.DataFrame:
    """The frame of `Workbench.evaluate`."""
    import pandas as pd

    whole("samples", samples, 1)
    if sampling is not None and not isinstance(sampling, Sampling):
        raise BadInput(f"sampling={sampling!r:.60}", "must be a wb.Sampling(...)")
    if not isinstance(threshold, numbers.Real):
        raise BadInput(f"threshold={threshold!r:.60}", "the reward from which on a response has passed, a number")
    if "actor" not in lab.groups:
        raise BadInput(
            "evaluate on a workbench without an actor", "its generation engine writes the responses",
            "open one with an actor; held-out pairs are scored by compute_pair_rewards",
        )  # fmt: skip
    if "reward" not in lab.groups:
        raise BadInput(
            "evaluate on a workbench without a reward", "responses are scored by its reward workers",
            "open one with a reward role: a function will do",
        )  # fmt: skip
    # what the last stage would refuse is refused before the first
    scored, _ = lab.reward.operations["compute_reward"].arguments((), {"function": reward})
    options = asdict(sampling or Sampling())
    lab.actor.operations["generate_sequences"].arguments((), {"samples": samples, "seed": seed, **options})
    sets = {name: _rows(lab, source, n) for name, source in _named(data).items()}
    written = lab.actor.operations["generate_sequences"].operation.written(options)
    for rows in sets.values():
        lab.reward.operations["compute_reward"].check_columns(scored, (*prompt_table(rows, 0), *written))
    frames = {}
    with isolated(lab.runner, "evaluate/stages"):
        for name, rows in sets.items():
            batch = lab.put(prompt_table(rows, 0))
            batch = lab.actor.generate_sequences(batch, samples=samples, seed=seed, **options)
            batch = lab.reward.compute_reward(batch, function=reward)
            status = ["valid"] if "valid" in batch.names else []
            found = batch.fetch(["rewards", "finished", "response_mask", *status])
            mask = found["response_mask"]
            assert isinstance(mask, Ragged)
            # as generation counts them: what an environment wrote is not the policy's
            lengths = np.array([int(row.sum()) for row in mask.rows()])
            valid = np.asarray(found["valid"]).astype(bool) if status else np.ones(len(lengths), dtype=bool)
            scores, finished = _scores(found["rewards"]), np.asarray(found["finished"])
            frames[name] = summary(scores, lengths, finished, samples, threshold, valid)
    values = {f"{name}/{metric}": value for name, metrics in frames.items() for metric, value in metrics.items()}
    lab.telemetry.append_metrics("evaluate", lab.runner.counters.run, lab.iteration, values)
    frame = pd.DataFrame.from_dict(frames, orient="index").rename_axis("data")
    return frame.astype({"prompts": "int64", "samples": "int64"})


def summary(
    rewards: np.ndarray, lengths: np.ndarray, finished: np.ndarray, samples: int, threshold: float,
    valid: np.ndarray | None = None,
) -> dict[str, float]:  # fmt: skip
    """The row of one data set. All arrays [prompts x samples], the samples of a prompt side by side.

    lengths: tokens of each response that the policy chose. valid: those that did not fail (None: all); the others count
    nowhere but in `failed_fraction`, and pass@k is of the prompts with at least k valid samples. A reward passes from
    `threshold` on, rounded to the rewards' dtype: 0.9 in float32 is a little less than Python's.

    The standard error is that of the prompts' means: samples of one prompt are not independent of each other (Miller
    2024, https://arxiv.org/abs/2411.00640, section 2.2). NaN for one prompt.
    """
    valid = np.ones(len(rewards), dtype=bool) if valid is None else valid
    rows = valid.reshape(-1, samples)
    counts = rows.sum(1)
    scores = rewards.astype(np.float64).reshape(-1, samples)
    means = np.array([one[kept].mean() for one, kept in zip(scores, rows, strict=True) if kept.any()])
    limit = rewards.dtype.type(threshold) if np.issubdtype(rewards.dtype, np.floating) else threshold
    passed = ((rewards >= limit) & valid).reshape(-1, samples).sum(1)
    error = float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan")
    ks = sorted({k for k in (2**i for i in range(samples.bit_length())) if k <= samples} | {samples})
    return {
        "prompts": float(len(rows)),
        "samples": float(samples),
        "reward_mean": _mean(means),
        "reward_standard_error": error,
        **{
            f"pass@{k}": _mean([pass_at_k(int(n), int(c), k) for n, c in zip(counts, passed, strict=True) if n >= k])
            for k in ks
        },
        "response_tokens_mean": _mean(lengths[valid]),
        "truncated_fraction": 1 - _mean(finished[valid]),
        "failed_fraction": float(1 - valid.mean()),
    }


def _mean(values: Sequence[float] | np.ndarray) -> float:
    """NaN of none."""
    return float(np.mean(values)) if len(values) else float("nan")


def _named(data: Any) -> dict[str, Any]:
    """Data sets by name. A mapping with "source" is one data set with its options, as `prompts=` takes them."""
    if not isinstance(data, Mapping) or "source" in data:
        source = data["source"] if isinstance(data, Mapping) else data
        return {source if isinstance(source, str) else "held-out": data}
    if not data:
        raise BadInput("evaluate({})", "needs a data set at least", "lab.evaluate('arithmetic', n=32)")
    return {str(name): source for name, source in data.items()}


def _rows(lab: Lab, source: Any, n: int | None) -> list[PromptRow]:
    """The first n rows of a source, in its order; all: None."""
    options = {"shuffle": False, "seed": lab.seed, **prompt_options(source, "evaluate: dict")}
    prompts = Prompts(**options, tokenizer=lab.runner.batches.tokenizer)
    check_room(prompts, lab.description.generation)
    if n is not None:
        whole("n", n, 1)
    return prompts.next(len(prompts) if n is None else min(n, len(prompts)))


def _scores(column: Any) -> np.ndarray:
    """One reward a row, in the column's dtype: a row that has one a token counts with their sum."""
    if isinstance(column, Ragged):
        column = torch.stack([row.double().sum() for row in column.rows()]).to(column.values.dtype)
    assert isinstance(column, torch.Tensor)
    scores: np.ndarray = (column.float() if column.dtype == torch.bfloat16 else column).numpy()
    return scores
