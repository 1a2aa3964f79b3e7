"""`wb.diff(a, b)`: how two runs differ in settings, data and code, and what was changed while they ran."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from workbench.comparisons.run_folder import RunFolder, run_folder
from workbench.display.html import folded, table
from workbench.errors.plain_text import plain_text
from workbench.support.checked_calls import checked_call

MOST_LINES = 60


@dataclass(frozen=True)
class RunDiff:
    """Run b compared with run a. settings, data, code: frames with a row for each differing name, and its values as `a`
    and `b`; None where a run has no such name. changes: what was changed while they ran, with `run` and `iteration`.
    source: by role, a diff of its function. names: of the two runs."""

    settings: pd.DataFrame
    data: pd.DataFrame
    code: pd.DataFrame
    changes: pd.DataFrame
    source: Mapping[str, str]
    names: tuple[str, str]

    @property
    def empty(self) -> bool:
        """Whether nothing differs, and nothing was changed in either run."""
        return not (len(self.settings) or len(self.data) or len(self.code) or len(self.changes))

    def __repr__(self) -> str:
        lines = [f"a: {self.names[0]}", f"b: {self.names[1]}"]
        for title, found in (("settings", self.settings), ("data", self.data), ("code", self.code)):
            lines.append(f"{title}: {'the same' if found.empty else ''}".rstrip())
            lines += [f"  {name}: {_text(row['a'])} -> {_text(row['b'])}" for name, row in found.iterrows()]
        lines += [f"  {line}" for text in self.source.values() for line in text.splitlines()[:MOST_LINES]]
        lines += [
            f"changed in {row['run']}, iteration {row['iteration']}: {row['change']}"
            for _, row in self.changes.iterrows()
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = []
        for title, found in (("settings", self.settings), ("data", self.data), ("code", self.code)):
            rows = [{"": str(name), "a": _text(row["a"]), "b": _text(row["b"])} for name, row in found.iterrows()]
            caption = f"{title}: {len(rows) or 'none'} differ; a is {self.names[0]}, b is {self.names[1]}"
            parts.append(table(rows or [{"": "the same"}], caption=caption, max_rows=max(1, len(rows))))
        for role, text in self.source.items():
            parts.append(folded(f"The function of {role}", f"<pre>{escape(text)}</pre>"))
        if len(self.changes):
            changed: list[Any] = self.changes.to_dict("records")
            parts.append(table(changed, caption="changed during the runs", max_rows=40))
        return "".join(parts)


@checked_call("wb.diff")
def diff(a: Any, b: Any, *, folder: str = "runs") -> RunDiff:
    """How two runs differ: `wb.diff("lab/20261126-101500-000001", lab)`.

    a, b: each a workbench, a run folder, or "NAME/DATE" of `wb.runs(folder)`. settings: those at opening, and those
    with which an algorithm began. data: the source of prompts and a digest of their tokens. code: the commit, source
    files of this package, versions of libraries, functions of roles. Raises `NotFound` if there is no such run.
    """
    one, two = run_folder(a, folder), run_folder(b, folder)
    changes = [{"run": name, **row} for name, run in (("a", one), ("b", two)) for row in run.changes()]
    frame = pd.DataFrame(changes, columns=["run", "time_s", "iteration", "change"], dtype=object)
    return RunDiff(
        settings=_differing(one.settings, two.settings),
        data=_differing(one.record.data, two.record.data),
        code=_differing(_code(one), _code(two)),
        changes=frame.drop(columns=["time_s"]),
        source=_sources(one, two),
        names=(one.name, two.name),
    )


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> pd.DataFrame:
    names = [name for name in dict.fromkeys([*a, *b]) if repr(a.get(name)) != repr(b.get(name))]
    values = {"a": [a.get(name) for name in names], "b": [b.get(name) for name in names]}
    return pd.DataFrame(values, index=pd.Index(names, dtype=object), dtype=object)


def _code(run: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = {"commit": run.record.code.get("commit")}
    for part in ("versions", "files"):
        found |= {f"{part}/{name}": value for name, value in run.code(part).items()}
    functions = run.code("functions").items()
    return found | {f"function of {role}": f"{one.get('name')} {one.get('digest')}" for role, one in functions}


def _sources(a: RunFolder, b: RunFolder) -> dict[str, str]:
    """A unified diff of each role's function, where both sources are recorded and differ."""
    found = {}
    ones, twos = a.code("functions"), b.code("functions")
    for role in ones.keys() & twos.keys():
        before, after = (str(one[role].get("source", "")).splitlines() for one in (ones, twos))
        if before and after and before != after:
            lines = difflib.unified_diff(before, after, f"a: {role}", f"b: {role}", lineterm="", n=2)
            found[role] = "\n".join(plain_text(line) for line in lines)
    return found


def _text(value: Any) -> str:
    return plain_text(str(value), 120)
