"""`ray start` with the server that hosts are forked from, see `host_server`, and without the server for Ray clients:
110 MB and seconds of starting that nobody here uses. Ray starts it wherever grpc is installed, and has no option
against it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ray.scripts import scripts

if __name__ == "__main__":
    program, listens_at = Path(__file__).with_name("host_server.py"), os.environ.pop("WORKBENCH_HOST_SERVER")
    hosts = subprocess.Popen([sys.executable, "-P", str(program), "serve", listens_at], stdin=subprocess.PIPE)
    scripts.get_ray_client_dependency_error = lambda: ImportError("no clients")
    scripts.main()
