"""`lab.syncs()` on live systems, healthy and broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.integration.test_weight_sync import drawn


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[wb.Workbench]:
    with tiny_lab("ledger", tmp_path, backend="inline", models={"actor": TINY}, training={"minibatches": 1}) as lab:
        yield lab


def worker(lab: wb.Workbench) -> Any:
    (host,) = cast(Any, lab.hosts.backend)._hosts.values()
    return host.workers["actor"]


def generate(lab: wb.Workbench) -> None:
    lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)


def update(lab: wb.Workbench) -> None:
    lab.actor.update_sft(lab.put(drawn(0)))


def test_a_healthy_system(lab: wb.Workbench) -> None:
    generate(lab)  # with the weights that both began with
    update(lab)
    generate(lab)
    generate(lab)
    with lab.kept("actor") as go_back:
        update(lab)
        generate(lab)
        go_back()
        generate(lab)  # version 2 of before the update is not that of after it
    ledger = lab.syncs()
    assert set(ledger["verdict"]) == {"ok"}
    events = ledger["event"].to_list()
    assert events == ["generation", *["sync", "generation"], "generation", *["sync", "generation"] * 2]
    synced = ledger[ledger["event"] == "sync"]
    trained = lab.weights["actor"].steps
    assert synced["trained_version"].to_list() == [trained, 2 * trained, trained]
    assert (ledger[["moved_bytes", "taken_bytes"]] == 0).all(axis=None)  # one rank, whose engine has its tensors


def test_a_sync_that_is_left_out(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker(lab), "_sync", lambda strategy=None: {})
    update(lab)
    generate(lab)
    (row,) = lab.syncs().to_dict("records")
    steps = lab.weights["actor"].steps
    assert row["verdict"] == "not synced"
    assert row["culprit"] == f"rank 0: its engine has weights version 0, the trainer's is {steps}"
    assert "lab.actor.sync_weights()" in row["remedy"]


def test_an_engine_that_forgets_what_it_was_given(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = worker(lab)
    sync = actor._sync

    def forgetful(strategy: str | None = None) -> Any:
        actor.generator.weights_version = -1
        return sync(strategy)

    monkeypatch.setattr(actor, "_sync", forgetful)
    update(lab)
    generate(lab)
    generate(lab)
    ledger = lab.syncs()
    assert ledger["verdict"].to_list() == ["ok", "ok", "synced twice", "ok"]
    twice = ledger.to_dict("records")[2]
    assert twice["culprit"] == f"generate_sequences: version {twice['version']} came with run {ledger['run'].min()}"
