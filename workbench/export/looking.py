"""What a statement is for: does it only look at what is there, does it make a value, or does it do something?

Four kinds of calls only look: the workbench's own methods in `LAB_LOOKS`, Python's builtins, functions of modules for
data and methods of frames and arrays, and modules that draw; but not where their name says that they change something
(`CHANGES`), or where they are given a function that may. A method counts only where `Kinds` knows what it is a method
of. A call of anything else may do something, and stays.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Sequence
from enum import Enum
from functools import cache

from workbench.export.kinds import DATA, LAB_LOOKS, Kind, Kinds, container_methods, methods
from workbench.export.statements import IN_PLACE, Statement, at_margin, root


class Purpose(Enum):
    """Of a statement. LOOK: shows something, and changes nothing. DRAW: the same, by a picture. PRINT: the same, by
    `print`. VALUE: binds what it reads, and is needed only where that is. EFFECT: does something."""

    LOOK = "look"
    DRAW = "draw"
    PRINT = "print"
    VALUE = "value"
    EFFECT = "effect"


DISPLAYS = {"display", "clear_output", "HTML", "Markdown", "Image", "SVG", "JSON", "Pretty", "Code"}
DRAWING = {"IPython", "ipywidgets", "matplotlib", "seaborn", "plotly", "pylab", "altair", "bokeh", "workbench_widgets"}
STREAMS = {"enumerate", "filter", "iter", "map", "open", "reversed", "zip"}  # what they give is read once
BUILTIN_EFFECTS = {
    "breakpoint", "compile", "delattr", "eval", "exec", "exit", "globals", "input", "iter", "locals", "next", "open",
    "print", "quit", "setattr",
}  # fmt: skip
DATA_MODULES = {"collections", "itertools", "json", "math", "numpy", "pandas", "pprint", "statistics", "textwrap"}
# Names of what changes a thing in place, a setting or a random generator, writes, or calls a function that it is given.
# A test holds this to the methods that frames have in common with things that can be changed.
CHANGES = re.compile(
    "add$|apply|clear$|combine$|compare$|copyto|discard|drop$|dump$|eval$|extend|fill_|from|insert|isetitem|join|map$|"
    "memmap|name$|option|piecewise|pipe$|place|pop|put|random|read_sql|register|remove|replace$|reset_opt|reverse|sample|save|"
    "seed|set(?!_index|_axis)|shuffle|sort$|starmap|to_(?!dict|list|numpy|string)|transform$|truncate|update|vectorize|"
    "write"
)
# Methods of frames in `CHANGES` that change nothing: those that make another frame, and those that call a function.
FRAME_MAKES = {"drop", "join", "replace"}
APPLIES = {"apply", "map", "transform"}
# What gives a thing of its own, which nothing else holds; `MAKE_ROWS` as methods of the workbench and its parts.
MAKE_ROWS = {"batches", "df", "events", "failed", "lineage", "peek", "run", "runs"}
MAKE_ANEW = {
    "Counter", "DataFrame", "copy", "defaultdict", "len", "metrics", "round", "spans", "sum", "topology", "transfers",
}  # fmt: skip
MAKE_FRAMES = {"from_dict", "from_records"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
MODULES = (Kind.MODULE, Kind.PANDAS, Kind.NUMPY)
PLAIN_DECORATORS = {"staticmethod", "classmethod", "property"}


class Looking:
    """Judges the statements of one notebook, in order, and remembers what their names mean.

    modules: name -> the top module that it was imported from. drawn: names that hold pictures, and functions that only
    show; printing: functions that only print. defined: functions and classes of the notebook; methods: of its classes.
    kinds: what names hold. streams: names of what can be read once and is read again, so that
    looking at it takes it away.
    """

    def __init__(self, statements: Sequence[Statement]) -> None:
        self.modules: dict[str, str] = {}
        self.defined: set[str] = set()
        classes = [node for s in statements for node in ast.walk(s.node) if isinstance(node, ast.ClassDef)]
        self.methods = {one.name for node in classes for one in node.body if isinstance(one, FUNCTIONS)}
        self.printing = {"print"}
        for statement in statements:
            node = statement.node
            if isinstance(node, ast.Import):
                self.modules |= {(a.asname or a.name).partition(".")[0]: a.name.partition(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.modules |= {a.asname or a.name: node.module.partition(".")[0] for a in node.names}
        self.kinds = Kinds([statement.node for statement in statements])
        bound = {name for s in statements if not s.is_import for name in s.names.binds}
        self.drawn = {name for name, module in self.modules.items() if module in DRAWING}
        self.drawn |= DISPLAYS - set(self.modules) - bound
        self.owned = _owned(statements, self.kinds)
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
            parts = [one for target in targets for one in ast.walk(target) if isinstance(one, IN_PLACE)]
            stores = [one for one in parts if isinstance(one.ctx, ast.Store)]
            if any(map(self._outside, stores)) or (isinstance(node, ast.AugAssign) and self._outside(node.target)):
                return Purpose.EFFECT
            if not all(map(self.looks, [*targets, node.value])):
                return Purpose.EFFECT
            return Purpose.LOOK if self._draws(node.value) else Purpose.VALUE
        if isinstance(node, ast.For | ast.If | ast.While | ast.With | ast.Try):
            return self._of_block(node)
        return Purpose.VALUE if isinstance(node, ast.Pass) else Purpose.EFFECT

    def _outside(self, target: ast.AST) -> bool:
        """Whether a change in place may reach what others hold: all but `name[...] = ` and `name += ` of what the
        notebook itself has made, under that name, and of frames `name.loc[...] = ` and `name.columns = `."""
        inner = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(inner, ast.Attribute) and self.kinds.of(inner.value) is Kind.FRAME:
            indexed = isinstance(target, ast.Subscript)
            inner = inner.value if inner.attr in (("loc", "iloc", "at", "iat") if indexed else ("columns",)) else inner
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
        if self._may_act(call):
            return False
        if isinstance(called, ast.Name):
            return self._is_pure(called.id) or called.id in self.drawn | self.printing - {"print"} | _wb_values()
        if not isinstance(called, ast.Attribute):
            return False
        if self._draws(call):
            return not called.attr.startswith(("save", "write"))
        if isinstance(called.value, ast.Constant | ast.JoinedStr):
            return True
        module, kind = self.modules.get(start or ""), self.kinds.of(called.value)
        of_module = isinstance(called.value, ast.Name) and kind in MODULES
        if module == "workbench" and kind is Kind.OURS and isinstance(called.value, ast.Name):
            return called.attr in _wb_values() or called.attr == "ls"
        if module == "workbench" and kind is Kind.OURS and called.attr in ("of", "colocate", "split", "standalone"):
            return True
        if any(keyword.arg in ("inplace", "out") for keyword in call.keywords):
            return False
        if of_module:
            return module in DATA_MODULES and not CHANGES.match(called.attr) and not _writes_last(module, call)
        if kind is Kind.OURS:
            return called.attr in LAB_LOOKS | _placement_methods()
        if kind is Kind.PLAIN:
            return called.attr in frame_looks() & container_methods()
        makes = kind is Kind.FRAME and called.attr in FRAME_MAKES
        return kind in DATA and (makes or called.attr in frame_looks() | MAKE_FRAMES or self._applies_purely(call))

    def _is_pure(self, name: str) -> bool:
        """Whether a name is that of a builtin function that changes nothing."""
        other = name in BUILTIN_EFFECTS or name in self.defined or self.kinds.binds(name)
        return not other and callable(getattr(builtins, name, None))

    def _may_act(self, call: ast.Call) -> bool:
        """Whether a call is given a function that may do something."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        called = [keyword.value for keyword in call.keywords if keyword.arg == "key"]
        if isinstance(call.func, ast.Name) and call.func.id in ("map", "filter"):
            called += call.args[:1]
        for one in given:
            if isinstance(one, ast.Lambda):
                if self._lambda_may_act(one):
                    return True
            elif isinstance(one, ast.Name):
                if one.id in self.defined or (one in called and not self._is_pure(one.id)):
                    return True
            elif one in called or (isinstance(one, ast.Attribute) and CHANGES.match(one.attr)):
                return True
        return False

    def _lambda_may_act(self, function: ast.Lambda) -> bool:
        """Whether a lambda may do more than call builtins that change nothing."""
        inner = list(ast.walk(function))
        own = {one.arg for one in inner if isinstance(one, ast.arg)}
        own |= {one.id for one in inner if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        calls = [one for one in inner if isinstance(one, ast.Call)]
        named = {one.func.id for one in calls if isinstance(one.func, ast.Name)}
        only_named = all(isinstance(one.func, ast.Name) for one in calls)
        pure = only_named and not named & own and all(map(self._is_pure, named))
        return not pure or not self.looks(function.body)

    def _applies_purely(self, call: ast.Call) -> bool:
        """Whether it is `frame.map(len)`, `frame.map(lambda row: len(row))` or `frame.transform("mean")`: it calls what
        changes nothing."""
        if not (isinstance(call.func, ast.Attribute) and call.func.attr in APPLIES and len(call.args) == 1):
            return False
        applied = call.args[0]
        if isinstance(applied, ast.Constant):
            return applied.value in frame_looks()
        return isinstance(applied, ast.Lambda) or (isinstance(applied, ast.Name) and self._is_pure(applied.id))

    def working_part(self, node: ast.expr) -> ast.expr:
        """Of `mine.run(2)[columns].head()`, which does something and then shows some of it, what does it."""
        while True:
            inner: ast.expr | None = None
            if isinstance(node, ast.Tuple | ast.List):
                working = [one for one in node.elts if not self.looks(one)]
                inner = working[0] if len(working) == 1 else None
            elif isinstance(node, ast.Subscript | ast.Attribute):
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
                return self.kinds.of(node.func.value) is Kind.OURS
            node = node.func if isinstance(node, ast.Call) else node.value
        return False

    def _only_shows(self, function: ast.FunctionDef) -> bool:
        """Whether a function of the notebook shows something, and does nothing else."""
        around = self.kinds
        self.kinds = Kinds(
            function.body, [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)], around
        )
        purposes = [self._of(one) for one in function.body if not isinstance(one, ast.Return)]
        self.kinds = around
        inside = list(ast.walk(function))
        shows = any(isinstance(one, ast.Name) and one.id in self.drawn | {"print"} for one in inside)
        changes = any(
            isinstance(one, ast.Global | ast.Nonlocal | ast.AugAssign)
            or (isinstance(one, IN_PLACE) and isinstance(one.ctx, ast.Store | ast.Del))
            for one in inside
        )
        returns = any(isinstance(one, ast.Return) and one.value is not None for one in inside)
        return shows and not changes and not returns and Purpose.EFFECT not in purposes


