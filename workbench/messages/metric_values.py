"""The metrics of a stage, for people."""

from __future__ import annotations


class MetricValues(dict[str, float]):
    """Metrics by name, shown as a table."""

    def _repr_html_(self) -> str:
        from workbench.display.html import table

        return table([{"metric": name, "value": f"{value:.6g}"} for name, value in self.items()], max_rows=60)
