"""A first session of one notebook: what its cells and its panel show of a wrong call, a check, a stop, an export, and
of iterations that were made before."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import CellFailed, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

IMPORTS = """
import numpy as np
from pathlib import Path
from plotly import express as px
import workbench as wb
PROMPTS = 4

def variety(prompt, response, **row):
    return 0.1 + len(set(response)) / 10
"""
WRONG = "wb.open(lr=1e-5)"
# DeepSpeed, which compiles and links to see what this machine has
OPEN = """
MODEL = "tiny-llama-tied"
lab = wb.open(
    "seen", models={"actor": MODEL, "critic": MODEL, "reference": MODEL, "reward": variety}, prompts="arithmetic",
    training=wb.Training(engine="deepspeed", learning_rate=1e-3, micro_batch_tokens=256), backend="inline",
    generation=wb.Generation(engine="transformers", max_model_tokens=192), if_exists="replace",
)
ppo = wb.PPO(lab, prompts=PROMPTS, sampling=wb.Sampling(max_new_tokens=6))
"""
RUN = "ppo.run(2)"
FRAME = 'frame = lab.metrics("update_actor")'
PLOT = 'px.line(frame, y="loss").data[0].y.size'
EXPORT = 'script = lab.export("seen.py")\nprint(script.text)\nprint(*script.told, sep="\\n")'
RESTORE = """
saved = lab.save("seen-saved").folder
lab.close()
lab = wb.restore(saved, name="restored")
lab.panel()
"""
CELLS = [IMPORTS, WRONG, OPEN, RUN, "lab.check()", RUN, "lab.panel(algorithm=ppo)", FRAME, PLOT, EXPORT, RESTORE]


@pytest.mark.thorough
def test_what_a_user_sees(open_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = open_notebook(CELLS)
    notebook.run(0)
    a_wrong_call_says_what_to_write(notebook)
    opened = notebook.run(2)
    assert opened.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0, opened.inner_text()
    assert "ld:" not in opened.inner_text()
    a_check_adds_no_columns_to_a_run(notebook)
    a_stop_is_no_failure(notebook)
    an_export_has_only_what_the_program_needs(notebook)
    iterations_before_are_told(notebook)


def a_wrong_call_says_what_to_write(notebook: Notebook) -> None:
    with pytest.raises(CellFailed, match=r"BadInput: wb.open\(lr=1e-05\)"):
        notebook.run(1)
    cell = notebook.run(1, fails=True)
    said = cell.locator(".jp-OutputArea-output").inner_text()
    assert "BadInput: wb.open(lr=1e-05)." in said
    assert "write wb.Training(learning_rate=...)" in said
    assert "TypeError" not in cell.inner_text()
    notebook.picture("seen_wrong_call")


def columns_shown(cell: Any) -> tuple[list[str], list[str]]:
    """The columns of the table of a run, and those behind its fold."""
    cell.locator("summary", has_text="other columns of the frame").click()
    first, others = cell.locator("table").first, cell.locator("details table")
    return first.locator("th").all_inner_texts(), others.locator("tbody tr > :first-child").all_inner_texts()


def a_check_adds_no_columns_to_a_run(notebook: Notebook) -> None:
    before = columns_shown(notebook.run(3))
    assert "all that apply passed" in notebook.run(4).inner_text()
    cell = notebook.run(5)
    assert columns_shown(cell) == before
    assert before[0][:2] == ["iteration", "reward"]
    assert len(before[1]) > 20
    cell.scroll_into_view_if_needed()
    notebook.picture("seen_run_after_check")


def a_stop_is_no_failure(notebook: Notebook) -> None:
    panel = notebook.run(6).locator(".wb-panel")
    before = notebook.ask("lab.iteration")
    iterations = panel.locator('input[data-act="iterations"]')
    iterations.fill("500")
    notebook.page.keyboard.press("Enter")
    notebook.wait_for("lab.panel(algorithm=ppo).views['stepper'].iterations == '500'")
    panel.get_by_role("button", name="Run", exact=True).click()
    notebook.wait_for(f"lab.iteration >= {before + 2}")
    panel.get_by_role("button", name="Stop", exact=True).click()
    status = panel.locator(".wb-status", has_text=re.compile(r"stopped after \d+ of 500 iterations"))
    status.wait_for()
    done = int(re.search(r"stopped after (\d+) of 500", status.inner_text())[1])  # type: ignore[index]
    whole = notebook.ask("lab.metrics('update_actor')['iteration'].nunique()") - before
    assert done == whole
    assert panel.locator('[data-kind="error"]').count() == 0
    assert not re.search("failed|cancelled|[Ee]rror|\N{MULTIPLICATION X}", panel.inner_text())
    assert panel.locator('[data-stage][aria-label*="failed"], [data-stage][aria-label*="cancelled"]').count() == 0
    panel.scroll_into_view_if_needed()
    notebook.picture("seen_stopped")


def an_export_has_only_what_the_program_needs(notebook: Notebook) -> None:
    notebook.run(7)
    assert int(notebook.run(8).locator(".jp-OutputArea-output").inner_text()) == notebook.ask("len(frame)")
    cell = notebook.run(9)
    script, _, told = cell.locator(".jp-OutputArea-output").inner_text().rpartition("__main__")
    assert "ppo.run(2)" in script
    assert not re.search(r"lab\.panel|lr=", script)
    assert "failed at `wb.open(lr=1e-5)`, which is not in the script" in told
    assert re.search(r"no cell is tagged .parameters.*PROMPTS.*become.*--parameters", told, re.DOTALL)
    notebook.picture("seen_export")


def iterations_before_are_told(notebook: Notebook) -> None:
    last = notebook.ask("lab.iteration")
    panel = notebook.run(10).locator(".wb-panel")
    panel.get_by_text(f"Iteration {last} is the last; this kernel has called no stage yet").wait_for()
    assert "There has been no stage" not in panel.inner_text()
    assert last > 4
    panel.scroll_into_view_if_needed()
    notebook.picture("seen_before")
