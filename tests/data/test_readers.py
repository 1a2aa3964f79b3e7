from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.data.examples import Examples
from workbench.data.prompts import Prompts
from workbench.data.readers import READERS
from workbench.data.sources import kept_source, read_rows
from workbench.data.streamed_prompts import StreamedPrompts
from workbench.errors import BadInput, MissingDependency
from workbench.models import load_tokenizer

ROWS = [{"prompt": "2 + 3,\nthen?", "answer": "5"}, {"prompt": 'say "naïve"', "answer": "naïve"}]
PYARROW = (".parquet", ".arrow", ".feather")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


def written(folder: Path, ending: str, rows: list[dict[str, Any]]) -> Path:
    """A file of these rows, by pandas or pyarrow."""
    path, frame = folder / f"rows{ending}", pd.DataFrame(rows)
    if ending in PYARROW:
        pyarrow = pytest.importorskip("pyarrow")  # of the extra "data"
    if ending == ".arrow":
        from pyarrow import ipc

        table = pyarrow.Table.from_pylist(rows)
        with path.open("wb") as file, ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif ending in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="," if ending == ".csv" else "\t")
    elif ending in (".json", ".jsonl"):
        frame.to_json(path, orient="records", lines=ending == ".jsonl")
    else:
        getattr(frame, f"to_{ending.removeprefix('.')}")(path)
    return path


@pytest.mark.parametrize("ending", READERS)
def test_files_of_each_format_hold_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path, ending, ROWS)
    assert read_rows(path) == read_rows(str(path)) == ROWS


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather", ".json"])
def test_a_file_of_another_format_than_its_name_says(tmp_path: Path, ending: str) -> None:
    if ending in PYARROW:
        pytest.importorskip("pyarrow")
    path = tmp_path / f"rows{ending}"
    path.write_text("no such file\n" * 9)
    with pytest.raises(BadInput, match=f"rows{ending}"):
        read_rows(path)
    whole = written(tmp_path, ending, ROWS).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=f"rows{ending}"):
        read_rows(path)


def test_a_parquet_file_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with expect_error(MissingDependency, remedy=r"'\.\[data\]'.*pip install pyarrow"):
        read_rows(tmp_path / "rows.parquet")


