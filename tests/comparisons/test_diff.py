"""`wb.diff`: what differs between two runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import workbench as wb
from tests.comparisons.folders import write_run
from tests.expected import expect_error
from workbench.errors import NotFound
from workbench.support.code_version import PACKAGE, code_version, commit_of, source_files


def test_settings_data_and_code(tmp_path: Path) -> None:
    a = write_run(tmp_path, "a", "1", [1.0], settings={"seed": 0, "rate": 1e-5}, epochs=1)
    b = write_run(tmp_path, "b", "1", [1.0], settings={"seed": 0, "rate": 1e-4, "new": True}, epochs=2)
    for folder, text in ((a, "def f():\n    return 1"), (b, "def f():\n    return \x1b[31m2")):
        record = json.loads((folder / "run.json").read_text())
        record["code"]["files"]["a.py"] = folder.parent.name
        record["code"]["functions"] = {"reward": {"name": "f", "digest": folder.parent.name, "source": text}}
        record["data"]["prompts/token ids"] = folder.parent.name
        (folder / "run.json").write_text(json.dumps(record))
    found = wb.diff("a/1", b, folder=str(tmp_path))
    assert found.settings.to_dict("index") == {
        "rate": {"a": 1e-5, "b": 1e-4}, "new": {"a": None, "b": True}, "PPO/epochs": {"a": 1, "b": 2},
    }  # fmt: skip
    assert list(found.data.index) == ["prompts/token ids"]
    assert list(found.code.index) == ["files/a.py", "function of reward"]
    assert "-    return 1" in found.source["reward"] and "\x1b" not in repr(found)
    assert "rate: 1e-05 -> 0.0001" in repr(found) and "<table" in found._repr_html_()
    assert wb.diff(a, a).empty


def test_no_such_run(tmp_path: Path) -> None:
    with expect_error(NotFound, value="a/2"):
        wb.diff("a/2", "a/3", folder=str(tmp_path))


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    assert len(commit_of(tmp_path) or "") == 40


def test_an_edited_file_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert code_version()["files"]["controller.py"] == source_files()["controller.py"]
    assert len(source_files()) > 300 and PACKAGE.name == "workbench"
    monkeypatch.setattr("workbench.support.code_version.PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("1")
    before = source_files()
    (tmp_path / "a.py").write_text("22")
    assert list(before) == ["a.py"] and source_files() != before
