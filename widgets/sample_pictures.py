"""Pictures of samples, as html: the table of a page, one response token by token, the samples of one prompt.

live: with controls for a front end; without them the pictures can stay in a saved notebook. Token numbers become
colours that work in light and dark themes and for colour-blind readers: each is one of Okabe and Ito's ("Color
Universal Design", 2008), laid over the page with varying strength.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.display.html import Markup, kv, table
from workbench.display.palette import Scale
from workbench_widgets.sample_rows import MEANINGS, Sample, common, token_texts, up_to
from workbench_widgets.view import button

if TYPE_CHECKING:
    from workbench_widgets.samples import Looked, Samples

BEYOND = 0.02  # the share of numbers that a scale may leave outside, so that one of them does not pale all others
WINDOW = 400  # tokens that are drawn at a time
SHORT, LONG = 48, 3000  # characters of a text in a cell, and of a prompt above its response
# Signs of tokens that are clipped above and below; if clipping is unknown, of ratios outside the range
SIGNS = {1.0: "▲", -1.0: "▼"}
HIDDEN = ("finished", "prompt_uid")
_SIDE_BY_SIDE = "display:flex;flex-wrap:wrap;gap:4px 18px;align-items:flex-start"
_TOKENS = "white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.75 ui-monospace,Menlo,Consolas,monospace"


# --- rows -------------------------------------------------------------------------------------------------------------


def page_table(view: Samples, looked: Looked, *, live: bool) -> str:
    """The rows of a page: text, numbers, and means of token numbers over the policy's tokens."""
    if not looked.page:
        return "<p>No row matches: widen the filter.</p>"
    names = [str(name) for name in looked.rows.numbers if name not in HIDDEN]
    names.sort(key=lambda name: not any(word in name for word in ("reward", "cost")))  # stable: these first
    arrow = " ▼" if view.descending else " ▲"
    heads = {name: name + arrow * (name == view.sort) for name in names}
    if live:
        heads = {name: Markup(button(head, "sort", key=f"sort-{name}", column=name)) for name, head in heads.items()}
    means = [name for name in looked.page[0].columns if name != "response_mask"]
    rows = []
    for sample in looked.page:
        chosen = sample is looked.sample
        label: str = f"{'▶ ' * chosen}{sample.row}"
        if live:  # one is reached by the tab key; arrow keys reach the others
            reached = sample is (looked.sample if looked.sample in looked.page else looked.page[0])
            state = f'aria-pressed="{str(chosen).lower()}" tabindex="{0 if reached else -1}"'
            act = f"data-item data-act=row data-given='{{\"row\":{sample.row}}}'"
            label = Markup(f'<button type="button" data-key="page-{sample.row}" {state} {act}>{label}</button>')
        texts = {"prompt": sample.texts.get("prompt", sample.prompt), "response": view.lab.decode(sample.token_ids)}
        rows.append(
            {"row": label, **{name: _short(text) for name, text in texts.items()}}
            | {heads[name]: _plain(sample.values[name]) for name in names}
            | {f"{name} mean": sample.mean(name) for name in means}
        )
    style = "overflow:auto;max-height:25em;white-space:nowrap"
    return f'<div class="wb-sa-table" data-scrolls data-steps style="{style}">{table(rows)}</div>'


def group(view: Samples, looked: Looked, *, live: bool) -> str:
    """The samples of one prompt, with the mean and the spread of their rewards, from which advantages are made; "" for
    a single sample."""
    assert looked.sample is not None
    numbers = looked.rows.numbers.loc[looked.rows.group(looked.sample.row)]
    if len(numbers) < 2:
        return ""
    told = f"group: {len(numbers)} samples of one prompt"
    if "rewards" in numbers:
        rewards = numbers["rewards"].astype("float64")
        told += f"; rewards mean {rewards.mean():.6g}, standard deviation {rewards.std(ddof=1):.6g} (of n - 1)"
    press = button("Show these rows", "where", value=f"prompt_uid == {_plain(numbers['prompt_uid'].iloc[0])}")
    return f"<div><b>{told}</b> {press if live else ''}</div>"


def _plain(value: Any) -> Any:
    """A number as a Python number; a boolean as a word."""
    plain = value.item() if hasattr(value, "item") else value
    return ("yes" if plain else "no") if isinstance(plain, bool) else plain


