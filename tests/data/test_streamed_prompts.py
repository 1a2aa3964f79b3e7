from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.data import readers, sources, streamed_prompts
from workbench.data.sources import blocks_of
from workbench.data.streamed_prompts import StreamedPrompts
from workbench.errors import BadInput
from workbench.models import load_tokenizer

COUNT = 300


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and windows of a few rows, so that small files have many."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 500)
    monkeypatch.setattr(sources, "BLOCK_ROWS", 64)
    monkeypatch.setattr(readers, "READ_ROWS", 16)
    monkeypatch.setattr(streamed_prompts, "WINDOW", 16)


def rows(count: int = COUNT) -> Iterator[dict[str, Any]]:
    for n in range(count):
        yield {"prompt": f"{n}{'字' * (n % 7)}", "answer": str(n)}


def source_of(folder: Path, kind: str) -> Any:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows()), encoding="utf-8")
        return str(path)
    if kind == "csv":
        path.write_text("prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in rows()))
        return path
    if kind == "function":
        return rows
    if kind == "split":
        datasets = pytest.importorskip("datasets")
        if not hasattr(datasets, "Dataset"):
            pytest.skip("the datasets library is not installed")
        return datasets.Dataset.from_list(list(rows()))
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist(list(rows()))
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=70)
    elif kind == "arrow":
        with path.open("wb") as file, ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=40)
    else:
        with path.open("wb") as file, ipc.new_file(file, table.schema) as whole:
            whole.write_table(table, max_chunksize=40)
    return path


