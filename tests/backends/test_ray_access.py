"""Who can reach a Ray head of our own: real heads, real sockets, real certificates."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import psutil
import pytest
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from tests.backends.test_cluster import answer, run
from tests.expected import expect_error
from workbench.backends.ray_access import SOCKET, SOCKET_BYTES, session_folder
from workbench.errors import BadInput

pytestmark = [pytest.mark.slow]

WORK = """
import json, os, sys
from workbench.backends.cluster import connect, running_head, stop_idle_head
set_before = dict(os.environ)
ray = connect()
answered = ray.get(ray.remote(lambda: "from a worker").remote())
changed = sorted(name for name in os.environ if "AUTH" in name and os.environ[name] != set_before.get(name))
print(json.dumps([running_head()["pid"], running_head()["address"], answered, changed]), flush=True)
sys.stdin.readline()
stop_idle_head()
"""


def asked(address: str, token: str | None, credentials: grpc.ChannelCredentials | None = None) -> str:
    """What the control store of Ray answers to one call: a gRPC status."""
    opened = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
    with opened as channel:
        store = gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel)
        shown = [("authorization", f"Bearer {token}")] if token else []
        try:
            store.InternalKVKeys(gcs_service_pb2.InternalKVKeysRequest(namespace=b"x"), metadata=shown, timeout=20)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def listening(pid: int) -> list[str]:
    """Addresses at which a process and those under it accept connections from the network."""
    top = psutil.Process(pid)
    family = [top, *top.children(recursive=True)]
    return [c.laddr.ip for process in family for c in process.net_connections("inet") if c.status == "LISTEN"]


@pytest.mark.parametrize("mode", [pytest.param("", marks=pytest.mark.thorough), "disabled"])
def test_a_head_of_ours_listens_on_the_loopback_and_asks_for_its_token(tmp_path: Path, mode: str) -> None:
    """Also where the environment says that Ray needs no token, as a process that had joined an open cluster left it."""
    with run(WORK, tmp_path, **({"RAY_AUTH_MODE": mode} if mode else {})) as process:
        head, address, answered, changed = answer(process)
        assert answered == "from a worker"
        assert changed == []
        found = listening(int(str(head))) + listening(process.pid)
        assert len(found) > 4
        assert {ip.removeprefix("::ffff:") for ip in found} == {"127.0.0.1"}
        token = (tmp_path / "ray_token").read_text()
        assert [asked(str(address), shown) for shown in (None, "0" * 64, token)] == ["UNAUTHENTICATED"] * 2 + ["OK"]
        process.communicate("\n", timeout=60)


# An open cluster of somebody else, joined; then a program that is started from there, with a head of its own
OPEN = """
import json, os, subprocess, sys, tempfile
import ray
os.environ["RAY_AUTH_MODE"] = "disabled"
folder = tempfile.TemporaryDirectory()
options = {"num_cpus": 1, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
ray.init("local", _temp_dir=folder.name, **options)
address = ray.get_runtime_context().gcs_address
guest = '''
import os, subprocess, sys, warnings
from workbench.backends.cluster import connect
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    connect(sys.argv[1])
print(["joined without a token" in str(one.message) for one in told], os.environ.get("RAY_AUTH_MODE"))
'''
environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
done = subprocess.run([sys.executable, "-c", guest, address], env=environment, capture_output=True, text=True)
print(json.dumps([done.stdout.strip(), done.stderr[-2000:]]), flush=True)
ray.shutdown()
"""


@pytest.mark.thorough
def test_joining_an_open_cluster_warns_and_leaves_no_setting_behind(tmp_path: Path) -> None:
    with run(OPEN, tmp_path, HOME=str(tmp_path)) as process:
        said, errors = answer(process)
    assert said == "[True] None", errors


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a short path, as none of pytest's own is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_ray_keeps_its_sockets_where_only_this_user_can_enter(short: Path) -> None:
    made = session_folder().parent
    assert made.parent == short
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    with expect_error(BadInput, value="mode 777"):
        session_folder()
    made.rmdir()
    for target in (short, short / "nowhere"):
        made.symlink_to(target)
        with pytest.raises(BadInput):
            session_folder()
        made.unlink()


@pytest.mark.parametrize("longer", [0, 1, 60])
def test_a_socket_has_a_path_that_the_system_takes(short: Path, monkeypatch: pytest.MonkeyPatch, longer: int) -> None:
    """As in the TMPDIR of a batch system's job. A real socket is bound where Ray's would be."""
    fits = SOCKET_BYTES - len(os.fsencode(short / f"wb-{os.getuid()}" / SOCKET))
    folder = short / ("x" * (fits - 1 + longer))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    made = session_folder()
    assert made.parent.parent == (Path("/tmp") if longer else folder)
    path = made.parent / SOCKET
    assert len(os.fsencode(path)) <= SOCKET_BYTES
    if not longer:
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))


def test_a_temporary_folder_that_cannot_be_written_is_named(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with expect_error(BadInput, value="/proc/wb-.* cannot be made", remedy="TMPDIR"):
        session_folder()


def certificate(folder: Path) -> dict[str, str]:
    """Ray's settings for a certificate that signs itself, for 127.0.0.1."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    names = ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*made, *names], check=True, capture_output=True)
    files = {"RAY_TLS_SERVER_CERT": cert, "RAY_TLS_SERVER_KEY": key, "RAY_TLS_CA_CERT": cert}
    return {"RAY_USE_TLS": "1"} | {name: str(file) for name, file in files.items()}


@pytest.mark.thorough
def test_with_certificates_ray_speaks_tls_alone(tmp_path: Path) -> None:
    settings = certificate(tmp_path)
    with run(WORK, tmp_path / "home", **settings) as process:
        _, address, answered, _ = answer(process)
        assert answered == "from a worker"
        token = (tmp_path / "home" / "ray_token").read_text()
        ours, key = (Path(settings[f"RAY_TLS_{name}"]).read_bytes() for name in ("CA_CERT", "SERVER_KEY"))
        known = grpc.ssl_channel_credentials(ours, key, ours)
        strange = grpc.ssl_channel_credentials(ours)  # knows the server, and has no certificate to show
        given = [None, strange, known]
        assert [asked(str(address), token, each) for each in given] == ["UNAVAILABLE", "UNAVAILABLE", "OK"]
        process.communicate("\n", timeout=60)


@pytest.mark.thorough
def test_a_certificate_that_is_not_there_is_refused_before_ray_starts(tmp_path: Path) -> None:
    script = """
import json
from workbench.backends.cluster import connect, running_head
try:
    connect()
except ValueError as error:
    print(json.dumps([str(error), running_head()]))
"""
    with run(script, tmp_path, RAY_USE_TLS="1", RAY_TLS_SERVER_CERT="/nowhere") as process:
        said, head = answer(process)
    assert "RAY_TLS_SERVER_CERT='/nowhere'" in str(said)
    assert head is None
