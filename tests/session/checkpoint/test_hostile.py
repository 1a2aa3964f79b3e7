"""Checkpoints that somebody has changed, or made: nothing of them is unpickled, and each is refused with a reason."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, hosts_of
from tests.expected import expect_error
from workbench.errors import BadInput, NotFound, WriteFailed
from workbench.session.checkpoint import find_checkpoint
from workbench.session.checkpoint.files import CONTROLLER, MANIFEST
from workbench.support.files import SIGNATURE, signed
from workbench.workers.worker import Worker


class Counting(Worker):
    """A user's own worker, whose state is pickled."""

    def __init__(self, spec: Any, context: Any) -> None:
        super().__init__(spec, context)
        self.seen = {"calls": 3}

    def state(self) -> dict[str, Any]:
        return self.seen

    def load_state(self, state: dict[str, Any]) -> None:
        self.seen = state


def open_counting(runs: Path, **more: Any) -> wb.Workbench:
    models = {"actor": TINY, "reward": wb.Model(TINY, worker=Counting)}
    generation = wb.Generation(engine="transformers", max_model_tokens=64, kv_cache_gib=0.1)
    return wb.open(
        "hostile", models=models, backend="inline", runs=runs, training=wb.Training(engine="torch"),
        generation=generation, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    with open_counting(folder) as lab:
        hosts_of(lab)["shared-0"].workers["reward"].seen = {"calls": 7}
        return lab.save(folder / "whole", models=False).folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


class Runs:
    """Unpickling it makes a folder: what an attacker's pickle does."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.made),)


def change(copy: Path, values: Any, *, sign: bool = True) -> None:
    (copy / MANIFEST).write_text(json.dumps(signed(values) if sign else values))


def manifest(copy: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((copy / MANIFEST).read_text())
    return found


def test_a_state_of_ones_own_worker_comes_back(copy: Path, tmp_path: Path) -> None:
    with wb.restore(copy, name="again", runs=tmp_path) as lab:
        assert hosts_of(lab)["shared-0"].workers["reward"].seen == {"calls": 7}
    assert {path.stat().st_mode & 0o777 for path in copy.rglob("*") if path.is_file()} == {0o600}
    assert copy.stat().st_mode & 0o777 == 0o700


def test_a_controller_that_the_manifest_does_not_name_is_not_read(copy: Path, tmp_path: Path) -> None:
    values, made = manifest(copy), tmp_path / "made"
    (copy / CONTROLLER).write_bytes(pickle.dumps(Runs(made)))
    change(copy, {**values, "files": {file: entry for file, entry in values["files"].items() if file != CONTROLLER}})
    with expect_error(BadInput, value="controller.pkl", rule="the manifest does not name the file"):
        wb.restore(copy, name="again", runs=tmp_path)
    assert not made.exists()


def test_a_state_that_is_not_named_is_not_loaded(copy: Path, tmp_path: Path) -> None:
    values, name, made = manifest(copy), "roles/reward/state-00000.pt", tmp_path / "made"
    (copy / name).write_bytes(pickle.dumps(Runs(made)))
    change(copy, {**values, "files": {file: entry for file, entry in values["files"].items() if file != name}})
    with wb.restore(copy, name="again", runs=tmp_path) as lab:
        assert hosts_of(lab)["shared-0"].workers["reward"].seen == {"calls": 3}
    assert not made.exists()


def with_hashes(copy: Path, name: str, data: bytes) -> dict[str, Any]:
    import hashlib

    (copy / name).write_bytes(data)
    values = manifest(copy)
    values["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return values


def test_a_checkpoint_of_somebody_else_runs_no_code_until_it_is_trusted(copy: Path, tmp_path: Path) -> None:
    """All hashes fit: only the signature tells that this user has not written it."""
    made = tmp_path / "made"
    change(copy, with_hashes(copy, CONTROLLER, pickle.dumps(Runs(made))), sign=False)
    with expect_error(BadInput, value="is not signed by this user", rule="loading them runs code", remedy="wb trust "):
        wb.restore(copy, name="again", runs=tmp_path)
    with expect_error(BadInput, value="is not signed"), open_counting(tmp_path, resume=copy):
        pass
    assert not made.exists()
    find_checkpoint(copy).trust()
    with pytest.raises(TypeError):  # what it holds is no description; and now it was run, as was said
        wb.restore(copy, name="again", runs=tmp_path)
    assert made.exists()


def test_the_key_of_another_user_signs_nothing_here(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "another home"))
    with expect_error(BadInput, value="is not signed by this user, or was changed after it was signed"):
        find_checkpoint(copy).controller()
    assert "it is not signed by this user" in find_checkpoint(copy).described()
    find_checkpoint(copy).trust()
    assert "it is signed by this user" in find_checkpoint(copy).described()
    find_checkpoint(copy).controller()
    values = manifest(copy)
    for changed in ({**values, "name": "another"}, {n: value for n, value in values.items() if n != SIGNATURE}):
        change(copy, changed, sign=False)
        with expect_error(BadInput, value="is not signed by this user"):
            find_checkpoint(copy).controller()


def test_a_pickle_that_is_swapped_after_it_was_checked_is_not_loaded(copy: Path, tmp_path: Path) -> None:
    """The bytes that are unpickled are those whose checksum was taken."""
    from workbench.workers.role_state import RoleFiles, read_role

    found, made = find_checkpoint(copy), tmp_path / "made"
    found.verify()
    (copy / CONTROLLER).write_bytes(pickle.dumps(Runs(made)))
    with expect_error(BadInput, value=r"controller\.pkl"):
        found.controller()
    (copy / "roles/reward/state-00000.pt").write_bytes(pickle.dumps(Runs(made)))
    states = found.checksums("roles/reward/state-")
    files = RoleFiles(
        role="reward", folder=str(copy / "roles" / "reward"), parts=(), layout=wb.Layout(d=1), states=states
    )
    with expect_error(wb.errors.StageError, value="has another checksum"):
        read_role(Counting(None, None), files, (), 0, None)  # type: ignore[arg-type]
    assert not made.exists()


def test_a_manifest_of_other_content_is_refused(copy: Path, tmp_path: Path) -> None:
    """Though this user has signed it."""
    change(copy, [manifest(copy)], sign=False)
    with expect_error(BadInput, value="has format None", rule="this version reads"):
        wb.restore(copy, name="again", runs=tmp_path)
    assert not list(tmp_path.glob("again*"))


def test_paths_that_cannot_be(tmp_path: Path, subtests: pytest.Subtests) -> None:
    paths: list[Any] = [5, None, "", "a\0b", "x" * 300, "/x" * 3000, "\ud800", "/proc/x/y", "/dev/null", b"x"]
    with open_counting(tmp_path) as lab:
        for path in paths:
            with subtests.test(path=path):
                assert_refused(lab, path)
        assert lab.put({"x": [1, 2]}).rows == 2


def assert_refused(lab: wb.Workbench, path: Any) -> None:
    """Every call that takes a path refuses this one."""
    other: Any = path if path is not None else 5  # None is a value of these
    for call in (
        lambda: wb.restore(path),
        lambda: lab.save(path),
        lambda: lab.load(path),
        lambda: lab.put({"x": [1, 2]}).save(path),
        lambda: lab.actor.save_model(path),
        lambda: lab.trace(path),
        lambda: wb.open("other", models={"actor": TINY}, backend="inline", runs=path),
        lambda: lab.autosave(folder=other),
        lambda: wb.attach(path),
        lambda: wb.stop(path),
        lambda: lab.recover(other),
    ):
        if path in ("/proc/x/y", "/dev/null") and "autosave" in call.__code__.co_names:
            continue  # whether it can be written is found when it saves, with a warning
        with pytest.raises((BadInput, NotFound, WriteFailed)):
            call()


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    for call in (
        lambda: wb.open("x" * 300, models={"actor": TINY}, backend="inline", runs=tmp_path),
        lambda: wb.attach("x" * 300),
        lambda: wb.stop("x" * 300),
    ):
        with expect_error(BadInput, rule="has at most 100 bytes"):
            call()


def test_saves_go_to_no_device(tmp_path: Path) -> None:
    with open_counting(tmp_path) as lab:
        for call in (lab.put({"x": [1, 2]}).save, lab.save, lab.actor.save_model, lab.trace):
            with pytest.raises(BadInput):
                call("/dev/null")
    assert Path("/dev/null").is_char_device()
