"""Run a notebook and its script with the same settings, and compare every metric of every stage call."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import BadInput, WorkbenchError
from workbench.export.cells import Cell
from workbench.export.parameters import TAGS, take_parameters
from workbench.export.statements import statements_of
from workbench.support.files import KEY_FILE, home, signing_key, write_bytes
from workbench.telemetry.store import TelemetryStore

TIMES = ("_s", "_per_s", "_seconds")  # how long something took is not a number to prove
ROUNDING = 2e-3  # relative, in fp32, where several processes or another placement sum in another order
BAD = ("differs", "only in the script", "missing in the script")
# The notebook may call these stages more often than the script, to look at results: they train nothing.
LOOKED_AT = ("compute_", "generate_sequences", "evaluate")
CALL = ["workbench", "iteration", "stage", "call"]


class ProofFailed(WorkbenchError, RuntimeError):
    """The notebook or the script did not run to its end."""


@dataclass(frozen=True)
class Proof:
    """The result of the comparison.

    table: a row a stage call: workbench, iteration, stage, call (its number within that stage and iteration), metrics
    (how many were compared), largest_difference (relative to the larger value, or to 1e-6; of gaps to 1e-3), verdict.
    tolerance: the largest difference that counts as rounding; 0 where all must be equal to the last bit.
    """

    table: pd.DataFrame
    tolerance: float

    @property
    def ok(self) -> bool:
        compared = self.table["metrics"].sum()
        return bool(compared) and not self.table["verdict"].isin(BAD).any()

    def __str__(self) -> str:
        counts = self.table.groupby("verdict")["metrics"].agg(["size", "sum"])
        told = [f"{row['size']} calls, {row['sum']} metrics: {verdict}" for verdict, row in counts.iterrows()]
        bound = f"within {self.tolerance:g} relative" if self.tolerance else "to the last bit"
        verdict = f"equal {bound}" if self.ok else f"NOT equal {bound}"
        return f"{self.table.to_string(index=False)}\n{'; '.join(told)}\nnotebook and script: {verdict}"


def prove(notebook: Path, script: str, settings: Mapping[str, Any], opening: Mapping[str, Any] | None = None) -> Proof:
    """Run a notebook headless and a script as a program, each in a fresh process, and compare their metrics.

    settings: parameter values for both. opening: values that both pass to `wb.open` in place of their own. Both run in
    the notebook's folder; their run folders, and their parameter `RUNS`, point to a temporary folder. Workbenches that
    are open stay untouched. Raises `ProofFailed` with the last lines of the program that failed, and `BadInput` if the
    script already has an option `--output`.
    """
    parameters = parameters_of(script)
    if any(name.lower() == "output" for name in parameters):
        raise BadInput("a parameter OUTPUT", "the proof needs the script's option --output for the results",
                       "give the parameter another name")  # fmt: skip
    beside = str(notebook.parent.resolve())  # what a notebook imports from there, its script does as well
    with tempfile.TemporaryDirectory(prefix="wb-proof-") as folder:
        base = Path(folder)
        ran = {}
        ways = (("notebook", _notebook_command, None), ("script", _script_command, notebook.parent))
        for name, command_of, folder_of in ways:
            own = base / name
            (own / "home").mkdir(parents=True)
            (home() / "models").mkdir(parents=True, exist_ok=True)
            (own / "home" / "models").symlink_to(home() / "models")
            write_bytes(own / "home" / KEY_FILE, signing_key())  # both may go on from a checkpoint
            runs = str(own / "runs")
            forced = {**(opening or {}), "runs": runs}
            is_text = re.match(r"(Annotated\[)?str\b", parameters.get("RUNS", ""))
            given = {"RUNS": runs, **settings} if is_text else settings
            environment = {
                **os.environ, "WORKBENCH_HOME": str(own / "home"), "WORKBENCH_WIDGETS": "static",
                "PYTHONPATH": os.pathsep.join(filter(None, (beside, os.environ.get("PYTHONPATH")))),
            }  # fmt: skip
            try:
                command = command_of(notebook, script, given, forced, own)
                done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder_of)
                if done.returncode:
                    last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
                    raise ProofFailed(
                        f"the {name} ended with exit code {done.returncode}:\n{last}\n", "both must run to the end"
                    )
            finally:  # ends workbenches that were left open: no later process would find them
                end = [sys.executable, "-m", "workbench.launch.execute"]
                subprocess.run(end, env=environment, capture_output=True)
            ran[name] = own / "runs"
        return compare_runs(ran["notebook"], ran["script"])


def _notebook_command(
    path: Path, script: str, settings: Mapping[str, Any], opening: Mapping[str, Any], own: Path
) -> list[str]:
    content, apart = json.loads(path.read_text(encoding="utf-8")), {*settings} & parameters_of(script).keys() - {"RUNS"}
    for number, cell in enumerate(content["cells"], 1):
        if TAGS & set(cell.get("metadata", {}).get("tags", ())):
            source = "".join(cell["source"])
            own_names = {
                parameter.name for parameter in take_parameters(statements_of(Cell(number, source, tags=TAGS)))[0]
            }
            cell["source"] = "\n".join([source, *(f"{n} = {v!r}" for n, v in settings.items() if n in own_names)])
            apart -= own_names
    if apart:
        rule = "the notebook gets values only in a cell tagged `parameters`, and has no loop counts of --loops"
        raise BadInput(f"a proof with {min(apart)}", rule, "tag the cell that assigns it, instead of --parameters")
    written = own / "notebook.ipynb"
    written.write_text(json.dumps(content), encoding="utf-8")
    where = [str(written), str(path.parent.resolve())]
    return [sys.executable, "-m", "workbench.launch.execute", *where, json.dumps(opening)]


def _script_command(
    path: Path, script: str, settings: Mapping[str, Any], opening: Mapping[str, Any], own: Path
) -> list[str]:
    written = own / "script.py"
    written.write_text(script, encoding="utf-8")
    own_names = parameters_of(script)
    options = [word for name, value in settings.items() for word in option(name, value) if name in own_names]
    for name, value in opening.items():
        options += option("output" if name == "runs" else name, value)
    return [sys.executable, str(written), *options]


def settings_of(given: Sequence[str]) -> dict[str, Any]:
    """Parse `NAME=VALUE` into Python values; a value that is not Python stays text."""
    settings: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--set {one}", "a parameter's name and its value", "write --set PROMPTS=4 MODEL=tiny-llama")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[name] = value
    return settings


def parameters_of(script: str) -> dict[str, str]:
    """The parameters of a script's `main`, which is its last function, with their annotations."""
    functions = [node for node in ast.parse(script).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.arg: ast.unparse(one.annotation) for main in functions[-1:] for one in main.args.args if one.annotation}


