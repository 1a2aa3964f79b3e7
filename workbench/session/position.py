"""The position of a run: the current algorithm, streams of examples, the checkpoint that the run continued from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.algorithms.buffer import Buffer
from workbench.algorithms.live_fields import as_read
from workbench.algorithms.loop import Algorithm
from workbench.batches.batch import Batch
from workbench.data.examples import ExampleStream
from workbench.messages.metrics import MetricValues
from workbench.session.checkpoint.files import Checkpoint
from workbench.stages.batch_store import BatchStore
from workbench.stages.ledger import Counters
from workbench.support.assigned import NoteChange


class Position:
    """checkpoint: the one that the run continued from. last_saved: this kernel's last one. saved_algorithm,
    saved_streams: saved positions that are not taken up yet. first_states: of algorithms, by class, at their first
    step. unfinished: the class of algorithm and the number of an iteration that is not over. noted: by class, the
    algorithm whose settings the run's record has last, and these settings. buffer: rollouts of later iterations.
    recovering: whether a recovery is putting roles back, or ended before it was done. passed_over: whether a resumed
    script has left out iterations."""

    def __init__(self, counters: Counters, batches: BatchStore, note_change: NoteChange) -> None:
        self._counters, self._batches = counters, batches
        self.buffer = Buffer(counters, note_change)
        self.checkpoint: Checkpoint | None = None
        self.last_saved: Checkpoint | None = None
        self.saved_algorithm: dict[str, Any] | None = None
        self.saved_streams: Sequence[dict[str, Any]] = ()
        self.unfinished: tuple[str, int] | None = None
        self.first_states: dict[str, dict[str, Any]] = {}
        self.noted: dict[str, tuple[Callable[[], Algorithm | None] | None, dict[str, Any]]] = {}
        self.recovering = self.passed_over = False
        self._algorithm: weakref.ref[Algorithm] | None = None
        self._streams: Sequence[weakref.ref[ExampleStream]] = ()

    @property
    def algorithm(self) -> Algorithm | None:
        """The algorithm that took the last step, or that continues its position, while a variable holds it: the batches
        that it made are released with it."""
        return None if self._algorithm is None else self._algorithm()

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm | None) -> None:
        self._algorithm = None if algorithm is None else weakref.ref(algorithm)

    def begin(self, algorithm: Algorithm) -> None:
        """Note that this algorithm takes a step, and say so if an iteration that is not over is left for another."""
        saved, title = self.saved_algorithm, type(algorithm).__name__
        if saved and saved["under_way"] and self._algorithm is None and saved["class"] != title:
            self.unfinished = saved["class"], saved["iteration"]
        left, iteration = self.unfinished or ("", -1)
        if iteration == self._counters.iteration and not algorithm.under_way:
            print(f"iteration {iteration} of {left} stays unfinished: {title} begins another")
        self.algorithm = algorithm

    def take_up(self, algorithm: Algorithm) -> None:
        """Have a new algorithm go on from the saved position of its class."""
        saved = self.saved_algorithm
        if saved is None or algorithm.was_restored or saved["class"] != type(algorithm).__name__:
            return
        algorithm.resume_at(saved, self._made(saved) if saved["under_way"] else None)
        self.algorithm = algorithm  # so that `recover` puts it back, even before its first step
        if saved["under_way"]:
            self.unfinished = saved["class"], saved["iteration"]
            metrics = {stage: MetricValues(values) for stage, values in saved["last_metrics"].items()}
            self._counters.last_metrics = metrics
        moved = ", ".join(f"{name}={value:.6g}" for name, value in saved["state"].items())
        now = algorithm.position({})  # settings that were assigned since stay
        given = {
            f"{stage}.{name}": value for stage, values in now["arguments"].items() for name, value in values.items()
        }
        fields = {name: as_read(value) for name, value in now["fields"].items() if name not in saved["state"]}
        assigned = ", ".join(f"{name}={value}" for name, value in {**fields, **given}.items())
        moved = ", ".join(filter(None, (moved, assigned and f"{assigned} (assigned)")))
        under_way, last = saved["under_way"], self._counters.iteration  # cells may have begun other iterations since
        where = f"in iteration {saved['iteration']}" if under_way else f"after iteration {last}"
        print(f"{saved['class']} continues {where}{f', with {moved}' if moved else ''}")

    def _made(self, saved: Mapping[str, Any]) -> dict[str, Batch | MetricValues]:
        """Return what the stages of the unfinished iteration had made."""
        made: dict[str, Batch | MetricValues] = {}
        for stage, value in saved["made"].items():
            if "metrics" in value:
                made[stage] = MetricValues(value["metrics"])
            elif (batch := self._batch(value)) is not None:
                made[stage] = batch
        return made

    def _batch(self, kept: Mapping[str, Any]) -> Batch | None:
        """Return a batch that is kept in a checkpoint, or that the previous kernel held; None where it is gone."""
        if "batch" in kept:
            assert self.checkpoint is not None
            path = self.checkpoint.folder / kept["batch"]
            self.checkpoint.require(path)
            return self._batches.load(path)
        return self._batches.get(kept["held"]) if kept["held"] in self._batches.store else None

    def fill_buffer(self, values: Mapping[str, Any]) -> None:
        """Load the rollouts that waited in a checkpoint or in the previous kernel, and the name of the function that
        gave their priority. values: has `buffer` and `priority`."""
        self.buffer.load(values["buffer"], values["priority"], self._batch)

    def put_back(self, algorithm: Algorithm) -> None:
        """Put the algorithm that this notebook holds back to its saved position."""
        algorithm.go_back(self._counters.iteration)
        if self.saved_algorithm is None:
            algorithm.load_state(self.first_states.get(type(algorithm).__name__, {}))
        self.take_up(algorithm)

    def add_stream(self, stream: ExampleStream) -> ExampleStream:
        """Save the position of this stream from now on, continue from the saved position of the same rows, if there is
        one, and return the stream."""
        self._streams = [*(known for known in self._streams if known() is not None), weakref.ref(stream)]
        self.put_back_stream(stream)
        return stream

    def put_back_stream(self, stream: ExampleStream) -> None:
        """Put a stream back to the saved position of the same rows, or to its start where none was saved."""
        stream.resume_if_same(stream.first)
        for state in self.saved_streams:
            if stream.resume_if_same(state):
                self.saved_streams = [other for other in self.saved_streams if other is not state]
                break

    def streams(self) -> list[ExampleStream]:
        return [stream for known in self._streams if (stream := known()) is not None]

    def reset(self) -> None:
        """Go back to the position of a workbench that was just opened."""
        self.saved_algorithm, self.saved_streams, self.checkpoint = None, (), None
        self.buffer.clear()
        self._counters.iterations_to_skip = 0
