"""Write the part of a failed or interrupted cell that had been executed."""

from __future__ import annotations

import ast
import keyword
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors.plain_text import plain_text
from workbench.export.cells import Cell, python_of
from workbench.export.statements import first_line

Position = tuple[int, int]  # in a cell's text: line, from 1, and column
PLACEMENT = ("Placement.of", "Layout")
# what a field of an algorithm may hold
SETTINGS = ("wb.Sampling", "wb.Correction", "wb.ClipCov", "wb.KLCov", "wb.Context")
VALUES = (
    ast.Expression | ast.Constant | ast.Dict | ast.List | ast.Tuple | ast.keyword | ast.Load | ast.UnaryOp | ast.USub
)

REPEATS = ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
MOST = 10**6  # iterations of one call
NO_STAGES = ("move", "restart")  # calls that make none


@dataclass
class MadeCall:
    """One call of an algorithm's `run`, `iterate`, `step` or `restart`, or a "move".

    name: the variable that held the algorithm, or the workbench that moved; "" for none. made_as: for that, the call
    that makes such an algorithm. made: of which algorithm. by_panel: whether the panel made it. iterations: that it
    ended. stages: what it made of the next one. resumed: it began with the rest of an iteration. finished_later:
    another `run` took the stages over. arguments: of `run`, beside the number of iterations, as a script writes them.
    """

    call: str
    algorithm: str
    name: str
    made_as: str
    made: object
    lab: str
    at: Position | None
    by_panel: bool
    iterations: int
    stages: tuple[str, ...]
    under_way: bool
    resumed: bool
    done: bool
    placement: str = ""
    finished_later: bool = False
    arguments: str = ""

    @classmethod
    def of(cls, kind: str, details: Mapping[str, Any]) -> MadeCall:
        """Build it from an event. Events can come from strangers: invalid names and unknown calls are dropped."""
        title, lab = _name(details.get("algorithm")), _name(details.get("lab"))
        own = (f"wb.{title}", title) if title else ()
        stages, iterations = details.get("stages"), details.get("iterations")
        named = [plain_text(" ".join(str(stage).split()))[:60] for stage in stages] if isinstance(stages, list) else []
        given = [(name, details.get(name)) for name in ("staleness", "pause_after")]
        return cls(
            call="move" if kind == "move" else str(details.get("call")), algorithm=title or "an algorithm",
            name=lab if kind == "move" else _name(details.get("name")),
            made_as=expression(str(details.get("made_as", "")), own) or "", made=details.get("id"), lab=lab,
            at=position_of(details.get("at")), by_panel=bool(details.get("by")),
            iterations=min(max(iterations, 0), MOST) if isinstance(iterations, int) else 0,
            stages=tuple(named), under_way=bool(details.get("under_way")), resumed=bool(details.get("resumed")),
            done=bool(details.get("done", True)),
            arguments="".join(f", {name}={n}" for name, n in given if type(n) is int and n),
            placement=(expression(str(details.get("placement"))) or "") if kind == "move" else "",
        )  # fmt: skip

    def __str__(self) -> str:
        if self.call == "move":
            return "a move to another placement"
        ended = f"{self.iterations} iteration{'s' * (self.iterations != 1)}"
        return f"{self.algorithm}.{self.call}: {ended}" + (f", then {', '.join(self.stages)}" if self.stages else "")


@dataclass
class Made:
    """The algorithm calls, moves and stages that one cell called, with their positions in the cell."""

    calls: list[MadeCall] = field(default_factory=list)
    stages: list[tuple[Position | None, str]] = field(default_factory=list)

    def __str__(self) -> str:
        """Counts of the stages called, also by algorithms, and the calls that are not stages."""
        others = [call.call for call in self.calls if call.call in NO_STAGES]
        counts = Counter([stage for _, stage in self.stages if stage] + others)
        told = (f"{name:.60} {count} time{'s' * (count != 1)}" for name, count in counts.items())
        return ", ".join(told) or "no stage"

    def add(self, other: Made) -> None:
        self.calls += other.calls
        self.stages += other.stages


def written(calls: Sequence[MadeCall], made_names: dict[str, str]) -> tuple[list[str], set[str], list[str]]:
    """Return lines that repeat the calls, the names they need, and a sentence for each call that has no line.

    made_names: names given to algorithms that had no variable, by how they were made; new ones are added.
    """
    lines: list[tuple[str, str, list[str]]] = []  # name, verb, and its arguments, an entry a call
    needs: set[str] = set()
    left: list[str] = []
    for call in calls:
        name = call.name or made_names.get(str(call.made), "")
        if call.call == "move":
            if not (name and call.placement):
                left.append(f"{call}, of a workbench without a variable")
                continue
            lines.append((name, "move", [call.placement]))
            needs |= {name, "wb"}
            continue
        if not name and not (call.made_as and call.lab):
            left.append(f"{call}, of an algorithm without a variable; assign it in a cell")
            continue
        if not name:
            name = f"panel_{call.algorithm.lower()}"
            name += f"_{len(made_names) + 1}" * (name in made_names.values())
            made_names[str(call.made)] = name
            lines.append((name, "=", [re.sub(r"\blab\b", call.lab, call.made_as, count=1)]))
            needs |= {call.lab, *({"wb"} if call.made_as.startswith("wb.") else {call.algorithm})}
        needs |= {name} if call.name else set()
        _add(lines, name, call)
    return [_line(*one) for one in lines], needs, left


