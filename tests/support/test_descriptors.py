from __future__ import annotations

import os
import subprocess
import sys

import pytest

from workbench.support.surroundings import quiet_stderr

COMPLAINS = [sys.executable, "-Sc", "import os; os.write(2, b'cannot find -laio')"]


def test_what_a_child_complains_of_is_dropped_and_later_output_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_stderr():
        subprocess.run(COMPLAINS, check=True)
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_it_is_kept_where_the_body_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        with quiet_stderr():
            subprocess.run(COMPLAINS, check=True)
            raise ImportError("the operator is needed")

    with pytest.raises(ImportError):
        fails()
    os.write(2, b" after")
    assert capfd.readouterr().err == "cannot find -laio after"
