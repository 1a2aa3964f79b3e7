"""The stepper: the stages of an iteration with their states, and buttons that run them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from html import escape
from typing import Any
from weakref import WeakValueDictionary

from workbench import algorithms
from workbench.algorithms import ALGORITHMS
from workbench.algorithms.graph import Graph, Stage
from workbench.display.graph import Mark, draw
from workbench.display.html import folded, seconds_text, table
from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown
from workbench_widgets import stage_form
from workbench_widgets.stage_form import times
from workbench_widgets.view import View, button, choice, entry, or_why, whole_number


def _fields(name: str) -> Mapping[str, Any]:
    return inspect.signature(getattr(algorithms, name)).parameters


def make_algorithm(name: str, lab: Any, like: Any) -> Any:
    """An algorithm with its defaults, but with the prompts and the sampling of the previous one. The number of samples
    is taken over only if it was above one, because some algorithms need several."""
    shared = [field for field in ("prompts", "samples", "sampling") if hasattr(like, field) and field in _fields(name)]
    given = {field: getattr(like, field) for field in shared if field != "samples" or like.samples > 1}
    make: Callable[..., Any] = getattr(algorithms, name)
    return make(lab, **given)


def fits(name: str, lab: Any, like: Any) -> bool:
    try:
        make_algorithm(name, lab, like)
    except BadInput:
        return False
    return True


def code_of(stage: Any, lab: Any) -> str:
    function = getattr(stage, "function", None)
    operation = getattr(function, "operation", None)
    if function is not None and operation is not None:
        function = getattr(function.group.worker_class, operation.name, None)
    elif function is None and stage.role in getattr(lab, "groups", {}):
        function = getattr(lab.groups[stage.role].worker_class, stage.name, None)
    if function is None:
        return "no source: a method of the batch, or of the prompts"
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return f"the source of {shown(function, 80)} is not on disk"


SIGNS = {
    "waiting": "\N{WHITE CIRCLE}", "running": "\N{BLACK RIGHT-POINTING TRIANGLE}", "done": "\N{CHECK MARK}",
    "failed": "\N{MULTIPLICATION X}", "stopped": "\N{BLACK SQUARE}", "not run": "\N{CIRCLED DIVISION SLASH}",
    "from the store": "\N{ANTICLOCKWISE OPEN CIRCLE ARROW}", "next": "\N{BLACK DIAMOND}",
}  # fmt: skip
BY_HAND = "by hand"
PEEKED_ROWS = 4


class Stepper(View):
    """The graph of an algorithm, or of the stages that cells call by hand, with each stage's state in
    this iteration."""

    name, title = "stepper", "Stepper"
    fields = ("arm",)

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self._algorithm: Any = None  # the one that was chosen; None: the one of the last step, in a cell or here
        self._like: Any = None  # whose sizes others take
        self._met: WeakValueDictionary[str, Any] = WeakValueDictionary()  # given, made here, or stepped in cells
        self.chosen = ""  # the stage that is looked at
        self.iterations: Any = 3  # as it was typed
        self.arm = ""
        self._looked: tuple[Hashable, str] = ((), "")
        self._comparison = ""
        self._fit: tuple[tuple[str, ...], list[str]] = ((), [])

    @property
    def algorithm(self) -> Any:
        """The algorithm to step; None if cells call stages by hand."""
        if self._algorithm is not None:
            return self._algorithm
        algorithm = self.lab.algorithm
        if algorithm is not None:
            self._met[type(algorithm).__name__] = algorithm
        return algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Any) -> None:
        self._algorithm = self._met[type(algorithm).__name__] = algorithm

    @property
    def iteration(self) -> int:
        """The shown iteration: the algorithm's last, or the workbench's."""
        algorithm = self.algorithm
        return self.lab.iteration if algorithm is None or not algorithm.iteration else int(algorithm.iteration)

    # --- what it shows ------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        runs = tuple((r.run, r.state, r.done_units) for r in self._calls())
        made, changes = tuple(self._made()), self.lab.runner.live.count
        return runs, made, id(self.algorithm), self.lab.iteration, bool(self.driver.busy), changes

    def controls(self) -> str:
        algorithm = self.algorithm
        none = "" if algorithm is not None else "choose an algorithm, or call stages in cells"
        names = {BY_HAND: BY_HAND, **{name: name for name in self._fitting()}}
        if algorithm is not None:
            names[type(algorithm).__name__] = type(algorithm).__name__
        chosen = BY_HAND if algorithm is None else type(algorithm).__name__
        next_stage = "" if algorithm is None else f": {algorithm.next_stage}"
        return (
            choice("algorithm", "choose_algorithm", names, chosen)
            + button(f"Step{next_stage}", "step", drives=True, off=none, title="run the next stage")
            + button("Iterate", "iterate", drives=True, off=none, title="run the rest of this iteration")
            + button("Run", "run", drives=True, off=none, title="run iterations, with overlap")
            + entry("iterations", "iterations", self.iterations, kind="number", size=4)
            + button("Give up iteration", "restart", drives=True, off=none, title="the next step begins another")
        )

    def html(self, *, live: bool) -> str:
        graph = self._graph()
        if graph is None:
            return (
                f"<p>{self._nothing()}. Call stages in cells, give this panel an algorithm "
                "(<code>lab.panel(algorithm=wb.PPO(lab))</code>), or choose one above.</p>"
            )
        marks = self._marks(graph)
        head = f"<div>{escape(self._where())}</div>"
        if self.iteration < self.lab.iteration:
            head += f"<div>Cells have begun iteration {self.lab.iteration} by hand; choose that above to see it.</div>"
        rows = [
            {"stage": one.name, "role": one.role, "state": marks[one.name].words, "after": ", ".join(one.inputs)}
            for one in graph.stages
        ]
        return (
            draw(graph, marks, live=live)
            + head
            + folded("The stages as a table", table(rows))
            + self._comparison
            + (self._details(graph) if live else "")
        )

    def text(self) -> str:
        graph = self._graph()
        if graph is None:
            return f"stepper: {self._nothing()}"
        return "\n".join(
            [f"{graph.title}, {self._where()}"]
            + [f"  {mark.sign} {name}: {mark.words}" for name, mark in self._marks(graph).items()]
        )

    def _where(self) -> str:
        """A text that says which iteration the states belong to."""
        algorithm = self.algorithm
        if algorithm is None or algorithm.iteration:
            return f"iteration {self.iteration}"
        last = f"; the last iteration is {self.lab.iteration}" if self.lab.iteration else ""
        return f"{type(algorithm).__name__} has begun no iteration here{last}"

    def _nothing(self) -> str:
        """Why there is no graph."""
        now = self.lab.iteration
        if any(not record.aside for record in self.lab.run_log.records()):
            return f"No stage has been called in iteration {now} yet"
        return (
            f"Iteration {now} is the last; this kernel has called no stage yet"
            if now
            else "There has been no stage yet"
        )

    def _calls(self) -> list[Any]:
        return [record for record in self.lab.run_log.records(self.iteration) if not record.aside]

    def _graph(self) -> Any:
        """The algorithm's graph, or a chain of the stages that cells called in this iteration; None if they called
        none."""
        if self.algorithm is not None:
            return self.algorithm.graph()
        stages: list[Stage] = []
        for record in self._calls():
            if record.stage not in [stage.name for stage in stages]:
                before = (stages[-1].name,) if stages else ()
                stages.append(Stage(name=record.stage, role=record.role, operation=record.stage, inputs=before))
        return Graph(f"what cells called in iteration {self.lab.iteration}", tuple(stages)) if stages else None

    def _records(self) -> dict[str, Any]:
        """The last call of each stage in this iteration, by the stage's name."""
        return {record.stage: record for record in self._calls()}

    def _marks(self, graph: Any) -> dict[str, Mark]:
        algorithm = self.algorithm
        # an iteration that has not begun has no finished stages: stages that cells called are not its own
        records = {} if algorithm is not None and not algorithm.iteration else self._records()
        made = self._made()
        following = "" if algorithm is None else algorithm.next_stage
        marks = {}
        for stage in graph.stages:
            record = records.get(stage.name)
            state, words, share = "waiting", "waiting", 0.0
            if record is not None:
                state = words = record.state
                if record.total_units:
                    share = record.done_units / record.total_units
                if state == "running" and record.total_units:
                    words = f"running {record.done_units}/{record.total_units}"
                elif state in ("done", "from the store"):
                    share = 0.0
                    if record.started_s:
                        words += f", {seconds_text(max(record.ended_s - record.started_s, 0.0))}"
            elif stage.name in made:
                state = words = "done"
            if stage.name == following and state == "waiting" and stage.name not in self._under_way():
                state = words = "next"
            marks[stage.name] = Mark(SIGNS[state], words, share, stage.name == self.chosen)
        return marks

    def _under_way(self) -> set[str]:
        return {r.stage for r in self._records().values() if r.state in ("waiting", "running")}

    # --- a stage that was chosen --------------------------------------------------------------------------------------

    def _details(self, graph: Any) -> str:
        names = [stage.name for stage in graph.stages]
        if self.chosen not in names:
            return '<div style="opacity:.75">Choose a stage for its arguments, batch, code and timing.</div>'
        record = self._records().get(self.chosen)
        stage = next(stage for stage in graph.stages if stage.name == self.chosen)
        key = (
            self.chosen,
            None if record is None else (record.run, record.state),
            self.lab.iteration,
            self.chosen in self._made(),
            self.lab.runner.live.count,
            self._is_to_run(self.chosen),
        )
        if self._looked[0] != key:
            self._looked = (key, self._look(stage, record))
        return self._looked[1]

    def _is_to_run(self, stage: str) -> bool:
        """Whether a change now still affects a stage: it has not run in the current iteration."""
        algorithm = self.algorithm
        ran = algorithm is None or (algorithm.under_way and stage in algorithm.made)
        return not ran and stage not in self._under_way()

    def _made(self) -> Mapping[str, Any]:
        return {} if self.algorithm is None else self.algorithm.made

    def _look(self, stage: Any, record: Any) -> str:
        parts = [f"<h4>{escape(stage.name)} on {escape(stage.role)}</h4>"]
        if record is not None:
            cell = f", called in cell [{record.cell}]" if record.cell else ""
            parts.append(f"<div>run {record.run}: {escape(record.state)}{cell} {escape(record.error)}</div>")
            parts.append(times(record, self.lab.spans(record.run)))
        if self.algorithm is not None:
            editable, running = self._is_to_run(stage.name), stage.name in self._under_way()
            parts.append(
                or_why(lambda: stage_form.form(self.algorithm, stage, self.lab, editable=editable, running=running))
            )
        batch = self._batch(stage, record)
        if batch is not None:
            parts.append(self._branch_from())
            parts.append(self._rows(batch))
        code = f'<pre style="max-height:24em;overflow:auto">{escape(code_of(stage, self.lab))}</pre>'
        parts.append(folded("code", code))
        return f'<section aria-label="{escape(stage.name)}">{"".join(parts)}</section>'

    def _batch(self, stage: Any, record: Any) -> Any:
        """The batch that the stage made in this iteration, if it is complete."""
        made = self._made().get(stage.name)
        if made is None and record is not None and record.batch:
            try:
                made = self.lab.batch(record.batch)
            except WorkbenchError:  # not kept
                return None
        return made if made is not None and hasattr(made, "peek") and not made.pending else None

    def _rows(self, batch: Any) -> str:
        try:
            frame = batch.peek(PEEKED_ROWS)
        except WorkbenchError as error:
            return f"<div>{escape(str(error))}</div>"
        shown = [{str(name): _short(value) for name, value in row.items()} for row in frame.to_dict("records")]
        return (
            f"{batch._repr_html_()}<div data-scrolls style='overflow-x:auto'>{table(shown, caption='first rows')}</div>"
        )

    def _branch_from(self) -> str:
        others = [name for name in self._fitting() if name != type(self.algorithm).__name__]
        if not others:
            return ""
        arm = self.arm if self.arm in others else others[0]
        told = "run the later stages with both, from the same weights, and compare; the present state stays unchanged"
        press = button("Branch from here", "branch", drives=True, title=told)
        return f"<div>{choice('against', 'arm', others, arm)} {press}</div>"

    def _fitting(self) -> list[str]:
        """Algorithms that this workbench can run with their default fields."""
        roles = tuple(self.lab.groups)
        if self._fit[0] != roles:  # to make them all takes a while
            draw = [name for name in ALGORITHMS if {"prompts", "sampling"} <= set(_fields(name))]
            self._fit = (roles, [name for name in draw if fits(name, self.lab, self.algorithm)])
        return self._fit[1]

    # --- actions ------------------------------------------------------------------------------------------------------

    def on_choose_algorithm(self, value: str) -> None:
        """Step another algorithm: the one stepped before, here or in a cell, or a new one with default
        fields; or none."""
        self._like = self.algorithm or self._like
        if value == BY_HAND:
            self._algorithm = self.lab.algorithm = None
            return
        self.algorithm = self._met.get(value) or make_algorithm(value, self.lab, self._like)

    def on_step(self) -> None:
        algorithm = self._need()
        name = algorithm.next_stage
        self.driver.start(f"step {name}", lambda: algorithm.step() and f"{name}: done")

    def on_iterate(self) -> None:
        algorithm = self._need()

        def steps() -> str:
            for name in algorithm.graph().names[algorithm.graph().names.index(algorithm.next_stage) :]:
                algorithm.step()
                if self.driver.stopping:
                    return f"stopped after {name}; Step continues from there"
            return f"iteration {self.lab.iteration}: done"

        self.driver.start(f"an iteration of {type(algorithm).__name__}", steps)

    def on_iterations(self, value: Any) -> None:
        self.iterations = value
        whole_number("iterations", value)

    def on_run(self) -> None:
        algorithm, wanted = self._need(), whole_number("iterations", self.iterations)

        def run() -> str:
            if algorithm.under_way:
                self.driver.busy = f"the rest of iteration {algorithm.iteration}"
                algorithm.iterate()
            for done in range(wanted):
                if self.driver.stopping:
                    return f"stopped after {done} of {wanted} iterations"
                self.driver.busy = f"{iterations} of {type(algorithm).__name__}, {done} done"
                try:
                    algorithm.run(1)
                except WorkbenchError:
                    if not self.driver.stopping:
                        raise
                    made = ", ".join(algorithm.made) or "no stage"
                    return f"stopped after {done} of {wanted} iterations; the next one has done {made}"
            return f"{iterations}: done"

        iterations = f"{wanted} iteration{'s' if wanted > 1 else ''}"
        self.driver.start(f"{iterations} of {type(algorithm).__name__}", run)

    def on_restart(self) -> None:
        self._need().restart()

    def on_choose(self, stage: str) -> None:
        self.chosen = "" if stage == self.chosen else stage

    def on_change(self, stage: str, argument: str, once: bool, value: str) -> None:
        """Set an argument of a stage to a value that the user typed."""
        self.driver.outcome = stage_form.change(self._need(), self.lab, stage, argument, value, once=once)

    def on_branch(self) -> None:
        graph = self._graph()
        stage = next((stage for stage in graph.stages if stage.name == self.chosen), None) if graph else None
        batch = None if stage is None else self._batch(stage, self._records().get(self.chosen))
        if batch is None:
            raise BadInput(f"branching from {self.chosen!r}", "it has made no batch in this iteration", "run it first")
        others = [name for name in self._fitting() if name != type(self.algorithm).__name__]
        other = self.arm if self.arm in others else others[0]
        arms = {} if self.algorithm is None else {type(self.algorithm).__name__: self.algorithm}
        arms[other] = make_algorithm(other, self.lab, self.algorithm)

        def branch() -> str:
            self._comparison = self.lab.compare(batch, arms)._repr_html_()
            return f"branched from {self.chosen}: {' and '.join(arms)} compared below"

        self.driver.start(f"branching from {self.chosen}", branch)

    def _need(self) -> Any:
        if self.algorithm is None:
            raise BadInput("a step", "this panel follows cells, and has no algorithm", "choose one above")
        return self.algorithm


def _short(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= 90 else value[:89] + "…"
