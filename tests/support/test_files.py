"""What is read and written: regular files of a bounded size, whole or not at all; and who signs."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expected import expect_error
from workbench.errors import BadInput, WriteFailed
from workbench.support import files


def test_only_a_regular_file_is_read_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("folder", "pipe", "null"):
        with expect_error(BadInput, value=f"{name}' (is not a file|cannot be read)"):
            files.read_bytes(tmp_path / name)
        with expect_error(BadInput, value=f"{name}' is not a file", rule="only a file can be replaced"):
            files.write_bytes(tmp_path / name, b"x")
    assert Path("/dev/null").is_char_device()


def test_what_a_link_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/file")
    for content in (b"1", b"2"):
        files.write_bytes(tmp_path / "link", content)
        assert (tmp_path / "elsewhere" / "file").read_bytes() == files.read_bytes(tmp_path / "link") == content
    assert (tmp_path / "link").is_symlink()


NO_PATHS = [5, None, b"x", "", "a\0b", "x" * 256, "é" * 200, "/x" * 3000, "\ud800", "~nosuchuser/x", ["x"], 1.5, True]


def test_what_no_file_can_be_called_is_said_to_be_wrong(subtests: pytest.Subtests) -> None:
    for value in NO_PATHS:
        with subtests.test(value=value), expect_error(BadInput, value="^where="):
            files.path_of(value, "where")


def test_a_write_that_fails_leaves_what_was_there_and_says_how_much_is_free(tmp_path: Path) -> None:
    """RLIMIT_FSIZE is a real limit of the kernel's: what goes beyond it is not written."""
    path = tmp_path / "file"
    files.write_bytes(path, b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with expect_error(
            WriteFailed, value="file' cannot be written: ", rule=r"it needs 5,000 bytes, and [\d,]+ bytes are"
        ):
            files.write_bytes(path, b"x" * 5000)
        with expect_error(WriteFailed, value="cannot be written"), files.new_folder(tmp_path / "folder") as new:
            (new / "file").write_bytes(b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"before"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_nothing_is_left_of_what_was_interrupted(tmp_path: Path, error: type[BaseException]) -> None:
    raised: type[BaseException] = WriteFailed if error is OSError else error
    actions: list[Callable[[], None]] = []

    def write_file() -> None:
        with files.replacing(tmp_path / "file") as file:
            file.write(b"half")
            raise error

    def write_folder() -> None:
        with files.new_folder(tmp_path / "folder") as new:
            (new / "half").touch()
            raise error

    actions += [write_file, write_folder]
    for action in actions:
        with pytest.raises(raised):
            action()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with expect_error(WriteFailed, value="/etc/passwd/x' cannot be written"):
        files.private_folder(Path("/etc/passwd/x"))


def test_files_are_private_and_one_that_the_user_has_named_keeps_its_mode(tmp_path: Path) -> None:
    path, mask = tmp_path / "script.py", os.umask(0o027)
    try:
        files.write_bytes(path, b"0")
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()
        files.write_bytes(path, b"1", mode=files.SHARED)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    files.write_bytes(path, b"2", mode=files.SHARED)
    assert path.stat().st_mode & 0o777 == 0o604


def test_only_this_users_key_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "mine"))
    mine = files.signed({"a": 1, "b": [1.5, None]})
    assert files.is_signed(mine)
    key = tmp_path / "mine" / "signing_key"
    assert key.stat().st_mode & 0o777 == 0o600
    changed = [{**mine, "a": 2}, {**mine, "c": 0}, {**mine, "signature": "0" * 64}, {**mine, "signature": None}]
    assert not any(map(files.is_signed, [*changed, {"a": 1, "b": [1.5, None]}]))
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "others"))
    assert not files.is_signed(mine)
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "mine"))
    key.write_bytes(b"")
    for use in (files.signed, files.is_signed):
        with expect_error(BadInput, value="signing_key' has 0 bytes"):
            use(mine)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_home_of_another_user_is_refused_but_not_by_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container gives root a home of the user outside: `docker -v $HOME:/root`."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, -1)
    monkeypatch.setenv("WORKBENCH_HOME", str(theirs))
    assert files.home() == theirs
    monkeypatch.setattr(os, "geteuid", lambda: 65533)
    with expect_error(BadInput, value="belongs to user 65534"):
        files.home()
