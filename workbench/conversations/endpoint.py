"""`lab.serve()` serves the live actor through an OpenAI-compatible server."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from workbench.algorithms.lab import Lab
from workbench.conversations.rows import row_table
from workbench.data.agent_calls import STOP, EndpointCall, read_address
from workbench.errors import BadInput, RolloutError, StageError
from workbench.settings.engines import Sampling
from workbench.workers.agents.requests import MODEL

NAME, POLL_S, LONGEST_S = "lab.serve()", 0.02, 10.0**9
STARTS_WITHIN_S = 300.0  # long, because an engine may have to load first


class Endpoint:
    """An open endpoint: `base_url`, `api_key`, and `model`, the model name for requests.

    Its repr does not contain the key. `close()`, or the end of a `with` block, closes the endpoint; then stages can run
    again. weights_version: the actor's weights version, in optimizer steps.
    """

    model = MODEL

    def __init__(self, lab: Lab, sampling: Sampling) -> None:
        self._lab, self._sampling = lab, sampling
        self._folder = Path(tempfile.mkdtemp(prefix="workbench-serve-"))  # a folder that only this user can enter
        self._error: Exception | None = None
        self.base_url = self.api_key = ""
        weights = lab.runner.counters.weights.get("actor")
        self.weights_version = 0 if weights is None else weights.steps
        self._thread = threading.Thread(target=self._work, name="workbench-endpoint", daemon=True)

    def start(self) -> None:
        """Open the endpoint; return when it accepts requests. Raises the error that prevented this."""
        self._thread.start()
        until = time.monotonic() + STARTS_WITHIN_S
        try:
            while (found := read_address(self._folder)) is None:
                ended = not self._thread.is_alive()
                if ended or time.monotonic() > until:
                    raise self._error or StageError(
                        "lab.serve() ended at once" if ended else f"lab.serve() did not open in {STARTS_WITHIN_S:g} s",
                        "the serving rank of the actor must be on this machine, and see its temporary folder",
                        "open the workbench with the actor on this machine",
                    )
                time.sleep(POLL_S)
        except BaseException:
            self._end()
            raise
        self.base_url, self.api_key = found
        self._lab.before_close(self._end)

    def _work(self) -> None:
        """Run the stage that serves requests. It blocks other stages until the endpoint closes."""
        lab, call = self._lab, EndpointCall(str(self._folder), os.getpid())
        try:
            with lab.runner.driving(NAME), lab.runner.isolated("serve"):
                batch = lab.put(row_table(lab, "serve"))
                options = {**vars(self._sampling), "agent": call, "call_timeout_s": LONGEST_S, "most_failed": 1.0}
                run = lab.actor.generate_sequences.submit(batch, **options)
                run.join()
                if run.state == "failed":
                    run.result()  # raises
        except RolloutError as error:
            self._error = None if self.base_url else error  # after opening, it only means that there was no request
        except Exception as error:
            self._error = error

    def close(self) -> None:
        """Close the endpoint and drop waiting requests. Closing twice is fine. Raises the error that had ended it."""
        self._end()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end(self) -> None:
        if not self._folder.is_dir():
            return
        (self._folder / STOP).touch()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_open(self) -> bool:
        """Whether the endpoint accepts requests."""
        return self._thread.is_alive()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    def __repr__(self) -> str:
        if not self.is_open:
            return "Endpoint(closed)"
        sampled = f"temperature={self._sampling.temperature}, max_new_tokens={self._sampling.max_new_tokens}"
        return f"Endpoint({self.base_url}, model={self.model!r}, weights_version={self.weights_version}, {sampled})"


def serve(lab: Lab, *, sampling: Sampling | None = None) -> Endpoint:
    """Serve the actor, with its present weights, to any client of OpenAI's API.

        with lab.serve(sampling=wb.Sampling(temperature=0, max_new_tokens=256)) as endpoint:
            client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
            client.chat.completions.create(model=endpoint.model, messages=[{"role": "user", "content": "2 + 3?"}])

    The server listens on the loopback interface of the machine of the actor's rank, which must be this machine, and
    answers only requests with its key. The actor's own generation engine answers requests together. sampling: how
    answers are sampled; None: `wb.Sampling()`. A request may set `max_tokens`, up to max_new_tokens, and `stop`,
    `tools`, `stream`; a request for other sampling is refused.

    While the endpoint is open, no stage can be called. After `close()`, training continues with the same numbers as
    without the endpoint. To serve a checkpoint, use `wb serve CHECKPOINT`. Raises `BadInput` without an actor, and for
    a sampling with an agent or an environment.
    """
    sampling = Sampling() if sampling is None else sampling
    if sampling.agent is not None or sampling.environment is not None:
        raise BadInput(
            "lab.serve(sampling=) with an agent or environment", "clients ask for each turn themselves", "leave it out"
        )
    if "actor" not in lab.groups:
        raise BadInput("lab.serve() without an actor", "the actor answers the clients", "open one with an actor")
    lab.runner.check_driver()
    lab.actor.operations["generate_sequences"].arguments((), dict(vars(sampling)))
    endpoint = Endpoint(lab, sampling)
    endpoint.start()
    return endpoint
