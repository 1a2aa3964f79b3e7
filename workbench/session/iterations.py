"""Counts and begins iterations, for streams of prompts and for scripts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from workbench.batches.batch import Batch
from workbench.batches.columns import Table
from workbench.batches.schema import ScoredRows
from workbench.data.examples import Examples, ExampleStream, Kind
from workbench.data.sources import Source
from workbench.errors import BadInput, StageInterrupted, WorkbenchError
from workbench.session.checkpoint.checkpoints import Checkpoints
from workbench.session.position import Position
from workbench.session.topology import Topology
from workbench.stages.runner import StageRunner
from workbench.support.machine import return_freed_memory
from workbench.support.named_fields import KEYWORD, NAMED
from workbench.support.validation import NonNegativeInt, PositiveInt

_P = ParamSpec("_P")
_R = TypeVar("_R")
SCORING = ("compute_reward", "reweigh")
MEMORY_S = 0.5  # how long the start of an iteration waits for the hosts' memory readings


def _with_options(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Add the options of `Examples` to a method's signature, for help, Tab and the check of its arguments."""
    signature, of_examples = inspect.signature(method), inspect.signature(Examples).parameters
    options = [p for p in of_examples.values() if p.kind is KEYWORD and p.name not in ("tokenizer", "seed")]
    seed = of_examples["seed"].replace(default=None)  # that of the workbench
    own = [p for p in signature.parameters.values() if p.kind is not NAMED]
    vars(method)["__signature__"] = signature.replace(parameters=[*own, *options, seed])
    return method


class Iterations:
    """Begins iterations: for `PromptStream` and the streams of examples, as their `Feed`, and for loops by hand."""

    def __init__(self, runner: StageRunner, position: Position, checkpoints: Checkpoints, topology: Topology) -> None:
        self._runner, self._position, self._checkpoints = runner, position, checkpoints
        self._topology = topology

    @property
    def iteration(self) -> int:
        return self._runner.counters.iteration

    @property
    def next_iteration(self) -> int:
        """The number of the iteration that the next draw begins."""
        return self._runner.counters.next_iteration

    def check_ready(self) -> None:
        """Raise where no prompts can be put, or where another thread drives the workbench."""
        self._runner.groups.check_alive(self._runner.groups.lead)
        self._runner.check_driver()

    def before_iteration(self) -> None:
        """Save if `autosave` asks for it. Raises `BadInput` in a resumed script that would repeat iterations."""
        self._runner.require_nothing_to_skip("the next iteration")
        self._checkpoints.save_if_due()

    def begin_iteration(self, *, ahead: bool = False) -> None:
        self._runner.groups.check_alive(self._runner.groups.lead)
        return_freed_memory()
        counters = self._runner.counters
        counters.begin_iteration(ahead=ahead)
        self._position.saved_algorithm = None
        self._runner.telemetry.append_event("iteration", iteration=counters.iteration)
        with suppress(Exception):  # without it, a memory curve lacks one point
            self._topology.read_memory(MEMORY_S)

    def put(self, table: Table, *, meta: Mapping[str, Any], owner: str) -> Batch:
        return self._runner.batches.put(table, meta=meta, owner=owner)

    def note_drawn(self) -> None:
        """Record the position of the prompts, for a later kernel."""
        self._runner.ownership.record()

    def when_scored(self, tell: Callable[[Mapping[str, Any], Sequence[ScoredRows]], None]) -> None:
        self._runner.scores.append(tell)

    def wait_for_scores(self) -> None:
        """Wait for the stages under way that give rewards: the next draw may depend on rewards."""
        for run in [*self._runner.open_runs(), *self._runner.scheduler.open_runs()]:
            if run.stage in SCORING and not run.done:
                try:
                    run.wait()
                except StageInterrupted:
                    raise
                except WorkbenchError:
                    continue  # readers of the run's result get this error

    def note_change(self, setting: str, before: Any, after: Any) -> None:
        self._runner.live.note(setting, before, after)

    @_with_options
    def demonstrations(self, source: Source, **options: Any) -> ExampleStream:
        """Return prompts with responses to learn: `lab.demonstrations("sft.jsonl", held_out=100).next(64)` is a batch
        for `update_sft`. Rows and options: see `workbench.data.examples.Examples`; seed: None: the workbench's."""
        return self._stream(source, "demonstrations", options)

    @_with_options
    def feedback(self, source: Source, **options: Any) -> ExampleStream:
        """Return prompts with an answer and a label, whether it is good, for `update_kto`:
        `lab.feedback("rated.jsonl")`, with rows like {"prompt": ..., "response": ..., "label": true}. Options: see
        `lab.demonstrations`."""
        return self._stream(source, "feedback", options)

    @_with_options
    def pairs(self, source: Source, **options: Any) -> ExampleStream:
        """Return prompts with a chosen and a rejected answer, for `update_reward`, `update_cost`, `update_dpo`, ...:
        `lab.pairs("pairs.jsonl", held_out=200, max_tokens=512).next(64)`. Options: see `lab.demonstrations`."""
        return self._stream(source, "pairs", options)

    def _stream(self, source: Source, kind: Kind, options: Mapping[str, Any]) -> ExampleStream:
        seed, tokenizer = self._runner.hosts.description.seed, self._runner.batches.tokenizer
        stream = ExampleStream(self, source, kind, seed=seed, tokenizer=tokenizer, options=options)
        return self._position.add_stream(stream)

    def numbers(self, n: PositiveInt) -> Iterator[int]:
        """Yield the numbers 1 to n, for a loop of iterations by hand: `for _ in lab.iterations(100): ppo.iterate()`. In
        a resumed script, leave out the iterations that were made before."""
        for number in range(1 + self.passed_over(n), n + 1):
            before = self.iteration
            yield number
            if self.iteration != before + 1:
                raise BadInput(
                    f"turn {number} of lab.iterations({n}) began {self.iteration - before} iterations",
                    "each turn must be one iteration, so that a resumed script knows how many were made",
                    "use one loop for each algorithm, or count with range",
                )

    def passed_over(self, iterations: NonNegativeInt) -> int:
        """Return how many of `iterations` were made before the script was resumed; each is counted only once."""
        counters = self._runner.counters
        passed = min(iterations, counters.iterations_to_skip)
        counters.iterations_to_skip -= passed
        self._position.passed_over |= passed > 0
        return passed
