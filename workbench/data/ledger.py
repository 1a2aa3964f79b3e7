"""The ledger of prompts: how often each was drawn, and the scores of its responses, in arrays of constant size."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from workbench.batches.schema import ScoredRows
from workbench.data.prompts import Prompts
from workbench.support.intervals import wilson_bounds

OPEN_ITERATIONS = 4  # draws that are this many iterations old accept no more scores
VERSIONS = 8  # the number of weights versions per prompt whose responses are counted separately

# for the responses to one draw of a prompt: their weights `version`, counts, and sums of tokens, rewards, rewards^2
SCORES = [("version", "<i8"), ("responses", "<i8"), ("passed", "<i8"), ("tokens", "<i8"), ("total", "<f8"),
          ("squares", "<f8")]  # fmt: skip
SUMS = [name for name, _ in SCORES[1:]]
DRAW = np.dtype([("uid", "<i8"), ("row", "<i8"), ("iteration", "<i8"), ("now", "<i8"), *SCORES])
ROW = np.dtype(SCORES)
UNSCORED, DRAWN = -1, -2  # in place of a version: no scores yet; this record notes a draw


@dataclass
class Totals:
    """The totals of each row of the source.

    drawn: how often the row was drawn. iteration: of its last draw. sums, last: over all responses, and over those to
    the last draw with scores. versions: the newest `VERSIONS` weights versions. responses, passed: counts for each.
    """

    drawn: np.ndarray
    iteration: np.ndarray
    sums: np.ndarray
    last: np.ndarray
    versions: np.ndarray
    responses: np.ndarray
    passed: np.ndarray

    @classmethod
    def empty(cls, rows: int) -> Totals:
        sums, last = np.zeros(rows, ROW), np.zeros(rows, ROW)
        last["version"] = UNSCORED
        counts = (np.zeros((rows, VERSIONS), np.int64) for _ in range(2))
        versions = np.full((rows, VERSIONS), UNSCORED, np.int64)
        return cls(np.zeros(rows, np.int64), np.zeros(rows, np.int64), sums, last, versions, *counts)

    def add(self, draws: np.ndarray) -> None:
        """Add the scores of draws, in the order of the draws."""
        scored = draws[draws["responses"] > 0]
        for name in SUMS:
            np.add.at(self.sums[name], scored["row"], scored[name])
        _, from_end = np.unique(scored["row"][::-1], return_index=True)  # keeps the later draw of a row drawn twice
        newest = scored[len(scored) - 1 - from_end]
        for name in ROW_NAMES:
            self.last[name][newest["row"]] = newest[name]
        for version in sorted(set(scored["version"].tolist())):
            self._add_version(version, scored[scored["version"] == version])

    def _add_version(self, version: int, draws: np.ndarray) -> None:
        rows, of_row = np.unique(draws["row"], return_inverse=True)
        known = self.versions[rows] == version
        place = np.where(known.any(1), known.argmax(1), self.versions[rows].argmin(1))  # a new one replaces the oldest
        new = ~known.any(1)
        for name, counts in (("responses", self.responses), ("passed", self.passed)):
            counts[rows[new], place[new]] = 0
            added = np.zeros(len(rows), np.int64)
            np.add.at(added, of_row, draws[name])
            counts[rows, place] += added
        self.versions[rows, place] = version


ROW_NAMES = [name for name, _ in SCORES]


@dataclass
class Ledger:
    """Counts draws of prompts and the rewards of their responses. Memory grows with the rows of the source, not with
    the draws.

    rows: the number of rows of the source. threshold: the smallest reward with which a response passes; a change
        affects later scores. changes: the records since a journal took the state; None without a journal.
    """

    rows: int
    threshold: float = 1.0
    changes: list[bytes] | None = None
    _totals: Totals = field(init=False)
    _open: list[np.ndarray] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._totals = Totals.empty(self.rows)
        self._lock = threading.RLock()  # the scheduler's thread notes scores

    # --- noting -------------------------------------------------------------------------------------------------------

    def note_drawn(
        self, rows: Sequence[int] | np.ndarray, first_uid: int, iteration: int, now: int | None = None
    ) -> None:
        """Note that rows were drawn for an iteration, as prompts numbered from `first_uid` on. now: the current
        iteration, if `iteration` is a future one."""
        draws = np.zeros(len(rows), DRAW)
        draws["uid"], draws["row"] = np.arange(first_uid, first_uid + len(rows)), rows
        draws["iteration"], draws["version"] = iteration, DRAWN
        draws["now"] = iteration if now is None else now
        self._note(draws)

    def note_scored(self, meta: Mapping[str, Any], parts: Sequence[ScoredRows]) -> None:
        """Note the rewards of responses. Ignores responses to prompts that were drawn elsewhere or too long ago, and
        greedy responses, which serve as baselines. New scores of a draw replace its earlier scores.

        meta: the batch's meta: its `iteration` (without it the batch is not from a draw), and the `weights_version` and
        `temperature` of its responses; `weights_versions`: by prompt number, if several versions sampled them.
        """
        if "iteration" not in meta or meta.get("temperature") == 0:
            return
        uids, rewards, tokens = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("prompt_uid", "reward", "tokens")
        )
        draws = np.zeros(len(np.unique(uids)), DRAW)
        draws["uid"], of_row = np.unique(uids, return_inverse=True)
        draws["iteration"], draws["version"] = meta["iteration"], meta.get("weights_version", 0)
        if versions := meta.get("weights_versions"):
            draws["version"] = [versions.get(str(uid), meta.get("weights_version", 0)) for uid in draws["uid"].tolist()]
        for name, values in (
            ("responses", np.ones(len(uids), np.int64)), ("passed", np.float32(rewards) >= np.float32(self.threshold)),
            ("tokens", tokens), ("total", rewards), ("squares", rewards**2),
        ):  # fmt: skip
            np.add.at(draws[name], of_row, values)
        self._note(draws)

    def _note(self, draws: np.ndarray) -> None:
        with self._lock:
            if self.changes is not None:
                self.changes.append(draws.tobytes())
            self._apply(draws)

    def _apply(self, draws: np.ndarray) -> None:
        """Apply records: either new draws, or scores of earlier draws."""
        if not len(draws):
            return
        if draws["version"][0] != DRAWN:
            for block in self._open:
                of = draws[np.isin(draws["uid"], block["uid"])]
                place = of["uid"] - block["uid"][0]
                for name in ROW_NAMES:
                    block[name][place] = of[name]
            return
        draws = draws.copy()
        draws["version"], now = UNSCORED, int(draws["now"][0])
        while self._open and self._open[0]["iteration"][0] <= now - OPEN_ITERATIONS:
            self._totals.add(self._open.pop(0))
        self._open.append(draws)
        np.add.at(self._totals.drawn, draws["row"], 1)
        self._totals.iteration[draws["row"]] = draws["iteration"]

    # --- reading ------------------------------------------------------------------------------------------------------

    def totals(self) -> Totals:
        """Return the present totals, including draws that are still open."""
        with self._lock:
            totals = deepcopy(self._totals)
            for block in self._open:
                totals.add(block)
        return totals

    # --- kept ---------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        with self._lock:
            self._totals, self._open, self.changes = Totals.empty(self.rows), [], None

    def state(self) -> bytes:
        """Return the content as bytes of a safetensors file: the drawn rows' totals, and the open draws."""
        from safetensors.numpy import save

        with self._lock:
            touched = np.flatnonzero(self._totals.drawn)
            found = {"touched": touched}
            for name, array in vars(self._totals).items():
                found |= _plain(name, array[touched])
            blocks = np.concatenate([np.zeros(0, DRAW), *self._open])
            found["open/sizes"] = np.array([len(block) for block in self._open], np.int64)
            return save({name: np.ascontiguousarray(a) for name, a in {**found, **_plain("open", blocks)}.items()})

    def state_and_changes(self) -> bytes:
        """Return `state`, and collect later records in `changes` from now on."""
        with self._lock:
            self.changes = []
            return self.state()

    def take_changes(self) -> list[bytes]:
        """Return the records since the last call, and start a new list."""
        with self._lock:
            taken, self.changes = self.changes or [], []
            return taken

    def load_state(self, state: bytes, changes: Sequence[bytes] = ()) -> None:
        """Restore a `state`, and apply the changes noted since. Both must come from the same source."""
        from safetensors.numpy import load

        found, totals = load(state), Totals.empty(self.rows)
        for name, array in vars(totals).items():
            _fill(array, found["touched"], name, found)
        sizes = found["open/sizes"].tolist()
        blocks = np.zeros(sum(sizes), DRAW)
        _fill(blocks, np.arange(len(blocks)), "open", found)
        with self._lock:
            self._totals = totals
            self._open = [block.copy() for block in np.split(blocks, np.cumsum(sizes)[:-1])] if sizes else []
            for one in changes:
                self._apply(np.frombuffer(one, DRAW))
            self.changes = None


