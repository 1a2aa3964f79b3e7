"""Hostile files: what is read and written instead of a regular file of this user."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.expected import expect_error
from workbench.errors import BadInput, WriteFailed
from workbench.support import files, signing


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with one of each kind of file."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    listener = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(tmp_path)  # the name of a socket has 107 bytes
    listener.bind("socket")
    os.chdir(here)
    listener.close()
    return tmp_path


def test_only_a_regular_file_is_read_or_replaced(places: Path, subtests: pytest.Subtests) -> None:
    for name in ["folder", "pipe", "link", "dangling", "loop", "zero", "socket"]:
        with subtests.test(name=name):
            before = (places / name).lstat()
            with pytest.raises(BadInput, match=f"{name}' (is a|cannot be read)"):
                files.read_bytes(places / name)
            with pytest.raises(BadInput, match=f"{name}' is a .*in the place of a file only"):
                files.write_bytes(places / name, b"x")
            assert (places / name).lstat() == before
            assert (places / "file").read_bytes() == b"content"
            assert not (places / "nowhere").exists()


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "/dev/null", "/dev/tty"])
def test_devices_are_neither_read_nor_replaced(device: str) -> None:
    with expect_error(BadInput, value="is a device|cannot be read"):
        files.read_bytes(Path(device))
    with expect_error(BadInput, value="is a device"):
        files.write_bytes(Path(device), b"x")
    assert not Path(device).is_file()


def test_a_link_is_followed_where_the_user_has_named_it_but_not_to_a_device(places: Path) -> None:
    assert files.read_bytes(places / "link", follow=True) == b"content"
    with expect_error(BadInput, value="is a device"):
        files.read_bytes(places / "zero", follow=True)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "folder/../file", "out/secret", ".", ""])
def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    (inside / "folder").mkdir(parents=True)
    (inside / "file").write_bytes(b"content")
    (tmp_path / "secret").write_bytes(b"secret")
    (inside / "out").symlink_to(tmp_path)
    with pytest.raises(BadInput):
        files.read_bytes(Path(name), within=inside)
    assert files.read_bytes(Path("file"), within=inside) == b"content"


@pytest.fixture
def entered() -> Iterator[Path]:
    """A folder that all users can enter, as none of pytest's own is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_files_of_others_and_those_that_others_may_write_are_not_trusted(entered: Path) -> None:
    path = entered / "file"
    files.write_bytes(path, b"content")
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.read_bytes(path, own=True) == b"content"
    for mode in (0o602, 0o666):
        path.chmod(mode)
        with pytest.raises(BadInput, match=f"can be written by other users .*{mode:o}.*chmod 600 {path}"):
            files.read_bytes(path, own=True)
    if os.geteuid() == 0:
        os.chown(path, 0, 65534)
        path.chmod(0o620)
        with expect_error(BadInput, value="can be written by other users"):
            files.read_bytes(path, own=True)
        path.chmod(0o600)
        os.chown(path, 65534, -1)
        with expect_error(BadInput, value="belongs to user 65534, not to this one, 0"):
            files.read_bytes(path, own=True)


@pytest.mark.parametrize("mode", [0o620, 0o664, 0o666])
def test_a_file_of_an_older_version_is_made_private_where_only_this_user_could_write_it(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "home" / "file"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"content")
    path.chmod(mode)
    assert files.read_bytes(path, own=True) == b"content"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_size_is_a_limit_also_of_files_that_do_not_say_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 101)
    with expect_error(BadInput, value="has 101 bytes, and 100 are the most"):
        files.read_bytes(path, limit=100)
    with expect_error(BadInput, value="has more than 10 bytes"):
        files.read_bytes(Path("/proc/self/maps"), limit=10)  # says that it is empty


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
            WriteFailed, value="file' cannot be written: ", rule=r"it takes 5,000 bytes, and [\d,]+ bytes are"
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


@pytest.mark.parametrize("folder", ["/proc/x/y", "/dev/null/x", "/etc/passwd/x"])
def test_a_folder_that_cannot_be_made_is_named(folder: str) -> None:
    with pytest.raises(WriteFailed, match=f"{folder}' cannot be written"):
        files.make_folder(Path(folder))


def test_a_file_that_is_replaced_keeps_its_mode_where_the_user_has_named_it(tmp_path: Path) -> None:
    path, mask = tmp_path / "script.py", os.umask(0o027)
    try:
        files.write_bytes(path, b"1", mode=files.SHARED)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    files.write_bytes(path, b"2", mode=files.SHARED)
    assert path.stat().st_mode & 0o777 == 0o604


def test_only_this_users_key_signs(entered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path = entered
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "mine"))
    mine = signing.signed({"a": 1, "b": [1.5, None]})
    assert signing.is_signed(mine)
    key = tmp_path / "mine" / "signing_key"
    assert key.stat().st_mode & 0o777 == 0o600
    changed = [{**mine, "a": 2}, {**mine, "c": 0}, {**mine, "signature": "0" * 64}, {**mine, "signature": None}]
    assert not any(map(signing.is_signed, [*changed, {"a": 1, "b": [1.5, None]}]))
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "others"))
    assert not signing.is_signed(mine)
    key.chmod(0o666)
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "mine"))
    with expect_error(BadInput, value="can be written by other users"):
        signing.is_signed(mine)


@pytest.mark.parametrize("key", [b"", b"x" * 31, b"x" * 33])
def test_a_key_of_another_length_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    mine = signing.signed({"a": 1})
    (tmp_path / "home" / "signing_key").write_bytes(key)
    for use in (signing.signed, signing.is_signed):
        with expect_error(BadInput, value=r"signing_key' has \d+ bytes"):
            use(mine)


def test_a_key_is_made_on_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "link", refused)
    assert signing.is_signed(signing.signed({"a": 1}))
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["signing_key"]
    assert (tmp_path / "home" / "signing_key").stat().st_mode & 0o777 == 0o600


def test_a_home_of_another_user_is_refused_but_not_by_root(entered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container gives root a home of the user outside: `docker -v $HOME:/root`."""
    from workbench.support.home import home

    if os.geteuid() != 0:
        pytest.skip("only root gives a folder to another user")
    theirs = entered / "theirs"
    theirs.mkdir()
    (theirs / "file").write_bytes(b"content")
    for path in (theirs, theirs / "file"):
        os.chown(path, 65534, -1)
    monkeypatch.setenv("WORKBENCH_HOME", str(theirs))
    assert home() == theirs
    assert files.read_bytes(theirs / "file", own=True) == b"content"
    assert signing.is_signed(signing.signed({"a": 1}))
    os.chown(theirs / "file", 65533, -1)
    with expect_error(BadInput, value="belongs to user 65533"):
        files.read_bytes(theirs / "file", own=True)
    os.seteuid(65533)
    try:
        with expect_error(BadInput, value="belongs to user 65534"):
            home()
    finally:
        os.seteuid(0)
