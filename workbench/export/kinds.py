"""What the names of a notebook hold, where that is certain: something of the workbench, a frame, a plain container.

A method may only be left out of a script where it is known whose method it is: `get` reads a frame, and takes from a
queue.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from enum import IntEnum
from functools import cache, reduce
from typing import Any

from workbench.export.statements import at_margin

# Of the workbench and its parts: these give a frame.
FRAMES = {
    "batches", "by_device", "changes", "df", "events", "frame", "ledger", "lineage", "memory", "metrics", "peek", "run",
    "runs", "spans", "sync_plans", "syncs", "topology", "transfers",
}  # fmt: skip
ITEMS = {"get", "item", "squeeze", "xs"}  # methods of frames that give a column of it, or an item of a column
CONTAINERS = {"dict", "list", "set", "sorted", "str", "tuple"}
DISPLAYS = ast.Dict | ast.List | ast.Set | ast.Tuple | ast.ListComp | ast.DictComp | ast.SetComp


class Kind(IntEnum):
    """Of a value. COLUMN: a series, or an array of numpy. PLAIN: a container or text of Python. UNKNOWN: what it is, or
    what its items are, is not known. UNDECIDED: not worked out yet."""

    UNKNOWN = 0
    MODULE = 1
    PANDAS = 2
    NUMPY = 3
    OURS = 4
    PLAIN = 5
    COLUMN = 6
    FRAME = 7
    UNDECIDED = 8


DATA = (Kind.FRAME, Kind.COLUMN)
Value = ast.expr | Kind


class Kinds:
    """Of the names of one scope, and of expressions in it.

    A name has a kind only where all that binds it in its scope gives that kind. body: the scope's statements.
    parameters: names of which nothing is known. outer: of the scope around a function.
    """

    def __init__(self, body: Iterable[ast.AST], parameters: Iterable[str] = (), outer: Kinds | None = None) -> None:
        self._outer = outer
        self._values: dict[str, list[Value]] = {name: [Kind.UNKNOWN] for name in parameters}
        self._placed: set[int] = set()
        for node in at_margin(body):
            self._read(node)
        self._kinds = dict.fromkeys(self._values, Kind.UNDECIDED)
        while True:
            found = {
                name: reduce(_both, (self.of(value) if isinstance(value, ast.expr) else value for value in values))
                for name, values in self._values.items()
            }
            if found == self._kinds:
                break
            self._kinds = found

    def binds(self, name: str) -> bool:
        """Whether a name is bound in this scope, or in one around it."""
        return name in self._values or (self._outer is not None and self._outer.binds(name))

    def name(self, name: str) -> Kind:
        if name in self._kinds:
            return self._kinds[name]
        return self._outer.name(name) if self._outer is not None else Kind.UNKNOWN

    def of(self, node: ast.AST | None) -> Kind:
        """The kind of an expression's value."""
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Subscript):
            return self._of_item(node)
        if isinstance(node, ast.BinOp | ast.Compare):
            sides = [node.left, *([node.right] if isinstance(node, ast.BinOp) else node.comparators)]
            kinds = [self.of(side) for side in sides]
            if Kind.UNDECIDED in kinds:
                return Kind.UNDECIDED
            data = [kind for kind in kinds if kind in DATA]
            return max(data) if data else reduce(_both, kinds) if isinstance(node, ast.BinOp) else Kind.UNKNOWN
        if isinstance(node, ast.UnaryOp):
            return self.of(node.operand)
        if isinstance(node, ast.IfExp):
            return _both(self.of(node.body), self.of(node.orelse))
        return Kind.PLAIN if isinstance(node, DISPLAYS | ast.Constant | ast.JoinedStr) else Kind.UNKNOWN

    def _of_attribute(self, node: ast.Attribute) -> Kind:
        kind = self.of(node.value)
        if kind is Kind.OURS:
            return Kind.FRAME if node.attr in FRAMES else kind
        if kind is Kind.PANDAS:  # the class, whose methods make one
            return {"DataFrame": Kind.FRAME, "Series": Kind.COLUMN}.get(node.attr, Kind.UNKNOWN)
        return kind if kind in (*DATA, Kind.UNDECIDED) else Kind.UNKNOWN

    def _of_call(self, node: ast.Call) -> Kind:
        called = node.func
        if isinstance(called, ast.Name):
            if called.id in CONTAINERS and not self.binds(called.id):
                return Kind.PLAIN
            kind = self.name(called.id)
            return kind if kind in (Kind.OURS, Kind.UNDECIDED) else Kind.UNKNOWN
        if not isinstance(called, ast.Attribute):
            return Kind.UNKNOWN
        kind, name = self.of(called.value), called.attr
        if kind in (Kind.UNDECIDED, Kind.OURS):
            return Kind.FRAME if kind is Kind.OURS and name in FRAMES else kind
        if kind is Kind.NUMPY:
            return Kind.COLUMN
        if kind is Kind.PANDAS:
            return Kind.COLUMN if name in ("Series", "Index", "array", "unique") else Kind.FRAME
        if kind in DATA:
            return _item(kind) if name in ITEMS else kind
        return Kind.PLAIN if kind is Kind.PLAIN and name in ("copy", "items", "keys", "values") else Kind.UNKNOWN

    def _of_item(self, node: ast.Subscript) -> Kind:
        kind = self.of(node.value)
        if kind in (Kind.OURS, Kind.UNDECIDED):
            return kind
        if kind is Kind.PLAIN:
            return kind if isinstance(node.slice, ast.Slice) else Kind.UNKNOWN
        if kind not in DATA:
            return Kind.UNKNOWN
        for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            several = isinstance(index, ast.Slice | ast.List | ast.ListComp | ast.Compare | ast.BinOp | ast.UnaryOp)
            if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
                several = False
            if not several and self.of(index) not in DATA:
                kind = _item(kind)
        return kind

    def _read(self, node: ast.AST) -> None:
        """Write down what a statement, or a comprehension, binds."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            if node.value is not None:
                self._bind(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                self._bind(node.target, ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value))
        elif isinstance(node, ast.For | ast.comprehension):
            turns = node.iter.elts if isinstance(node.iter, ast.List | ast.Tuple) else []
            for value in turns or [_item_of_item(node.iter)]:
                self._bind(node.target, value)
        elif isinstance(node, ast.withitem):
            if node.optional_vars is not None:
                self._bind(node.optional_vars, node.context_expr)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                whole = not (alias.asname and rest)
                self._add(alias.asname or first, _of_module(first) if whole or first == "workbench" else Kind.UNKNOWN)
        elif isinstance(node, ast.ImportFrom):
            ours = not node.level and (node.module or "").partition(".")[0] == "workbench"
            for alias in node.names:
                self._add(alias.asname or alias.name, Kind.OURS if ours else Kind.UNKNOWN)
        elif isinstance(node, ast.ClassDef):
            self._add(node.name, self._of_class(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._add(node.name, Kind.UNKNOWN)
            for one in ast.walk(node):
                for name in one.names if isinstance(one, ast.Global | ast.Nonlocal) else ():
                    self._add(name, Kind.UNKNOWN)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            self._add(node.name, Kind.UNKNOWN)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self._add(node.rest, Kind.UNKNOWN)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in self._placed:
            self._add(node.id, Kind.UNKNOWN)

    def _of_class(self, node: ast.ClassDef) -> Value:
        """The value of its first base; unknown where the class defines a method with the name of a display call."""
        own = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        return node.bases[0] if node.bases and not own & (LAB_LOOKS | FRAMES) else Kind.UNKNOWN

    def _bind(self, target: ast.expr, value: Value) -> None:
        """Note the value of a name. Names in an unpacked tuple are visited one by one elsewhere."""
        if isinstance(target, ast.Name):
            self._placed.add(id(target))
            self._add(target.id, value)

    def _add(self, name: str, value: Value) -> None:
        self._values.setdefault(name, []).append(value)


# Of a workbench, its batches, groups and algorithms: they answer, and change nothing. A test holds them to the classes.
LAB_LOOKS = {
    "arguments", "batch", "batches", "changes", "devices", "df", "diff", "disagreements", "estimate", "events",
    "export", "failed", "fetch", "graph", "groups", "ledger", "lineage", "logs", "may_start", "memory", "metrics",
    "open_runs", "panel", "peek", "read_memory", "runs", "select", "spans", "strip", "sync_plans", "syncs",
    "tensordict", "timeline", "topology", "traffic", "transfers", "weight_digests",
}  # fmt: skip


def _item_of_item(node: ast.expr) -> ast.expr:
    """As of what a loop over it gives: the workbench's own things stay such, an item of anything else is not known."""
    return ast.Subscript(node, ast.Tuple([ast.Constant(0), ast.Constant(0)], ast.Load()), ast.Load())


def _of_module(name: str) -> Kind:
    known = {"pandas": Kind.PANDAS, "numpy": Kind.NUMPY, "workbench": Kind.OURS}
    return known.get(name, Kind.MODULE)


def _both(one: Kind, other: Kind) -> Kind:
    """Of what is the one or the other."""
    if Kind.UNDECIDED in (one, other):
        return min(one, other)
    if one in DATA and other in DATA:
        return min(one, other)
    if Kind.PLAIN in (one, other) and (one in DATA or other in DATA):
        return Kind.COLUMN  # the methods of frames that containers have too change nothing in either
    return one if one is other else Kind.UNKNOWN


def _item(kind: Kind) -> Kind:
    return Kind.COLUMN if kind is Kind.FRAME else Kind.UNKNOWN


def methods(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in dir(kind) if not name.startswith("_")}


@cache
def container_methods() -> set[str]:
    return methods(dict, list, set, str, tuple)
