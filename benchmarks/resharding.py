"""What a transition from training to generation costs, by the three strategies side by side.

    python benchmarks/resharding.py [--ranks 2 4 8] [--hidden 128 256 512] [--iterations 5]

On gloo processes of this machine, for Llamas of four layers whose weights all layouts divide. The strategies take
turns, so that what else the machine does falls on all of them alike. A row for each:

received      bytes that a rank received in one transition, the most of all ranks. Fails where a rank received other
              bytes than the plan says.
of hybridflow the same as a multiple of HybridFlow's; beside it that multiple by the formulas of the paper
              (arXiv:2409.19256, table 2), which count norms as if they were cut.
seconds       of the slowest rank, median over the iterations; and as a multiple of HybridFlow's.

Bytes set the seconds only where they are many: below a megabyte a rank, messages do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.engines.training_ranks import run_ranks  # noqa: E402
from workbench.engines.communicator import Communicator  # noqa: E402
from workbench.placement import Layout  # noqa: E402
from workbench.resharding.engine import ReshardingEngine  # noqa: E402
from workbench.resharding.strategies import STRATEGIES, plan_transition  # noqa: E402
from workbench.resharding.weights import ModelWeights, model_weights  # noqa: E402
from workbench.telemetry import Recorder  # noqa: E402

LAYOUTS = {2: Layout(1, 2, 1, 1, 1), 4: Layout(1, 4, 1, 1, 2), 8: Layout(1, 4, 2, 1, 2)}


def model(hidden: int) -> ModelWeights:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8 * hidden,
        tie_word_embeddings=False,
    )
    return model_weights(config, dtype="float32")


def formula(strategy: str, layout: Layout) -> float:
    """Received by a rank, as a part of the model."""
    mine, n = layout.p * layout.t, layout.size
    generation = (layout.p_g or layout.p) * (layout.t_g or layout.t)
    return {"full": (n - 1) / n, "v": (mine - 1) / mine, "hybridflow": (mine - generation) / (generation * mine)}[
        strategy
    ]


def measure(weights: ModelWeights, layout: Layout, iterations: int) -> dict[str, tuple[int, int, list[float]]]:
    """On one rank, for each strategy: bytes received, bytes that the plan says, seconds of each transition."""
    rank, recorder = dist.get_rank(), Recorder()
    communicator = Communicator(rank, dist.get_world_size(), recorder)
    engines, held = {}, {}
    found: dict[str, tuple[int, int, list[float]]] = {}
    for strategy in STRATEGIES:
        plan = plan_transition(weights, layout, strategy)
        engines[strategy] = ReshardingEngine(plan, communicator)
        shards = {weight.name: plan.source.shard(weight, rank) for weight in weights}
        held[strategy] = {name: torch.randn(shard.shape) for name, shard in shards.items() if shard is not None}
        found[strategy] = (0, int(plan.figures().received[rank]), [])
    for step, strategy in ((step, strategy) for step in range(-1, iterations) for strategy in STRATEGIES):
        dist.barrier()
        recorder.drain()
        start_s = time.perf_counter()
        for layer in engines[strategy].layers(held[strategy]):
            del layer
        taken_s = time.perf_counter() - start_s
        received = sum(transfer.bytes for transfer in recorder.drain()[1])
        _, planned, seconds = found[strategy]
        found[strategy] = (received, planned, seconds + [taken_s] * (step >= 0))
    return found


def rows(hidden: int, ranks: int, iterations: int) -> list[dict[str, Any]]:
    weights, layout = model(hidden), LAYOUTS[ranks]
    found = run_ranks(measure, ranks, weights, layout, iterations)
    table = []
    most = {strategy: max(rank[strategy][0] for rank in found) for strategy in STRATEGIES}
    seconds = {
        strategy: statistics.median(max(times) for times in zip(*(rank[strategy][2] for rank in found), strict=True))
        for strategy in STRATEGIES
    }
    for strategy in STRATEGIES:
        if any(rank[strategy][0] != rank[strategy][1] for rank in found):
            sys.exit(f"{strategy} on {ranks} ranks: received another number of bytes than planned")
        table.append(
            {
                "model": f"{weights.nbytes / 2**20:.0f} MiB",
                "train": f"{layout.p}-{layout.t}-{layout.d}",
                "generate": f"{layout.p_g}-{layout.t_g}",
                "strategy": strategy,
                "received": f"{most[strategy]:,}",
                "of hybridflow": f"{most[strategy] / most['hybridflow']:.3f}",
                "by formula": f"{formula(strategy, layout) / formula('hybridflow', layout):.3f}",
                "seconds": f"{seconds[strategy]:.3f}",
                "seconds of hybridflow": f"{seconds[strategy] / seconds['hybridflow']:.2f}",
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=LAYOUTS)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--iterations", type=int, default=5)
    arguments = parser.parse_args()
    cases = [(hidden, ranks) for hidden in arguments.hidden for ranks in arguments.ranks]
    import pandas as pd  # here: ranks that import this file need none of it

    for hidden, ranks in cases:
        print(pd.DataFrame(rows(hidden, ranks, arguments.iterations)).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
