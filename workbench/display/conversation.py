"""Draw a conversation as a tree of turns, coloured by advantage, with the turns marked that a user edited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from workbench.display.html import picture_id
from workbench.display.palette import Scale

LONG = 240  # characters of a turn that are shown before it is folded
SIGNS = "▶ here · ✎ by hand, not trained · ∎ over · ✂ cut · thick edge: the branch"
LINE = "color-mix(in srgb,currentColor 20%,transparent)"


@dataclass(frozen=True, kw_only=True)
class TurnPicture:
    """How a turn is drawn. indent: the number of forks above it. trained: whether a batch of the branch would train its
    tokens. advantage: None if unknown. value: of the state after it, as text. on_path: whether it lies on the branch.
    here: whether the branch ends with it."""

    number: int
    indent: int
    text: str
    tokens: int
    answer: str
    by_hand: bool
    answered_by_hand: bool
    reward: float
    done: bool
    ending: str
    advantage: float | None
    value: str
    on_path: bool
    here: bool
    trained: bool


def tree_picture(turns: Sequence[TurnPicture], title: str, *, search: str = "", live: bool = False) -> str:
    """Html with one line a turn; the environment's answer is folded below it.

    search: mark turns that contain this text (case is ignored), and hide turns of other branches without it. live:
    lines can be focused and pressed.
    """
    found = [turn for turn in turns if not search or turn.on_path or has(turn, search)]
    most = max((abs(turn.advantage) for turn in turns if turn.advantage is not None), default=0.0)
    scale = Scale(kind="diverging", limit=most)
    key = picture_id(title + "".join(turn.text for turn in found))
    head = f'<div style="font-weight:600">{escape(title)}</div>'
    head += f'<div style="font-size:12px;opacity:.75">{SIGNS}</div>{scale.legend("advantage") if most else ""}'
    hidden = len(turns) - len(found)
    left_out = f'<div style="opacity:.7">{hidden} turns of other branches do not have this text</div>' if hidden else ""
    reached = next((turn for turn in found if turn.here), found[0] if found else None)
    lines = "".join(
        _line(turn, scale, search, f"wb-turn-{key}-{turn.number}", live=live, reached=turn is reached) for turn in found
    )
    role = ' role="tree" aria-label="turns of the conversation" data-steps' if live else ""
    empty = "" if turns else '<div style="opacity:.7">no turn yet: chat.step() makes one</div>'
    return f'<div style="font-size:13px;color:inherit">{head}{empty}<div{role}>{lines}</div>{left_out}</div>'


def has(turn: TurnPicture, search: str) -> bool:
    """Whether a turn, or the environment's answer to it, contains a text."""
    return search.lower() in f"{turn.text}\n{turn.answer}".lower()


def says(turn: TurnPicture) -> str:
    """Describe a turn in words, for screen readers and consoles."""
    parts = [f"turn {turn.number}", f"{turn.tokens} tokens", f"reward {turn.reward:.4g}"]
    parts += ["written by hand"] if turn.by_hand else []
    parts += ["answered by hand"] if turn.answered_by_hand else []
    parts += ["of the branch, trained" if turn.trained else "of the branch, not trained"] if turn.on_path else []
    parts += [] if turn.advantage is None else [f"advantage {turn.advantage:.4g}"]
    parts += [f"value behind it {turn.value}"] if turn.value else []
    parts += ["the conversation is over"] if turn.done else [f"cut ({turn.ending})"] if turn.ending == "length" else []
    return ", ".join(parts)


def _line(turn: TurnPicture, scale: Scale, search: str, key: str, *, live: bool, reached: bool) -> str:
    colour = "" if turn.advantage is None else scale.colour(turn.advantage)
    edge = "4px solid currentColor" if turn.on_path else f"4px solid {LINE}"
    dashed = "text-decoration:underline dashed 1px;text-underline-offset:3px;" if turn.by_hand else ""
    pale = "" if turn.on_path else "opacity:.75;"
    mark = "outline:2px solid #009e73;" if search and has(turn, search) else ""
    style = (
        f"margin:2px 0 2px {1.4 * turn.indent:.1f}em;padding:2px 8px;border-left:{edge};{pale}{mark}"
        f"{f'background:{colour};' if colour else ''}"
    )
    acts = ""
    if live:
        given = escape(json.dumps({"number": turn.number}))
        acts = (
            f' role="treeitem" aria-level="{turn.indent + 1}" aria-selected="{str(turn.here).lower()}" data-item '
            f'data-act="go" data-given="{given}" data-key="turn-{turn.number}" tabindex="{0 if reached else -1}" '
            f'aria-label="{escape(says(turn))}"'
        )
    signs = {"▶": turn.here, "✎": turn.by_hand, "∎": turn.done, "✂": turn.ending == "length"}
    told = f"{turn.number} {''.join(sign for sign, holds in signs.items() if holds)}"
    facts = f"reward {turn.reward:.4g}"
    facts += "" if turn.advantage is None else f" · advantage {turn.advantage:+.3g}"
    facts += f" · value behind {turn.value}" if turn.value else ""
    facts += "" if turn.trained or not turn.on_path else " · not trained"
    return (
        f'<div style="{style}" title="{escape(says(turn))}"{acts}><b>{told}</b> '
        f'<span style="white-space:pre-wrap;{dashed}font:13px ui-monospace,Menlo,Consolas,monospace">'
        f'{_folded(turn.text, "turn", key)}</span> <small style="opacity:.75">{escape(facts)}</small>'
        f"{_answer(turn, key)}</div>"
    )


def _folded(text: str, what: str, key: str) -> str:
    """Show a text; a long one as its beginning, with the full text in a fold."""
    if len(text) <= LONG:
        return escape(text)
    return (
        f'<details data-key="{key}-{what}" style="display:inline"><summary>{escape(text[:LONG])}… '
        f"({len(text)} characters)</summary>{escape(text)}</details>"
    )


def _answer(turn: TurnPicture, key: str) -> str:
    if not turn.answer:
        return ""
    by = "answer by hand ✎" if turn.answered_by_hand else "answer"
    first = turn.answer.strip().splitlines()[0] if turn.answer.strip() else "blank"
    short = first if len(first) <= 60 else first[:60] + "…"
    body = (
        f'<div style="white-space:pre-wrap;font:12px ui-monospace,Menlo,Consolas,monospace">{escape(turn.answer)}</div>'
    )
    summary = f"<summary>⟦{by}: {escape(short)}⟧</summary>"
    return f'<details data-key="{key}-answer" style="margin-left:1.6em;opacity:.8">{summary}{body}</details>'
