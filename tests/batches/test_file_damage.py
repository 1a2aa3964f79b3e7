"""Batch files that were damaged or written by somebody else: refused, or what was saved; never other numbers. Damage at
every byte: `tests/fuzz/test_run_files.py`."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.batches.files import FORMAT, ZEROS, _digests
from workbench.errors import BadInput, StageInterrupted

TABLE: Table = {
    "prompt_ids": Ragged.of([[5], [6, 7]], torch.int64), "rewards": torch.tensor([0.25, -1.5]), "text": ["a", "éé"],
}  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("damage", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY}) as lab:
        yield lab


@pytest.fixture(scope="module")
def saved(lab: wb.Workbench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lab.put(TABLE, meta={"iteration": 3}).save(tmp_path_factory.mktemp("files") / "whole")


def bits(table: Table) -> Any:
    return {
        name: column if isinstance(column, list) else [part.numpy().tobytes() for part in vars(column).values()]
        if isinstance(column, Ragged) else column.numpy().tobytes()
        for name, column in table.items()
    }  # fmt: skip


def loads_rightly(lab: wb.Workbench, path: Path) -> bool:
    """Whether it loads, and then as it was saved; False where it is refused."""
    try:
        batch = lab.load(path)
    except BadInput as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert path.name in refused
        return False
    assert bits(batch.fetch()) == bits(TABLE) and dict(batch.meta) == {"iteration": 3}
    return True


def written(path: Path, saved: Path, header: Any) -> Path:
    """A file by somebody who knows the format: its digest is right."""
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(load_file(saved), path, metadata={"workbench": text, "sha256": ZEROS})
    with path.open("r+b") as file:
        place, _, digest = _digests(file)
        file.seek(place)
        file.write(digest.encode())
    return path


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["workbench"])
    return found


OTHER_HEADERS: list[Callable[[dict[str, Any]], Any]] = [
    lambda h: "no json", lambda h: "[1]", lambda h: "[" * 100_000, lambda h: {**h, "rows": 0},
    lambda h: {**h, "rows": "2"}, lambda h: {**h, "columns": {"rewards": "matrix"}}, lambda h: {**h, "meta": [1]},
    lambda h: {**h, "vocabulary": {"name": "x"}}, lambda h: {**h, "more": 1},
    lambda h: {name: value for name, value in h.items() if name != "columns"},
]  # fmt: skip


def test_headers_of_somebody_else(lab: wb.Workbench, saved: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    assert loads_rightly(lab, written(tmp_path / "same", saved, header_of(saved)))
    for change in OTHER_HEADERS:
        with subtests.test(change=change):
            assert not loads_rightly(lab, written(tmp_path / "other", saved, change(header_of(saved))))
    save_file(load_file(saved), tmp_path / "plain")
    with expect_error(BadInput, value="is a safetensors file, but not a batch"):
        lab.load(tmp_path / "plain")


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1, "3", None])
def test_another_format_says_so(lab: wb.Workbench, saved: Path, tmp_path: Path, version: Any) -> None:
    with expect_error(BadInput, value=f"a batch of format {version!r}", rule=f"reads format {FORMAT}"):
        lab.load(written(tmp_path / "other", saved, {**header_of(saved), "format": version}))


def test_other_numbers_are_seen(lab: wb.Workbench, saved: Path, tmp_path: Path) -> None:
    damaged = bytearray(saved.read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with expect_error(BadInput, value="its bytes have changed"):
        lab.load(tmp_path / "damaged")


def test_an_interrupt_leaves_the_old_file_or_the_whole_new_one(
    lab: wb.Workbench, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = tmp_path / "batch", signal.signal(signal.SIGINT, signal.default_int_handler)
    path.write_bytes(saved.read_bytes())

    def pressed(*args: Any, **kwargs: Any) -> None:
        save_file(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("workbench.batches.files.save_file", pressed)
    try:
        with expect_error(
            StageInterrupted, value=r"^batch\.save\(\) was interrupted", rule="complete, or as it was before"
        ):
            lab.put({"rewards": torch.ones(2)}).save(path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]
    assert loads_rightly(lab, path)