def _owned(statements: Sequence[Statement], kinds: Kinds) -> set[str]:
    """Names that are bound to new things alone, which no other name has: a literal container, a number, a frame."""
    owned: dict[str, bool] = {}
    for statement in statements:
        node = statement.node
        if not isinstance(node, ast.AugAssign):
            fresh = isinstance(node, ast.Assign | ast.AnnAssign) and _is_new(node.value, kinds)
            for name in statement.names.binds:
                owned[name] = owned.get(name, True) and fresh
    return {name for name, fresh in owned.items() if fresh}


def _is_new(value: ast.expr | None, kinds: Kinds) -> bool:
    """Whether an expression gives a thing of its own, which nothing else holds."""
    if isinstance(value, ast.Subscript):  # pandas copies on write
        return kinds.of(value) is Kind.FRAME and kinds.of(value.value) is Kind.FRAME
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.Dict | ast.List | ast.Set | ast.Constant | ast.ListComp | ast.DictComp | ast.BinOp)
    if isinstance(value.func, ast.Name):
        return isinstance(getattr(builtins, value.func.id, None), type) or value.func.id in MAKE_ANEW
    if not isinstance(value.func, ast.Attribute) or kinds.of(value.func.value) in (Kind.UNKNOWN, Kind.PLAIN):
        return isinstance(value.func, ast.Attribute) and value.func.attr == "copy"
    receiver = kinds.of(value.func.value)
    alone = value.func.attr in _frames_alone() and kinds.of(value) in DATA
    alone |= receiver is Kind.FRAME and value.func.attr in FRAME_MAKES
    return alone or value.func.attr in MAKE_ANEW or (receiver is Kind.OURS and value.func.attr in MAKE_ROWS)


