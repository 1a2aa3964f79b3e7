"""Base class of a panel's views: a picture as html, controls, and actions; and `Still`, a picture that needs no kernel
and no script."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from IPython.display import display

from workbench.display.curves import MIMETYPE
from workbench.display.html import as_images
from workbench.errors import BadInput

if TYPE_CHECKING:
    from workbench_widgets.driver import Driver


Given = Mapping[str, Any]


class View:
    """One tab of a panel. It reads a workbench, and acts on it, only through public methods.

    name: as in `lab.panel(name)`. title: on its tab. script: whether a front-end script, see `SCRIPTS` in
    `static/panel.js`, draws it from `payload()`; else the front end shows `picture()`. sticks: whether it stays at the
    top of the notebook when it is the only view, if the front end supports that. has_figure: whether it has a
    `figure()`. fields: names of actions that only assign their `value` to the attribute of the same name.

    An action of the front end, `data-act="keep" data-given='{"n": 3}'` on a control, calls `on_keep(n=3)`; a select or
    an input adds its `value`. Work that runs stages goes to `driver`; everything else runs in the panel's view thread.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    script: ClassVar[bool] = False
    sticks: ClassVar[bool] = False
    has_figure: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, lab: Any, driver: Driver) -> None:
        self.lab, self.driver = lab, driver
        self.turn: Callable[..., object]  # set by the panel: turn(name, **given) shows another view
        self.choices = 0  # how often something was chosen in it

    def depends_on(self) -> Hashable:
        """A value that changes when there is something new to draw. It is read several times a second and must be
        cheap."""
        raise NotImplementedError

    def controls(self) -> str:
        """Html of buttons and choices; not part of the still picture."""
        return ""

    def html(self, *, live: bool) -> str:
        """The picture; live: with controls in it. A subclass defines `html`, or only `picture`."""
        return self.picture()

    def picture(self) -> str:
        """Html without a script, as a saved notebook shows it."""
        return self.html(live=not self.script)

    def still(self) -> str:
        """The picture for a saved notebook, without controls."""
        return self.html(live=False)

    def svg(self) -> str | None:
        """The picture as a single svg, if it is one."""
        return None

    def figure(self) -> dict[str, Any] | None:
        """Charts beside the picture, as plotly's JSON; None while there is nothing to draw."""
        return None

    def text(self) -> str:
        """The picture in a few lines of text, for a console."""
        return self.title

    def payload(self) -> tuple[dict[str, Any], list[bytes]]:
        """The data for the script: plain values, and buffers."""
        return {"html": self.html(live=True)}, []

    def receive(self, **given: Any) -> None:
        """Show what another view links to, such as an iteration."""

    def act(self, action: str, given: Given) -> None:
        """Carry out a control's action."""
        self.choices += 1
        if action in self.fields:
            setattr(self, action, given["value"])
        else:
            getattr(self, f"on_{action}")(**given)


# --- controls, as html ------------------------------------------------------------------------------------------------


def _attributes(act: str, given: Given, *, drives: bool) -> str:
    told = f' data-given="{escape(json.dumps(dict(given)))}"' if given else ""
    return f'data-act="{escape(act)}"{told}{" data-drives" if drives else ""}'


def button(
    label: str, act: str, *, drives: bool = False, off: str = "", title: str = "", takes: bool = False,
    spoken: str = "", key: str = "", **given: Any,
) -> str:  # fmt: skip
    """A button. drives: it runs stages, and waits for other work that does. off: why it is disabled now. takes: it adds
    the `value` of the field in its row, an element with `data-row`. spoken: a text for screen readers, if the label
    alone is too short. key: identifies it across drawings, if its action does not."""
    state = f' disabled title="{escape(off)}"' if off else (f' title="{escape(title)}"' if title else "")
    state += (" data-takes" if takes else "") + (f' aria-label="{escape(spoken)}"' if spoken else "")
    state += f' data-key="{escape(key)}"' if key else ""
    return f'<button type="button" {_attributes(act, given, drives=drives)}{state}>{escape(label)}</button>'


def choice(label: str, act: str, options: Sequence[str] | Mapping[str, str], chosen: str, **given: Any) -> str:
    """A labelled select. options: values, or labels by value."""
    shown = options if isinstance(options, Mapping) else {name: name for name in options}
    inner = "".join(
        f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>{escape(text)}</option>'
        for value, text in shown.items()
    )
    name = escape(label)  # the label's own text takes in that of the options
    return f'<label>{name} <select aria-label="{name}" {_attributes(act, given, drives=False)}>{inner}</select></label>'


def entry(label: str, act: str, value: Any, *, kind: str = "text", size: int = 8, **given: Any) -> str:
    """A labelled field. kind: "text", "number", "search", "checkbox"."""
    how = ("checked" if value else "") if kind == "checkbox" else f'value="{escape(str(value))}" style="width:{size}em"'
    return f'<label>{escape(label)} <input type="{kind}" {_attributes(act, given, drives=False)} {how}></label>'


def whole_number(what: str, value: Any) -> int:
    """Parse a field's text as an integer of 1 or more; else raises `BadInput`."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise BadInput(f"{what}={value!r}", "must be a whole number, 1 or more")
    return number


class Still:
    """A view as html, as svg if it is a single picture, and as text, with its charts below, if it has any.

    If it cannot be drawn, it says why. None: hosts did not answer in time.
    """

    def __init__(self, view: View | None) -> None:
        self._text = "the hosts did not answer in time" if view is None else or_why(view.text)
        self._html = escape(self._text) if view is None else or_why(view.still)
        self._svg = None if view is None else or_none(view.svg)
        self._figure = None if view is None else or_none(view.figure)

    def bundle(self) -> dict[str, str]:
        """Everything but the charts, by mimetype."""
        svg = {"image/svg+xml": self._svg} if self._svg else {}
        return {"text/html": as_images(f"<div>{self._html}</div>"), **svg, "text/plain": self._text}

    def __repr__(self) -> str:
        return self._text

    def _ipython_display_(self) -> None:
        display(self.bundle(), raw=True)
        if self._figure:
            display({MIMETYPE: self._figure, "text/plain": ""}, raw=True)  # the text above has its numbers


def or_why(make: Callable[[], str]) -> str:
    """A picture, or the reason why it could not be drawn."""
    try:
        return make()
    except Exception as error:
        return f"<p>{escape(str(error))}</p>"


def or_none(ask: Callable[[], Any]) -> Any:
    """A view's answer; None if it fails, because its picture says why."""
    try:
        return ask()
    except Exception:  # a host that is gone, a workbench that was closed
        return None