KINDS = ("jsonl", "csv", "function", "split", "parquet", "arrow", "feather")


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_hold_each_row_once_in_order(tmp_path: Path, kind: str) -> None:
    source = blocks_of(source_of(tmp_path, kind))
    found = [placed for block in range(source.count) for placed in source.read(block)]
    assert [placed.row for placed in found] == list(rows())
    assert (source.count > 3) == (kind not in ("csv", "function", "arrow"))
    assert source.rows in (None, COUNT) and [p.number for p in found] == sorted(p.number for p in found)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_hands_out_each_row_once_and_can_be_resumed_anywhere(
    tmp_path: Path, tokenizer: Any, kind: str, shuffle: bool
) -> None:
    source = source_of(tmp_path, kind)
    prompts = StreamedPrompts(source, tokenizer=tokenizer, shuffle=shuffle, seed=3)
    told, states = [], []
    for _ in range(2 * COUNT // 10):
        states.append(json.loads(json.dumps(prompts.state_dict())))
        told += [row.extra["answer"] for row in prompts.next(10)]
    expected = [str(n) for n in range(COUNT)]
    epochs = told[:COUNT], told[COUNT:]
    assert all(sorted(epoch, key=int) == expected for epoch in epochs)
    assert (told == expected * 2) is not shuffle and (epochs[0] == epochs[1]) is not shuffle
    for place in (0, 1, 13, 29, 30, 47):
        again = StreamedPrompts(source, tokenizer=tokenizer, shuffle=shuffle, seed=3)
        again.load_state_dict(states[place])
        assert [row.extra["answer"] for row in again.next(40)] == told[10 * place : 10 * place + 40]
    other = StreamedPrompts(source, tokenizer=tokenizer, shuffle=shuffle, seed=4)
    with expect_error(BadInput, value="differ in seed"):
        other.load_state_dict(states[1])


def test_another_file_is_not_resumed(tmp_path: Path, tokenizer: Any) -> None:
    path = Path(source_of(tmp_path, "jsonl"))
    state = StreamedPrompts(path, tokenizer=tokenizer).state_dict()
    path.write_text(path.read_text().replace('"answer": "0"', '"answer": "9"'))
    with expect_error(BadInput, value="differ in source"):
        StreamedPrompts(path, tokenizer=tokenizer).load_state_dict(state)


def test_bad_and_long_rows_are_counted_as_they_come(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    long = json.dumps({"prompt": "x" * 200})
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": \n{long}\n[]\n{{"prompt": " "}}\n{{"prompt": "b"}}\n')
    options: dict[str, Any] = {"tokenizer": tokenizer, "shuffle": False, "max_prompt_tokens": 100}
    prompts = StreamedPrompts(path, bad_rows="skip", **options)
    assert [row.prompt for row in prompts.next(2)] == ["a", "b"]
    assert (prompts.dropped, prompts.skipped.total) == (1, 3)
    assert ["byte 16" in prompts.skipped[0], "type list" in prompts.skipped[1], "is empty" in prompts.skipped[2]]
    assert "3 bad skipped" in repr(prompts) and "1 over 100 tokens dropped" in prompts.summary
    strict = StreamedPrompts(path, **options)
    for _ in range(2):  # nothing is drawn by a call that fails
        with expect_error(BadInput, value="rows.jsonl, the line at byte 16"):
            strict.next(2)
    assert strict.position == 0


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_that_were_skipped_are_counted_once(tmp_path: Path, tokenizer: Any, kind: str, shuffle: bool) -> None:
    """Wherever a stream is resumed, and however often it is shown."""
    path = tmp_path / f"rows.{kind}"
    good, bad = ('{{"prompt": "{n}"}}', '{{"prompt": {n}') if kind == "jsonl" else ("{n},a", "{n},a,b,c")
    lines = [(bad if n % 3 == 1 else good).format(n=n) for n in range(120)]
    path.write_text("\n".join((["prompt,answer"] if kind == "csv" else []) + lines))
    options: dict[str, Any] = {"tokenizer": tokenizer, "shuffle": shuffle, "bad_rows": "skip"}
    prompts = StreamedPrompts(path, **options)
    states, counts, rows = [], [], []
    for _ in range(80):
        states.append(json.loads(json.dumps(prompts.state_dict())))
        assert "bad skipped" in prompts._repr_html_() or not prompts.skipped
        rows += [row.prompt for row in prompts.next(1)]
        counts.append(prompts.skipped.total)
    assert len(set(rows)) == 80 and counts == sorted(counts)
    prompts.next(1)  # of the next epoch, so that all of the first was read
    first = prompts.skipped.total
    for place in (0, 1, 15, 16, 17, 40, 79):
        again = StreamedPrompts(path, **options)
        again.load_state_dict(states[place])
        assert again.skipped.total == states[place]["counts"]["skipped"]
        assert [again.next(1)[0].prompt for _ in range(80 - place)] == rows[place:]
        assert again.skipped.total == counts[-1]
        again.next(1)
        assert again.skipped.total == first


def test_a_source_without_a_prompt_that_fits_is_no_endless_search(tmp_path: Path, tokenizer: Any) -> None:
    with expect_error(BadInput, value="holds only prompts over 3 tokens"):
        StreamedPrompts(source_of(tmp_path, "jsonl"), tokenizer=tokenizer, max_prompt_tokens=3).next(1)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with expect_error(BadInput, value="holds no rows"):
        StreamedPrompts(empty, tokenizer=tokenizer)


@pytest.mark.parametrize("source", [[{"prompt": "a"}], "arithmetic", "rows.json", "nowhere.jsonl"])
def test_what_is_no_stream(tokenizer: Any, source: Any) -> None:
    with expect_error(BadInput, value="stream=True|no file"):
        StreamedPrompts(source, tokenizer=tokenizer)


def test_only_a_window_of_rows_is_read(tokenizer: Any) -> None:
    read = list[int]()

    def many() -> Iterator[str]:
        for n in itertools.count():  # without an end
            read.append(n)
            yield f"{n}?"

    prompts = StreamedPrompts(many, tokenizer=tokenizer)
    assert len(prompts.next(20)) == 20 and max(read) < 32
    assert "read" not in repr(prompts) and "rows that are not counted" in prompts._repr_html_()


def test_columns_of_other_libraries_are_recognised_in_a_stream(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "2 + 3?"}], "reward_model": {"ground_truth": "5"}}
    path.write_text(json.dumps(row))
    prompts = StreamedPrompts(path, tokenizer=tokenizer)
    assert "read as verl" in repr(prompts) and prompts.extra_columns == ("answer", "reward_model")
    assert prompts.next(1)[0].extra["answer"] == "5"


def test_a_workbench_draws_from_a_stream_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"source": source_of(tmp_path, "jsonl"), "stream": True, "max_prompt_tokens": 100}
    models = {"actor": TINY}
    with tiny_lab("stream", tmp_path, backend="inline", models=models, prompts=options) as lab:
        lab.prompts.next(30)
        lab.save(tmp_path / "saved")
        expected = lab.prompts.next(40).fetch(["answer"])["answer"]
    with wb.restore(tmp_path / "saved", name="again", runs=tmp_path) as lab:
        assert lab.prompts.next(40).fetch(["answer"])["answer"] == expected
    with expect_error(BadInput, value="max_prompt_tokens=512 with stream=True"):
        tiny_lab("long", tmp_path, backend="inline", models=models, prompts={**options, "max_prompt_tokens": 512})
