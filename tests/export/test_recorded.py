"""What was run against what the page says: a real kernel, with cell ids as front ends send them."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from tests.expected import expect_error
from tests.fuzz.damage import harmless
from workbench.errors import BadInput
from workbench.export import export_notebook
from workbench.export.cells import Cell, Notebook, read_notebook
from workbench.export.interrupted import Made, MadeCall, expression
from workbench.export.proof import compare_runs
from workbench.export.recorded import Record, as_run, doubts, find_record, read_record
from workbench.session.run_record import RunCell, digest_of
from workbench.telemetry.store import TelemetryStore

OPEN = """from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("recorded", Path("runs"), backend="inline")"""
NEXT = "batch = lab.prompts.next(n)"
GENERATE = "batch = lab.actor.generate_sequences(batch, max_new_tokens=3)"
SCORE = "batch = lab.actor.compute_log_prob(batch)"
CLOSE = "lab.close()"
HUSHED, AFTER = "%%capture\nk = 5\nj = k / 0", "after = k\nj = 7"
QUIET = "%%capture said\nm = 4\nlab.report('note', {'x': 1 / 0})"
IN_KERNEL = """from workbench.export.recorded import read_record
(text,) = [run.text() for run in read_record([lab.run_folder]).runs if run.id == "gone"]
assert text.startswith("lab.report("), text"""


class Kernel:
    """Runs cells of a page and gives each one's `In [n]`."""

    def __init__(self, folder: Path) -> None:
        root = Path(__file__).resolve().parents[2]
        self._manager, self._client = start_new_kernel(cwd=str(folder))
        self.run("path", f"import sys; sys.path.insert(0, {str(root)!r})")

    def run(self, id: str, text: str, fails: bool = False, recorded: bool = True) -> int:
        message = self._client.session.msg(
            "execute_request",
            {"code": text, "silent": False, "store_history": recorded, "user_expressions": {}, "allow_stdin": False}
            | {"stop_on_error": False},  # else a cell that comes right after one that failed may be dropped
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


def ran(
    kernel: str, number: int, id: str, text: str, done: bool, failed: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The details of the event of a cell."""
    return asdict(RunCell(kernel, number, id, digest_of(text), done, failed))


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
    counts = {"p": kernel.run("p", "n = 2")}
    kernel.run("typo", "m = n +", fails=True)
    kernel.run("wrong", "import workbench as wb\nm = 3\nwb.open(lr=1e-5)", fails=True)
    hushed = kernel.run("hushed", HUSHED)  # which shows its error, and does not fail
    after = kernel.run("after", AFTER)
    counts |= {id: kernel.run(id, text) for id, text in [("open", OPEN), ("next", NEXT)]}
    counts["gone"] = kernel.run("gone", "lab.report('note', {'x': 1.0})")
    kernel.run("", IN_KERNEL, recorded=False)
    quiet = kernel.run("quiet", QUIET)
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
            ("quiet", QUIET, quiet),
            ("hushed", HUSHED, hushed),
            ("after", AFTER, after),
        ],
    )
    with expect_error(BadInput, value="cell 3 .*needs 'batch'", rule="further down", remedy="--as-run"):
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
    assert "lr=" not in script.text
    assert "    m = 4\n" in script.text and "1 / 0" not in script.text
    assert "    k = 5\n\n    after = k\n    j = 7\n" in script.text and "k / 0" not in script.text
    assert "n +" not in script.text
    assert script.text == (tmp_path / "script.py").read_text()
    assert [line for line in script.told if "2 lines, 2 times" in line]

    (folder,) = (tmp_path / "runs" / "recorded").iterdir()
    told = "\n".join(doubts(*_read(page, folder)))
    for line in (
        f"cell 5 (In [{counts['generate']}]) was edited after it was run",
        "cell 7 is on the page, but was not run",
        f"cell 4 (In [{counts['next']}]) was run 3 times",
        "is no longer on the page: lab.report",
        "was run before cell 3",
    ):
        assert line in told, told


INTERRUPTIBLE = """import builtins
def pause(batch):
    if getattr(builtins, "stop_at", 0) == lab.iteration:
        builtins.stop_at = 0
        raise KeyboardInterrupt
    return batch
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=3))
ppo.insert(pause, after="generate_sequences")"""
PANEL = """import threading
def press(action):
    thread = threading.Thread(target=stepper.act, args=(action, {}))
    thread.start(); thread.join(); stepper.driver.wait()
    assert not stepper.driver.error, stepper.driver.error
