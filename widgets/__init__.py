"""Live views of a workbench, for notebooks: installed as `workbench_widgets`. `lab.panel()` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench_widgets.checks import Checks
from workbench_widgets.conversation import ConversationView
from workbench_widgets.driver import Driver
from workbench_widgets.memory import Memory
from workbench_widgets.metrics import Metrics
from workbench_widgets.panel import Panel
from workbench_widgets.placement import PlacementEditor
from workbench_widgets.samples import Samples
from workbench_widgets.stepper import Stepper
from workbench_widgets.strip import Strip
from workbench_widgets.timeline import TimelineView
from workbench_widgets.traffic import TrafficView
from workbench_widgets.view import Still, View

_TABS = (Stepper, PlacementEditor, TimelineView, TrafficView, Samples, ConversationView, Metrics, Memory, Checks)
VIEWS: dict[str, type[View]] = {view.name: view for view in _TABS}
OTHERS: dict[str, type[View]] = {Strip.name: Strip}  # no tabs of a panel with all views

_made: WeakKeyDictionary[Any, tuple[Driver, dict[tuple[str, ...], Panel]]] = WeakKeyDictionary()


def panel(lab: Any, names: Sequence[str] = (), algorithm: Any = None) -> Panel:
    """The panel of a workbench with the named views, or all views; see `Workbench.panel`."""
    unknown = [name for name in names if name not in VIEWS | OTHERS]
    if unknown:
        raise BadInput(f"view {unknown[0]!r}", f"a panel has {', '.join(VIEWS)}", 'lab.panel("timeline")')
    if algorithm is not None and getattr(algorithm, "lab", None) is not lab:
        raise BadInput(
            f"panel(algorithm={shown(algorithm)})", "an algorithm on this workbench", "lab.panel(algorithm=wb.PPO(lab))"
        )
    if lab not in _made:
        _made[lab] = Driver(lab), {}
        lab.before_close(lambda: _forget(lab))
    driver, panels = _made[lab]
    key = tuple(dict.fromkeys(names)) or tuple(VIEWS)
    if key not in panels:
        panels[key] = Panel(lab, [(VIEWS | OTHERS)[name](lab, driver) for name in key], driver)
    stepper = panels[key].views.get("stepper")
    if algorithm is not None and isinstance(stepper, Stepper):
        stepper.algorithm = algorithm
    return panels[key]


def _forget(lab: Any) -> None:
    """Close the panels of a workbench that closes."""
    _, panels = _made.pop(lab)  # what is in here holds the workbench
    for panel in panels.values():
        panel.close()


__all__ = ["VIEWS", "Driver", "Panel", "Still", "View", "panel"]
