"""What was run against what the page says: a real kernel, with cell ids as front ends send them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from workbench.errors import BadInput
from workbench.export import export_notebook
from workbench.export.cells import Cell, Notebook, read_notebook
from workbench.export.recorded import Record, _expression, as_run, doubts, find_record, read_record
from workbench.session.cell_history import RunCell
from workbench.telemetry.store import TelemetryStore

OPEN = """from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("recorded", Path("runs"), backend="inline")"""
NEXT = "batch = lab.prompts.next(n)"
GENERATE = "batch = lab.actor.generate_sequences(batch, max_new_tokens=3)"
SCORE = "batch = lab.actor.compute_log_prob(batch)"
CLOSE = "lab.close()"


class Kernel:
    """Runs cells of a page and gives each one's `In [n]`."""

    def __init__(self, folder: Path) -> None:
        root = Path(__file__).resolve().parents[2]
        self._manager, self._client = start_new_kernel(cwd=str(folder))
        self.run("path", f"import sys; sys.path.insert(0, {str(root)!r})")

    def run(self, id: str, text: str, fails: bool = False) -> int:
        message = self._client.session.msg(
            "execute_request",
            {"code": text, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False},
            metadata={"cellId": id},
        )
        self._client.shell_channel.send(message)
        while True:
            reply = self._client.get_shell_msg(timeout=120)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                assert (reply["content"]["status"] == "error") == fails, reply["content"]
                return int(reply["content"]["execution_count"])

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