def _plain(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return an array of records as one array per field."""
    names = array.dtype.names
    return {name: array} if names is None else {f"{name}/{one}": array[one] for one in names}


def _fill(array: np.ndarray, rows: np.ndarray, name: str, found: Mapping[str, np.ndarray]) -> None:
    for one in array.dtype.names or [""]:
        part = array[one] if one else array
        part[rows] = found[f"{name}/{one}" if one else name]


def usual_order(prompts: Prompts, drawn: np.ndarray) -> np.ndarray:
    """Return the rows in the order in which they are drawn without `order`: least often drawn rows first, and rows
    drawn equally often in the order of the epoch with that number. drawn: how often each row was drawn."""
    place = np.arange(len(drawn))
    if prompts.shuffle:
        for epoch in np.unique(drawn).tolist():
            of_epoch = np.empty(len(drawn), np.int64)
            of_epoch[np.random.default_rng([prompts.seed, epoch]).permutation(len(drawn))] = np.arange(len(drawn))
            place[drawn == epoch] = of_epoch[drawn == epoch]
    return np.lexsort((place, drawn))


def ledger_frame(prompts: Prompts, ledger: Ledger, iteration: int) -> pd.DataFrame:
    """Return a frame with one row per prompt, see `PromptStream.ledger`, in `usual_order`."""
    totals = ledger.totals()
    drawn, sums, last = totals.drawn, totals.sums, totals.last
    values: dict[str, Any] = {
        "drawn": drawn,
        "iterations_since": np.where(drawn > 0, np.maximum(float(iteration) - totals.iteration, 0), np.nan),
        "responses": sums["responses"],
        **_rates("pass", sums["passed"], sums["responses"]),
        "reward_mean": _ratio(sums["total"], sums["responses"]),
        "reward_variance": _variance(sums),
        "response_tokens_mean": _ratio(sums["tokens"], sums["responses"]),
        "last_version": np.where(last["version"] == UNSCORED, np.nan, last["version"]),
        **_rates("last_pass", last["passed"], last["responses"]),
        "last_reward": _ratio(last["total"], last["responses"]),
        "last_variance": _variance(last),
        "last_response_tokens": _ratio(last["tokens"], last["responses"]),
    }
    source = prompts.frame.rename(columns={name: f"data_{name}" for name in values})
    known = pd.DataFrame(values, index=source.index)
    first = ["prompt", "prompt_tokens"]
    found = pd.concat([source[first], known, source.drop(columns=first)], axis=1)
    return found.iloc[usual_order(prompts, drawn)]


def versions_frame(prompts: Prompts, ledger: Ledger) -> pd.DataFrame:
    """Return a frame with one row per prompt and weights version, see `PromptStream.ledger`."""
    totals = ledger.totals()
    rows, places = np.nonzero(totals.versions != UNSCORED)
    versions = totals.versions[rows, places]
    responses, passed = totals.responses[rows, places], totals.passed[rows, places]
    values = {"version": versions, "responses": responses, "passed": passed, **_rates("pass", passed, responses)}
    found = pd.DataFrame(values, index=prompts.frame.index[rows]).iloc[np.lexsort((versions, rows))]
    return found.set_index("version", append=True)


def _rates(name: str, passed: np.ndarray, responses: np.ndarray) -> dict[str, np.ndarray]:
    """Return a rate and the bounds of its 95 % interval; NaN without responses."""
    n = np.where(responses > 0, responses, np.nan)
    low, high = wilson_bounds(passed, n)
    return {f"{name}_rate": passed / n, f"{name}_low": low, f"{name}_high": high}


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.where(below > 0, above / np.maximum(below, 1), np.nan)


def _variance(scores: np.ndarray) -> np.ndarray:
    """Return the unbiased variance of rewards; NaN for fewer than two responses."""
    n = scores["responses"]
    squares = scores["squares"] - scores["total"] ** 2 / np.maximum(n, 1)
    return np.where(n > 1, np.maximum(squares, 0) / np.maximum(n - 1, 1), np.nan)
