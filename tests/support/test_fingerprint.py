from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest

from workbench.support.fingerprint import fingerprint
from workbench.workers.roles.reward import RewardWorker


def weigh(text: str, weight: float = 1.0) -> float:
    return weight * len(text)


class Scorer:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, text: str) -> float:
        return self.weight * len(text)


def scaled(weight: float) -> Any:
    return lambda text: weight * len(text)


def worker(extra: int) -> type:
    class Mine(RewardWorker):
        EXTRA = extra

        def more(self) -> int:
            return 1

    return Mine


def other_worker() -> type:
    class Mine(RewardWorker):
        EXTRA = 1

        def more(self) -> int:
            return 2

    return Mine


CONTENTS: list[tuple[Any, Any, Any]] = [
    (
        functools.partial(weigh, weight=2.0),
        functools.partial(weigh, weight=2.0),
        functools.partial(weigh, weight=3),
    ),
    (Scorer(1.0), Scorer(1.0), Scorer(2.0)),
    (Scorer(1.0).__call__, Scorer(1.0).__call__, Scorer(2.0).__call__),
    (scaled(1.0), scaled(1.0), scaled(2.0)),
    (worker(1), worker(1), worker(2)),
    (worker(1), worker(1), other_worker()),
    ({"a": 1, "b": {2, 3}}, {"b": {3, 2}, "a": 1}, {"a": 2, "b": {2, 3}}),
    ([lambda x: x + 1], [lambda x: x + 1], [lambda x: x + 2]),
    ([weigh], [weigh], [fingerprint]),
]


def test_equal_content_and_only_that_counts_as_equal() -> None:
    for one, same, other in CONTENTS:
        assert fingerprint(one) == fingerprint(same)
        assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("of", [lambda first: {0: first}, lambda first: {first}, lambda first: [first]])
def test_what_another_thread_changes_meanwhile_is_read_as_it_was(of: Any) -> None:
    class Grows:
        """While it is read, what holds it gets another item."""

        def __reduce_ex__(self, protocol: Any) -> str:
            if isinstance(held, dict):
                held[len(held)] = 0
            elif isinstance(held, set):
                held.add(len(held))
            else:
                held.append(0)
            return "grows"

    first = Grows()
    held: Any = of(first)
    assert fingerprint(held) and len(held) == 2


def test_what_holds_itself_has_an_end() -> None:
    def again(n: int) -> int:
        return again(n - 1) if n else 0

    ring: list[Any] = [again]
    ring.append(ring)
    assert fingerprint(ring) == fingerprint(ring)


SCRIPT = """
import functools
import os
from workbench.support.fingerprint import fingerprint
from workbench.models.spec import Model
from workbench.settings.training import Training
from workbench.workers.roles.reward import RewardWorker
from tests.support.test_fingerprint import Scorer, worker

def vowels(prompt, response, **row):  # its place and comments do not count
    return sum(c in {"a", "e", "i", "o", "u"} for c in response) if response not in {"none", "nil"} else 0.0

values = [functools.partial(vowels, 1), Scorer(0.5), worker(3), Model(function=vowels, training=Training()), {"x", "y"}]
print([fingerprint(value) for value in values])
"""


@pytest.mark.slow
def test_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Other processes have other addresses, another order of sets, and other line numbers."""
    exec(compile("\n\n# another line\n" + SCRIPT, "<other>", "exec"), {"__name__": "__main__"})
    there = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert there == capsys.readouterr().out