def _is_stream(node: ast.stmt, makers: set[str]) -> bool:
    """Whether it gives a name to an iterator. makers: functions and modules that make them."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.GeneratorExp) or (isinstance(value, ast.Call) and root(value) in makers)


def _yields(function: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Yield | ast.YieldFrom) for one in at_margin(function.body))


def _prints(function: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "print" for one in ast.walk(function))


def _writes_last(module: str | None, call: ast.Call) -> bool:
    """Whether it is `np.add(a, b, c)`, which writes into `c`."""
    import numpy

    made = getattr(numpy, call.func.attr, None) if isinstance(call.func, ast.Attribute) else None
    return module == "numpy" and isinstance(made, numpy.ufunc) and len(call.args) > made.nin


@cache
def frame_looks() -> set[str]:
    """Methods of pandas' frames, series, groups and plots that change nothing."""
    from pandas import DataFrame, Series
    from pandas.api.typing import DataFrameGroupBy, SeriesGroupBy

    kinds = (DataFrame, Series, DataFrameGroupBy, SeriesGroupBy, DataFrame.plot, type(Series([""]).str))
    return {name for name in methods(*kinds) if not CHANGES.match(name)}


@cache
def _frames_alone() -> set[str]:
    """Of these, what gives a frame of its own: pandas copies on write; what arrays have too may be a view."""
    from numpy import ndarray

    return frame_looks() - methods(ndarray)


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
