"""Functions that a cell assigns to decide the order of draws. Files keep only their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.errors import BadInput
from workbench.support.calls.pickling import name_of

NoteChange = Callable[[str, Any, Any], None]  # a setting, its value before, its value now


class AssignedFunction:
    """The value of a setting such as `lab.prompts.order`. A later kernel and a restored workbench know only its name:
    they refuse to draw until its cell is run again or None is assigned.

    setting: as a cell writes it. usual: the effect of None, for messages. note_change: records an assignment. function,
    name: the present function; a name without a function: this kernel does not have the function.
    """

    def __init__(self, setting: str, usual: str, note_change: NoteChange) -> None:
        self._setting, self._usual, self._note_change = setting, usual, note_change
        self.function: Callable[..., Any] | None = None
        self.name: str | None = None

    def assign(self, function: Callable[..., Any] | None) -> None:
        """Assign another function; None: the default."""
        before, self.function = self.name, function
        self.name = None if function is None else name_of(function)
        self._note_change(self._setting, before, self.name)

    def go_on(self, name: str | None) -> None:
        """Continue a run in which a function of this name was assigned; unless it is the present function, it is
        missing here. None: no function was assigned; the present one stays."""
        if name not in (None, self.name):
            self.function, self.name = None, name

    def check(self, called: str) -> None:
        """Raise `BadInput` if the function that decided the earlier draws is missing here."""
        if self.name is not None and self.function is None:
            raise BadInput(
                f"{called} without {self._setting}",
                f"earlier draws were decided by {self._setting} = {self.name}, a function that is not saved",
                f"run again the cell that assigns it; {self._setting} = None {self._usual}",
            )
