"""`lab.evaluate()`: measure the policy on held-out data, between two iterations."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from workbench.batches.columns import Ragged, ragged_in
from workbench.checks.compare_evaluations import Evaluation, of_data
from workbench.data.prompt_rows import PromptRow
from workbench.data.prompt_stream import check_room, prompt_options, prompt_table, prompts_of, reading
from workbench.data.streamed_prompts import StreamedPrompts
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.settings.engines import Sampling
from workbench.support.code_version import function_version
from workbench.support.flat_settings import flat
from workbench.support.validation import PositiveInt, ZeroToOne

if TYPE_CHECKING:
    from workbench.algorithms.lab import Lab
    from workbench.batches.batch import Batch


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples of a prompt passes,

        1 - C(n - c, k) / C(n, k),      n = samples, c = passed of them, k <= n

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1: the share of the k-subsets of the n samples that
    contain a pass. (1 - (1 - c/n)^k is biased.)
    """
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


MOST_SUBSETS = 2000


def majority_at_k(answers: Sequence[Hashable], passed: Sequence[float], k: int) -> float:
    """The probability that the most frequent answer among k samples passes: the mean over the k-subsets of the samples.

    answers [samples]: the answer of each response; None, for no answer, is no vote. passed [samples]: 1 or 0. Ties
    count each tied answer equally; a subset without votes does not pass. If there are more than 2,000 subsets, 2,000
    are drawn, always the same. Wang et al. 2023, https://arxiv.org/abs/2203.11171.
    """
    right: dict[Hashable, list[float]] = {}
    for answer, one in zip(answers, passed, strict=True):
        right.setdefault(answer, []).append(float(one))
    rates = {answer: sum(found) / len(found) for answer, found in right.items()}
    found = [_voted([answers[i] for i in subset], rates) for subset in _subsets(len(answers), k)]
    return sum(found) / len(found)


