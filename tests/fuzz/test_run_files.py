"""Files of a run that are cut anywhere, or have a bit turned around: what is right in them is read,
or an error of ours says what is wrong; never another exception, or other numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.fuzz.damage import STEP, cut_and_flipped
from workbench.backends import journal_file
from workbench.batches.columns import Ragged
from workbench.comparisons.run_folder import RunFolder
from workbench.data.sources import read_rows
from workbench.errors import BadInput, WorkbenchError
from workbench.export.recorded import read_record
from workbench.telemetry.spans import Transfer
from workbench.telemetry.store import TelemetryStore
from workbench.telemetry.syncs import Sync

MOVED = Transfer(
    stage="compute_values", run=1, source="a-0", destination="b-0", columns="prompt_ids", bytes=8,
    start_s=1.0, end_s=2.0, kind="batch",
)  # fmt: skip

CHANGE = Sync(
    event="change", stage="changed", run=1, role="actor", rank=0, version=0, trained_version=1, start_s=1.0, end_s=2.0,
    changed={"model.norm.weight": ("model.norm", 0, 128, 64, 2, 0.5)},
)  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "reward": vowels}
    with tiny_lab("files", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
        lab.report("mine", {"mean": 1.5})
        more: dict[str, Any] = {"replace": {"update_actor": {"epochs": 2}}, "once": {}, "others": {"a move": None}}
        lab.telemetry.append_settings("PPO", 1, {"clip": 0.2, "stop": ["a"]}, **more, under_way=False)
        lab.telemetry.append_transfers([MOVED, MOVED])
        lab.telemetry.append_syncs([CHANGE, CHANGE])
        lab.reward.compute_reward(batch)
        yield lab


FRAMES: dict[str, Callable[[TelemetryStore], Any]] = {
    "spans": lambda store: (store.spans(), store.spans(1), store.chrome_trace(store.folder / "trace.json")),
    "transfers": lambda store: (store.transfers(), store.transfer_sums.frame(None)),
    "syncs": TelemetryStore.syncs, "changed": TelemetryStore.changed,
    "metrics": TelemetryStore.metrics, "memory": TelemetryStore.memory,
    "settings": lambda store: RunFolder(store.folder).changes(),
    "events": lambda store: (store.events(), store.lives(), read_record([store.folder])),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_telemetry(lab: wb.Workbench, tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.jsonl"
    source = lab.run_folder / path.name
    lines = source.read_bytes().splitlines(keepends=True) if source.exists() else []
    data = b"".join(line for line in lines if len(line) < 1000)[:1000]
    assert data
    for end in range(0, len(data), STEP):
        path.write_bytes(data[:end])
        FRAMES[name](TelemetryStore(tmp_path))


def test_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written: list[dict[str, Any]] = [{"number": 1, "sent": "a"}, {"number": 2, "over": {"mean": 0.5}}, {"number": 3}]
    for entry in written:
        journal_file.append(path, entry)
    whole = path.read_bytes()
    for damaged in cut_and_flipped(whole, STEP):
        path.write_bytes(damaged)
        read = list(journal_file.entries(path))
        assert all(entry in written for entry in read)
        if len(damaged) == len(whole):  # one bit is another: one entry at most is lost
            assert len(read) >= len(written) - 1


def test_batch_files(lab: wb.Workbench, tmp_path: Path) -> None:
    ids = Ragged.of([[5], [6, 7]], torch.int64)
    batch = lab.put({"prompt": ["a", "é"], "prompt_ids": ids, "rewards": [0.5, 1.5]}, meta={"note": 1})
    path = batch.save(tmp_path / "batch")
    whole = path.read_bytes()
    for damaged in cut_and_flipped(whole, STEP):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=str(path)):
            lab.load(path)
    path.write_bytes(whole)
    assert lab.load(path).df().equals(batch.df())


def test_checkpoints(lab: wb.Workbench, tmp_path: Path) -> None:
    saved = lab.save(tmp_path / "saved", models=False)
    for file in sorted(file for file in saved.folder.rglob("*") if file.is_file()):
        data = file.read_bytes()
        for damaged in cut_and_flipped(data, max(1, len(data) // (200 if STEP == 1 else 4))):
            file.write_bytes(damaged)
            with pytest.raises(WorkbenchError):
                wb.restore(saved.folder, name="again", backend="inline", runs=tmp_path)
        file.write_bytes(data)


def test_data_sets(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    data = "".join(json.dumps(row) + "\n" for row in ({"prompt": "1+1", "answer": 2}, {"prompt": "é", "answer": 3}))
    for damaged in cut_and_flipped(data.encode(), STEP):
        path.write_bytes(damaged)
        try:
            rows = read_rows(str(path))
        except WorkbenchError as error:
            assert str(path) in str(error) or "row" in str(error)  # noqa: PT017
        else:
            assert all(isinstance(row, dict) for row in rows)


CONFIGS: list[Any] = [
    [], 5, None, {}, {"model_type": "nobody"}, {"model_type": 5}, {"model_type": "llama", "num_attention_heads": 0},
    {"model_type": "llama", "num_attention_heads": "x"}, {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}},
    {"model_type": "llama", "vocab_size": -1},
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_model_folders(tmp_path: Path, config: Any) -> None:
    from workbench.models import resolve

    folder = tmp_path / "model"
    shutil.copytree(resolve(TINY), folder)
    whole = json.loads((folder / "config.json").read_text())
    changed = {**whole, **config} if isinstance(config, dict) and config else config
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(WorkbenchError):
        tiny_lab("model", tmp_path, backend="inline", models={"actor": folder, "reward": vowels}).close()
