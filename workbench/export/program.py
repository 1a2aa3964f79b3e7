"""Write the text of a script: imports at the top, definitions at module level, the pipeline in `main`.

A function or class is plain if it has no decorator but `wb.register`, and if its defaults, annotations and bases, and
the values assigned in its class body, are constants, names, and attributes of imports. The rest stays inside `main`.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from workbench.errors import BadInput, MissingDependency
from workbench.export.cells import replaced
from workbench.export.loops import Repeat, Step, iterated, statements_in
from workbench.export.parameters import Parameter
from workbench.export.statements import Statement, at_margin, origins
from workbench.messages.protocols import PAPERS

# Packages whose classes call no code of a subclass when it is defined. (An Enum calls the `__init__` of its members.)
BASES = ("builtins", "torch.nn", "torch.utils.data", "workbench")
# Special methods that a plain class may have: they run only by a call or an operator on an instance.
METHODS = {
    "__call__", "__contains__", "__enter__", "__eq__", "__exit__", "__getitem__", "__hash__", "__init__", "__iter__",
    "__len__", "__next__", "__repr__", "__str__",
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PARTS = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.expr_context


class _Scope:
    """The scope of a module or a class body, which tells what runs no code of the notebook.

    imported: see `origins`. own: names bound so far in the class body, which are not resolved.
    """

    def __init__(self, imported: Mapping[str, str]) -> None:
        self._imported = imported
        self._own: set[str] = set()

    def defines(self, node: ast.stmt) -> bool:
        """Whether a statement only defines a function or a class."""
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
        constants = [one for part in annotations for one in ast.walk(part) if isinstance(one, ast.Constant)]
        if node.decorator_list and any(isinstance(one.value, str) for one in constants):  # `wb.register` evaluates it
            return False
        return all(map(self._registers, node.decorator_list)) and all(map(self.plain, (*parts, *annotations)))

    def _registers(self, node: ast.expr) -> bool:
        """Whether it is `wb.register(...)` of constants, with a built-in protocol."""
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
        """Whether a statement of a class body is plain; records the names that it binds."""
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
        """Whether evaluating an expression runs no code of the notebook."""
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
        """Resolve `a.b.c` to a dotted name: as imported, `builtins.x`, or `.x` of the notebook; else ""."""
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


def _is_type(origin: str) -> bool:
    """Whether subscripting it makes a type, instead of looking up an item that may be missing."""
    package, _, name = origin.rpartition(".")
    return package in ("typing", "collections.abc") or (
        package == "builtins" and isinstance(getattr(builtins, name, None), type)
    )


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


LINE_LENGTH = 100
LOOPS = {"create_task", "ensure_future", "get_running_loop", "get_event_loop"}  # of asyncio
MAIN_NAMES = ("main", "pipeline", "run_pipeline", "main_")


def program(
    docstring: str,
    parameters: Sequence[Parameter],
    steps: Sequence[Step],
    bound: Counter[str],
    explained: dict[int, str],
) -> str:
    """steps: the kept statements, in order. bound: how often a name is bound. explained: the page's text before a
    statement, by the statement's `id`."""
    statements = statements_in(steps)
    imports, above = hoisted(statements, {parameter.name for parameter in parameters}, bound)
    within = [step for step in steps if isinstance(step, Repeat) or not (id(step) in imports or id(step) in above)]
    local = above_names(statements_in(within)) | {p.name for p in parameters}
    taken = {name for statement in statements for name in statement.names.binds | statement.names.needs}
    main = next(name for name in MAIN_NAMES if name not in taken)
    ours = {"import workbench as wb"}
    others = {n for s in imports.values() if ast.unparse(s.node) not in ours for n in s.names.binds}
    workbench = "wb" if "wb" not in local | above_names(above.values()) | others else "workbench"
    head = ["import workbench as wb" if workbench == "wb" else "import workbench"]
    if any(parameter.help for parameter in parameters):
        head.append("from typing import Annotated")
    head += dict.fromkeys(ast.unparse(statement.node) for statement in imports.values())
    future = [line for line in head if line.startswith("from __future__")]
    blocks = [_docstring(docstring), "\n".join([*future, *(line for line in head if line not in future)])]
    written: set[str] = set()
    constant = False  # constants stand together
    for statement in above.values():
        text, told = statement.text.strip("\n"), _explained(statement, explained)
        if text not in written and constant and not statement.is_definition and not told:
            blocks[-1] += f"\n{text}"
        elif text not in written:
            blocks.append(told + text)
        written.add(text)
        constant = not statement.is_definition
    blocks.append(_main(main, parameters, within, local, explained, statements))
    blocks.append(f'if __name__ == "__main__":\n    {workbench}.script.run({main})')
    return formatted("\n\n\n".join(block for block in blocks if block) + "\n")