def test_bad_rows_of_files_are_named_by_line_and_can_be_skipped(tmp_path: Path, tokenizer: Any) -> None:
    table = tmp_path / "rows.csv"
    table.write_text('prompt,answer\n"two\nlines",1\na,b,c\n   ,2\nc\nlast,3\n')
    with expect_error(BadInput, value="rows.csv, line 4 has 3 fields", rule="the first line names 2 columns"):
        read_rows(table)
    prompts = Prompts(table, tokenizer=tokenizer, shuffle=False, bad_rows="skip")
    assert [row.prompt for row in prompts.rows] == ["two\nlines", "last"]
    assert [line.partition(": ")[0].rpartition("rows.csv, ")[2] for line in prompts.skipped] == [
        "line 4 has 3 fields", "line 6 has 1 fields", "column 'prompt' of line 5 is empty",
    ]  # fmt: skip
    assert "3 bad skipped" in prompts.summary and "line 4 has 3 fields" in prompts._repr_html_()
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": \n[1]\n{"prompt": "b"}\n{"answer": "c"}\n')
    prompts = Prompts(lines, tokenizer=tokenizer, shuffle=False, bad_rows="skip")
    assert [(row.index, row.prompt) for row in prompts.rows] == [(0, "a"), (3, "b")]
    assert [("line 2" in one, "line 3" in one, "line 5" in one) for one in prompts.skipped] == [
        (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip


def test_bad_rows_of_pairs_are_skipped_with_their_number(tokenizer: Any) -> None:
    rows = [
        {"prompt": "a", "chosen": "x", "rejected": "y"}, {"prompt": "b", "chosen": "x"}, 7,
        {"prompt": "c", "chosen": 1, "rejected": "y"}, {"prompt": "d", "chosen": "x", "rejected": "y"},
    ]  # fmt: skip
    pairs = Examples(rows, "pairs", tokenizer=tokenizer, bad_rows="skip")
    assert [row.example.prompt for row in pairs.training] == ["a", "d"] and "3 bad skipped" in pairs.summary
    assert sorted(line[:5] for line in pairs.skipped) == ["row 1", "row 2", "row 3"]
    with expect_error(BadInput, value="row 2 is of type int"):
        Examples(rows, "pairs", tokenizer=tokenizer)


def test_where_every_row_is_bad_the_first_reason_is_told(tokenizer: Any) -> None:
    with expect_error(BadInput, value="a list holds no prompts; .*row 0 is empty"):
        Prompts([" ", "\n"], tokenizer=tokenizer, bad_rows="skip")
    with expect_error(BadInput, value="bad_rows='drop'"):
        Prompts(["a"], tokenizer=tokenizer, bad_rows="drop")  # type: ignore[arg-type]


def test_frames_say_none_for_what_is_missing_and_keep_numbers() -> None:
    frame = pd.DataFrame({"prompt": ["a", "b"], "level": [1, 2], "hint": ["x", None], 3: [0.5, None]})
    assert read_rows(frame) == [
        {"prompt": "a", "level": 1, "hint": "x", "3": 0.5}, {"prompt": "b", "level": 2, "hint": None, "3": None},
    ]  # fmt: skip


def test_a_generator_is_read_once_and_opened_again(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield from ("a", "b", "c")

    assert read_rows(texts()) == read_rows(texts) == [{"prompt": text} for text in "abc"]
    assert kept_source({"source": texts(), "shuffle": False}) == {"source": ["a", "b", "c"], "shuffle": False}
    options = {"source": texts(), "shuffle": False}
    with tiny_lab("generated", tmp_path, backend="inline", models={"actor": TINY}, prompts=options) as lab:
        assert lab.description.prompts["source"] == ["a", "b", "c"]
        assert lab.prompts.next(3).fetch(["prompt"])["prompt"] == ["a", "b", "c"]


def test_splits_of_the_datasets_library_and_tables_of_arrow() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    assert read_rows(pyarrow.Table.from_pylist(ROWS)) == ROWS
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Dataset"):  # in a checkout's root the folder of that name
        pytest.skip("the datasets library is not installed")
    split = datasets.Dataset.from_list(ROWS)
    assert read_rows(split) == read_rows(split.to_iterable_dataset()) == ROWS
    with expect_error(BadInput, rule="it holds the splits 'train'"):
        read_rows(datasets.DatasetDict({"train": split}))


USER, FIVE = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
CONVENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "verl": (
        {"data_source": "sums", "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "5"}},
        {"prompt": "2 + 3?", "answer": "5", "data_source": "sums"},
    ),
    "TRL": ({"prompt": [USER], "answer": "5"}, {"prompt": "2 + 3?", "answer": "5"}),
    "OpenRLHF": ({"input": "2 + 3?", "output": "5", "source": "s"}, {"prompt": "2 + 3?", "answer": "5", "source": "s"}),
    "OpenRLHF's columns": ({"context_messages": [USER], "label": "5"}, {"prompt": "2 + 3?", "answer": "5"}),
    "Alpaca": ({"instruction": "add", "input": "2 3", "output": "5"}, {"prompt": "add\n\n2 3", "answer": "5"}),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "2 + 3?"}], "n": 1}, {"prompt": "2 + 3?", "n": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVENTIONS)
def test_columns_of_other_libraries_are_recognised_and_said(tokenizer: Any, name: str) -> None:
    row, expected = CONVENTIONS[name]
    prompts = Prompts([row, row], tokenizer=tokenizer)
    assert prompts.read_as.startswith(name) and f"read as {name}" in repr(prompts)
    found = {"prompt": prompts.rows[0].prompt, **prompts.rows[0].extra}
    assert {key: found[key] for key in expected} == expected


def test_a_row_that_lacks_what_the_convention_of_the_first_has_is_refused(tokenizer: Any) -> None:
    rows = [CONVENTIONS["verl"][0], {"prompt": [USER], "reward_model": {"style": "rule"}}]
    with expect_error(BadInput, value="row 1 of a list has only 'prompt', 'reward_model'", rule="verl's columns"):
        Prompts(rows, tokenizer=tokenizer)
    skipping = Prompts(rows, tokenizer=tokenizer, bad_rows="skip")
    assert len(skipping) == 1 and "row 1 of a list" in skipping.skipped[0]
    with expect_error(BadInput, value="row 1 has only"):
        StreamedPrompts(lambda: (yield from rows), tokenizer=tokenizer, shuffle=False).next(2)


def test_pictures_beside_a_text_are_refused(tokenizer: Any) -> None:
    rows = [{"prompt": "a"}, {"prompt": "<image> What is this?", "images": [{"bytes": b"", "path": "cat.png"}]}]
    with expect_error(BadInput, value="row 1 of a list has 'images'", rule="models read only texts"):
        Prompts(rows, tokenizer=tokenizer)
    assert len(Prompts([{"prompt": "a", "images": []}], tokenizer=tokenizer)) == 1


def test_columns_of_our_own_names_and_a_column_that_was_asked_for_are_left_alone(tokenizer: Any) -> None:
    assert Prompts(ROWS, tokenizer=tokenizer).read_as == ""
    row = {"instruction": "add", "input": "2 3", "output": "5"}
    prompts = Prompts([row], tokenizer=tokenizer, prompt_column="input")
    assert prompts.read_as == "" and prompts.rows[0].prompt == "2 3" and "answer" not in prompts.rows[0].extra


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("demonstrations", {"instruction": "add", "input": "", "output": "5"}),
        ("demonstrations", {"input": "add", "output": "5"}),
        ("demonstrations", {"prompt": [{"role": "user", "content": "add"}], "completion": [FIVE]}),
        ("demonstrations", {"conversations": [{"from": "human", "value": "add"}, {"from": "gpt", "value": "5"}]}),
        ("feedback", {"prompt": "add", "completion": "5", "label": True}),
        ("pairs", {"input": "add", "chosen": "5", "rejected": "6"}),
        ("pairs", {"prompt": "add", "chosen": [FIVE], "rejected": "6"}),
    ],
)  # fmt: skip
def test_demonstrations_and_pairs_of_other_libraries(tokenizer: Any, kind: Any, row: dict[str, Any]) -> None:
    example = Examples([row], kind, tokenizer=tokenizer).training[0].example
    prompt = example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
    assert (prompt, example.answers[0]) == ("add", "5")


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "84 + "}, {"type": "text", "text": "1?"}]},
    {"role": "assistant", "content": None, "name": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 84, "b": 1}'}}]},
    {"role": "tool", "content": "85", "tool_call_id": "c1"},
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}{% for key in m if key not in ('role', 'content') %} {{ key }}{% endfor %}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}"
    "{% endfor %}<assistant>"
)


def test_messages_keep_tool_calls_and_other_keys_on_their_way_to_the_template() -> None:
    tokenizer: Any = load_tokenizer(TINY)
    tokenizer.chat_template = TEMPLATE
    text = "<user>84 + 1?<assistant tool_calls>add84<tool tool_call_id>85<assistant>"
    prompts = Prompts([{"messages": TURNS}], tokenizer=tokenizer)
    assert tokenizer.decode(prompts.rows[0].prompt_ids) == text and prompts.rows[0].prompt == "84 + 1?"
    answered = [{"prompt": TURNS, "response": "85"}]
    examples = Examples(answered, "demonstrations", tokenizer=tokenizer)
    assert tokenizer.decode(examples.training[0].prompt_ids) == text
    with expect_error(BadInput, value="^row 0 of a list: the answer .*tool_", rule="than the end of a prompt"):
        Examples([{"messages": TURNS[:2]}], "demonstrations", tokenizer=tokenizer)
