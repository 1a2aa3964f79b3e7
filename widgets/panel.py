"""The panel: views of one workbench as tabs of one widget; live while its kernel lives, a picture without."""

from __future__ import annotations

import atexit
import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import anywidget
import traitlets
from IPython.display import display

from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import said
from workbench.support.notebook_cell import in_notebook
from workbench_widgets.driver import Driver, Pulse, module, style
from workbench_widgets.saved_picture import SavedPicture
from workbench_widgets.view import Still, View

EVERY_S = 0.4
BUSY_SLOW_S = 2.0  # after how long a kernel counts as blocked while the panel itself keeps it busy
AGAIN_S = 2.0  # between two tries to draw what fails
ASK_EVERY, REST_AFTER = 25, 75  # messages: how often the page is asked whether it is there; after how many it is not
ALIVE_S = 5.0  # how often the page hears that the kernel is there; see `SILENT_S` in static/panel.js
STATIC = "WORKBENCH_WIDGETS"  # set to "static": pictures only, for notebooks that are executed without anybody there
WIDGET = "application/vnd.jupyter.widget-view+json"


class Front(anywidget.AnyWidget):
    """The front end of a panel: script, style, the names of its views, and the selected view."""

    _esm = traitlets.Unicode(module("panel.js")).tag(sync=True)
    _css = traitlets.Unicode(style()).tag(sync=True)
    titles: Any = traitlets.List().tag(sync=True)
    hides = traitlets.Unicode().tag(sync=True)  # a style that hides the saved pictures
    again = traitlets.Unicode().tag(sync=True)  # how to have it again, for a page whose kernel is gone
    shown = traitlets.Unicode().tag(sync=True)
    sticks = traitlets.Bool().tag(sync=True)  # to the top of the notebook
    own = traitlets.Unicode().tag(sync=True)  # its `model_id`


