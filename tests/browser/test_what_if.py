"""What-if sliders in a real notebook: a slider that is moved changes the answer and the map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CELL = """
import workbench as wb
models = {"actor": "llama-7b", "reference": "llama-7b", "reward": None}
asked = wb.mapping.what_if(models, workload="grpo")
asked
"""


def test_a_slider_that_is_moved_changes_the_answer(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([CELL])
    shown = notebook.run(0)
    assert shown.locator("table").first.locator("tbody tr").count() == 6
    slider = shown.locator('[role="slider"]').nth(1)
    slider.focus()
    notebook.page.keyboard.press("ArrowRight")
    shown.get_by_text("link speed \N{MULTIPLICATION SIGN} 2").wait_for()  # the answer's caption
    notebook.ask("asked.drawing.join()")
    notebook.wait_for_count(shown.get_by_text("\N{HORIZONTAL ELLIPSIS}"), 0)
    notebook.picture("what_if")
    assert shown.evaluate("(one) => one.scrollWidth <= one.clientWidth")
