"""Ready-made reward functions. `fn(prompt, response, **row) -> float` checks the answer of one response.

What counts as a number in a text:

    42  1,234  1,234.50  .5  -8  -$8     a comma groups thousands only before exactly three digits: "1,2" is two numbers
    the minus of -8, not of 50-8         a minus right before the number counts, unless a number, a letter, "%" or a
                                         closing bracket precedes it: "17 -8" reads as 17 and -8, "17 - 8" as 17 and 8
    not the 2 of cm2 or H2O              digits right after a Latin letter do not count; the 2 of 2nd and of 2kg does
    1{,}234  1,\\!234                    LaTeX's forms of that comma
    \\frac{1}{2}  \\dfrac12  3\\frac12      LaTeX's fractions of whole numbers, and a whole number right before one

If a response has a \\boxed{...}, the last box is its answer, and the rest is not read: "\\boxed{18} dollars in 2 days"
is 18. In a box, \\text{...} counts only if there is no other number.

Signs around a number ($, %, *, the period of a sentence) do not belong to it: "50%" is 50. Not supported: fractions
with a slash ("3/4" ends in 4), powers of ten ("1e3" is 1), spaces between thousands, decimal commas.

These rules are for `arithmetic` and `gsm8k`. `math` reads formulas with math-verify
(https://github.com/huggingface/Math-Verify), only from the last box if there is a box. `code` runs programs. `format`
checks only the format, `instructions` checks IFEval's instructions. In a conversation, `arithmetic`, `gsm8k` and `math`
read the last turn.

`group_diversity` and `group_length` compare the responses to a prompt: each is called once with all of them and returns
a list with one score per response. Both take a verifier of single responses as `right`, set with
`functools.partial(wb.verifiers.group_length, right=wb.verifiers.arithmetic)`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from math import isfinite
from numbers import Real
from typing import Any, Literal

from workbench.data.batched import batched, over_of
from workbench.data.instructions import instructions as instructions
from workbench.data.programs import code as code
from workbench.data.programs import code_without_sandbox as code_without_sandbox
from workbench.data.user_functions import accepted, finite_number, short
from workbench.errors import BadInput, MissingDependency
from workbench.errors.plain_text import shown
from workbench.support.calls.needs import needs
from workbench.support.calls.server import WrongValue
from workbench.support.checked_calls import checked_call
from workbench.support.validation import PositiveInt, checked

Verifier = Callable[..., Any]
Unit = Literal["words", "characters"]


@batched(over="group")
@checked_call("wb.verifiers.group_diversity")
def group_diversity(
    prompt: Sequence[str], response: Sequence[str], *, n: PositiveInt = 2, unit: Unit = "words",
    right: Verifier | None = None, last_turn: Sequence[str] | None = None, **row: Any,
) -> list[float]:  # fmt: skip
    """Score how much each response differs from the others to its prompt, in [0, 1]: 0 if all are equal, 1 if it shares
    no n-gram with any other.

        d_i = mean over j != i of 1 - |N_i & N_j| / |N_i | N_j|

    N_i: the set of n-grams of a response, of words between blanks or of characters; a response shorter than n is one
    n-gram. The mean Jaccard distance measures diversity like Self-BLEU (Zhu et al. 2018,
    https://arxiv.org/abs/1802.01886), but for each response. A response alone in its group earns 0. right: a verifier;
    a response that it scores 0 or less earns 0, but is still compared with the others.
    Raises `BadInput` if `right` is no function of one response.
    """
    columns = {"prompt": prompt, "response": response, "last_turn": last_turn, **row}
    units = [text.split() if unit == "words" else text for text in response]
    grams = [{tuple(one[i : i + n]) for i in range(max(len(one) - n + 1, 1))} for one in units]  # at least one each
    scores = [
        sum(1 - len(one & other) / len(one | other) for j, other in enumerate(grams) if j != i) / max(len(grams) - 1, 1)
        for i, one in enumerate(grams)
    ]
    return [score if good else 0.0 for score, good in zip(scores, _passed(right, columns), strict=True)]


@batched(over="group")
@checked_call("wb.verifiers.group_length")
def group_length(
    prompt: Sequence[str], response: Sequence[str], response_ids: Sequence[Sequence[int]], *,
    right: Verifier | None = None, last_turn: Sequence[str] | None = None, **row: Any,
) -> list[float]:  # fmt: skip
    """Score how short each response is among the responses to its prompt: 0.5 for the shortest, -0.5 for the longest.

        0.5 - (length - shortest) / (longest - shortest),     0 for all if both are equal

    Source: the length reward of Kimi k1.5, https://arxiv.org/abs/2501.12599. Lengths are in tokens of `response_ids`,
    including an environment's observations. To favour long responses, give the component a negative weight.
    right: a verifier, as in the paper; a response that it scores 0 or less earns min(0, the length score), so that a
        wrong answer is not rewarded for being short. None: all responses count as right.
    Raises `BadInput` if `right` is no function of one response.
    """
    columns = {"prompt": prompt, "response": response, "response_ids": response_ids, "last_turn": last_turn, **row}
    lengths = [len(ids) for ids in response_ids]
    shortest, span = min(lengths, default=0), max(lengths, default=0) - min(lengths, default=0)
    scores = [0.5 - (length - shortest) / span if span else 0.0 for length in lengths]
    return [score if good else min(0.0, score) for score, good in zip(scores, _passed(right, columns), strict=True)]


def _passed(right: Verifier | None, columns: dict[str, Any]) -> list[bool]:
    """Return for each response whether the verifier gives more than 0. columns: of the rows; None: not given."""
    if right is None:
        return [True] * len(columns["response"])
    if over_of(right) is not None or inspect.iscoroutinefunction(right):
        raise BadInput(
            f"right={shown(right)}",
            "must be a function of one response, not batched and not async",
            "write right=wb.verifiers.arithmetic",
        )
    given = {name: column for name, column in columns.items() if column is not None}
    rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    scores = [right(**accepted(right, one)) for one in rows]
    try:
        return [finite_number(score) > 0 for score in scores]
    except WrongValue as error:
        raise BadInput(
            f"right={shown(right)} {error}", "must return one finite number a response", "return 1.0 or 0.0"
        ) from None


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
_BOX, _BRACE = "\\boxed{", re.compile(r"(?<!\\)[{}]")
MOST_CHARACTERS = 4000  # characters of a text in which `math` looks for a formula
_FORMULA_SIGNS = (_BOX, "\\(", "\\[", "$$")
_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
THINK_THEN_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"


def _answered(response: str, last_turn: str | None) -> str:
    """Return the text with the answer: in a conversation the last turn, so that a tool's output is no answer."""
    return checked("response", response if last_turn is None else last_turn, str)


def arithmetic(prompt: str, response: str, answer: str | int | float, last_turn: str | None = None, **_: Any) -> float:
    """Return 1.0 if the last number of the response, or of its last box, equals `answer`, else 0.0; a response or box
    without a number earns 0.0.

    Values are compared: "42.0" equals "42". Raises `BadInput` if `answer` is not exactly one number.
    """
    return float(_last(_answered(response, last_turn)) == _only(str(answer), shown(answer)))


def gsm8k(prompt: str, response: str, answer: str, last_turn: str | None = None, **_: Any) -> float:
    """Return 1.0 if the last number of the response, or of its last box, equals the number after the last `####` of
    `answer`, else 0.0.

    `answer` is GSM8K's unchanged worked solution. The response does not need a `####`: a model that was not trained on
    the format is scored equally. Raises `BadInput` if `answer` has no `####`, or not exactly one number after it.
    """
    mark, final = str(answer).rpartition("####")[1:]
    if not mark:
        raise BadInput(
            f"answer={shown(answer)}",
            "a GSM8K answer must have its final number after ####",
            "for a column of plain numbers use the reward function `arithmetic`",
        )
    return float(_last(_answered(response, last_turn)) == _only(final, repr(final)))


def _check_math_verify() -> None:
    try:
        import math_verify
    except ImportError as error:
        raise MissingDependency.of("math-verify", "the verifier `math` needs it", "math") from error
    # prevents its warning that its own time limit is off; that limit works only in a main thread
    math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True


@needs(_check_math_verify)
def math(prompt: str, response: str, answer: str | int | float, last_turn: str | None = None, **_: Any) -> float:
    """Return 1.0 if the answer of the response equals `answer` as a formula, else 0.0; no answer earns 0.0.

    math-verify reads and compares formulas with its defaults: fractions, decimals (equal to six places), percent (50%
    equals 50 and 0.5), numbers with units, sets in any order, intervals, tuples, matrices, equations. If a response has
    a \\boxed{...}, the last box is its answer; else math-verify looks for "answer is", then for the last formula or
    number. `answer` is a formula, with or without $...$ or \\boxed{...} around it. Only the last 4,000 characters of a
    response's answer are read. There is no own time limit: a comparison that passes `call_timeout_s` of
    `compute_reward` fails its row.
    Raises `BadInput` if `answer` is no formula, `MissingDependency` without math-verify.
    """
    _check_math_verify()
    from math_verify import verify

    given, right = _formulas(_last_box(_answered(response, last_turn))[-MOST_CHARACTERS:]), _right(answer)
    if not right:
        raise BadInput(
            f"the answer {short(shown(answer), 60)} is not a formula",
            "a response is compared with a formula",
            "correct the answer column, or write a reward function of your own",
        )
    return float(verify(right, given, timeout_seconds=None))


def format(prompt: str, response: str, *, pattern: str = THINK_THEN_ANSWER, **_: Any) -> float:
    """Return 1.0 if the whole response matches a regular expression, else 0.0.

    pattern: for Python's `re`, where . also matches a line break. Default: <think>...</think>, then
    <answer>...</answer>, each once, with only white space around them: the format reward of DeepSeek-R1
    (https://arxiv.org/abs/2501.12948, section 2.2.2). Set another pattern with `functools.partial`.
    `response` has no special tokens: if tags are special tokens, write a function that takes `raw_response`.
    Raises `BadInput` for an invalid regular expression.
    """
    return float(_compiled(checked("pattern", pattern, str)).fullmatch(checked("response", response, str)) is not None)


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadInput(
            f"pattern={shown(pattern)}", f"must be a regular expression: {error}", r"write pattern=r'.*\d+'"
        ) from None


def _right(answer: object) -> list[Any]:
    text = answer.strip() if isinstance(answer, str) else ""
    if isinstance(answer, Real) and not isinstance(answer, bool) and (isinstance(answer, int) or isfinite(answer)):
        text = f"{Decimal(str(answer)):f}" if isinstance(answer, float) else str(answer)  # not 1e-07
    whole = any(sign in text for sign in _FORMULA_SIGNS) or (len(text) > 2 and text[0] == text[-1] == "$")
    return _formulas(_last_box(text) if whole else f"{_BOX}{text}}}")


def _last_box(text: str) -> str:
    _, box, rest = text.rpartition(_BOX)
    return f"{_BOX}{_up_to_its_brace(rest)}}}" if box else text


def _formulas(text: str) -> list[Any]:
    """Return math-verify's reading of a text: a formula, and its text."""
    import sympy
    from math_verify import parse

    found = parse(text, parsing_timeout=None)
    # drops formulas such as 6:00, which is read as 6/0 and would equal 7/0
    return [one for one in found if isinstance(one, str) or not one.has(sympy.nan, sympy.zoo)]


def _numbers(text: str) -> list[Decimal | Fraction]:
    return [_value(match) for match in _NUMBER.finditer(_COMMA.sub(",", text))]


def _value(match: re.Match[str]) -> Decimal | Fraction:
    sign = "-" if match["sign"] else ""
    if match["digits"]:
        # built only from text, because Decimal's arithmetic rounds numbers of more than 28 digits
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
    """Return the text before the first unmatched closing brace; all of it if there is none, as in a cut response."""
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
