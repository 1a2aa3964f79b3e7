"""A form for the arguments of the next stage: value, default, origin, and two ways to change it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from workbench.display.html import bytes_text, seconds_text, table
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.settings.training import LIVE, Training
from workbench.stages.live_settings import changed_by
from workbench.telemetry.spans import KIND_MEANINGS
from workbench_widgets.view import button

LONGEST = 2000  # characters of a value
NAME = re.compile(r"[A-Za-z_][\w.-]*")
RATE = "training."  # before the name of a field of the role's training
_CELL = "padding:1px 10px 1px 0;text-align:left;font-weight:normal"


def form(algorithm: Any, stage: Any, lab: Any, *, editable: bool, running: bool = False) -> str:
    """The arguments of a stage as a table with a field a row, and for an update the training settings of its role.

    editable: whether the stage has not run yet, so that a change can affect it. running: whether it is under way.
    """
    rows = [
        _row(stage.name, a.name, a.value, a.default, a.source, ("once", "lasting") if editable else (), a.in_effect)
        for a in algorithm.arguments(stage.name)
    ]
    if stage.updates:
        training = lab.groups[stage.role].training
        fields = {name: getattr(training, name) for name in LIVE}
        where, default = f"lab.{stage.role}.training", Training().of_role(stage.role)
        rows += [
            _row(stage.name, RATE + name, value, getattr(default, name), where, ("lasting",))
            for name, value in fields.items()
        ]
    if not rows:
        return "<div>It takes no arguments.</div>"
    heads = "".join(f'<th scope="col" style="{_CELL};opacity:.75">{name}</th>' for name in _HEADS)
    ran = "It is running" if running else "It has run in this iteration"
    told = (
        "&ldquo;This step&rdquo; applies only to the next run of this stage, &ldquo;From now on&rdquo; to all later "
        "runs. Enter presses the first button of the row."
        if editable
        else f"{ran}; its arguments can be changed when the next one begins."
    )
    return (
        f'<details open data-key="arguments"><summary>arguments of {escape(stage.name)}</summary>'
        f'<div style="opacity:.75">{told}</div>'
        f'<div data-scrolls style="max-height:26em;overflow:auto"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


_HEADS = ("argument", "value", "change", "default", "comes from")
_LABELS = {"once": "This step", "lasting": "From now on"}


def _row(
    stage: str, name: str, value: Any, default: Any, source: str, ways: tuple[str, ...], in_effect: str = ""
) -> str:
    shown = text_of(value)
    field, buttons = escape(shown if shown is not None else f"{getattr(value, '__name__', value)!s:.60}"), ""
    if ways and shown is not None:
        label = f"{name} of {stage}"
        field = (
            f'<input type="text" data-key="value-{escape(stage)}-{escape(name)}" aria-label="{escape(label)}" '
            f'value="{escape(shown)}" style="width:{min(max(len(shown), 8), 24)}em">'
        )
        buttons = " ".join(
            button(_LABELS[way], "change", takes=True, spoken=f"{_LABELS[way]}: {label}", title=_title(way, source),
                   argument=name, once=way == "once", stage=stage)
            for way in ways
        )  # fmt: skip
    if in_effect:
        field += f" in effect: {escape(in_effect)}"
    told = "" if default is inspect.Parameter.empty else text_of(default)
    cells = (field, buttons, escape(told if told is not None else f"{default!s:.40}"), escape(source))
    head = f'<th scope="row" style="{_CELL}">{escape(name)}</th>'
    return f"<tr data-row>{head}{''.join(f'<td style={chr(34)}{_CELL}{chr(34)}>{cell}</td>' for cell in cells)}</tr>"


def _title(way: str, source: str) -> str:
    if way == "once":
        return "only for the next run of this stage"
    return f"{source.partition(',')[0]}, for all later runs" if "." in source else "for all runs of this stage"


def text_of(value: Any) -> str | None:
    """A value as the user would type it: names without quotes. None if it is not plain data."""
    if isinstance(value, str):
        return value if NAME.fullmatch(value) and value not in ("None", "True", "False") else repr(value)
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    try:
        same = len(text) <= LONGEST and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return text if same else None


def value_of(text: str, what: str) -> Any:
    """Parse typed text: a number, True, False, None, a name, or a list or mapping of these. Nothing is evaluated."""
    text = text.strip()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if NAME.fullmatch(text):
            return text
    raise BadInput(
        f"{what}={shown(text)}", "must be data: a number, True, False, None, a name, or a list of these",
        "give other values, such as functions, in a cell",
    )  # fmt: skip


def change(algorithm: Any, lab: Any, stage: str, argument: str, text: str, *, once: bool) -> str:
    """Make a change; returns a line that says what is in effect now."""
    value = value_of(text, f"{argument} of {stage}")
    with changed_by("the panel"):
        if argument.startswith(RATE):
            role, field = algorithm.graph()[stage].role, argument.removeprefix(RATE)
            setattr(lab.groups[role].training, field, value)
            return f"lab.{role}.training.{field} is {shown(value)} from the next update on"
        algorithm.change_argument(stage, argument, value, once=once)
    return f"{argument} of {stage} is {shown(value)} {'in its next run' if once else 'from now on'}"


def times(record: Any, spans: Any) -> str:
    """The spans of a stage call as a table; "" if there are none. spans: a frame from `lab.spans(run)`."""
    found = spans.to_dict("records")
    if not found:
        return ""
    rows = [
        {
            "rank": row["rank"], "device": row["device"], "kind": ("· " if row["parent"] else "") + row["kind"],
            "took": seconds_text(row["duration_s"]), "tokens": row["processed_tokens"] or "",
            "moved": bytes_text(row["moved_bytes"]) if row["moved_bytes"] else "",
        }
        for row in found
    ]  # fmt: skip
    told = {kind: KIND_MEANINGS[kind] for kind in dict.fromkeys(row["kind"] for row in found)}
    if record.ended_s and record.started_s:
        took = seconds_text(max(record.ended_s - record.started_s, 0.0))
        told = {f"{took}, in the graph": "from when it was sent to its ranks until the last one answered"} | told
    words = "".join(f"<li><b>{escape(name)}</b>: {escape(meaning)}</li>" for name, meaning in told.items())
    shown = table(rows, caption="timing, by rank (· lies inside the row without a dot above it)", max_rows=12)
    return f'{shown}<details><summary>what each time covers</summary><ul style="margin:2px 0">{words}</ul></details>'
