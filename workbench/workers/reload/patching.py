"""Edited code put into the modules of a living process, with a way back.

Functions and classes stay the objects that they are, and get the new code: so instances keep their state, and what
other modules imported, subclassed or test with `isinstance` stays the same thing. `docs/design.md` says why IPython's
autoreload is not used.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import resolve_name
from typing import Any, Protocol

from workbench.errors import BadInput
from workbench.errors.plain_text import said, shown
from workbench.models.spec import Model
from workbench.support.calls.sessions import UserCalls
from workbench.support.fingerprint import fingerprint
from workbench.workers.reload.changed_statements import imports_from, rerun
from workbench.workers.reload.sources import SourceFile, loaded
from workbench.workers.worker import Worker

FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__doc__", "__annotations__", "__dict__")
OF_THE_CLASS_ITSELF = ("__dict__", "__weakref__", "_abc_impl", "__abstractmethods__")
Models = Mapping[str, tuple[Model, type[Worker]]]
METACLASSES = (type, abc.ABCMeta, type(Protocol))  # others do more to a class than give it members


@dataclass(frozen=True, kw_only=True)
class Patched:
    """What came of it in one process. modules: those that ran again. changed: "module.name" of what the edit made
    otherwise. instances: living objects of the classes among it. roles: whose worker or function is another now.

    error, traceback: what it failed with; empty where it did not.
    """

    modules: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    instances: int = 0
    roles: tuple[str, ...] = ()
    error: str = ""
    traceback: str = ""


KEEP = "__keep_class__"


class KeepClasses(ast.NodeTransformer):
    """Makes `KEEP` the first decorator that is called with the class of each class statement of a module."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.decorator_list.append(ast.copy_location(ast.Name(KEEP, ast.Load()), node))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # the classes that a function makes are new ones each time

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        return node