def option(name: str, value: Any) -> list[str]:
    """A parameter's value as command-line words."""
    flag = "--" + name.lower().replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def compare_runs(notebook: Path, script: Path) -> Proof:
    """Compare the metrics that two folders of runs hold, workbench by workbench, in the order of opening."""
    first, second = _labs(notebook), _labs(script)
    single = all(_single(folder) for labs in (first, second) for folder in labs.values())
    calls = {lab: (_calls(first.get(lab)), _calls(second.get(lab))) for lab in dict.fromkeys([*first, *second])}
    # which conversation rows are decoded together depends on the environments' speed, and so does rounding
    converses = any("turns/mean" in values for pair in calls.values() for both in pair for _, _, values in both)
    tolerance = 0.0 if single and not converses else ROUNDING
    rows = [row for lab, pair in calls.items() for row in _compared(lab, *pair, tolerance)]
    columns = [*CALL, "metrics", "largest_difference", "verdict"]
    return Proof(pd.DataFrame(rows, columns=columns), tolerance)


def _labs(runs: Path) -> dict[str, Path]:
    """Run folders by workbench name and earlier openings, as `first` or `first (2)`. Nested folders of programs that
    the notebook starts are included."""
    found: dict[str, Path] = {}
    counts: dict[str, int] = defaultdict(int)
    for folder in sorted((file.parent for file in runs.rglob("metrics.jsonl")), key=lambda one: one.name):
        counts[folder.parent.name] += 1
        n = counts[folder.parent.name]
        found[folder.parent.name + (f" ({n})" if n > 1 else "")] = folder
    return found


