"""Find the options of a script: assignments of plain values, in cells tagged `parameters` or named by the user."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.errors import BadInput
from workbench.export.statements import Statement

TAGS = frozenset({"parameters", "injected-parameters"})


@dataclass(frozen=True)
class Parameter:
    """name: as in the notebook. default: its source text. help: the comment after it."""

    name: str
    kind: str
    default: str
    help: str = ""

    def __str__(self) -> str:
        """Its declaration as an argument of `main`."""
        kind = f"Annotated[{self.kind}, {json.dumps(self.help, ensure_ascii=False)}]" if self.help else self.kind
        return f"{self.name}: {kind} = {self.default}"


def take_parameters(
    statements: Sequence[Statement], named: Collection[str] = ()
) -> tuple[list[Parameter], list[Statement]]:
    """Return the parameters, and the other statements. named: also take these names, wherever they are assigned.

    Raises `BadInput` for a name that is not assigned exactly once, at the margin, to a plain value.
    """
    found: dict[str, Parameter] = {}
    left: list[Statement] = []
    met: set[str] = set()  # names that what is left binds or reads so far
    for statement in statements:
        parameter = _parameter(statement)
        tagged = bool(statement.cell.tags & TAGS)
        if parameter is None or not (tagged or parameter.name in named) or parameter.name in met:
            if parameter is not None and parameter.name in named and not tagged:
                raise BadInput(
                    f"{statement.cell}: {parameter.name!r}", "a parameter is assigned once, before its use", "rename it"
                )
            left.append(statement)
            met |= statement.names.binds | statement.names.uses
            continue
        if parameter.name not in found and any(parameter.name.lower() == other.lower() for other in found):
            raise BadInput(
                f"{statement.cell}: {parameter.name!r}",
                "names of options must differ in more than upper and lower case",
                "rename it",
            )
        before = found.pop(parameter.name, parameter)
        found[parameter.name] = replace(parameter, help=parameter.help or before.help)
    for name in named:
        if name not in found:
            rule = "a parameter gets a plain value (a number, text, list, ...) at the margin of a cell"
            there = sorted(p.name for s in statements if (p := _parameter(s)) is not None)
            raise BadInput(f"parameter {name!r}", rule, f"possible parameters: {', '.join(there) or 'none'}")
    return list(found.values()), left


def possible_parameters(statements: Sequence[Statement]) -> list[Statement]:
    """Assignments that could become options: of a plain value, to a name that nothing else changes."""
    bound = Counter(name for statement in statements for name in statement.names.binds)
    changed = {name for statement in statements for name in statement.names.changes | statement.names.rebinds}
    found = [(statement, parameter) for statement in statements if (parameter := _parameter(statement)) is not None]
    return [statement for statement, one in found if bound[one.name] == 1 and one.name not in changed]


def _parameter(statement: Statement) -> Parameter | None:
    node = statement.node
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, annotation = node.targets[0], ""
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, annotation = node.target, ast.unparse(node.annotation)
    else:
        return None
    assert node.value is not None
    try:
        value = ast.literal_eval(node.value)
    except ValueError:
        return None
    if not isinstance(target, ast.Name) or (kind := _kind(value)) is None:
        return None
    text = ast.get_source_segment(statement.text, node.value)
    assert text is not None
    if isinstance(node.value, ast.Tuple):  # it may have no parentheses
        text = ast.unparse(node.value)
    return Parameter(target.id, annotation or kind, text, _comment(statement.text))


def _kind(value: Any) -> str | None:
    """The type of a value as source text; None if a command line cannot pass such a value."""
    if value is None or isinstance(value, int | float | str | dict):
        return "str | None" if value is None else type(value).__name__
    kinds = {type(one) for one in value} if isinstance(value, list | tuple) else set()
    if len(kinds) != 1 or not kinds <= {int, float, str, bool}:
        return None
    inner = kinds.pop().__name__
    return f"list[{inner}]" if isinstance(value, list) else f"tuple[{inner}, ...]"


def _comment(text: str) -> str:
    """The comment after a statement."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text + "\n").readline))
    code = [t for t in tokens if t.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)]
    comments = [t.string for t in tokens if t.type == tokenize.COMMENT and code and t.start >= code[-1].end]
    return comments[0].lstrip("#").strip() if comments else ""
