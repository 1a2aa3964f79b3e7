"""What a run leaves of cells and command lines: nothing with record=False; `wb scrub` masks what older runs left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import __main__
import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from tests.kernel.kernels import Kernel
from workbench.backends import registry
from workbench.cli import main
from workbench.errors import BadInput, NameTaken
from workbench.launch.scrubbing import scrub
from workbench.session.checkpoint import find_checkpoint
from workbench.support import files
from workbench.support.signing import is_signed, signed
from workbench.telemetry.store import TelemetryStore

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
    """In one kernel, the one way and the other. With the record on, cells are in the run and in its restored one."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    kernel = Kernel(tmp_path)
    try:
        kernel.run("import workbench as wb\nfrom pathlib import Path\nfrom tests.cases import tiny_lab")
        for record in (False, True):
            kernel.run("before = 'CELLTEXT'")
            kernel.run(
                "lab = tiny_lab('quiet', Path('runs'), backend='inline', track='tensorboard', if_exists='replace', "
                f"record={record})"
            )
            kernel.run("after = 'CELLTEXT'; lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)")
            kernel.run(f"lab.save('saved-{record}')  # CELLTEXT")
            error, _ = kernel.cell("lab.export('script.py', 'page.ipynb')")
            assert ("opened with record=False" in error) is not record
            kernel.run(f"lab = wb.restore('saved-{record}', name='again', runs='runs', if_exists='replace')")
            kernel.run("last = 'CELLTEXT'; lab.prompts.next(2); lab.close()")
            if not record:
                assert not texts_with(tmp_path, MARKS)
    finally:
        kernel.kill()
    found = {name.split("/")[1] for _, name in texts_with(tmp_path, MARKS) if name.startswith("runs/")}
    assert found == {"quiet", "again"}


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
    assert {name.split("/")[0] for _, name in texts_with(tmp_path, MARKS)} == {"True"}


def test_recording_is_part_of_what_a_workbench_is(tmp_path: Path) -> None:
    with tiny_lab("quiet", tmp_path, backend="inline", record=False) as lab:
        with expect_error(NameTaken, rule="record would differ"):
            tiny_lab("quiet", tmp_path, backend="inline")
        assert tiny_lab("quiet", tmp_path, backend="inline", record=False) is lab
        with expect_error(BadInput, value="opened with record=False", remedy="wb export NOTEBOOK"):
            lab.export(tmp_path / "script.py")
    with expect_error(BadInput, value="record"):
        tiny_lab("quiet", tmp_path, backend="inline", record="no")


TOKEN = KEY  # a global that the reward function reads


def keyed(response: str, **row: Any) -> float:
    return float(len(response) + len(TOKEN))


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run folder as an older version has left it: unmasked, and readable by all."""
    with tiny_lab("old", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
        lab.save(lab.run_folder / "checkpoints" / "inside", models=False)
        lab.save(tmp_path / "elsewhere", models=False)
        folder = lab.run_folder
    cell = {"kernel": "1", "number": 1, "id": "", "text": f"x = '{KEY}'\nAPI_KEY = 'plain-words'", "done": True}
    rows = [
        {"time_s": 1.0, "event": "cell", "details": {**cell, "masked": False}},
        {"time_s": 2.0, "event": "script", "details": {"command": ["s.py", "--api-key", "plain-words"], "options": {}}},
    ]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.write('{"time_s": 3, "event": "cell", "details": {"text": "half ' + KEY)
    (folder / "logs").mkdir(mode=0o755, exist_ok=True)
    (folder / "logs" / "host.log").write_text(f"loading\nexport API_KEY=plain-words\nGET Bearer {KEY}\n")
    with (folder / "memory.jsonl").open("a") as file:
        file.write(json.dumps({"note": f"https://user:{KEY}@host"}) + "\n")
    (folder / "events.out.tfevents.1").write_bytes(b"\0\1" + KEY.encode() + b"\2")
    (folder / "out").symlink_to("/etc/passwd")
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def test_scrub_masks_all_that_is_text_and_names_what_is_not(
    old_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = TelemetryStore(old_run).metrics()
    assert main(["scrub", str(old_run)]) == 1
    said = capsys.readouterr().out
    for name in ("events.jsonl", "host.log", "memory.jsonl"):
        assert f"masked in {old_run}" in said
        assert name in said
    assert "events.out.tfevents.1: it seems to hold a key" in said
    assert "out: it is a link, which is not followed" in said
    assert texts_with(old_run, [KEY, "plain-words"]) == [(KEY, "events.out.tfevents.1")]
    for path in [old_run, *old_run.rglob("*")]:
        if not path.is_symlink():
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert Path("/etc/passwd").stat().st_mode & 0o777 != 0o600
    cells = [
        details for event, details in TelemetryStore(old_run).events()[["event", "details"]].values if event == "cell"
    ]
    assert cells[-1]["text"] == "x = '***'\nAPI_KEY = '***'"
    assert cells[-1]["masked"] is True
    assert TelemetryStore(old_run).metrics().equals(before)
    for saved in (old_run / "checkpoints" / "inside", tmp_path / "elsewhere"):
        find_checkpoint(saved).verify()
        assert is_signed(find_checkpoint(saved).values)
    again = scrub(old_run)
    assert again.cleaned == []
    assert again.private == 0
    (old_run / "events.out.tfevents.1").unlink()
    (old_run / "out").unlink()
    assert main(["scrub", str(old_run), "--json"]) == 0


def state_of(folder: Path) -> dict[Path, tuple[int, bytes | None]]:
    """Modes and contents of a folder and all in it."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.stat().st_mode, path.read_bytes() if path.is_file() else None) for path in paths}


