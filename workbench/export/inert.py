"""Which definitions stand at the top of a script, where importing it makes them: those that do nothing but define.

A function or class is plain if it has no decorator but `wb.register`, and if its defaults, annotations and bases, and
what its class body assigns, are constants, names, and attributes of imports. Everything else stays inside `main`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping

from workbench.messages.protocols import PAPERS

# Packages whose classes call nothing of a subclass while that is made. (An Enum calls the `__init__` of its members.)
BASES = ("builtins", "torch.nn", "torch.utils.data", "workbench")
# Special methods that a plain class may have: only a call or an operator on an instance runs them.
METHODS = {
    "__call__", "__contains__", "__enter__", "__eq__", "__exit__", "__getitem__", "__hash__", "__init__", "__iter__",
    "__len__", "__next__", "__repr__", "__str__",
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PARTS = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.expr_context


def origins(imports: Iterable[ast.stmt]) -> dict[str, str]:
    """By name what imports bind it to: `{"wb": "workbench", "dataclass": "dataclasses.dataclass"}`."""
    found: dict[str, str] = {}
    for node in imports:
        if isinstance(node, ast.Import):
            found |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_plain(node: ast.stmt, imported: Mapping[str, str]) -> bool:
    """Whether making this function or class runs nothing of the notebook. imported: see `origins`."""
    return not _is_special(getattr(node, "name", "")) and _Scope(imported).defines(node)


class _Scope:
    """Of a module, or of a class body. own: names that the class body binds so far, whose meaning is not looked up."""

    def __init__(self, imported: Mapping[str, str]) -> None:
        self._imported = imported
        self._own: set[str] = set()

    def defines(self, node: ast.stmt) -> bool:
        if isinstance(node, FUNCTIONS):
            return self._function(node)
        if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords:
            return False
        body = _Scope(self._imported)
        return all(map(self._base, node.bases)) and all(map(body._member, node.body))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        parts = [one for one in ast.iter_child_nodes(node.args) if not isinstance(one, ast.arg)]
        arguments = [one for one in ast.walk(node.args) if isinstance(one, ast.arg)]
        annotations = [one for one in (*(a.annotation for a in arguments), node.returns) if one is not None]
        if node.decorator_list and any(_has_text(one) for one in annotations):  # `wb.register` evaluates such a text
            return False
        return all(map(self._registers, node.decorator_list)) and all(map(self.plain, (*parts, *annotations)))

    def _registers(self, node: ast.expr) -> bool:
        """Whether it is `wb.register(...)` of constants, with a protocol that no cell has to add before."""
        if not isinstance(node, ast.Call) or self._origin(node.func) != "workbench.register":
            return False
        given = {keyword.arg: keyword.value for keyword in node.keywords} | dict(enumerate(node.args))
        protocol = given.get(0, given.get("protocol"))
        known = isinstance(protocol, ast.Constant) and protocol.value in PAPERS
        return known and all(map(is_literal, given.values()))

    def _base(self, node: ast.expr) -> bool:
        origin = self._origin(node)
        return self.plain(node) and origin.startswith((".", *(f"{package}." for package in BASES)))

    def _member(self, node: ast.stmt) -> bool:
        """Whether a statement of a class body is plain; what it binds is noted."""
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            plain, names = self.defines(node), {node.name} - METHODS
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            parts = [*targets, node.value, getattr(node, "annotation", None)]
            plain = len(names) == len(targets) and all(map(self.plain, filter(None, parts)))
        else:
            return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        self._own |= names
        return plain and not any(map(_is_special, names))

    def plain(self, node: ast.AST) -> bool:
        """Whether evaluating an expression runs nothing of the notebook."""
        if isinstance(node, ast.Name):
            return isinstance(node.ctx, ast.Store) or node.id not in self._own
        if isinstance(node, ast.Attribute):  # one of the notebook's own may be a property of the class
            return self._origin(node)[:1] not in ("", ".")
        if isinstance(node, ast.Subscript):  # of a type: `list[int]`, `Mapping[str, int]`
            return _is_type(self._origin(node.value)) and self.plain(node.slice)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.operand, ast.Constant)
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.BitOr) and self.plain(node.left) and self.plain(node.right)
        return isinstance(node, PARTS) and all(map(self.plain, ast.iter_child_nodes(node)))

    def _origin(self, node: ast.AST) -> str:
        """The dotted name of what `a.b.c` means: as imported, `builtins.x`, or `.x` of the notebook; else ""."""
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self._own:
            return ""
        first = self._imported.get(node.id) or (f"builtins.{node.id}" if hasattr(builtins, node.id) else f".{node.id}")
        return ".".join([first, *reversed(names)])


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _has_text(annotation: ast.expr) -> bool:
    return any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in ast.walk(annotation))


def _is_type(origin: str) -> bool:
    """Whether it is a type that can be subscripted, rather than a thing that may lack the item."""
    package, _, name = origin.rpartition(".")
    return package in ("typing", "collections.abc") or (
        package == "builtins" and isinstance(getattr(builtins, name, None), type)
    )


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
