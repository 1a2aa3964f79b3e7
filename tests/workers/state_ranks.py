"""What the tests of a role's state run inside ranks of their own: one engine learns, another takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from tests.engines.layout_ranks import groups_of
from tests.engines.training_ranks import CPU, negative_log_likelihood, sequences, settings, squared_values
from tests.placement.memory_ranks import ADAPTER, config_of
from tests.workers.update_ranks import context_here
from workbench.engines.training import TrainingEngine, make_training_engine
from workbench.models.heads import TokenLogProbs, TokenValues
from workbench.models.lora import add_lora
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.placement.role_model import RoleModel
from workbench.placement.state import state_of
from workbench.settings.training import Optimizer
from workbench.telemetry import Recorder
from workbench.workers.model_worker import ModelWorker, digest
from workbench.workers.role_state import RoleMove, publish_state, take_state
from workbench.workers.weight_exchange import WeightExchange


@dataclass(frozen=True, kw_only=True)
class Case:
    """A role that goes from one layout of two ranks to another. kind: "torch", "zero0" to "zero3", or "frozen".

    same: in the same processes, else in others. steps: optimizer steps before.
    """

    kind: str
    old: Layout
    new: Layout
    dtype: torch.dtype = torch.float32
    head: str = "lm"
    adapter: bool = False
    same: bool = False
    steps: int = 2
    optimizer: Optimizer = "adamw"


def moved(case: Case) -> dict[str, Any]:
    """Digests of all weights, of the engine that learned and of the one that took its place, then after one more step
    of each; bytes that this rank received, and those of the plan."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = _worker(case, case.old, seed=0), _worker(case, case.new, seed=1)
    for _ in range(case.steps):
        _step(case, first.engine, case.old)
    places = tuple(range(size)), tuple(range(size)) if case.same else tuple(range(size, 2 * size))
    hosts = [f"old-{n}" for n in range(size)] + ([] if case.same else [f"new-{n}" for n in range(size)])
    model = RoleModel(
        config=config_of(tied=case.head == "lm"), head=case.head, dtype=str(case.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        training=settings("torch" if case.kind == "frozen" else case.kind, optimizer=case.optimizer),
        trained=case.kind != "frozen",
        adapter=ADAPTER if case.adapter else None,
    )  # fmt: skip
    parts = tuple(part for part in state_of(model) if case.steps or part.what != "moments")
    move = RoleMove(
        role="actor", key="m", hosts=tuple(hosts), parts=parts, source=(case.old, places[0]),
        destination=(case.new, places[1]),
    )  # fmt: skip
    recorder = Recorder()
    everyone: list[Any] = [None] * size

    def ask(host: str, method: str, *args: Any) -> Any:
        assert method == "cut_weights"
        return everyone[int(host.rpartition("-")[2])].served(*args)

    mine = WeightExchange(f"old-{rank}", recorder, ask)
    carried = publish_state(first, move, rank, mine)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine._snapshots)
    for number, snapshots in enumerate(gathered):
        everyone[number] = WeightExchange(f"old-{number}", Recorder(), ask)
        everyone[number]._snapshots = snapshots
    before = _digests(first.engine)
    taking = mine if case.same else WeightExchange(f"new-{rank}", recorder, ask)
    take_state(second, move, rank, taking, carried)
    after = _digests(second.engine)
    transfers = recorder.drain()[1]
    plans = [(part.copies, part.reshard(move.source, move.destination)) for part in parts]
    planned = sum(copies * plan.figures().received[plan.ranks.index(places[1][rank])] for copies, plan in plans)
    found = {
        "before": before,
        "after": after,
        "received": sum(moved.bytes for moved in transfers),
        "planned": int(planned),
        "kinds": {moved.kind for moved in transfers},
        "steps": getattr(second.engine, "steps", 0),
    }
    if case.kind != "frozen":
        reports = [_step(case, worker.engine, layout) for worker, layout in ((first, case.old), (second, case.new))]
        found["norms"] = [report.grad_norm for report in reports]
        found["rates"] = [report.learning_rate for report in reports]
        found["further"] = [_weights(worker.engine) for worker in (first, second)]
    return found


def all_moved(cases: list[Case]) -> list[dict[str, Any]]:
    return [moved(case) for case in cases]


def _worker(case: Case, layout: Layout, seed: int) -> Any:
    """A worker with an engine; other seeds, other weights (of a model under an adapter, the same)."""
    model = LlamaForCausalLM(config_of(tied=case.head == "lm")).eval()
    torch.manual_seed(0 if case.adapter else seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if case.adapter:
        add_lora(model, ADAPTER, seed)
    module: Any = TokenLogProbs(model, micro_batch_tokens=512) if case.head == "lm" else TokenValues(model.model, 64)
    given = None if case.kind == "frozen" else settings(case.kind, optimizer=case.optimizer)
    worker: Any = ModelWorker(Model("tiny-llama"), context_here())
    worker.engine = make_training_engine(module, given, groups_of(layout), device=CPU, dtype=case.dtype)
    return worker


def _step(case: Case, engine: TrainingEngine, layout: Layout) -> Any:
    """One step on four rows, which the replicas share."""
    loss = negative_log_likelihood if case.head == "lm" else squared_values
    passes = [loss(sequences(0)[n : n + 2]) for n in (0, 2)]
    return engine.step(passes[layout.coordinates(dist.get_rank())[0] :: layout.d])


def _digests(engine: TrainingEngine) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in engine.stored_weights()}


def _weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in engine.stored_weights()}
