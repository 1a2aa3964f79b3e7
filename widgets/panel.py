"""The panel: views of one workbench as tabs of one widget, live while there is a kernel, and a picture without."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from html import escape
from typing import Any

import anywidget
import traitlets
from IPython.display import display

from workbench.errors import BadInput, WorkbenchError
from workbench_widgets.driver import Driver
from workbench_widgets.front_end import in_notebook, module, style
from workbench_widgets.pulse import Pulse
from workbench_widgets.view import View

EVERY_S = 0.4
REST, MOST_REST_S = (
    150,
    5.0,
)  # times as long as a drawing took, and seconds: until the next drawing that no action asked for
BUSY_SLOW_S = 2.0  # after how long a kernel counts as blocked while the panel itself keeps it busy
AGAIN_S = 2.0  # between two tries to draw what fails
ASK_EVERY, REST_AFTER = 25, 75  # draws: how often the page is asked whether it is there, and after how many it is not
STATIC = "WORKBENCH_WIDGETS"  # set to "static": pictures only, for notebooks that are executed without anybody there
WIDGET = "application/vnd.jupyter.widget-view+json"


class Front(anywidget.AnyWidget):
    """What the page has of a panel: its script and style, which views there are, and which one is shown."""

    _esm = traitlets.Unicode(module("panel.js")).tag(sync=True)
    _css = traitlets.Unicode(style()).tag(sync=True)
    titles: Any = traitlets.List().tag(sync=True)
    shown = traitlets.Unicode().tag(sync=True)


class Panel:
    """Views of one workbench, as tabs. Made by `lab.panel(...)`.

    Shown in a cell it is live: what happens in cells shows in it, and its buttons act on the workbench. Shown twice, or
    after the page was closed and opened again, it is the same panel in the same state. When the workbench closes, the
    last picture of every view takes its place. A notebook that is saved before that keeps the picture of the moment at
    which the panel was shown; `still()` is the picture of now.

    Once it is live, its views are looked at, drawn and acted on by one thread alone: a host that is slow to answer
    keeps neither cells nor other widgets of the notebook waiting.
    """

    answer_s = 8.0  # how long a cell waits for a picture that hosts are asked for

    def __init__(self, lab: Any, views: Sequence[View], driver: Driver) -> None:
        self.lab, self.driver = lab, driver
        self.views = {view.name: view for view in views}
        for view in views:
            view.turn = self.show
        self.shown = next(iter(self.views))  # a view's name
        self.work_s = 0.0  # processor time of looking and drawing
        self._front: Front | None = None
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pulse = Pulse()
        self._seen: dict[str, Hashable] = {}
        self._controls: dict[str, str] = {}
        self._unsent = set(self.views)  # whose next drawing is a whole one
        self._status: dict[str, str] = {}
        self._action_error = ""  # why the last action failed
        self._faults: dict[str, str] = {}  # of views that could not be drawn
        self._rest_until_s = 0.0  # monotonic: what follows a run by itself takes less than 1 % of the kernel's time
        self._again_s = 0.0  # when such a one is tried again; monotonic
        self._places: list[Any] = []  # where it is shown
        self._page_is_there = False  # whether a page is there
        self._unanswered = 0  # draws since the page was last heard
        self._ended = threading.Event()

    # --- what it shows ------------------------------------------------------------------------------------------------

    def show(self, name: str, **given: Any) -> Panel:
        """Turn to a view, and hand it what it is to look at: `panel.show("samples", iteration=3)`. Returns itself."""
        if name not in self.views:
            raise BadInput(f"view {name!r}", f"this panel has {', '.join(self.views)}", "lab.panel() has all")

        def turn() -> None:
            self.views[name].receive(**given)
            self.shown = name
            if self._front is not None:
                self._front.shown = name
            self._draw()

        self._in_turn(turn)
        return self

    def still(self) -> Still:
        """The view that is shown, as it is now, as a picture that needs no kernel."""
        return self._pictures([self.views[self.shown]])

    def _last(self) -> Still:
        """All views, the one that is shown first."""
        return self._pictures(sorted(self.views.values(), key=lambda view: view.name != self.shown))

    def _pictures(self, views: Sequence[View]) -> Still:
        made: list[Still] = []
        self._in_turn(lambda: made.append(Still(views)))
        return made[0] if made else Still([])

    def _ipython_display_(self) -> None:
        handle = display(self._repr_mimebundle_(), raw=True, display_id=True)
        if handle is not None:
            self._places.append(handle)

    def _repr_mimebundle_(self, **asked: Any) -> Any:
        if not in_notebook() or os.environ.get(STATIC) == "static":
            return self._last().bundle()
        widget = {"version_major": 2, "version_minor": 0, "model_id": self._live().model_id}
        return {WIDGET: widget, **self.still().bundle()}

    def __repr__(self) -> str:
        return f"<Panel of {self.lab.name[:40]}: {len(self.views)} views>"

    def close(self) -> None:
        """End its updates. Where this page showed it, its last picture takes its place; elsewhere it stays as it is."""
        if self._ended.is_set():
            return
        bundle = self._last().bundle() if self._places else {}
        self._ended.set()
        for place in self._places:
            place.update(bundle, raw=True)
        self._places.clear()
        self.send({"kind": "status", "blocked": "the workbench is closed", "busy": "", "outcome": "", "error": ""})

    # --- its thread ---------------------------------------------------------------------------------------------------

    def _live(self) -> Front:
        """The front end, made when it is first shown."""
        if self._front is None:
            titles = [[view.name, view.title, view.script] for view in self.views.values()]
            self._front = Front(titles=titles, shown=self.shown)
            self._front.on_msg(lambda _, message, buffers: self._jobs.put(lambda: self._receive(message)))
            self._front.observe(lambda change: self._jobs.put(lambda: self._turned(change["new"])), "shown")
            self._thread = threading.Thread(target=self._work, name="workbench-panel-views", daemon=True)
            self._thread.start()
        return self._front

    def _in_turn(self, job: Callable[[], None]) -> None:
        """Run a job in the thread of the views, if there is one, and wait at most `answer_s` for it. Its error is
        raised here."""
        if self._thread is None or threading.current_thread() is self._thread or self._ended.is_set():
            job()
            return
        done: Future[None] = Future()

        def run() -> None:
            try:
                job()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._jobs.put(run)
        with suppress(TimeoutError):
            done.result(self.answer_s)

    def _work(self) -> None:
        while not self._ended.is_set():
            with suppress(queue.Empty):
                self._jobs.get(timeout=EVERY_S)()
            began_s = time.thread_time()
            try:
                self._look()
            except Exception as error:  # whatever it was: the next look is another one
                self._action_error = f"{type(error).__name__}: {error}"
            self.work_s += time.thread_time() - began_s

    def _look(self) -> None:
        """Draw the view that is shown if there is something new in it; send why buttons do not work now."""
        # work that a button started may run in this process, and slow down the event loop without blocking it
        blocked = self._pulse.blocked(BUSY_SLOW_S) if self.driver.busy else self._pulse.blocked()
        if self._unanswered > REST_AFTER and not blocked:
            self._page_is_there = False  # the page is gone
        if not self._page_is_there:
            return
        view = self.views[self.shown]
        try:
            due = self._seen.get(view.name) != view.depends_on()
        except Exception as error:  # a workbench that was closed, a host that is gone
            self._faults[view.name], due = str(error), False
        if view.name in self._faults:
            due = time.monotonic() > self._again_s
        if due and time.monotonic() >= self._rest_until_s:
            began_s = time.thread_time()
            self._draw()
            self._rest_until_s = time.monotonic() + min(REST * (time.thread_time() - began_s), MOST_REST_S)
        self._send_status(blocked)

    def _draw(self) -> None:
        """Send the view that is shown; where that fails, the reason is shown, and it is tried again."""
        view = self.views[self.shown]
        if self._front is None:
            return
        try:
            seen, controls = view.depends_on(), view.controls()
            message: dict[str, Any] = {"kind": "draw", "view": view.name}
            whole, buffers = view.name in self._unsent, list[bytes]()
            if view.script:
                message["data"], buffers = view.payload(whole=whole)
            else:
                message["html"] = view.picture()
        except Exception as error:
            self._faults[view.name], self._again_s = str(error), time.monotonic() + AGAIN_S
            return
        if whole or self._controls.get(view.name) != controls:
            message["controls"] = self._controls[view.name] = controls
        self._unanswered += 1
        message["answer"] = self._unanswered % ASK_EVERY == 0
        self.send(message, buffers)
        self._seen[view.name] = seen
        self._unsent.discard(view.name)
        self._faults.pop(view.name, None)

    # --- between kernel and page --------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """Send to the page, where there is one."""
        if self._front is not None:
            self._front.send(message, list(buffers))

    def _receive(self, message: dict[str, Any]) -> None:
        """A message of the page."""
        self._page_is_there, self._unanswered = True, 0
        act = message["act"]
        if act == "hello":  # a page that has nothing yet
            self._unsent, self._status = set(self.views), {}
        elif act == "stop":
            self.driver.stop()
        elif act != "here":
            self._act(self.views[message["view"]], act, message.get("given") or {})
        if act != "here":
            self._draw()

    def _act(self, view: View, action: str, given: Mapping[str, Any]) -> None:
        self.driver.error = self.driver.outcome = self._action_error = ""
        try:
            view.act(action, given)
        except WorkbenchError as error:
            self._action_error = str(error)
        except Exception as error:
            self._action_error = f"{type(error).__name__}: {error}"

    def _turned(self, name: str) -> None:
        """The page shows another view."""
        if name != self.shown:
            self.shown, self._action_error, self.driver.outcome = name, "", ""
            self._draw()

    def _send_status(self, blocked: bool) -> None:
        """Send why buttons do not work now, and the result of the last one, where that has changed."""
        reason = ""
        if blocked:
            running = next((run for run in self.lab.open_runs() if run.state == "running"), None)
            what = f"a cell is running {running.name}" if running is not None else "a cell is running"
            reason = f"{what}: buttons wait until it ends (with `await`, or .submit(), they need not)"
        busy = self.driver.busy
        if self._status.get("busy") and not busy:
            self._action_error = ""  # such as of a button that was pressed meanwhile
        fault = self._faults.get(self.shown, "")
        status = {
            "blocked": reason,
            "busy": f"{busy}, stopping after this stage" if busy and self.driver.stopping else busy,
            "outcome": self.driver.outcome,
            "error": self._action_error
            or self.driver.error
            or (f"{self.views[self.shown].title}: {fault}" if fault else ""),
        }
        if status != self._status:
            self._status = status
            self.send({"kind": "status", **status})


class Still:
    """Views as pictures that need no kernel and no script: html, svg where it is one picture, text.

    One that cannot be drawn says why in its place.
    """

    def __init__(self, views: Sequence[View]) -> None:
        self._pictures = [(view.title, _or_why(view.still)) for view in views]
        self._svg = _or_none(views[0].svg) if len(views) == 1 else None
        self._text = "\n".join(_or_why(view.text) for view in views) or "the hosts did not answer in time"

    def bundle(self) -> dict[str, str]:
        """By mimetype."""
        first = self._pictures[0][1] if self._pictures else escape(self._text)
        others = "".join(
            f"<details><summary>{escape(title)}</summary>{picture}</details>" for title, picture in self._pictures[1:]
        )
        svg = {"image/svg+xml": self._svg} if self._svg else {}
        return {"text/html": f"<div>{first}{others}</div>", **svg, "text/plain": self._text}

    def __repr__(self) -> str:
        return self._text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.bundle()


def _or_why(make: Callable[[], str]) -> str:
    try:
        return make()
    except Exception as error:
        return f"<p>{escape(str(error))}</p>"


def _or_none(make: Callable[[], str | None]) -> str | None:
    try:
        return make()
    except Exception:  # the html says why
        return None
