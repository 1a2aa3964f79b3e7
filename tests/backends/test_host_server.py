"""Workers that are forked from one process with its imports done."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from workbench.backends import host_server

SCRIPT = """
import json, os, sys
imported = "transformers" in sys.modules
print(json.dumps([imported, sys.argv[1:], os.environ.get("WHO"), os.getcwd(), sys.path[1], __name__, os.getppid()]))
"""


def test_a_worker_is_as_one_that_python_begins_and_has_the_code_as_it_is_now(tmp_path: Path) -> None:
    shutil.copytree(Path(host_server.ROOT, "workbench"), tmp_path / "workbench")  # to be edited
    (tmp_path / "script.py").write_text(SCRIPT)
    program, place = tmp_path / "workbench" / "backends" / "host_server.py", tmp_path / "hosts"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WHO": "me"}

    def began(*arguments: str, run: Path = program) -> Any:
        command = [sys.executable, "-S", "-E", "-P", str(run), str(place), "script.py", *arguments]
        return json.loads(subprocess.check_output(command, cwd=tmp_path, env=environment, timeout=120))

    as_usual = [["a", "b c"], "me", str(tmp_path), str(tmp_path), "__main__"]
    assert began("a", "b c")[:6] == [False, *as_usual]  # nobody listens
    server = subprocess.Popen([sys.executable, "-P", program, "serve", place], stdin=subprocess.PIPE)
    assert server.stdin is not None
    try:
        while not place.exists():
            assert server.poll() is None
        assert began("a", "b c") == [True, *as_usual, server.pid]
        assert not began(run=Path(host_server.__file__))[0]  # of another checkout
        (shadow := tmp_path / "other" / "transformers.py").parent.mkdir()
        shadow.touch()
        environment["PYTHONPATH"] += f":{shadow.parent}"
        assert not began()[0]  # of another library
        environment["PYTHONPATH"] = str(tmp_path)
        with socket.socket(socket.AF_UNIX) as broken:  # which ends in the middle
            broken.connect(str(place))
            broken.sendall((99).to_bytes(8, "little"))
        os.utime(tmp_path / "workbench" / "__init__.py")
        assert not began()[0]
        while not began()[0]:  # the server begins anew
            assert server.poll() is None
    finally:
        server.stdin.close()
    assert server.wait(60) == 0
