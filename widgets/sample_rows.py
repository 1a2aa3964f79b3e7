"""The rows of one batch for browsing: one number a row for all rows, tokens only for the shown ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.objectives.kl import kl_estimate, ratio_of

SEARCHED_ROWS = 64  # whose tokens are here at a time while a text is looked for
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
# The definition of each derived column, shown beside its name.
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
    """One row of a batch. token_ids: of the response, T of them. mask: the policy's tokens, bool [T]. columns: numbers
    by token, [T] each. values: one number by name. texts: the text columns."""

    row: int
    prompt: str
    token_ids: Sequence[int]
    mask: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """The mean of a column over the policy's tokens; NaN if there are none."""
        return float(self.columns[name][self.mask].double().mean())


class SampleRows:
    """The rows of one batch, by its name in the store. It keeps no handle, so that the store can release the batch.

    numbers: a frame of all rows with the columns of one number a row, `response_tokens`, counted on the hosts, and
    `truncated`. Columns of tokens and text are fetched for the requested rows only; a column has numbers by token if it
    has as many numbers as response tokens in every row.
    """

    def __init__(self, lab: Any, name: str) -> None:
        self.lab, self.name = lab, name
        batch = lab.batch(name)
        self.meta, self.rows, columns = dict(batch.meta), batch.rows, batch.columns
        lengths = batch.lengths("response_ids")
        ragged = [n for n, c in columns.items() if c.row_shape == ("*",) and not n.endswith("_ids")]
        self._by_token = [n for n in ragged if np.array_equal(batch.lengths(n), lengths)]
        self._texts = [n for n, c in columns.items() if c.dtype == "object"]
        self._tokens = [n for n in ("prompt_ids", "response_ids") if n in columns]
        names = [n for n, c in columns.items() if c.row_shape == () and c.dtype != "object"]
        table = batch.fetch(names, None) if names else {}
        self.numbers = pd.DataFrame({n: np.asarray(column) for n, column in table.items()}, index=range(self.rows))
        self.numbers["response_tokens"] = lengths
        if "finished" in self.numbers:
            self.numbers["truncated"] = ~self.numbers["finished"].astype(bool)
        self._samples: dict[int, Sample] = {}
        self._found: tuple[tuple[str, str], list[int]] = (("", ""), list(range(self.rows)))

    def _fetch(self, names: Sequence[str], rows: Sequence[int]) -> dict[str, Any]:
        """Columns of some rows; tokens, and numbers by token, as one tensor a row."""
        table = self.lab.batch(self.name).fetch(names, rows)
        return {name: column.rows() if isinstance(column, Ragged) else column for name, column in table.items()}

    def find(self, where: str, text: str, sort: str = "", descending: bool = False) -> list[int]:
        """The rows for which `where` is true and whose prompt or response contains `text`, in order of a column.

        Numbers are filtered first; then the tokens of the remaining rows are fetched in parts to search for the text,
        ignoring case. Raises `BadInput` for an invalid expression.
        """
        if self._found[0] != (where, text):
            rows = np.flatnonzero(chosen(self.numbers, where)).tolist()
            self._found = ((where, text), self._with_text(rows, text.lower()) if text else rows)
        rows = self._found[1]
        if sort not in self.numbers:
            return rows
        return list(self.numbers.loc[rows, sort].sort_values(ascending=not descending, kind="stable").index)

    def _with_text(self, rows: Sequence[int], text: str) -> list[int]:
        found = []
        for start in range(0, len(rows), SEARCHED_ROWS):
            part = rows[start : start + SEARCHED_ROWS]
            for row, *ids in zip(part, *self._fetch(self._tokens, part).values(), strict=True):
                if any(text in self.lab.decode(each.tolist()).lower() for each in ids):
                    found.append(row)
        return found

    def group(self, row: int) -> list[int]:
        """The rows of the same prompt, including this one."""
        uids = self.numbers.get("prompt_uid")
        return [row] if uids is None else list(uids.index[uids == uids[row]])

    def samples(self, rows: Sequence[int]) -> list[Sample]:
        """Tokens, text and numbers of some rows; fetches the missing ones."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._samples]
        if missing:
            table = self._fetch([*self._by_token, *self._tokens, *self._texts], missing)
            for n, row in enumerate(missing):
                self._samples[row] = self._sample(row, {name: column[n] for name, column in table.items()})
        return [self._samples[row] for row in rows]

    def _sample(self, row: int, held: Mapping[str, Any]) -> Sample:
        ids = held["response_ids"].tolist()
        columns = {name: held[name] for name in self._by_token if name != "response_mask"}
        mask = held["response_mask"].bool() if "response_mask" in self._by_token else torch.ones(len(ids)).bool()
        old = columns.get("old_log_prob")
        if old is not None and "ref_log_prob" in columns:
            columns["kl"] = kl_estimate(old, columns["ref_log_prob"], "k1")
        if old is not None and "rollout_log_prob" in columns:
            columns["ratio"] = ratio_of(old, columns["rollout_log_prob"])
        columns["response_mask"] = mask.float()
        return Sample(
            row=row, prompt=self.lab.decode(held["prompt_ids"].tolist()) if "prompt_ids" in held else "",
            token_ids=ids, mask=mask, columns=columns, texts={name: str(held[name]) for name in self._texts},
            values={str(name): self.numbers[name].iat[row] for name in self.numbers},
        )  # fmt: skip

    def counterpart(self, sample: Sample, mine: SampleRows) -> Sample | None:
        """The row to show beside a sample of another batch: of the same prompt, with the same response if there is one,
        else with the same number among the prompt's samples. Without `prompt_uid`: the same row number. None: no row.
        """
        if "prompt_uid" not in self.numbers or "prompt_uid" not in mine.numbers:
            return self.samples([sample.row])[0] if sample.row < self.rows else None
        uids = self.numbers["prompt_uid"]
        others = self.samples(list(uids.index[uids == mine.numbers["prompt_uid"][sample.row]]))
        place = mine.group(sample.row).index(sample.row)
        ranked = [(other.token_ids != sample.token_ids, abs(n - place), n) for n, other in enumerate(others)]
        return others[min(ranked)[-1]] if others else None


def chosen(numbers: pd.DataFrame, where: str) -> np.ndarray:
    """The rows for which an expression such as `rewards > 0.5 and response_tokens < 100` is true: bool [rows].

    It compares and computes columns of one number a row, with the syntax of `DataFrame.eval`. Empty: all.
    """
    where = where.strip()
    if not where:
        return np.ones(len(numbers), dtype=bool)
    what = f"rows where {shown(where, 80)}"
    rule = f"must be an expression such as rewards > 0.5, with and, or, not, over {', '.join(map(str, numbers))}"
    try:
        found = numbers.eval(where, engine="python", local_dict={}, global_dict={})
    except Exception as error:  # the parser and pandas raise many kinds
        raise BadInput(what, f"{rule}: {error}") from error
    if not isinstance(found, pd.Series) or found.dtype != bool:
        raise BadInput(what, f"is not true or false for each row; {rule}")
    return np.asarray(found)


# --- one number a token: pure functions of one row, [T] ---------------------------------------------------------------


def beside_columns(sample: Sample, beside: Sample | None, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """The columns of a sample that need another batch or a clip range; `MEANINGS` has the formulas.

    beside: the same row of another batch. Its numbers count up to the first token in which the responses differ, and
    are NaN after it, where the texts are not the same.
    """
    found = dict(sample.columns)
    old, after = found.get("old_log_prob"), None if beside is None else beside.columns.get("old_log_prob")
    if old is not None and beside is not None and after is not None:
        found["new_log_prob"] = up_to(common(sample, beside), after, len(old))
        found["new_ratio"] = ratio_of(found["new_log_prob"], old)
    ratio = found.get("new_ratio", found.get("ratio"))
    if ratio is not None:
        outside = found["outside_range"] = (ratio > 1 + clip_high).float() - (ratio < 1 - clip_low).float()
        if "new_ratio" in found and "advantages" in found:  # above it is clipped where A > 0, below it where A < 0
            found["clipped"] = torch.where(outside * found["advantages"] > 0, outside, 0.0)
    return found


def common(one: Sample, other: Sample) -> int:
    """The number of tokens that two responses share from their start."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.token_ids)))


def up_to(same: int, values_T: Tensor, length: int) -> Tensor:
    """The first `same` values, then NaN up to `length`."""
    found = torch.full((length,), float("nan"), dtype=values_T.dtype)
    found[:same] = values_T[:same]
    return found


def token_texts(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token as it reads after the previous one, because some tokenizers drop a space at the start of a
    text. A token that is a part of a character shows its id, in ⟨ ⟩."""
    texts = []
    for n, token in enumerate(token_ids):
        alone = decode([token])
        if n and UNREADABLE not in alone:
            before = decode([token_ids[n - 1]])
            pair = decode([token_ids[n - 1], token])
            alone = pair[len(before) :] if pair.startswith(before) else alone
        texts.append(f"⟨{token}⟩" if UNREADABLE in alone else alone)
    return texts
