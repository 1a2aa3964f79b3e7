"""The three transitions from training to generation that HybridFlow compares (arXiv:2409.19256, section 5.3, table 2).

M: bytes of the model; training (p, t, d), generation (p_g, t_g) on the same ranks. To add a strategy: a subclass of
`Transition`, and its line in `STRATEGIES`.

The answer of `wb reshard`: a transition between two layouts of a model, in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import BadInput
from workbench.models.dense_config import read_plan_config
from workbench.resharding.boxes import Boxes
from workbench.resharding.plan import Distribution, Movement, Plan, Reshard
from workbench.resharding.weights import ModelWeights, Weight, model_weights
from workbench.settings.layout import Layout
from workbench.support.validation import one_of


class Transition(Plan):
    """From a training layout to a generation layout on the same ranks, 0 to p*t*d - 1; see `Layout` for both.

    Plain generation groups, unless a subclass defines others: consecutive ranks inside each training replica. trained:
    the distribution of the layout itself, which `training` may shard further. vocabulary_multiple: of the generation
    side, see `Distribution`.
    """

    def __init__(self, weights: ModelWeights, layout: Layout, *, vocabulary_multiple: int = 1) -> None:
        weights.check(layout.p, layout.t)
        self.layout = layout
        self.trained = Distribution(weights, layout, tuple(range(layout.size)))
        p_g, t_g = layout.p_g or layout.p, layout.t_g or layout.t
        generation = Layout(p_g, t_g, layout.size // (p_g * t_g))
        after = Distribution(weights, generation, self.generation_ranks(), vocabulary_multiple=vocabulary_multiple)
        super().__init__(self.training(weights), after)

    def training(self, weights: ModelWeights) -> Distribution:
        return self.trained

    def generation_ranks(self) -> tuple[int, ...]:
        """The ranks in the order in which the generation layout counts them."""
        return tuple(range(self.layout.size))

    @property
    def block(self) -> int:
        return self.layout.p * self.layout.t

    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        return (self.source.replica(self.source.coordinates(rank)[0]),)

    def generation_tensor_groups(self) -> list[list[int]]:
        return self._groups(2)

    def micro_data_groups(self) -> list[list[int]]:
        """The ranks of a training replica that hold the same generation shard."""
        return self._groups(0)

    def _groups(self, axis: int) -> list[list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            place = list(self.destination.coordinates(rank))
            place.pop(axis)
            found.setdefault((self.layout.coordinates(rank)[0], *place), []).append(rank)
        return sorted(found.values())


class FullGather(Transition):
    """DeepSpeed-Chat's way: trained as ZeRO-3, flat shards over all ranks; everything is gathered over all of them.

    A rank receives M - |T_r| and holds M at the peak, then cuts its generation slices out. Its flat shard, a run of
    elements across rows, is memory of its own beside a generation slice, so |T_r| is kept twice on every rank: on
    weights that divide M/(p*t*d), the paper's figure.
    """

    shares_storage = False

    def training(self, weights: ModelWeights) -> Distribution:
        return Distribution(weights, Layout(d=self.layout.size), tuple(range(self.layout.size)), "zero")

    def materialised(self, weight: Weight, rank: int) -> Boxes:
        return ((0, weight.matrix[0], 0, weight.matrix[1]),)

    @property
    def block(self) -> int:
        return self.layout.size

    def _block_movements(self, weight: Weight) -> list[Movement]:
        """Each shard has one owner, which sends it to all others."""
        shards = ((rank, self.source.boxes(weight, rank)) for rank in self.ranks)
        others = {rank: tuple(other for other in self.ranks if other != rank) for rank in self.ranks}
        return [Movement(weight, rank, others[rank], shard) for rank, shard in shards if shard and others[rank]]


class FullGatherOfSlices(FullGather):
    """The same for a model that is trained in the layout (p, t, d): a rank's flat shard is a part of its slice, over d.

    The lowest of the tensor ranks that hold a weight whole sends it.
    """

    def training(self, weights: ModelWeights) -> Distribution:
        return Distribution(weights, self.layout, tuple(range(self.layout.size)), "zero")

    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        return (self.ranks,)

    def _block_movements(self, weight: Weight) -> list[Movement]:
        return super(FullGather, self)._block_movements(weight)


class ModelParallelGather(Transition):
    """HybridFlow-V: everything gathered over the p*t ranks of each training replica, plain generation groups.

    A rank receives |M \\ T_r|, holds M at the peak, and cuts its generation slices out. Where its training slices lie
    outside of those it keeps them too, |T_r \\ G_r|.
    """

    def materialised(self, weight: Weight, rank: int) -> Boxes:
        return ((0, weight.matrix[0], 0, weight.matrix[1]),)


class MicroGroupGather(Transition):
    """HybridFlow: strided generation groups, in which T_r lies inside G_r; each rank receives G_r \\ T_r.

    It comes from the rank's micro data-parallel group where that holds it: always, but for vocabulary rows that the
    tensor ranks do not divide evenly. Peak |G_r and T_r|; kept twice |T_r \\ G_r|, 0 but for such rows.
    """

    def generation_ranks(self) -> tuple[int, ...]:
        def order(rank: int) -> tuple[int, int, int, int]:
            place = self.layout.generation_place(rank)
            return place.replica, place.micro, place.stage, place.tensor

        return tuple(sorted(range(self.layout.size), key=order))

    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        replica = self.source.replica(self.source.coordinates(rank)[0])
        mine = self.destination.coordinates(rank)[1:]
        return tuple(other for other in replica if self.destination.coordinates(other)[1:] == mine), replica


class ZeroSync(Reshard):
    """From ZeRO-3's flat shards over all ranks to an engine on the same ranks, in groups of t_g consecutive ones.

    Each rank receives what it lacks, |G_r| (n-1)/n where all divides; with `whole` M (n-1)/n, as DeepSpeed's own gather
    does. A flat shard is no part of a generation slice: |T_r| is kept twice.
    """

    shares_storage = False

    def __init__(
        self, weights: ModelWeights, ranks: int, t_g: int, *, whole: bool = False, vocabulary_multiple: int = 1
    ) -> None:
        everyone, self._whole = tuple(range(ranks)), whole
        self.trained = Distribution(weights, Layout(d=ranks), everyone, "zero")
        generation = Layout(1, t_g, ranks // t_g)
        super().__init__(
            self.trained, Distribution(weights, generation, everyone, vocabulary_multiple=vocabulary_multiple)
        )

    def materialised(self, weight: Weight, rank: int) -> Boxes:
        return ((0, weight.matrix[0], 0, weight.matrix[1]),) if self._whole else super().materialised(weight, rank)


STRATEGIES: dict[str, type[Transition]] = {
    "hybridflow": MicroGroupGather,
    "v": ModelParallelGather,
    "full": FullGather,
}


def plan_transition(weights: ModelWeights, layout: Layout, strategy: str = "hybridflow") -> Transition:
    """The plan of a transition from `layout` (p, t, d) to its generation sizes (p_g, t_g), by the name of a strategy.

    Raises `BadInput` for an unknown strategy, and for a model that the layout cannot hold.
    """
    one_of("strategy", strategy, tuple(STRATEGIES))
    return STRATEGIES[strategy](weights, layout)


def plan_sync(weights: ModelWeights, layout: Layout, strategy: str, *, vocabulary_multiple: int = 1) -> Transition:
    """The plan of a weight sync: as `plan_transition`, from the slices that are trained in `layout`, to an engine whose
    tensor groups are consecutive ranks, see `Layout.generating`.

    The groups being the engine's, "v" and "full" have those of "hybridflow" here.
    """
    one_of("strategy", strategy, tuple(STRATEGIES))
    kind = FullGatherOfSlices if strategy == "full" else STRATEGIES[strategy]
    return kind(weights, layout, vocabulary_multiple=vocabulary_multiple)


MOST_RANKS = 8192  # of whose matrix 512 MiB are held


def report(model: str | Path, train: str, generate: str, strategy: str, dtype: str | None = None) -> dict[str, Any]:
    """The figures of a transition as plain values.

    model: a name, a folder, or a config file; its weights are not read. train: "P-T-D". generate: "PG-TG".
    dtype: None: the config's, else float32. Raises `BadInput` or `ModelUnavailable`.
    """
    layout = parse_layouts(train, generate)
    if layout.size > MOST_RANKS:
        raise BadInput(
            f"--train {train}, {layout.size} ranks",
            f"the matrix of who sends to whom has a place for each pair: at most {MOST_RANKS} ranks",
            "plan fewer replicas (d): each training replica moves what every other does",
        )
    weights = model_weights(read_plan_config(model), dtype=dtype)
    plan = plan_transition(weights, layout, strategy)
    figures = plan.figures()
    columns = {
        "rank": range(layout.size),
        "received_bytes": figures.received.tolist(),
        "sent_bytes": figures.sent.tolist(),
        "peak_parameter_bytes": figures.peak_parameter.tolist(),
        "kept_twice_bytes": figures.kept_twice.tolist(),
    }
    return {
        "ranks": layout.size,
        "model_bytes": weights.nbytes,
        "sharded_bytes": sharded_bytes(weights, layout),
        "groups": {
            "generation_tensor": plan.generation_tensor_groups(),
            "micro_data": plan.micro_data_groups(),
        },
        "per_rank": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        "matrix": figures.matrix.tolist(),
    }


def parse_layouts(train: str, generate: str) -> Layout:
    p, t, d = _sizes("--train", train, "P-T-D", "1-4-2")
    p_g, t_g = _sizes("--generate", generate, "PG-TG", "1-2")
    return Layout(p, t, d, p_g, t_g)


def sharded_bytes(weights: ModelWeights, layout: Layout) -> int:
    """Bytes of the weights that the ranks of a training replica share out: cut by t, or on some of p stages only."""
    every = tuple(range(layout.p))
    shared_out = (
        weight
        for weight in weights
        if weight.local_shape(0, layout.t) != weight.shape or weights.stages(weight, layout.p) != every
    )
    return sum(weight.nbytes for weight in shared_out)


def _sizes(option: str, text: str, form: str, example: str) -> list[int]:
    parts = text.split("-")
    if len(parts) != form.count("-") + 1 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise BadInput(
            f"{option} {text}", f"must be {form}: whole numbers of at least 1, with dashes between", f"write {example}"
        )
    return [int(part) for part in parts]
