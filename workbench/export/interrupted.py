"""A cell that failed or was interrupted: the lines that do what it had done until then."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from workbench.export.cells import Cell
from workbench.export.made_calls import Made, MadeCall, Position, written
from workbench.export.statements import first_line
from workbench.export.syntax import python_of

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
    suite = next((suite for suite in _suites(node) if any(_has(one, failed) for one in suite)), None)
    if suite is not None and isinstance(node, ast.For | ast.With | ast.If | ast.Try):
        at = next(n for n, one in enumerate(suite) if _has(one, failed))
        turns = 0
        if isinstance(node, ast.For):
            counted = _turns(node, suite, at, inside)
            if counted is None:
                return _flat(node, inside)
            turns = counted
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


def _flat(node: ast.stmt, inside: Made) -> tuple[list[str], list[str]]:
    calls, left = _calls(inside.calls)
    return _told(inside, calls), left + _direct(node, inside)


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
    for keyword in value.keywords:
        if keyword.arg == "iterations":
            keyword.value = count
    return ast.unparse(value)


def _suites(node: ast.stmt) -> list[list[ast.stmt]]:
    return [suite for name in ("body", "orelse", "finalbody") if isinstance(suite := getattr(node, name, None), list)]


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
