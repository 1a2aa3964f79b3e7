"""Whether a definition does nothing but define: only such ones stand at the top of a script, where importing runs them.

What runs when a function or class is made: its decorators, default values, annotations, base classes, and the body of a
class. Each of these may only have syntax of a list of what is allowed. Everything else stays inside `main`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping

# What may be called, and what may decorate: none of it calls what it is given.
MAKERS = {
    "builtins.classmethod", "builtins.property", "builtins.staticmethod",
    "contextlib.asynccontextmanager", "contextlib.contextmanager", "dataclasses.dataclass", "dataclasses.field",
    "functools.cache", "functools.cached_property", "functools.lru_cache", "functools.partial", "functools.wraps",
    "torch.inference_mode", "torch.no_grad", "typing.TypeVar", "workbench.protocol", "workbench.register",
    *(f"workbench.{name}" for name in ("Correction", "Generation", "Layout", "LoRA", "Model", "Sampling", "Training")),
}  # fmt: skip
DECORATORS = MAKERS | {"abc.abstractmethod"}
ACCESSORS = ("setter", "getter", "deleter")
# Packages whose classes call nothing of a subclass while that is made. (An Enum calls its `__new__`.)
BASES = ("abc", "builtins", "collections.abc", "torch", "typing", "workbench")
HOOKS = {"__init_subclass__", "__class_getitem__"}  # called by the statements of others
LITERALS = ast.Constant | ast.Name | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.expr_context | ast.unaryop


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


def is_inert(node: ast.stmt, imported: Mapping[str, str]) -> bool:
    """Whether making this function or class runs nothing of the notebook. imported: see `origins`."""
    return _Scope(imported).statement(node, frozenset())


class _Scope:
    def __init__(self, imported: Mapping[str, str]) -> None:
        self._imported = imported

    def statement(self, node: ast.stmt, properties: frozenset[str]) -> bool:
        """properties: names of the class around it that are properties so far."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
            run = [*node.args.defaults, *node.args.kw_defaults, *(a.annotation for a in arguments), node.returns]
            return self._decorated(node, properties) and all(one is None or self.value(one) for one in run)
        if isinstance(node, ast.ClassDef):
            return self._decorated(node, properties) and self._is_class(node)
        if isinstance(node, ast.AnnAssign):
            values = [node.annotation, *filter(None, [node.value])]
            return isinstance(node.target, ast.Name) and all(map(self.value, values))
        if isinstance(node, ast.Assign):
            return all(isinstance(target, ast.Name) for target in node.targets) and self.value(node.value)
        return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    def _is_class(self, node: ast.ClassDef) -> bool:
        if node.keywords or not all(self.value(base) and self._is_quiet(base) for base in node.bases):
            return False
        properties: frozenset[str] = frozenset()
        for statement in node.body:
            if not self.statement(statement, properties) or _name(statement) in HOOKS:
                return False
            if isinstance(statement, ast.FunctionDef) and any(
                self.origin(decorator) in ("builtins.property", "functools.cached_property")
                for decorator in statement.decorator_list
            ):
                properties |= {statement.name}
        return True

    def _is_quiet(self, base: ast.expr) -> bool:
        """Whether a base class calls nothing of its subclass while that is made. Those of the notebook were judged."""
        origin = self.origin(base.value if isinstance(base, ast.Subscript) else base)
        return origin.startswith(".") or any(origin == name or origin.startswith(f"{name}.") for name in BASES)

    def _decorated(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, properties: frozenset[str]
    ) -> bool:
        for decorator in node.decorator_list:
            made = decorator.func if isinstance(decorator, ast.Call) else decorator
            accessor = (
                isinstance(made, ast.Attribute) and made.attr in ACCESSORS
                and isinstance(made.value, ast.Name) and made.value.id in properties
            )  # fmt: skip
            if not accessor and (self.origin(made) not in DECORATORS or not self.value(decorator)):
                return False
        return True

    def value(self, node: ast.AST) -> bool:
        """Whether working out an expression runs nothing of the notebook."""
        if isinstance(node, ast.Lambda):
            return all(self.value(one) for one in (*node.args.defaults, *filter(None, node.args.kw_defaults)))
        if isinstance(node, ast.Attribute):
            return bool(self.origin(node))
        if isinstance(node, ast.Call):
            if self.origin(node.func) not in MAKERS:
                return False
            return all(map(self.value, (*node.args, *(keyword.value for keyword in node.keywords))))
        if isinstance(node, ast.Subscript):  # of a type: `list[int]`, `Mapping[str, int]`
            origin = self.origin(node.value)
            return bool(origin) and not origin.startswith(".") and self.value(node.slice)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.operand, ast.Constant)
        if isinstance(node, ast.BinOp):  # `int | None`, and numbers
            numbers = isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
            return numbers or (isinstance(node.op, ast.BitOr) and self.value(node.left) and self.value(node.right))
        return isinstance(node, LITERALS) and all(map(self.value, ast.iter_child_nodes(node)))

    def origin(self, node: ast.AST) -> str:
        """The dotted name of what `a.b.c` means: as imported, `builtins.x`, or `.x` of the notebook; else ""."""
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        first = self._imported.get(node.id) or (f"builtins.{node.id}" if hasattr(builtins, node.id) else f".{node.id}")
        return ".".join([first, *reversed(names)])


def _name(node: ast.stmt) -> str:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    first = targets[0]
    return first.id if isinstance(first, ast.Name) else str(getattr(node, "name", ""))
