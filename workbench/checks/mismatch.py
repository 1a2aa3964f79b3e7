"""`lab.mismatch()`: compare log-probabilities of the same tokens under several precisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pandas as pd
import torch

from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, ragged_in
from workbench.display.curves import STROKES, Chart, Charted, Curve
from workbench.display.html import table
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput
from workbench.settings.precision import ALL_TOKENS, MERGED, PRECISIONS, Precision
from workbench.support.validation import Rule
from workbench.workers.sampling_mask import MASK_COLUMNS, TRUNCATION

if TYPE_CHECKING:
    from workbench.algorithms.lab import Lab

QUANTILES = 100
SAMPLED = "rollout"
Precisions = Annotated[
    Mapping[str, Precision], Rule("must map names to precisions", 'write {"mine": wb.Precision(dtype="bfloat16")}')
]


@dataclass(frozen=True)
class Mismatch(Charted):
    """Log-probabilities of the same tokens, from the same weights, under several precisions.

    tokens: a frame with one row for each token of the policy: its `row`, its place `token`, `token_id`, and a column
        of log-probabilities, nats, for each precision; "rollout" has those of the engine that sampled it.
    base: the column with which the others are compared: "rollout" if the batch has it, else the first precision.
        Engine log-probabilities of rollouts with top-p, top-k or min-p belong to another distribution; they are left
        out unless the batch has their sampling mask. With it, "float32_all_tokens" is the comparison without the mask.
    """

    tokens: pd.DataFrame
    base: str

    @property
    def gaps(self) -> pd.DataFrame:
        """The same tokens: each precision's log-probability minus the base's, nats."""
        ids = ["row", "token", "token_id"]
        columns = self.tokens.drop(columns=[*ids, self.base])
        return self.tokens[ids].join(columns.sub(self.tokens[self.base], axis=0))

    @property
    def df(self) -> pd.DataFrame:
        """One row a precision: the mean and the largest |gap| of a token, and the effect of the gaps on an update.

        kl: the mean of exp(gap) - 1 - gap, an estimate of KL(base | precision) a token (Schulman's k3,
        http://joschu.net/blog/kl-approx.html). sequence_weight: the mean over responses of exp(sum of gaps), 1 if both
        are the same distribution. effective_share: (sum w)^2 / (n sum w^2) of these weights, 1 if all are equal.
        """
        rows, gaps = [], self.gaps
        for name in gaps.columns[3:]:
            gap = gaps[name].to_numpy()
            total = gaps.groupby("row")[name].sum().to_numpy()
            weight = np.exp(total - total.max())  # the share is one of ratios: no weight overflows
            rows.append(
                {
                    "precision": name, "mean_gap": np.abs(gap).mean(), "max_gap": np.abs(gap).max(),
                    "kl": (np.expm1(gap) - gap).mean(), "sequence_weight": float(np.exp(np.minimum(total, 700)).mean()),
                    "effective_share": weight.sum() ** 2 / (len(weight) * (weight**2).sum()),
                }
            )  # fmt: skip
        return pd.DataFrame(rows).set_index("precision")

    def __repr__(self) -> str:
        return f"<Mismatch of {len(self.tokens)} tokens, against {self.base}>\n{self.df.to_string(float_format='%.3g')}"

    def charts(self) -> list[Chart]:
        """The gaps of each precision, sorted."""
        gaps, places = self.gaps, np.linspace(0, 1, QUANTILES + 1)
        curves: list[Curve] = []
        for name in gaps.columns[3:]:
            found = np.quantile(np.abs(gaps[name].to_numpy()), places).tolist()
            curves.append(Curve(name=name, x=places.tolist(), y=found, stroke=STROKES[len(curves) % len(STROKES)]))
        title, ticks = f"|gap| of tokens to {self.base}, nats", {0.0: "smallest", 1.0: "largest"}
        return [Chart(title=title, curves=tuple(curves), x="tokens, by their gap", log=True, ticks=ticks)]

    def _repr_html_(self) -> str:
        rows = [{"precision": name, **{str(key): f"{value:.3g}" for key, value in row.items()}}
                for name, row in self.df.iterrows()]  # fmt: skip
        return table(rows, caption=f"{len(self.tokens):,} tokens, against {self.base}")


@stoppable("lab.mismatch()", ("the system is as before", "run the same call again"))
def mismatch(lab: Lab, batch: Batch, precisions: Precisions | None = None) -> Mismatch:
    """Compare the log-probabilities of these responses under several precisions, with the actor's current weights: as a
    trainer and as a generation engine compute in fp32, bf16 and fp16, with the output head in fp32, with an adapter
    beside the weights or merged into them. `.df` has one row a precision, `.tokens` and `.gaps` one row a token; a
    notebook draws the result. Use it before training, to choose a precision.

    precisions: `wb.Precision` by name, in place of `workbench.settings.precision.PRECISIONS`. Needs memory for a second
    copy of the actor's weights.
    """
    if "actor" not in lab.groups or "compute_precisions" not in lab.actor.operations:
        raise BadInput("mismatch without an actor of workbench's own", "the actor's weights score the tokens")
    masked = set(MASK_COLUMNS) <= set(batch.names)
    if precisions is None:
        adapted = lab.groups["actor"].spec.adapter is not None
        precisions = {**PRECISIONS, **(MERGED if adapted else {}), **(ALL_TOKENS if masked else {})}
    with lab.runner.isolated("mismatch"):
        scored = lab.actor.compute_precisions(batch, precisions=precisions)
        names = ["response_ids", *(f"log_prob_{name}" for name in precisions)]
        wanted = ("response_mask", *(() if batch.meta.get(TRUNCATION) and not masked else ("rollout_log_prob",)))
        names += [name for name in wanted if name in scored.names]
        found = scored.fetch(names)
    ids = ragged_in(found, "response_ids")
    mask = found.get("response_mask")
    kept = mask.values.bool() if isinstance(mask, Ragged) else torch.ones(len(ids.values), dtype=torch.bool)
    lengths = ids.lengths.tolist()
    columns = {
        "row": torch.repeat_interleave(torch.arange(len(ids)), ids.lengths),
        "token": torch.cat([torch.arange(n) for n in lengths]), "token_id": ids.values,
    }  # fmt: skip
    if "rollout_log_prob" in found:
        columns[SAMPLED] = ragged_in(found, "rollout_log_prob").values.double()
    columns |= {name: ragged_in(found, f"log_prob_{name}").values.double() for name in precisions}
    tokens = pd.DataFrame({name: values[kept].numpy() for name, values in columns.items()})
    base = SAMPLED if SAMPLED in columns else next(iter(precisions))
    if tokens.empty:
        raise BadInput("mismatch on a batch without tokens of the policy", "its response_mask is 0 everywhere")
    return Mismatch(tokens, base)
