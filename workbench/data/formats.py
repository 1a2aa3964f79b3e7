"""Whether a response has the form that was asked for: `wb.verifiers.format`."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.validation import checked

_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
THINK_THEN_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"


def format(prompt: str, response: str, *, pattern: str = THINK_THEN_ANSWER, **_: Any) -> float:
    """1.0 if the whole response matches a regular expression, else 0.0.

    pattern: of Python's `re`, in which . matches a line break too. Default: <think>...</think>, then
    <answer>...</answer>, each once and nothing around them, the format reward of DeepSeek-R1
    (https://arxiv.org/abs/2501.12948, section 2.2.2). Set another one with `functools.partial`.
    A response has no special tokens: where tags are such tokens, write a function that takes `raw_response`.
    Raises `BadInput` for what is no regular expression.
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
