"""Split a cell into statements, with the names that each binds and reads, and its source text."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.export.cells import Cell, python_of

AT_ONCE = ("listcomp", "setcomp", "dictcomp", "genexpr")  # scopes of their own that run at once
IN_PLACE = (ast.Subscript, ast.Attribute)


@dataclass(frozen=True)
class Names:
    """Names of the notebook's global scope in a piece of code.

    binds: names it assigns. uses: names it reads when it runs. late: names that a function defined here reads, or binds
    by `global`, when it is called. rebinds: names bound by a function through `global`. stores: names assigned to by
    index, attribute or `+=`. changes: these, and names on which a method is called.
    """

    binds: frozenset[str]
    uses: frozenset[str]
    late: frozenset[str]
    rebinds: frozenset[str]
    stores: frozenset[str]
    changes: frozenset[str]

    @property
    def needs(self) -> frozenset[str]:
        return self.uses | self.late


@dataclass(frozen=True)
class Statement:
    """One statement at the left margin of a cell. text: its source, with the comments above it."""

    cell: Cell
    text: str

    @cached_property
    def node(self) -> ast.stmt:
        return ast.parse(self.text).body[0]

    @cached_property
    def names(self) -> Names:
        return names_of(self.text)

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)

    @property
    def is_definition(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)

    def with_text(self, text: str) -> Statement:
        return replace(self, text=text)


def statements_of(cell: Cell) -> list[Statement]:
    """The statements of a code cell, without `pass`. Raises `BadInput` naming the cell if it is not Python."""
    text, _ = python_of(cell)
    found = [Statement(cell, piece) for piece in _pieces(text, ast.parse(text).body)]
    return [statement for statement in found if not isinstance(statement.node, ast.Pass)]


def _pieces(text: str, body: list[ast.stmt]) -> Iterator[str]:
    """Each statement's lines, from the end of the one before it to the comment behind it; an empty line first, where
    one stood between the two."""
    lines = text.split("\n")
    done = 0
    for place, node in enumerate(body):
        assert node.end_lineno is not None
        following = body[place + 1] if place + 1 < len(body) else None
        shares_line = following is not None and following.lineno == node.end_lineno
        shared = place > 0 and body[place - 1].end_lineno == node.lineno
        if shares_line or shared:  # a; b
            segment = ast.get_source_segment(text, node)
            assert segment is not None
            above = [] if shared else lines[done : first_line(node) - 1]
            behind = "" if shares_line else lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            yield "\n".join([*above, segment + behind]).strip("\n").rstrip()
        else:
            apart = "\n" if place and not lines[done].strip() else ""
            yield apart + "\n".join(lines[done : node.end_lineno]).strip("\n").rstrip().removesuffix(";").rstrip()
        done = node.end_lineno


def first_line(node: ast.stmt) -> int:
    """The first line of a statement or its decorators, from 1."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


def origins(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What the imports among the nodes bind: `{"wb": "workbench", "dataclass": "dataclasses.dataclass"}`."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names_of(text: str) -> Names:
    """Find the names with Python's own symbol table, as for a module."""
    top = symtable.symtable(text, "cell", "exec")
    tree = ast.parse(text)
    here = list(at_margin(tree.body))
    augmented = {n.target.id for n in here if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
    binds = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    uses = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()} | augmented
    uses |= _read_before_bound(here)
    # root names of index and attribute assignments, and of method calls
    stored = {root(n) for n in here if isinstance(n, IN_PLACE) and isinstance(n.ctx, ast.Store | ast.Del)}
    called = {root(n) for n in here if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    stores = {name for name in stored if name is not None} | augmented
    late: set[str] = set()
    rebinds: set[str] = set()
    for child in top.get_children():
        _add_nested(child, uses, late, rebinds, at_once=True)
    return Names(
        binds=frozenset(binds),
        uses=frozenset(uses),
        late=frozenset(late - uses),
        rebinds=frozenset(rebinds),
        stores=frozenset(stores),
        changes=frozenset(stores | {name for name in called if name is not None}),
    )


def _add_nested(table: symtable.SymbolTable, uses: set[str], late: set[str], rebinds: set[str], at_once: bool) -> None:
    at_once = at_once and (table.get_type() == "class" or table.get_name() in AT_ONCE)
    for symbol in table.get_symbols():
        if symbol.is_declared_global() and symbol.is_assigned():
            rebinds.add(symbol.get_name())
        if symbol.is_global() and (symbol.is_referenced() or symbol.is_declared_global()):
            (uses if at_once else late).add(symbol.get_name())
    for child in table.get_children():
        _add_nested(child, uses, late, rebinds, at_once)


def own_names(text: str) -> tuple[set[str], set[str]]:
    """Names whose meaning depends on whether the code is in a module or in a function: names that a class body reads
    before it binds them, and names that a function declares `global` inside a function with a variable of that name."""
    hidden: set[str] = set()

    def visit(table: symtable.SymbolTable, around: frozenset[str]) -> None:
        symbols = table.get_symbols()
        if table.get_type() == "function":
            hidden.update(s.get_name() for s in symbols if s.is_declared_global() and s.get_name() in around)
            around |= {s.get_name() for s in symbols if s.is_local()}
        for child in table.get_children():
            visit(child, around)

    visit(symtable.symtable(text, "cell", "exec"), frozenset())
    return _read_before_bound(ast.walk(ast.parse(text))), hidden


def _read_before_bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that class bodies read before they bind them; Python's symbol table calls them local."""
    found: set[str] = set()
    for one in nodes:
        if isinstance(one, ast.ClassDef):
            # alone, a method has no variable of a function around its class
            texts = [re.sub(r"(?m)^(\s*)nonlocal .*", r"\1pass", ast.unparse(line)) for line in one.body]
            lines = [names_of(text) for text in texts]
            binds = {name for line in lines for name in line.binds}
            for n, line in enumerate(lines):
                found |= line.uses & binds - {name for earlier in lines[:n] for name in earlier.binds}
    return found


def at_margin(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes that run in the scope they are written in: bodies of functions and lambdas are excluded."""
    for node in nodes:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            defaults = [*arguments.defaults, *(one for one in arguments.kw_defaults if one is not None)]
            yield from at_margin([*node.decorator_list, *defaults])
        elif isinstance(node, ast.Lambda):
            yield from at_margin(one for one in node.args.defaults)
        else:
            yield from at_margin(ast.iter_child_nodes(node))


def root(node: ast.AST) -> str | None:
    """The name that `a.b[c].d(...)` starts with; None if it starts with anything else."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Await | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def builtin(name: str) -> bool:
    return hasattr(builtins, name) or name in ("__name__", "__file__", "__doc__")
