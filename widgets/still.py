"""Views as pictures that need no kernel and no script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from workbench.display.images import as_images
from workbench_widgets.view import View


class Still:
    """Views as pictures that need no kernel and no script: html, svg where it is one picture, text.

    One that cannot be drawn says why in its place.
    """

    def __init__(self, views: Sequence[View]) -> None:
        self._pictures = [(view.title, or_why(view.still)) for view in views]
        self._svg = _or_none(views[0].svg) if len(views) == 1 else None
        self._text = "\n".join(or_why(view.text) for view in views) or "the hosts did not answer in time"

    def bundle(self) -> dict[str, str]:
        """By mimetype."""
        first = self._pictures[0][1] if self._pictures else escape(self._text)
        others = "".join(
            f"<details><summary>{escape(title)}</summary>{picture}</details>" for title, picture in self._pictures[1:]
        )
        svg = {"image/svg+xml": self._svg} if self._svg else {}
        return {"text/html": as_images(f"<div>{first}{others}</div>"), **svg, "text/plain": self._text}

    def __repr__(self) -> str:
        return self._text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.bundle()


def or_why(make: Callable[[], str]) -> str:
    """A picture, or why it could not be drawn."""
    try:
        return make()
    except Exception as error:
        return f"<p>{escape(str(error))}</p>"


def _or_none(make: Callable[[], str | None]) -> str | None:
    try:
        return make()
    except Exception:  # the html says why
        return None
