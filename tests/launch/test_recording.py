"""What a run leaves of cells and command lines: never a text, and nothing at all with record=False."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from tests.kernel.kernels import Kernel
from workbench.backends import registry
from workbench.cli import main
from workbench.errors import BadInput, NameTaken

MARKS = ["CELLTEXT", "COMMANDLINE", "OPTIONTEXT"]
KEY = "hf_" + "a1B2c3D4e5F6g7H8i9J0"


def texts_with(folder: Path, words: list[str]) -> list[tuple[str, str]]:
    """Which files below a folder hold which of these words, in whatever format."""
    return [
        (word, str(path.relative_to(folder)))
        for path in sorted(folder.rglob("*")) if path.is_file()
        for word in words if word.encode() in path.read_bytes()
    ]  # fmt: skip


@pytest.mark.slow
def test_cells_are_recorded_or_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one kernel, the one way and the other. With the record on, the run and its restored one know the cells, and
    have no text of them."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    kernel = Kernel(tmp_path)
    try:
        kernel.run("import workbench as wb\nfrom pathlib import Path\nfrom tests.cases import TINY, tiny_lab")
        kernel.run("def score(prompt, response, **row):\n    return 1.0  # CELLTEXT")
        for record in (False, True):
            kernel.run("before = 'CELLTEXT'")
            kernel.run(
                "lab = tiny_lab('quiet', Path('runs'), models={'actor': TINY, 'reward': score}, backend='inline', "
                f"track='tensorboard', if_exists='replace', record={record})"
            )
            kernel.run("after = 'CELLTEXT'; lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)")
            kernel.run(f"lab.save('saved-{record}')  # CELLTEXT")
            error, _ = kernel.cell("lab.export('script.py', 'page.ipynb')")
            assert ("opened with record=False" in error) is not record
            kernel.run(f"lab = wb.restore('saved-{record}', name='again', runs='runs', if_exists='replace')")
            kernel.run("last = 'CELLTEXT'; lab.prompts.next(2); lab.close()")
            cells = {name.split("/")[1] for _, name in texts_with(tmp_path, ['"event":"cell"'])}
            assert cells == ({"quiet", "again"} if record else set())
    finally:
        kernel.kill()
    assert not texts_with(tmp_path, MARKS)


def test_a_command_line_is_recorded_or_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(text: str = "") -> None:
        for record in (True, False):
            folder = tmp_path / str(record)
            models = {"actor": TINY, "reward": vowels}
            options: dict[str, Any] = {"backend": "inline", "models": models, "track": "tensorboard", "record": record}
            with tiny_lab("quiet", folder, **options) as lab:
                lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
                lab.save(folder / "saved", models=False)

    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["script.py", "--text", "OPTIONTEXT COMMANDLINE", "--seed", "7"])
    with pytest.raises(SystemExit) as ended:
        wb.script.run(program)
    assert ended.value.code == 0
    assert len(list((tmp_path / "False").rglob("*"))) > 5
    assert not texts_with(tmp_path, MARKS)
    assert {name.split("/")[0] for _, name in texts_with(tmp_path, ["--text"])} == {"True"}


def test_recording_is_part_of_what_a_workbench_is(tmp_path: Path) -> None:
    with tiny_lab("quiet", tmp_path, backend="inline", record=False) as lab:
        with expect_error(NameTaken, rule="record would differ"):
            tiny_lab("quiet", tmp_path, backend="inline")
        assert tiny_lab("quiet", tmp_path, backend="inline", record=False) is lab
        with expect_error(BadInput, value="opened with record=False", remedy="wb export NOTEBOOK"):
            lab.export(tmp_path / "script.py")
    with expect_error(BadInput, value="record"):
        tiny_lab("quiet", tmp_path, backend="inline", record="no")


def test_an_export_names_the_cell_and_line_of_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["import os\nimport workbench as wb", f"# settings\nx = 1\nos.environ['HF_TOKEN'] = '{KEY}'", "y = 2"]
    page = {
        "cells": [
            {"cell_type": "code", "id": f"c{n}", "metadata": {}, "outputs": [], "execution_count": n, "source": text}
            for n, text in enumerate(cells, 1)
        ],
        "metadata": {}, "nbformat": 4, "nbformat_minor": 5,
    }  # fmt: skip
    (tmp_path / "page.ipynb").write_text(json.dumps(page))
    assert main(["export", str(tmp_path / "page.ipynb"), "-o", str(tmp_path / "page.py")]) == 0
    assert "cell 2 (In [2]) seems to hold a key in line 3; the script has it too" in capsys.readouterr().err
    assert KEY in (tmp_path / "page.py").read_text()  # the user's own text stays as it is


def test_run_folders_checkpoints_and_the_home_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    with tiny_lab("private", tmp_path / "runs", backend="inline") as lab:
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
        lab.save(tmp_path / "saved")
        registry.write(
            registry.Record(
                id=lab.description.id, name="x", digests=(), run_folder=str(lab.run_folder), address=None, hosts={}
            ),
            lab.description,
        )
        private = [lab.run_folder, tmp_path / "saved", tmp_path / "home" / "labs" / lab.description.id]
        registered = registry.records()[0].roles
        registry.forget(lab.description.id)
    assert registered["actor"] == TINY
    for folder in private[:2]:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
