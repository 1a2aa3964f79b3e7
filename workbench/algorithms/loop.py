"""Base of the algorithms: the stages as a graph, run one stage, one iteration, or n iterations at a time."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field

from workbench.algorithms.graph import Graph, Stage
from workbench.algorithms.lab import Lab
from workbench.algorithms.tracing import trace
from workbench.batches.batch import Batch
from workbench.display.interrupts import stoppable, uninterrupted
from workbench.display.iterations import Iterations
from workbench.errors import BadInput, StageInterrupted
from workbench.stages.group import GroupOperation
from workbench.stages.run import Run
from workbench.support.checked_calls import checks_calls
from workbench.support.named_fields import check_names, meant
from workbench.support.validation import Whole, at_least, check_before_post_init, whole

if TYPE_CHECKING:
    import pandas as pd

GroupSize = Annotated[Whole, Field(ge=2)]  # samples of a prompt, where they are each other's baseline


@checks_calls("algo")
class Algorithm(ABC):
    """Drives a workbench. `define` is the paper's listing, one line a stage.

    graph(): the stages. step(): the next stage. iterate(): the rest of the iteration. restart(): give the iteration up.
    run(n): n iterations, in which stages of different pools overlap. To change it from a cell, set a field, which later
    stages read, or `replace`, `insert` and `remove` stages.
    """

    lab: Lab
    _edits: list[Callable[[Graph], Graph]]
    _made: dict[str, Any]
    taken_up = False  # from a checkpoint
    _interrupted = False  # in the iteration under way
    _under_way = False  # an iteration has begun and is not over
    _iteration = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the values of fields before `__post_init__`."""
        super().__init_subclass__(**kwargs)
        check_before_post_init(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the names of fields before the dataclass's `__init__`, which would raise a `TypeError`."""
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        check_names(cls.__name__, parameters, kwargs, len(args))
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; `BadInput` for a name that is none, which no stage would read."""
        fields = [field.name for field in dataclasses.fields(self)] if dataclasses.is_dataclass(self) else [name]
        if name not in fields and not name.startswith("_") and not hasattr(type(self), name):
            raise BadInput(
                f"{type(self).__name__}.{name} = {value!r:.60}",
                f"its fields are {', '.join(fields)}",
                meant(name, fields) or f"a field of one's own is written in the class: {name}: float = 0.0",
            )
        super().__setattr__(name, value)

    @abstractmethod
    def define(self, lab: Any) -> None:
        """The stages of one iteration. `graph` also runs it on stand-ins, so it must not read the rows of a batch."""

    # --- as a value ---------------------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        """The stages of one iteration, with the present fields and edits."""
        graph = trace(self.lab, self.define, type(self).__name__)
        for edit in self._all_edits():
            graph = edit(graph)
        return graph

    def replace(self, stage: str, function: Callable[..., Any] | None = None, /, **arguments: Any) -> None:
        """Change arguments of a stage, or put another in its place: an operation such as `lab.actor.mine`, or a
        function of its batch that returns a batch. `algo.replace("update_actor", clip=0.1)`;
        `algo.replace("compute_reward", my_stage)`.

        A stage that has run in this iteration runs again, with those that have run on what it made. `BadInput` where
        one of them has updated a role.
        """
        self._edit(lambda graph: graph.replaced(stage, function, arguments), f"replacing {stage!r}", again=stage)

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

    def _all_edits(self) -> list[Callable[[Graph], Graph]]:
        if not hasattr(self, "_edits"):
            self._edits = []
        return self._edits

    def _edit(self, edit: Callable[[Graph], Graph], what: str, *, again: str | None = None) -> None:
        """Apply an edit. again: the stage whose output is out of date after it."""
        before = self.graph()
        after = edit(before)  # raises for a wrong edit, before anything is changed
        stale = [name for name in before.behind(again) if name in self.made] if again and self._under_way else []
        if updated := [name for name in stale if before[name].updates]:
            raise BadInput(
                what,
                f"{updated[0]!r} has updated {before[updated[0]].role!r} in this iteration, from what would change",
                "finish the iteration first, with iterate(), or give it up, with restart(): the update stays",
            )
        self._all_edits().append(edit)
        for name in stale:
            del self.made[name]
        if self._under_way and all(name in self.made for name in after.names):  # what was left of it has been removed
            self._end()

    # --- carried out --------------------------------------------------------------------------------------------------

    @property
    def made(self) -> dict[str, Any]:
        """What the stages of the newest iteration have made so far, by name: batches and metrics."""
        if not hasattr(self, "_made"):
            self._made = {}
        return self._made

    @property
    def under_way(self) -> bool:
        """Whether an iteration has begun, and is not over."""
        return self._under_way

    @property
    def iteration(self) -> int:
        """The number of the iteration that it stepped last; 0 before the first."""
        return self._iteration

    @property
    def next_stage(self) -> str:
        """The stage that `step` would run."""
        return self._next(self.graph()).name

    def _next(self, graph: Graph) -> Stage:
        """The first stage that has not run; the first of all where an iteration is over, or has not begun."""
        if not self._under_way:
            return graph.stages[0]
        return next((stage for stage in graph.stages if stage.name not in self.made), graph.stages[-1])

    def step(self) -> Any:
        """Run the next stage, as a cell would, and return its batch or metrics.

        A stage that fails stays the next one: fix the cause, `replace` it or an earlier one, or `restart`.
        """
        with self._stoppable("step"):
            return self._step()

    def _step(self) -> Any:
        self.lab.take_edits()
        self.lab.position.take_up(self)
        graph = self.graph()
        stage = self._next(graph)
        self.lab.position.algorithm = self
        if self._under_way and all(name in self.made for name in graph.names):  # interrupted in its very last moments
            self._end()
            return self.made[stage.name]
        if not self._under_way:
            graph.check_columns()  # before prompts are drawn
            graph.check_corrections(type(self).__name__)
            self.made.clear()
            self._under_way, self._interrupted = True, False
            self.lab.position.first_states.setdefault(type(self).__name__, self.state())
        # what a stage of workers gave is kept before an interrupt is raised: an update is not made again, and prompts
        # are not drawn again
        draws = stage.role == "prompts"
        with (
            uninterrupted() if draws or isinstance(stage.function, GroupOperation) else nullcontext(),
            self.lab.runner.ownership.together() if draws else nullcontext(),
            self._taking(stage),
        ):
            self.made[stage.name] = made = graph.call(stage, self.lab, self.made)
            self._iteration = self.lab.iteration
            self.lab.note_position()
        if all(name in self.made for name in graph.names):
            self._end()
        return made

    def _taking(self, stage: Stage) -> AbstractContextManager[None]:
        """Inside, `made` has the batch of a stage as soon as the stage is over: a later kernel repeats none of it, nor
        draws other samples."""
        if not isinstance(stage.function, GroupOperation):
            return nullcontext()
        take = partial(self.made.__setitem__, stage.name)
        return self.lab.runner.handing_over(stage.function.operation.name, take)

    def restart(self) -> None:
        """Give up the present iteration: the next step begins another one, with new prompts.

        Its updates stay, and `finish` is not called. Its batches are in `made` until the next step.
        """
        self._under_way = False

    def _end(self) -> None:
        metrics = self.metrics()  # waits; until then it is under way
        with uninterrupted():
            self._under_way = False
            inspect.unwrap(type(self).finish)(self, metrics)  # unchecked: of a step that was skipped some may be NaN
            self.lab.note_position()
        self.lab.save_if_due(self)

    def finish(self, metrics: Mapping[str, float]) -> None:  # noqa: B027 (not abstract: most algorithms have none)
        """Called after the last stage of an iteration, with its metrics: an algorithm may adapt its fields here."""

    def state(self) -> dict[str, Any]:
        """The fields that `finish` changes, as plain values, for checkpoints."""
        return {}

    def position(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Where the algorithm stands, as plain values, for checkpoints and for the next kernel.

        made: what the stages of the present iteration have made, in the form in which it is kept.
        """
        last = self.lab.last_metrics if made else {}
        return {
            "class": type(self).__name__,
            "iteration": self.iteration,
            "state": self.state(),
            "under_way": bool(made),
            "made": dict(made),
            "last_metrics": {stage: dict(values) for stage, values in last.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        for name, value in state.items():
            setattr(self, name, value)

    def go_on(self, saved: Mapping[str, Any], made: Mapping[str, Any] | None) -> None:
        """Continue from `saved`, the `position` of an algorithm of this class. made: what the stages of its present
        iteration had made; None between iterations."""
        self.taken_up = True
        self.load_state(saved["state"])
        self._iteration = saved["iteration"]
        if made is not None:
            self.made.clear()
            self.made.update(made)
            self._under_way = True

    def go_back(self, iteration: int) -> None:
        """Go back to the end of an iteration, from which it may be continued."""
        self.restart()
        self.made.clear()
        self._iteration = iteration
        self.taken_up = False

    def iterate(self) -> dict[str, float]:
        """The rest of the iteration that `step` began, or a whole one; the metrics of its stages."""
        batches = self.lab.runner.batches
        iterating, batches.iterating = batches.iterating, True
        try:
            with self._stoppable("iterate"):
                self.step()
                while self._under_way:
                    self.step()
                return self.metrics()
        finally:
            batches.iterating = iterating

    def _stoppable(self, call: str) -> AbstractContextManager[None]:
        """Inside, an interrupt between two stages says which stage is next."""

        def left() -> tuple[str, str]:
            if not self._under_way:
                return f"iteration {self.iteration} is over", "the same call again begins the next one"
            return f"{self.next_stage} of iteration {self.lab.iteration} is next", "the same call again goes on with it"

        return stoppable(f"{type(self).__name__}.{call}()", left)

    def run(self, iterations: int, *, evaluate: Callable[[], object] | None = None, every: int = 1) -> pd.DataFrame:
        """Run n iterations; a frame with one row an iteration. An iteration that `step` began, or that fails, is given
        up. One that was interrupted in a `run`, or that a checkpoint has, is finished first, and counts.

        A terminal shows the progress; the log of a script has a line an iteration.

        evaluate: called after each `every` iterations, such as `lambda: lab.evaluate(held_out)` or
        `lambda: lab.check().raise_if_failed()`.

        A script that is resumed counts the iterations before its checkpoint, and does not run them again.
        """
        import pandas as pd

        whole("iterations", iterations, 1)
        whole("every", every, 1)
        if evaluate is not None and not callable(evaluate):
            remedy = "evaluate=lambda: lab.evaluate(held_out)"
            raise BadInput(f"evaluate={evaluate!r:.60}", "must be a function without arguments, or None", remedy)
        self.lab.take_edits()
        rows = []
        self.lab.position.take_up(self)
        resumed = self._under_way and (
            self._interrupted or (self.taken_up and self.lab.position.saved_algorithm is not None)
        )
        passed = self.lab.passed_over(iterations)
        with self._stoppable("run"), Iterations(type(self).__name__, iterations) as shown:
            for number in range(passed + 1, iterations + 1):
                if not resumed:
                    self.restart()
                resumed = False
                batches = self.lab.runner.batches
                looping, batches.looping = batches.looping, True
                try:
                    with self.lab.overlap():
                        metrics = self.iterate()
                except BaseException as error:  # stages were only submitted: some of what `made` holds never comes
                    self._made = {name: made for name, made in self.made.items() if _is_there(made)}
                    self._interrupted = self._under_way = self._under_way and _is_interrupt(error)
                    raise
                finally:
                    batches.looping = looping
                self.restart()
                rows.append({"iteration": self.lab.iteration, **metrics})
                shown.done(metrics)
                if evaluate is not None and number % every == 0:
                    with shown.aside():
                        evaluate()
        return pd.DataFrame(rows, columns=None if rows else ["iteration"]).set_index("iteration")

    def on_policy(self, *, penalised: bool = False) -> bool:
        """Whether `define` may leave `compute_log_prob` out, because `update_actor` can use its own forward pass: with
        one optimizer step an iteration, where nothing else reads `old_log_prob`.

        penalised: rewards have a KL penalty, which reads `old_log_prob`.
        """
        training = self.lab.actor.spec.training
        one_step = getattr(self, "epochs", 1) == 1 and (training is None or training.minibatches == 1)
        return one_step and not penalised and getattr(self, "correction", None) is None

    def need(self, *roles: str) -> None:
        """Raise `BadInput` unless the workbench has these roles, and the stages take what the fields say.

        Call it at the end of `__post_init__`: it traces `define`, so that wrong arguments of operations are refused
        now.
        """
        if not hasattr(self.lab, "groups"):
            raise BadInput(
                f"{type(self).__name__}({self.lab!r:.60})",
                "its first argument is the workbench that it drives",
                "give what wb.open(...) returned",
            )
        for name, least in (("prompts", 1), ("samples", 1), ("epochs", 1), ("rows", 1), ("kl_coefficient", 0)):
            at_least(f"{type(self).__name__}.{name}", getattr(self, name, least), least)
        missing = [role for role in roles if role not in self.lab.groups]
        if missing:
            raise BadInput(
                f"{type(self).__name__} on a workbench without {' and '.join(missing)}",
                f"it has {', '.join(self.lab.groups)}",
                "open one with these roles in models=",
            )
        self._check_rows()
        self.graph().check_corrections(type(self).__name__)
        self.lab.position.take_up(self)

    def _check_rows(self, known: Mapping[str, int] | None = None) -> None:
        """Raise `BadInput` for numbers of prompts, samples and rows that ranks and minibatches cannot take."""
        counts = (f"{name}={getattr(self, name)}" for name in ("prompts", "samples", "rows") if hasattr(self, name))
        self.graph().check_rows(f"{type(self).__name__}({', '.join(counts)})", known)

    def metrics(self) -> dict[str, float]:
        """The metrics of the newest iteration's stages, as {"stage/metric": value}; waits for them."""
        self.lab.runner.overlap.wait()
        return {
            f"{stage}/{name}": value
            for stage, values in self.lab.last_metrics.items()
            for name, value in values.items()
        }


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, StageInterrupted | KeyboardInterrupt)


def _is_there(made: Any) -> bool:
    """Whether the result of a stage, which may be pending, has been made."""
    if isinstance(made, Batch):
        made.settle(wait=False)
        return not made.pending
    return not isinstance(made, Run) or made.state == "done"
