"""`wb.model_card(run)`: the origin of a saved model, as the README.md of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from workbench.comparisons.run_folder import RunFolder, X, run_folder
from workbench.display.headlines import looked_at
from workbench.errors import NotFound
from workbench.errors.plain_text import plain_text
from workbench.settings.roles import TRAINED_ROLES
from workbench.support.checked_calls import checked_call

if TYPE_CHECKING:
    import pandas as pd

CELL = 300  # characters


@checked_call("wb.model_card")
def model_card(run: Any, role: str = "actor", *, folder: str = "runs") -> str:
    """A model card in Markdown: `lab.actor.save_model("my-model", card=wb.model_card(lab))`.

    It lists the algorithm with its settings, the data with its digest, headline metrics of the first and the last
    iteration, the newest evaluations, the commit, versions of libraries, and changes made during the run. run: a
    workbench, a run folder, or "NAME/DATE" of `wb.runs(folder)`. role: whose model is saved. Raises `NotFound` if the
    run has no such role.
    """
    found = run_folder(run, folder)
    base = found.record.settings.get(f"{role}/name")
    if base is None:
        roles = dict.fromkeys(name.partition("/")[0] for name in found.record.settings if "/" in name)
        raise NotFound(f"no model of role {role!r} in {found.name}", f"it has {', '.join(roles) or 'none'}", "name one")
    algorithms = ", ".join(found.algorithms)
    tags = ["workbench", "reinforcement-learning", *(name.lower() for name in found.algorithms)]
    head = {"library_name": "transformers", "base_model": base, "tags": tags}
    code = [("commit", found.record.code.get("commit") or "none"), *found.code("versions").items()]
    changes = [(one["iteration"], one["change"]) for one in found.changes()]
    parts = [
        "---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", "",
        f"# {_cell(found.folder.parent.name)}: {role} after {found.last_metrics()[0]} iterations", "",
        f"The {role} of run {_cell(found.name)}, trained from {_cell(base)}"
        + (f" with {_cell(algorithms)}." if algorithms else "."), "",
        *_section("Figures", _figures(found), ("metric", "first", "last")),
        *_section("Evaluations", _evaluations(found), ("evaluation", "value")),
        *_section("Data", found.record.data.items(), ("data", "value")),
        *_section("Algorithm", _algorithm(found), ("setting", "value")),
        *_section("Training", _training(found), ("setting", "value")),
        *_section("Changed during the run", changes, ("iteration", "change")),
        *_section("Code", code, ("what", "version")),
    ]  # fmt: skip
    return "\n".join(parts)


def _section(title: str, rows: Iterable[tuple[Any, ...]], heads: tuple[str, ...]) -> list[str]:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    if not lines:
        return []
    return [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *lines, ""]


def _figures(run: RunFolder) -> list[tuple[Any, ...]]:
    series: pd.DataFrame = run.series()
    rows: list[tuple[Any, ...]] = []
    for label, name in looked_at(series.columns).items():
        values = series[name].dropna()
        if len(values):
            rows.append((label, f"{values.iloc[0]:.4g}", f"{values.iloc[-1]:.4g}"))
    if len(series):
        rows += [(f"{name}, total", "", f"{series[name].iloc[-1]:,.0f}") for name in X if series[name].iloc[-1] > 0]
    return rows


def _evaluations(run: RunFolder) -> list[tuple[Any, ...]]:
    wanted = ("/prompts", "/samples", "/reward_mean", "/reward_standard_error")
    found = run.last_metrics()[1].items()
    return [
        (name.removeprefix("evaluate/"), f"{value:.4g}") for name, value in found
        if name.startswith("evaluate/") and (name.endswith(wanted) or "/pass@" in name)
    ]  # fmt: skip


def _algorithm(run: RunFolder) -> list[tuple[Any, ...]]:
    return [(f"{one}/{name}", value) for one, values in run.algorithms.items() for name, value in values.items()
            if value is not None]  # fmt: skip


def _training(run: RunFolder) -> list[tuple[Any, ...]]:
    settings = run.record.settings
    return [
        (name, value) for name, value in settings.items()
        if value is not None and (name == "seed" or name.endswith(("/name", "/function", "/dtype"))
                                  or name.startswith(tuple(f"{role}/training/" for role in TRAINED_ROLES)))
    ]  # fmt: skip


def _cell(value: Any) -> str:
    """A value in a Markdown table, with its markup escaped."""
    text = plain_text(str(value), CELL).replace("\n", " ")
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in text)