def check_syntax(sources: Mapping[str, SourceFile]) -> None:
    """Raise `BadInput`, naming file and line, where a text is no Python."""
    for source in sources.values():
        try:
            compile(source.text, source.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            words = error.msg if isinstance(error, SyntaxError) else said(error)
            text = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
            raise BadInput(
                f"{source.path}{line}: {type(error).__name__}: {words}" + (f": {shown(text, 80)}" if text else ""),
                "no process has taken any of the edits: the old code goes on",
                "mend the file, and call it again",
            ) from None


class Patch:
    """One reload in this process: `apply`, then `keep` or `undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._texts: dict[str, SourceFile] = {}
        self._changed: dict[str, None] = {}
        self._classes: set[type] = set()
        self._roles: list[str] = []
        self._rebound: dict[str, set[str]] = {}  # by module: names that stand for other values than before

    def apply(self, texts: Mapping[str, SourceFile], workers: Mapping[str, Worker], models: bytes | Models) -> Patched:
        """Put texts into the modules that this process has, and other functions and classes into its workers. An error
        comes back in the report, with nothing changed.

        models: by role, what its workers are to be: their model, and their class; or that pickled, to be read when the
        modules are there.
        """
        try:
            importlib.invalidate_caches()
            there = loaded.texts
            for name, source in texts.items():  # elsewhere the file may have another path
                self._texts[name] = SourceFile(there[name].path, source.text) if name in there else source
            mine = {name: s for name, s in self._texts.items() if name in there and s.text != there[name].text}
            for name in loaded.in_order(mine):
                self._module(name, mine.get(name))
            given: Models = pickle.loads(models) if isinstance(models, bytes) else models
            for role, (model, worker_class) in given.items():
                if role in workers:
                    self._worker(role, workers[role], model, worker_class)
        except KeyboardInterrupt:
            self.undo()
            raise
        except (Exception, SystemExit) as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
            text = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)])
            at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            self.undo()
            return Patched(error=f"{type(error).__name__}: {said(error)}{at}", traceback=text)
        return Patched(
            modules=tuple(self._rebound),
            changed=tuple(self._changed),
            instances=self._refresh(mine),
            roles=tuple(self._roles),
        )

    def keep(self) -> None:
        """Stay with it."""
        if self._texts:
            UserCalls.code_changed()
        loaded.take(self._texts)
        for source in self._texts.values():
            linecache.checkcache(source.path)
        self._undo.clear()

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    # --- modules ------------------------------------------------------------------------------------------------------

    def _module(self, name: str, edited: SourceFile | None) -> None:
        """Run what an edit changed in a module, and what reads values of other modules that are others now; edited:
        None where only the latter can be."""
        others = any(self._rebound.get(other) for other in loaded.imports(name))
        if edited is None and not others:
            return
        source = edited or loaded.texts[name]
        namespace = vars(sys.modules[name])
        old, new = ast.parse(loaded.texts[name].text), ast.parse(source.text, source.path)
        seeds = self._other_values(name, new) if others else set()
        if edited is None and not seeds:
            return
        before = dict(namespace)
        todo = rerun(old, new, seeds, {n for n, value in before.items() if _is_patchable(value)})
        self._undo.append(lambda: _restore(namespace, before))
        statements = [KeepClasses().visit(statement) for statement in todo.statements]
        code = compile(ast.Module(statements, []), source.path, "exec", dont_inherit=True)
        namespace[KEEP] = lambda now: self._keep_class(now, before)
        try:
            exec(code, namespace)
        finally:
            namespace.pop(KEEP, None)
        for gone in todo.gone & set(namespace):
            if not isinstance(namespace[gone], types.ModuleType):
                del namespace[gone]
        for key in todo.defined & set(before) & set(namespace):
            was, now = before[key], namespace[key]
            if now is was:
                continue
            if isinstance(now, types.FunctionType) and self._function(was, now):
                namespace[key] = was
            else:
                self._rebind(was, now)
        self._rebound[name] = {n for n in before if n in namespace and namespace[n] is not before[n]}
        kinds = [namespace[n] for n in todo.edited if n in before and namespace.get(n) is before[n]]
        self._classes.update(kind for kind in kinds if isinstance(kind, type))
        self._changed |= dict.fromkeys(f"{name}.{n}" for n in todo.edited)

    def _other_values(self, name: str, tree: ast.Module) -> set[str]:
        """The names that a module imports and that stand for other values in the modules that ran before it."""
        package = name if hasattr(sys.modules[name], "__path__") else name.rpartition(".")[0]
        return {
            alias
            for origin, imported, alias in imports_from(tree)
            if imported in self._rebound.get(resolve_name(origin, package) if origin[0] == "." else origin, ())
        }

    def _rebind(self, was: object, now: object) -> None:
        """Where other modules, or the notebook, imported a function or class that could not be changed in place, let
        them have the new one."""
        for name in (*loaded.texts, "__main__"):
            namespace = vars(sys.modules[name]) if name in sys.modules else {}
            for key in [key for key, value in namespace.items() if value is was]:
                self._undo.append(lambda namespace=namespace, key=key: namespace.update({key: was}))  # type: ignore[misc]
                namespace[key] = now

    # --- functions and classes ----------------------------------------------------------------------------------------

    def _function(self, was: object, now: types.FunctionType) -> bool:
        """Give a function the code, defaults and notes of another; whether that can be."""
        if not isinstance(was, types.FunctionType) or was.__globals__ is not now.__globals__:
            return False
        if was.__code__.co_freevars != now.__code__.co_freevars:
            return False
        parts = {name: getattr(was, name) for name in FUNCTION_PARTS}
        cells = [
            (mine, theirs)
            for name, mine, theirs in zip(
                now.__code__.co_freevars, was.__closure__ or (), now.__closure__ or (), strict=True
            )
            if name != "__class__"
        ]
        contents = [mine.cell_contents for mine, _ in cells]

        def undo() -> None:
            for name, value in parts.items():
                setattr(was, name, value)
            for (mine, _), value in zip(cells, contents, strict=True):
                mine.cell_contents = value

        self._undo.append(undo)
        for name in FUNCTION_PARTS:
            setattr(was, name, getattr(now, name))
        for mine, theirs in cells:
            mine.cell_contents = theirs.cell_contents
        return True

    def _keep_class(self, now: type, before: Mapping[str, Any]) -> type:
        """The class that a class statement of a module gives: the one that was there, with the new members, so that
        decorators, subclasses and instances that come after it in the module are of that one at once."""
        was = _class_of(before, now.__module__, now.__qualname__)
        if was is None or not (_is_patchable(now) and type(now) is type(was) and self._class(was, now)):
            return now
        for cell in gc.get_referrers(now):  # what `super()` and `__class__` in the new methods mean
            if isinstance(cell, types.CellType):
                cell.cell_contents = was
        return was

    def _class(self, was: type, now: type) -> bool:
        """Give a class the bases and members of another; whether that can be."""
        before, bases = dict(vars(was)), was.__bases__
        if now.__bases__ != bases:
            try:
                was.__bases__ = now.__bases__
            except TypeError:  # laid out in another way
                return False
        self._undo.append(lambda: _restore_class(was, before, bases))
        for name in before.keys() - vars(now).keys() - set(OF_THE_CLASS_ITSELF):
            type.__delattr__(was, name)
        for name, member in vars(now).items():
            same = isinstance(member, types.FunctionType) and self._function(before.get(name), member)
            if name not in OF_THE_CLASS_ITSELF and not same:
                type.__setattr__(was, name, member)
        abc.update_abstractmethods(was)
        return True

    def _worker(self, role: str, worker: Worker, model: Model, worker_class: type) -> None:
        """Give a living worker another class, and another function."""
        spec, kind = worker.spec, type(worker)

        def undo() -> None:
            worker.spec, worker.__class__ = spec, kind

        self._undo.append(undo)
        worker.spec, worker.__class__ = model, worker_class
        self._roles.append(role)

    # --- afterwards ---------------------------------------------------------------------------------------------------

    def _refresh(self, sources: Mapping[str, SourceFile]) -> int:
        """Give functions that did not change their lines in the new text, for tracebacks; the number of living objects
        whose class has changed."""
        codes: dict[int, dict[str, list[types.CodeType]]] = {}
        for name, source in sources.items():
            found = codes[id(vars(sys.modules[name]))] = {}
            for code in _codes(compile(source.text, source.path, "exec", dont_inherit=True)):
                found.setdefault(code.co_qualname, []).append(code)
        classes, kinds, count = {id(kind) for kind in self._classes}, dict[int, bool](), 0
        for thing in gc.get_objects():
            kind = type(thing)
            if kind is types.FunctionType:
                for code in codes.get(id(thing.__globals__), {}).get(thing.__code__.co_qualname, ()):
                    if code != thing.__code__ and _alike(code, thing.__code__):
                        self._undo.append(lambda f=thing, was=thing.__code__: setattr(f, "__code__", was))  # type: ignore[misc]
                        thing.__code__ = code
                        break
                continue
            if id(kind) not in kinds:
                kinds[id(kind)] = any(id(base) in classes for base in kind.__mro__) if classes else False
            count += kinds[id(kind)]
        return count


def _is_patchable(value: object) -> bool:
    return type(value) in METACLASSES and "__slots__" not in vars(value)


def _class_of(namespace: Mapping[str, Any], module: str, qualname: str) -> type | None:
    """The class of a module that has that name in it, and can be changed in place."""
    first, *rest = qualname.split(".")
    found = namespace.get(first)
    for name in rest:
        found = vars(found).get(name) if isinstance(found, type) else None
    ours = _is_patchable(found) and (found.__module__, found.__qualname__) == (module, qualname)  # type: ignore[union-attr]
    return found if ours else None


def _restore(namespace: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in namespace.keys() - before.keys():
        del namespace[name]
    namespace.update(before)


def _restore_class(kind: type, before: Mapping[str, Any], bases: tuple[type, ...]) -> None:
    for name in vars(kind).keys() - before.keys() - set(OF_THE_CLASS_ITSELF):
        type.__delattr__(kind, name)
    for name, member in before.items():
        if name not in OF_THE_CLASS_ITSELF and vars(kind).get(name) is not member:
            type.__setattr__(kind, name, member)
    if kind.__bases__ != bases:
        kind.__bases__ = bases
    abc.update_abstractmethods(kind)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _alike(one: types.CodeType, other: types.CodeType) -> bool:
    return one.co_freevars == other.co_freevars and fingerprint(one) == fingerprint(other)