def _short(text: str) -> str:
    flat = text.replace("\n", "↵")
    return flat if len(flat) <= SHORT else f"{flat[: SHORT - 1]}…"


# --- one response -----------------------------------------------------------------------------------------------------


def response(view: Samples, looked: Looked, *, live: bool) -> str:
    """The selected row: its prompt, its response coloured by a column, the row beside it, and its numbers."""
    sample, beside, colour = looked.sample, looked.beside, looked.colour
    assert sample is not None
    length, shown = len(sample.token_ids), WINDOW // (2 if beside is not None else 1)
    first = min(view.start, max(0, length - 1))
    window = range(first, min(first + shown, length))
    # one scale for the rows of a page, so that their colours compare
    of_page = [one.columns[colour] for one in looked.page if colour in one.columns]
    scale = scale_of(colour, [looked.columns[colour], *of_page])
    parts, same = [scale.legend(colour, MEANINGS.get(colour, ""))], -1
    boxes = [
        _box(f"{looked.rows.name}, row {sample.row}", tokens(view, sample, looked.columns, colour, scale, window, live))
    ]
    if beside is not None:
        same, longest = common(sample, beside), max(len(beside.token_ids), length)
        alike = "the same response" if same == longest else f"the first {same} tokens are the same"
        columns = dict(looked.beside_columns)
        if colour in columns:
            theirs = columns[colour].double()
            columns["difference"] = up_to(same, theirs, len(theirs)) - up_to(same, looked.columns[colour], len(theirs))
        html = tokens(view, beside, columns, colour, scale, window, live, side=1, same=same)
        boxes.append(_box(f"{view.beside}, row {beside.row}: {alike}", html))
    elif view.beside:
        parts.append(f"<div>{escape(view.beside)} has no sample of this prompt.</div>")
    if live:
        told = "Step along the tokens with the arrow keys."
        boxes.append(f'<div data-says aria-live="polite" style="min-height:1.5em;flex-basis:100%">{told}</div>')
    turn = ""
    if live and length > shown:
        off = ["" if first else "these are the first", "" if window.stop < length else "these are the last"]
        turn = button("Earlier tokens", "window", off=off[0], start=max(0, first - shown))
        turn += " " + button("Later tokens", "window", off=off[1], start=window.stop)
    part = f"<div>{turn} tokens {first + 1} to {window.stop} of {length}</div>" if len(window) < length else ""
    prompt = sample.prompt if len(sample.prompt) <= LONG else f"{sample.prompt[: LONG - 1]}…"
    return (
        f'<section aria-label="row {sample.row}"><h4 style="margin:8px 0 2px">row {sample.row}</h4>'
        f'<div style="white-space:pre-wrap;max-height:9em;overflow:auto;opacity:.8" tabindex="0" aria-label="prompt">'
        f'{escape(prompt)}</div>{"".join(parts)}<div style="{_SIDE_BY_SIDE}">{"".join(boxes)}</div>{part}'
        f'<div style="{_SIDE_BY_SIDE}">{_facts(sample, looked.columns, view.at)}</div></section>'
    )


def _box(title: str, inside: str) -> str:
    return (
        f'<div style="flex:1 1 22em;min-width:0"><div style="opacity:.75">{escape(title)}</div>'
        f'<div class="wb-sa-tokens" data-steps role="group" aria-label="tokens of {escape(title)}" '
        f'style="{_TOKENS}">{inside}</div></div>'
    )


