"""What an algorithm may not change while an interrupt has left an update between two of its steps."""

from __future__ import annotations

from collections.abc import Collection, Set

from workbench.algorithms.graph import Graph
from workbench.algorithms.lab import Lab
from workbench.errors import BadInput


def check_open_updates(
    lab: Lab, what: str, made: Set[str], before: Graph, after: Graph, stale: Collection[str] = ()
) -> None:
    """Raise `BadInput` where an update of the iteration under way would begin anew, and take steps twice.

    what: the change. made: the stages that have run. before, after: the graphs without and with the change. stale: of
    what has run, the stages that would run again.
    """
    opened = lab.runner.live.open_updates()
    for stage in before.stages:
        if stage.name in made or f"{stage.role}.{stage.operation}" not in opened:
            continue
        if _left(before, stage.name, made) != _left(after, stage.name, made - {*stale}):
            raise BadInput(
                what,
                f"an interrupt left {stage.name!r} between two of its steps: with this it would begin anew, and take "
                "steps twice",
                "finish the iteration first, with the same call; or give it up, with restart(): the steps stay",
            )


def _left(graph: Graph, until: str, made: Set[str]) -> list[tuple[str, str, tuple[str, ...]]]:
    """The stages that come up to one, itself among them, as texts of their code and arguments. made: those that have
    run."""
    names = graph.names
    stages = graph.stages[: names.index(until) + 1] if until in names else ()
    return [(stage.name, stage.code, stage.inputs) for stage in stages if stage.name not in made]
