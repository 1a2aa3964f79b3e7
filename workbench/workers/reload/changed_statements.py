"""What of a module has to run again after an edit: so that what the edit leaves alone, caches and registries among it,
stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Rerun:
    """statements: of the new text, in order. edited: the names that it makes otherwise. gone: those that it no longer
    makes. defined: the names of functions and classes that both texts define."""

    statements: list[ast.stmt]
    edited: list[str]
    gone: set[str]
    defined: set[str]


def rerun(old: ast.Module, new: ast.Module, seeds: Collection[str], replaced_in_place: Collection[str]) -> Rerun:
    """What to run of a new text in the module that an old one made.

    Imports run; other statements only where they are new, or use at once a name that now has another value. A function
    whose lines use such a name does not run again, but what was computed with it does. A class that is changed in place
    does not count: what was made of it stays what it is.

    seeds: names that the module imports and that stand for other values now. replaced_in_place: classes of that kind.
    """
    before = {ast.dump(statement) for statement in old.body}
    after = {ast.dump(statement) for statement in new.body}
    changed = [statement for statement in new.body if ast.dump(statement) not in before]
    dropped = [statement for statement in old.body if ast.dump(statement) not in after]
    edited = dict.fromkeys(name for statement in changed for name in binds(statement))
    running = {id(statement) for statement in changed}
    made, affected = {name for statement in (*changed, *dropped) for name in binds(statement)}, set(seeds)
    uses = {id(s): (binds(s), _loads(_at_once(s)), _loads(ast.walk(s))) for s in new.body}
    size = -1
    while size < len(running) + len(affected):
        size = len(running) + len(affected)
        for statement in (s for s in new.body if id(s) not in running):
            makes, at_once, ever = uses[id(statement)]
            spreading = (made | affected) - set(replaced_in_place)
            if makes & made or at_once & spreading:
                running.add(id(statement))
                made |= makes
            elif isinstance(statement, DEFINITIONS) and ever & spreading:
                affected |= makes
    statements = [s for s in new.body if id(s) in running or isinstance(s, ast.Import | ast.ImportFrom)]
    there = {name for statement in new.body for name in binds(statement)}
    return Rerun(
        statements=statements,
        edited=[name for name in edited if not _only_imported(name, changed)],
        gone={name for statement in dropped for name in binds(statement)} - there,
        defined=_definitions(old) & _definitions(new),
    )


def binds(statement: ast.stmt) -> set[str]:
    """The names of the module that a statement at its margin makes."""
    found = set[str]()
    for node in _here(statement):
        if isinstance(node, DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return found - {"*", "annotations"}


def imports_from(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """For each `from a import b as c` at the margin: ("a" with its dots, "b", "c")."""
    for statement in tree.body:
        for node in _here(statement):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield "." * node.level + (node.module or ""), alias.name, alias.asname or alias.name


def _here(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and its parts, without what is inside functions and classes."""
    yield node
    if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _here(child)


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and its parts that are evaluated when it runs: not the lines of functions."""
    yield node
    for name, part in ast.iter_fields(node):
        if name != "body" or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for child in part if isinstance(part, list) else [part]:
                if isinstance(child, ast.AST):
                    yield from _at_once(child)


def _loads(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _definitions(tree: ast.Module) -> set[str]:
    return {node.name for statement in tree.body for node in _here(statement) if isinstance(node, DEFINITIONS)}


def _only_imported(name: str, statements: Collection[ast.stmt]) -> bool:
    return all(isinstance(s, ast.Import | ast.ImportFrom) for s in statements if name in binds(s))
