"""The picture that a live panel stores in its cell, so that a saved notebook shows it without its kernel."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from html import escape
from typing import Any

from IPython.display import display

from workbench.display.curves import MIMETYPE
from workbench.display.html import as_images, without_svgs
from workbench_widgets.view import View, or_none, or_why

MOST_BYTES = 200_000  # of a saved picture
REST = 20  # times as long as a drawing took, until the next one: 5 % of the kernel's time


NOT_DRAWN = "<p>not drawn yet</p>"


def _fitting(html: str, view: str, room: int) -> str:
    """A view's html in at most `room` bytes: with drawings as images, else without drawings, else a note on what is
    missing."""
    whole = as_images(html)
    if len(whole.encode()) <= room:
        return whole
    left_out = f"{len(whole.encode()) // 1000} kB, too large to be saved. lab.panel({view!r}).still() shows all of it."
    tables = without_svgs(html, left_out)
    return tables if len(tables.encode()) <= room else f"<p>{escape(left_out)}</p>"


class SavedPicture:
    """An output below a live panel with a picture of each of its views, redrawn when they have changed.

    The page hides it where the panel is live (its class is `name`). It follows changes at once, but pauses between two
    drawings for 20 times the duration of one: if iterations are slower than that, it is updated after each of them; if
    they are faster, it skips some, and is updated once nothing runs any more. If all views together exceed 200 kB,
    drawings are left out and their tables stay, beginning with the view that is shown last. Drawings are images,
    because some viewers drop inline svg.

    Charts are separate outputs below it, as plotly's JSON, which JupyterLab and VS Code draw without a kernel.

    keep: sends everything, by mark, to a page that writes it into the notebook; None: no such page has connected, and
    Jupyter updates the outputs, which fails after the page was reloaded.
    """

    def __init__(self) -> None:
        self._own = secrets.token_hex(6)
        self.name = f"wb-saved-{self._own}"
        self._places: list[tuple[str, Any]] = []  # the mark of an output, and Jupyter's handle of it
        # by view: what it depended on, its picture, its charts, its text
        self._drawn: dict[str, tuple[Hashable, str, dict[str, Any] | None, str]] = {}
        self._to_draw: list[View] = []
        self._took_s = 0.0  # what drawing took since the last update
        self._rest_until_s = 0.0  # monotonic
        self._looked_at: tuple[Hashable, ...] = ()  # what the views depended on at the last look
        self._of = ""  # what the pictures show, at least: the iteration, and what ran then
        self.keep: Callable[[dict[str, dict[str, Any]]], object] | None = None
        self._stale = False  # a page has an earlier one
        self._shown: dict[str, dict[str, Any]] = {}  # by mark

    def hides(self, views: Sequence[View]) -> str:
        """A style that hides the picture of these views, and the chart outputs after it."""
        child = ".jp-OutputArea-child"
        charts = [
            f"{child}:has(.{self.name})" + f" + {child}" * n for n in range(1, 1 + sum(v.has_figure for v in views))
        ]
        return f"{', '.join([f'.{self.name}', *charts])} {{ display: none; }}"

    def kept_by(self, keep: Callable[[dict[str, dict[str, Any]]], object]) -> None:
        """Send updates to this page, which was just opened, from now on."""
        self.keep, self._stale = keep, True

    def show(self, views: Sequence[View], lab: Any) -> None:
        """Write it into the output of the running cell."""
        self._note(lab)
        self._draw_all(views)
        for mark, bundle in self._bundles(views, lab).items():
            handle = display(bundle, raw=True, display_id=True)
            if handle is not None:
                self._places.append((mark, handle))

    def refresh(self, views: Sequence[View], lab: Any) -> bool:
        """Draw one of the changed views, so that the page never waits longer than that; after the last one, update the
        output. Returns whether more views are to be drawn now."""
        settled = self._settled(views, lab)
        if not self._places or (time.monotonic() < self._rest_until_s and not settled):
            return False
        began_s = time.thread_time()
        if not self._to_draw:
            self._note(lab)
            self._to_draw = [view for view in views if self._changed(view)]
        if self._to_draw:
            self._draw(self._to_draw.pop())
        elif not self._stale:
            return False
        self._took_s += time.thread_time() - began_s
        if self._to_draw:
            return True
        self._update(views, lab)
        return False

    def _settled(self, views: Sequence[View], lab: Any) -> bool:
        """Whether nothing runs and nothing has changed since the last look, so that drawing slows down no work."""
        before, self._looked_at = self._looked_at, tuple(or_none(view.depends_on) for view in views)
        return before == self._looked_at and not lab.open_runs()

    def save(self, views: Sequence[View], lab: Any) -> None:
        """Draw everything that has changed, and update the output for the last time."""
        if self._places:
            self._note(lab)
            self._draw_all(views)
            self._update(views, lab)

    def _note(self, lab: Any) -> None:
        """Record the state that is about to be drawn; a picture of an unfinished iteration says so."""
        running = ", ".join(run.name for run in lab.open_runs() if run.state == "running")
        self._of = f"iteration {lab.iteration}{f' while {running} ran' if running else ''}"

    def draw_anew(self) -> None:
        """Make the page redraw charts that were hidden until now, which it does not do for new numbers."""
        for mark, place in self._places:
            if mark != self.name and self._shown.get(mark):
                place.update({"text/html": "", "text/plain": ""}, raw=True)
                place.update(self._shown[mark], raw=True)

    def _update(self, views: Sequence[View], lab: Any) -> None:
        self._shown = self._bundles(views, lab)
        if self.keep is not None:
            self.keep(self._shown)
        else:
            for mark, place in self._places:
                place.update(self._shown[mark], raw=True)
        self._stale = False
        self._rest_until_s = time.monotonic() + REST * self._took_s
        self._took_s = 0.0

    def _draw_all(self, views: Sequence[View]) -> None:
        for view in views:
            if self._changed(view):
                self._draw(view)

    def _changed(self, view: View) -> bool:
        now = or_none(view.depends_on)  # of hosts that are gone the picture of before stays
        return now is not None and self._drawn.get(view.name, (None,))[0] != (view.choices, now)

    def _draw(self, view: View) -> None:
        with suppress(Exception):
            of = view.choices, view.depends_on()
            self._drawn[view.name] = of, or_why(view.still), view.figure(), or_why(view.text)

    def _bundles(self, views: Sequence[View], lab: Any) -> dict[str, dict[str, Any]]:
        """By mark, data by mimetype: the picture of all views, and the charts of those that have any."""
        return {self.name: self._bundle(views, lab)} | {
            (mark := f"wb-figure-{self._own}-{view.name}"): self._charts(view, mark)
            for view in views
            if view.has_figure
        }

    def _charts(self, view: View, mark: str) -> dict[str, Any]:
        figure = self._drawn[view.name][2] if view.name in self._drawn else None
        if figure is None:
            return {"text/html": f'<div class="{mark}"></div>', "text/plain": ""}
        marked = {**figure, "layout": {**figure["layout"], "meta": mark}}
        if (size := len(json.dumps(marked))) > MOST_BYTES:
            told = f"{view.title}: {size // 1000} kB of charts, too large to be saved. lab.panel({view.name!r}).still()"
            return {"text/html": f'<div class="{mark}">{escape(told)}</div>', "text/plain": told}
        return {MIMETYPE: marked, "text/plain": ""}  # the text of all views has its numbers

    def _bundle(self, views: Sequence[View], lab: Any) -> dict[str, Any]:
        """The pictures by mimetype. The first view is open, the others are folded."""
        told = f"{lab.name}, {self._of}, {time.strftime('%Y-%m-%d %H:%M:%S')}: a picture, not live"
        parts, room = list[str](), MOST_BYTES - 4_000
        for view in views:
            picture = _fitting(self._drawn[view.name][1], view.name, room) if view.name in self._drawn else NOT_DRAWN
            room -= len(picture.encode())
            title = escape(view.title)
            parts.append(f"<details{'' if parts else ' open'}><summary>{title}</summary>{picture}</details>")
        # without a kernel the widget above shows an error. It comes last because some viewers show a style as text
        error = f".jp-OutputArea-child:has(+ * .{self.name}) .jupyter-widgets:not(:has(*))"
        style = f"<style>{error} {{ display: none; }}</style>"
        html = f'<div class="{self.name}"><p>{escape(told)}</p>{"".join(parts)}{style}</div>'
        return {"text/html": html, "text/plain": "\n".join([told, *(text for *_, text in self._drawn.values())])}
