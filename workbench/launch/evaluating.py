"""`wb evaluate` and `wb serve`: evaluate a checkpoint on data, or serve it, from the command line."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from workbench.checks.compare_evaluations import Evaluation
from workbench.conversations.endpoint import Endpoint
from workbench.data import verifiers
from workbench.errors import BadInput
from workbench.launch.opening import restore
from workbench.session.checkpoint import find_checkpoint
from workbench.settings.engines import Sampling
from workbench.support.named_fields import remedy_for

if TYPE_CHECKING:
    from workbench.controller import Workbench

LOOK_S = 0.5
TRAINED_ON = "training prompts"
VERIFIERS = ("arithmetic", "gsm8k", "math", "instructions", "code", "format")


def evaluate_checkpoint(
    path: str | Path, data: Sequence[str], *, n: int | None, samples: int, sampling: Mapping[str, Any], seed: int,
    reward: str | None, threshold: float, backend: str, runs: str | None,
) -> Evaluation:  # fmt: skip
    """Open a checkpoint's workbench, in processes of its own, evaluate it, and close it.

    data: names, files or hub ids, with the chat format of the checkpoint's prompts; empty: the prompts that it was
    trained on. reward: a verifier of `wb.verifiers` in place of the checkpoint's own. runs: where to keep the run
    folder; None: it is deleted, so that `wb.runs()` has only training. Raises `BadInput` for a checkpoint that is not
    trusted, because its code would run.
    """
    drawn = Sampling(**sampling)
    function = None if reward is None else verifier(reward)
    with opened_checkpoint("evaluate", path, backend=backend, runs=runs) as lab:
        source = lab.description.prompts
        if not data and source is None:
            raise BadInput(f"wb evaluate {path} without data", "the checkpoint has no prompts", "give a data set")
        sets = {one: one for one in data} or {TRAINED_ON: source}
        return lab.evaluate(sets, samples=samples, sampling=drawn, n=n, reward=function, threshold=threshold, seed=seed)  # type: ignore[return-value]


@contextmanager
def opened_checkpoint(purpose: str, path: str | Path, *, backend: str, runs: str | None) -> Iterator[Workbench]:
    """Open a checkpoint's workbench, under a new name, and close it afterwards. runs: where to keep its run folder;
    None: the folder is deleted."""
    checkpoint = find_checkpoint(path)
    name = f"{purpose}-{secrets.token_hex(3)}"
    with (
        nullcontext(runs) if runs is not None else TemporaryDirectory() as folder,
        restore(checkpoint.folder, name=name, backend=backend, runs=folder, save_every=None) as lab,
    ):
        yield lab


def verifier(name: str) -> Any:
    if name not in VERIFIERS:
        rule = f"the verifiers are {', '.join(VERIFIERS)}"
        raise BadInput(f"--reward {name}", rule, remedy_for(name, VERIFIERS, "--reward {}".format))
    return getattr(verifiers, name)


def serve_checkpoint(
    path: str | Path, *, sampling: Mapping[str, Any], backend: str, ready: Callable[[Endpoint], None]
) -> None:
    """Open a checkpoint's workbench, in processes of its own, and serve its actor until Ctrl-C or SIGTERM.

    ready: called when it takes requests. Raises `BadInput` for a checkpoint that is not trusted: its code would run.
    """
    drawn = Sampling(**sampling)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with opened_checkpoint("serve", path, backend=backend, runs=None) as lab, lab.serve(sampling=drawn) as endpoint:
        ready(endpoint)
        while endpoint.is_open:
            threading.Event().wait(LOOK_S)
