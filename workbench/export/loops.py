"""Fold statements that were repeated by hand into loops, and moves into the placement at opening."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workbench.export.cells import Cell, replaced
from workbench.export.statements import Statement, at_margin, builtin, root

MOVES = {"move", "relayout", "resize"}
ROLES = {"add", "drop"}
WORKBENCH = {"wb", "workbench"}  # names of the module


def fold_moves(statements: Sequence[Statement], recorded: Mapping[str, str]) -> tuple[list[Statement], list[str]]:
    """Remove the moves, and open each workbench with its last placement. Returns the program, and notes on the changes.

    recorded: name of a workbench -> its last placement, as an expression; includes moves made by hand in a panel.
    """
    result, told = list(statements), []
    for place, statement in enumerate(statements):
        opening = opening_of(statement)
        if opening is None:
            continue
        for name in statement.names.binds:
            moves = [s for s in statements if any(_is_move(node, name) for node in at_margin([s.node]))]
            known = recorded.get(_title(opening))
            roles = any(_changes_roles(node, name) for s in statements for node in ast.walk(s.node))
            if not moves and (known is None or roles):
                continue
            cells = ", ".join(dict.fromkeys(str(s.cell) for s in moves)) or "a panel"
            obstacle = "roles are added or dropped" if roles else _obstacle(name, opening, statements, moves)
            target = known
            if target is None and not obstacle:
                target, obstacle = _last_target(moves[-1], statements, place)
            if target is None or obstacle:
                told.append(f"the moves of {cells} remain steps of the script: {obstacle}")
                continue
            result = [s for s in result if s not in moves]
            at = result.index(statement)
            result[at] = _with_placement(statement, target)
            if result[at].text != statement.text:
                told.append(f"{name} opens with the placement that {cells} gave it (`--moves steps` keeps the moves)")
    return result, told


def opening_of(statement: Statement) -> ast.Call | None:
    return _call_of_workbench(statement, "open")


def _call_of_workbench(statement: Statement, method: str) -> ast.Call | None:
    call = statement.node.value if isinstance(statement.node, ast.Assign) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == method):
        return None
    return call if root(call) in WORKBENCH else None


def _title(call: ast.Call) -> str:
    """The name that the workbench is opened with; "" if it is not a literal."""
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
    if not given:
        return "lab"
    return str(given[0].value) if isinstance(given[0], ast.Constant) else ""


def _is_move(node: ast.AST | None, lab: str) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return node.func.attr in MOVES and root(node) == lab


def _changes_roles(node: ast.AST, lab: str) -> bool:
    """Whether it is `lab.add(...)` or `lab.drop(...)`: then no placement has the roles of all times."""
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ROLES and ast.unparse(called.value) == lab


def _obstacle(name: str, opening: ast.Call, statements: Sequence[Statement], moves: Sequence[Statement]) -> str:
    """Why the moves cannot be folded into the opening, whichever the placement; "" if they can."""
    given = {keyword.arg for keyword in opening.keywords}
    if "placement" not in given and None in given:
        return "the arguments of `wb.open` are in a dict"
    # in the script's single process, `lab = wb.attach(title)` returns the opened workbench
    attached = [call for s in statements if (call := _call_of_workbench(s, "attach")) and name in s.names.binds]
    again = sum(name in s.names.binds for s in statements) - sum(_title(c) == _title(opening) for c in attached)
    if again > 1:
        return f"{name!r} is assigned more than once"
    if not all(isinstance(s.node, ast.Expr | ast.Assign) and _is_move(s.node.value, name) for s in moves):
        return "they are inside other statements"
    bound = {n for s in moves for n in s.names.binds}
    read = sorted(bound & {n for s in statements if s not in moves for n in s.names.needs})
    return f"their result, {read[0]!r}, is used" if read else ""


def _last_target(move: Statement, statements: Sequence[Statement], place: int) -> tuple[str, str]:
    """The placement of the last move, as an expression that can be evaluated at the opening; or "" and the reason."""
    call = getattr(move.node, "value", None)
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    if call.func.attr != "move" or not isinstance(call.func.value, ast.Name) or len(call.args) != 1:
        return "", "their target is known only at run time, or from a record of the run"
    before = {n for s in statements[:place] for n in s.names.binds}
    later = {n for s in statements[place:] for n in s.names.binds}
    names = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name) and not builtin(node.id)}
    late = sorted(n for n in names if n not in before or n in later)
    return ("", f"{late[0]!r} is assigned after the workbench is opened") if late else (ast.unparse(call.args[0]), "")


def _with_placement(statement: Statement, placement: str) -> Statement:
    call = opening_of(statement)
    assert call is not None
    for keyword in call.keywords:
        if keyword.arg == "placement":
            return statement.with_text(replaced(statement.text, [(keyword.value, placement)]))
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not given:
        return statement.with_text(
            replaced(statement.text, [(call, f"{ast.unparse(call.func)}(placement={placement})")])
        )
    last = max(given, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
    text = ast.get_source_segment(statement.text, last)
    return statement.with_text(replaced(statement.text, [(last, f"{text}, placement={placement}")]))


@dataclass
class Repeat:
    """`count` repetitions of the same statements. body: the first one; last: where the others end; number: of this
    repeat in the program."""

    body: tuple[Statement, ...]
    count: int
    last: Cell
    number: int = 1

    @property
    def name(self) -> str:
        """Of the script's option that holds the count."""
        return f"REPEATS_{self.number}"

    def __str__(self) -> str:
        first = self.body[0].cell
        if first.number and self.last.number and first.number != self.last.number:
            where = f"cells {first.number} to {self.last.number}"
        elif first.count is None or not self.last.count:
            where = str(first)
        else:
            where = f"In [{first.count}] to [{self.last.count}]"
        return f"{where}: {len(self.body)} lines, {self.count} times"


Step = Statement | Repeat


def statements_in(steps: Iterable[Step]) -> list[Statement]:
    """The statements of all steps, each once."""
    return [statement for step in steps for statement in (step.body if isinstance(step, Repeat) else (step,))]


MANY = (".run", ".step", ".compare")  # of an algorithm or a workbench: other numbers of iterations than one
BEGIN = (".next", ".iterate", ".iterations", *MANY)


def found_repeats(statements: Sequence[Statement]) -> list[Step]:
    """Write consecutive repetitions of statements once, with their count.

    Candidates that cover the most statements come first; among equals, the shortest body.
    """
    keys = [ast.dump(statement.node) for statement in statements]
    fixed = [statement.is_import or statement.is_definition for statement in statements]
    does = [any(isinstance(node, ast.Call) for node in ast.walk(statement.node)) for statement in statements]
    best = (0, 0, 0, 0)  # statements that it covers, -length, start, count
    for length in range(1, len(keys) // 2 + 1):
        for start in range(len(keys) - 2 * length + 1):
            if any(fixed[start : start + length]) or not any(does[start : start + length]):
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
    """The workbench of which each repetition is one iteration: it draws prompts once, or iterates an algorithm once. A
    script that counts with `lab.iterations` can be resumed in the middle."""
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
    """The name of the workbench in `x = wb.PPO(lab, ...)`."""
    node = statement.node
    call = node.value if isinstance(node, ast.Assign) else None
    first = call.args[0] if isinstance(call, ast.Call) and call.args and root(call) in WORKBENCH else None
    return first.id if isinstance(first, ast.Name) else None
