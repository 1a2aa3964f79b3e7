"""What the tests of saving run inside ranks of their own."""

from __future__ import annotations

from pathlib import Path

from tests.workers.update_ranks import context_here
from workbench.errors import WorkbenchError
from workbench.models.lora import LoRA
from workbench.models.spec import Model
from workbench.settings.engines import Generation, Training
from workbench.workers.roles.actor import ActorWorker


def save_here_and_there(folder: str, paths: list[str]) -> list[tuple[str, str]]:
    """For each path below `folder`, saving model and adapter there: (class of the error, message), or ("", path)."""
    generation = Generation(engine="transformers", check_sync=False)
    training = Training(engine="torch")
    spec = Model(name="tiny-llama", dtype="float32", training=training, generation=generation, adapter=LoRA(rank=2))
    worker, outcomes = ActorWorker(spec, context_here(folder)), []
    for path in paths:
        for save in (worker.save_model, worker.save_adapter):
            try:
                saved = save(Path(path, save.__name__))
                outcomes.append(("", str(Path(saved).relative_to(Path(folder).resolve()))))
            except WorkbenchError as error:
                outcomes.append((type(error).__name__, str(error)))
    return outcomes
