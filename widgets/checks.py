"""Run checks of the live system by a button."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from workbench.checks import CHECKS
from workbench_widgets.view import View, button, choice

ALL = "all checks"


class Checks(View):
    """The verdicts of `lab.check()`: figure, threshold, and where to look."""

    name, title = "checks", "Checks"
    fields = ("chosen",)

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.report: Any = None
        self.chosen = ALL
        self._after = 0  # the iteration after which the report was made

    def depends_on(self) -> Hashable:
        return id(self.report), bool(self.driver.busy), self.lab.iteration, self.chosen

    def controls(self) -> str:
        told = "checks use their own small batch; afterwards the system is unchanged"
        return choice("run", "chosen", [ALL, *CHECKS], self.chosen) + button("Check", "check", drives=True, title=told)

    def picture(self) -> str:
        if self.report is None:
            return "<p>Nothing has been checked yet.</p>"
        since = self.lab.iteration - self._after
        age = f", {since} iteration{'s' if since > 1 else ''} ago" if since else ""
        return str(self.report._repr_html_(f" after iteration {self._after}{age}"))

    def text(self) -> str:
        return "checks: none run" if self.report is None else repr(self.report)

    def on_check(self) -> None:
        names = () if self.chosen == ALL else (self.chosen,)

        def check() -> str:
            report = self.lab.check(*names)
            self.report, self._after = report, self.lab.iteration
            return f"checks: {report.state}"

        self.driver.start(f"checking {self.chosen}", check)
