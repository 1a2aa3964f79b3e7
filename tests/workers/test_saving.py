"""Ranks save together: all of them or none, and they stay usable where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.training_ranks import run_ranks
from tests.workers.update_ranks import context_here
from workbench.errors import WorkbenchError
from workbench.models import resolve
from workbench.models.lora import LoRA
from workbench.models.spec import Model
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.workers.roles.actor import ActorWorker


@pytest.mark.slow
def test_where_the_first_rank_cannot_write_all_ranks_raise_and_go_on(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    resolve("tiny-llama")  # made here, before there are ranks
    (tmp_path / "file").write_text("no folder")
    one, other = run_ranks(save_here_and_there, 2, str(tmp_path), ["file", "free", "free"])
    assert one == other
    for kind, message in one[:2]:
        assert kind == "WriteFailed"
        assert "nothing was saved to" in message
        assert "File exists" in message
    assert one[2:4] == [("", "free/save_model"), ("", "free/save_adapter")]
    assert [kind for kind, _ in one[4:]] == ["BadInput"] * 2
    assert (tmp_path / "free" / "save_model" / "config.json").is_file()
    assert (tmp_path / "free" / "save_adapter" / "adapter_config.json").is_file()


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