def _single(folder: Path) -> bool:
    """Whether everything ran on one CPU process."""
    devices: list[str] = TelemetryStore(folder).spans()["device"].unique().tolist()
    return len(devices) <= 1 and not any(device.startswith("cuda") for device in devices)


Values = dict[str, float]
Call = tuple[int, str, Values]


def _calls(folder: Path | None) -> list[Call]:
    if folder is None:
        return []
    rows: list[dict[str, Any]] = TelemetryStore(folder).metrics().to_dict("records")  # type: ignore[assignment]
    known = {"time_s", "iteration", "stage", "run"}
    return [
        (
            int(row["iteration"]),
            str(row["stage"]),
            {n: v for n, v in row.items() if not (n in known or n.endswith(TIMES) or math.isnan(v))},
        )
        for row in rows
    ]


def _compared(lab: str, first: Sequence[Call], second: Sequence[Call], tolerance: float) -> list[dict[str, Any]]:
    """Table rows of one workbench, stage by stage of each iteration."""
    rows = []
    for iteration, stage in dict.fromkeys((call[0], call[1]) for call in (*first, *second)):
        ours = [values for i, s, values in first if (i, s) == (iteration, stage)]
        theirs = [values for i, s, values in second if (i, s) == (iteration, stage)]
        for number, (one, other) in enumerate(_paired(ours, theirs, tolerance), 1):
            base = {"workbench": lab, "iteration": iteration, "stage": stage, "call": number}
            judged = _judged(one, other, tolerance)
            if judged["verdict"] == "only in the notebook" and not (second and stage.startswith(LOOKED_AT)):
                judged["verdict"] = "missing in the script"
            rows.append({**base, **judged})
    return rows


def _paired(
    ours: Sequence[Values], theirs: Sequence[Values], tolerance: float
) -> list[tuple[Values | None, Values | None]]:
    """Pair the calls of one stage in order. The notebook may have made extra calls, only to look at results: that many
    calls that differ from the script's next call are skipped."""
    spare = max(0, len(ours) - len(theirs))
    pairs: list[tuple[Values | None, Values | None]] = []
    at = 0
    for other in theirs:
        passed = next((n for n, one in enumerate(ours[at : at + spare + 1]) if _difference(one, other) <= tolerance), 0)
        pairs += [(one, None) for one in ours[at : at + passed]]
        at, spare = at + passed, spare - passed
        pairs.append((ours[at] if at < len(ours) else None, other))
        at += 1
    return pairs + [(one, None) for one in ours[at:]]


def _judged(one: Values | None, other: Values | None, tolerance: float) -> dict[str, Any]:
    if one is None or other is None:
        where = "script" if one is None else "notebook"
        return {"metrics": 0, "largest_difference": math.nan, "verdict": f"only in the {where}"}
    difference = _difference(one, other)
    within = "within rounding" if difference <= tolerance else "differs"
    return {"metrics": len(one), "largest_difference": difference, "verdict": within if difference else "equal"}


def _difference(first: Values, second: Values) -> float:
    """The largest relative difference; infinite if a metric is missing on one side, or only one value is finite."""
    if set(first) != set(second):
        return math.inf
    unequal = [(name, first[name], second[name]) for name in first if first[name] != second[name]]
    if not all(math.isfinite(one) and math.isfinite(other) for _, one, other in unequal):
        return math.inf
    return max(
        (abs(one - other) / max(abs(one), abs(other), _least(name)) for name, one, other in unequal), default=0.0
    )


def _least(name: str) -> float:
    """The smallest denominator of a relative difference: metrics that would be 0 without rounding, such as gaps between
    engines in nats, can consist of rounding only."""
    is_gap = any(part.endswith("_gap") for part in name.split("/"))
    return 1e-3 if is_gap or name.endswith("/max_deviation") else 1e-6
