"""`ray start` with the server that hosts are forked from, see `host_server`, and without the server for Ray clients,
which takes 110 MB and seconds to start, and is not used here. Ray has no option to leave it out where grpc is
installed.

Usage: ray_head.py SOCKET start --head ...; SOCKET is where the server of hosts listens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ray.scripts import scripts

if __name__ == "__main__":
    listens_at = sys.argv.pop(1)
    if not any(Path("/dev").glob("nvidia[0-9]*")):  # hosts on GPUs are never forks
        server = Path(__file__).with_name("host_server.py")
        hosts = subprocess.Popen([sys.executable, "-P", str(server), "serve", listens_at], stdin=subprocess.PIPE)
    scripts.get_ray_client_dependency_error = lambda: ImportError("no clients")
    scripts.main()
