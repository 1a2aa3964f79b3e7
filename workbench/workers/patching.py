"""Puts edited functions and classes into the modules of a running process, with a way back.

Functions and classes stay the same objects and get the new code. So instances keep their state, and objects that other
modules imported, subclassed or test with `isinstance` stay the same. `docs/design.md` says why IPython's autoreload is
not used.
"""

from __future__ import annotations

import abc
import ast
import gc
import importlib
import linecache
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from workbench.errors import BadInput
from workbench.errors.plain_text import plain_text, said, shown
from workbench.models.spec import Model
from workbench.support.calls.sessions import UserCalls
from workbench.support.sources import SourceFile, in_order, loaded
from workbench.workers.worker import Worker

FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__doc__", "__annotations__", "__dict__")
OF_THE_CLASS_ITSELF = ("__dict__", "__weakref__", "_abc_impl", "__abstractmethods__")
Models = Mapping[str, tuple[Model, type[Worker]]]
METACLASSES = (type, abc.ABCMeta, type(Protocol))  # other metaclasses do more than give a class members
KEEP = "__keep_class__"  # the decorator that each class statement gets
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS, VARIABLES = (ast.Import, ast.ImportFrom), (ast.Assign, ast.AnnAssign)
NEVER_RUN = ("__name__ == '__main__'", "TYPE_CHECKING", "typing.TYPE_CHECKING")  # conditions, in an imported module


@dataclass(frozen=True, kw_only=True)
class Patched:
    """The result of a patch in one process. modules: the edited modules. changed: "module.name" of each function, class
    and new variable. roles: those whose worker class or function changed.

    not_run: edited lines that only a new process runs. error, traceback: why nothing was changed; empty on success.
    """

    modules: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    error: str = ""
    traceback: str = ""


