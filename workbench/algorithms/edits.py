"""The stages of an algorithm as a graph, and changes of it from a cell or a panel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import Parameter
from types import MappingProxyType
from typing import Any

from workbench.algorithms.graph import Graph
from workbench.algorithms.live_fields import LiveFields, as_plain, is_same, value_in_effect
from workbench.algorithms.tracing import Argument, Tracer, fields_of, in_effect
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.checked_calls import checks_calls
from workbench.support.named_fields import meant

Once = Mapping[str, Mapping[str, Any]]  # arguments of the next run of a stage alone, by stage


@checks_calls("algo")
class StageEdits(LiveFields, ABC):
    """Base of the algorithms: `graph` is what `define` calls, with all that was changed since."""

    _made: dict[str, Any]
    _edits: list[Callable[[Graph], Graph]]
    _once: Once = MappingProxyType({})  # replaced as a whole: a panel's thread changes it, too
    _under_way = False  # an iteration has begun and is not over
    # by stage, the arguments that `replace` gave; None: a function took the stage's place
    _replaced: dict[str, dict[str, Any] | None]

    @abstractmethod
    def define(self, lab: Any) -> None:
        """The stages of one iteration. `graph` also runs it on stand-ins, so it must not read the rows of a batch."""

    @property
    def made(self) -> dict[str, Any]:
        """What the stages of the newest iteration have made so far, by name: batches and metrics."""
        return self._made

    @property
    def under_way(self) -> bool:
        """Whether an iteration has begun, and is not over."""
        return self._under_way

    @abstractmethod
    def _end(self) -> None:
        """End the iteration."""

    def graph(self) -> Graph:
        """The stages of one iteration, with the present fields and edits."""
        return self._graph_with(self._once)

    def _graph_with(self, once: Once, lasting: Graph | None = None) -> Graph:
        """With arguments of the next runs alone. lasting: the graph without them; default: the present one."""
        graph = lasting or self._lasting_graph()
        for stage, arguments in once.items():
            if stage in graph.names:  # a field may have taken it out
                graph = graph.replaced(stage, None, arguments)
        return graph

    def _written_graph(self) -> Graph:
        """As `define` has it."""
        tracer = Tracer(self.lab, type(self).__name__)
        self.define(tracer)
        return tracer.graph()

    def _lasting_graph(self) -> Graph:
        """Without what holds for one run only."""
        graph = self._written_graph()
        for edit in self._edits:
            graph = edit(graph)
        return graph

    def replace(self, stage: str, function: Callable[..., Any] | None = None, /, **arguments: Any) -> None:
        """Change arguments of a stage, or put another in its place: an operation such as `lab.actor.mine`, or a
        function of its batch that returns a batch. `algo.replace("update_actor", clip=0.1)`;
        `algo.replace("compute_reward", my_stage)`.

        A stage that has run in this iteration runs again, with those that have run on what it made. `BadInput` where
        one of them has updated a role. `lab.history.changes()` lists arguments that were changed; numbers and texts
        among them are kept by checkpoints and for later kernels. Functions are not: run their cell again.
        """
        before = self.graph()
        self._edit(lambda graph: graph.replaced(stage, function, arguments), f"replacing {stage!r}", again=stage)
        known = self._replaced.get(stage, {})
        self._replaced[stage] = None if function is not None or known is None else {**known, **arguments}
        if function is None:
            self._note_arguments(before, stage, arguments)

    def once(self, stage: str, /, **arguments: Any) -> None:
        """Other arguments for the next run of a stage alone: `algo.once("update_actor", clip=0.1)`. After that run
        those of before hold again. Checkpoints do not keep them; a `replace` of the stage takes them back.

        `lab.history.changes()` lists them, with "once" behind the setting.
        """
        before = self.graph()
        wanted = {**self._once, stage: {**self._once.get(stage, {}), **arguments}}
        before[stage]  # raises where there is no such stage
        after = self._graph_with(wanted)
        after.check_corrections(type(self).__name__)
        after.check_rows(f"{type(self).__name__}, once")
        self._check_open_updates(f"{stage!r}, once, with {', '.join(arguments)}", after)
        self._once = wanted
        self._note_arguments(before, stage, arguments, " once")

    def arguments(self, stage: str) -> list[Argument]:
        """All arguments with which a stage would run now, and where each comes from: a field, `define`, the operation's
        default, or a change of this stage."""
        now, lasting, written = self.graph()[stage], self._lasting_graph()[stage], self._written_graph()
        first = written[stage].given_arguments if stage in written.names else {}
        fields = {} if lasting.edited or stage not in written.names else fields_of(self, stage)
        given, later, defaults = now.given_arguments, lasting.given_arguments, now.defaults
        values = {name: value for name, value in {**defaults, **given}.items() if value is not Parameter.empty}
        title, found, meaning = type(self).__name__, list[Argument](), in_effect(values)
        for name, value in values.items():
            default, told = defaults.get(name, Parameter.empty), meaning.get(name, "")
            same = name not in later or (name in first and is_same(first[name], later[name]))
            field = fields.get(name, "") if same or not self._edits else ""
            if name in self._once.get(stage, {}):
                source = "changed for the next run"
            elif self._edits and not same:
                source = "changed for this stage"
            elif field:
                source = f"{title}.{field}" + (", changed" if self._is_changed(field) else "")
            else:
                source = f"{title}.define" if name in given else "default"
            found.append(Argument(name=name, value=value, default=default, source=source, field=field, in_effect=told))
        return found

    def change_argument(self, stage: str, name: str, value: Any, *, once: bool) -> None:
        """Change an argument for the next run of the stage alone, or from now on: in the field that it comes from, else
        as `replace` does. `BadInput`, with nothing changed, for a wrong value, and for an argument that there is not.
        """
        known = {argument.name: argument for argument in self.arguments(stage)}
        if name not in known:
            raise BadInput(f"{stage}({name}=...)", f"it takes {', '.join(known)}", meant(name, list(known)))
        if once:
            self.once(stage, **{name: value})
        elif field := known[name].field:
            self._check_open_updates(f"{field} = {shown(value)}", self._graph_with(self._once_without(stage, name)))
            owner, _, last = field.rpartition(".")
            setattr(getattr(self, owner) if owner else self, last, value)
            self._once = self._once_without(stage, name)
        else:
            self.replace(stage, **{name: value})

    def insert(self, function: Callable[..., Any], /, *, after: str, name: str | None = None, **arguments: Any) -> None:
        """Put a stage after another: an operation, or a function of the batch that returns a batch.

        `BadInput` where one behind it has run in this iteration.
        """
        called = name or str(getattr(function, "__name__", type(function).__name__))
        names = self.graph().names
        behind = names[names.index(after) + 1 :] if after in names else []
        if ran := [stage for stage in behind if self._under_way and stage in self.made]:
            raise BadInput(
                f"inserting {called!r} after {after!r}",
                f"{ran[0]!r}, which comes behind it, has run in this iteration",
                "finish the iteration first, with iterate(), or give it up, with restart()",
            )
        self._edit(lambda graph: graph.inserted(after, function, called, arguments), f"inserting {called!r}")

    def remove(self, stage: str) -> None:
        """Leave a stage out: what took its batch takes the batch that it was given. Where it has run in this iteration,
        what has run on what it made runs again, as in `replace`."""
        self._edit(lambda graph: graph.removed(stage), f"removing {stage!r}", again=stage)

    def _kept_arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments that `replace` gave, as far as a file can hold them."""
        plain = {stage: as_plain(arguments or {}) for stage, arguments in self._replaced.items()}
        return {stage: arguments for stage, arguments in plain.items() if arguments}

    def _take_arguments(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with what `_kept_arguments` gave; what was replaced since stays as it is."""
        for stage, arguments in kept.items():
            if (now := self._replaced.get(stage, {})) is None:
                continue
            new = {name: value for name, value in arguments.items() if name not in now}
            self._edits.append(partial(_with_arguments, stage, new))
            self._replaced[stage] = {**now, **new}

    def _edit(self, edit: Callable[[Graph], Graph], what: str, *, again: str | None = None) -> None:
        """Apply an edit. again: the stage whose output is out of date after it."""
        before = self._lasting_graph()
        after = edit(before)  # raises for a wrong edit, before anything is changed
        stale = [name for name in before.behind(again) if name in self.made] if again and self._under_way else []
        if updated := [name for name in stale if before[name].updates]:
            raise BadInput(
                what,
                f"{updated[0]!r} has updated {before[updated[0]].role!r} in this iteration, from what would change",
                "finish the iteration first, with iterate(), or give it up, with restart(): the update stays",
            )
        once = {name: arguments for name, arguments in self._once.items() if name != again}
        self._check_open_updates(what, self._graph_with(once, after), stale)
        self._once = once
        self._edits.append(edit)
        for name in stale:
            del self.made[name]
        if self._under_way and all(name in self.made for name in after.names):  # what was left of it has been removed
            self._end()

    def _has_run(self, stage: str, once: Once) -> None:
        """Forget what held for this run of a stage alone, unless it was changed meanwhile."""
        if stage in once and self._once.get(stage) is once[stage]:
            self._once = {name: arguments for name, arguments in self._once.items() if name != stage}

    def _once_without(self, stage: str, argument: str) -> Once:
        """What holds for one run alone, without an argument of a stage."""
        rest = {name: value for name, value in self._once.get(stage, {}).items() if name != argument}
        others = {name: arguments for name, arguments in self._once.items() if name != stage}
        return {**others, stage: rest} if rest else others

    def _check_open_updates(self, what: str, after: Graph, stale: Collection[str] = ()) -> None:
        if self._under_way:
            self.graph().check_open_updates(self.lab, what, self.made.keys(), after, stale)

    def _note_arguments(self, before: Graph, stage: str, arguments: Mapping[str, Any], how: str = "") -> None:
        was = {**before[stage].defaults, **before[stage].given_arguments}
        for name, value in arguments.items():
            old = None if was.get(name) is Parameter.empty else was.get(name)
            old, new = (value_in_effect({**was, **arguments}, name, one) for one in (old, value))
            self.lab.runner.live.note(f"{type(self).__name__}.{stage}.{name}{how}", old, new)


def _with_arguments(stage: str, arguments: Mapping[str, Any], graph: Graph) -> Graph:
    """With those of the arguments that the stage takes, where the graph still has it."""
    if stage not in graph.names:
        return graph
    known = {**graph[stage].defaults, **graph[stage].given_arguments}
    return graph.replaced(stage, None, {name: value for name, value in arguments.items() if name in known})
