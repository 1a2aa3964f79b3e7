"""A view as a picture that needs no kernel and no script of ours."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from IPython.display import display

from workbench.display.curves import MIMETYPE
from workbench.display.images import as_images
from workbench_widgets.view import View


class Still:
    """A view as html, as svg where it is one picture, and as text, with its charts below, where it has any.

    One that cannot be drawn says why in its place. None: hosts did not answer in time.
    """

    def __init__(self, view: View | None) -> None:
        self._text = "the hosts did not answer in time" if view is None else or_why(view.text)
        self._html = escape(self._text) if view is None else or_why(view.still)
        self._svg = None if view is None else _or_none(view.svg)
        self._figure = None if view is None else _or_none(view.figure)

    def bundle(self) -> dict[str, str]:
        """All but the charts, by mimetype."""
        svg = {"image/svg+xml": self._svg} if self._svg else {}
        return {"text/html": as_images(f"<div>{self._html}</div>"), **svg, "text/plain": self._text}

    def __repr__(self) -> str:
        return self._text

    def _ipython_display_(self) -> None:
        display(self.bundle(), raw=True)
        if self._figure:
            display({MIMETYPE: self._figure, "text/plain": ""}, raw=True)  # the text above has its numbers


def or_why(make: Callable[[], str]) -> str:
    """A picture, or why it could not be drawn."""
    try:
        return make()
    except Exception as error:
        return f"<p>{escape(str(error))}</p>"


def _or_none(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception:  # the html says why
        return None
