"""`ray start` without the server for Ray clients: 110 MB and seconds of starting that nobody here uses.

Ray starts it wherever grpc is installed, and has no option against it.
"""

from __future__ import annotations

from ray.scripts import scripts

if __name__ == "__main__":
    scripts.get_ray_client_dependency_error = lambda: ImportError("no clients")
    scripts.main()
