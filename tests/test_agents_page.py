"""The page "Conversations and agents": its snippets run in their order, and do what the text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import workbench as wb

PAGE = (Path(__file__).parent.parent / "docs" / "agents.md").read_text()
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
# What holds after the last snippet, in the names that the snippets have made.
CLAIMS = (
    "set(asked.df()['turns']) == {2} and all(asked.df()['valid'])",
    "[one['short'] for one in asked.df()['environment_components']] == [0.2] * 8",
    "all('# Tools' in text and '\"name\": \"multiply\"' in text for text in batch.df()['prompt_text'])",
    "search.function('capital of France') == [{'title': 'France', 'text': 'Paris is the capital of France.'}]",
    "set(batch.df()['ending']) <= {'done', 'max_turns', 'max_tokens'}",
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
