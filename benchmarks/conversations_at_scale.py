"""Conversations by the thousand: seconds and memory for 250, 500, 1,000 and 2,000 at once, and how both grow.

The engine is a stub that writes a turn at once, so what is measured is everything else: environments in processes,
messages between them and the host, the loop of conversations, columns. Environments are coroutines that keep some state
and wait before they answer. Each size runs in a process of its own; memory is that of the host and of the environments'
processes, above what both have with one conversation in each.

    make bench NAME=conversations_at_scale
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

import workbench as wb
from workbench.engines.generation import Decoding, Response

SIZES = (250, 500, 1000, 2000)
TURNS, TOKENS, WAIT_S = 4, 16, 0.5
LINEAR = 1.25  # largest exponent that passes for linear, with the noise of a busy machine


class Waits:
    """Answers after a while, and remembers what was said."""

    def reset(self, prompt: str, sample_seed: int) -> str:
        self.said = [prompt]
        return "begin: "

    async def step(self, response: str) -> tuple[str, float, bool]:
        self.said.append(response)
        await asyncio.sleep(WAIT_S)
        return " go on. ", 1.0, len(self.said) > TURNS


class StubDecoding(Decoding):
    """Each row gets its tokens in the step after it came."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rows: deque[tuple[int, int]] = deque()

    @property
    def open(self) -> int:  # type: ignore[override]
        return len(self._rows)

    def _add(self, response: Response, prompt_ids: Sequence[int], seed: int, room: int, ends: Any) -> None:
        self._rows.append((response.row, seed))

    def step(self) -> list[Response]:
        ended = list[Response]()
        while self._rows:
            row, seed = self._rows.popleft()
            ids = [20 + (seed + n) % 200 for n in range(TOKENS)]
            ended.append(Response(row=row, ids=ids, log_probs=[-1.0] * TOKENS, ending="stop"))
        self.tokens += TOKENS * len(ended)
        return ended


def stub(engine: Any) -> None:
    """Have a generation engine write without its model."""

    @contextlib.contextmanager
    def decoding(sampling: Any, ends: Any, keep_cache: bool) -> Iterator[Decoding]:
        yield StubDecoding(engine._settings, engine._vocab_size, ends)

    engine._decoding = decoding


class Peak:
    """The largest memory of this process, and of those below it, while it is watched; bytes."""

    def __init__(self) -> None:
        self.host = self.environments = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        me = psutil.Process()
        command = me.cmdline()  # also of a process that has just been forked, and is to become another
        while not self._over.wait(0.05):
            self.host = max(self.host, me.memory_info().rss)
            below = 0
            for process in me.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    below += process.memory_info().rss if process.cmdline() != command else 0
            self.environments = max(self.environments, below)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def measure(rows: int, most_open: int | None, processes: int) -> dict[str, float]:
    """One size, after a call with one conversation in each process of environments."""
    with (
        tempfile.TemporaryDirectory() as runs,
        wb.open(
            "scale", models={"actor": "tiny-llama-tied"}, prompts="arithmetic", backend="inline",
            training=wb.Training(engine="torch"), runs=Path(runs),
            generation=wb.Generation(engine="transformers", max_model_tokens=512),
            placement=wb.Placement.of({"shared": (1, ["actor"]), "environments": (processes, ["environment"])}),
        ) as lab,
    ):  # fmt: skip
        (host,) = lab.hosts.backend._hosts.values()  # type: ignore[attr-defined]
        stub(host.workers["actor"].generator)
        prompts = lab.prompts.next(rows)

        def run(batch: wb.Batch) -> tuple[float, Peak]:
            began_s = time.monotonic()
            with Peak() as peak:
                made = lab.actor.generate_sequences(
                    batch, environment=Waits, max_turns=TURNS, max_new_tokens=256, concurrency=rows,
                    most_open=most_open, call_timeout_s=120,
                )  # fmt: skip
            table: dict[str, Any] = made.fetch(["turns", "ending"])
            assert set(table["turns"].tolist()) == {TURNS} and set(table["ending"]) == {"done"}
            return time.monotonic() - began_s, peak

        _, least = run(prompts.take([*range(processes)]))
        seconds, peak = run(prompts)
    return {
        "rows": rows, "seconds": seconds, "host_bytes": peak.host - least.host,
        "environments_bytes": peak.environments - least.environments,
    }  # fmt: skip


def exponent(found: Sequence[dict[str, float]], name: str, less: float = 0.0) -> float:
    """Of the growth of a figure with the number of conversations: the slope between logarithms, by least squares."""
    points = [(math.log(one["rows"]), math.log(max(one[name] - less, 1e-9))) for one in found]
    x_mean, y_mean = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--most-open", type=int)
    parser.add_argument("--processes", type=int, default=1, help="of environments: the pool of the role environment")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.most_open, options.processes)))
        return
    found = list[dict[str, float]]()
    print(f"{TURNS} turns of {TOKENS} tokens; an environment takes {WAIT_S:g} s for each, all of them at once")
    print("conversations    seconds    host MiB    environments MiB")
    for rows in options.sizes:
        command = [sys.executable, "-m", "benchmarks.conversations_at_scale", "--one", str(rows)]
        command += ["--processes", str(options.processes)]
        command += ["--most-open", str(options.most_open)] if options.most_open else []
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(one := json.loads(ended.stdout.splitlines()[-1]))
        mib = [one[name] / 2**20 for name in ("host_bytes", "environments_bytes")]
        print(f"{rows:13,} {one['seconds']:10.2f} {mib[0]:11.1f} {mib[1]:19.1f}", flush=True)
    if len(found) < 2:
        return
    waits_s = 0.0 if options.most_open else TURNS * WAIT_S
    exponents = {
        "seconds beyond the waits": exponent(found, "seconds", waits_s),
        "memory of the host": exponent(found, "host_bytes"),
        "memory of the environments": exponent(found, "environments_bytes"),
    }
    for name, value in exponents.items():
        print(f"{name} grows as conversations ^ {value:.2f}")
    print("nothing is quadratic" if max(exponents.values()) < LINEAR else "something grows faster than linearly")


if __name__ == "__main__":
    main()
