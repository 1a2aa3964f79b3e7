"""`wb serve`: the policy of a checkpoint behind an OpenAI-compatible server, from the command line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.conversations.endpoint import Endpoint
from workbench.launch.evaluating import opened_checkpoint
from workbench.settings.engines import Sampling

LOOK_S = 0.5


def serve_checkpoint(
    path: str | Path, *, sampling: Mapping[str, Any], backend: str, ready: Callable[[Endpoint], None]
) -> None:
    """Open what a checkpoint holds, in processes of its own, and serve its actor until Ctrl-C, or SIGTERM.

    ready: called once it takes requests. Raises `BadInput` for a checkpoint that is not trusted, as its code would run.
    """
    drawn = Sampling(**sampling)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        opened_checkpoint("serve", path, backend=backend, runs=None) as lab,
        lab.serve(sampling=drawn) as endpoint,
    ):
        ready(endpoint)
        while endpoint.is_open:
            threading.Event().wait(LOOK_S)
