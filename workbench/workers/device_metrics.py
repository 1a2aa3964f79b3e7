"""Metrics whose numbers are still on the device that computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.messages.metrics import Max, Mean, Metric, Metrics


@dataclass(frozen=True)
class OnDevice:
    """A metric of that kind some of whose numbers, by field, are still on the device that computes them: to look at
    them one by one would wait for it each time. `on_host` brings many at once."""

    kind: type[Mean] | type[Max]
    numbers: Mapping[str, Tensor | float]


DeviceMetrics = Mapping[str, Metric | OnDevice]


def on_host(told: Sequence[DeviceMetrics]) -> list[Metrics]:
    """The same metrics with all their numbers on the host, in one transfer."""
    waiting = [metric for metrics in told for metric in metrics.values() if isinstance(metric, OnDevice)]
    tensors = [n.detach().double() for metric in waiting for n in metric.numbers.values() if isinstance(n, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())

    def brought(metric: Metric | OnDevice) -> Metric:
        if not isinstance(metric, OnDevice):
            return metric
        return metric.kind(**{k: next(values) if isinstance(n, Tensor) else n for k, n in metric.numbers.items()})

    return [{name: brought(metric) for name, metric in metrics.items()} for metrics in told]
