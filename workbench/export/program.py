"""The text of a script: imports on top, definitions at module level, the pipeline in `main`."""

from __future__ import annotations

import ast
import builtins
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Sequence

from workbench.errors import BadInput, MissingDependency
from workbench.export.inert import is_literal, is_plain, origins
from workbench.export.loops import Repeat, Step, iterated
from workbench.export.parameters import Parameter
from workbench.export.statements import Statement, at_margin
from workbench.export.syntax import replaced

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
    """steps: what is kept, in order. bound: how often a name is bound. explained: the page's text before a statement,
    by the statement's `id`."""
    statements = [statement for step in steps for statement in (step.body if isinstance(step, Repeat) else [step])]
    imports, above = hoisted(statements, {parameter.name for parameter in parameters}, bound)
    within = [step for step in steps if isinstance(step, Repeat) or not (id(step) in imports or id(step) in above)]
    local = {name for step in within for name in _names_bound(step)} | {p.name for p in parameters}
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
    is_async = any(_awaits(step) for step in within)
    blocks.append(_main(main, parameters, within, local, explained, is_async, statements))
    blocks.append(f'if __name__ == "__main__":\n    {workbench}.script.run({main})')
    return formatted("\n\n\n".join(block for block in blocks if block) + "\n")


def hoisted(
    statements: Sequence[Statement], parameters: set[str], bound: Counter[str]
) -> tuple[dict[int, Statement], dict[int, Statement]]:
    """Imports that can move to the top, and definitions and constants that can move to module level: by `id`.

    A definition can where all that it reads is there as well, and its name means one thing only.
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
            (s.is_definition and is_plain(s.node, known) and not s.names.uses & stored)
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
            or (brought and s.names.uses - here and _unknown(s, here))
        ]
        if not falls:
            return imports, above
        for key in falls:
            del above[key]


def _unknown(statement: Statement, here: set[str]) -> bool:
    return any(not hasattr(builtins, name) for name in statement.names.uses - here)


def above_names(statements: Iterable[Statement]) -> set[str]:
    return {name for statement in statements for name in statement.names.binds}


def _is_constant(statement: Statement) -> bool:
    node = statement.node
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
        return False
    return is_literal(node.value) and node.targets[0].id.isupper()


def _names_bound(step: Step) -> set[str]:
    return {n for s in (step.body if isinstance(step, Repeat) else (step,)) for n in s.names.binds}


def _awaits(step: Step) -> bool:
    nodes = [s.node for s in (step.body if isinstance(step, Repeat) else (step,))]
    kinds = ast.Await | ast.AsyncFor | ast.AsyncWith
    called = {n.func.attr for n in at_margin(nodes) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    if called & LOOPS:
        return True
    comprehensions = any(isinstance(n, ast.comprehension) and n.is_async for n in at_margin(nodes))
    return comprehensions or any(isinstance(node, kinds) for node in at_margin(nodes))


def _main(
    name: str, parameters: Sequence[Parameter], steps: Sequence[Step], local: set[str], explained: dict[int, str],
    is_async: bool, program: Sequence[Statement],
) -> str:  # fmt: skip
    arguments = "".join(f"\n    {parameter}," for parameter in parameters)
    signature = f"({arguments}\n)" if arguments else "()"
    lines = []
    cell = None
    for step in steps:
        statements = step.body if isinstance(step, Repeat) else (step,)
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
            turns = f"{f'{lab}.iterations' if lab else 'range'}({_repeats(step, parameters)})"
            text = f"for _ in {turns}:\n" + indented(text.strip("\n")) + "\n"
        lines.append(text)
    body = indented("".join(lines).strip("\n")) or "    pass"
    return f"{'async ' if is_async else ''}def {name}{signature} -> None:\n{body}"


def _repeats(repeat: Repeat, parameters: Sequence[Parameter]) -> str:
    name = repeat_name(repeat)
    return name if any(parameter.name == name for parameter in parameters) else str(repeat.count)


def repeat_name(repeat: Repeat) -> str:
    """Of the parameter that says how often."""
    return f"REPEATS_{repeat.number}"


def _explained(statement: Statement, explained: dict[int, str]) -> str:
    text = explained.get(id(statement), "").strip()
    if not text:
        return ""
    lines = [line.rstrip() for line in text.splitlines()]  # Python ends a line at a lone \r as well
    return "\n" + "\n".join(f"# {line}" if line else "#" for line in lines) + "\n\n"


def _local(statement: Statement, local: set[str]) -> str:
    """The statement's text inside `main`, whose variables a function changes by `nonlocal`."""
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
    """Text one step further in; lines inside a string of several lines stay where they are."""
    inside = lines_in_strings(text)
    lines = text.split("\n")
    return "\n".join("    " + line if line.strip() and n not in inside else line for n, line in enumerate(lines, 1))


def lines_in_strings(text: str) -> set[int]:
    """Numbers of the lines, from 1, that begin inside a string."""
    inside: set[int] = set()
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text + "\n").readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            inside |= set(range(token.start[0] + 1, token.end[0] + 1))
        elif kind == "FSTRING_START":  # from Python 3.12 on
            opened.append(token.start[0])
        elif kind == "FSTRING_END":
            inside |= set(range(opened.pop() + 1, token.end[0] + 1))
    return inside


def _docstring(text: str) -> str:
    text = text.strip().replace('"""', "'''")
    if not text:
        return ""
    if text.endswith(('"', "\\")):
        text += " "
    raw = "r" if "\\" in text else ""
    return f'{raw}"""{text}\n"""' if "\n" in text else f'{raw}"""{text}"""'


def formatted(text: str) -> str:
    """By ruff: imports sorted, no needless `pass`, lines wrapped. `MissingDependency` where it is not installed."""
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--quiet", "--stdin-filename", "script.py"]
    sort = ["check", "--select", "I,PIE790", "--fix", "--line-length", str(LINE_LENGTH), *options, "-"]
    shape = ["format", "--line-length", str(LINE_LENGTH), *options, "-"]
    for command in (sort, shape):
        done = subprocess.run([*ruff, *command], input=text, capture_output=True, text=True)
        if "No module named ruff" in done.stderr:
            raise MissingDependency("ruff is not installed", "it formats exported scripts", "pip install ruff")
        if done.returncode:
            said = next(iter(done.stderr.splitlines()), f"it ended with {done.returncode}")
            raise BadInput(f"ruff: {said}", "the script must be a Python program", "mend the cell that it names")
        text = done.stdout
    return text
