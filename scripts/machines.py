"""Machines on this one, to try a cluster where there is none: network namespaces, each with its own address, name,
processes, shared memory and Ray node.

    python scripts/machines.py up 3 --cores 2 --racks a a b   # a head, and machines m1, m2, m3 with two slots each
    python scripts/machines.py traffic                        # bytes that each machine has sent and received
    python scripts/machines.py link m2 --rate 1gbit --delay 10ms --loss 1%
    python scripts/machines.py cut m2                         # the network is gone, the processes live; `join` ends it
    python scripts/machines.py kill m2                        # as if its power were gone; `start` brings it back
    python scripts/machines.py freeze m2                      # its processes stand still; `thaw` ends it
    python scripts/machines.py down

`make cluster DO="..."` is the same. `up` says how a notebook joins: by `address=`, and a variable with Ray's token.

Needs Linux and root: `ip netns`, `unshare` and /dev/net/tun. The head, without slots, and the notebook are on this
machine itself. Every machine has one cable, a TUN device, and all cables end in one process that carries packets from
one to the other: it does what `tc` does with netem (rate, delay, loss), also where the kernel has no netem. Each
machine sees the files of this one, but has Ray's folder, and /tmp/wbm1/runs, for itself. All share this machine's
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import re
import secrets
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

FOLDER = "/tmp/wbm"  # and a number: the path of Ray's sockets may have 107 bytes
MTU = 60_000  # one call of the kernel carries so many bytes: a gigabyte a second and more through a Python process
OPEN_TUN, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
START_S = 150.0
_started: list[subprocess.Popen[bytes]] = []  # by this process, which reaps them when it ends
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass
class Link:
    """The cable of a machine, in each direction. rate: bits a second; 0: no limit. loss: a share of the packets."""

    rate: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    cut: bool = False


@dataclass
class Machine:
    """processes: its first process, under which all others are, and when that began; none while it is down."""

    name: str
    number: int  # the end of its address
    cores: int
    rack: str
    gpus: int = 0  # that Ray is told of, whatever there is
    pid: int = 0
    created: float = 0.0
    link: Link = field(default_factory=Link)

    @property
    def inside(self) -> int:
        """The first process in its namespaces, as its id is here: for `nsenter --target`."""
        return psutil.Process(self.pid).children()[0].pid


@dataclass
class Cluster:
    """number: of the cluster, part of its addresses and names. head and switch: process ids, and when these began."""

    number: int
    machines: dict[str, Machine]
    head: tuple[int, float] = (0, 0.0)
    switch: tuple[int, float] = (0, 0.0)

    @property
    def folder(self) -> Path:
        return Path(f"{FOLDER}{self.number}")

    @property
    def address(self) -> str:
        return f"{self.ip(1)}:{7000 + self.number}"

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs to join Ray there."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")}

    def ip(self, number: int) -> str:
        return f"10.77.{self.number}.{number}"

    def namespace(self, machine: Machine) -> str:
        return f"wbm{self.number}-{machine.name}"

    def save(self) -> None:
        new = self.folder / "state.new"
        new.write_text(json.dumps(asdict(self)))
        new.replace(self.folder / "state.json")

    @classmethod
    def load(cls, folder: Path) -> Cluster:
        state = json.loads((folder / "state.json").read_text())
        machines = {
            name: Machine(**{**machine, "link": Link(**machine["link"])}) for name, machine in state["machines"].items()
        }
        return cls(state["number"], machines, tuple(state["head"]), tuple(state["switch"]))

    # ------------------------------------------------------------------ start and stop

    def start(self, machine: Machine) -> None:
        """Start the Ray node of a machine, behind its cable."""
        ray, runs = self.folder / "ray", self.folder / "runs"
        own = self.folder / machine.name
        for name in ("ray", "runs"):
            (own / name).mkdir(parents=True, exist_ok=True)
        inside = [
            f"hostname {machine.name}", "ip link set lo up", "mount -t proc proc /proc", "mount -t tmpfs shm /dev/shm",
            f"mount --bind {own}/ray {ray}", f"mount --bind {own}/runs {runs}",
            f"exec {sys.executable} -m ray.scripts.scripts start --block --address={self.address} "
            f"--node-ip-address={self.ip(machine.number)} --num-cpus={machine.cores} --num-gpus={machine.gpus} "
            f"--temp-dir={ray} --object-store-memory={2**29} --disable-usage-stats --labels=rack={machine.rack}",
        ]  # fmt: skip
        command = ["ip", "netns", "exec", self.namespace(machine), "unshare", "--uts", "--pid", "--mount", "--ipc",
                   "--fork", "--kill-child", "sh", "-ec", "\n".join(inside)]  # fmt: skip
        machine.pid, machine.created = self.spawn(command, own / "log", "Ray runtime started")

    def start_again(self, name: str) -> None:
        """Bring a machine back."""
        self.kill(name)  # its Ray node may have ended, and left the rest
        self.start(self.machines[name])
        self.save()

    def kill(self, name: str) -> None:
        """End all processes of a machine at once."""
        machine = self._now(name)
        _end(machine.pid, machine.created)  # --kill-child ends the first process of its namespace, and that all others
        machine.pid, machine.created = 0, 0.0
        self.save()

    def spawn(self, command: Sequence[str], log: Path, ready: str) -> tuple[int, float]:
        """Start a process that outlives this one, wait until it has said that it is ready, and give its id."""
        variables = {**os.environ, **self.variables, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=variables
            )
        _started.append(process)
        created, deadline = psutil.Process(process.pid).create_time(), time.monotonic() + START_S
        try:
            while ready not in log.read_text(errors="replace"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)[:160]} did not start, see {log}:\n{log.read_text()[-800:]}")
                time.sleep(0.05)
        except BaseException:  # an interrupt too: nobody would know of it
            _end(process.pid, created)
            raise
        return process.pid, created

    def _now(self, name: str) -> Machine:
        """A machine as it is now: a command may have changed it."""
        self.machines = Cluster.load(self.folder).machines
        return self.machines[name]

    def down(self) -> None:
        """End everything, and remove it."""
        self.machines = Cluster.load(self.folder).machines
        for machine in self.machines.values():
            _end(machine.pid, machine.created)
        _end(*self.head)
        _end(*self.switch)
        for machine in self.machines.values():
            subprocess.run(["ip", "netns", "del", self.namespace(machine)], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ what is done to it

    def shape(self, name: str, **changes: float) -> None:
        """Change the cable of a machine: see `Link`."""
        link = self._now(name).link
        for what, value in changes.items():
            setattr(link, what, value)
        self.save()
        psutil.Process(self.switch[0]).send_signal(signal.SIGHUP)

    def signal(self, name: str, which: signal.Signals) -> None:
        """Send a signal to all processes of a machine."""
        for process in psutil.Process(self._now(name).pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(which)

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes that each machine has sent and received, as its network device counts them."""
        found = {}
        for name, machine in self.machines.items():
            listed = subprocess.run(
                ["ip", "-n", self.namespace(machine), "-j", "-s", "link", "show", "cable"],
                capture_output=True, check=True,
            )  # fmt: skip
            counts = json.loads(listed.stdout)[0]["stats64"]
            found[name] = (int(counts["tx"]["bytes"]), int(counts["rx"]["bytes"]))
        return found


