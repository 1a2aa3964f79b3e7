"""The pictures of samples, as html: the table of a page, one response token by token, the samples of one prompt.

live: with what a front end acts on; without it they stand for themselves, in a saved notebook.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import Tensor

from workbench.display.html import kv, table
from workbench_widgets.token_colours import Scale, Token, legend, number, scale_of
from workbench_widgets.token_columns import MEANINGS, Sample, common, derived, difference, token_texts
from workbench_widgets.view import button

if TYPE_CHECKING:
    from workbench_widgets.samples import Looked

WINDOW = 400  # tokens that are drawn at a time
SHORT, LONG = 48, 3000  # characters of a text in a cell, and of a prompt above its response
# of a token that is clipped above, and below; where that is not known, of a ratio outside the range
SIGNS = {1.0: "▲", -1.0: "▼"}
HIDDEN = ("finished", "prompt_uid")
_LINE = "border-bottom:1px solid color-mix(in srgb,currentColor 20%,transparent);background:"
_PLACE = "border:0;padding:2px 8px 2px 3px"
_CHOSEN = "color-mix(in srgb,currentColor 14%,transparent)"


def page_table(looked: Looked, sort: str, descending: bool, *, live: bool) -> str:
    """The rows of a page: text, numbers, and means of numbers by token over what the policy chose."""
    if not looked.page:
        return "<p>No row is left: widen the filter.</p>"
    decode = looked.rows.lab.decode
    names = [str(name) for name in looked.rows.numbers if name not in HIDDEN]
    names.sort(key=lambda name: not any(word in name for word in ("reward", "cost")))  # stable: these first
    means = [name for name in looked.page[0].columns if name != "response_mask"]
    kl = {"old_log_prob", "ref_log_prob"} <= set(means)
    sides = {name: "left" if looked.rows.numbers[name].dtype == bool else "right" for name in names}
    heads = [_head(name, sides[name], sort, descending, live=live) for name in names]
    heads += [
        f'<th style="{_PLACE};text-align:right;opacity:.75">{escape(name)} mean</th>' for name in [*means, *["kl"] * kl]
    ]
    body, on_page = [], looked.sample in looked.page
    for sample in looked.page:
        is_chosen = looked.sample is sample
        reached = is_chosen if on_page else sample is looked.page[0]
        cells = [_cell(_short(_prompt(sample))), _cell(_short(decode(sample.token_ids)))]
        cells += [_cell(sample.values[name]) for name in names]
        cells += [_cell(sample.mean(name)) for name in means]
        cells += [_cell(sample.mean("old_log_prob") - sample.mean("ref_log_prob"))] if kl else []
        body.append(_row(sample.row, cells, is_chosen=is_chosen, reached=reached, live=live))
    first = "".join(f'<th style="{_PLACE};text-align:left">{name}</th>' for name in ("row", "prompt", "response"))
    return _framed(f"<thead><tr>{first}{''.join(heads)}</tr></thead>", body)


def group_table(
    members: Sequence[Sample], numbers: pd.DataFrame, sample: Sample, *, lab: Any, live: bool
) -> str:  # fmt: skip
    """The samples of one prompt, the best first, with what makes their advantages: mean and spread of the rewards."""
    told = f"group: {len(numbers)} samples of one prompt"
    if "rewards" in numbers:
        rewards = numbers["rewards"].astype("float64")
        told += f"; rewards mean {rewards.mean():.6g}, standard deviation {rewards.std(ddof=1):.6g} (of n - 1)"
    hidden = len(numbers) - len(members)
    names = [name for name in ("rewards", "costs", "response_tokens", "truncated") if name in numbers]
    advantages = "advantages" in members[0].columns
    heads = ["row", *names, *["advantages mean"] * advantages, "response"]
    body = []
    for member in members:
        cells = [_cell(member.values[name]) for name in names]
        cells += [_cell(member.mean("advantages"))] if advantages else []
        cells.append(_cell(_short(lab.decode(member.token_ids), 2 * SHORT)))
        is_chosen = member.row == sample.row
        body.append(_row(member.row, cells, is_chosen=is_chosen, reached=is_chosen, live=live, where="group"))
    head = "".join(f'<th style="{_PLACE};text-align:left">{name}</th>' for name in heads)
    more = f"<div>{hidden} more are not shown</div>" if hidden else ""
    return f"<div style='margin-top:6px'><b>{told}</b></div>{_framed(f'<thead><tr>{head}</tr></thead>', body)}{more}"


def sample_picture(
    looked: Looked, colour: str, beside_name: str, *, at: int, start: int, difference: bool,
    clip: tuple[float, float], lab: Any, live: bool,
) -> str:  # fmt: skip
    """The chosen row: its prompt, its response coloured by a column, what is beside it, and its numbers."""
    sample, beside = looked.sample, looked.beside
    assert sample is not None
    shown = WINDOW // (2 if beside is not None else 1)
    window = range(min(start, max(0, len(sample.token_ids) - 1)), len(sample.token_ids))[:shown]
    scale = _page_scale(colour, looked, clip)
    parts = [legend(scale, colour, MEANINGS.get(colour, ""))]
    side = _Side(sample, looked.columns, colour, scale, lab.decode, window, at, live)
    boxes = [_box(f"{looked.rows.name}, row {sample.row}", side.html())]
    if beside is not None:
        same = common(sample, beside)
        legend_of_it, box = _beside(looked, colour, scale, beside_name, same, difference, side)
        parts.append(legend_of_it)
        boxes.append(box)
    elif beside_name:
        parts.append(f"<div>{escape(beside_name)} has no sample of this prompt.</div>")
    says = '<div data-says aria-live="polite" style="min-height:1.5em">Step along the tokens with the arrow keys.</div>'
    facts = _facts(sample, looked.columns, at)
    prompt = escape(_short(sample.prompt, LONG, keep_lines=True))
    return (
        f'<section aria-label="row {sample.row}"><h4 style="margin:8px 0 2px">row {sample.row}</h4>'
        f'<div style="white-space:pre-wrap;max-height:9em;overflow:auto;opacity:.8" tabindex="0" aria-label="prompt">'
        f"{prompt}</div>{''.join(parts)}"
        f'<div style="display:flex;flex-wrap:wrap;gap:4px 18px">{"".join(boxes)}</div>'
        f"{says if live else ''}{_turn(window, len(sample.token_ids), shown) if live else _more(window, sample)}"
        f'<div style="display:flex;flex-wrap:wrap;gap:4px 18px;align-items:flex-start">{facts}</div></section>'
    )


# --- tokens -----------------------------------------------------------------------------------------------------------


class _Side:
    """The tokens of one of two responses that are side by side, or of the only one."""

    def __init__(
        self, sample: Sample, columns: Mapping[str, Tensor], colour: str, scale: Scale,
        decode: Callable[[Sequence[int]], str], window: range, at: int, live: bool,
    ) -> None:  # fmt: skip
        self.sample, self.columns, self.colour, self.scale = sample, columns, colour, scale
        self.decode, self.window, self.at, self.live = decode, window, at, live

    def html(self, side: int = 0, gap: Tensor | None = None, gap_scale: Scale | None = None, same: int = -1) -> str:
        """Spans. side: 1 for the one beside. gap: its difference to the other, told, and coloured with `gap_scale`.
        same: tokens that both have; -1: there is no other."""
        ids, mask = self.sample.token_ids, self.sample.mask.tolist()
        nothing = [float("nan")] * len(ids)
        values = self.columns[self.colour].tolist() if self.colour in self.columns else nothing
        gaps = nothing if gap is None else gap.tolist()
        window = [n for n in self.window if n < len(ids)]
        if not window:
            return "<i>no tokens here</i>"
        before = max(0, window[0] - 1)  # which the first one of the window is read behind
        texts = token_texts(ids[before : window[-1] + 1], self.decode)[-len(window) :]
        reached = self.at if self.at in window else window[0]
        outsides = self.columns["outside_range"].tolist() if "outside_range" in self.columns else [0.0] * len(ids)
        clips = self.columns["clipped"].tolist() if "clipped" in self.columns else [None] * len(ids)
        spans = []
        for n, text in zip(window, texts, strict=True):
            other = 0 <= same <= n
            says = f"token {n + 1} of {len(ids)} {text!r} (id {ids[n]}): {self.colour} {number(values[n])}"
            if gap is not None:
                says += ", behind what both have" if other else f", difference {number(gaps[n])}"
            outside, clipped = outsides[n], clips[n]
            if outside:
                ratio = "new_ratio" if "new_ratio" in self.columns else "ratio"
                says += f", {ratio} {'above' if outside > 0 else 'below'} the clip range"
                says += "" if clipped is None else ", clipped" if clipped else ", not clipped"
            if not mask[n]:
                says += ", not chosen by the policy"
            act = ""
            if self.live:
                given = json.dumps({"at": n, "side": 1} if side else {"at": n}, separators=(",", ":"))
                act = f" data-item data-token data-act=token data-given='{given}' tabindex={0 if n == reached else -1}"
            spans.append(
                Token(
                    text=text,
                    says=says,
                    colour=self.scale.colour(values[n]) if gap_scale is None else gap_scale.colour(gaps[n]),
                    sign=SIGNS.get(outside if clipped is None else clipped, ""),
                    masked=not mask[n],
                    other=other,
                    attributes=act,
                ).html()
            )
        return "".join(spans)


def _beside(
    looked: Looked, colour: str, scale: Scale, name: str, same: int, by_difference: bool, mine: _Side
) -> tuple[str, str]:
    """The legend and the box of the response beside the chosen one."""
    other, theirs, ours = looked.beside, looked.beside_columns, looked.columns
    assert other is not None
    gap, gap_scale, told = None, None, ""
    if colour in theirs and colour in ours:
        gap = difference(theirs[colour], ours[colour], same)
        if by_difference:
            gap_scale = scale_of("difference", [gap])
            told = legend(gap_scale, "difference", f"{colour} of {name} - of {looked.rows.name}")
    side = _Side(other, theirs, colour, scale, mine.decode, mine.window, mine.at, mine.live)
    longest = max(len(other.token_ids), len(mine.sample.token_ids))
    alike = "the same response" if same == longest else f"the first {same} tokens are the same"
    return told, _box(f"{name}, row {other.row}: {alike}", side.html(1, gap, gap_scale, same))


def _box(title: str, tokens: str) -> str:
    return (
        f'<div style="flex:1 1 22em;min-width:0"><div style="opacity:.75">{escape(title)}</div>'
        f'<div class="wb-sa-tokens" data-steps role="group" aria-label="tokens of {escape(title)}" '
        'style="white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.75 ui-monospace,Menlo,Consolas,monospace">'
        f"{tokens}</div></div>"
    )


def _page_scale(colour: str, looked: Looked, clip: tuple[float, float]) -> Scale:
    """One scale for the rows of a page, so that their colours compare."""
    columns = [looked.columns, *(derived(sample, None, *clip) for sample in looked.page)]
    return scale_of(colour, [found[colour] for found in columns if colour in found])


def _turn(window: range, length: int, shown: int) -> str:
    if length <= shown:
        return ""
    first, last = window.start, window.stop
    earlier = button(
        "Earlier tokens", "window", off="" if first else "these are the first", start=max(0, first - shown)
    )
    later = button("Later tokens", "window", off="" if last < length else "these are the last", start=last)
    return f"<div>{earlier} {later} tokens {first + 1} to {last} of {length}</div>"


def _more(window: range, sample: Sample) -> str:
    length = len(sample.token_ids)
    return f"<div>tokens {window.start + 1} to {window.stop} of {length}</div>" if len(window) < length else ""


# --- numbers ----------------------------------------------------------------------------------------------------------


def _facts(sample: Sample, columns: Mapping[str, Tensor], at: int) -> str:
    """What is known of the row, and of each column the number at the chosen token, the mean and the sum."""
    known = {name: value for name, value in sample.values.items() if name != "finished"}
    known |= {name: _short(text) for name, text in sample.texts.items() if name != "prompt"}
    rows = []
    for name, values in columns.items():
        chosen = values[sample.mask].double()
        chosen = chosen[~chosen.isnan()]
        rows.append(
            {
                "column": name,
                f"token {at + 1}": number(float(values[at])) if at < len(values) else "",
                "mean": number(float(chosen.mean())),
                "sum": number(float(chosen.sum()) if len(chosen) else float("nan")),
            }
        )
    return kv({name: _plain(value) for name, value in known.items()}) + table(rows, max_rows=40)


def _head(name: str, side: str, sort: str, descending: bool, *, live: bool) -> str:
    arrow = (" ▼" if descending else " ▲") if name == sort else ""
    told = ' aria-sort="descending"' if descending else ' aria-sort="ascending"'
    label = button(f"{name}{arrow}", "sort", column=name) if live else escape(f"{name}{arrow}")
    if live:  # one key whatever the arrow
        label = label.replace("<button", f'<button data-key="sort-{escape(name)}"', 1)
    return f'<th style="{_PLACE};text-align:{side}"{told if arrow else ""}>{label}</th>'


def _row(row: int, cells: Sequence[str], *, is_chosen: bool, reached: bool, live: bool, where: str = "page") -> str:
    """reached: by the tab key; arrow keys reach the others."""
    style = f' style="{_LINE}{_CHOSEN if is_chosen else "transparent"}"'
    sign = "▶ " if is_chosen else ""
    if not live:
        return f"<tr{style}>{_cell(f'{sign}{row}')}{''.join(cells)}</tr>"
    given = f"data-act=row data-given='{{\"row\":{row}}}'"
    pressed = f'aria-pressed="{str(is_chosen).lower()}" tabindex="{0 if reached else -1}"'
    press = f'<button type="button" data-key="{where}-{row}" data-item {pressed} {given}>{sign}{row}</button>'
    return f'<tr{style} {given}><td style="{_PLACE}">{press}</td>{"".join(cells)}</tr>'


def _framed(head: str, body: Sequence[str]) -> str:
    style = "border-collapse:collapse;font-size:12px;background:transparent;color:inherit"
    return (
        f'<div data-scrolls style="overflow:auto;max-height:25em"><table class="wb-sa-table" style="{style}">{head}'
        f"<tbody data-steps>{''.join(body)}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    shown = _plain(value)
    side = "text-align:left;white-space:nowrap" if isinstance(shown, str) else "text-align:right"
    text = f"{shown:.4g}" if isinstance(shown, float) else str(shown)
    return f'<td style="{_PLACE};{side}">{escape(text)}</td>'


def _plain(value: Any) -> Any:
    """A number as Python has it; a truth value as a word."""
    plain = value.item() if hasattr(value, "item") else value
    return ("yes" if plain else "no") if isinstance(plain, bool) else plain


def _prompt(sample: Sample) -> str:
    return sample.texts.get("prompt", sample.prompt)


def _short(text: str, most: int = SHORT, *, keep_lines: bool = False) -> str:
    flat = text if keep_lines else text.replace("\n", "↵")
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"
