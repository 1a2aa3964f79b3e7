"""The statements of a notebook that are in its script: all but those that only show something.

What would mean something else in a script than in the notebook is refused, with its cell.

A bare expression only shows something if it is made of names, attributes, subscripts, constants, operators, and calls
of the methods of `SHOWING` on what came from the workbench, of those of `OF_TABLES`, of `display` and of what is
imported from `IPython` and `workbench.display`. Where such a
call shows the result of a call that does something, as in `ppo.run(2).head()`, the script has that call alone. All
other statements are in the script, except calls of `panel`, `strip` and `export` of a workbench, also assigned, and
bare expressions that only use what these returned: they need a notebook around them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Sequence

from workbench.errors import BadInput
from workbench.export.cells import Cell, replaced
from workbench.export.statements import Statement, at_margin, builtin, origins, own_names, root

# Methods without side effects, that answer or draw: of a workbench and its parts; of a frame, of a figure.
SHOWING = {
    "arguments", "batches", "changed", "changes", "df", "dial", "diff", "disagreements", "estimate", "events", "failed",
    "graph", "groups", "ledger", "lineage", "logs", "memory", "metrics", "panel", "peek", "runs", "select", "spans",
    "strip", "sync_plans", "syncs", "timeline", "topology", "traffic", "transfers", "turns", "weight_digests",
    "what_if",
}  # fmt: skip
OF_TABLES = {"describe", "groupby", "head", "pivot_table", "reindex", "show", "tail", "value_counts"}
# Frame methods whose names are common: they count only if called on the result of a call in SHOWING.
OF_FRAMES = {
    "agg", "astype", "count", "max", "mean", "min", "pivot", "query", "reset_index", "round", "set_index",
    "sort_values", "sum",
}  # fmt: skip
NOTEBOOK_ONLY = {"panel", "strip", "export"}  # methods of a workbench that need a notebook around them
OPENING = {"open", "attach", "restore"}
DISPLAYS = ("IPython", "workbench.display")  # what is imported from these only shows something
# Importing these registers nothing, so unused imports are left out.
QUIET = (
    *DISPLAYS, "ipywidgets", "matplotlib", "numpy", "pandas", "plotly", "seaborn", "torch", "workbench_widgets",
    *(sys.stdlib_module_names - {"__future__"}),
)  # fmt: skip
ANY_VALUE = (
    ast.Name | ast.Constant | ast.Attribute | ast.Subscript | ast.Slice | ast.Tuple | ast.List | ast.Dict | ast.UnaryOp
    | ast.BinOp | ast.BoolOp | ast.Compare | ast.JoinedStr | ast.FormattedValue | ast.keyword | ast.expr_context
    | ast.operator | ast.unaryop | ast.boolop | ast.cmpop
)  # fmt: skip


class Looking:
    """Finds the display-only statements of one notebook. Methods and functions that the notebook defines never count as
    display-only."""

    def __init__(self, statements: Sequence[Statement]) -> None:
        nodes = [node for statement in statements for node in ast.walk(statement.node)]
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        bound = {name for statement in statements if not statement.is_import for name in statement.names.binds}
        imported = {name for name, origin in origins(nodes).items() if _is_of(origin, DISPLAYS)}
        self._methods, self._of_frames = SHOWING - functions, OF_FRAMES - functions
        self._of_tables, self._ours = OF_TABLES - functions, _ours(statements)
        self._displays = ({"display", "clear_output"} | imported) - bound
        self._labs = {name for s in statements if _opens(s.node) for name in s.names.binds}
        self._of_notebook: set[str] = set()
        views = [s for s in statements if isinstance(s.node, ast.Assign) and self._needs_notebook(s.node.value)]
        others = {name for s in statements if s not in views for name in s.names.binds}
        self._of_notebook = {name for s in views for name in s.names.binds} - others  # such as `panel = lab.panel()`

    def without_displays(self, statement: Statement) -> Statement | None:
        """The part of a statement that belongs in the script; None if nothing does. Inside blocks and functions only
        calls of `display` and similar functions are removed, because a notebook shows no other value there."""
        node = statement.node
        if isinstance(node, ast.Expr):
            part = self._working(node.value)
            if part is None or self._needs_notebook(part) or self._prints_of_notebook(part):
                return None
            return statement if part is node.value else _with(statement, [(node.value, part)])
        if isinstance(node, ast.Assign) and self._needs_notebook(node.value):
            return None
        tried = {id(one) for block in ast.walk(node) if isinstance(block, ast.Try) for one in ast.walk(block)}
        inner = [one for one in ast.walk(node) if isinstance(one, ast.Expr) and self._is_display(one.value)]
        inner = [one for one in inner if id(one) not in tried]  # its handlers may wait for what it raises
        return _with(statement, [(one, self._working(one.value)) for one in inner]) if inner else statement

    def _shows(self, node: ast.AST) -> bool:
        """Whether evaluating an expression has no side effect."""
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute):
                shown = called.value
                while isinstance(shown, ast.Attribute | ast.Subscript):
                    shown = shown.value
                if not self._answers(called) and not (isinstance(shown, ast.Call) and called.attr in self._of_frames):
                    return False
            elif not self._is_display(node):
                return False
        elif isinstance(node, ast.Compare) and any(isinstance(one, ast.In | ast.NotIn) for one in node.ops):
            return False  # `1 in generator` takes from it
        elif not isinstance(node, ANY_VALUE):
            return False
        return all(map(self._shows, ast.iter_child_nodes(node)))

    def _answers(self, method: ast.Attribute) -> bool:
        """Whether it is a method that only answers or draws."""
        return method.attr in self._of_tables or (method.attr in self._methods and root(method) in self._ours)

    def _is_display(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._displays

    def _working(self, node: ast.expr) -> ast.expr | None:
        """The part of an expression that has an effect; None if it is display-only."""
        if self._shows(node):
            return None
        parts: list[ast.expr] = []
        if isinstance(node, ast.Tuple) or self._is_display(node):
            given = list(ast.iter_child_nodes(node))[isinstance(node, ast.Call) :]  # without the name of the function
            values = [one.value if isinstance(one, ast.keyword) else one for one in given]
            working = [one for one in values if isinstance(one, ast.expr) and not self._shows(one)]
            parts = working if not any(isinstance(one, ast.Starred) for one in working) else []
        elif isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and self._shows(node.slice)):
            parts = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._answers(node.func):
            parts = [node.func.value] if all(map(self._shows, (*node.args, *node.keywords))) else []
        return self._working(parts[0]) if len(parts) == 1 else node

    def _needs_notebook(self, node: ast.AST) -> bool:
        """Whether it is `lab.panel(...)`, `lab.strip()`, `lab.export(...)`, or an attribute or call of the result."""
        while isinstance(node, ast.Call | ast.Attribute | ast.Subscript | ast.Starred):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in NOTEBOOK_ONLY and _name(called.value) in self._labs:
                return True
            node = node.func if isinstance(node, ast.Call) else node.value
        return _name(node) in self._of_notebook

    def _prints_of_notebook(self, node: ast.expr) -> bool:
        """Whether it is `print(panel.x)` or similar: a call on such a result, with no other effect."""
        given = [*node.args, *(one.value for one in node.keywords)] if isinstance(node, ast.Call) else []
        needs = [self._needs_notebook(one) for one in given]
        return any(needs) and all(need or self._shows(one) for one, need in zip(given, needs, strict=True))


def without_unread(statement: Statement, read: set[str]) -> Statement | None:
    """An import without the `QUIET` names that nothing reads; None if no name is left."""
    node = statement.node
    assert isinstance(node, ast.Import | ast.ImportFrom)
    module = getattr(node, "module", None)
    stays = [
        alias
        for alias in node.names
        if (alias.asname or alias.name).partition(".")[0] in read
        or not _is_of(module or alias.name, QUIET)
        or alias.name == "*"
    ]
    if len(stays) == len(node.names):
        return statement
    left = ast.Import(stays) if isinstance(node, ast.Import) else ast.ImportFrom(module, stays, node.level)
    return statement.with_text(ast.unparse(left)) if stays else None


def _annotating(node: ast.AST) -> set[str]:
    """The names in string annotations."""
    annotations = [getattr(one, field, None) for one in ast.walk(node) for field in ("annotation", "returns")]
    texts = [one.value for part in annotations if part for one in ast.walk(part) if isinstance(one, ast.Constant)]
    return {name for text in texts if isinstance(text, str) for name in re.findall(r"\w+", text)}


def _ours(statements: Sequence[Statement]) -> set[str]:
    """Names that come from the workbench: imported from it, or returned by its calls."""
    roots: dict[str, set[str | None]] = {}  # of each name, what the values begin with that it is given
    found = {name for name, origin in origins(s.node for s in statements).items() if _is_of(origin, ("workbench",))}
    for statement in statements:
        node = statement.node
        values: list[ast.AST] = [node.value] if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else []
        values = [node.iter] if isinstance(node, ast.For) else values
        values = [item.context_expr for item in node.items] if isinstance(node, ast.With) else values
        values = [one for value in values for one in (value.elts if isinstance(value, ast.Tuple) else [value])]
        for name in statement.names.binds:
            roots.setdefault(name, set()).update({root(value) for value in values} or {None})
    while new := {name for name, of in roots.items() if of - {name} and of - {name} <= found} - found:
        found |= new
    return found


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _opens(node: ast.stmt) -> bool:
    """Whether it is `lab = wb.open(...)` or similar."""
    called = node.value.func if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in OPENING


def _is_of(module: str | None, packages: Sequence[str]) -> bool:
    return any(module == package or (module or "").startswith(f"{package}.") for package in packages)


def _with(statement: Statement, changes: Sequence[tuple[ast.expr | ast.stmt, ast.expr | None]]) -> Statement:
    """The statement with parts replaced. A part with None becomes `pass`."""
    texts = []
    for old, new in changes:
        text = "pass" if new is None else ast.get_source_segment(statement.text, new) or ast.unparse(new)
        texts.append((old, f"({text})" if "\n" in text else text))
    return statement.with_text(replaced(statement.text, texts))


SHOWN_LAST = ("_", "__", "___", "Out", "In", "_ih", "_oh", "_dh", "_i", "_ii", "_iii")


def select(statements: Sequence[Statement], parameters: Collection[str]) -> list[Statement]:
    """The script's statements, in order. Raises `BadInput` naming the cell that reads a name nothing
    before it defines."""
    looking = Looking(statements)
    kept = [left for statement in statements if (left := looking.without_displays(statement)) is not None]
    read = {name for statement in kept for name in (*statement.names.needs, *_annotating(statement.node))}
    trimmed = [without_unread(statement, read) if statement.is_import else statement for statement in kept]
    chosen = [statement for statement in trimmed if statement is not None]
    _refuse_other_scopes(chosen)
    _check_names(chosen, statements, frozenset(parameters))
    return chosen


def _check_names(chosen: Sequence[Statement], statements: Sequence[Statement], parameters: frozenset[str]) -> None:
    """Check that each name the script reads is defined before it, by a statement of the script."""
    brought = any("runpy.run_path" in s.text or _is_star(s) for s in chosen)
    everywhere = {name for s in chosen for name in s.names.binds | s.names.rebinds} | parameters
    makers: dict[str, list[Cell]] = {}
    captured = re.compile(r"\A\s*%%capture(?:[^\S\n]+--\S+)*[^\S\n]+(\w+)")
    for statement in statements:
        for name in (*statement.names.binds, *captured.findall(statement.cell.text)):
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
    """Refuse code whose meaning changes because a notebook's variables are global and those of `main` are local."""
    bound: set[str] = set()
    everywhere = {name for s in chosen for name in s.names.binds}
    # names that may be variables of `main`; which constants or definitions are hoisted is not known here
    inside = {name for s in chosen if not (s.is_import or s.is_definition) for name in s.names.binds}
    for statement in chosen:
        node, names = statement.node, statement.names
        read_by_class, global_inside = own_names(statement.text)
        if early := sorted(n for n in names.uses & everywhere - bound - names.binds if builtin(n)):
            rule = "a later cell assigns that name, which hides the builtin in the whole function main"
            raise BadInput(f"{statement.cell} reads the builtin {early[0]!r}", rule, "rename that variable")
        if twice := sorted(read_by_class & inside):
            rule = "a class body that reads a variable of a function cannot assign the same name"
            raise BadInput(f"{statement.cell}: {twice[0]!r} in a class body", rule, "rename one of the two")
        if hidden := sorted(global_inside & everywhere):
            rule = "a function around it has its own variable with that name, to which `nonlocal` would refer"
            raise BadInput(f"{statement.cell}: global {hidden[0]}", rule, "rename one of the two")
        if _is_star(statement) and bound:
            rule = "it may import a name that is assigned before it; a script imports at its top, before the assignment"
            remedy = "import the names that you need, or move it up"
            raise BadInput(f"{statement.cell}: {ast.unparse(node)}", rule, remedy)
        bound |= names.binds if not statement.is_import else set()


