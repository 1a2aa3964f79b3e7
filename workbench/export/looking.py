"""Which expressions only show something, and so are not in the script.

A bare expression only shows something if it is made of names, attributes, subscripts, constants, operators, and calls
of the methods of `SHOWING` on what came from the workbench, of those of `OF_TABLES`, of `display` and of what is
imported from `IPython` and `workbench.display`. Where such a
call shows the result of a call that does something, as in `ppo.run(2).head()`, the script has that call alone. All
other statements are in the script, except calls of `panel`, `strip` and `export` of a workbench, also assigned, and
bare expressions that only use what these returned: they need a notebook around them.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from workbench.export.statements import Statement
from workbench.export.syntax import replaced

# Methods that answer or draw, and change nothing: of a workbench and its parts; and of a frame, of a figure.
SHOWING = {
    "arguments", "batches", "changes", "df", "diff", "disagreements", "estimate", "events", "failed", "graph", "groups",
    "ledger", "lineage", "logs", "memory", "metrics", "panel", "peek", "runs", "select", "spans", "strip",
    "sync_plans", "syncs", "timeline", "topology", "traffic", "transfers", "turns", "weight_digests",
}  # fmt: skip
OF_TABLES = {"describe", "groupby", "head", "pivot_table", "reindex", "show", "tail", "value_counts"}
# Methods of frames whose names others have too: only what is called on the result of such a call is meant.
OF_FRAMES = {
    "agg", "astype", "count", "max", "mean", "min", "pivot", "query", "reset_index", "round", "set_index",
    "sort_values", "sum",
}  # fmt: skip
NOTEBOOK_ONLY = {"panel", "strip", "export"}  # methods of a workbench that need a notebook around them
OPENING = {"open", "attach", "restore"}
DISPLAYS = ("IPython", "workbench.display")  # what is imported from these only shows something
# Imports of these are left out where nothing in the script needs them.
FOR_SHOWING = (*DISPLAYS, "ipywidgets", "matplotlib", "plotly", "seaborn", "workbench_widgets")
ANY_VALUE = (
    ast.Name | ast.Constant | ast.Attribute | ast.Subscript | ast.Slice | ast.Tuple | ast.List | ast.Dict | ast.UnaryOp
    | ast.BinOp | ast.BoolOp | ast.Compare | ast.JoinedStr | ast.FormattedValue | ast.keyword | ast.expr_context
    | ast.operator | ast.unaryop | ast.boolop | ast.cmpop
)  # fmt: skip


class Looking:
    """Judges the statements of one notebook. A method or function that the notebook itself defines is not one that only
    shows, whatever its name."""

    def __init__(self, statements: Sequence[Statement]) -> None:
        nodes = [node for statement in statements for node in ast.walk(statement.node)]
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        bound = {name for statement in statements if not statement.is_import for name in statement.names.binds}
        imported = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and _is_of(node.module, DISPLAYS)
            for alias in node.names
        }
        self._methods, self._of_frames = SHOWING - functions, OF_FRAMES - functions
        self._of_tables, self._ours = OF_TABLES - functions, _ours(statements)
        self._displays = ({"display", "clear_output"} | imported) - bound
        self._labs = {name for s in statements if _opens(s.node) for name in s.names.binds}
        self._of_notebook: set[str] = set()
        views = [s for s in statements if isinstance(s.node, ast.Assign) and self._needs_notebook(s.node.value)]
        others = {name for s in statements if s not in views for name in s.names.binds}
        self._of_notebook = {name for s in views for name in s.names.binds} - others  # such as `panel = lab.panel()`

    def without_displays(self, statement: Statement) -> Statement | None:
        """What of a statement is in the script; None if nothing is. Inside of blocks and functions only calls of
        `display` and the like are left out, as a notebook shows no other value there."""
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
        """Whether evaluating an expression changes nothing."""
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
        """Whether it is a method that answers or draws."""
        return method.attr in self._of_tables or (method.attr in self._methods and _root(method) in self._ours)

    def _is_display(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._displays

    def _working(self, node: ast.expr) -> ast.expr | None:
        """The part of an expression that does something; None if it only shows something."""
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
        """Whether it is `lab.panel(...)`, `lab.strip()` or `lab.export(...)`, or something of what these returned."""
        while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in NOTEBOOK_ONLY and _name(called.value) in self._labs:
                return True
            node = node.func if isinstance(node, ast.Call) else node.value
        return _name(node) in self._of_notebook

    def _prints_of_notebook(self, node: ast.expr) -> bool:
        """Whether it is `print(panel.x)` or the like: a call that is given such a thing, and nothing that does more."""
        given = [*node.args, *(one.value for one in node.keywords)] if isinstance(node, ast.Call) else []
        needs = [self._needs_notebook(one) for one in given]
        return any(needs) and all(need or self._shows(one) for one, need in zip(given, needs, strict=True))


def without_unread(statement: Statement, read: set[str]) -> Statement | None:
    """An import without the names of `FOR_SHOWING` that nothing reads; None if there are no others."""
    node = statement.node
    assert isinstance(node, ast.Import | ast.ImportFrom)
    module = getattr(node, "module", None)
    stays = [
        alias
        for alias in node.names
        if (alias.asname or alias.name).partition(".")[0] in read
        or not _is_of(module or alias.name, FOR_SHOWING)
        or alias.name == "*"
    ]
    if len(stays) == len(node.names):
        return statement
    left = ast.Import(stays) if isinstance(node, ast.Import) else ast.ImportFrom(module, stays, node.level)
    return statement.with_text(ast.unparse(left)) if stays else None


def _root(node: ast.AST) -> str | None:
    """The name that a chain of calls, attributes and subscripts begins with."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return _name(node)


def _ours(statements: Sequence[Statement]) -> set[str]:
    """The names of what came from the workbench: imported from it, or made by calls of what is."""
    roots: dict[str, set[str | None]] = {}  # of each name, what the values begin with that it is given
    found = set[str]()
    for statement in statements:
        node = statement.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if _is_of(getattr(node, "module", None) or alias.name, ("workbench",)):
                    found.add((alias.asname or alias.name).partition(".")[0])
            continue
        values: list[ast.AST] = [node.value] if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else []
        values = [node.iter] if isinstance(node, ast.For) else values
        values = [item.context_expr for item in node.items] if isinstance(node, ast.With) else values
        values = [one for value in values for one in (value.elts if isinstance(value, ast.Tuple) else [value])]
        for name in statement.names.binds:
            roots.setdefault(name, set()).update({_root(value) for value in values} or {None})
    while new := {name for name, of in roots.items() if of - {name} and of - {name} <= found} - found:
        found |= new
    return found


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _opens(node: ast.stmt) -> bool:
    """Whether it is `lab = wb.open(...)` or the like."""
    called = node.value.func if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in OPENING


def _is_of(module: str | None, packages: Sequence[str]) -> bool:
    return any(module == package or (module or "").startswith(f"{package}.") for package in packages)


def _with(statement: Statement, changes: Sequence[tuple[ast.expr | ast.stmt, ast.expr | None]]) -> Statement:
    """The statement with parts of it exchanged; None: `pass`."""
    texts = []
    for old, new in changes:
        text = "pass" if new is None else ast.get_source_segment(statement.text, new) or ast.unparse(new)
        texts.append((old, f"({text})" if "\n" in text else text))
    return statement.with_text(replaced(statement.text, texts))