def test_scrub_follows_a_record_only_to_signed_checkpoints_of_its_run(tmp_path: Path) -> None:
    with tiny_lab("mine", tmp_path, backend="inline") as lab:
        victim, mine = (lab.save(tmp_path / name, models=False).folder for name in ("victim", "mine_saved"))
        mine_run = lab.run_folder
    (mine / "notes.log").write_text(f"Bearer {KEY}")
    (mine / "notes.log").chmod(0o644)
    (mine / "checkpoint.json").chmod(0o644)
    (victim / "notes.log").write_text(f"Bearer {KEY}")
    for path in (victim, *victim.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    row = {"time_s": 1.0, "event": "saved", "details": {"folder": str(victim)}}
    (foreign / "events.jsonl").write_text(json.dumps(row) + "\n" + '{"event": "saved", "details": 5}\n')
    before = state_of(victim)
    assert list(scrub(foreign).left) == [victim]  # signed by this user, but of another run
    assert state_of(victim) == before
    values = dict(find_checkpoint(victim).values)
    forged = json.dumps({**values, "run_folder": str(foreign)})
    for manifest in (forged, "{}", "no json"):  # of this run, but not signed; no manifest
        (victim / "checkpoint.json").write_text(manifest)
        before = state_of(victim)
        assert list(scrub(foreign).left) == [victim]
        assert state_of(victim) == before
    done = scrub(mine_run)
    assert (mine / "checkpoint.json").stat().st_mode & 0o777 == 0o600
    assert (mine / "notes.log").stat().st_mode & 0o777 == 0o644  # which the manifest does not name
    assert mine / "notes.log" not in {*done.cleaned, *done.left}
    assert KEY in (mine / "notes.log").read_text()


def test_scrub_signs_a_manifest_again_and_finds_secrets_in_pickles(tmp_path: Path) -> None:
    __main__.TOKEN, keyed.__module__ = KEY, "__main__"
    try:
        with tiny_lab("keyed", tmp_path, backend="inline", models={"actor": TINY, "reward": keyed}) as lab:
            saved = lab.save(tmp_path / "saved", models=False).folder
    finally:
        keyed.__module__ = __name__
        del __main__.TOKEN
    values = dict(find_checkpoint(saved).values)
    files.write_json(saved / "checkpoint.json", signed({**values, "placement": f"Bearer {KEY}"}))
    done = scrub(saved)
    assert done.cleaned == [saved / "checkpoint.json"]
    assert list(done.left) == [saved / "controller.pkl"]
    assert is_signed(find_checkpoint(saved).values)
    assert KEY not in (saved / "checkpoint.json").read_text()


def test_scrub_refuses_what_is_no_run_and_what_lives(tmp_path: Path) -> None:
    with expect_error(BadInput, rule="a run folder has events.jsonl"):
        scrub(tmp_path)
    for path in (5, None, "a\0b", "/dev/null", "/proc/x"):
        with pytest.raises(BadInput):
            scrub(path)  # type: ignore[arg-type]
    lives = expect_error(BadInput, value="'lives' lives, and writes to")
    with tiny_lab("lives", tmp_path, backend="inline") as lab, lives:
        scrub(lab.run_folder)
    assert scrub(lab.run_folder).left == {}


def test_an_export_names_the_cell_and_line_of_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "cell 2 (In [2]) seems to hold a secret in line 3; the script has it too" in capsys.readouterr().err
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
