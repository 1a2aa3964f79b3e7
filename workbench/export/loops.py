"""Stages that were stepped by hand several times with the same lines: a loop."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.export.cells import Cell
from workbench.export.moves import opening_of
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


def found_repeats(statements: Sequence[Statement]) -> list[Step]:
    """The same program, in which statements that follow each other again and again stand once, with how often.

    Of all that could be a loop, first the one that stands for the most statements; among equals the shortest body.
    """
    keys = [ast.dump(statement.node) for statement in statements]
    fixed = [statement.is_import or statement.is_definition for statement in statements]
    best = (0, 0, 0, 0)  # statements that it stands for, -length, start, count
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
    body = [statement.node for statement in repeat.body]
    if any(isinstance(node, ast.For | ast.While | ast.AsyncFor) for node in at_margin(body)):
        return None
    begun = [node for node in at_margin(body) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    begun = [node for node in begun if (path := ast.unparse(node.func)).endswith(".prompts.next")
             or path.endswith(".iterate")]  # fmt: skip
    if len(begun) != 1 or not opened:
        return None
    name = root(begun[0])
    if name in opened:
        return name
    return opened.pop() if len(opened) == 1 and ast.unparse(begun[0].func).endswith(".iterate") else None


def _does(body: Sequence[Statement]) -> bool:
    return any(isinstance(node, ast.Call) for statement in body for node in ast.walk(statement.node))
