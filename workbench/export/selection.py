"""Which statements of a notebook belong in a script: those that do something, and what these need."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workbench.errors import BadInput
from workbench.export.cells import Cell
from workbench.export.kinds import LAB_LOOKS
from workbench.export.looking import DRAWING, Looking, Purpose, builtin
from workbench.export.statements import Statement, at_margin, names_of_module, own_names, root
from workbench.export.unread import without_unread

# Stages that change no role and no position in the data: without what they made, they need not be called.
PURE_STAGES = {
    "compute_advantages", "compute_cost", "compute_gradient_norm", "compute_log_prob", "compute_loss",
    "compute_ref_log_prob", "compute_reward", "compute_values", "compare", "check",
}  # fmt: skip
# The results of a run: these are kept whether something reads them or not.
RESULTS = {
    "add", "attach", "close", "drop", "evaluate", "iterate", "move", "open", "relayout", "refresh_reference", "resize",
    "run", "save", "savefig", "step", "to_csv", "to_json", "to_parquet", "trace", "write_html",
}  # fmt: skip
SHOWN_LAST = ("_", "__", "___", "Out", "In", "_ih", "_oh", "_dh", "_i", "_ii", "_iii")


@dataclass(frozen=True)
class Selection:
    """kept: statements of the script, in order. bound: names that they bind, with how often."""

    kept: tuple[Statement, ...]
    bound: Counter[str]


def select(statements: Sequence[Statement], parameters: Collection[str], *, used: bool = False) -> Selection:
    """Leave out what only looks, and the values that were made for looking; with `used` also all that no result of the
    run depends on. `BadInput` names the cell that needs a name which nothing before it makes."""
    looking = Looking(statements)
    purposes = [looking.purpose(statement) for statement in statements]
    kept = _needed(statements, purposes, looking, used)
    left = {place: _without_displays(_without_views(statements[place], looking), looking) for place in kept}
    wanted = {name for statement in left.values() for name in statement.names.needs}
    anywhere = {name for statement in statements for name in statement.names.needs}
    for place, statement in enumerate(statements):
        if statement.is_import:
            trimmed = _trimmed(statement, wanted, anywhere, looking)
            if trimmed is not None:
                left[place] = trimmed
    left = without_unread(left, parameters, looking)
    chosen = [left[place] for place in sorted(left)]
    bound = Counter(name for statement in chosen for name in statement.names.binds)
    _check_names(chosen, statements, frozenset(parameters))
    return Selection(tuple(chosen), bound)


def _needed(statements: Sequence[Statement], purposes: Sequence[Purpose], looking: Looking, used: bool) -> set[int]:
    """Places of what is kept: backwards through the program, each statement that makes a name needed after it."""
    twins = _twins(statements)
    working = {id(s.cell) for s, p in zip(statements, purposes, strict=True) if p is Purpose.EFFECT and not s.is_import}
    always: set[str] = set()  # read in functions, which may be called at any time
    kept: set[int] = set()
    while True:
        before = len(kept), len(always)
        needed = set(always)
        for place in reversed(range(len(statements))):
            statement, purpose = statements[place], purposes[place]
            names = statement.names
            if statement.is_import:
                continue
            reached: frozenset[str] = names.changes if purpose in (Purpose.EFFECT, Purpose.DRAW) else names.stores
            changed = reached.union(*(twins.get(name, ()) for name in reached))
            makes = bool((names.binds | names.rebinds | changed) & needed)
            if _forgets(statement.node):
                keep = False
            elif purpose is Purpose.EFFECT:
                keep = not used or _is_result(statement, looking) or _serves(statement, makes, needed)
            elif purpose is Purpose.PRINT:
                keep = makes or (not used and id(statement.cell) in working)
            elif purpose is Purpose.DRAW:  # a picture that is written to a file
                keep = makes and not _shows(statement.node)
            else:
                keep = makes and purpose is Purpose.VALUE
            if keep or place in kept:
                kept.add(place)
                if _always_binds(statement.node):
                    needed -= names.binds - names.changes - always
                needed |= names.uses
                always |= names.late
        if before == (len(kept), len(always)):
            break
    there = {name for place in kept for name in statements[place].names.binds}
    deletes = [place for place, statement in enumerate(statements) if _forgets(statement.node)]
    return kept | {place for place in deletes if statements[place].names.binds | statements[place].names.uses <= there}


def _twins(statements: Sequence[Statement]) -> dict[str, set[str]]:
    """Names that may hold the same thing, or one the other: what changes it in place under one name changes both."""
    twins: dict[str, set[str]] = {}
    for statement in statements:
        node = statement.node
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            held = _held(node.value)
            together = set(statement.names.binds) | held if held or len(statement.names.binds) > 1 else set[str]()
            joined = together.union(*(twins.get(name, ()) for name in together))
            twins |= dict.fromkeys(joined, joined)
    return twins


def _held(value: ast.expr) -> set[str]:
    """Names whose values an expression gives, or puts into a container."""
    if isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
        name = root(value)
        return {name} if name else set()
    parts: list[ast.expr | None] = []
    if isinstance(value, ast.Dict):
        parts = [*value.keys, *value.values]
    elif isinstance(value, ast.List | ast.Tuple | ast.Set):
        parts = [*value.elts]
    elif isinstance(value, ast.IfExp):
        parts = [value.body, value.orelse]
    elif isinstance(value, ast.BoolOp):
        parts = [*value.values]
    return set().union(*(_held(part) for part in parts if part is not None))


def _forgets(node: ast.stmt) -> bool:
    """Whether it is `del name`."""
    return isinstance(node, ast.Delete) and all(isinstance(target, ast.Name) for target in node.targets)


def _always_binds(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _calls(statement: Statement) -> list[ast.Call]:
    return [node for node in at_margin([statement.node]) if isinstance(node, ast.Call)]


def _is_result(statement: Statement, looking: Looking) -> bool:
    """Whether it trains, moves, writes, or sets up something outside the notebook."""
    node = statement.node
    if isinstance(node, ast.Assert | ast.Raise):
        return False
    if statement.names.changes & set(looking.modules):
        return True
    called = {call.func.attr for call in _calls(statement) if isinstance(call.func, ast.Attribute)}
    return bool(called & RESULTS) or any(name.startswith("update_") for name in called)


def _serves(statement: Statement, makes: bool, needed: set[str]) -> bool:
    """Whether what is needed may depend on it: what it makes, or what a call without a result does to what it
    reads."""
    node = statement.node
    if statement.is_definition or isinstance(node, ast.With | ast.AsyncWith):
        return True  # told to others by a decorator or a base class; a state for all within
    if isinstance(node, ast.Assert):
        return False
    if isinstance(node, ast.Assign | ast.AnnAssign) and statement.names.binds:
        return makes and not (_only_pure_stages(statement) and not statement.names.binds & needed)
    return not _only_pure_stages(statement)


def _only_pure_stages(statement: Statement) -> bool:
    """Whether all that it calls leaves the workbench as it is."""
    called = {call.func.attr for call in _calls(statement) if isinstance(call.func, ast.Attribute)}
    return bool(called) and called <= PURE_STAGES | LAB_LOOKS


def _shows(node: ast.stmt) -> bool:
    """Whether it only brings a picture to the screen."""
    if not isinstance(node, ast.Expr):
        return False
    called = node.value.func if isinstance(node.value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else "show"
    return name in ("show", "display", "panel", "clear_output")


def _trimmed(statement: Statement, wanted: set[str], anywhere: set[str], looking: Looking) -> Statement | None:
    """An import without the names that only looking needed; whole where nothing needs it: it may be for its effect."""
    node = statement.node
    assert isinstance(node, ast.Import | ast.ImportFrom)
    if isinstance(node, ast.ImportFrom) and (node.module == "__future__" or node.names[0].name == "*"):
        return statement
    stays = [
        alias
        for alias in node.names
        if (name := (alias.asname or alias.name).partition(".")[0]) in wanted
        or (name not in anywhere and looking.modules.get(name) not in DRAWING)
    ]
    if len(stays) == len(node.names):
        return statement
    if not stays:
        return None
    left = ast.Import(stays) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, stays, node.level)
    return statement.with_text(ast.unparse(left))


def _without_views(statement: Statement, looking: Looking) -> Statement:
    """What does something, without what is then shown of it."""
    node = statement.node
    if not isinstance(node, ast.Expr):
        return statement
    part = looking.working_part(node.value)
    if part is node.value or isinstance(part, ast.Name):
        return statement
    segment = ast.get_source_segment(statement.text, part)
    assert segment is not None
    if "\n" in segment:
        segment = f"({segment})"
    above = statement.text.split("\n")[: node.lineno - 1]
    return statement.with_text("\n".join([*above, segment]))


def _only_shown(value: ast.expr, looking: Looking) -> bool:
    """Whether it is a picture, or a tuple or attribute that nothing reads."""
    drawn = isinstance(value, ast.Call) and root(value) in looking.drawn
    return (drawn or isinstance(value, ast.Tuple | ast.Attribute)) and looking.looks(value)


def _without_displays(statement: Statement, looking: Looking) -> Statement:
    """A block or function without the lines that only show something to a notebook."""
    shown = [
        (parent, child)
        for parent in ast.walk(statement.node)
        for suite in _suites(parent)
        for child in suite
        if isinstance(child, ast.Expr) and _only_shown(child.value, looking) and not isinstance(parent, ast.Try)
    ]
    lines = statement.text.split("\n")
    for parent, child in sorted(shown, key=lambda pair: (-pair[1].lineno, -pair[1].col_offset)):
        assert child.end_lineno is not None
        before = lines[child.lineno - 1].encode()[: child.col_offset].decode()
        behind = lines[child.end_lineno - 1].encode()[child.end_col_offset :].decode()
        gone = {id(one) for _, one in shown}
        others = any(id(one) not in gone for suite in _suites(parent) if child in suite for one in suite)
        whole = not before.strip() and not behind.partition("#")[0].strip()
        lines[child.lineno - 1 : child.end_lineno] = [] if others and whole else [f"{before}pass{behind}"]
    return statement.with_text("\n".join(lines)) if shown else statement


def _suites(node: ast.AST) -> list[list[ast.stmt]]:
    """The indented parts of a block."""
    parts = (getattr(node, field, None) for field in ("body", "orelse", "finalbody"))
    return [part for part in parts if isinstance(part, list)]


def _check_names(chosen: Sequence[Statement], statements: Sequence[Statement], parameters: frozenset[str]) -> None:
    """Each name that the script reads is made before it, by something that is in the script."""
    stars = any(isinstance(s.node, ast.ImportFrom) and s.node.names[0].name == "*" for s in chosen)
    brought = any("runpy.run_path" in s.text for s in chosen)
    everywhere = {name for s in chosen for name in s.names.binds | s.names.rebinds} | parameters
    makers: dict[str, list[Cell]] = {}
    for statement in statements:
        for name in statement.names.binds:
            makers.setdefault(name, []).append(statement.cell)
    _refuse_other_scopes(chosen)
    made = set(parameters)
    made |= {name for s in chosen if s.is_import or s.is_definition for name in s.names.binds}
    for statement in chosen:
        _refuse_notebook_only(statement)
        made |= statement.names.rebinds
        within = statement.names.binds if not _always_binds(statement.node) or statement.is_definition else set()
        within = {*within, *(n.target.id for n in at_margin([statement.node]) if isinstance(n, ast.NamedExpr))}
        missing = {n for n in statement.names.uses if n not in (made | within) and not builtin(n)}
        missing |= {n for n in statement.names.late if n not in everywhere and not builtin(n)}
        for name in sorted(missing):
            if (stars or brought) and name not in makers:
                continue
            raise _missing(name, statement, makers)
        made |= statement.names.binds


def _refuse_other_scopes(chosen: Sequence[Statement]) -> None:
    """A notebook's variables are global, those of `main` are not: where that would make a difference is refused."""
    bound: set[str] = set()
    everywhere = {name for s in chosen for name in s.names.binds}
    # what may be a variable of `main`; that a constant or definition is hoisted is not known here
    inside = {name for s in chosen if not (s.is_import or s.is_definition) for name in s.names.binds}
    for statement in chosen:
        node, names = statement.node, statement.names
        inner = own_names(statement.text)
        if early := sorted(n for n in names.uses & everywhere - bound - names.binds if builtin(n)):
            rule = "a later cell makes a variable of that name, which in a function hides the builtin from its start"
            raise BadInput(f"{statement.cell} reads the builtin {early[0]!r}", rule, "rename that variable")
        if twice := sorted(inner.read_and_bound_by_class & inside):
            rule = "a class body that reads a variable of a function cannot bind the same name"
            raise BadInput(f"{statement.cell}: {twice[0]!r} in a class body", rule, "rename one of the two")
        if hidden := sorted(inner.global_under_local & everywhere):
            rule = "a function around it has a variable of its own with that name, which `nonlocal` would mean"
            raise BadInput(f"{statement.cell}: global {hidden[0]}", rule, "rename one of the two")
        star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        brought = names_of_module(node) if star and isinstance(node, ast.ImportFrom) else set()
        if again := sorted(brought & bound):
            rule = f"it brings {again[0]!r}, which has a value by then; a script imports at its top"
            raise BadInput(
                f"{statement.cell}: {ast.unparse(node)}", rule, "import the names that you need, or move it up"
            )
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


def _missing(name: str, statement: Statement, makers: dict[str, list[Cell]]) -> BadInput:
    value = f"{statement.cell} needs {name!r}"
    if name in SHOWN_LAST or (name[:1] == "_" and name[1:].lstrip("i").isdigit()):
        return BadInput(value, "it is what the notebook showed last, and a script shows nothing", "give it a name")
    if name not in makers:
        rule = "no cell of the notebook makes it: the cell that did was deleted or changed, or is tagged `skip-export`"
        return BadInput(value, rule, "add the cell again; `Restart Kernel and Run All Cells` shows what is missing")
    below = [cell for cell in makers[name] if cell.number > statement.cell.number]
    if not below:
        return BadInput(value, "it is made later, or was deleted before", "put the line that makes it before this one")
    rule = f"it is made by {below[0]}, further down the page"
    return BadInput(value, rule, "move that cell up, or export in the order in which cells were run: `--as-run`")
