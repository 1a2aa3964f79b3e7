"""Whether a definition does nothing but define: only such ones stand at the top of a script, where importing runs them.

What runs when a function or class is made: its decorators, default values, annotations, base classes, and the body of a
class. Each of these may only have syntax of a list of what is allowed. Everything else stays inside `main`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping

# What may be called in a value: none of it calls what it is given, but for `Training`, which tries a schedule.
MAKERS = {
    "builtins.staticmethod", "dataclasses.field", "functools.partial", "typing.TypeVar",
    *(f"workbench.{name}" for name in ("ClipCov", "Correction", "Generation", "KLCov", "Layout", "LoRA", "Model")),
    "workbench.Context",
    "workbench.Precision", "workbench.Sampling", "workbench.Training",
}  # fmt: skip
# What may decorate as it is. A function has at most one of `BINDING`: reading a `classmethod` of a `property` runs it.
BINDING = {"builtins.classmethod", "builtins.property", "builtins.staticmethod", "functools.cached_property"}
DECORATORS = BINDING | {
    "abc.abstractmethod", "contextlib.asynccontextmanager", "contextlib.contextmanager", "functools.cache",
    "functools.lru_cache", "torch.inference_mode", "torch.no_grad",
}  # fmt: skip
CLASS_DECORATORS = {"dataclasses.dataclass"}
# What may be called to make a decorator, with constants; `functools.wraps` with a name.
FACTORIES = {"functools.lru_cache", "torch.inference_mode", "torch.no_grad", "workbench.register"}
ACCESSORS = ("setter", "getter", "deleter")
# Classes and packages whose classes call nothing of a subclass while that is made. (An Enum calls its `__new__`.)
BASES = (
    "abc", "builtins", "collections.abc", "torch.autograd.Function", "torch.nn", "torch.utils.data.Dataset", "typing",
    "workbench",
)  # fmt: skip
# Special names that a notebook may define: only a call or an operator on an instance runs them.
METHODS = {
    "__init__", "__post_init__", "__call__", "__repr__", "__str__", "__len__", "__iter__", "__next__", "__getitem__",
    "__setitem__", "__delitem__", "__contains__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__eq__",
    "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__bool__", "__add__", "__sub__", "__mul__",
    "__truediv__", "__neg__", "__float__", "__int__", "__getattr__", "__setattr__",
}  # fmt: skip
ASSIGNED = {"__doc__", "__hash__", "__match_args__", "__slots__"}
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
    special = isinstance(node, DEFINITIONS) and _is_special(node.name)  # a module's `__getattr__`
    return not special and _Scope(imported).statement(node)


DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class _Scope:
    """Of a module, or of a class body. own: names that the class binds so far, which hide those outside it;
    properties: those of them that are properties."""

    def __init__(self, imported: Mapping[str, str], own: frozenset[str] = frozenset()) -> None:
        self._imported = imported
        self._own = set(own)
        self._properties: set[str] = set()

    def statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return self._decorated(node) and self._is_quiet_function(node)
        if isinstance(node, ast.ClassDef):
            return self._decorated(node) and self._is_class(node)
        if isinstance(node, ast.AnnAssign):
            values = [node.annotation, *filter(None, [node.value])]
            return isinstance(node.target, ast.Name) and all(map(self.value, values))
        if isinstance(node, ast.Assign):
            return all(isinstance(target, ast.Name) for target in node.targets) and self.value(node.value)
        return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    def _is_quiet_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
        annotations = [one for one in (*(a.annotation for a in arguments), node.returns) if one is not None]
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        if any(self.origin(_made(one)) == "workbench.register" for one in node.decorator_list):
            return all(map(self.value, defaults)) and all(map(self._is_quiet_text, annotations))
        return all(map(self.value, (*defaults, *annotations)))

    def _is_quiet_text(self, annotation: ast.expr) -> bool:
        """`wb.register` works out the annotations that are texts, also those within others."""
        if not self.value(annotation):
            return False
        for one in ast.walk(annotation):
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                try:
                    inner = ast.parse(one.value.strip(), mode="eval").body
                except (SyntaxError, ValueError):
                    return False
                if not self._is_quiet_text(inner):
                    return False
        return True

    def _is_class(self, node: ast.ClassDef) -> bool:
        if node.keywords or not all(self.value(base) and self._is_quiet(base) for base in node.bases):
            return False
        body = _Scope(self._imported, frozenset(self._own))
        return all(body.statement(statement) and body.bind(statement) for statement in node.body)

    def bind(self, statement: ast.stmt) -> bool:
        """Remember what a statement of the class body binds. False for a special name that Python may call."""
        if isinstance(statement, DEFINITIONS):
            names, allowed = {statement.name}, METHODS
        else:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            names, allowed = {target.id for target in targets if isinstance(target, ast.Name)}, ASSIGNED
        made = {self.origin(_made(one)) for one in getattr(statement, "decorator_list", ())}
        is_property = bool(made & {"builtins.property", "functools.cached_property"})
        is_property |= any(map(self._is_accessor, getattr(statement, "decorator_list", ())))
        self._own |= names
        self._properties = self._properties | names if is_property else self._properties - names
        return not any(_is_special(name) and name not in allowed for name in names)

    def _is_quiet(self, base: ast.expr) -> bool:
        """Whether a base class calls nothing of its subclass while that is made. Those of the notebook were judged."""
        origin = self.origin(base.value if isinstance(base, ast.Subscript) else base)
        return origin.startswith(".") or any(origin == name or origin.startswith(f"{name}.") for name in BASES)

    def _decorated(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
        allowed = CLASS_DECORATORS if isinstance(node, ast.ClassDef) else DECORATORS
        factories = CLASS_DECORATORS if isinstance(node, ast.ClassDef) else FACTORIES
        binding = 0
        for decorator in node.decorator_list:
            origin, accessor = self.origin(_made(decorator)), self._is_accessor(decorator)
            binding += accessor or origin in BINDING
            if isinstance(decorator, ast.Call):
                given = [*decorator.args, *(keyword.value for keyword in decorator.keywords)]
                if origin == "functools.wraps":  # it copies what the other has, for a decorator above it to find
                    quiet = len(node.decorator_list) == 1 and all(isinstance(one, ast.Name) for one in given)
                else:
                    quiet = origin in factories and all(map(_is_constant, given))
            else:
                quiet = accessor or origin in allowed
            if not quiet:
                return False
        return binding <= 1

    def _is_accessor(self, decorator: ast.expr) -> bool:
        return (
            isinstance(decorator, ast.Attribute) and decorator.attr in ACCESSORS
            and isinstance(decorator.value, ast.Name) and decorator.value.id in self._properties
        )  # fmt: skip

    def value(self, node: ast.AST) -> bool:
        """Whether working out an expression runs nothing of the notebook."""
        if isinstance(node, ast.Lambda):
            return all(self.value(one) for one in (*node.args.defaults, *filter(None, node.args.kw_defaults)))
        if isinstance(node, ast.Attribute):  # one of the notebook's own may be a property of the class
            return not self.origin(node).startswith(".") and bool(self.origin(node))
        if isinstance(node, ast.Call):
            if self.origin(node.func) not in MAKERS or self._tries_schedule(node):
                return False
            return all(map(self.value, (*node.args, *(keyword.value for keyword in node.keywords))))
        if isinstance(node, ast.Subscript):  # of a type: `list[int]`, `Mapping[str, int]`
            return _is_type(self.origin(node.value)) and self.value(node.slice)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.operand, ast.Constant)
        if isinstance(node, ast.BinOp):  # `int | None`, and numbers
            numbers = isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
            return numbers or (isinstance(node.op, ast.BitOr) and self.value(node.left) and self.value(node.right))
        return isinstance(node, LITERALS) and all(map(self.value, ast.iter_child_nodes(node)))

    def _tries_schedule(self, call: ast.Call) -> bool:
        """Whether it makes a `Training` that may have a function as its schedule, of which it takes the first steps."""
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        schedule = named.get("schedule", ast.Constant("constant"))
        return self.origin(call.func) == "workbench.Training" and not (
            isinstance(schedule, ast.Constant) and None not in named and not call.args
        )

    def origin(self, node: ast.AST) -> str:
        """The dotted name of what `a.b.c` means: as imported, `builtins.x`, or `.x` of the notebook; else "", as for
        what the class body has bound."""
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self._own:
            return ""
        first = self._imported.get(node.id) or (f"builtins.{node.id}" if hasattr(builtins, node.id) else f".{node.id}")
        return ".".join([first, *reversed(names)])


def _made(decorator: ast.expr) -> ast.expr:
    """What is called to make a decorator, or the decorator itself."""
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _is_constant(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _is_type(origin: str) -> bool:
    """Whether it is a type that can be subscripted, rather than a thing that may lack the item."""
    package, _, name = origin.rpartition(".")
    if package == "builtins":
        return isinstance(getattr(builtins, name, None), type)
    return origin == "numpy.ndarray" or package in ("typing", "collections.abc", "numpy.typing")


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
