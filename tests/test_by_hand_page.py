"""The page "A conversation by hand": its snippets run in their order, and do what the text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import workbench as wb

PAGE = (Path(__file__).parent.parent / "docs" / "by_hand.md").read_text()
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
# What holds after the last snippet, in the names that the snippets have made.
CLAIMS = (
    "len(fork.df) == 8 and fork.value.n == 8 and isinstance(fork.critic, float)",
    "fork.value.low <= fork.value.mean <= fork.value.high",
    "any(lab.decode(turn.answer_ids) == ' (a hundred) ' for turn in chat.tree.turns)",
    "batch.rows == 8 and batch.turns().groupby('turn').trained.all().tolist() == [False, True, True]",
    "chat.values().forked.tolist() == [0, 8, 8]",
    "lab.weights['actor'].steps == 1",
)


def test_the_snippets_run_and_do_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        for code in CODE.findall(PAGE):
            exec(code, names)
        assert [claim for claim in CLAIMS if not eval(claim, names)] == []
    finally:
        if isinstance(lab := names.get("lab"), wb.Workbench):
            lab.close()
