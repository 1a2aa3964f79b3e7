"""Loads edited functions and classes into the kernel and the living hosts, which keep their state: into all of them, or
into none.

look for edits │ compile │ drain │ kernel │ every host │ keep everywhere │ operations, registry
               └ a syntax    └─── an error in here ───┘
                 error: nothing   puts everything back
                 has begun
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pandas as pd

from workbench.backends import registry
from workbench.backends.starting import settle
from workbench.config.requirements import check
from workbench.data.reward_function import check_function
from workbench.display.html import table
from workbench.display.interrupts import stoppable, uninterrupted
from workbench.display.progress import Progress
from workbench.errors import BadInput, ReloadError, WorkbenchError
from workbench.errors.plain_text import said, shown
from workbench.messages.calls import HostInfo
from workbench.models.spec import Model
from workbench.placement import ROLLOUT
from workbench.stages.runner import StageRunner
from workbench.support import pickles
from workbench.support.calls.pickling import name_of
from workbench.support.fingerprint import code_behind, is_of_notebook
from workbench.support.named_fields import remedy_for
from workbench.support.sources import SourceFile, Stamp, loaded, stamp_of
from workbench.workers.patching import Patch, Patched, check_syntax
from workbench.workers.roles import ROLE_WORKERS

EDITS_S = 5.0  # how long to wait for hosts to say which edited files they have loaded
# After an error or an interrupt, how long to wait for hosts to go back to the old code.
ANSWER_S = 30.0


@dataclass(frozen=True)
class ReloadReport:
    """The result of a reload, by process ("kernel", or the host's name): the edited modules, the functions and classes
    that changed, the roles that got another function or worker class, the edited lines that only a new process runs.
    `report.df` has it as a table. False in a condition where nothing had changed."""

    processes: Mapping[str, Patched]
    hosts: Sequence[HostInfo] = ()

    def __bool__(self) -> bool:
        return bool(self.processes)

    @property
    def _rows(self) -> list[dict[str, Any]]:
        where, rows = {info.name: {"pool": info.pool, "rank": info.rank} for info in self.hosts}, []
        for name, patched in self.processes.items():
            texts = {k: v if k == "error" else ", ".join(v) for k, v in vars(patched).items() if k != "traceback"}
            rows.append({"process": name, **where.get(name, {"pool": "", "rank": None}), **texts})
        return rows

    @property
    def df(self) -> pd.DataFrame:
        """A table with one row per process, by its name."""
        columns = ["process", "pool", "rank", "modules", "changed", "roles", "not_run", "error"]
        return pd.DataFrame(self._rows, columns=columns).set_index("process").astype({"rank": "Int64"})

    @property
    def changed(self) -> tuple[str, ...]:
        """The functions, classes and roles that changed in any process."""
        found = (name for patched in self.processes.values() for name in (*patched.changed, *patched.roles))
        return tuple(dict.fromkeys(found))

    def __repr__(self) -> str:
        if not self:
            return "<Reload: nothing has changed>"
        failed = sum(bool(patched.error) for patched in self.processes.values())
        what = f"failed in {failed} of" if failed else f"{_few(self.changed)} in"
        return f"<Reload: {what} {len(self.processes)} process(es)>"

    def _repr_html_(self) -> str:
        if not self:
            return "<div>Nothing has changed: every process runs what the files say.</div>"
        return table(self._rows, caption=repr(self).strip("<>"))


TAKE = "lab.reload() loads edits, lab.autoreload() does so before each stage"


class Reloader:
    """Loads edited code."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner, self._hosts = runner, runner.hosts
        self._shipped: dict[tuple[str, str], str] = {}  # by role and field of its model, the code that hosts have
        self._watched: dict[str, Stamp] | None = None  # autoreload: the files that only hosts have loaded
        self._told: dict[str, Stamp] | None = None  # the files of this kernel when edits were last reported
        self._told_of_cells: dict[str, Any] = {}  # by message, the redefinition that was reported
        runner.groups.when_changed.append(self._roles_changed)

    def _roles_changed(self) -> None:
        self._shipped = {p: code for p, code in self._shipped.items() if p[0] in self._hosts.description.models}
        self._note_notebook_code(())

    @stoppable("lab.reload()", ("either all processes have the edits, or none", "run the same call again"))
    def reload(self, **roles: Any) -> ReloadReport:
        """Have edited code take effect on the living workers: weights, optimizers and batches stay.

        Reloads functions and classes (workers, losses, reward functions) of all your modules whose files have changed
        since this kernel or a host loaded them, and those of notebook cells that a role was opened with, if their cell
        was run again. `lab.reload(reward=new_rule)` gives a role another function, `lab.reload(critic=MyCritic)`
        another worker class, whose `__init__` is not called.

        Functions and classes stay the same objects, and get the new code. Imports and new variables are loaded as well.
        An edit of any other line of a module is a `ReloadError`; `lab.save(path)`, then `lab.recover()` restarts the
        hosts with it. New operations can be called; `lab.reuse()` and branches notice the new code.

        Waits for the stages under way. All processes take the edits, or none: a syntax error is a `BadInput` that names
        file and line; an exception while any process loads the code is a `ReloadError`, whose `report` says where.
        After both, the old code goes on. Returns a report with one row per process.
        """
        self._runner.require_alone("reload()", "stages that belong together must run the same code")
        self._runner.scheduler.drain()
        was = self._hosts.description
        models = self._redefined() | self._given(roles)
        # keep the digest of the opening, for a cell that calls wb.open again with the old code
        description = replace(was, models=was.models | models, opened=was.opened or was.digest)
        texts = self._edited()
        check_syntax(texts)
        self._hosts.outdated = False  # the user may have undone an edit that was refused
        if models:
            check(description)
        if not texts and not models:
            return ReloadReport({})
        report = self._patch(texts, models)
        with self._hosts.changing:  # settings may have been assigned since the reload began
            self._hosts.set_description(description.retrained_as(self._hosts.description))
        # code that this kernel takes over is new for the workers of all its inline workbenches, too
        inline = [lab.runner.groups for lab in registry.opened.values() if lab.hosts.inline]
        for groups in {self._runner.groups, *inline}:
            groups.take_new_code()
        self._hosts.record()
        self._note_notebook_code(models)
        self._runner.telemetry.append_event("reload", modules=sorted(texts), changed=list(report.changed))
        self._runner.live.others[f"edited {sorted(texts) or list(report.changed)}"] = None
        for line in report.processes["kernel"].not_run:
            print(f"this kernel did not run a line that a new kernel would run: {line}")
        return report

    def autoreload(self, on: bool = True) -> None:
        """Switch automatic reloads on or off: before a stage that a cell calls, and before an algorithm's step or loop,
        if a file was edited or a cell with code of a role was run again. Each reload prints one line. After a syntax
        error the stage is refused."""
        self._runner.ownership.check_open()
        self._watched = self._files_of_hosts() if on else None

    def take_edits(self, algorithm: Any = None) -> None:
        """Reload, if `autoreload` is on, before a stage, or before a step or loop of an algorithm; do nothing inside a
        loop, or inside `overlap`."""
        runner = self._runner
        if runner.scheduler.overlaps or runner.snapshots.open or runner.batches.looping:
            return  # stages that belong together run the same code
        self._tell_of_cells(algorithm)
        if self._watched is None:
            self._tell_of_edits()
            return
        loaded.note()
        if not (loaded.stale() or self._redefined() or self._watched != _stamps(self._watched)):
            return
        try:
            report = self.reload()
        except (BadInput, ReloadError) as error:
            error.remedy = f"{error.remedy}; lab.autoreload(False) continues with the old code".removeprefix("; ")
            raise
        self._watched = self._files_of_hosts()
        if report:
            print(f"reloaded {_few(report.changed)} in {len(report.processes)} process(es)")

    def _tell_of_cells(self, algorithm: Any) -> None:
        """Print, once for each redefinition, the functions and classes that a cell has defined again while a role, or a
        field of the algorithm, still has the old ones."""
        held = list[tuple[str, Any, Callable[[], str | None]]]()
        if self._watched is None:
            told = "the {} role still runs the old code; " + TAKE
            shipped = self._shipped.get  # the code of hosts: helpers may have changed, too
            held += [(told.format(role), p, partial(shipped, (role, f))) for role, f, p in self._notebook_code()]
        for field in fields(algorithm) if algorithm is not None else ():
            if is_of_notebook(part := getattr(algorithm, field.name, None)):
                title = type(algorithm).__name__
                assign = f"assign it: {title.lower()}.{field.name} = {getattr(part, '__qualname__', '...')}"
                held.append((f"{title}.{field.name} is still the old one; {assign}", part, partial(code_behind, part)))
        for what, part, before in held:
            now, key = _current_definition(part), f"{name_of(part)}: {what}"
            if now is not part and now is not self._told_of_cells.get(key):
                self._told_of_cells[key] = now
                if code_behind(now) != before():
                    print(f"{name_of(now)} was defined again: {what}")

    def _tell_of_edits(self) -> None:
        """Print, once for each edit of a file that this kernel has loaded, that hosts still run the old code."""
        loaded.note()
        files = _stamps({source.path for source in loaded.texts.values()})
        if self._hosts.inline or files == self._told:
            return
        self._told, found = files, set[str]()
        backend = self._hosts.backend
        asked = [backend.ask(info.name, "stale_sources") for info in self._hosts.whole]
        backend.wait(asked, EDITS_S)
        for pending in asked:
            with suppress(WorkbenchError):  # the stage itself reports a host that is gone
                found |= set(pending.result() if pending.done() else ())
        if found:
            edited = _few(sorted(found))
            print(f"{edited}: edited after the hosts loaded it, and they still run the old code; {TAKE}")

    # --- what has changed ---------------------------------------------------------------------------------------------

    def _edited(self) -> dict[str, SourceFile]:
        """Return the texts of edited modules, from the files of this process and of the hosts; where these differ, this
        process's files count."""
        loaded.note()
        texts: dict[str, SourceFile] = {}
        if not self._hosts.inline:
            for found in self._everywhere("looking for edits", "stale_sources"):
                texts |= found
        mine = {name: source for name, source in loaded.texts.items() if name in texts}
        return {**texts, **mine, **loaded.stale()}

    def _files_of_hosts(self) -> dict[str, Stamp]:
        loaded.note()
        files = {path for found in self._everywhere("listing files", "source_files") for path in found}
        return _stamps(files - {source.path for source in loaded.texts.values()})

    def _notebook_code(self) -> Iterator[tuple[str, str, Any]]:
        """Yield role, field of its model, and value, for each function and worker class that was defined in a cell."""
        for role, model in self._hosts.description.models.items():
            for field in ("function", "worker"):
                if is_of_notebook(part := getattr(model, field)):
                    yield role, field, part

    def _note_notebook_code(self, roles: Collection[str]) -> None:
        """Remember the notebook code that the hosts were given for roles."""
        for role, field, part in self._notebook_code():
            if role in roles or (role, field) not in self._shipped:
                self._shipped[role, field] = code_behind(part)

    def _redefined(self) -> dict[str, Model]:
        """Return, by role, the models whose function or worker class the notebook redefined since hosts got it."""
        found = dict[str, Model]()
        for role, field, part in self._notebook_code():
            now = _current_definition(part)
            code = code_behind(now)
            if code != self._shipped.get((role, field), code):
                found[role] = found.get(role, self._hosts.description.models[role]).changed(**{field: now})
        return found

    def _given(self, roles: Mapping[str, Any]) -> dict[str, Model]:
        """Return the models of roles with the functions or worker classes that `reload` was given."""
        found = {}
        for role, given in roles.items():
            where = f"reload({role}={name_of(given) if callable(given) else shown(given)})"
            if role not in self._hosts.description.models or role == ROLLOUT:
                others = [name for name in self._hosts.description.models if name != ROLLOUT]
                raise BadInput(where, f"this workbench has {', '.join(others)}", remedy_for(role, others, str) or "")
            model = self._hosts.description.models[role]
            if isinstance(given, type):
                found[role] = model.changed(worker=given)
            elif not callable(given):
                raise BadInput(where, "give a function (for reward or cost) or a worker class")
            elif model.function is None:
                raise BadInput(
                    where, f"the {role} is a model, {model}, and has no function to replace",
                    f"give a worker class derived from {ROLE_WORKERS[role].__name__}, or drop and add the role",
                )  # fmt: skip
            else:
                check_function(given)
                found[role] = model.changed(function=given)
        return found

    # --- carrying it out ----------------------------------------------------------------------------------------------

    def _patch(self, texts: Mapping[str, SourceFile], models: Mapping[str, Model]) -> ReloadReport:
        hosts, inline = self._hosts.whole, self._hosts.inline
        kinds: Any = {role: (model, model.worker or ROLE_WORKERS[role]) for role, model in models.items()}
        if not inline:
            try:  # hosts unpickle it after they have loaded the texts, which may define names in it
                kinds = pickles.dumps(kinds)
            except Exception as error:
                rule = "functions and classes for hosts must be picklable"
                raise BadInput(f"reload({', '.join(models)}): {said(error)}", rule) from error
        kernel, done, asked = Patch(), dict[str, Patched](), list[HostInfo]()
        try:
            if not inline:  # lines that it cannot run are no error: hosts that began after the edit ran them
                done["kernel"] = kernel.apply(texts, {}, {}, strict=False)
            if inline or not done["kernel"].error:
                asked = hosts
                answers = self._everywhere("reloading", "patch", texts, kinds)
                done |= zip(["kernel"] if inline else [info.name for info in hosts], answers, strict=True)
            self._require_done(ReloadReport(done, hosts))
        except BaseException:
            kernel.undo()
            self._go_back(asked)
            raise
        with uninterrupted():
            kernel.keep()
            self._everywhere("keeping the new code", "settle_patch", True)
        return ReloadReport(done, hosts)

    @uninterrupted()
    def _go_back(self, hosts: Sequence[HostInfo]) -> None:
        """Have hosts undo the reload. Hosts that do not answer in time are busy, and their pools wait for them."""
        asked = [(info, self._hosts.backend.work(info.name, "settle_patch", False)) for info in hosts]
        self._hosts.backend.wait([pending for _, pending in asked], ANSWER_S)
        for info, pending in asked:
            if not pending.done():
                self._hosts.clean_up_later(info.pool, "reloading", pending)

    def _require_done(self, report: ReloadReport) -> None:
        """Raise `ReloadError` where a process could not take the edits."""
        failed = {name: patched for name, patched in report.processes.items() if patched.error}
        if not failed:
            return
        first = next(iter(failed.values()))
        same = [name for name, patched in failed.items() if patched.error == first.error]
        others = len(failed) - len(same)
        rule = "all processes keep the old code" + (f"; {others} more failed with other errors" if others else "")
        remedy = "correct it, and reload again"
        if first.not_run:
            rule = f"a living process can load only functions, classes, imports and new variables; {rule}"
            self._hosts.outdated = not self._hosts.inline
            remedy = "undo the edit, or lab.save(path) and " + (
                "open it again in a new kernel: wb.restore(path)"
                if self._hosts.inline
                else "restart the hosts: lab.recover()"
            )
        error = ReloadError(f"edited code did not load in {', '.join(same)}: {first.error}", rule, remedy)
        put_back = {name: failed.get(name, Patched()) for name in report.processes}
        error.report = replace(report, processes=put_back)
        if first.traceback:
            error.add_note(f"in {same[0]}:\n{first.traceback}")
        raise error

    def _everywhere(self, what: str, method: str, *args: Any) -> list[Any]:
        with Progress(what) as bar:
            steps = [self._hosts.step(what, info.name, method, *args) for info in self._hosts.whole]
            return settle(self._hosts.backend, steps, lambda text: bar.update(0, 0))


def _stamps(paths: Collection[str]) -> dict[str, Stamp]:
    """Return the stamps of the files that exist."""
    return {path: stamp_of(path) for path in paths if os.path.exists(path)}


def _few(names: Sequence[str]) -> str:
    """Join names; of more than three, only the first two and a count."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _current_definition(part: Any) -> Any:
    """Return the function or class that the notebook has now under the name of `part`; `part` itself where only one of
    both is a wrapper, because `functools.wraps` passes the name on."""
    now = vars(sys.modules["__main__"]).get(getattr(part, "__qualname__", ""), part)
    alike = isinstance(now, type) == isinstance(part, type)
    alike = alike and hasattr(now, "__wrapped__") == hasattr(part, "__wrapped__")
    return now if callable(now) and alike else part
