"""What an update reports."""

from __future__ import annotations


class MetricValues(dict[str, float]):
    """What an update reports: metrics by name, with a table for a repr."""

    def _repr_html_(self) -> str:
        from workbench.display.html import table

        return table([{"metric": name, "value": f"{value:.6g}"} for name, value in self.items()], max_rows=60)
