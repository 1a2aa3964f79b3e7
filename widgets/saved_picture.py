"""What a live panel leaves in its cell, so that a notebook that is saved at any time shows it without its kernel."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from html import escape
from typing import Any

from IPython.display import display

from workbench.display.images import as_images, without_svgs
from workbench_widgets.still import or_why
from workbench_widgets.view import View

MOST_BYTES = 200_000  # of a saved picture
REST = 20  # times as long as a drawing took, until the next one: 5 % of the kernel's time


NOT_DRAWN = "<p>not drawn yet</p>"


def _fitting(html: str, view: str, room: int) -> str:
    """A view's html in at most so many bytes: with its drawings as images, without them, or
    words that say what is left out."""
    whole = as_images(html)
    if len(whole.encode()) <= room:
        return whole
    left_out = f"{len(whole.encode()) // 1000} kB, too large to be saved. lab.panel({view!r}).still() is all of it."
    tables = without_svgs(html, left_out)
    return tables if len(tables.encode()) <= room else f"<p>{escape(left_out)}</p>"


class SavedPicture:
    """An output beside a live panel with a picture of each of its views, drawn again when they have changed.

    The page hides it where the panel is live (its class is `name`). It follows what happens at once, but rests between
    two drawings 20 times as long as one took: where iterations are slower than that, it is new after each of them.
    Where they are faster, it leaves some out, and is new as soon as nothing runs any more. Where all are more than
    200 kB together, drawings are left out, and their tables stay, from the view that is shown last on. Drawings are
    images, which viewers show that drop inline svg.

    keep: sends it to a page that puts it into the notebook itself; None: there was no such page yet, and Jupyter
    updates the output, which it cannot after the page was reloaded.
    """

    def __init__(self) -> None:
        self.name = f"wb-saved-{secrets.token_hex(6)}"
        self._places: list[Any] = []
        self._drawn: dict[str, tuple[Hashable, str]] = {}  # by view: what it depended on, its picture
        self._to_draw: list[View] = []
        self._took_s = 0.0  # what drawing took since the last update
        self._rest_until_s = 0.0  # monotonic
        self._looked_at: tuple[Hashable, ...] = ()  # what the views depended on at the last look
        self._of = ""  # what the pictures show, at least: the iteration, and what ran then
        self.keep: Callable[[str], object] | None = None
        self._stale = False  # a page has an earlier one

    def kept_by(self, keep: Callable[[str], object]) -> None:
        """From now on give it to this page, which was just opened."""
        self.keep, self._stale = keep, True

    def show(self, views: Sequence[View], lab: Any) -> None:
        """Put it into the output of the cell that runs."""
        self._note(lab)
        self._draw_all(views)
        handle = display(self._bundle(views, lab), raw=True, display_id=True)
        if handle is not None:
            self._places.append(handle)

    def refresh(self, views: Sequence[View], lab: Any) -> bool:
        """Draw one of the views that have changed, so that the page never waits for more than that; after the last of
        them, update what is shown. Whether there are more to draw now."""
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
        """Whether nothing runs, and nothing has changed since the last look: drawing slows down no work then."""
        before, self._looked_at = self._looked_at, tuple(_or_none(view.depends_on) for view in views)
        return before == self._looked_at and not lab.open_runs()

    def save(self, views: Sequence[View], lab: Any) -> None:
        """Draw all that has changed, and update what is shown: it is the last time."""
        if self._places:
            self._note(lab)
            self._draw_all(views)
            self._update(views, lab)

    def _note(self, lab: Any) -> None:
        """Note what is about to be drawn: a picture of an iteration that is under way says so."""
        running = ", ".join(run.name for run in lab.open_runs() if run.state == "running")
        self._of = f"iteration {lab.iteration}{f' while {running} ran' if running else ''}"

    def clear(self) -> None:
        for place in self._places:
            place.update({"text/html": "", "text/plain": ""}, raw=True)
        self._places.clear()

    def _update(self, views: Sequence[View], lab: Any) -> None:
        bundle = self._bundle(views, lab)
        if self.keep is not None:
            self.keep(bundle["text/html"])
        else:
            for place in self._places:
                place.update(bundle, raw=True)
        self._stale = False
        self._rest_until_s = time.monotonic() + REST * self._took_s
        self._took_s = 0.0

    def _draw_all(self, views: Sequence[View]) -> None:
        for view in views:
            if self._changed(view):
                self._draw(view)

    def _changed(self, view: View) -> bool:
        now = _or_none(view.depends_on)  # of hosts that are gone the picture of before stays
        return now is not None and self._drawn.get(view.name, (None, ""))[0] != now

    def _draw(self, view: View) -> None:
        with suppress(Exception):
            self._drawn[view.name] = view.depends_on(), or_why(view.still)

    def _bundle(self, views: Sequence[View], lab: Any) -> dict[str, str]:
        """By mimetype. The first view is open, the others are folded."""
        told = f"{lab.name}, {self._of}, {time.strftime('%Y-%m-%d %H:%M:%S')}: a picture, not live"
        parts, room = list[str](), MOST_BYTES - 4_000
        for view in views:
            picture = _fitting(self._drawn[view.name][1], view.name, room) if view.name in self._drawn else NOT_DRAWN
            room -= len(picture.encode())
            title = escape(view.title)
            parts.append(f"<details{'' if parts else ' open'}><summary>{title}</summary>{picture}</details>")
        # opened without its kernel, the widget above it is an error. Last, as some readers show a style as text
        error = f".jp-OutputArea-child:has(+ * .{self.name}) .jupyter-widgets:not(:has(*))"
        style = f"<style>{error} {{ display: none; }}</style>"
        html = f'<div class="{self.name}"><p>{escape(told)}</p>{"".join(parts)}{style}</div>'
        return {"text/html": html, "text/plain": f"<picture of the panel of {told}>"}


def _or_none(ask: Callable[[], Hashable]) -> Hashable:
    try:
        return ask()
    except Exception:  # a host that is gone, a workbench that was closed
        return None
