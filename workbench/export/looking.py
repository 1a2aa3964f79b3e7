"""What a statement is for: does it only look at what is there, does it make a value, or does it do something?

Known are the workbench's own methods, pandas' and Python's common ones, and modules that draw. A call of anything else
may do something, and stays.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from enum import Enum
from functools import cache

from workbench.export.statements import IN_PLACE, Statement, at_margin, root


class Purpose(Enum):
    """Of a statement. LOOK: shows or prints nothing that lasts, leaves no trace. PRINT: the same, by `print`. VALUE:
    binds what it reads, and is needed only where that is. EFFECT: does something."""

    LOOK = "look"
    DRAW = "draw"
    PRINT = "print"
    VALUE = "value"
    EFFECT = "effect"


# Of a workbench, its batches, groups and algorithms: they answer, and change nothing. A test holds them to the classes.
LAB_LOOKS = {
    "batch", "batches", "devices", "df", "diff", "estimate", "export", "fetch", "graph", "lineage", "logs",
    "memory", "metrics", "open_runs", "panel", "peek", "read_memory", "runs", "select", "spans", "sync_plans",
    "syncs", "tensordict", "timeline", "topology", "traffic", "transfers", "weight_digests",
}  # fmt: skip
FRAME_LOOKS = {
    "agg", "aggregate", "all", "any", "assign", "astype", "bar", "copy", "corr", "count", "cumsum", "describe",
    "drop_duplicates", "dropna", "ewm", "fillna", "filter", "first", "groupby", "head", "hist", "idxmax", "idxmin",
    "info", "isin", "isna", "items", "iterrows", "itertuples", "keys", "last", "line", "max", "mean", "median",
    "melt", "merge", "min", "nlargest", "notna", "nsmallest", "nunique", "pivot", "pivot_table", "plot", "quantile",
    "query", "reindex", "rename", "reset_index", "rolling", "round", "set_index", "sort_index", "sort_values",
    "stack", "std", "sum", "tail", "to_dict", "to_list", "to_numpy", "to_string", "tolist", "transpose",
    "unique", "unstack",
    "value_counts", "values", "var",
}  # fmt: skip
FUNCTIONS = {
    "abs", "all", "any", "bool", "dict", "enumerate", "filter", "float", "format", "frozenset", "getattr",
    "hasattr", "id", "int", "isinstance", "issubclass", "len", "list", "map", "max", "min", "range", "repr",
    "reversed", "round", "set", "sorted", "str", "sum", "tuple", "type", "vars", "zip",
}  # fmt: skip
TEXT_METHODS = {
    "format",
    "join",
    "split",
    "strip",
    "upper",
    "lower",
    "replace",
    "startswith",
    "endswith",
    "ljust",
    "rjust",
}
DISPLAYS = {"display", "clear_output", "HTML", "Markdown", "Image", "SVG", "JSON", "Pretty", "Code"}
DRAWING = {"IPython", "ipywidgets", "matplotlib", "seaborn", "plotly", "pylab", "altair", "bokeh", "workbench_widgets"}
SAVES = {"savefig", "write_html", "write_image", "write_json", "save"}
STREAMS = {"enumerate", "filter", "iter", "map", "open", "reversed", "zip"}  # what they give is read once
CALLING = {"map", "filter", "sorted", "max", "min"}  # of these a function may be given, which may do something
MODULE_VALUES = {
    "pandas": {
        "DataFrame", "Index", "NA", "Series", "Timestamp", "concat", "crosstab", "cut", "date_range", "isna", "merge",
        "notna", "pivot_table", "qcut", "read_csv", "read_json", "read_parquet", "to_datetime", "to_numeric",
    },
    "numpy": {
        "abs", "all", "allclose", "any", "arange", "argmax", "argmin", "argsort", "array", "array_equal", "asarray",
        "concatenate", "corrcoef", "cumsum", "diff", "dot", "exp", "eye", "full", "histogram", "isclose", "isfinite",
        "isnan", "linspace", "log", "max", "maximum", "mean", "median", "min", "minimum", "ones", "percentile",
        "quantile", "round", "sign", "sqrt", "stack", "std", "sum", "unique", "var", "where", "zeros",
    },
    "json": {"dumps", "loads"},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"},
    "itertools": {"accumulate", "chain", "combinations", "count", "permutations", "product", "repeat"},
    "pprint": {"pformat", "pprint"},
}  # fmt: skip
# What gives a thing of its own, which nothing else holds.
MAKE_ANEW = {
    "Counter", "DataFrame", "copy", "defaultdict", "dict", "float", "int", "len", "list", "metrics", "query",
    "reset_index", "round", "set", "spans", "str", "sum", "topology", "transfers",
}  # fmt: skip
PLAIN_DECORATORS = {"staticmethod", "classmethod", "property"}


class Looking:
    """Judges the statements of one notebook, in order, and remembers what names stand for.

    modules: name -> the top module that it was imported from. drawn: names that hold pictures, and functions that only
    show; printing: functions that only print. defined: functions and classes of the notebook. streams: names of
    what can be read once and is read again, so that looking at it takes it away.
    """

    def __init__(self, statements: Sequence[Statement]) -> None:
        self.modules: dict[str, str] = {}
        self.defined: set[str] = set()
        self.printing = {"print"}
        for statement in statements:
            node = statement.node
            if isinstance(node, ast.Import):
                self.modules |= {(a.asname or a.name).partition(".")[0]: a.name.partition(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.modules |= {a.asname or a.name: node.module.partition(".")[0] for a in node.names}
        bound = {name for s in statements if not s.is_import for name in s.names.binds}
        self.drawn = {name for name, module in self.modules.items() if module in DRAWING}
        self.drawn |= DISPLAYS - set(self.modules) - bound
        self.owned = _owned(statements)
        makers = STREAMS | {s.node.name for s in statements if isinstance(s.node, ast.FunctionDef) and _yields(s.node)}
        makers |= {name for name, module in self.modules.items() if module in ("itertools", "csv")}
        streams = {name for s in statements if _is_stream(s.node, makers) for name in s.names.binds}
        self.streams = {name for name in streams if sum(name in s.names.needs for s in statements) > 1}

    def purpose(self, statement: Statement) -> Purpose:
        """What one statement is for; call it in the order of the program."""
        node = statement.node
        if not statement.is_import:
            self.drawn -= statement.names.binds
            self.printing -= statement.names.binds
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if isinstance(node, ast.FunctionDef) and self._only_shows(node):
                (self.printing if _prints(node) else self.drawn).add(node.name)
            self.defined.add(node.name)
            return Purpose.EFFECT if self._may_register(node) else Purpose.VALUE
        found = self._of(node)
        if found is Purpose.LOOK and isinstance(node, ast.Expr | ast.Assign) and root(node.value) in self.drawn:
            found = Purpose.DRAW
        if found in (Purpose.LOOK, Purpose.DRAW) and isinstance(node, ast.Assign | ast.AnnAssign):
            self.drawn |= statement.names.binds
        return found

    def _may_register(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
        """Whether a definition tells others of itself: by a decorator, or to a base class of the notebook."""
        decorators = {root(one) for one in node.decorator_list} - PLAIN_DECORATORS
        bases = {root(one) for one in node.bases} if isinstance(node, ast.ClassDef) else set()
        told = isinstance(node, ast.ClassDef) and bool(node.keywords)
        told |= any(self.modules.get(name or "") not in ("functools", "dataclasses", "torch") for name in decorators)
        return told or bool(bases & self.defined)

    def _of(self, node: ast.stmt) -> Purpose:
        if isinstance(node, ast.Expr):
            call = node.value
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self.printing:
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                to_file = any(keyword.arg == "file" for keyword in call.keywords)
                return Purpose.PRINT if all(map(self.looks, given)) and not to_file else Purpose.EFFECT
            return Purpose.LOOK if self.looks(call) else Purpose.EFFECT
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            if node.value is None:
                return Purpose.VALUE
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stores = [one for target in targets for one in ast.walk(target) if isinstance(one, IN_PLACE)]
            if any(map(self._outside, stores)) or (isinstance(node, ast.AugAssign) and self._outside(node.target)):
                return Purpose.EFFECT
            if not self.looks(node.value):
                return Purpose.EFFECT
            return Purpose.LOOK if self._draws(node.value) else Purpose.VALUE
        if isinstance(node, ast.For | ast.If | ast.While | ast.With | ast.Try):
            return self._of_block(node)
        return Purpose.VALUE if isinstance(node, ast.Pass) else Purpose.EFFECT

    def _outside(self, target: ast.AST) -> bool:
        """Whether a change in place may reach what others hold: all but `name[...] = ` and `name += ` of what the
        notebook itself has made, under that name."""
        inner = target.value if isinstance(target, ast.Subscript) else target
        return not (isinstance(inner, ast.Name) and inner.id in self.owned)

    def _of_block(self, node: ast.stmt) -> Purpose:
        """A block only looks if all in it does; a loop that prints, prints."""
        inner = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)]
        inner += [one for handler in getattr(node, "handlers", ()) for one in handler.body]
        heads = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        heads += [item.context_expr for item in getattr(node, "items", ())]
        if isinstance(node, ast.For):
            heads = [node.iter]
            if self._reads_stream(node.iter):
                return Purpose.EFFECT
        if isinstance(node, ast.With) or not all(map(self.looks, heads)):
            return Purpose.EFFECT
        purposes = {self._of(one) for one in inner}
        for purpose in (Purpose.EFFECT, Purpose.PRINT, Purpose.VALUE):
            if purpose in purposes:
                return purpose
        return Purpose.LOOK

    def looks(self, node: ast.AST) -> bool:
        """Whether evaluating an expression changes nothing."""
        for one in at_margin([node]):
            if isinstance(one, ast.Call):
                given = [*one.args, *(keyword.value for keyword in one.keywords)]
                if not self._harmless(one) or any(map(self._reads_stream, given)):
                    return False
            if isinstance(one, ast.Compare) and any(map(self._reads_stream, one.comparators)):
                return False
            if isinstance(one, ast.Starred) and self._reads_stream(one.value):
                return False
            if isinstance(one, ast.comprehension) and self._reads_stream(one.iter):
                return False
            if isinstance(one, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
                return False
        return True

    def _reads_stream(self, node: ast.AST) -> bool:
        inner = node.value if isinstance(node, ast.Starred) else node
        return isinstance(inner, ast.Name) and inner.id in self.streams

    def _harmless(self, call: ast.Call) -> bool:
        called, start = call.func, root(call.func)
        if isinstance(called, ast.Name):
            if called.id in CALLING and not _calls_only_known(call):
                return False
            return called.id in FUNCTIONS or called.id in self.drawn | self.printing - {"print"} | _wb_values()
        if not isinstance(called, ast.Attribute):
            return False
        if self._draws(call):
            return called.attr not in SAVES
        if isinstance(called.value, ast.Constant | ast.JoinedStr) and called.attr in TEXT_METHODS:
            return True
        module = self.modules.get(start or "")
        if isinstance(called.value, ast.Name) and module is not None:
            if module == "workbench":
                return called.attr in _wb_values() or called.attr == "ls"
            return called.attr in MODULE_VALUES.get(module, ()) or module in ("math", "statistics", "textwrap")
        if module == "workbench" and called.attr in ("of", "colocate", "split", "standalone"):
            return True
        if start in self.modules and module not in ("workbench", "pandas", "numpy"):
            return False
        if any(keyword.arg == "inplace" for keyword in call.keywords):
            return False
        if module == "pandas" and not called.attr.startswith("to_"):
            return True  # of a frame that was made in this very expression
        return called.attr in LAB_LOOKS | FRAME_LOOKS | _placement_methods()

    def working_part(self, node: ast.expr) -> ast.expr:
        """Of `mine.run(2)[columns].head()`, which does something and then shows some of it, what does it."""
        while True:
            inner: ast.expr | None = None
            if isinstance(node, ast.Subscript | ast.Attribute):
                inner = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._harmless(node):
                inner = node.func.value
            others = [
                one for one in ast.iter_child_nodes(node) if one is not inner and not isinstance(one, ast.Attribute)
            ]
            if inner is None or self.looks(inner) or not all(map(self.looks, others)):
                return node
            node = inner

    def _draws(self, node: ast.AST) -> bool:
        """Whether an expression is, or is asked of, something that is drawn."""
        if root(node) in self.drawn:
            return isinstance(node, ast.Call)
        while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "panel":
                return True
            node = node.func if isinstance(node, ast.Call) else node.value
        return False

    def _only_shows(self, function: ast.FunctionDef) -> bool:
        """Whether a function of the notebook shows something, and does nothing else."""
        purposes = [self._of(one) for one in function.body if not isinstance(one, ast.Return)]
        inside = list(ast.walk(function))
        shows = any(isinstance(one, ast.Name) and one.id in self.drawn | {"print"} for one in inside)
        changes = any(
            isinstance(one, ast.Global | ast.Nonlocal | ast.AugAssign)
            or (isinstance(one, IN_PLACE) and isinstance(one.ctx, ast.Store | ast.Del))
            for one in inside
        )
        returns = any(isinstance(one, ast.Return) and one.value is not None for one in inside)
        return shows and not changes and not returns and Purpose.EFFECT not in purposes


def _owned(statements: Sequence[Statement]) -> set[str]:
    """Names that stand for nothing but what is made where they are bound: a literal container, a number, a frame."""
    owned: dict[str, bool] = {}
    for statement in statements:
        node = statement.node
        if isinstance(node, ast.AugAssign):
            continue
        fresh = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value,
            ast.Dict | ast.List | ast.Set | ast.Constant | ast.ListComp | ast.DictComp | ast.Call | ast.BinOp,
        )
        if fresh and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = (
                called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
            )
            fresh = name in MAKE_ANEW
        for name in statement.names.binds:
            owned[name] = owned.get(name, True) and fresh
    return {name for name, fresh in owned.items() if fresh}


def _is_stream(node: ast.stmt, makers: set[str]) -> bool:
    """Whether it gives a name to an iterator. makers: functions and modules that make them."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.GeneratorExp) or (isinstance(value, ast.Call) and root(value) in makers)


def _yields(function: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Yield | ast.YieldFrom) for one in at_margin(function.body))


def _prints(function: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "print" for one in ast.walk(function))


def _calls_only_known(call: ast.Call) -> bool:
    """Whether the function that `map`, `sorted(key=)` and the like are given is a known one."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "key"]
    if isinstance(call.func, ast.Name) and call.func.id in ("map", "filter"):
        given += call.args[:1]
    return all(
        (isinstance(one, ast.Name) and one.id in FUNCTIONS)
        or (isinstance(one, ast.Lambda) and not any(isinstance(node, ast.Call) for node in ast.walk(one)))
        for one in given
    )


@cache
def _wb_values() -> set[str]:
    """Public classes of the workbench: making one starts nothing."""
    from workbench.algorithms import ALGORITHMS
    from workbench.support.public_names import PUBLIC_NAMES

    return {name for name in (*ALGORITHMS, *PUBLIC_NAMES) if name[0].isupper()}


@cache
def _placement_methods() -> set[str]:
    from workbench.placement import Placement

    return {name for name in dir(Placement) if name.startswith("with")}


def builtin(name: str) -> bool:
    return hasattr(builtins, name) or name in ("__name__", "__file__", "__doc__")
