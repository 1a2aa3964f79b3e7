"""What every algorithm has: `iterate()` is one pass over its stages, `run(n)` is a loop over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from workbench.engines.settings import at_least
from workbench.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

    from workbench.controller import Workbench


class Algorithm(ABC):
    """Drives a workbench. `iterate` is written as the paper lists it: a line a stage."""

    lab: Workbench

    @abstractmethod
    def iterate(self) -> dict[str, float]:
        """One iteration; the metrics of its stages as {"stage/metric": value}."""

    def run(self, iterations: int) -> pd.DataFrame:
        """That many iterations; a frame with one row an iteration."""
        import pandas as pd

        at_least("iterations", iterations, 1)
        rows = [{"iteration": self.lab.iteration + 1, **self.iterate()} for _ in range(iterations)]
        return pd.DataFrame(rows).set_index("iteration")

    def need(self, *roles: str) -> None:
        """Raise `BadInput` unless the workbench has these roles."""
        missing = [role for role in roles if role not in self.lab.groups]
        if missing:
            raise BadInput(
                f"{type(self).__name__} on a workbench without {' and '.join(missing)}",
                f"it has {', '.join(self.lab.groups)}",
                "open one with these roles in models=",
            )

    def metrics(self) -> dict[str, float]:
        """The metrics of the newest iteration's stages."""
        return {
            f"{stage}/{name}": value
            for stage, values in self.lab.last_metrics.items()
            for name, value in values.items()
        }
