"""A role's state in other layouts and processes: the same weights, and the next step is what it would have been."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.engines.training_ranks import asked, run_ranks
from tests.workers.state_ranks import Case, all_moved
from workbench.placement import Layout

pytestmark = pytest.mark.slow

DATA, TENSOR, PIPELINE = Layout(d=2), Layout(t=2), Layout(p=2)
BF16 = torch.bfloat16
CASES = [
    Case(kind="torch", old=DATA, new=TENSOR, same=True),
    Case(kind="torch", old=TENSOR, new=PIPELINE, same=True),
    Case(kind="torch", old=PIPELINE, new=DATA, head="scalar"),
    Case(kind="torch", old=DATA, new=DATA, adapter=True, dtype=BF16),
    Case(kind="torch", old=PIPELINE, new=PIPELINE, steps=0),
    Case(kind="frozen", old=TENSOR, new=DATA, dtype=BF16, steps=0),
    Case(kind="zero0", old=DATA, new=DATA),
    Case(kind="zero1", old=DATA, new=DATA),
    Case(kind="zero1", old=DATA, new=DATA, dtype=BF16, steps=0),
    Case(kind="zero2", old=DATA, new=DATA, dtype=BF16, adapter=True),
    Case(kind="zero3", old=DATA, new=DATA),
    Case(kind="zero3", old=DATA, new=DATA, dtype=BF16, head="scalar"),
    *[
        Case(kind="torch", old=old, new=new, optimizer="adamw_8bit")
        for old, new in ((DATA, DATA), (PIPELINE, DATA))
        if importlib.util.find_spec("bitsandbytes") is not None
    ],
    # the last, and alone: after it DeepSpeed makes no other engines in this process
    Case(kind="zero1", old=DATA, new=TENSOR),
]


# one that is cut anew, a head, an adapter, each engine whose state differs, and 8-bit moments
GATE = [CASES[n] for n in (0, 2, 3, 7, 10, 12) if n < len(CASES) - 1] + CASES[-1:]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[int, Any]:
    """By case what each rank saw."""
    numbers = sorted(asked(request, "number"))
    seen = zip(*run_ranks(all_moved, 2, [CASES[n] for n in numbers]), strict=True)
    return dict(zip(numbers, seen, strict=True))


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if case in GATE else pytest.mark.thorough) for n, case in enumerate(CASES)],
    ids=lambda n: f"{CASES[n].kind} {CASES[n].old} {CASES[n].new}",
)
def test_another_engine_goes_on(outcomes: dict[int, Any], number: int) -> None:
    case = CASES[number]
    for rank in outcomes[number]:
        assert rank["after"] == rank["before"]
        assert rank["received"] == rank["planned"]
        assert (rank["received"] > 0) == (not case.same or case.new == PIPELINE)
        assert rank["kinds"] <= {"move"}
        assert rank["steps"] == case.steps
        if case.kind == "frozen":
            continue
        exact = case.old == case.new
        assert rank["rates"][0] == rank["rates"][1]
        assert rank["norms"][1] == pytest.approx(rank["norms"][0], rel=0 if exact else 1e-4)
        first, second = rank["further"]
        assert first.keys() == second.keys()
        for name in first:
            if exact:
                assert torch.equal(first[name], second[name]), name
            else:
                torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-5, msg=name)
