"""Make train.jsonl and test.jsonl beside this script: `python make.py`. The same bytes on every Python 3.9 or newer.

All rows of one problem go to the same file, whatever their wording and, in sums and products, the order of the two
numbers: no test problem occurs in training.
"""

from __future__ import annotations

import hashlib
import json
import operator
import random
from pathlib import Path
from typing import TypeVar

SEED = 0
TEST_ROWS = 200
TWO_DIGIT_ROWS = 410  # of sums, and as many of differences
WORDINGS = (
    "What is {}? Answer with the number only.",
    "{} = ?",
    "Compute {}. Reply with just the number.",
    "How much is {}? Give only the number.",
    "Work out {}. Give just the result.",
)
RESULT = {"+": operator.add, "-": operator.sub, "*": operator.mul}

Problem = tuple[str, int, int]  # operation, first number, second number
Item = TypeVar("Item")


def shuffled(items: list[Item], rng: random.Random) -> list[Item]:
    """A permutation drawn with `random()` alone, the one method whose sequence Python promises never to change."""
    keyed = [(rng.random(), place) for place in range(len(items))]
    return [items[place] for _, place in sorted(keyed)]


def problems() -> tuple[list[Problem], list[Problem]]:
    """Every one-digit sum and difference and product of 2 to 12; every sum and difference with a two-digit number."""
    digit, number = range(10), range(100)
    easy = [("+", a, b) for a in digit for b in digit]
    easy += [("-", a, b) for a in digit for b in digit if a >= b]
    easy += [("*", a, b) for a in range(2, 13) for b in range(2, 13)]
    hard = [("+", a, b) for a in number for b in number if max(a, b) > 9]
    hard += [("-", a, b) for a in number for b in number if a > 9 and a >= b]
    return easy, hard


def drawn(rng: random.Random) -> list[tuple[Problem, str]]:
    """(problem, prompt): the easy problems in every wording, a sample of the hard ones in one wording each."""
    easy, hard = problems()
    pairs = [(problem, wording) for problem in easy for wording in WORDINGS]
    for sign in "+-":
        chosen = shuffled([problem for problem in hard if problem[0] == sign], rng)[:TWO_DIGIT_ROWS]
        pairs += [(problem, WORDINGS[int(rng.random() * len(WORDINGS))]) for problem in chosen]
    return [((op, a, b), wording.format(f"{a} {op} {b}")) for (op, a, b), wording in shuffled(pairs, rng)]


def splits(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Whole problems to the test file until it is full, the others to the training file."""
    pairs = drawn(rng)
    groups: dict[Problem, list[int]] = {}
    for place, ((op, a, b), _) in enumerate(pairs):
        groups.setdefault((op, a, b) if op == "-" else (op, min(a, b), max(a, b)), []).append(place)
    test: set[int] = set()
    for places in (groups[key] for key in shuffled(list(groups), rng)):
        if len(test) + len(places) <= TEST_ROWS:
            test.update(places)
    rows = [{"prompt": prompt, "answer": str(RESULT[op](a, b))} for (op, a, b), prompt in pairs]
    return {
        "train": [row for place, row in enumerate(rows) if place not in test],
        "test": [row for place, row in enumerate(rows) if place in test],
    }


def main() -> None:
    for split, rows in splits(random.Random(SEED)).items():
        path = Path(__file__).resolve().parent / f"{split}.jsonl"
        path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
        print(path.name, len(rows), "rows", hashlib.sha256(path.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
