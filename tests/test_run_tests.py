"""What `make test` adds to pytest: a second try, and a look at what is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import run_tests

ONCE = """
from pathlib import Path
import pytest
@pytest.mark.parametrize("n", range({n}))
def test_that_passes_the_second_time(n):
    note = Path({folder!r}, str(n))
    if not note.exists():
        note.touch()
        pytest.fail("the first time")
"""


@pytest.mark.parametrize(("n", "code"), [(1, 0), (run_tests.MOST_FLAKY + 1, 1)])
def test_what_fails_once_is_run_again_and_named_unless_it_is_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], n: int, code: int
) -> None:
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "test_once.py").write_text(ONCE.format(n=n, folder=str(tmp_path / "notes")))
    assert run_tests.run_twice(tmp_path, ["test_once.py", "-p", "no:xdist"]) == code
    said = capfd.readouterr().out
    assert ("test_that_passes_the_second_time[0]" in said.partition("flaky:")[2]) == (code == 0)


def test_what_a_run_leaves_is_named_with_its_test_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "LEAVING_S", 0.0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run_tests.left_behind(tmp_path) == []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (tmp_path / "forgotten").touch()
        (tmp_path / run_tests.APPEARED).write_text("forgotten\ttests/test_a.py::test_b\n")
        living, file = run_tests.left_behind(tmp_path)
        assert f"process {process.pid} of tests/test_run_tests.py::test_what_a_run_leaves" in living
        assert file == f"{tmp_path / 'forgotten'} of tests/test_a.py::test_b"
        run_tests.end(tmp_path)
        assert process.wait() != 0
    assert not tmp_path.exists()