def up(count: int, *, cores: int = 2, racks: Sequence[str] = (), gpus: int = 0) -> Cluster:
    """Start a head and that many machines. racks: the label of each; none: all are in rack "a". gpus: of each, by what
    Ray is told."""
    number = next(n for n in range(1, 250) if _claim(n))
    machines = {
        f"m{n}": Machine(f"m{n}", 10 + n, cores, rack, gpus) for n, rack in enumerate(racks or ["a"] * count, start=1)
    }
    cluster = Cluster(number, machines)
    for name in ("ray", "runs"):
        (cluster.folder / name).mkdir()
    token = cluster.folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    cluster.save()
    try:
        for machine in machines.values():
            subprocess.run(["ip", "netns", "add", cluster.namespace(machine)], check=True)
        switch = [sys.executable, __file__, "switch", str(cluster.folder)]
        cluster.switch = cluster.spawn(switch, cluster.folder / "switch.log", "ready")
        cluster.save()
        head = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=0"),
            *(f"--node-ip-address={cluster.ip(1)}", f"--port={7000 + number}", f"--temp-dir={cluster.folder}/ray"),
            *("--include-dashboard=false", "--disable-usage-stats", f"--object-store-memory={2**29}"),
        ]
        cluster.head = cluster.spawn(head, cluster.folder / "head.log", "Ray runtime started")
        cluster.save()
        with ThreadPoolExecutor() as at_once:
            list(at_once.map(cluster.start, machines.values()))
        cluster.save()
    except BaseException:
        cluster.down()
        raise
    return cluster


