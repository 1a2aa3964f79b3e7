"""Stages that were stepped by hand several times with the same lines: a loop."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.export.cells import Cell
from workbench.export.moves import WORKBENCH, opening_of
from workbench.export.statements import Statement, at_margin, root


@dataclass(frozen=True)
class Repeat:
    """`count` times the same statements, one after the other. body: the first of them; last: where the others end;
    number: of this repeat in the program."""

    body: tuple[Statement, ...]
    count: int
    last: Cell
    number: int = 1

    def __str__(self) -> str:
        first = self.body[0].cell
        if first.number and self.last.number and first.number != self.last.number:
            where = f"cells {first.number} to {self.last.number}"
        else:
            where = (
                str(first)
                if first.count is None or not self.last.count
                else f"In [{first.count}] to [{self.last.count}]"
            )
        return f"{where}: {len(self.body)} lines, {self.count} times"


Step = Statement | Repeat
MANY = (".run", ".step", ".compare")  # of an algorithm or a workbench: other numbers of iterations than one
BEGIN = (".next", ".iterate", ".iterations", *MANY)


def found_repeats(statements: Sequence[Statement]) -> list[Step]:
    """The same program, with statements that are repeated one after the other written once, with their count.

    Of all that could be a loop, first the one that covers the most statements; among equals the shortest body.
    """
    keys = [ast.dump(statement.node) for statement in statements]
    fixed = [statement.is_import or statement.is_definition for statement in statements]
    best = (0, 0, 0, 0)  # statements that it covers, -length, start, count
    for length in range(1, len(keys) // 2 + 1):
        for start in range(len(keys) - 2 * length + 1):
            if any(fixed[start : start + length]) or not _does(statements[start : start + length]):
                continue
            count = 1
            while keys[start + count * length : start + (count + 1) * length] == keys[start : start + length]:
                count += 1
            if count > 1:
                best = max(best, (count * length, -length, -start, count))
    covered, length, start, count = best[0], -best[1], -best[2], best[3]
    if not count:
        return list(statements)
    repeat = Repeat(tuple(statements[start : start + length]), count, statements[start + covered - 1].cell)
    return [*found_repeats(statements[:start]), repeat, *found_repeats(statements[start + covered :])]


def iterated(repeat: Repeat, program: Sequence[Statement]) -> str | None:
    """The workbench of which each turn is one iteration: it draws prompts once, or iterates an algorithm once. A script
    that counts turns by `lab.iterations` can be resumed in the middle."""
    opened = {name for statement in program if opening_of(statement) for name in statement.names.binds}
    own = {name for statement in program if statement.is_definition for name in statement.names.binds}
    body = [statement.node for statement in repeat.body]
    calls = [node for node in at_margin(body) if isinstance(node, ast.Call)]
    paths = [ast.unparse(call.func) for call in calls]
    begins = [path for path in paths if path.endswith(BEGIN)]
    if len(begins) != 1 or begins[0].endswith(MANY) or own & {root(call.func) for call in calls}:
        return None
    plain = [node.value for node in body if isinstance(node, ast.Expr | ast.Assign)]
    call = next((node for node in plain if isinstance(node, ast.Call) and ast.unparse(node.func) == begins[0]), None)
    if call is None:  # it is inside a block or a comprehension
        return None
    lab = root(call)
    if begins[0] == f"{lab}.prompts.next":
        return lab if lab in opened else None
    made = [_made_for(statement) for statement in program if lab in statement.names.binds]
    return made[0] if len(made) == 1 and made[0] in opened else None


def _made_for(statement: Statement) -> str | None:
    """The name that `x = wb.PPO(lab, ...)` gives first."""
    node = statement.node
    call = node.value if isinstance(node, ast.Assign) else None
    first = call.args[0] if isinstance(call, ast.Call) and call.args and root(call) in WORKBENCH else None
    return first.id if isinstance(first, ast.Name) else None


def _does(body: Sequence[Statement]) -> bool:
    return any(isinstance(node, ast.Call) for statement in body for node in ast.walk(statement.node))
