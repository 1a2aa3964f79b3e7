"""Values of every kind, most of them wrong wherever they are given."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import workbench as wb
from tests.cases import vowels


class Unprintable:
    """Its `repr` raises, as that of a half-made object does."""

    def __repr__(self) -> str:
        raise RuntimeError("half made")


class Exits:
    """Its `repr` ends the process."""

    def __repr__(self) -> str:
        raise SystemExit(3)


class Floods:
    """Its `repr` is long, and a terminal would obey it."""

    def __repr__(self) -> str:
        return "\x1b]0;owned\x07\x9b2J" + "x" * 10**5


class Refuses:
    """Whatever is asked of it raises."""

    def refuse(self, *given: Any) -> Any:
        raise RuntimeError("no")

    __eq__ = __bool__ = __len__ = __iter__ = __float__ = __int__ = __index__ = __str__ = __getitem__ = refuse
    __hash__ = __lt__ = __contains__ = __array__ = refuse


FIXED = (
    None, True, False, math.nan, math.inf, -math.inf, 10**30, -(10**30), 10**400, 10**5000, -(10**5000), 1j,
    Fraction(1, 2), Fraction(10**400), Decimal("0.5"), np.True_, np.float32(0.5), np.float64("nan"), np.longdouble(0.5),
    np.array([1.0, 2.0]), np.array([]), torch.tensor(1.0), torch.tensor([1, 2]), lambda: None, vowels, object(), int,
    Unprintable, Unprintable(), [Unprintable()], Exits(), [Exits()], Floods(), {"a": Floods()}, Refuses(), [Refuses()],
    (0.5, 0.9), {0.1, 0.9}, [0.5, 10**5000], (1, "x"), {1: 0.5},
    {"a": Unprintable()}, range(3), Path("x"), wb.Sampling(), wb.Correction(), wb.LoRA(), wb.Training(), "k1",
    "constant", "torch", "ppo", "grpo", "float32", "",
)  # fmt: skip
SCALARS = (  # of FIXED by number: hypothesis prints what it samples from
    st.integers(0, len(FIXED) - 1).map(FIXED.__getitem__)
    | st.integers() | st.integers(-2, 20) | st.floats() | st.floats(0, 1) | st.text(max_size=5)
    | st.binary(max_size=5) | st.integers(-100, 100).map(np.int64) | st.integers(0, 100).map(np.uint8)
)  # fmt: skip
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.lists(SCALARS, max_size=3).map(tuple)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, whatever its constraints."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or getattr(hint, "_is_protocol", False):
        return True
    if origin is typing.Annotated:
        return fits(value, args[0])
    if origin is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if origin is tuple and type(value) is tuple:
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin is Callable:
        return callable(value)
    if origin is Mapping and isinstance(value, Mapping):
        return all(fits(key, args[0]) and fits(item, args[1]) for key, item in value.items())
    if origin in (Sequence, Iterable) and isinstance(value, origin):
        return not isinstance(value, (str, bytes)) and all(fits(item, args[0]) for item in value)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, kind) for kind in args)
    return type(value) is hint if hint in (bool, int, float) else isinstance(value, origin or hint)
