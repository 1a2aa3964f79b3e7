"""The base class of the algorithms: it runs the graph's stages one at a time, by iteration, or for n iterations."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field
from typing import Annotated, Any, Self

import pandas as pd
from pydantic import Field

from workbench.algorithms.ahead import (
    check_can_pause,
    check_can_run_ahead,
    draw_ahead,
    finish_paused,
    from_buffer,
    generate_ahead,
    journaling,
    stages_up_to_generation,
)
from workbench.algorithms.edits import StageEdits
from workbench.algorithms.graph import Graph, Stage, check_takes
from workbench.algorithms.lab import Lab
from workbench.algorithms.live_fields import as_written, default_of, fields_by_name, note_settings, recording
from workbench.algorithms.waiting import WaitingRollouts
from workbench.batches.batch import Batch
from workbench.data.reward_function import Weight
from workbench.display.html import table
from workbench.display.interrupts import stoppable, uninterrupted
from workbench.display.progress import Iterations
from workbench.display.results import Results
from workbench.errors import BadInput, HostDied, StageInterrupted
from workbench.errors.plain_text import shown
from workbench.objectives.correction import Correction
from workbench.objectives.losses import CovarianceLoss
from workbench.settings.engines import Sampling
from workbench.stages.run import Run
from workbench.support.checked_calls import checks_calls
from workbench.support.named_fields import check_call
from workbench.support.notebook_cell import Cell, running_cell, variable_of
from workbench.support.replaced import replaced
from workbench.support.validation import NonNegativeInt, PositiveInt, Whole
from workbench.workers.user_loss import ParameterNames


@checks_calls(
    "algo", internal="change_argument define finish go_back load_state need on_policy position resume_at rollouts state"
)
class Algorithm(StageEdits):
    """Runs an algorithm on a workbench. `define` is the algorithm's listing in its paper, one line per stage.

    graph(): the stages. step(): the next stage. iterate(): the rest of the iteration. restart(): give the iteration up.
    run(n): n iterations, in which stages of different pools overlap. To change the algorithm from a cell, set a field,
    which later stages read, or `replace`, `insert` and `remove` stages; `once` changes arguments for one run only.
    """

    lab: Lab
    _iteration = 0
    _by_hand = False  # whether `step`, not `iterate`, ran a stage of the current iteration
    _ended = 0
    _interrupted = False  # whether the current iteration was interrupted
    _run_before = 0  # the number of the last stage run before the current iteration
    _staleness = 0  # how many iterations the current `run` generates ahead
    _pause_after: int | None = None  # tokens after which responses pause in the current `run`
    _made_in: Cell | None = None
    _from_buffer: Sequence[WaitingRollouts] = ()  # rollouts that the iteration took from `lab.buffer`; () once trained

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the names of fields before the dataclass's `__init__`, which would raise a `TypeError`."""
        check_call(cls.__name__, inspect.signature(cls.__init__), (cls, *args), kwargs)
        algorithm = super().__new__(cls)
        algorithm.__dict__.update(_made={}, _edits=[], _replaced={}, _changed={}, _made_in=running_cell())
        return algorithm

    def _repr_html_(self) -> str:
        rows: list[dict[str, Any]] = []
        for name, known in fields_by_name(self).items():
            if name == "lab":
                continue
            value, default = (as_written(one) or shown(one) for one in (getattr(self, name), default_of(known)))
            changed = default not in (value, shown(MISSING))
            rows.append({"field": name, "value": value, "default": default if changed else ""})
        return table(rows, caption=f"{type(self).__name__} on {self.lab.name}", max_rows=len(rows))

    # --- running stages and iterations --------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """The number of the iteration in which this algorithm last ran a stage; 0 before the first."""
        return self._iteration

    @property
    def by_hand(self) -> bool:
        """Whether `step` ran a stage of the last iteration, so that the user may have paused between stages."""
        return self._by_hand

    @property
    def ended_iterations(self) -> int:
        """The number of iterations that this algorithm has completed in this kernel."""
        return self._ended

    @property
    def next_stage(self) -> str:
        """The stage that `step` would run."""
        return self._next(self.graph()).name

    def _next(self, graph: Graph) -> Stage:
        """Return the first stage that has not run; the graph's first stage if no iteration is under way."""
        if not self._under_way:
            return graph.stages[0]
        return next((stage for stage in graph.stages if stage.name not in self.made), graph.stages[-1])

    def step(self) -> Any:
        """Run the next stage, as if its line were a cell, and return its batch or metrics.

        A stage that fails stays the next one: fix the cause, `replace` this or an earlier stage, or `restart`.
        """
        with recording(self, "step"), self._stoppable("step"):
            return self._step()

    def _step(self) -> Any:
        self.lab.take_edits(self)
        self.lab.position.take_up(self)
        once = self._once
        graph = self._graph_with(once)
        if self._under_way:
            self._forget_behind_new_stages(graph)
        stage = self._next(graph)
        self.lab.position.begin(self)
        if self._under_way and all(name in self.made for name in graph.names):  # interrupted after its last stage
            self._end()
            return self.made[stage.name]
        of_run = {"staleness": self._staleness, "pause_after": self._pause_after}
        if not self._under_way:
            graph.check_columns()  # before prompts are drawn
            self._check_rows(graph)  # a role's `minibatches` may have changed
            graph.check_corrections(type(self).__name__)
            self.made.clear()
            self._under_way, self._interrupted, self._by_hand = True, False, False
            self._run_before = self.lab.runner.counters.run
            self.lab.position.first_states.setdefault(type(self).__name__, self.state())
        note_settings(self, of_run, self._kept_arguments(), once)
        if self._staleness and stage.name not in {other.name for other in stages_up_to_generation(graph)}:
            generate_ahead(self.lab, graph, self._staleness, self._draw_ahead)
        if stage.role == "prompts" and not self.made:
            finish_paused(self.lab, graph, self._draw_ahead)
        self._by_hand |= not self.lab.runner.batches.iterating
        with journaling(self.lab, stage):
            if stage.role == "prompts" and not self.made:
                made, self._from_buffer = from_buffer(self.lab, graph)
                self.made.update(made)
            if stage.name not in self.made:
                if stage.updates and not self.lab.runner.scheduler.overlaps:
                    self._from_buffer = ()
                self.made[stage.name] = graph.call(stage, self.lab, self.made)
            made = self.made[stage.name]
            self._iteration = self.lab.iteration
            self.lab.position.unfinished = type(self).__name__, self.iteration
            self._has_run(stage.name, once)
            self.lab.note_position()
        if all(name in self.made for name in graph.names):
            self._end()
        return made

    def draw_ahead(self, *, pause_after: PositiveInt | None = None) -> Batch:
        """Draw the prompts of the first later iteration that has none, generate for them with the actor's current
        weights, and return the batch. The rollouts wait in `lab.buffer` for their iteration. `run(n, staleness=k)` does
        this by itself. pause_after: as in `run`; the call also resumes responses that paused earlier.

        Raises `BadInput` if the stages before generation do not draw from `lab.prompts`, or update a role.
        """
        self.lab.take_edits(self)
        graph = self.graph()
        check_can_run_ahead(graph)
        if pause_after is not None:
            check_can_pause(graph)
        self.lab.runner.require_nothing_to_skip("draw_ahead()")
        with self._stoppable("draw_ahead"), replaced(self, "_pause_after", pause_after):
            self.lab.position.take_up(self)
            self.lab.position.algorithm = self
            self.lab.runner.live.others[f"{type(self).__name__}.draw_ahead() by hand"] = None
            return self._draw_ahead()

    def _draw_ahead(self, **how: Any) -> Batch:
        once = self._once
        graph, pause_after = self._graph_with(once), self._pause_after
        return draw_ahead(self.lab, graph, lambda stage: self._has_run(stage, once), pause_after, **how)

    def restart(self) -> None:
        """Give up the current iteration: the next step begins another one, with new prompts.

        Its updates stay, also an update that was left between two optimizer steps. `finish` is not called. Its batches
        stay in `made` until the next step. If no update has begun, its rollouts from `lab.buffer` go back there.
        """
        with uninterrupted(), recording(self, "restart"):
            self._give_up()
            if self.lab.position.unfinished == (type(self).__name__, self.iteration):  # as the user knows
                self.lab.position.unfinished = self.lab.position.saved_algorithm = None

    def _give_up(self) -> None:
        """Do what `restart` does, without a record of it."""
        with uninterrupted():
            self.lab.buffer.waiting[:0] = self._from_buffer
            given_up, self._under_way, self._from_buffer = self._under_way, False, ()
            if given_up:
                self.lab.runner.interrupted.forget(behind=self._run_before)

    def _end(self) -> None:
        metrics = self.metrics()  # waits for the stages; until then the iteration is under way
        with uninterrupted(), self._quietly():
            self._under_way, self._from_buffer, self._ended = False, (), self._ended + 1
            self.lab.position.unfinished = self.lab.position.saved_algorithm = None
            inspect.unwrap(type(self).finish)(self, metrics)  # unchecked: metrics of a skipped step may be NaN
            self.lab.note_position()
        self.lab.save_if_due(self)

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Adapt fields after the last stage of an iteration, given its metrics. The base class does nothing."""

    def state(self) -> dict[str, Any]:
        """Return the fields that `finish` changes, as plain values, for checkpoints."""
        return {}

    def position(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Return the algorithm's position as plain values, for checkpoints and for the next kernel.

        made: the results of the current iteration's stages, in the form in which they are kept.
        """
        last = dict(self.lab.last_metrics) if made else {}  # a copy: concurrent stages add their metrics
        return {
            "class": type(self).__name__,
            "iteration": self.iteration,
            "state": self.state(),
            "fields": self._kept_fields(),
            "arguments": self._kept_arguments(),
            "under_way": bool(made),
            "made": dict(made),
            "last_metrics": {stage: dict(values) for stage, values in last.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        with self._quietly():
            for name, value in state.items():
                setattr(self, name, value)

    def resume_at(self, saved: Mapping[str, Any], made: Mapping[str, Any] | None) -> None:
        """Continue from `saved`, the `position` of an algorithm of this class. made: the results of the stages that had
        run in the current iteration; None between iterations."""
        self.was_restored, self._from_buffer = True, ()
        self._take_fields(saved.get("fields", {}))
        self._take_arguments(saved.get("arguments", {}))
        self.load_state(saved["state"])
        self._iteration = saved["iteration"]
        if made is not None:
            self.made.clear()
            self.made.update(made)
            self._under_way = True
            self._forget_behind_new_stages(self.graph())

    def _forget_behind_new_stages(self, graph: Graph) -> None:
        """Make the stages run again that take the batch of a stage which has not run: a changed field or `define` may
        add a stage in front of them. If one of them has updated a role, none runs again."""
        new = [stage for stage in graph.names if stage not in self.made]
        again = {name for stage in new for name in graph.downstream(stage) if name in self.made}
        if not any(graph[name].updates for name in again):
            for name in again:
                del self.made[name]

    def go_back(self, iteration: int) -> None:
        """Set the position to the end of an iteration; the next step begins the iteration after it."""
        self._under_way, self._from_buffer = False, ()
        self.made.clear()
        self._iteration = iteration
        self.was_restored = False

    def iterate(self) -> dict[str, float]:
        """Run the rest of the current iteration, or a new one, and return the metrics of its stages."""
        iterating = replaced(self.lab.runner.batches, "iterating", True)
        with iterating, recording(self, "iterate"), self._stoppable("iterate"):
            self.step()
            while self._under_way:
                self.step()
            return self.metrics()

    @contextmanager
    def _stoppable(self, call: str) -> Iterator[None]:
        """Make interrupts between two stages name the next stage, and all interrupts say if this cell can continue."""

        def left() -> tuple[str, str]:
            if not self._under_way:
                return f"iteration {self.iteration} has ended", "run the cell again to begin the next one"
            following = f"{self.next_stage} of iteration {self.lab.iteration} is next"
            return following, "run the cell again to continue with it"

        name = type(self).__name__
        try:
            with stoppable(f"{name}.{call}()", left):
                yield
        except StageInterrupted as error:
            if self._under_way and self._made_in is not None and self._made_in == running_cell():
                held = variable_of(self)
                goes_on = f"call {held}.{call}(...) in another cell" if held else "create it in a separate cell"
                error.remedy = f"running this cell again makes another {name}, which begins a new iteration: {goes_on}"
            raise

    def run(
        self,
        iterations: PositiveInt,
        *,
        staleness: NonNegativeInt = 0,
        pause_after: PositiveInt | None = None,
        evaluate: Callable[[], object] | None = None,
        every: PositiveInt = 1,
    ) -> pd.DataFrame:
        """Run n iterations and return a frame with one row per iteration. An iteration that `step` began, or that
        failed, is given up. An iteration is finished first, and counts, if a `run` was interrupted in it by stop or by
        the death of a host, if its update failed between two optimizer steps, or if it comes from a checkpoint.

        The frame's first columns are reward and its interval, KL, loss, gradient norm, clip fraction, response length.
        A notebook shows these with their curves, and folds the other columns; `frame.attrs["seconds"]` has the duration
        of each iteration.

        staleness: how many iterations generation runs ahead. At k, while iteration i trains, the rollouts of iteration
        i + k are generated, with the weights from before iteration i's update, and wait in `lab.buffer`. If rollout
        workers have their own pool, training and generation run at the same time; this does not change the draws or the
        metrics. Rollouts that wait when the run ends are used first by the next iterations, at any staleness. At 0
        nothing is generated ahead. See `Correction` for the effect of old rollouts on an update.

        pause_after: tokens after which a response that is generated ahead pauses. It waits in the buffer, and the next
        iteration resumes it, with the next weights, beside new responses (partial rollouts). So no iteration waits for
        the longest response; `token_versions` says which weights generated each token.

        A terminal shows the progress; the log of a script has one line per iteration.

        evaluate: called after each `every` iterations, for example `lambda: lab.evaluate(held_out)` or
        `lambda: lab.check().raise_if_failed()`.

        A resumed script counts the iterations before its checkpoint, and does not run them again.
        """
        if evaluate is not None:
            check_takes(evaluate, f"run(evaluate={shown(evaluate, 40)})", (), {})
        if staleness:
            check_can_run_ahead(self.graph())
        if pause_after is not None:
            if not staleness:
                raise BadInput(
                    f"pause_after={pause_after} with staleness=0",
                    "without staleness an iteration trains on the responses that it generates, which must be complete",
                    f"write run({iterations}, staleness=2, pause_after={pause_after})",
                )
            check_can_pause(self.graph())
        self.lab.take_edits(self)
        rows, seconds = [], []
        self.lab.position.take_up(self)
        saved = self.was_restored and self.lab.position.saved_algorithm is not None
        resumed = self._under_way and (self._interrupted or saved)
        passed = self.lab.passed_over(iterations)
        title = type(self).__name__
        recorded = recording(self, "run", resumed=resumed, staleness=staleness, pause_after=pause_after)
        with recorded, self._stoppable("run"), Iterations(title, iterations) as line:
            for number in range(passed + 1, iterations + 1):
                if not resumed:
                    self._give_up()
                resumed = False
                batches, runs = self.lab.runner.batches, self.lab.runner.counters.run
                looping, batches.looping, self._staleness = batches.looping, True, staleness
                self._pause_after = pause_after
                started_s = time.perf_counter()
                try:
                    with self.lab.overlap():
                        metrics = self.iterate()
                except BaseException as error:  # stages were only submitted: some results in `made` will never come
                    updates = {stage.name for stage in self.graph().stages if stage.updates}
                    sent = {name for name, made in self.made.items() if not isinstance(made, Run) or made.calls}
                    self._made = {name: made for name, made in self.made.items() if is_ready(made)}
                    self.lab.buffer.forget_unmade()
                    left = self.lab.runner.interrupted.unfinished.values()
                    begun = any(update.number > runs for update in left)  # includes updates that failed between steps
                    goes_on = begun or isinstance(error, StageInterrupted | KeyboardInterrupt | HostDied)
                    self._interrupted = self._under_way = self._under_way and goes_on
                    if updates & sent:
                        self._from_buffer = ()
                    if not self._under_way:
                        self._give_up()
                    raise
                finally:
                    batches.looping, self._staleness, self._pause_after = looping, 0, None
                self._give_up()
                seconds.append(time.perf_counter() - started_s)
                rows.append({"iteration": self.lab.iteration, **metrics})
                line.done(metrics)
                if evaluate is not None and number % every == 0:
                    with line.aside():
                        evaluate()
        return Results.of(rows, algorithm=title, seconds=seconds)

    def rollouts(self, lab: Lab, *, penalised: bool = False, reference: bool | None = None) -> tuple[Batch, bool]:
        """Run the first stages of an iteration, in `define`: prompts, responses, and the log-probabilities of the actor
        and of the reference. Reads the fields prompts, samples and sampling.

        Returns the batch, and whether `compute_log_prob` was left out, see `on_policy`. penalised: whether rewards have
        a KL penalty. reference: whether the reference's log-probabilities are needed; None: if penalised.
        """
        algorithm: Any = self
        batch = lab.prompts.next(algorithm.prompts)
        batch = lab.actor.generate_sequences(batch, samples=algorithm.samples, **asdict(algorithm.sampling))
        on_policy = self.on_policy(penalised=penalised)
        if not on_policy:
            batch = lab.actor.compute_log_prob(batch)
        if (penalised if reference is None else reference) or self._reads("ref_log_prob", "estimator", "loss"):
            batch = lab.reference.compute_ref_log_prob(batch)
        return batch, on_policy

    def on_policy(self, *, penalised: bool = False) -> bool:
        """Whether `define` may leave out `compute_log_prob`, because `update_actor` can use its own forward pass: true
        with one optimizer step per iteration, if nothing else reads `old_log_prob`.

        penalised: whether rewards have a KL penalty, which reads `old_log_prob`.
        """
        training = self.lab.actor.spec.training
        one_step = getattr(self, "epochs", 1) == 1 and (training is None or training.minibatches == 1)
        compares = isinstance(getattr(self, "loss", None), CovarianceLoss) or penalised
        compares |= self._reads("old_log_prob", "estimator")
        return one_step and not compares and getattr(self, "correction", None) is None

    def _reads(self, column: str, *fields: str) -> bool:
        """Whether a function of the user's in one of these fields needs a column, by its parameters' names."""
        given = (getattr(self, field, None) for field in fields)
        return any(callable(one) and column in ParameterNames.of(one).needed for one in given)

    def need(self, *roles: str) -> None:
        """Raise `BadInput` if the workbench lacks one of these roles, or the stages do not accept the fields' values.

        Call this at the end of `__post_init__`: it traces `define`, so that wrong arguments of operations raise in the
        constructor.
        """
        if not hasattr(self.lab, "groups"):
            raise BadInput(
                f"{type(self).__name__}({shown(self.lab)})",
                "its first argument must be a workbench",
                "give the workbench that wb.open(...) returned",
            )
        title = type(self).__name__
        if missing := [role for role in roles if role not in self.lab.groups]:
            penalty = missing == ["reference"] and hasattr(self, "kl_coefficient")
            without = ", or give kl_coefficient=0, which needs no reference" if penalty else ""
            if missing == ["reward"]:
                without = ", or add it: lab.add('reward', my_function)"
            raise BadInput(
                f"{title} on a workbench without {' and '.join(missing)}",
                f"it has {', '.join(self.lab.groups)}",
                f"open one with these roles in models={without}",
            )
        graph = self.graph()
        self._check_rows(graph)
        graph.check_corrections(title)
        self.lab.position.take_up(self)

    def _check_rows(self, graph: Graph) -> None:
        """Raise `BadInput` if prompts, samples or rows give batches that ranks and minibatches cannot divide."""
        counts = (f"{name}={getattr(self, name)}" for name in ("prompts", "samples", "rows") if hasattr(self, name))
        graph.check_rows(f"{type(self).__name__}({', '.join(counts)})", self._keep_rows)

    def metrics(self) -> dict[str, float]:
        """Wait for the newest iteration's stages and return their metrics as {"stage/metric": value}."""
        self.lab.runner.scheduler.wait()
        return {
            f"{stage}/{name}": value
            for stage, values in self.lab.last_metrics.items()
            for name, value in values.items()
        }


def is_ready(made: Any) -> bool:
    """Whether the result of a stage is there, not pending."""
    if isinstance(made, Batch):
        made.settle(wait=False)
        return not made.pending
    return not isinstance(made, Run) or made.state == "done"


GroupSize = Annotated[Whole, Field(ge=2)]  # samples per prompt, if the other samples are the baseline of each


@dataclass
class RolloutAlgorithm(Algorithm):
    """Base of PPO and of algorithms like it. The fields are described in `PPO`."""

    lab: Lab
    prompts: PositiveInt = 16
    samples: PositiveInt = 1
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | Mapping[str, Any] | None = None
    reward_weights: Mapping[str, Weight] | None = None
    epochs: PositiveInt = field(default=1, kw_only=True)
    correction: Correction | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.need("reward", *self._penalty_role)

    @property
    def _penalty_role(self) -> tuple[str, ...]:
        return ("reference",) if getattr(self, "kl_coefficient", 0) else ()
