"""`lab.prompts.order`: a function of the ledger says which prompts are drawn next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import BadInput
from workbench.errors.containing import passes
from workbench.errors.plain_text import said, shown
from workbench.support.calls.pickling import name_of

if TYPE_CHECKING:
    import pandas as pd

Order = Callable[["pd.DataFrame"], Any]
RULE = (
    "it gives the ledger's rows to draw, in order (a frame or their index), True or False for each row, "
    "or a weight for each row (a Series of finite numbers from 0 on)"
)
EXAMPLE = "lab.prompts.order = lambda ledger: ledger.sort_values('pass_rate', na_position='first')"


def chosen_rows(order: Order, ledger: pd.DataFrame, n: int, seed: tuple[int, ...]) -> list[Any]:
    """Which of the ledger's rows are drawn next, n of them, by their index: the first n that the function gives, from
    its first on again where it gives fewer; by weights, drawn without replacement with probabilities in proportion.

    seed: of the draws by weights. Raises `BadInput` for a function that raises, and for what says no rows.
    """
    called = f"lab.prompts.order = {name_of(order)}"
    given = ledger.copy()
    try:
        found = order(given)
    except BaseException as error:
        if passes(error):
            raise
        raise BadInput(
            f"{called} raised {type(error).__name__}: {said(error)}", RULE, f"correct it, as in {EXAMPLE}"
        ) from error
    rows = _rows(called, found, ledger, n, seed)
    if not rows:
        raise BadInput(
            f"{called} gave none of {len(ledger)} prompts",
            "at least one row must be left; the rates of a prompt without responses are NaN, which no comparison holds",
            "keep those too: ledger[ledger.pass_rate.isna() | ledger.pass_rate.between(0.2, 0.8)]",
        )
    return [rows[i % len(rows)] for i in range(n)]


def _rows(called: str, found: Any, ledger: pd.DataFrame, n: int, seed: tuple[int, ...]) -> list[Any]:
    """By their index, in order."""
    import pandas as pd

    if isinstance(found, pd.DataFrame):
        found = found.index
    if isinstance(found, pd.Series):
        _check_known(called, found.index, ledger)
        if found.index.has_duplicates:
            raise _wrong(called, "a Series that has a row twice")
        found = found.reindex(ledger.index)
        if pd.api.types.is_bool_dtype(found.dropna().infer_objects().dtype):
            return list(ledger.index[(found == True).to_numpy()])  # noqa: E712 (NaN is False)
        return _by_weight(called, found, n, seed)
    if isinstance(found, pd.Index | list | tuple | np.ndarray):
        rows = pd.Index(np.asarray(found, dtype=object) if isinstance(found, list | tuple) else found)
        _check_known(called, rows, ledger)
        return list(rows)
    raise _wrong(called, shown(found))


def _check_known(called: str, rows: pd.Index, ledger: pd.DataFrame) -> None:
    known = rows.isin(ledger.index) if rows.nlevels == 1 else np.zeros(len(rows), bool)
    if not known.all():
        raise _wrong(called, f"a row {shown(rows[int(np.argmin(known))])} that the ledger does not have")


def _by_weight(called: str, weights: pd.Series, n: int, seed: tuple[int, ...]) -> list[Any]:
    """Gumbel's trick: the largest log(w) - log(-log(u)) are a draw without replacement in proportion to w."""
    try:
        values = weights.fillna(0.0).to_numpy(dtype=np.float64)
    except (TypeError, ValueError):
        raise _wrong(called, f"a Series of {weights.dtype}") from None
    if not (np.isfinite(values) & (values >= 0)).all():
        raise _wrong(called, f"a weight of {values[~(np.isfinite(values) & (values >= 0))][0]:g}")
    places = np.flatnonzero(values)
    keys = np.log(values[places]) + np.random.default_rng(seed).gumbel(size=len(places))
    return list(weights.index[places[np.argsort(-keys, kind="stable")[:n]]])


def _wrong(called: str, gave: str) -> BadInput:
    return BadInput(f"{called} gave {gave}", RULE, f"for example {EXAMPLE}")
