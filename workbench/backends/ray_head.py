"""`ray start` with the server that hosts are forked from, see `host_server`, and without the server for Ray clients:
110 MB and seconds of starting that nobody here uses. Ray starts it wherever grpc is installed, and has no option
against it.

Usage: ray_head.py SOCKET start --head ...; SOCKET is where the server of hosts listens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ray.scripts import scripts

if __name__ == "__main__":
    listens_at = sys.argv.pop(1)
    if not any(Path("/dev").glob("nvidia[0-9]*")):  # of GPUs no host is a fork
        server = Path(__file__).with_name("host_server.py")
        hosts = subprocess.Popen([sys.executable, "-P", str(server), "serve", listens_at], stdin=subprocess.PIPE)
    scripts.get_ray_client_dependency_error = lambda: ImportError("no clients")
    scripts.main()
