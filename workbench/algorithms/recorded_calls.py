"""What is recorded of algorithms: their settings when an iteration begins, and, in a notebook, what each call ran: an
export reads it where a panel called an algorithm, and where a cell was interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from workbench.algorithms.live_fields import fields_by_name, is_same
from workbench.display.interrupts import uninterrupted
from workbench.errors import WorkbenchError
from workbench.support.flat_settings import flat
from workbench.support.notebook_cell import in_notebook, running_cell, running_position, variable_of

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm

EVENT = "algorithm"
_under_way: set[int] = set()  # algorithms of which a call is under way, by id


def note_settings(algorithm: Algorithm, noted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Record the fields of an algorithm that are not as they were noted before; what is noted now. What `finish` adapts
    is recorded once, and nothing of an arm of a comparison, after which all is as before. Stages that `replace` edited
    are among the run's changes."""
    lab = algorithm.lab
    settings = flat({name: getattr(algorithm, name, None) for name in fields_by_name(algorithm) if name != "lab"})
    adapted = algorithm.state().keys() if noted else ()
    changed = {  # by repr: NaN is as itself
        name: value
        for name, value in settings.items()
        if name not in adapted and (name not in noted or repr(noted[name]) != repr(value))
    }
    if not changed or lab.runner.snapshots.open:
        return noted
    lab.telemetry.append_settings(type(algorithm).__name__, lab.iteration + 1, changed)
    return settings


@contextmanager
def recording(algorithm: Algorithm, call: str, *, resumed: bool = False) -> Iterator[None]:
    """Inside one of an algorithm's public calls: record what it made when it is over, whether it ended or was
    interrupted. A call inside of another is a part of that. Nothing is recorded outside of notebooks, nor of what is
    put back afterwards.

    call: its name. resumed: whether it begins with the rest of an iteration that was interrupted.
    """
    lab = algorithm.lab
    if id(algorithm) in _under_way or not in_notebook() or lab.runner.snapshots.open:
        yield
        return
    name, cell = variable_of(algorithm), running_cell()
    made_as = "" if name else _as_written(algorithm)
    under_way, ended, iteration = algorithm.under_way, algorithm.ended_iterations, lab.iteration
    before = len(_made_in_order(algorithm)) if under_way else 0
    _under_way.add(id(algorithm))
    done = False
    try:
        yield
        done = True
    finally:
        with uninterrupted():
            _under_way.discard(id(algorithm))
            now: list[str] = []
            if algorithm.under_way or not (done or (lab.iteration == iteration and not under_way)):
                now = _made_in_order(algorithm)
            begun = call == "run" or algorithm.ended_iterations > ended or not under_way
            lab.telemetry.append_event(
                EVENT, call=call, algorithm=type(algorithm).__name__, id=id(algorithm), name=name, made_as=made_as,
                lab=variable_of(lab), cell=0 if cell is None else cell.number, at=running_position(),
                by=lab.runner.driver, iterations=algorithm.ended_iterations - ended,
                stages=now if begun else now[before:], under_way=algorithm.under_way, resumed=resumed, done=done,
            )  # fmt: skip


def _made_in_order(algorithm: Algorithm) -> list[str]:
    """The stages of an unfinished iteration that were made, up to the first that was not."""
    try:
        names = algorithm.graph().names
    except WorkbenchError:  # a field that was changed meanwhile
        names = list(algorithm.made)
    made = list(takewhile(algorithm.made.__contains__, names))
    return made if algorithm.under_way or len(made) < len(names) else []


def _as_written(value: Any) -> str:
    """An algorithm, or settings, as a call that makes it: `wb.PPO(lab, prompts=4)`; "" where it holds what cannot be
    written so, such as a function."""
    if isinstance(value, type) or not is_dataclass(value):
        plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict)
        return repr(value) if plain else ""
    made: type = type(value)
    if not made.__module__.startswith(("workbench.", "__main__")):
        return ""
    parts = []
    for field in fields(value):
        now = getattr(value, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name == "lab":
            parts.append("lab")
        elif field.init and not is_same(now, default):
            if not (text := _as_written(now)):
                return ""
            parts.append(f"{field.name}={text}")
    prefix = "" if made.__module__ == "__main__" else "wb."
    return f"{prefix}{made.__name__}({', '.join(parts)})"
