"""Batch files that were damaged, cut or written by somebody else: refused, or what was saved; never other numbers."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
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


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_flipped_bit_anywhere_is_seen(lab: wb.Workbench, saved: Path, tmp_path: Path, step: int) -> None:
    whole, path = saved.read_bytes(), tmp_path / "flipped"
    assert loads_rightly(lab, saved)
    harmless = []
    for place in range(0, len(whole), step):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        if loads_rightly(lab, path):
            harmless.append(place)
    assert len(harmless) < 8, harmless  # the padding of the header, which says nothing


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_file_that_was_cut_anywhere_is_refused(lab: wb.Workbench, saved: Path, tmp_path: Path, step: int) -> None:
    whole, path = saved.read_bytes(), tmp_path / "cut"
    for length in range(0, len(whole), step):
        path.write_bytes(whole[:length])
        assert not loads_rightly(lab, path), length


def written(path: Path, saved: Path, header: Any, *, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A file by somebody who knows the format: the header's digest is right."""
    text = header if isinstance(header, str) else json.dumps(header)
    texts = {"workbench": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    save_file(load_file(saved) if tensors is None else tensors, path, metadata=texts)
    return path


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["workbench"])
    return found


OTHER_HEADERS: list[Callable[[dict[str, Any]], Any]] = [
    lambda h: "no json", lambda h: "[1]", lambda h: "null", lambda h: "{}", lambda h: "[" * 100_000,
    lambda h: {**h, "format": "2"}, lambda h: {**h, "format": None}, lambda h: {**h, "format": 0},
    lambda h: {**h, "format": 3}, lambda h: {**h, "rows": 0}, lambda h: {**h, "rows": -1},
    lambda h: {**h, "rows": 10**12}, lambda h: {**h, "rows": "2"}, lambda h: {**h, "columns": []},
    lambda h: {**h, "columns": {}}, lambda h: {**h, "columns": {"rewards": "matrix"}},
    lambda h: {**h, "columns": {**h["columns"], "rewards": "ragged"}},
    lambda h: {**h, "columns": {**h["columns"], "rewards": "list"}},
    lambda h: {**h, "columns": {**h["columns"], "text": "tensor"}},
    lambda h: {**h, "columns": {**h["columns"], "more": "tensor"}}, lambda h: {**h, "meta": [1]},
    lambda h: {**h, "meta": {"iteration": "x"}}, lambda h: {**h, "vocabulary": "x"},
    lambda h: {**h, "vocabulary": {"name": "x"}}, lambda h: {**h, "digests": {}},
    lambda h: {**h, "digests": dict.fromkeys(h["digests"], 5)}, lambda h: {**h, "more": 1},
    lambda h: {name: value for name, value in h.items() if name != "digests"},
]  # fmt: skip


def test_headers_of_somebody_else(lab: wb.Workbench, saved: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    for change in OTHER_HEADERS:
        with subtests.test(change=change):
            assert loads_rightly(lab, written(tmp_path / "same", saved, header_of(saved)))
            assert not loads_rightly(lab, written(tmp_path / "other", saved, change(header_of(saved))))


def test_a_later_format_says_so(lab: wb.Workbench, saved: Path, tmp_path: Path) -> None:
    with expect_error(BadInput, value="a batch of format 3", remedy="use the version of workbench that saved it"):
        lab.load(written(tmp_path / "later", saved, {**header_of(saved), "format": 3}))


def old(saved: Path, path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A file of the format that had no digests."""
    header = {name: value for name, value in header_of(saved).items() if name != "digests"} | {"format": 1}
    save_file(tensors, path, metadata={"workbench": json.dumps(header)})
    return path


def test_an_old_file_is_read_with_a_note(
    lab: wb.Workbench, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = old(saved, tmp_path / "old", load_file(saved))
    assert loads_rightly(lab, path)
    assert f"{str(path)!r} was saved without digests" in capsys.readouterr().out
    lab.load(saved)
    assert "digests" not in capsys.readouterr().out


OTHER_TENSORS: list[tuple[str, torch.Tensor, str]] = [
    ("prompt_ids.values", torch.tensor([5, 6, -1]), "token id -1 in row 1"),
    ("prompt_ids.values", torch.tensor([5, 6, 264]), "token id 264 in row 1.*ids 0 to 263"),
    ("prompt_ids.values", torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64), "'prompt_ids' is float64.*int64"),
    ("prompt_ids.lengths", torch.tensor([1, 1]), "rows of 'prompt_ids' do not add up"),
    ("prompt_ids.lengths", torch.tensor([1, 2], dtype=torch.int32), "'prompt_ids.lengths' is I32"),
    ("prompt_ids.lengths", torch.tensor([1, 2, 0]), r"'prompt_ids.lengths' is I64 \[3\] in a batch of 2 rows"),
    ("rewards.values", torch.ones(3), r"'rewards.values' is F32 \[3\] in a batch of 2 rows"),
    ("rewards.values", torch.tensor(1.0), r"'rewards.values' is F32 \[\]"),
    ("text.values", torch.tensor([34, 97, 34, *[255] * 14], dtype=torch.uint8), "column 'text' is no JSON"),
]


def test_tensors_of_somebody_else(lab: wb.Workbench, saved: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name, values, message in OTHER_TENSORS:
        with subtests.test(name=name, values=values):
            with pytest.raises(BadInput, match=message):
                lab.load(old(saved, tmp_path / "old", {**load_file(saved), name: values}))
            with expect_error(BadInput, value="is damaged"):
                lab.load(written(tmp_path / "new", saved, header_of(saved), tensors={**load_file(saved), name: values}))


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
            StageInterrupted, value=r"^batch\.save\(\) was interrupted", rule="as a whole, or not at all"
        ):
            lab.put({"rewards": torch.ones(2)}).save(path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]
    assert loads_rightly(lab, path)