def _refuse_notebook_only(statement: Statement) -> None:
    for node in ast.walk(statement.node):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if called == "input":
            remedy = "make it a parameter: an assignment in a cell tagged `parameters`"
            raise BadInput(f"{statement.cell}: {ast.unparse(node)}", "nobody can answer while a script runs", remedy)
        if called in ("globals", "locals", "exec", "eval") and "runpy.run_path" not in statement.text:
            rule = "in a script the notebook's variables are local to the function main, which it cannot reach"
            raise BadInput(f"{statement.cell}: {ast.unparse(node)}", rule, "use the variables directly")
        if called == "get_ipython":
            remedy = "write it in Python, or tag the cell `skip-export` if the script does not need it"
            raise BadInput(f"{statement.cell}: {ast.unparse(node)}", "a script runs outside of a notebook", remedy)


def _missing(name: str, statement: Statement, makers: dict[str, list[Cell]], left_out: bool) -> BadInput:
    value = f"{statement.cell} needs {name!r}"
    if name in SHOWN_LAST or (name[:1] == "_" and name[1:].lstrip("i").isdigit()):
        return BadInput(value, "it is the notebook's last output, which a script lacks", "assign the value to a name")
    if name not in makers:
        rule = "no cell assigns it: the cell that did was deleted, changed or interrupted, or is tagged `skip-export`"
        return BadInput(value, rule, "add the cell again; `Restart Kernel and Run All Cells` shows what is missing")
    if left_out:
        rule = f"the line of {makers[name][0]} that assigns it is left out: it needs a notebook"
        return BadInput(value, rule, "tag the cell `skip-export`, too")
    below = [cell for cell in makers[name] if cell.number > statement.cell.number]
    if not below:
        return BadInput(value, "it is assigned later, or was deleted before", "put its assignment before this line")
    rule = f"it is assigned by {below[0]}, further down the page"
    return BadInput(value, rule, "move that cell up, or export in the order in which cells were run: `--as-run`")
