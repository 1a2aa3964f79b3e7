"""Functions that a cell assigns, and that decide what is drawn: files keep their names alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.errors import BadInput
from workbench.support.calls.pickling import name_of

NoteChange = Callable[[str, Any, Any], None]  # a setting, its value before and now


class AssignedFunction:
    """The value of a setting such as `lab.prompts.order`. A later kernel and a restored workbench know its name: they
    refuse to draw without it, until its cell is run again or None is assigned.

    setting: as a cell writes it. usual: what None does, for messages. note_change: records an assignment.
    function, name: the present one; a name without a function is one that this kernel lacks.
    """

    def __init__(self, setting: str, usual: str, note_change: NoteChange) -> None:
        self._setting, self._usual, self._note_change = setting, usual, note_change
        self.function: Callable[..., Any] | None = None
        self.name: str | None = None

    def assign(self, function: Callable[..., Any] | None) -> None:
        """Take another one; None: the usual way."""
        before, self.function = self.name, function
        self.name = None if function is None else name_of(function)
        self._note_change(self._setting, before, self.name)

    def go_on(self, name: str | None) -> None:
        """Go on from where a function of this name was assigned, which is not here unless it is the present one. None:
        none was assigned; the present one stays."""
        if name not in (None, self.name):
            self.function, self.name = None, name

    def check(self, called: str) -> None:
        """Raise `BadInput` where the function that decided about the draws before is not here."""
        if self.name is not None and self.function is None:
            raise BadInput(
                f"{called} without {self._setting}",
                f"the draws before were decided by {self._setting} = {self.name}, a function that no file keeps",
                f"run the cell that assigns it again; {self._setting} = None {self._usual}",
            )