def hoisted(
    statements: Sequence[Statement], parameters: set[str], bound: Counter[str]
) -> tuple[dict[int, Statement], dict[int, Statement]]:
    """Imports that can move to the top, and definitions and constants that can move to module level: by `id`.

    A definition can move if all names that it reads can move too, and if its name is bound once.
    """
    texts: dict[str, set[str]] = {}
    for statement in statements:
        for name in statement.names.binds:
            texts.setdefault(name, set()).add(ast.dump(statement.node))
    once = {name for name, dumps in texts.items() if len(dumps) == 1}
    rebound = {name for statement in statements for name in statement.names.rebinds}
    imports: dict[int, Statement] = {}
    dumps: set[str] = set()
    set_up = False  # the environment or the path, which an import may read
    for s in statements:
        set_up |= not s.is_import and bool(s.names.changes & {"os", "sys"})
        if s.is_import and s.names.binds <= once - rebound - parameters and (not set_up or ast.dump(s.node) in dumps):
            imports[id(s)] = s
            dumps.add(ast.dump(s.node))
    known = origins(statement.node for statement in imports.values())
    changed = {name for s in statements if not s.is_import for name in s.names.changes}
    stored = {name for s in statements if not s.is_import for name in s.names.stores}  # such as `math.limit = 3`
    above = {
        id(s): s
        for s in statements
        if s.names.binds <= once - parameters
        and not any(hasattr(builtins, name) for name in s.names.binds)
        and (
            (
                s.is_definition
                and not any(map(_is_special, s.names.binds))
                and _Scope(known).defines(s.node)
                and not s.names.uses & stored
            )
            or (
                _is_constant(s)
                and not s.names.binds & (changed | rebound)
                and all(bound[n] == 1 for n in s.names.binds)
            )
        )
    }
    brought = any("runpy.run_path" in s.text for s in statements)
    while True:
        here = above_names(above.values()) | {name for s in imports.values() for name in s.names.binds}
        local = {
            n for s in statements if id(s) not in above and id(s) not in imports for n in s.names.binds
        } | parameters
        falls = [
            key
            for key, s in above.items()
            if s.names.needs & local
            or s.names.rebinds & local
            or (brought and any(not hasattr(builtins, name) for name in s.names.uses - here))
        ]
        if not falls:
            return imports, above
        for key in falls:
            del above[key]


def above_names(statements: Iterable[Statement]) -> set[str]:
    return {name for statement in statements for name in statement.names.binds}


def _is_constant(statement: Statement) -> bool:
    node = statement.node
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
        return False
    return is_literal(node.value) and node.targets[0].id.isupper()


def _awaits(node: ast.AST) -> bool:
    """Whether a node needs a running event loop."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in LOOPS
    if isinstance(node, ast.comprehension):
        return bool(node.is_async)
    return isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)


def _main(
    name: str, parameters: Sequence[Parameter], steps: Sequence[Step], local: set[str], explained: dict[int, str],
    program: Sequence[Statement],
) -> str:  # fmt: skip
    arguments = "".join(f"\n    {parameter}," for parameter in parameters)
    signature = f"({arguments}\n)" if arguments else "()"
    lines = []
    cell = None
    for step in steps:
        statements = statements_in([step])
        text = ""
        if isinstance(step, Repeat) and (above := _explained(statements[0], explained)):
            lines.append(above)  # it explains all turns
            explained = {place: told for place, told in explained.items() if place != id(statements[0])}
        for statement in statements:
            if cell is not None and statement.cell != cell:
                text += "\n"
            cell = statement.cell
            told, own = _explained(statement, explained), _local(statement, local)
            text += (told + own.strip("\n") if told else own) + "\n"
        if isinstance(step, Repeat):
            lab = iterated(step, program)
            text = (
                f"for _ in {f'{lab}.iterations' if lab else 'range'}({step.name}):\n"
                + indented(text.strip("\n"))
                + "\n"
            )
        lines.append(text)
    body = indented("".join(lines).strip("\n")) or "    pass"
    is_async = any(map(_awaits, at_margin(statement.node for statement in statements_in(steps))))
    return f"{'async ' if is_async else ''}def {name}{signature} -> None:\n{body}"


def _explained(statement: Statement, explained: dict[int, str]) -> str:
    text = explained.get(id(statement), "").strip()
    if not text:
        return ""
    lines = [line.rstrip() for line in text.splitlines()]  # Python ends a line at a lone \r as well
    return "\n" + "\n".join(f"# {line}" if line else "#" for line in lines) + "\n\n"


def _local(statement: Statement, local: set[str]) -> str:
    """The statement's text inside `main`. Functions that change variables of `main` declare them `nonlocal`."""
    text = statement.text
    if not statement.names.rebinds & local:
        return text
    changes = []
    for node in ast.walk(statement.node):
        if isinstance(node, ast.Global):
            ours = [name for name in node.names if name in local]
            others = [name for name in node.names if name not in local]
            parts = [f"nonlocal {', '.join(ours)}"] * bool(ours) + [f"global {', '.join(others)}"] * bool(others)
            changes.append((node, "; ".join(parts)))
    return replaced(text, changes)


def indented(text: str) -> str:
    """Indent the text by one level; lines inside multi-line strings, and between strings that are joined without a `+`,
    stay unchanged."""
    strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant | ast.JoinedStr)]
    inside = {line for node in strings for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
    lines = text.split("\n")
    return "\n".join("    " + line if line.strip() and n not in inside else line for n, line in enumerate(lines, 1))


def _docstring(text: str) -> str:
    text = text.strip().replace('"""', "'''")
    if not text:
        return ""
    if text.endswith(('"', "\\")):
        text += " "
    raw = "r" if "\\" in text else ""
    return f'{raw}"""{text}\n"""' if "\n" in text else f'{raw}"""{text}"""'


def formatted(text: str) -> str:
    """Format by ruff: sort imports, wrap lines. Raises `MissingDependency` if ruff is not installed."""
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--quiet", "--stdin-filename", "script.py"]
    sort = ["check", "--select", "I,PIE790", "--fix", "--line-length", str(LINE_LENGTH), *options, "-"]
    shape = ["format", "--line-length", str(LINE_LENGTH), *options, "-"]
    for command in (sort, shape):
        done = subprocess.run([*ruff, *command], input=text, capture_output=True, text=True)
        if "No module named ruff" in done.stderr:
            raise MissingDependency("ruff is not installed", "exported scripts are formatted by it", "pip install ruff")
        if done.returncode:
            said = next(iter(done.stderr.splitlines()), f"it ended with {done.returncode}")
            raise BadInput(f"ruff: {said}", "the script must be a Python program", "correct the cell that it names")
        text = done.stdout
    return text
