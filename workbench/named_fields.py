"""Settings whose fields are given by name: a name that there is not is refused with the nearest one that there is."""

from __future__ import annotations

import difflib
import inspect
from typing import Any, Self

from workbench.errors import BadInput


def check_names(cls: type, names: dict[str, Any], given: int = 0) -> None:
    """Raise `BadInput` for the first of these keyword arguments that a class does not take, or that it cannot do
    without. given: how many arguments come before them, by position."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    fields = [parameter.name for parameter in parameters]
    for name, value in names.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise BadInput(
                f"{cls.__name__}({name}={value!r:.60})",
                f"it takes {', '.join(fields)}",
                f"write {near[0]}= (the nearest)" if near else "",
            )
    needed = [parameter.name for parameter in parameters[given:] if parameter.default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in names]:
        raise BadInput(
            f"{cls.__name__}() without {', '.join(missing)}",
            "it has no default",
            f"write {cls.__name__}({', '.join(f'{name}=...' for name in missing)}, ...)",
        )


class NamedFields:
    """Base of dataclasses that people fill in: a field that there is not is a `BadInput`, not a bare `TypeError`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Before the dataclass's own `__init__`, which only exists when the class is complete."""
        check_names(cls, kwargs, len(args))
        return super().__new__(cls)
