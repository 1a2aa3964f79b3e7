"""Learning rates by group of parameters: factors, by patterns of names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, Field

from workbench.errors import BadInput
from workbench.support.validation import FINITE, NonNegativeFloat, Rule


class Factors(dict[str, float]):
    """`Training.rates`: cannot be changed in place, where nothing would check or record it."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise BadInput(
            f"a change inside rates={dict(self)}",
            "factors are assigned whole, so that they are checked and recorded",
            f"write lab.actor.training.rates = {dict(self)}, with other factors",
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Factors, (dict(self),)


def _are_patterns(rates: Mapping[str, float]) -> Mapping[str, float]:
    for pattern in rates:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise BadInput(
                f"Training.rates with the pattern {pattern[:60]!r}", f"no regular expression: {error}",
                f"write {re.escape(pattern[:60])!r} for the text itself",
            ) from None  # fmt: skip
    return Factors(rates)


Rates = Annotated[
    Mapping[Annotated[str, Field(min_length=1)], Annotated[NonNegativeFloat, FINITE]],
    AfterValidator(_are_patterns),
    Rule("must be factors of the rate, 0 or more, by patterns of names", 'write rates={"embed": 0.1}'),
]
