"""A cell that failed or was interrupted: the lines that do what it had done until then."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors.plain_text import plain_text
from workbench.export.cells import Cell, python_of
from workbench.export.statements import first_line

Position = tuple[int, int]  # in a cell's text: line, from 1, and column
PLACEMENT = ("Placement.of", "Layout")
SETTINGS = (
    "wb.Sampling",
    "wb.Correction",
    "wb.ClipCov",
    "wb.KLCov",
    "wb.Context",
)  # what a field of an algorithm may hold
VALUES = (
    ast.Expression | ast.Constant | ast.Dict | ast.List | ast.Tuple | ast.keyword | ast.Load | ast.UnaryOp | ast.USub
)

MOST = 10**6  # iterations of one call


@dataclass
class MadeCall:
    """One call of an algorithm's `run`, `iterate`, `step` or `restart`, or a "move".

    name: the variable that held the algorithm, or the workbench that moved; "" for none. made_as: for that, the call
    that makes such an algorithm. made: of which algorithm. iterations: that it ended. stages: what it made of the next
    one. resumed: it began with the rest of an iteration. finished_later: another `run` took the stages over.
    arguments: of `run`, beside the number of iterations, as a script writes them.
    """

    call: str
    algorithm: str
    name: str
    made_as: str
    made: object
    lab: str
    at: Position | None
    by: str
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
        """From an event, which may come from a stranger: names that are none, and other calls, are dropped."""
        title, lab = _name(details.get("algorithm")), _name(details.get("lab"))
        own = (f"wb.{title}", title) if title else ()
        stages, iterations = details.get("stages"), details.get("iterations")
        given = [(name, details.get(name)) for name in ("staleness", "pause_after")]
        return cls(
            call="move" if kind == "move" else str(details.get("call")), algorithm=title or "an algorithm",
            name=lab if kind == "move" else _name(details.get("name")),
            made_as=expression(str(details.get("made_as", "")), own) or "", made=details.get("id"), lab=lab,
            at=position_of(details.get("at")), by=_one_line(details.get("by") or "", 120),
            iterations=min(max(iterations, 0), MOST) if isinstance(iterations, int) else 0,
            stages=tuple(_one_line(stage, 60) for stage in stages) if isinstance(stages, list) else (),
            under_way=bool(details.get("under_way")), resumed=bool(details.get("resumed")),
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
    """What was called in one cell: calls of algorithms and moves, and stages, with where they stand in it."""

    calls: list[MadeCall] = field(default_factory=list)
    stages: list[tuple[Position | None, str]] = field(default_factory=list)

    def add(self, other: Made) -> None:
        self.calls += other.calls
        self.stages += other.stages


def mark_finished(calls: Sequence[MadeCall]) -> None:
    """Mark the calls whose last iteration a later `run` finished."""
    last: dict[str, MadeCall] = {}
    for call in calls:
        if call.call != "move":
            before = last.get(call.algorithm)
            if before is not None and call.resumed and before.under_way:
                before.finished_later = True
            last[call.algorithm] = call


def written(calls: Sequence[MadeCall], made_names: dict[str, str]) -> tuple[list[str], set[str], list[str]]:
    """Lines that do what the calls did; names that they need; and a sentence for each that cannot be written.

    made_names: names of algorithms that no variable held, by which one it was; new ones are added.
    """
    lines: list[tuple[str, str, list[str]]] = []  # name, verb, and its arguments, an entry a call
    needs: set[str] = set()
    left: list[str] = []
    for call in calls:
        if not (call.iterations or call.stages or call.call in ("restart", "move")):
            continue
        name = call.name or made_names.get(str(call.made), "")
        if call.call == "move":
            if not (name and call.placement):
                left.append(f"{call}, of a workbench that no variable held")
                continue
            lines.append((name, "move", [call.placement]))
            needs |= {name, "wb"}
            continue
        if not name and not (call.made_as and call.lab):
            left.append(f"{call}, of an algorithm that no variable held; give it a name in a cell")
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
    """The lines of one call of an algorithm, joined with those before it."""
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
        stages = ", ".join(given)
        one = f"{name}.step()  # {stages}"
        return one if len(given) == 1 else f"for _ in range({len(given)}):\n    {one}"
    if verb.startswith("run"):
        return f"{name}.run({len(given)}{verb.removeprefix('run')})"
    return f"{name}.{verb}({', '.join(given)})"


def expression(text: str, callables: Sequence[str] = ()) -> str | None:
    """A recorded placement, or algorithm, as a script writes it; None for another text: a record may come from a
    stranger. callables: what may be called beside a placement and settings of the workbench."""
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
    return (
        written if callables else written.replace("Placement.of(", "wb.Placement.of(").replace("Layout(", "wb.Layout(")
    )


def position_of(given: Any) -> Position | None:
    """A recorded position; None for anything else."""
    if isinstance(given, list | tuple) and len(given) == 2 and all(isinstance(n, int) for n in given):
        return given[0], given[1]
    return None


def _name(given: Any) -> str:
    good = isinstance(given, str) and given.isidentifier() and not keyword.iskeyword(given)
    return given if good else ""


def _one_line(given: object, most: int) -> str:
    return plain_text(" ".join(str(given).split()))[:most]


MULTIPLIED = ast.For | ast.While | ast.AsyncFor | ast.comprehension


def done_of(cell: Cell, failed: Position | None, made: Made) -> tuple[str, list[str]]:
    """The text of what a cell had done, and a sentence for each thing that the text lacks. failed: the place of the
    statement that did not end; None: nowhere in particular, so that only calls of algorithms are known."""
    text = python_of(cell)
    body = ast.parse(text).body
    if failed is None:
        lines, left = _calls(made.calls)
        return "\n".join(lines), left
    at = next((n for n, node in enumerate(body) if _has(node, failed)), None)
    if at is None:
        return "", [f"what it did is not known: {text.strip().splitlines()[0]:.60}"]
    ended = text.split("\n")[: first_line(body[at]) - 1]
    if at and (body[at - 1].end_lineno or 0) >= first_line(body[at]):  # a; b
        ended.append(text.split("\n")[body[at].lineno - 1].encode()[: body[at].col_offset].decode().rstrip("; "))
    try:
        lines, left = _part(body[at], failed, made)
    except RecursionError:
        lines, left = [], ["what it did stands in an expression that is nested too deeply"]
    return "\n".join([*ended, *lines]).rstrip(), left


def _has(node: ast.stmt, place: Position) -> bool:
    start, end = (first_line(node), 0 if first_line(node) < node.lineno else node.col_offset), (
        node.end_lineno or 0, node.end_col_offset or 0)  # fmt: skip
    return start <= place < end


def _part(node: ast.stmt, failed: Position, made: Made) -> tuple[list[str], list[str]]:
    """Of a statement that did not end, the lines that do what it did; and what they lack."""
    inside = Made(
        [call for call in made.calls if call.at is None or _has(node, call.at)],
        [one for one in made.stages if one[0] is not None and _has(node, one[0])],
    )
    if not inside.calls and not inside.stages:
        return [], []
    bodies = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
    suites = (body for body in bodies if isinstance(body, list) and any(_has(one, failed) for one in body))
    suite: list[ast.stmt] | None = next(suites, None)
    if suite is not None and isinstance(node, ast.For | ast.With | ast.If | ast.Try):
        at = next(n for n, one in enumerate(suite) if _has(one, failed))
        turns = _turns(node, suite, at, inside) if isinstance(node, ast.For) else 0
        if turns is not None:
            last, left = _part(suite[at], failed, _of_last_turn(inside, suite[at], turns))
            partial = [*(ast.unparse(one) for one in suite[:at]), *last]
            if isinstance(node, ast.With):
                head = ast.unparse(node).split("\n")[0]
                return [head, *(f"    {line}" for one in partial for line in one.split("\n"))] if partial else [], left
            if isinstance(node, ast.For):
                return [*_whole_turns(node, turns), *_turn_name(node, turns, partial), *partial], left
            return partial, left
    calls, left = _calls(inside.calls)
    if len(inside.calls) == 1 and inside.calls[0].call == "run" and (same := _with_count(node, inside.calls[0])):
        calls = [same, *(line for line in calls if ".run(" not in line)]
    return _told(inside, calls), left + _direct(node, inside)


def _calls(calls: Sequence[MadeCall]) -> tuple[list[str], list[str]]:
    lines, _, left = written([call for call in calls if call.name], {})
    return lines, left + [f"{call} is not in the script" for call in calls if not call.name]


def _told(inside: Made, lines: list[str]) -> list[str]:
    """The lines with a comment above them."""
    if not lines:
        return []
    last = inside.calls[-1]
    more = "; the next run finishes its last iteration" if last.finished_later else ""
    return [f"# interrupted: this is what it made{more}", *lines]


def _direct(node: ast.stmt, inside: Made) -> list[str]:
    """What a statement called without an algorithm, and more than once: how much of it ended is not known."""
    stages = [stage for _, stage in inside.stages]
    if inside.calls or len(stages) < 2:
        return []
    counts = ", ".join(f"{name} {stages.count(name)} times" for name in dict.fromkeys(stages) if name)
    return [f"`{ast.unparse(node).splitlines()[0]:.60}` is not in the script; it had called {counts}"]


def _with_count(node: ast.stmt, call: MadeCall) -> str:
    """`ppo.run(10, every=2)` with as many iterations as it made; "" where it is written otherwise."""
    value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Await):
        value = value.value
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == f"{call.name}.run" and call.iterations):
        return ""
    count = ast.Constant(call.iterations)
    if value.args:
        value.args[0] = count
    for given in value.keywords:
        if given.arg == "iterations":
            given.value = count
    return ast.unparse(value)


def _turns(node: ast.For, suite: list[ast.stmt], at: int, made: Made) -> int | None:
    """How many turns of `for x in range(n)`, or `lab.iterations(n)`, had ended when a statement of its body did not;
    None where that cannot be told."""
    called = node.iter.func if isinstance(node.iter, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    plain = name in ("range", "iterations") and isinstance(node.iter, ast.Call) and len(node.iter.args) == 1
    if (
        suite is not node.body
        or not plain
        or any(isinstance(one, MULTIPLIED) for one in ast.walk(ast.Module(suite, [])))
    ):
        return None
    found = set[int]()
    for n, one in enumerate(suite):
        calls = [call for call in made.calls if call.at is not None and _has(one, call.at)]
        stages = [place for place, _ in made.stages if place is not None and _has(one, place)]
        count = sum(call.done for call in calls) if calls else stages.count(stages[0]) if stages else None
        if count is None or (n == at and not calls and len(suite) > 1 and found):
            continue
        found.add(count - 1 if n < at or (n == at and not calls) else count)
    return found.pop() if len(found) == 1 and min(found) >= 0 else None


def _of_last_turn(made: Made, node: ast.stmt, turns: int) -> Made:
    """What a statement of a loop called in its last turn."""
    calls = [call for call in made.calls if call.at is not None and _has(node, call.at)]
    return Made(calls[turns:] if turns else calls, [one for one in made.stages if one[0] is not None][-1:])


def _whole_turns(node: ast.For, turns: int) -> list[str]:
    if not turns or not isinstance(node.iter, ast.Call):
        return []
    node.iter.args[0] = ast.Constant(turns)
    node.orelse = []
    return ["# interrupted: these are the turns that it made", *ast.unparse(node).split("\n")]


def _turn_name(node: ast.For, turns: int, partial: Sequence[str]) -> list[str]:
    """The value of the loop's variable in the turn that did not end, where that turn reads it."""
    first = 0 if isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range" else 1
    names = {one.id for text in partial if not text.startswith("#") for one in ast.walk(ast.parse(text))
             if isinstance(one, ast.Name)}  # fmt: skip
    target = ast.unparse(node.target)
    return [f"{target} = {turns + first}"] if target in names else []