@contextlib.contextmanager
def cluster(count: int, *, cores: int = 2, racks: Sequence[str] = (), gpus: int = 0) -> Iterator[Cluster]:
    """A cluster for as long as the block lasts."""
    found = up(count, cores=cores, racks=racks, gpus=gpus)
    try:
        yield found
    finally:
        found.down()


def allowed() -> str:
    """Why no machines can be started here; empty where they can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "machines need Linux and root"
    if not os.access("/dev/net/tun", os.W_OK) or not (shutil.which("ip") and shutil.which("unshare")):
        return "machines need /dev/net/tun, ip and unshare"
    inside = ["ip", "tuntap", "add", "dev", "cable", "mode", "tun"]
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", *inside], check=False, capture_output=True
    )
    return "network namespaces are not allowed here" if tried.returncode else ""


def _claim(number: int) -> bool:
    """Whether the folder of a cluster with this number was made; one that is there is another cluster's."""
    try:
        Path(f"{FOLDER}{number}").mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _end(pid: int, created: float) -> None:
    """Kill a process that began then, and those under it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        if top.create_time() == created:
            family = [top, *top.children(recursive=True)]
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=20)
    for process in _started:
        process.poll()


# ---------------------------------------------------------------------- the process in which all cables end


def _cable(name: str, address: str, namespace: str = "") -> int:
    """A network device with that address, in a namespace or here; the file in which its other end is."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if namespace:
            there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            if libc.setns(there, 0):
                raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered")
            os.close(there)
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, OPEN_TUN, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        for words in (f"addr add {address}/24 dev {name}", f"link set {name} mtu {MTU} txqueuelen 10000 up"):
            subprocess.run(["ip", *words.split()], check=True)
    finally:
        libc.setns(here, 0)
        os.close(here)
    return file


