"""Weight syncs by patches against whole ones: bytes and seconds, by dtype, learning rate and placement, in one run.

    python benchmarks/sync.py [--model smollm2-135m] [--engine vllm] [--dtypes bfloat16 float32] [--repeats 4]
    python benchmarks/sync.py --address ADDRESS     # of a cluster, such as `make cluster` starts, with links of a rate
    python benchmarks/sync.py --parts [--model smollm2-135m]

On processes: an actor that is trained, and rollout workers in a pool of their own (two pools), or an actor cut over two
pipeline ranks that generate with whole weights (one pool). Bytes between processes; seconds of `sync_weights`, and of
them those in which generation pauses; medians, each beside those of whole syncs. Every update is of the same rows.

--parts: without processes, after a step of AdamW on a text: seconds of comparing, coding and patching, and of a plain
copy of the weights; bytes as they are coded, and with positions as 32-bit integers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import workbench as wb
from workbench.batches.columns import Ragged, Table
from workbench.models import load_tokenizer
from workbench.models.loading import load_causal_lm
from workbench.resharding.patches import Change, Patch, change

RATES = (1e-6, 1e-5, 1e-4)
ROWS: Table = {  # what an update of the actor reads
    "prompt_ids": Ragged.of([range(5, 13), range(40, 48)], torch.int64),
    "response_ids": Ragged.of([range(5, 13), range(40, 48)], torch.int64),
    "response_mask": Ragged.of([[True] * 8] * 2, torch.bool),
    "old_log_prob": Ragged.of([[-5.0] * 8] * 2, torch.float32),
    "advantages": Ragged.of([[n / 4 - 1 for n in range(8)], [1 - n / 4 for n in range(8)]], torch.float32),
}
TEXT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May: 72 in all."
PLACEMENTS = {
    "two pools": wb.Placement.of({"train": (1, ["actor"]), "rollout": (1, ["rollout"])}),
    "one pool": wb.Placement.of({"both": (2, ["actor"])}, layouts={"actor": (2, 1, 1)}),
}


def synced(arguments: argparse.Namespace, placement: wb.Placement, dtype: Any, sync: Any) -> dict[float, list[float]]:
    """By learning rate: bytes, bytes of the whole slices, seconds of a sync, and of its pause of generation."""
    where: dict[str, Any] = {"address": arguments.address, "device": "cpu"} if arguments.address else {"devices": 2}
    with wb.open(
        "sync-benchmark", models={"actor": arguments.model}, placement=placement, prompts="arithmetic",
        dtype=dtype, training=wb.Training(engine="torch", minibatches=1), if_exists="replace", runs=tempfile.mkdtemp(),
        generation=wb.Generation(engine=arguments.engine, max_model_tokens=256, kv_cache_gib=0.1, sync=sync), **where,
    ) as lab:  # fmt: skip
        found, batch = {}, lab.put(ROWS)
        for rate in RATES:
            lab.actor.training.learning_rate = rate
            rows = []
            for _ in range(arguments.repeats + 1):  # the first of all is whole
                lab.actor.update_actor(batch)
                began = time.perf_counter()
                lab.actor.sync_weights()
                took_s, last = time.perf_counter() - began, lab.syncs().iloc[-1]
                rows.append([last["moved_bytes"], last["whole_bytes"], took_s, last["duration_s"]])
            found[rate] = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
        return found


def processes(arguments: argparse.Namespace) -> None:
    rows = []
    for where in arguments.placements:
        placement = PLACEMENTS[where]
        for dtype in arguments.dtypes:
            patched, whole = (synced(arguments, placement, dtype, sync) for sync in ("delta", "whole"))
            for rate in RATES:
                (moved, of, took_s, pause_s), (all_bytes, _, all_s, all_pause_s) = patched[rate], whole[rate]
                assert of == all_bytes
                rows.append({
                    "placement": where, "dtype": dtype, "rate": f"{rate:g}", "MB": moved / 1e6, "whole MB": of / 1e6,
                    "share": f"{moved / of:.2%}", "sync s": took_s, "whole sync s": all_s, "pause s": pause_s,
                    "whole pause s": all_pause_s,
                })  # fmt: skip
    print(pd.DataFrame(rows).round(2).to_string(index=False))


def best(act: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times)


def patched(patches: list[Patch | None], targets: list[Tensor]) -> None:
    for patch, target in zip(patches, targets, strict=True):
        if patch is not None:
            patch.add_to(target.view(len(target), -1))


def parts(arguments: argparse.Namespace) -> None:
    ids, rows = load_tokenizer(arguments.model)(TEXT, return_tensors="pt").input_ids, []
    for dtype in arguments.dtypes:
        kind = getattr(torch, dtype)
        for rate in RATES:
            model: Any = load_causal_lm(arguments.model, dtype=torch.float32)
            weights = list(model.parameters())
            optimizer = torch.optim.AdamW(weights, lr=rate)
            for _ in range(arguments.repeats):  # the model's files are rounded, so that the first step shows more
                before = [weight.detach().to(kind, copy=True) for weight in weights]
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
            after, targets = ([w.detach().to(kind, copy=True) for w in weights], [old.clone() for old in before])
            pairs, sizes = list(zip(before, after, strict=True)), [weight.numel() for weight in weights]

            def compared(pairs: list[tuple[Tensor, Tensor]] = pairs) -> list[Change | None]:
                return [change(old, new) for old, new in pairs]

            found = compared()

            def coded(found: list[Change | None] = found, sizes: list[int] = sizes) -> list[Patch | None]:
                return [one and Patch.of(one, size) for one, size in zip(found, sizes, strict=True)]

            patches, whole = coded(), sum(old.nbytes for old in before)
            changed = sum(len(one.positions) if one else size for one, size in zip(found, sizes, strict=True))
            sent = sum(patch.nbytes if patch else old.nbytes for patch, old in zip(patches, before, strict=True))
            rows.append({
                "dtype": dtype, "rate": f"{rate:g}", "changed": f"{changed * kind.itemsize / whole:.2%}",
                "coded": f"{sent / whole:.2%}", "plain": f"{changed * (4 + kind.itemsize) / whole:.2%}",
                "compare ms": 1e3 * best(compared), "code ms": 1e3 * best(coded),
                "patch ms": 1e3 * best(partial(patched, patches, targets)),
                "copy ms": 1e3 * best(partial(torch._foreach_copy_, targets, after)),
            })  # fmt: skip
    print(pd.DataFrame(rows).round(1).to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--address")
    parser.add_argument("--placements", nargs="+", default=list(PLACEMENTS), choices=PLACEMENTS)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args()
    (parts if arguments.parts else processes)(arguments)


if __name__ == "__main__":
    main()
