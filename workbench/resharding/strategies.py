"""The three transitions from training to generation that HybridFlow compares (arXiv:2409.19256, section 5.3, table 2).

M: bytes of the model; training (p, t, d), generation (p_g, t_g) on the same ranks. To add a strategy, write a subclass
of `Transition` and add it to `STRATEGIES`.

`report` is the result of `wb reshard`: the bytes of a transition between two layouts of a model.
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
    """A plan from a training layout to a generation layout on the same ranks, 0 to p*t*d - 1; see `Layout` for both.

    Unless a subclass defines others, generation groups are plain: consecutive ranks inside each training replica.
    trained: the distribution of the layout itself, which `training` may shard further. vocabulary_multiple: for the
    generation side, see `Distribution`.
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
        """Return the ranks in the order of the generation layout."""
        return tuple(range(self.layout.size))

    @property
    def block(self) -> int:
        return self.layout.p * self.layout.t

    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        return (self.source.replica(self.source.coordinates(rank)[0]),)

    def generation_tensor_groups(self) -> list[list[int]]:
        return self._groups(2)

    def micro_data_groups(self) -> list[list[int]]:
        """Return groups of a training replica's ranks that hold the same generation shard."""
        return self._groups(0)

    def _groups(self, axis: int) -> list[list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            place = list(self.destination.coordinates(rank))
            place.pop(axis)
            found.setdefault((self.layout.coordinates(rank)[0], *place), []).append(rank)
        return sorted(found.values())


class FullGather(Transition):
    """DeepSpeed-Chat's strategy: training is ZeRO-3, with flat shards over all ranks; every rank gathers everything.

    A rank receives M - |T_r| and holds M at the peak, then takes its generation slices. A flat shard is a run of
    elements across rows, so it cannot share memory with a generation slice: |T_r| is kept twice on every rank. If the
    weights divide evenly this is M/(p*t*d), the paper's figure.
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
    """`FullGather` for a model that is trained in the layout (p, t, d): slices are sharded, flat, over the d replicas.

    If several tensor ranks hold a whole weight, the lowest one sends it.
    """

    def training(self, weights: ModelWeights) -> Distribution:
        return Distribution(weights, self.layout, tuple(range(self.layout.size)), "zero")

    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        return (self.ranks,)

    def _block_movements(self, weight: Weight) -> list[Movement]:
        return super(FullGather, self)._block_movements(weight)


class ModelParallelGather(Transition):
    """HybridFlow-V: the p*t ranks of each training replica gather everything; generation groups are plain.

    A rank receives |M \\ T_r|, holds M at the peak, and takes its generation slices. It also keeps the parts of its
    training slices outside of these, |T_r \\ G_r|.
    """

    def materialised(self, weight: Weight, rank: int) -> Boxes:
        return ((0, weight.matrix[0], 0, weight.matrix[1]),)


class MicroGroupGather(Transition):
    """HybridFlow: generation groups are strided, so that T_r lies inside G_r; each rank receives G_r \\ T_r.

    The rank's micro data-parallel group sends these elements if it holds them: always, except for vocabulary rows that
    tensor ranks do not divide evenly. Peak: |G_r and T_r|. Kept twice: |T_r \\ G_r|, which is 0 except for such rows.
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
    """A plan from ZeRO-3's flat shards over all ranks to an engine there, in groups of t_g consecutive ranks.

    Each rank receives what it lacks: |G_r| (n-1)/n if everything divides evenly; with `whole`, M (n-1)/n, like
    DeepSpeed's own gather. A flat shard is not part of a generation slice: |T_r| is kept twice.
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
    """Return the plan of a transition from `layout` (p, t, d) to its generation sizes (p_g, t_g), by a strategy's name.

    Raises `BadInput` for an unknown strategy, and for a model that the layout cannot divide.
    """
    one_of("strategy", strategy, tuple(STRATEGIES))
    return STRATEGIES[strategy](weights, layout)


def plan_sync(weights: ModelWeights, layout: Layout, strategy: str, *, vocabulary_multiple: int = 1) -> Transition:
    """Return the plan of a weight sync: like `plan_transition`, from the slices that are trained in `layout`, to an
    engine whose tensor groups are consecutive ranks, see `Layout.generating`.

    The engine determines the groups, so "v" and "full" have the same groups as "hybridflow" here.
    """
    kind = FullGatherOfSlices if strategy == "full" else STRATEGIES[strategy]
    return kind(weights, layout, vocabulary_multiple=vocabulary_multiple)


MOST_RANKS = 8192  # the matrix of so many ranks takes 512 MiB


def report(model: str | Path, train: str, generate: str, strategy: str, dtype: str | None = None) -> dict[str, Any]:
    """Return the figures of a transition as plain values.

    model: a name, a folder, or a config file; its weights are not read. train: "P-T-D". generate: "PG-TG".
    dtype: None: the config's dtype, or float32 if it has none. Raises `BadInput` or `ModelUnavailable`.
    """
    layout = parse_layouts(train, generate)
    if layout.size > MOST_RANKS:
        raise BadInput(
            f"--train {train}, {layout.size} ranks",
            f"the report has a matrix of all pairs of ranks, so at most {MOST_RANKS} ranks",
            "use fewer replicas (d): all training replicas move the same",
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
        "groups": {"generation_tensor": plan.generation_tensor_groups(), "micro_data": plan.micro_data_groups()},
        "per_rank": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        "matrix": figures.matrix.tolist(),
    }


def parse_layouts(train: str, generate: str) -> Layout:
    p, t, d = _sizes("--train", train, "P-T-D", "1-4-2")
    p_g, t_g = _sizes("--generate", generate, "PG-TG", "1-2")
    return Layout(p, t, d, p_g, t_g)


def sharded_bytes(weights: ModelWeights, layout: Layout) -> int:
    """Return the bytes of weights that are divided in a training replica: split by t, or on some of p stages only."""
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
