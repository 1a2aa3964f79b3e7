"""The statements of a notebook that are in its script: all but those that only show something.

What would mean something else in a script than in the notebook is refused, with its cell.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

from workbench.errors import BadInput
from workbench.export.cells import Cell
from workbench.export.looking import Looking, without_unread
from workbench.export.statements import Statement, at_margin, builtin, own_names

SHOWN_LAST = ("_", "__", "___", "Out", "In", "_ih", "_oh", "_dh", "_i", "_ii", "_iii")


def select(statements: Sequence[Statement], parameters: Collection[str]) -> list[Statement]:
    """Those of the script, in order. `BadInput` names the cell that needs a name which nothing before it makes."""
    looking = Looking(statements)
    kept = [left for statement in statements if (left := looking.without_displays(statement)) is not None]
    read = {name for statement in kept for name in statement.names.needs}
    trimmed = [without_unread(statement, read) if statement.is_import else statement for statement in kept]
    chosen = [statement for statement in trimmed if statement is not None]
    _refuse_other_scopes(chosen)
    _check_names(chosen, statements, frozenset(parameters))
    return chosen


def _check_names(chosen: Sequence[Statement], statements: Sequence[Statement], parameters: frozenset[str]) -> None:
    """Each name that the script reads is made before it, by something that is in the script."""
    brought = any("runpy.run_path" in s.text or _is_star(s) for s in chosen)
    everywhere = {name for s in chosen for name in s.names.binds | s.names.rebinds} | parameters
    makers: dict[str, list[Cell]] = {}
    for statement in statements:
        for name in statement.names.binds:
            makers.setdefault(name, []).append(statement.cell)
    made = parameters.union(*(s.names.binds for s in chosen if s.is_import or s.is_definition))
    for statement in chosen:
        node, names = statement.node, statement.names
        _refuse_notebook_only(statement)
        made |= names.rebinds
        within = names.binds if statement.is_definition or not isinstance(node, ast.Assign | ast.AnnAssign) else set()
        within = {*within, *(n.target.id for n in at_margin([node]) if isinstance(n, ast.NamedExpr))}
        missing = {n for n in names.uses if n not in (made | within) and not builtin(n)}
        missing |= {n for n in names.late if n not in everywhere and not builtin(n)}
        for name in sorted(missing):
            if name in makers or not brought:
                raise _missing(name, statement, makers, left_out=name not in everywhere)
        made |= names.binds


def _is_star(statement: Statement) -> bool:
    return isinstance(statement.node, ast.ImportFrom) and statement.node.names[0].name == "*"


def _refuse_other_scopes(chosen: Sequence[Statement]) -> None:
    """A notebook's variables are global, those of `main` are not: where that would make a difference is refused."""
    bound: set[str] = set()
    everywhere = {name for s in chosen for name in s.names.binds}
    # what may be a variable of `main`; that a constant or definition is hoisted is not known here
    inside = {name for s in chosen if not (s.is_import or s.is_definition) for name in s.names.binds}
    for statement in chosen:
        node, names = statement.node, statement.names
        read_by_class, global_inside = own_names(statement.text)
        if early := sorted(n for n in names.uses & everywhere - bound - names.binds if builtin(n)):
            rule = "a later cell makes a variable of that name, which in a function hides the builtin from its start"
            raise BadInput(f"{statement.cell} reads the builtin {early[0]!r}", rule, "rename that variable")
        if twice := sorted(read_by_class & inside):
            rule = "a class body that reads a variable of a function cannot bind the same name"
            raise BadInput(f"{statement.cell}: {twice[0]!r} in a class body", rule, "rename one of the two")
        if hidden := sorted(global_inside & everywhere):
            rule = "a function around it has a variable of its own with that name, which `nonlocal` would mean"
            raise BadInput(f"{statement.cell}: global {hidden[0]}", rule, "rename one of the two")
        if _is_star(statement) and bound:
            rule = "it may bring a name that has a value by then; a script imports at its top"
            remedy = "import the names that you need, or move it up"
            raise BadInput(f"{statement.cell}: {ast.unparse(node)}", rule, remedy)
        bound |= names.binds if not statement.is_import else set()


def _refuse_notebook_only(statement: Statement) -> None:
    for node in ast.walk(statement.node):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if called == "input":
            remedy = "make it a parameter: an assignment in a cell tagged `parameters`"
            raise BadInput(f"{statement.cell}: {ast.unparse(node)}", "a script runs with nobody there", remedy)
        if called in ("globals", "locals", "exec", "eval") and "runpy.run_path" not in statement.text:
            rule = "variables of the notebook are those of the function main in a script, which it does not reach"
            raise BadInput(f"{statement.cell}: {ast.unparse(node)}", rule, "name the variables themselves")
        if called == "get_ipython":
            remedy = "write it in Python, or tag the cell `skip-export` if the script does not need it"
            raise BadInput(f"{statement.cell}: {ast.unparse(node)}", "a script has no notebook around it", remedy)


def _missing(name: str, statement: Statement, makers: dict[str, list[Cell]], left_out: bool) -> BadInput:
    value = f"{statement.cell} needs {name!r}"
    if name in SHOWN_LAST or (name[:1] == "_" and name[1:].lstrip("i").isdigit()):
        return BadInput(value, "it is what the notebook showed last, and a script shows nothing", "give it a name")
    if name not in makers:
        rule = "no cell of the notebook makes it: the cell that did was deleted or changed, or is tagged `skip-export`"
        return BadInput(value, rule, "add the cell again; `Restart Kernel and Run All Cells` shows what is missing")
    if left_out:
        rule = f"the line of {makers[name][0]} that makes it is left out: it needs a notebook around it"
        return BadInput(value, rule, "tag the cell `skip-export`, too")
    below = [cell for cell in makers[name] if cell.number > statement.cell.number]
    if not below:
        return BadInput(value, "it is made later, or was deleted before", "put the line that makes it before this one")
    rule = f"it is made by {below[0]}, further down the page"
    return BadInput(value, rule, "move that cell up, or export in the order in which cells were run: `--as-run`")
