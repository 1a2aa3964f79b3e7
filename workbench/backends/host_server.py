"""Starts hosts on a CPU as forks of one process that has made their imports: they start in a second or two, and share
the memory of these imports.

    ray_head.py   starts `serve` beside the head; both end together
    raylet        runs this file in place of Python: the server forks, and the fork becomes the worker

As a program this file imports little. If the server does not answer, or has imported other files than a new Python
would, a host is a new Python process. Hosts on GPUs always are, because CUDA does not survive a fork.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DESCRIPTORS = (0, 1, 2)  # of a worker, sent by the process that raylet has started
IMPORTED = (
    "workbench.workers.host", "workbench.workers.roles", "workbench.engines.training.torch_engine",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
REQUEST_S = 5.0  # how long a request may take to arrive
ANSWER_S = 120.0  # how long its answer may take, which waits for the server's imports


def python_for_hosts(path: str) -> str:
    """Return the command that Ray runs in place of Python. path: where the server listens."""
    import shlex

    return shlex.join([sys.executable, "-S", "-E", "-P", os.path.abspath(__file__), path])


def begin_worker(path: str, command: list[str]) -> None:
    """Have the server fork a worker, and wait for its end. Without a server that runs this code, become the worker."""
    request = json.dumps([command, dict(os.environ), os.getcwd(), sys.executable, os.path.abspath(__file__)]).encode()
    ends = array.array("i", DESCRIPTORS)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.settimeout(ANSWER_S)
        server.connect(path)
        server.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
        server.sendall(request)
        if server.recv(1) == b"y":
            server.settimeout(None)
            server.recv(1)  # returns when the worker, which holds the other end, has ended
            return
    os.execv(sys.executable, [sys.executable, *command])


def serve(path: str) -> str:
    """Fork workers until standard input, held open by the head, is closed. Returns in each worker, with its script."""
    import importlib

    files = _files()
    # no threads, because a fork loses them; in hosts numpy keeps one thread, and each host sets torch's
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)  # requests wait until the imports are done
    sys.path.insert(0, ROOT)
    gc.disable()  # to search for garbage again and again among what is imported takes a sixth of the imports' time
    for name in IMPORTED:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # so that existing objects stay in shared memory
    return _forks(listener, path, files)


def _files() -> dict[str, float]:
    """Return the time of the last change of each file of this package, and of the folder of the libraries."""
    import importlib.util

    found = {}
    for folder, _, names in os.walk(os.path.join(ROOT, "workbench")):
        for file in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            with contextlib.suppress(OSError):
                found[file] = os.stat(file).st_mtime
    torch = importlib.util.find_spec("torch")
    libraries = os.path.dirname(os.path.dirname(torch.origin)) if torch is not None and torch.origin else ROOT
    return found | {libraries: os.stat(libraries).st_mtime}


def _forks(listener: socket.socket, path: str, files: dict[str, float]) -> str:
    import select

    own = os.path.abspath(__file__)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not waited for: the system reaps them
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            sys.exit()
        connection, _ = listener.accept()
        connection.settimeout(REQUEST_S)
        descriptors: list[int] = []
        try:
            size, descriptors, _, _ = socket.recv_fds(connection, 8, len(DESCRIPTORS))
            request = b""
            while len(request) < int.from_bytes(size, "little"):
                if not (part := connection.recv(2**20)):
                    raise OSError("half a request")
                request += part
            command, environment, folder, executable, code = json.loads(request)
            current = _files() == files
            if not current or (executable, code) != (sys.executable, own) or _shadows(environment):
                connection.sendall(b"n")
            elif os.fork() == 0:
                try:
                    listener.close()
                    _become(connection, descriptors, environment, folder, command)
                    return str(command[0])
                except BaseException:
                    os._exit(1)
        except (OSError, ValueError):  # an error of one request
            current = True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            connection.close()
        if not current:  # restart with the present files
            listener.close()
            os.execv(sys.executable, [sys.executable, "-P", own, "serve", path])


def _shadows(environment: dict[str, str]) -> bool:
    """Whether a new Python with this environment would find an imported module in another place."""
    imported = {name.partition(".")[0] for name in sys.modules}
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    others = (one for one in places if one not in ("", ROOT) and not one.startswith((sys.prefix, sys.base_prefix)))
    return any(name.removesuffix(".py") in imported for one in others if os.path.isdir(one) for name in os.listdir(one))


def _become(
    connection: socket.socket, descriptors: list[int], environment: dict[str, str], folder: str, command: list[str]
) -> None:
    """Make this process the same as a new Python process would be."""
    atexit.register(gc.unfreeze)  # otherwise objects are never collected, which some libraries miss at exit
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.sendall(b"y")
    os.dup(connection.fileno())  # stays open until this process ends
    for own, theirs in zip(DESCRIPTORS, descriptors, strict=True):
        os.dup2(theirs, own)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.modules["numpy"].random.seed()  # Python reseeds only its own generator
    sys.argv = command
    given = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [os.path.dirname(command[0]), *given, *(place for place in sys.path if place not in given)]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        import runpy

        runpy.run_path(serve(sys.argv[2]), run_name="__main__")
    else:
        begin_worker(sys.argv[1], sys.argv[2:])