def _add(lines: list[tuple[str, str, list[str]]], name: str, call: MadeCall) -> None:
    """Append one call of an algorithm to the lines, merged with the previous lines where possible."""
    if call.call == "restart":
        lines.append((name, "restart", []))
    elif call.iterations and call.call == "run":
        verb = f"run{call.arguments}"
        if not (lines and lines[-1][:2] == (name, verb)):
            lines.append((name, verb, []))
        lines[-1][2].extend(["1"] * call.iterations)
    elif call.iterations:
        if lines and lines[-1][:2] == (name, "step"):
            lines.pop()  # it does the rest
        lines.append((name, "iterate", []))
    if call.stages and not call.finished_later:
        if not (lines and lines[-1][:2] == (name, "step")):
            lines.append((name, "step", []))
        lines[-1][2].extend(call.stages)
        if not call.done and not call.under_way and call.call != "step":
            lines.append((name, "restart", []))


def _line(name: str, verb: str, given: list[str]) -> str:
    if verb == "=":
        return f"{name} = {given[0]}"
    if verb == "step":
        one = f"{name}.step()  # {', '.join(given)}"
        return one if len(given) == 1 else f"for _ in range({len(given)}):\n    {one}"
    if verb.startswith("run"):
        return f"{name}.run({len(given)}{verb.removeprefix('run')})"
    return f"{name}.{verb}({', '.join(given)})"


def expression(text: str, callables: Sequence[str] = ()) -> str | None:
    """A recorded placement or algorithm as script source; None for any other text, because records can come from
    strangers. callables: functions that may be called beside placements and settings of the workbench."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None
    called = {*callables, *SETTINGS} if callables else {*PLACEMENT}
    names = called | ({"wb", "lab"} if callables else {"Placement"})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) not in called:
                return None
        elif isinstance(node, ast.Name | ast.Attribute):
            if ast.unparse(node) not in names:
                return None
        elif not isinstance(node, VALUES):
            return None
    written = ast.unparse(tree)
    return written if callables else re.sub(r"(Placement\.of|Layout)\(", r"wb.\1(", written)


def position_of(given: Any) -> Position | None:
    """Read a recorded position; None for anything else."""
    if isinstance(given, list | tuple) and len(given) == 2 and all(isinstance(n, int) for n in given):
        return given[0], given[1]
    return None


def _name(given: Any) -> str:
    good = isinstance(given, str) and given.isidentifier() and not keyword.iskeyword(given)
    return given if good else ""


def done_of(cell: Cell, failed: Position | None, made: Made) -> tuple[str, list[str]]:
    """The text of what a cell had done before it failed or was interrupted, and a sentence for what the text lacks: the
    statements that had ended, and what the last one did, if it is a call of an algorithm. failed: the place of that
    statement; None: the cell was no Python, or the place is not known."""
    text = "" if failed is None else python_of(cell)[0]
    node = next((one for one in ast.parse(text).body if failed is not None and _has(one, failed)), None)
    if node is None:
        return "", [f"its effect is unknown; it had called {made}"] * bool(made.calls or made.stages)
    lines, row = text.split("\n"), first_line(node) - 1
    above, line = lines[:row], lines[row].encode()
    ended = "\n".join([*above, line[: node.col_offset].decode()]).rstrip("; \n")  # a; b
    inside = Made(
        [call for call in made.calls if call.at is None or _has(node, call.at)],
        [one for one in made.stages if one[0] is not None and _has(node, one[0])],
    )
    if (called := _call_of(node, inside)) is not None:
        return "\n".join(filter(None, [ended, *called])), _lacking(inside)
    block = sum(isinstance(one, ast.stmt) for one in ast.walk(node)) > 1
    if not (block or inside.calls) and [at for at, _ in inside.stages] in ([], [failed]):  # nothing had ended
        return ended, []
    return ended, [f"`{line[node.col_offset :].decode():.60}` is not in the script; it had called {inside}"]


def _lacking(made: Made) -> list[str]:
    """What the lines of an interrupted call of an algorithm do not do, a sentence each."""
    (call,), stage = made.calls, made.stages[-1][1] if made.stages else ""
    ahead = bool(call.arguments and call.stages) and not call.finished_later
    times = sum(one == stage for _, one in made.stages)
    cut = stage.startswith("update_") and stage not in call.stages and times > call.iterations
    told = ["rollouts that it had generated ahead are not in the script"] * ahead
    steps = f"the optimizer steps that {stage} had taken"
    return told + [f"{steps} are in the script only if a later cell completes the update"] * cut


def _has(node: ast.stmt, place: Position) -> bool:
    return (first_line(node), node.col_offset) <= place < (node.end_lineno or 0, node.end_col_offset or 0)


def _call_of(node: ast.stmt, made: Made) -> list[str] | None:
    """Lines that repeat what an interrupted algorithm call did; None if the statement is not such a call."""
    if len(made.calls) != 1 or not isinstance(node, ast.Expr | ast.Assign):
        return None
    (call,) = made.calls
    parts = [*ast.walk(node)]
    here = (one for one in parts if isinstance(one, ast.Call) and (one.lineno, one.col_offset) == call.at)
    found = next((one for one in here if isinstance(one.func, ast.Attribute) and one.func.attr == call.call), None)
    again = [one for one in parts if isinstance(one, REPEATS) and found in [*ast.walk(one)]]  # it was called before
    lines, _, left = written([call], {})
    if found is None or again or left or any(at != call.at for at, _ in made.stages):
        return None
    if call.call == "run" and call.iterations:  # its other arguments are as they were written
        found.args = [ast.Constant(call.iterations)]
        found.keywords = [one for one in found.keywords if one.arg != "iterations"]
        lines[0] = ast.unparse(found)
    more = "; the next run finishes its last iteration" if call.finished_later else ""
    return [f"# interrupted: this is what it did{more}", *lines] if lines else []