def save(path: Path, cells: Sequence[tuple[str, str, int | None]]) -> Path:
    code: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": id,
            "source": text,
            "execution_count": count,
            "outputs": [],
            "metadata": {"tags": ["parameters"]} if id == "p" else {},
        }
        for id, text, count in cells
    ]
    path.write_text(json.dumps({"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


@pytest.mark.slow
def test_the_order_of_the_run_is_exported_and_doubts_are_told(kernel: Kernel, tmp_path: Path) -> None:
    counts = {id: kernel.run(id, text) for id, text in [("p", "n = 2"), ("open", OPEN), ("next", NEXT)]}
    counts["gone"] = kernel.run("gone", "lab.report('note', {'x': 1.0})")
    for _ in range(2):
        counts["generate"] = kernel.run("generate", GENERATE.replace("3", "2"))
        counts["next"] = kernel.run("next", NEXT)
    kernel.run("score", SCORE + " +", fails=True)
    counts["generate"] = kernel.run("generate", GENERATE)
    counts["score"] = kernel.run("score", SCORE)
    counts["close"] = kernel.run("close", CLOSE)
    page = save(
        tmp_path / "page.ipynb",
        [
            ("p", "n = 2", counts["p"]),
            ("open", OPEN, counts["open"]),
            ("score", SCORE, counts["score"]),
            ("next", NEXT, counts["next"]),
            ("generate", GENERATE.replace("3", "4"), counts["generate"]),
            ("close", CLOSE, counts["close"]),
            ("new", "lab.name", None),
        ],
    )
    with pytest.raises(BadInput, match=r"cell 3 .*needs 'batch'.*further down.*--as-run"):
        export_notebook(page)
    script = export_notebook(page, tmp_path / "script.py", order="run")
    stages = [line.strip() for line in script.text.splitlines() if "batch =" in line]
    assert stages == [
        NEXT,
        GENERATE.replace("3", "2"),
        NEXT,
        GENERATE.replace("3", "2"),
        NEXT,
        GENERATE,
        SCORE,
    ]
    assert "lab.report(" in script.text  # its cell has left the page
    assert script.text == (tmp_path / "script.py").read_text()
    assert [line for line in script.told if "2 lines, 2 times" in line]

    (folder,) = (tmp_path / "runs" / "recorded").iterdir()
    told = "\n".join(doubts(*_read(page, folder)))
    for line in (
        f"cell 5 (In [{counts['generate']}]) was edited after it was run",
        "cell 7 is on the page, and was not run",
        f"cell 4 (In [{counts['next']}]) was run 3 times",
        "is no longer on the page: lab.report",
        "was run before cell 3",
    ):
        assert line in told, told


def _read(page: Path, folder: Path) -> tuple[Notebook, Record]:
    notebook = read_notebook(page)
    assert find_record(notebook, page) == [folder]
    record = read_record([folder])
    assert record.placements == {}  # nothing was moved
    return notebook, record


def test_the_numbers_of_the_page_tell_what_they_can() -> None:
    cells = (Cell(1, "a = 1", count=5), Cell(2, "b = a", count=2), Cell(3, "c = b"), Cell(4, "d = 1", count=6))
    told = doubts(Notebook("x", cells), None)
    assert told == [
        "cell 3 is on the page, and was not run",
        "cell 2 (In [2]) was run before cell 1 (In [5]), which stands above it",
        "cell 2 (In [2]) is stale: cell 1 (In [5]) has made 'a' anew since",
    ]
    assert doubts(Notebook("x", (Cell(1, "a = 1"), Cell(2, "b = a"))), None) == []
    with pytest.raises(BadInput, match="without a record"):
        as_run(Notebook("x", cells), Record((), {}))


def recorded(folder: Path, cells: Sequence[tuple[str, str]]) -> list[Path]:
    """A run folder with the record of cells, by id and text, in the order in which they were run."""
    store = TelemetryStore(folder / "run")
    for number, (id, text) in enumerate(cells, 1):
        store.append_event("cell", kernel="k", number=number, id=id, text=text, done=True)
    assert "s3cret" not in (folder / "run" / "events.jsonl").read_text()
    return [folder / "run"]


@pytest.mark.parametrize("id", ["login", "cut and pasted", ""])
def test_a_masked_cell_is_exported_with_the_text_of_the_page(tmp_path: Path, id: str) -> None:
    login = 'import os\nos.environ["MY_TOKEN"] = "s3cret"'
    page = save(tmp_path / "page.ipynb", [("login", login, 2), ("use", "n = 1", 1)])
    runs = recorded(tmp_path, [(id, login), ("use", "n = 1")])
    script = export_notebook(page, order="run", runs=runs)
    assert "s3cret" in script.text
    assert "***" not in script.text
    assert not [line for line in script.told if "edited" in line]


@pytest.mark.parametrize("id", ["login", "gone", ""])
def test_a_masked_cell_that_the_page_lacks_is_refused(tmp_path: Path, id: str) -> None:
    page = save(tmp_path / "page.ipynb", [("login", 'print("other")', 2), ("use", "n = 1", 1)])
    runs = recorded(tmp_path, [(id, 'n = 1\ntoken = "s3cret"'), ("use", "n = 1")])
    with pytest.raises(BadInput) as refused:
        export_notebook(page, order="run", runs=runs)
    for part in ("In [1]", 'token = "***"', "--as-written"):
        assert part in str(refused.value)
    assert "s3cret" not in str(refused.value)
    assert "***" not in export_notebook(page, order="written", runs=runs).text


def test_stars_of_the_notebook_itself_are_no_mask(tmp_path: Path) -> None:
    store = TelemetryStore(tmp_path / "run")
    for number, text in enumerate(('import os\nos.environ["NOTE"] = "***"', "n = 1"), 1):
        store.append_event("cell", **asdict(RunCell.of("k", number, f"gone{number}", text, True)))
    page = save(tmp_path / "page.ipynb", [("use", "n = 1", 1)])
    assert 'os.environ["NOTE"] = "***"' in export_notebook(page, order="run", runs=[tmp_path / "run"]).text


@pytest.mark.parametrize(
    "placement",
    ["__import__('os').system('x')", "Placement.of({'a': (1, open('x'))})", "Placement.of(", "(lambda: 1)()"],
)
def test_a_record_brings_no_code_into_a_script(placement: str) -> None:
    assert _expression(placement) is None
    good = "Placement.of({'shared': (2, ['actor', 'critic'])})"
    assert _expression(good) == f"wb.{good}"