def _voted(answers: Iterable[Hashable], rates: dict[Hashable, float]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(rates[answer] for answer in first) / len(first) if first else 0.0


def _subsets(n: int, k: int) -> Iterable[Sequence[int]]:
    if math.comb(n, k) <= MOST_SUBSETS:
        return itertools.combinations(range(n), k)
    draws = np.random.default_rng([0, n, k])
    return [draws.permutation(n)[:k].tolist() for _ in range(MOST_SUBSETS)]


def best_of_k(scores: Sequence[float], rewards: Sequence[float], k: int) -> float:
    """The expected reward of the sample with the highest score among k: the mean over the k-subsets of the n samples,

        sum over the values s of the scores  (C(m_s, k) - C(b_s, k)) / C(n, k)  mean reward of the samples with score s

    with m_s samples of a score of at most s and b_s samples below it; samples with equal scores count equally. scores
    [samples]: of the selector. rewards [samples]: the evaluated ones. Nakano et al. 2021,
    https://arxiv.org/abs/2112.09332, appendix I.
    """
    order = sorted(range(len(scores)), key=scores.__getitem__)
    expected, below = 0.0, 0
    for _, group in itertools.groupby(order, key=scores.__getitem__):
        members = list(group)
        up_to = below + len(members)
        share = (math.comb(up_to, k) - math.comb(below, k)) / math.comb(len(scores), k)
        expected += share * sum(rewards[i] for i in members) / len(members)
        below = up_to
    return expected


EMPTY = (None, "", "()")  # parts of a chat format that are not there
ROLE = "role"  # select=: the reward role's own model or function


@stoppable("lab.evaluate()", ("training is not affected", "run the same call again"))
def evaluate(
    lab: Lab, data: Any, *, samples: PositiveInt = 4, sampling: Sampling | None = None, n: PositiveInt | None = None,
    reward: Callable[..., Any] | Mapping[str, Any] | None = None, threshold: float = 1.0, seed: int = 0,
    answer: Callable[[str], Any] | None = None, select: Any = None, most_failed: ZeroToOne = 0.2,
) -> pd.DataFrame:  # fmt: skip
    """Measure the policy on other data; training is not affected. One row a data set; `lab.metrics("evaluate")` has all
    of them. `.rows` of the result is a frame with a row a response: prompt, text, reward, passed, tokens.
    `algo.run(100, evaluate=lambda: lab.evaluate(held_out), every=10)` evaluates during training.

    data: whatever `prompts=` takes, or several by name; `chat`, `control_tokens`, `max_prompt_tokens` and `overlong`
    are those of `lab.prompts` unless the data set has its own. n: the first n prompts of each; None: all. samples:
    responses a prompt. sampling: how they are drawn; None: `wb.Sampling()`, which has temperature 1 and at most 64
    tokens, whatever training uses; pass the algorithm's, `sampling=ppo.sampling`, to measure the trained distribution.
    reward: replaces the reward role's own. seed: equal seeds and equal weights draw equal responses. answer: a function
    from a response's text to its answer, None for no answer. It adds `majority@k`, the share of prompts for which the
    most frequent answer of k samples passes. select: "role", the reward role's own model, or a function like `reward`.
    It adds `best_of@k`, the reward of the highest-scored response among k; responses whose score failed are left out
    and counted in `selection_failed_fraction`. most_failed: the share of responses whose rewards, or scores of
    `select`, may fail; 1.0: all may. Columns: `reward_mean` and its standard error over prompts; `pass@k` (Chen et al.
    2021, arXiv:2107.03374), where a reward of at least `threshold` is a pass; `response_tokens_mean` (tokens of the
    policy), median and 95th percentile; `truncated_fraction`, `failed_fraction`; `reward/NAME_mean` of each reward
    component, such as a format.
    """
    options = asdict(sampling or Sampling())
    # None: the reward role's own
    scorers = [reward] if select is None else [reward, None if select == ROLE else select]
    _check(lab, {"samples": samples, "seed": seed, **options}, scorers, select)
    named = _named(data)
    sets = {name: _rows(lab, source, n) for name, source in named.items()}
    written = lab.actor.operations["generate_sequences"].operation.written(options)
    scoring = lab.reward.operations["compute_reward"]
    for rows in sets.values():
        for function in scorers:
            scored, _ = scoring.arguments((), {"function": function})
            scoring.check_columns(scored, (*prompt_table(rows, 0), *written))
    responses, frames = [], {}
    with lab.runner.isolated("evaluate/stages"):
        for name, rows in sets.items():
            batch = lab.put(prompt_table(rows, 0))
            batch = lab.actor.generate_sequences(batch, samples=samples, seed=seed, **options)
            scored_by = [lab.reward.compute_reward(batch, function=one, most_failed=most_failed) for one in scorers]
            found = _responses(lab, rows, samples, scored_by, threshold, answer)
            frames[name] = summary(found, samples)
            found.insert(0, "data", name)
            responses.append(found)
    values = {f"{name}/{metric}": value for name, metrics in frames.items() for metric, value in metrics.items()}
    lab.telemetry.append_metrics("evaluate", lab.runner.counters.run, lab.iteration, values)
    frame = pd.DataFrame.from_dict(frames, orient="index").rename_axis("data")
    frame = frame.astype({"prompts": "int64", "samples": "int64"})
    done_with = {"samples": samples, **flat(options, "sampling"), "reward": _reward_of(lab, reward)}
    for name, source in named.items():
        read = reading(lab.description.prompts, prompt_options(source, "evaluate: dict"))
        done_with |= {k: v for k, v in flat(read, of_data(name)).items() if v not in EMPTY}
    made = pd.concat(responses, ignore_index=True)
    return Evaluation.of(frame, made, seed=seed, threshold=threshold, conditions=done_with)


def _reward_of(lab: Lab, reward: Callable[..., Any] | Mapping[str, Any] | None) -> str:
    """Identify the reward in a few words: equal texts for equal functions, weighted components, or model weights."""
    if reward is not None:
        parts = reward.items() if isinstance(reward, Mapping) else [("", reward)]
        return " + ".join(f"{name}: {_function(one)}".removeprefix(": ") for name, one in parts)
    spec = lab.reward.spec
    if spec.function is not None:
        return _function(spec.function)
    weights = lab.runner.counters.weights.get("reward")
    return str(spec) if weights is None else f"{spec} after {weights.steps} steps"


def _function(value: Any) -> str:
    """Describe one reward function, which may come with its weight."""
    function, *weight = value if isinstance(value, tuple | list) else (value,)
    known = function_version(function)
    return " ".join([f"{known['name']} ({known['digest'][:6]})", *(f"x {one}" for one in weight)])


def _check(lab: Lab, drawing: Mapping[str, Any], scorers: Sequence[Any], select: Any) -> None:
    """Raise `BadInput` now for values that a stage, or the summary, would refuse after generation."""
    if "actor" not in lab.groups:
        raise BadInput(
            "evaluate on a workbench without an actor", "the actor writes the responses",
            "open one with an actor; to score held-out pairs, use compute_pair_rewards",
        )  # fmt: skip
    if "reward" not in lab.groups:
        raise BadInput(
            "evaluate on a workbench without a reward", "the reward workers score the responses",
            "open one with a reward role, such as a function",
        )  # fmt: skip
    if isinstance(select, str) and select != ROLE:
        rule = "must be a function that scores a response, 'role' for the reward role's own model or function, or None"
        raise BadInput(f"select={shown(select)}", rule, "write select='role'")
    lab.reward.operations["compute_reward"].arguments((), {"function": scorers[-1]})
    lab.actor.operations["generate_sequences"].arguments((), drawing)


def _responses(
    lab: Lab, rows: Sequence[PromptRow], samples: int, scored_by: Sequence[Batch], threshold: float,
    answer: Callable[[str], Any] | None,
) -> pd.DataFrame:  # fmt: skip
    """A frame with a row a response; samples of a prompt are adjacent. scored_by: the responses with their rewards, and
    with the scores of the selector, if there is one."""
    scored, *selected = scored_by
    status = [name for name in ("valid", "failure") if name in scored.names]
    parts = [name for name in scored.names if name.startswith("rewards/")]
    found: Mapping[str, Any] = scored.fetch(["rewards", "finished", "response_mask", "response_ids", *status, *parts])
    mask, ids = ragged_in(found, "response_mask"), ragged_in(found, "response_ids")
    decode = lab.runner.batches.tokenizer.decode
    columns: dict[str, Any] = {
        "prompt_index": np.repeat([row.index for row in rows], samples),
        "prompt": [row.prompt for row in rows for _ in range(samples)],
        "sample": np.tile(np.arange(samples), len(rows)),
        "response": [decode(row.tolist(), skip_special_tokens=True) for row in ids.rows()],
        "reward": _scores(found["rewards"]),
        # as generation counts them: tokens of an environment are not the policy's
        "response_tokens": [int(row.sum()) for row in mask.rows()],
        "finished": np.asarray(found["finished"]).astype(bool),
        "valid": np.asarray(found["valid"]).astype(bool) if status else np.ones(len(mask), dtype=bool),
        "failure": list(found.get("failure", [""] * len(mask))),
    }
    # numpy rounds a Python float to the rewards' dtype: 0.9 in float32 is slightly less
    columns["passed"] = (columns["reward"] >= float(threshold)) & columns["valid"]
    columns |= {f"reward/{name.removeprefix('rewards/')}": _scores(found[name]) for name in parts}
    if answer is not None:
        answers = [_answer(answer, response) for response in columns["response"]]
        columns["answer"] = pd.Series(answers, dtype=object)  # None stays None: it is no vote
    if selected:
        columns["selection_score"] = _selection_scores(*selected)
    return pd.DataFrame(columns)


def _selection_scores(scored: Batch) -> np.ndarray:
    """The selector's scores, NaN where it failed."""
    found = scored.fetch(["rewards", *(name for name in ("valid",) if name in scored.names)])
    scores = _scores(found["rewards"])
    return np.where(np.asarray(found["valid"]).astype(bool), scores, np.float32(np.nan)) if "valid" in found else scores


def _answer(function: Callable[[str], Any], response: str) -> Any:
    """The answer of a response; None for no answer."""
    try:
        answer = function(response)
        hash(answer)
    except Exception as error:
        raise BadInput(
            f"answer= raised {type(error).__name__}: {error} for the response {response!r:.60}",
            "it must return the answer of a response, such as a text or a number, or None if there is none",
            "correct the function",
        ) from error
    return answer


def summary(found: pd.DataFrame, samples: int) -> dict[str, float]:
    """The row of a data set, from its responses; samples of a prompt are adjacent.

    Failed responses count only in `failed_fraction`. A prompt with fewer than k valid responses enters each `...@k`
    with all that it has: if it were left out, prompts with many failures would be missing for large k only, which would
    bias pass@k. The standard error is that of the prompts' means, because samples of one prompt are not independent
    (Miller 2024, https://arxiv.org/abs/2411.00640, section 2.2). NaN for one prompt.
    """
    valid = found["valid"].to_numpy()
    kept, lengths = found[valid], found["response_tokens"].to_numpy()[valid]
    prompts = [one for _, one in kept.groupby(np.arange(len(found))[valid] // samples)]
    means = np.array([one["reward"].to_numpy(np.float64).mean() for one in prompts])
    row = {
        "prompts": float(len(found) // samples),
        "samples": float(samples),
        "reward_mean": _mean(means),
        "reward_standard_error": float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan"),
    }
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    for k in ks:
        row[f"pass@{k}"] = _mean([pass_at_k(len(one), int(one["passed"].sum()), min(k, len(one))) for one in prompts])
    row["response_tokens_mean"] = _mean(lengths)
    row["truncated_fraction"] = 1 - _mean(kept["finished"].to_numpy())
    row["failed_fraction"] = float(1 - valid.mean())
    for k in ks:
        if "answer" in found:
            row[f"majority@{k}"] = _mean(
                [majority_at_k(one["answer"].tolist(), one["passed"].tolist(), min(k, len(one))) for one in prompts]
            )
        if "selection_score" in found:
            scored = [one for one in (one[one["selection_score"].notna()] for one in prompts) if len(one)]
            best = [
                best_of_k(one["selection_score"].tolist(), one["reward"].tolist(), min(k, len(one))) for one in scored
            ]
            row[f"best_of@{k}"] = _mean(best)
    if "selection_score" in found:  # of the responses that did not fail before
        row["selection_failed_fraction"] = _mean(kept["selection_score"].isna().to_numpy())
    for name in found.columns:
        if name.startswith("reward/"):
            row[f"{name}_mean"] = _mean(kept[name].to_numpy())
    row["response_tokens_median"] = float(np.median(lengths)) if len(lengths) else float("nan")
    row["response_tokens_p95"] = float(np.quantile(lengths, 0.95)) if len(lengths) else float("nan")
    return row


def _mean(values: Sequence[float] | np.ndarray) -> float:
    """The mean; NaN for no values."""
    return float(np.mean(values)) if len(values) else float("nan")


def _named(data: Any) -> dict[str, Any]:
    """Data sets by name. A mapping with "source" is one data set with its options, as `prompts=` takes them."""
    if not isinstance(data, Mapping) or "source" in data:
        source = data["source"] if isinstance(data, Mapping) else data
        return {source if isinstance(source, str) else "held-out": data}
    if not data:
        raise BadInput("evaluate({})", "needs at least one data set", "lab.evaluate('arithmetic', n=32)")
    return {str(name): source for name, source in data.items()}


def _rows(lab: Lab, source: Any, n: int | None) -> list[PromptRow]:
    """The first n rows of a source, in its order; None: all."""
    options = {"shuffle": False, "seed": lab.seed, **prompt_options(source, "evaluate: dict")}
    options |= reading(lab.description.prompts, options)
    prompts = prompts_of(options, lab.runner.batches.tokenizer)
    check_room(prompts, lab.description.generation)
    if isinstance(prompts, StreamedPrompts):
        if n is None:
            raise BadInput("evaluate on a stream without n=", "it does not know its length", "give a number: n=256")
        found = prompts.next(n, one_epoch=True)
    else:
        found = prompts.next(len(prompts) if n is None else min(n, len(prompts)))
    if prompts.dropped or prompts.cut:
        print(f"evaluate: {', '.join(prompts.counts())}")
    return found


def _scores(column: Any) -> np.ndarray:
    """One reward a row, in the column's dtype; token rewards are summed."""
    if isinstance(column, Ragged):
        column = torch.stack([row.double().sum() for row in column.rows()]).to(column.values.dtype)
    assert isinstance(column, torch.Tensor)
    return (column.float() if column.dtype == torch.bfloat16 else column).numpy()
