"""Values that cannot be compared, where a flag or a word is expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.expected import expect_error
from tests.fuzz.values import Refuses
from workbench.data.example_rows import feedback
from workbench.data.user_functions import checked_reply, is_flag
from workbench.errors import BadInput
from workbench.support.calls.server import WrongValue

INCOMPARABLE = [np.array([1.0, 2.0]), np.array([]), Refuses()]


@pytest.mark.parametrize("value", INCOMPARABLE, ids=["array", "empty", "refuses"])
def test_what_cannot_be_compared_is_no_flag_and_no_word(value: Any) -> None:
    assert not is_flag(value)
    with expect_error(BadInput, value="score=", rule="must be 'all' or 'share'"):
        wb.verifiers.code("?", "```python\nx = 1\n```", tests="assert True", score=value)
    with expect_error(BadInput, value="row 1: label=", rule="true or false"):
        feedback({"prompt": "a", "response": "b", "label": value}, "row 1")
    with pytest.raises(WrongValue, match="returned"):
        checked_reply(("text", 1.0, value))


def test_flags_are_those_of_numpy_too() -> None:
    assert all(map(is_flag, (True, False, np.True_, np.bool_(False), 0, 1)))
