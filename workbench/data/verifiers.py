"""Reward functions for answers that can be checked: `fn(prompt, response, **row) -> float`, one sample a call.

What counts as a number in a text:

    42  1,234  1,234.50  .5  -8  -$8     a comma groups thousands only before exactly three digits: "1,2" is two numbers
    the minus of -8, not of 50-8         a minus right before the number counts, unless a number, a letter, "%" or a
                                         closing bracket precedes it: "17 -8" reads as 17 and -8, "17 - 8" as 17 and 8
    not the 2 of cm2 or H2O              digits right behind a Latin letter do not count; the 2 of 2nd and of 2kg does
    1{,}234  1,\\!234                    LaTeX's ways to write that comma
    \\frac{1}{2}  \\dfrac12  3\\frac12      LaTeX's fractions of whole numbers, and a whole number right before one

Where a response has a \\boxed{...}, the last of them is its answer, and all else is not read: "\\boxed{18} dollars in 2
days" is 18. Of the text in the box, what is in \\text{...} counts only where there is no other number.

Signs around a number ($, %, *, the period of a sentence) are no part of it: "50%" is 50. Not understood: fractions with
a slash ("3/4" ends in 4), powers of ten ("1e3" is 1), thousands set apart by spaces, decimal commas.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from workbench.data.user_functions import short
from workbench.errors import BadInput
from workbench.support.rules import shown
from workbench.support.validation import checked

_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z_%)\]}])[-\u2212]\$?)?"
    r"(?:(?:(?<![0-9A-Za-z_.])(?P<whole>[0-9]{1,18}) ?)?"
    r"\\[dt]?frac ?(?:\{(?P<top>[-\u2212]?[0-9]{1,18})\}|(?P<top_digit>[0-9]))"
    r" ?(?:\{(?P<bottom>[0-9]{1,18})\}|(?P<bottom_digit>[0-9]))"
    r"|(?<![0-9A-Za-z_])"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<!\.)\.[0-9]+))"
)
_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!)(?=[0-9]{3})")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm)\{[^{}]*\}")
_BOX, _BRACE = "\\boxed{", re.compile(r"[{}]")


def arithmetic(prompt: str, response: str, answer: str | int | float, **_: Any) -> float:
    """1.0 if the last number of the response, or of its last box, equals `answer`, else 0.0; a response (a box) without
    a number earns 0.0.

    Equality is of values: "42.0" earns what "42" does. Raises `BadInput` if `answer` is not exactly one number.
    """
    return float(_last(checked("response", response, str)) == _only(_text(answer), shown(answer)))


def gsm8k(prompt: str, response: str, answer: str, **_: Any) -> float:
    """1.0 if the last number of the response, or of its last box, equals the number behind the last `####` of `answer`,
    else 0.0.

    `answer` is GSM8K's worked solution as it stands. The response need not carry a `####`: a model not trained on the
    format is judged alike. Raises `BadInput` if there is no `####` in `answer`, or not exactly one number behind it.
    """
    mark, final = _text(answer).rpartition("####")[1:]
    if not mark:
        raise BadInput(
            f"answer={shown(answer)}",
            "a GSM8K answer carries its final number behind ####",
            "for a column of plain numbers use the reward function `arithmetic`",
        )
    return float(_last(checked("response", response, str)) == _only(final, repr(final)))


def _text(answer: object) -> str:
    try:
        return str(answer)
    except Exception:  # a whole number of more than 4,300 digits, or an object that cannot be written
        return ""


def _numbers(text: str) -> list[Decimal | Fraction]:
    return [_value(match) for match in _NUMBER.finditer(_COMMA.sub(",", text))]


def _value(match: re.Match[str]) -> Decimal | Fraction:
    sign = "-" if match["sign"] else ""
    if match["digits"]:
        # built from text alone: Decimal's arithmetic would round numbers of more than 28 digits
        return Decimal(sign + match["digits"].replace(",", ""))
    top, bottom = (match[name] or match[f"{name}_digit"] for name in ("top", "bottom"))
    if not int(bottom):
        return Decimal("nan")  # equal to no number
    value = int(match["whole"] or 0) + Fraction(int(top.replace("\u2212", "-")), int(bottom))
    return -value if sign else value


def _last(text: str) -> Decimal | Fraction | None:
    _, box, rest = text.rpartition(_BOX)
    if not box:
        numbers = _numbers(text)
    else:
        inside = _up_to_its_brace(rest)
        numbers = _numbers(_TEXT.sub(" ", inside)) or _numbers(inside)
    return numbers[-1] if numbers else None


def _up_to_its_brace(text: str) -> str:
    """The text before the closing brace that has no opening one; all of it, where a response was cut before that."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += 1 if brace[0] == "{" else -1
        if depth < 0:
            return text[: brace.start()]
    return text


def _only(text: str, shown: str) -> Decimal | Fraction:
    numbers = _numbers(text)
    if len(numbers) != 1:
        raise BadInput(
            f"the answer {short(shown, 60)} holds {len(numbers)} numbers",
            "a response is checked against exactly one number",
            "correct the answer column, or write a reward function of your own",
        )
    return numbers[0]