def check_syntax(sources: Mapping[str, SourceFile]) -> None:
    """Raise `BadInput`, with file and line, if a text is not valid Python."""
    for source in sources.values():
        try:
            compile(source.text, source.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            at = (error.lineno, error.msg, (error.text or "").strip()) if isinstance(error, SyntaxError) else None
            what = f", line {at[0]}: SyntaxError: {at[1]}: {shown(at[2], 80)}" if at else f": {said(error)}"
            rule = "no process has loaded any of the edits: all keep the old code"
            raise BadInput(f"{source.path}{what}", rule, "correct the file, and call again") from None


class Patch:
    """One reload in this process: `apply`, then `keep` or `undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._texts: dict[str, SourceFile] = {}
        self._changed: dict[str, None] = {}
        self._not_run: list[str] = []

    def apply(
        self, texts: Mapping[str, SourceFile], workers: Mapping[str, Worker], models: bytes | Models, *, strict: bool
    ) -> Patched:
        """Put functions and classes of edited texts into this process's modules, and new models and classes into its
        workers. An error comes back in the report, with nothing changed.

        models: by role, the new model and class of its workers; or the same pickled, to be read after the modules are
        patched. strict: lines that only a new process runs are an error; else the report lists them.
        """
        try:
            importlib.invalidate_caches()
            there = loaded.texts
            for name, source in texts.items():  # the file may have another path on this host
                self._texts[name] = SourceFile(there[name].path, source.text) if name in there else source
            mine = {name: s for name, s in self._texts.items() if name in there and s.text != there[name].text}
            for name in in_order(mine):
                self._module(name, mine[name], strict)
            done = Patched(modules=tuple(mine), changed=tuple(self._changed), not_run=tuple(self._not_run))
            if strict and self._not_run:
                self.undo()  # undo the modules patched so far
                return replace(done, error=f"only a new process can run {self._not_run[0]}")
            given: Models = pickle.loads(models) if isinstance(models, bytes) else models
            roles = tuple(role for role in given if role in workers)
            for role in roles:
                for part, value in zip(("spec", "__class__"), given[role], strict=True):
                    self._set(workers[role], part, value)
            return replace(done, roles=roles)
        except KeyboardInterrupt:
            self.undo()
            raise
        except (Exception, SystemExit) as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
            text = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)])
            at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            self.undo()
            return Patched(error=f"{type(error).__name__}: {said(error)}{at}", traceback=text)

    def keep(self) -> None:
        """Make the patch permanent."""
        if self._texts:
            UserCalls.code_changed()
        loaded.take(self._texts)
        for source in self._texts.values():
            linecache.checkcache(source.path)
        self._undo.clear()

    def undo(self) -> None:
        """Undo the patch."""
        while self._undo:
            self._undo.pop()()

    # --- modules ------------------------------------------------------------------------------------------------------

    def _module(self, name: str, source: SourceFile, strict: bool) -> None:
        """Run a text's imports, and the functions, classes and variables that it changes or adds."""
        namespace = vars(sys.modules[name])
        before = dict(namespace)
        old, new = ast.parse(loaded.texts[name].text).body, ast.parse(source.text).body
        was, now = set(map(ast.dump, old)), set(map(ast.dump, new))
        changed, dropped = [s for s in new if ast.dump(s) not in was], [s for s in old if ast.dump(s) not in now]
        edited = {s.name for s in changed if isinstance(s, DEFINITIONS)}
        # all definitions of a name: overloads, and functions that `singledispatch` registers
        again = [s for s in new if isinstance(s, DEFINITIONS) and s.name in edited]
        variables = [s for s in changed if isinstance(s, VARIABLES) and (b := _binds(s)) and not b & before.keys()]
        not_run = [(s, "") for s in changed if not _in_place(s) and s not in variables]
        not_run = not_run or [(s, "without ") for s in dropped if not _in_place(s)]
        for s, without in not_run:
            self._not_run.append(f"{source.path}, line {s.lineno}: {without}{plain_text(ast.unparse(s), 80)}")
        if strict and self._not_run:
            return
        running: list[ast.stmt] = [s for s in new if s in again or s in variables or isinstance(s, IMPORTS)]
        for statement in running:
            if isinstance(statement, ast.ClassDef):
                statement.decorator_list.append(ast.copy_location(ast.Name(KEEP, ast.Load()), statement))
        self._undo.append(lambda: _restore(namespace, before))
        namespace[KEEP] = lambda now: self._keep_class(now, before)
        try:
            exec(compile(ast.Module(running, []), source.path, "exec", dont_inherit=True), namespace)
        finally:
            namespace.pop(KEEP, None)
        defined = {s.name for s in old if isinstance(s, DEFINITIONS)} & before.keys()
        for gone in defined - set[str]().union(*map(_binds, new)):
            del namespace[gone]
        for key in defined & edited:
            value, made = before[key], namespace[key]
            if isinstance(made, types.FunctionType) and self._function(value, made):
                namespace[key] = value
            elif made is not value:
                self._rebind(value, made)
        for statement in running:
            if statement in changed and not isinstance(statement, IMPORTS):
                self._changed |= dict.fromkeys(f"{name}.{n}" for n in sorted(_binds(statement)))

    def _rebind(self, was: object, now: object) -> None:
        """Replace a function or class that could not be changed in place wherever other modules, or the notebook,
        imported it."""
        for name in (*loaded.texts, "__main__"):
            namespace = vars(sys.modules[name]) if name in sys.modules else {}
            for key in [key for key, value in namespace.items() if value is was]:
                self._undo.append(lambda namespace=namespace, key=key: namespace.update({key: was}))  # type: ignore[misc]
                namespace[key] = now

    # --- functions and classes ----------------------------------------------------------------------------------------

    def _set(self, thing: Any, attribute: str, value: Any) -> None:
        was = getattr(thing, attribute)
        self._undo.append(lambda: setattr(thing, attribute, was))
        setattr(thing, attribute, value)

    def _function(self, was: object, now: types.FunctionType) -> bool:
        """Give a function another one's code, defaults, annotations and attributes; return whether that is possible."""
        if not isinstance(was, types.FunctionType) or was.__globals__ is not now.__globals__:
            return False
        if was.__code__.co_freevars != now.__code__.co_freevars:
            return False
        for part in FUNCTION_PARTS:
            self._set(was, part, getattr(now, part))
        cells = zip(now.__code__.co_freevars, was.__closure__ or (), now.__closure__ or (), strict=True)
        for name, mine, theirs in cells:
            if name != "__class__":
                self._set(mine, "cell_contents", theirs.cell_contents)
        return True

    def _keep_class(self, now: type, before: Mapping[str, Any]) -> type:
        """Return the class that a module's class statement defines: the existing class, with the new members, so that
        later decorators, subclasses and instances in the module use the existing class."""
        was = before.get(now.__name__)
        ours = _is_patchable(was) and was.__module__ == now.__module__
        if not (ours and _is_patchable(now) and type(now) is type(was) and self._class(was, now)):
            return now
        for cell in gc.get_referrers(now):  # cells by which the new methods find `super()` and `__class__`
            if isinstance(cell, types.CellType):
                cell.cell_contents = was
        return was

    def _class(self, was: type, now: type) -> bool:
        """Give a class the bases and members of another; return whether that is possible."""
        before, bases = dict(vars(was)), was.__bases__
        if now.__bases__ != bases:
            try:
                was.__bases__ = now.__bases__
            except TypeError:  # incompatible memory layout
                return False
        self._undo.append(lambda: _become(was, before, bases))
        members = {
            name: before[name] if isinstance(member, types.FunctionType) and self._function(before.get(name), member)
            else member
            for name, member in vars(now).items()
        }  # fmt: skip
        _become(was, members, now.__bases__)
        return True


def _become(kind: type, members: Mapping[str, Any], bases: tuple[type, ...]) -> None:
    if kind.__bases__ != bases:
        kind.__bases__ = bases
    for name in vars(kind).keys() - members.keys() - set(OF_THE_CLASS_ITSELF):
        type.__delattr__(kind, name)
    for name, member in members.items():
        if name not in OF_THE_CLASS_ITSELF and vars(kind).get(name) is not member:
            type.__setattr__(kind, name, member)
    abc.update_abstractmethods(kind)


def _in_place(statement: ast.stmt) -> bool:
    """Return whether an edit of a module-level statement can take effect in a running process, or has no effect."""
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) in NEVER_RUN
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)  # a docstring
    return text or isinstance(statement, (*DEFINITIONS, *IMPORTS))


def _binds(node: ast.AST) -> set[str]:
    """Return the names that a module-level statement binds in the module."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, IMPORTS):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.expr) and not isinstance(node, ast.Tuple | ast.List | ast.Starred):
        return set()
    return set[str]().union(*map(_binds, ast.iter_child_nodes(node)))


def _is_patchable(value: object) -> bool:
    return type(value) in METACLASSES and "__slots__" not in vars(value)


def _restore(namespace: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in namespace.keys() - before.keys():
        del namespace[name]
    namespace.update(before)