stepper = lab.panel(algorithm=ppo).views["stepper"]
stepper.iterations = 2"""
OTHER = "stepper.algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=wb.Sampling(max_new_tokens=2))"
LOOP = "total = 0\nfor turn in range(5):\n    ppo.iterate()\n    total += turn  # of the loop"
BY_HAND = """batch = lab.prompts.next(4)
batch = lab.actor.generate_sequences(batch, max_new_tokens=2)
batch = pause(batch)
batch = lab.actor.compute_log_prob(batch)"""


def press(kernel: Kernel, action: str) -> None:
    """A button of the stepper, as the panel presses it, in a request that is no cell."""
    kernel.run("", f"press({action!r})", recorded=False)


def stop_at(kernel: Kernel, iteration: int) -> None:
    kernel.run("", f"import builtins; builtins.stop_at = {iteration}", recorded=False)


def metrics_agree(folder: Path, script: str, last: int) -> None:
    """Run a script as a program, and compare what its stages report with what the notebook's did, to the last bit.
    last: the iteration up to which they did the same."""
    (folder / "script.py").write_text(script)
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "script.py", "--output", "again"]
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] + script
    proof = compare_runs(folder / "runs", folder / "again")
    assert proof.tolerance == 0, f"{proof}\n{script}"
    found = proof.table["verdict"].groupby(proof.table["iteration"] <= last).unique()
    assert list(found[True]) == ["equal"], f"{proof}\n{script}"
    assert "equal" not in found[False]


@pytest.mark.thorough  # what is written of each: test_exporting.py
@pytest.mark.slow
def test_what_a_panel_ran_and_what_was_interrupted_is_in_the_script(kernel: Kernel, tmp_path: Path) -> None:
    cells = [("open", OPEN), ("ppo", INTERRUPTIBLE)]
    for id, text in cells:
        kernel.run(id, text)
    kernel.run("", PANEL, recorded=False)
    press(kernel, "run")
    kernel.run("one", "ppo.run(1)")
    for action in ("step", "step", "step", "iterate", "step", "step", "restart"):
        press(kernel, action)
    kernel.run("look", "lab.iteration, ppo.clip")
    page = save(tmp_path / "page.ipynb", [(id, text, 1) for id, text in [*cells, ("one", "ppo.run(1)"),
                ("look", "lab.iteration, ppo.clip")]])  # fmt: skip
    for order in ("written", "run"):
        script = export_notebook(page, order=order)
        lines = [line.strip() for line in script.text.splitlines() if "ppo." in line and "insert" not in line]
        assert lines == ["ppo.run(2)", "ppo.run(1)", "ppo.iterate()",
                         "ppo.step()  # prompts, generate_sequences", "ppo.restart()"], script.text  # fmt: skip
        assert "# by the panel, not by a cell\n    ppo.run(2)" in script.text
        assert [line for line in script.told if line.startswith("the panel, after cell 2")]
    kernel.run("", OTHER, recorded=False)
    press(kernel, "iterate")
    # interrupted: iteration 9 after two stages, which the next run goes on with; 11, by hand; 12; and 15, in a loop
    stop_at(kernel, 9)
    kernel.run("ten", "history = ppo.run(10)", fails=True)
    kernel.run("more", "ppo.run(2)")
    stop_at(kernel, 11)
    kernel.run("hand", BY_HAND, fails=True)
    stop_at(kernel, 12)
    kernel.run("last", "ppo.run(1)", fails=True)
    kernel.run("rest", "ppo.restart()")
    stop_at(kernel, 15)
    loop = kernel.run("loop", LOOP, fails=True)
    kernel.run("close", CLOSE)
    script = export_notebook(page, order="run", runs=(tmp_path / "runs" / "recorded").iterdir())
    metrics_agree(tmp_path, script.text, last=12)
    (told,) = [line for line in script.told if "not in" in line]
    assert told.startswith(f"a deleted cell (In [{loop}]) ended with an error: `for turn in range(5):` is not in the")
    assert "it had called generate_sequences 3 times, " in told and told.endswith("update_actor 2 times")
    assert f"# Not in this script: a deleted cell (In [{loop}])" in script.text


WRONG = "import workbench as wb\nn = 2\nlab = wb.open(lr=1e-5)\nm = 3"
OPENED = "import workbench as wb\nlab = wb.open('a')\n"
FAILED = "cell 1 (In [1]) failed at `lab = wb.open(lr=1e-5)`, which is not in the script, and neither is the rest"


@pytest.mark.parametrize(
    ("text", "failed", "then", "made", "expected"),
    [
        (WRONG, (3, 6), OPENED + "lab.prompts.next(n)", False, "n = 2"),
        (WRONG, (3, 6), OPENED + "lab.prompts.next(m)", False, None),  # another cell needs what comes after it
        (WRONG, (3, 6), OPENED + "def f(): return m\nlab.prompts.next(n, f)", False, None),
        (WRONG, (3, 6), OPENED + "lab.prompts.next(n)", True, None),  # it had called something
        (WRONG, None, OPENED + "lab.prompts.next(2)", False, ""),
        ("lab = wb.open(lr=1e-5) +", None, OPENED + "lab.prompts.next(2)", False, ""),
    ],
)  # fmt: skip
def test_a_cell_that_failed_before_a_workbench_was_open_is_left_out(
    tmp_path: Path, text: str, failed: tuple[int, int] | None, then: str, made: bool, expected: str | None
) -> None:
    store = TelemetryStore(tmp_path / "run")
    store.append_event("opened", name="a", placement="")
    if made:
        store.append_event("run", cell=1, at=[3, 6], stage="generate_sequences")
    store.append_event("cell", **ran("k", 1, "", text, False, failed))
    store.append_event("cell", **ran("k", 2, "then", then, True))
    page = save(tmp_path / "page.ipynb", [("wrong", text, 1), ("then", then, 2)])
    script = export_notebook(page, runs=[tmp_path / "run"])
    told = "\n".join(script.told)
    assert "cell 1 (In [1]) ended with an error" in told
    assert ("lr=1e-5" in script.text) == (expected is None)
    assert ("failed at" in told) == (expected is not None), told
    if expected:
        assert FAILED in told
        assert expected in script.text

    # edited since, it is what was meant
    edited = text.replace("lr=1e-5", "'b'").rstrip("+ ")
    page = save(tmp_path / "page.ipynb", [("wrong", edited, 1), ("then", then, 2)])
    assert 'open("b")' in export_notebook(page, runs=[tmp_path / "run"]).text


def test_a_move_of_the_panel_is_kept_where_a_later_cell_attaches(tmp_path: Path) -> None:
    opens, attaches = (
        'import workbench as wb\nlab = wb.open("moved")',
        'import workbench as wb\nlab = wb.attach("moved")',
    )
    store = TelemetryStore(tmp_path / "run")
    store.append_event("opened", name="moved", placement="Placement.of({'a': (1, ['actor'])})")
    store.append_event("cell", **ran("k", 1, "open", opens, True))
    placement = "Placement.of({'b': (2, ['actor'])})"
    store.append_event("move", placement=placement, cell=0, at=None, lab="lab", by="moving to b (started in the panel)")
    store.append_event("attached", name="moved", placement=placement)
    store.append_event("cell", **ran("l", 1, "attach", attaches, True))
    store.append_event("cell", **ran("l", 2, "run", "wb.PPO(lab).run(1)", True))
    page = save(
        tmp_path / "page.ipynb", [("open", opens, 1), ("attach", attaches, 1), ("run", "wb.PPO(lab).run(1)", 2)]
    )
    for order in ("written", "run"):
        script = export_notebook(page, order=order, runs=[tmp_path / "run"])
        assert f'wb.open("moved", placement=wb.{placement})'.replace("'", '"') in script.text, script.text
        assert ".move(" not in script.text
        assert not [line for line in script.told if "is in the script" in line]
        assert [line for line in script.told if "opens with the placement that the panel" in line]
        steps = export_notebook(page, order=order, runs=[tmp_path / "run"], moves="steps").text
        assert f"lab.move(wb.{placement})".replace("'", '"') in steps
        assert steps.index("wb.open(") < steps.index("lab.move(") < steps.index("wb.attach(")


def _read(page: Path, folder: Path) -> tuple[Notebook, Record]:
    notebook = read_notebook(page)
    assert find_record(notebook, page) == [folder]
    record = read_record([folder])
    assert record.placements == {}  # nothing was moved
    return notebook, record


def test_the_numbers_of_the_page_tell_what_they_can() -> None:
    cells = (Cell(1, "a = 1", count=5), Cell(2, "b = a", count=2), Cell(3, "c = b"), Cell(4, "d = 1", count=6))
    told = doubts(Notebook("x", cells), Record((), {}))
    assert told == [
        "cell 3 is on the page, but was not run",
        "cell 2 (In [2]) was run before cell 1 (In [5]), which is above it",
        "cell 2 (In [2]) is stale: cell 1 (In [5]) has assigned 'a' again after it",
    ]
    assert doubts(Notebook("x", (Cell(1, "a = 1"), Cell(2, "b = a"))), Record((), {})) == []
    with expect_error(BadInput, value="without a record"):
        as_run(Notebook("x", cells), Record((), {}), [])


def test_of_a_cell_that_a_script_does_without_nothing_is_said() -> None:
    texts = {"n": "n = 1", "skipped": "!make data\nupdate(lab)", "gone": "update(lab)"}
    runs = tuple(
        RunCell("k", number, id, digest_of(text), id == "n", (2, 0) if id == "skipped" else None)
        for number, (id, text) in enumerate(texts.items(), 1)
    )
    cells = (Cell(1, "n = 1", id="n"), Cell(2, texts["skipped"], id="skipped", tags=frozenset({"skip-export"})))
    made, missing = {n: Made(stages=[((2, 0), "update_actor")] * 2) for n in (1, 2)}, list[str]()
    order = as_run(Notebook("x", cells), Record(runs, {}, made=made), missing)
    assert [cell.text for cell in order if cell.exported] == ["n = 1"]
    assert missing == ["a deleted cell (In [3]) ended with an error: its effect is unknown; it had called "
                       "update_actor 2 times"]  # fmt: skip


def test_what_a_panel_ran_comes_behind_the_cells_before_an_interrupted_loop() -> None:
    texts = ["ppo = make()", "ppo.clip = 0.1", "for turn in range(3):\n    update(lab)"]
    runs = tuple(
        RunCell("k", n, f"c{n}", digest_of(text), n < 3, None if n < 3 else (1, 0)) for n, text in enumerate(texts, 1)
    )
    cells = tuple(Cell(n, text, id=f"c{n}") for n, text in enumerate(texts, 1))
    call = MadeCall.of("algorithm", {"call": "run", "algorithm": "PPO", "name": "ppo", "iterations": 2, "by": "panel"})
    order = as_run(Notebook("x", cells), Record(runs, {}, elsewhere=((2, call, False),)), [])
    assert [cell.text for cell in order] == [*texts[:2], "# by the panel, not by a cell\nppo.run(2)"]


def recorded(folder: Path, cells: Sequence[tuple[str, str]]) -> list[Path]:
    """A run folder with the record of cells, by id and text, in the order in which they were run."""
    store = TelemetryStore(folder / "run")
    for number, (id, text) in enumerate(cells, 1):
        store.append_event("cell", **ran("1-1", number, id, text, True))
    assert "s3cret" not in (folder / "run" / "events.jsonl").read_text()
    return [folder / "run"]


LOGIN = 'import os\nos.environ["MY_TOKEN"] = "s3cret"'


@pytest.mark.parametrize("id", ["login", "cut and pasted", ""])
def test_a_cell_is_exported_with_the_text_of_the_page(tmp_path: Path, id: str) -> None:
    page = save(tmp_path / "page.ipynb", [("login", LOGIN, 2), ("use", "n = 1", 1)])
    runs = recorded(tmp_path, [(id, LOGIN), ("use", "n = 1")])
    script = export_notebook(page, order="run", runs=runs)
    assert "s3cret" in script.text
    assert not [line for line in script.told if "edited" in line]


@pytest.mark.parametrize("id", ["login", "gone", ""])
def test_a_cell_that_the_page_lacks_is_read_from_the_history_of_ipython_or_refused(
    tmp_path: Path, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    page = save(tmp_path / "page.ipynb", [("login", 'print("other")', 2), ("use", "n = 1", 1)])
    runs = recorded(tmp_path, [(id, LOGIN), ("use", "n = 1")])
    for written in (None, "print('of another session')", LOGIN):
        if written is not None:
            (tmp_path / "profile_default").mkdir(exist_ok=True)
            with closing(sqlite3.connect(tmp_path / "profile_default" / "history.sqlite")) as history, history:
                history.execute("CREATE TABLE IF NOT EXISTS history (session, line, source_raw)")
                history.execute("DELETE FROM history")
                history.execute("INSERT INTO history VALUES (1, 1, ?)", (written,))
        if written == LOGIN:
            assert "s3cret" in export_notebook(page, order="run", runs=runs).text
        else:
            with expect_error(BadInput, value=r"In \[1\]", rule="history of IPython", remedy="--as-written"):
                export_notebook(page, order="run", runs=runs)
        assert "s3cret" not in export_notebook(page, order="written", runs=runs).text


def test_a_record_brings_no_line_and_nothing_for_a_terminal_into_what_is_told(tmp_path: Path) -> None:
    store = TelemetryStore(tmp_path / "run")
    store.append_event("cell", **{**ran("k", 1, "gone", "m = 2", True), "number": "1\x1b[2J\n"})
    store.append_event("setting", setting="rate\nnote: all is well\x1b[31m", after=1, by="\ud800")
    page = save(tmp_path / "page.ipynb", [("use", "n = 1", 1)])
    (gone, setting) = export_notebook(page, runs=[tmp_path / "run"]).told[:2]
    assert gone.startswith("In [1") and harmless(gone)
    assert setting.startswith("rate note: all is well was set to 1 by \\ud800") and harmless(setting)


PLACEMENTS: list[str] = [
    "__import__('os').system('x')",
    "Placement.of({'a': (1, open('x'))})",
    "Placement.of(",
    "(lambda: 1)()",
    "-" * 100_000 + "1",
    "1+" * 50_000 + "1",
    "Placement.of({'a': (1, ['b'])}); open('x')",
]


def test_a_record_brings_no_code_into_a_script() -> None:
    for placement in PLACEMENTS:
        assert expression(placement) is None
        good = "Placement.of({'shared': (2, ['actor', 'critic'])})"
        assert expression(good) == f"wb.{good}"
