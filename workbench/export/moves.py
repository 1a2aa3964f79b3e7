"""A placement that was changed while the models lived: in a script, the placement that it opens with."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from workbench.export.looking import builtin
from workbench.export.statements import Statement, at_margin, root
from workbench.export.syntax import replaced

MOVES = {"move", "relayout", "resize"}
WORKBENCH = {"wb", "workbench"}  # names of the module


def fold_moves(
    statements: Sequence[Statement], needed: Sequence[Statement], recorded: Mapping[str, str]
) -> tuple[list[Statement], list[str]]:
    """The program without its moves, each workbench opened where it ended; and why this could not be done, if not.

    needed: the statements that would be kept with the moves. recorded: name of a workbench -> the placement that it had
    at the end, as an expression: also of a move that was made by hand in a panel.
    """
    opened = {name: place for place, s in enumerate(statements) for name in s.names.binds if opening_of(s) is not None}
    result, told = list(statements), []
    for name, place in opened.items():
        moves = [s for s in statements if _moves(s, name)]
        opening = opening_of(statements[place])
        assert opening is not None
        known = recorded.get(_title(opening))
        if not moves and known is None:
            continue
        cells = ", ".join(dict.fromkeys(str(s.cell) for s in moves)) or "a panel"
        target, reason = _target(name, moves, statements, place, needed)
        given = {keyword.arg for keyword in opening.keywords}
        if "placement" not in given and None in given:
            target, reason, known = "", "what `wb.open` is given stands in a dict", None
        elif sum(name in s.names.binds and not _attaches(s, _title(opening)) for s in statements) > 1:
            target, reason, known = "", f"{name!r} is made more than once", None
        elif not all(_is_whole(s, name) for s in moves):
            target, reason, known = "", "they stand inside of other lines", None
        if known is not None and not reason.startswith("what"):
            target, reason = known, ""
        if not target:
            told.append(f"the moves of {cells} stay steps of the script: {reason}")
            continue
        gone = {id(s) for s in moves}
        result = [s for s in result if id(s) not in gone]
        at = result.index(statements[place])
        result[at] = _with_placement(statements[place], target)
        if result[at].text != statements[place].text:
            told.append(f"{name} opens with the placement that {cells} gave it (`--moves steps` keeps the moves)")
    return result, told


def opening_of(statement: Statement) -> ast.Call | None:
    """The `wb.open(...)` that a statement assigns."""
    node = statement.node
    call = node.value if isinstance(node, ast.Assign) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "open"):
        return None
    return call if root(call) in WORKBENCH else None


def _attaches(statement: Statement, title: str) -> bool:
    """Whether it is `lab = wb.attach(title)`: in the script's one process, that gives what was opened."""
    call = statement.node.value if isinstance(statement.node, ast.Assign) else None
    named = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "attach"
    return named and isinstance(call, ast.Call) and root(call) in WORKBENCH and _title(call) == title


def _title(call: ast.Call) -> str:
    """The name that the workbench is opened with; "" where the text does not say it."""
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
    if not given:
        return "lab"
    return str(given[0].value) if isinstance(given[0], ast.Constant) else ""


def _moves(statement: Statement, lab: str) -> bool:
    return any(_is_move(node, lab) for node in at_margin([statement.node]))


def _is_move(node: ast.AST, lab: str) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES
    return called and root(node) == lab


def _is_whole(statement: Statement, lab: str) -> bool:
    """Whether a statement is a move and nothing else."""
    node = statement.node
    return isinstance(node, ast.Expr | ast.Assign) and _is_move(node.value, lab)


def _target(
    name: str, moves: Sequence[Statement], statements: Sequence[Statement], place: int, needed: Sequence[Statement]
) -> tuple[str, str]:
    """The last placement as an expression that can be evaluated where the workbench opens; or "" and the reason."""
    bound = {n for s in moves for n in s.names.binds}
    read = sorted(bound & {n for s in needed if not _moves(s, name) for n in s.names.needs})
    if read:
        return "", f"what they return, {read[0]!r}, is used"
    if not moves:
        return "", ""
    last = moves[-1].node
    call = last.value if isinstance(last, ast.Expr | ast.Assign) else None
    if not _is_plain_move(call, name):
        return "", "where they lead to is known only when they are run; a record of the run would tell"
    assert isinstance(call, ast.Call)
    before = {n for s in statements[:place] for n in s.names.binds}
    later = {n for s in statements[place:] for n in s.names.binds}
    late = sorted(n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name) and not builtin(n.id)
                  and (n.id not in before or n.id in later))  # fmt: skip
    if late:
        return "", f"{late[0]!r} is made after the workbench is opened"
    return ast.unparse(call.args[0]), ""


def _is_plain_move(call: ast.AST | None, name: str) -> bool:
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.attr, call.func.value.id, len(call.args)) == ("move", name, 1)
    )


def _with_placement(statement: Statement, placement: str) -> Statement:
    """The opening with another placement."""
    call = opening_of(statement)
    assert call is not None
    for keyword in call.keywords:
        if keyword.arg == "placement":
            return statement.with_text(replaced(statement.text, [(keyword.value, placement)]))
    assert call.end_lineno is not None and call.end_col_offset is not None
    lines = statement.text.split("\n")
    line = lines[call.end_lineno - 1].encode()
    head = line[: call.end_col_offset - 1].decode()
    comma = "" if not (call.args or call.keywords) or _ends_with_comma(lines, call, head) else ", "
    lines[call.end_lineno - 1] = f"{head}{comma}placement={placement}{line[call.end_col_offset - 1 :].decode()}"
    return statement.with_text("\n".join(lines))


def _ends_with_comma(lines: Sequence[str], call: ast.Call, head: str) -> bool:
    last = max(
        [*call.args, *(keyword.value for keyword in call.keywords)], key=lambda n: (n.end_lineno, n.end_col_offset)
    )
    assert last.end_lineno is not None and call.end_lineno is not None
    between = lines[last.end_lineno - 1].encode()[last.end_col_offset :].decode()
    if last.end_lineno == call.end_lineno:
        between = between[: len(between) - len(lines[call.end_lineno - 1]) + len(head)]
    return "," in between.partition("#")[0]
