"""What a script does not read: imports without an effect, and names of results that are plain data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

from workbench.export.kinds import Kind
from workbench.export.looking import DATA_MODULES, Looking
from workbench.export.statements import Statement
from workbench.export.syntax import replaced

# Importing these does nothing else; other modules may register something, and files beside the notebook have any name.
QUIET = DATA_MODULES | {
    "abc", "argparse", "asyncio", "contextlib", "copy", "csv", "dataclasses", "datetime", "enum", "functools", "glob",
    "inspect", "io", "logging", "operator", "os", "pathlib", "pickle", "random", "re", "shutil", "string", "subprocess",
    "sys", "tempfile", "threading", "time", "torch", "types", "typing", "uuid", "warnings",
}  # fmt: skip
# Methods of a workbench and its algorithms that return numbers, frames or a report: whether a variable holds these
# changes nothing. (A batch that no variable holds may be written to the disk.)
GIVE_DATA = {"check", "compare", "evaluate", "iterate", "mismatch", "run", "save"}


def without_unread(kept: Mapping[int, Statement], parameters: Iterable[str], looking: Looking) -> dict[int, Statement]:
    """The statements by place, `history = ppo.run(3)` as `ppo.run(3)` where nothing reads `history`, and without the
    imports of quiet modules whose names no other line mentions, not even in a text or a comment."""
    read = {name for s in kept.values() for name in s.names.needs | s.names.rebinds}
    read |= {name for s in kept.values() if isinstance(s.node, ast.Delete) for name in s.names.binds}
    left = {place: _without_name(s, looking, read.union(parameters)) for place, s in kept.items()}
    mentioned = set(parameters).union(*(_words(s.text) for s in left.values() if not s.is_import))
    trimmed = {place: _without_unmentioned(s, mentioned) if s.is_import else s for place, s in left.items()}
    return {place: statement for place, statement in trimmed.items() if statement is not None}


def _without_name(statement: Statement, looking: Looking, read: set[str]) -> Statement:
    """Of `name = call`, whose value is plain data and whose name nothing reads, the call."""
    node = statement.node
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
        return statement
    call = looking.working_part(node.value)
    if statement.names.binds & read or not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return statement
    name, ours = call.func.attr, looking.kinds.of(call.func.value) is Kind.OURS
    if not ours or name in looking.methods or not (name in GIVE_DATA or name.startswith("update_")):
        return statement
    text = ast.get_source_segment(statement.text, call)
    assert text is not None
    return statement.with_text(replaced(statement.text, [(node, f"({text})" if "\n" in text else text)]))


def _without_unmentioned(statement: Statement, mentioned: set[str]) -> Statement | None:
    """An import without the names that nothing mentions, and whose modules nothing reaches by another way."""
    node = statement.node
    assert isinstance(node, ast.Import | ast.ImportFrom)
    if isinstance(node, ast.ImportFrom) and (node.level or node.module == "__future__" or node.names[0].name == "*"):
        return statement
    stays = []
    for alias in node.names:
        module = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        top, *inner = module.split(".")
        reached = {alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else top), *inner}
        if top not in QUIET or reached & mentioned:
            stays.append(alias)
    if len(stays) == len(node.names):
        return statement
    if not stays:
        return None
    left = ast.Import(stays) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, stays, node.level)
    return statement.with_text(ast.unparse(left))


def _words(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d]\w*", text))