def carry(folder: Path) -> None:
    """Carry packets between cables, as their links let them through, until this process is ended."""
    cluster = Cluster.load(folder)
    files = {1: _cable(f"wbm{cluster.number}", cluster.ip(1))}
    for machine in cluster.machines.values():
        files[machine.number] = _cable("cable", cluster.ip(machine.number), cluster.namespace(machine))
    links = {number: Link() for number in files}

    def read_links(*_: object) -> None:
        links.update({machine.number: machine.link for machine in Cluster.load(folder).machines.values()})

    signal.signal(signal.SIGHUP, read_links)
    read_links()
    readers = selectors.DefaultSelector()
    for number, file in files.items():
        readers.register(file, selectors.EVENT_READ, number)
    print("ready", flush=True)
    free_s: dict[tuple[int, bool], float] = {}  # when a cable has let through what came before, by direction
    waiting: list[tuple[float, int, int, bytes]] = []
    order = 0
    while True:
        ahead = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in readers.select(ahead):
            source, file = key.data, key.fd
            for _ in range(64):
                try:
                    packet = os.read(file, MTU + 64)
                except BlockingIOError:
                    break
                if packet[0] >> 4 != 4 or packet[19] not in files:  # of IPv4 alone
                    continue
                target, arrives = packet[19], time.monotonic()
                for number, sends in ((source, True), (target, False)):
                    link = links[number]
                    if link.cut or (link.loss and random.random() < link.loss):
                        break
                    if link.rate:
                        arrives = max(arrives, free_s.get((number, sends), 0.0)) + 8 * len(packet) / link.rate
                        free_s[number, sends] = arrives
                    arrives += link.delay_s
                else:
                    order += 1
                    heapq.heappush(waiting, (arrives, order, target, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):
                os.write(files[target], packet)


# ---------------------------------------------------------------------- the command


def _number(text: str, units: dict[str, float], ending: str) -> float:
    """ "1gbit", "10ms", "1%": what stands before the ending, times the unit's worth."""
    found = re.fullmatch(rf"([\d.]+)({'|'.join(units)}){ending}", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number with a unit, such as 1gbit, 10ms or 1%")
    return float(found[1]) * units[found[2]]


def _rate(text: str) -> float:
    return _number(text, UNITS, "bit")


def _delay(text: str) -> float:
    return _number(text, {"m": 1e-3, "u": 1e-6, "": 1.0}, "s")


def _loss(text: str) -> float:
    if (loss := _number(text, {"": 0.01}, "%")) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at most all packets can be lost")
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parser.add_argument("--number", type=int, help="number of the cluster, if several run")
    starting = commands.add_parser("up", help="start a head and this many machines")
    starting.add_argument("count", type=int)
    starting.add_argument("--cores", type=int, default=2, help="slots of each machine (default: 2)")
    starting.add_argument("--racks", nargs="+", default=[], help="the rack of each machine (default: one rack)")
    shaping = commands.add_parser("link", help="shape the cable of a machine; without options: reset it")
    shaping.add_argument("machine")
    shaping.add_argument("--rate", type=_rate, default=0.0, help="such as 1gbit")
    shaping.add_argument("--delay", type=_delay, default=0.0, dest="delay_s", help="in each direction, such as 10ms")
    shaping.add_argument("--loss", type=_loss, default=0.0, help="such as 1%%")
    for name in ("cut", "join", "kill", "start", "freeze", "thaw"):
        commands.add_parser(name).add_argument("machine")
    commands.add_parser("traffic", help="bytes that each machine has sent and received")
    commands.add_parser("down", help="end everything")
    commands.add_parser("switch").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "switch":
        return carry(given.folder)
    if given.command == "up":
        if reason := allowed():
            parser.error(reason)
        if given.racks and len(given.racks) != given.count:
            parser.error(f"--racks {' '.join(given.racks)}: one rack for each of the {given.count} machines")
        made = up(given.count, cores=given.cores, racks=given.racks)
        exports = "\n".join(f"  export {name}={value}" for name, value in made.variables.items())
        print(
            f"cluster {made.number}: {given.count} machines with {given.cores} slots each. Before the notebook starts:"
        )
        print(f'{exports}\nand in it:\n  wb.open(..., address="{made.address}", device="cpu")')
        return None
    running = {int(file.parent.name[3:]): file.parent for file in Path(FOLDER).parent.glob("wbm[0-9]*/state.json")}
    if not running:
        parser.error("no cluster runs: start one with `up 3`")
    if given.number not in running and (given.number or len(running) > 1):
        parser.error(f"--number {given.number}: say which of {sorted(running)} before the command")
    found = Cluster.load(running[given.number or next(iter(running))])
    if given.command == "down":
        return found.down()
    if given.command == "traffic":
        for name, (sent, received) in found.traffic().items():
            print(f"{name}  sent {sent / 1e6:10.1f} MB  received {received / 1e6:10.1f} MB")
        return None
    if given.machine not in found.machines:
        parser.error(f"machine {given.machine!r} is none of {', '.join(found.machines)}")
    if given.command == "link":
        found.shape(given.machine, rate=given.rate, delay_s=given.delay_s, loss=given.loss)
    elif given.command in ("cut", "join"):
        found.shape(given.machine, cut=given.command == "cut")
    elif given.command in ("freeze", "thaw"):
        found.signal(given.machine, signal.SIGSTOP if given.command == "freeze" else signal.SIGCONT)
    elif given.command == "kill":
        found.kill(given.machine)
    elif psutil.pid_exists(found.machines[given.machine].pid):
        parser.error(f"{given.machine} runs: `kill {given.machine}` ends it")
    else:
        found.start_again(given.machine)
    return None


if __name__ == "__main__":
    main()
