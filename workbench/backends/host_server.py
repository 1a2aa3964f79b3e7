"""Hosts on a CPU begin as forks of one process that has imported what they need: they are there in a second or two, and
share the memory of these imports.

    ray_head.py   starts `serve` beside the head, with which it ends
    raylet        runs this file where it would run Python: the server forks, and the fork becomes the worker

Run as a program it imports little. Hosts on GPUs do not begin like this: CUDA does not survive a fork.
"""

from __future__ import annotations

import array
import atexit
import gc
import json
import os
import signal
import socket
import sys

HOST_SERVER = "WORKBENCH_HOST_SERVER"  # tells a head where the server is to listen
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DESCRIPTORS = (0, 1, 2)  # of a worker, handed over by the process that raylet has started
MOST_BYTES = 2**20  # of a request


def python_for_hosts(path: str) -> str:
    """The command to give to Ray in place of a Python. path: where the server listens."""
    import shlex

    return shlex.join([sys.executable, "-S", "-E", "-P", os.path.abspath(__file__), path])


def begin_worker(path: str, command: list[str]) -> None:
    """Have the server fork a worker, and wait for its end; without a server that runs this code, become the worker."""
    request = json.dumps([command, dict(os.environ), os.getcwd(), sys.executable, os.path.abspath(__file__)]).encode()
    ends = array.array("i", DESCRIPTORS)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(path)
            server.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
            server.sendall(request)
            if server.recv(1) == b"y":
                server.recv(1)  # nothing comes; the worker holds the other end as long as it lives
                return
    except OSError:
        pass
    os.execv(sys.executable, [sys.executable, *command])


def serve(path: str) -> str:
    """Fork workers until standard input, which the head holds, is closed. Returns in each worker, with its script."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # no threads
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)  # who asks before the imports are done waits for them
    sys.path.insert(0, ROOT)
    _import()
    return _forks(listener, path)


def _import() -> None:
    import importlib

    for name in ("workbench.workers.host", "workbench.workers.roles", "workbench.engines.training.torch_engine",
                 "transformers.models.llama.modeling_llama"):  # fmt: skip
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is there stays shared


def _forks(listener: socket.socket, path: str) -> str:
    import select

    began, own = _newest(), os.path.abspath(__file__)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: the system reaps them
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            sys.exit()
        connection, _ = listener.accept()
        descriptors: list[int] = []
        try:
            size, descriptors, _, _ = socket.recv_fds(connection, 8, len(DESCRIPTORS))
            request = b""
            while len(request) < min(int.from_bytes(size, "little"), MOST_BYTES):
                request += connection.recv(MOST_BYTES)
            command, environment, folder, executable, code = json.loads(request)
            if _newest() != began or (executable, code) != (sys.executable, own):
                connection.sendall(b"n")
            elif os.fork() == 0:
                listener.close()
                _become(connection, descriptors, environment, folder, command)
                return str(command[0])
        except (OSError, ValueError):  # of one request
            pass
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            connection.close()
        if _newest() != began:  # from now on with the code as it is
            listener.close()
            os.unlink(path)
            os.execv(sys.executable, [sys.executable, "-P", own, "serve", path])


def _newest() -> float:
    """When a file of the package that is imported here was changed last."""
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    return max(os.stat(file).st_mtime for file in files if file.startswith(ROOT + "/workbench/"))


def _become(
    connection: socket.socket, descriptors: list[int], environment: dict[str, str], folder: str, command: list[str]
) -> None:
    """Be the process that a new Python would be."""
    atexit.register(gc.unfreeze)  # else some libraries miss at the end what was never collected
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.sendall(b"y")
    os.dup(connection.fileno())  # open until this process ends
    for own, theirs in zip(DESCRIPTORS, descriptors, strict=True):
        os.dup2(theirs, own)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = command
    given = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [os.path.dirname(command[0]), *given, *(place for place in sys.path if place not in given)]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        import runpy

        runpy.run_path(serve(sys.argv[2]), run_name="__main__")
    else:
        begin_worker(sys.argv[1], sys.argv[2:])