def tokens(
    view: Samples, sample: Sample, columns: Mapping[str, Tensor], colour: str, scale: Scale, window: range, live: bool,
    *, side: int = 0, same: int = -1,
) -> str:  # fmt: skip
    """The tokens of a window as spans. columns: with "difference" if there is one to show. side: 1 for the response
    beside. same: the number of common tokens; -1: there is no other response."""
    ids, window = sample.token_ids, range(window.start, min(window.stop, len(sample.token_ids)))
    if not window:
        return "<i>no tokens here</i>"
    before = max(0, window.start - 1)  # which the first one of the window is read behind
    texts = token_texts(ids[before : window.stop], view.lab.decode)[-len(window) :]
    reached, spans = view.at if view.at in window else window.start, []
    ratio = "new_ratio" if "new_ratio" in columns else "ratio"
    numbers = {name: values.tolist() for name, values in columns.items()}
    for n, text in zip(window, texts, strict=True):
        of = {name: values[n] for name, values in numbers.items()}
        other, chosen, outside = 0 <= same <= n, bool(sample.mask[n]), of.get("outside_range", 0.0)
        value = of.get(colour, math.nan)
        says = f"token {n + 1} of {len(ids)} {text!r} (id {ids[n]}): {colour} {number(value)}"
        if "difference" in of:
            says += ", after the common tokens" if other else f", difference {number(of['difference'])}"
        if outside:
            says += f", {ratio} {'above' if outside > 0 else 'below'} the clip range"
            says += "" if "clipped" not in of else ", clipped" if of["clipped"] else ", not clipped"
        says += "" if chosen else ", not chosen by the policy"
        act = ""
        if live:
            given = json.dumps({"at": n, "side": 1} if side else {"at": n}, separators=(",", ":"))
            act = f" data-item data-token data-act=token data-given='{given}' tabindex={0 if n == reached else -1}"
        sign = SIGNS.get(of.get("clipped", outside), "")
        spans.append(token(text, says, scale.colour(value), sign=sign, masked=not chosen, other=other, act=act))
    return "".join(spans)


def token(
    text: str, says: str, colour: str, *, sign: str = "", masked: bool = False, other: bool = False, act: str = ""
) -> str:
    """A token as a span; spaces and ends of lines can be seen. says: its number, in words. sign: of one that is
    clipped, or outside the range. masked: the policy did not choose it. other: the responses are no longer the same."""
    style = "padding:0 1px;margin-right:2px;" + (f"background:{colour};" if colour else "")
    if masked:
        style += "text-decoration:line-through;opacity:.55;"
    elif sign:
        style += "text-decoration:underline 2px;"
    if other:
        style += "outline:1px dotted currentColor;outline-offset:-1px;"
    told = f'<sup style="font-size:65%;line-height:0">{sign}</sup>' if sign else ""
    shown = escape(text).replace(" ", "·").replace("\t", "⇥\t").replace("\n", "↵\n") or "∅"
    line = "\n" if shown.endswith("\n") else ""  # the sign stays in the line of its token
    return f'<span title="{escape(says)}" style="{style}"{act}>{shown.removesuffix(line)}{told}{line}</span>'


def _facts(sample: Sample, columns: Mapping[str, Tensor], at: int) -> str:
    """What is known of the row, and of each column the number at the chosen token, the mean and the sum."""
    known = {name: _plain(value) for name, value in sample.values.items() if name != "finished"}
    known |= {name: _short(text) for name, text in sample.texts.items() if name != "prompt"}
    rows = []
    for name, values in columns.items():
        chosen = values[sample.mask].double()
        chosen = chosen[~chosen.isnan()]
        figures = (values[at] if at < len(values) else None), chosen.mean(), chosen.sum() if len(chosen) else math.nan
        told = ["" if figure is None else number(float(figure)) for figure in figures]
        rows.append({"column": name} | dict(zip((f"token {at + 1}", "mean", "sum"), told, strict=True)))
    return kv(known) + table(rows, max_rows=40)


# --- numbers as colours -----------------------------------------------------------------------------------------------


def scale_of(name: str, values: Sequence[Tensor]) -> Scale:
    """The colour scale of a column for the shown numbers: wide enough for all of them but outliers."""
    kind: Any = "ratio" if name.endswith("ratio") else "sequential" if name.endswith("log_prob") else "diverging"
    numbers = torch.cat([value.double().flatten() for value in values])
    sizes = (numbers.clamp(min=1e-12).log() if kind == "ratio" else numbers).abs()
    sizes = sizes[sizes.isfinite()]
    if name in ("outside_range", "clipped", "response_mask") or not len(sizes):
        return Scale(kind=kind, limit=1.0)
    return Scale(kind=kind, limit=float(torch.quantile(sizes, 1 - BEYOND)) or float(sizes.max()) or 1.0)


def number(value: float) -> str:
    """Six digits, with a minus sign as wide as a plus."""
    return "none" if math.isnan(value) else f"{value:.6g}".replace("-", "\N{MINUS SIGN}")