class Panel:
    """Views of one workbench, as tabs. Made by `lab.panel(...)`.

    Shown in a cell it is live: it follows what cells do, and its buttons act on the workbench. Shown twice, or after
    the page was reloaded, it is the same panel in the same state. When the workbench closes, the last picture of every
    view replaces it. While it is live, the cell also stores a picture of every view, hidden by the page: a notebook
    that is saved at any time shows it when it is opened without its kernel; see `SavedPicture`.

    Once it is live, a single thread reads, draws and acts on its views: a host that answers slowly blocks neither cells
    nor other widgets of the notebook.
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
        self._numbers = dict.fromkeys(self.views, 0)  # of drawings: a page sees what it missed
        self._round = 0  # of all panels, in which it drew last
        self._status: dict[str, str] = {}
        self._action_error = ""  # why the last action failed
        self._faults: dict[str, str] = {}  # of views that could not be drawn
        self._again_s = 0.0  # when such a one is tried again; monotonic
        self._places: list[Any] = []  # where it is shown
        self._saved = SavedPicture()
        self._heard_s = 0.0  # when the page was last asked something; monotonic
        self._page_is_there = False  # whether a page is there
        self._unanswered = 0  # draws since the page was last heard
        self._ended = threading.Event()

    # --- what it shows ------------------------------------------------------------------------------------------------

    def show(self, name: str, **given: Any) -> Panel:
        """Select a view, and pass it what to show: `panel.show("samples", iteration=3)`. Returns the panel."""
        if name not in self.views:
            raise BadInput(f"view {name!r}", f"this panel has {', '.join(self.views)}", "lab.panel() has all views")

        def turn() -> None:
            self.views[name].receive(**given)
            self.views[name].choices += 1
            self.shown = name
            if self._front is not None:
                self._front.shown = name
            self._draw()

        self._in_turn(turn)
        return self

    def still(self) -> Still:
        """The selected view in its present state, as a picture that needs no kernel."""
        made: list[Still] = []
        self._in_turn(lambda: made.append(Still(self.views[self.shown])))
        return made[0] if made else Still(None)

    def _by_shown(self) -> list[View]:
        return sorted(self.views.values(), key=lambda view: view.name != self.shown)

    def _ipython_display_(self) -> None:
        if in_notebook() and os.environ.get(STATIC) != "static":
            widget = {"version_major": 2, "version_minor": 0, "model_id": self._live().model_id}
            handle = display({WIDGET: widget, "text/plain": repr(self)}, raw=True, display_id=True)
            if handle is not None:
                self._places.append(handle)
        self._in_turn(lambda: self._saved.show(self._by_shown(), self.lab))

    def __repr__(self) -> str:
        return f"<Panel of {self.lab.name[:40]}: {len(self.views)} views>"

    def close(self) -> None:
        """Stop updating. On this page its last picture replaces it; elsewhere it stays unchanged."""
        if self._ended.is_set():
            return
        self._save()
        self._in_turn(self._saved.draw_anew)
        self._ended.set()
        for place in self._places:  # the picture beside it stays, and nothing hides it any more
            place.update({"text/html": "", "text/plain": ""}, raw=True)
        self._places.clear()
        atexit.unregister(self._leave)
        self.send({"kind": "status", "blocked": "the workbench is closed", "busy": "", "outcome": "", "error": ""})
        self.send({"kind": "closed"})

    # --- its thread ---------------------------------------------------------------------------------------------------

    def _live(self) -> Front:
        """The front end, created when the panel is first shown."""
        if self._front is None:
            titles = [[view.name, view.title, view.script] for view in self.views.values()]
            alone = len(self.views) == 1 and self.views[self.shown].sticks
            hides = self._saved.hides(list(self.views.values()))
            own = self._saved.name
            self._front = Front(
                titles=titles, shown=self.shown, hides=hides, again=again(self.lab), sticks=alone, own=own, model_id=own
            )
            if in_notebook():
                # exit handlers run in reverse order. pyzmq's, after which no message of 64 kB or more can be sent, must
                # run after ours, so it is registered first: by this import
                importlib.import_module("zmq.utils.garbage")
            atexit.register(self._leave)
            self._front.on_msg(lambda _, message, buffers: self._jobs.put(lambda: self._receive(message)))
            self._front.observe(lambda change: self._jobs.put(lambda: self._turned(change["new"])), "shown")
            self._thread = threading.Thread(target=self._work, name="workbench-panel-views", daemon=True)
            self._thread.start()
        return self._front

    def _in_turn(self, job: Callable[[], None]) -> None:
        """Run a job in the thread of the views, if there is one, and wait at most `answer_s` for it. Raises the job's
        error."""
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
        more = False
        while not self._ended.is_set():
            began_s = time.thread_time()
            try:
                with suppress(queue.Empty):
                    self._jobs.get(timeout=0.0 if more else EVERY_S)()
                self._look()
                more = self._saved.refresh(self._by_shown(), self.lab)
            except Exception as error:  # whatever it was: the next look is another one
                self._action_error, more = f"{type(error).__name__}: {said(error)}", False
            self.work_s += time.thread_time() - began_s

    def _save(self) -> None:
        self._in_turn(lambda: self._saved.save(self._by_shown(), self.lab))

    def _leave(self) -> None:
        """Called last when a kernel shuts down: stop the threads before the sockets close, and flush pending messages,
        which ipykernel would drop."""
        if self._thread is None or not self._thread.is_alive():  # in a process that was forked from the kernel
            return
        self._save()
        self._ended.set()
        self._thread.join(self.answer_s)
        sys.stdout.flush()  # of ipykernel: it waits for all that was sent before

    def _look(self) -> None:
        """Draw the selected view if it has changed; send the reason why buttons are disabled."""
        # a button's work may run in this process and slow down the event loop without blocking it
        blocked = self._pulse.blocked(BUSY_SLOW_S) if self.driver.busy else self._pulse.blocked()
        if self._unanswered > REST_AFTER and not blocked:
            self._page_is_there = False  # the page is gone
        if not self._page_is_there:
            return
        if self._due() and (this_round := self.driver.pace.round()) != self._round:
            self._round, began_s = this_round, time.thread_time()
            self._draw()
            self.driver.pace.took(time.thread_time() - began_s)
        self._send_status(blocked)
        if time.monotonic() - self._heard_s > ALIVE_S:
            self._ask({"kind": "alive", "view": self.shown, "number": self._numbers[self.shown]})

    def _due(self) -> bool:
        """Whether the selected view has changed, or a failed drawing is due again."""
        view = self.views[self.shown]
        try:
            due = self._seen.get(view.name) != view.depends_on()
        except Exception as error:  # a workbench that was closed, a host that is gone
            self._faults[view.name], due = said(error), False
        return time.monotonic() > self._again_s if view.name in self._faults else due

    def _draw(self) -> None:
        """Send the selected view; if that fails, show the reason and try again later."""
        view = self.views[self.shown]
        if self._front is None:
            return
        try:
            seen, controls = view.depends_on(), view.controls()
            number, whole, buffers = self._numbers[view.name] + 1, view.name in self._unsent, list[bytes]()
            message: dict[str, Any] = {"kind": "draw", "view": view.name, "number": number, "whole": whole}
            if view.script:
                message["data"], buffers = view.payload()
            else:
                message["html"] = view.picture()
        except Exception as error:
            self._faults[view.name], self._again_s = said(error), time.monotonic() + AGAIN_S
            return
        if whole or self._controls.get(view.name) != controls:
            message["controls"] = self._controls[view.name] = controls
        self._numbers[view.name] = number
        self._ask(message, buffers)
        self._seen[view.name] = seen
        self._unsent.discard(view.name)
        self._faults.pop(view.name, None)

    # --- between kernel and page --------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """Send a message to the page, if there is one."""
        if self._front is not None:
            self._front.send(message, list(buffers))

    def _ask(self, message: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """Send a message; the page, if there is one, answers every `ASK_EVERY`th."""
        self._unanswered += 1
        self._heard_s = time.monotonic()
        self.send(message | {"answer": self._unanswered % ASK_EVERY == 0}, buffers)

    def _receive(self, message: dict[str, Any]) -> None:
        act = message["act"]
        if act == "keeps":  # a page that was just opened, whether it draws the panel or not
            self._saved.kept_by(lambda kept: self.send({"kind": "saved", "kept": kept}))
            return
        self._page_is_there, self._unanswered = True, 0
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
            self._action_error = said(error)
        except Exception as error:
            self._action_error = f"{type(error).__name__}: {said(error)}"

    def _turned(self, name: str) -> None:
        """Handle that the page selected another view."""
        if name != self.shown:
            self.shown, self._action_error, self.driver.outcome = name, "", ""
            self._draw()

    def _send_status(self, blocked: bool) -> None:
        """Send why buttons are disabled, and the last button's result, if these have changed."""
        reason = ""
        if blocked:
            running = next((run for run in self.lab.open_runs() if run.state == "running"), None)
            what = f"a cell is running {running.name}" if running is not None else "a cell is running"
            reason = f"{what}: buttons wait until it ends (not if the cell uses `await` or .submit())"
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


def again(lab: Any) -> str:
    """How to get a panel back after its kernel has ended."""
    if lab.description.backend == "inline":
        return "This workbench was in the kernel. To get it back, run the notebook's cells again."
    return f"To continue, run in a cell:\n\nimport workbench as wb\nlab = wb.attach({lab.name!r})\nlab.panel()"
