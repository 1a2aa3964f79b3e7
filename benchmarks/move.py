"""Times moving an actor with its moments of Adam to another pool, and a plain copy of as many bytes, in one run.

    python benchmarks/move.py [--model smollm2-135m] [--repeats 3]

One process a pool, on one machine. Prints seconds of a plain copy of the same bytes through a pipe between two
processes, of the move's data (until all is in place and its checksums are compared), their ratio, and of the whole move
with the start of its process; beside the last two what `lab.diff` said before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection

import torch

import workbench as wb
from workbench.batches.columns import Ragged, Table

BLOCK = 64 * 2**20


def receive(pipe: Connection, nbytes: int) -> None:
    """Fill memory that is there already, and say so."""
    buffer = memoryview(bytearray(nbytes))
    pipe.send_bytes(b"ready")
    for start in range(0, nbytes, BLOCK):
        pipe.recv_bytes_into(buffer, start)
    pipe.send_bytes(b"done")


def plain_copy(nbytes: int) -> float:
    """Seconds of a copy of so many bytes from this process to another."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, nbytes))
    process.start()
    source = memoryview(bytearray(nbytes))
    mine.recv_bytes()
    began = time.monotonic()
    for start in range(0, nbytes, BLOCK):
        mine.send_bytes(source[start : start + BLOCK])
    mine.recv_bytes()
    took = time.monotonic() - began
    process.join()
    return took


def table() -> Table:
    """What an update of the actor reads, of two short rows."""
    rows = [torch.arange(8) + 5, torch.arange(8) + 40]
    numbers = [torch.linspace(-1, 1, 8), torch.linspace(1, -1, 8)]
    return {
        "prompt_ids": Ragged.of(rows, torch.int64),
        "response_ids": Ragged.of(rows, torch.int64),
        "response_mask": Ragged.of([torch.ones(8, dtype=torch.bool)] * 2, torch.bool),
        "old_log_prob": Ragged.of([n - 5 for n in numbers], torch.float32),
        "advantages": Ragged.of(numbers, torch.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    lab = wb.open(
        "move-benchmark",
        models={"actor": arguments.model},
        placement=wb.Placement.of({"here": (1, ["actor"])}),
        devices=2,
        prompts="arithmetic",
        training=wb.Training(engine="torch", learning_rate=1e-6),
        generation=wb.Generation(engine="transformers", max_model_tokens=256),
        if_exists="replace",
        runs=tempfile.mkdtemp(),
    )
    with lab:
        lab.actor.update_actor(lab.put(table()))
        ratios, whole = [], []
        for number in range(arguments.repeats):
            said = lab.diff(wb.Placement.of({("there", "here")[number % 2]: (1, ["actor"])}))
            change = lab.move(said.new)
            assert change.took_s is not None
            assert change.transfer_s is not None
            assert said.seconds is not None
            copy_s = plain_copy(change.total_bytes)
            ratios.append(change.transfer_s / copy_s)
            whole.append(change.took_s)
            print(
                f"{change.total_bytes:,} bytes: plain copy {copy_s:.2f} s, move's data {change.transfer_s:.2f} s "
                f"(estimated {said.seconds:.2f} s, {said.measured}), ratio {ratios[-1]:.2f}; "
                f"whole move {change.took_s:.2f} s (estimated {said.seconds + said.start_s:.2f} s)",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios):.2f}, median move {statistics.median(whole):.2f} s")


if __name__ == "__main__":
    main()
