"""The samples in a real notebook: every control by mouse and by keyboard, with what it says of the live batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = """
import sys; from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("panel-samples", Path("runs"), backend="inline", if_exists="replace")
def spread(prompt, response, **row):
    return sum(map(ord, response)) % 7 / 7
ppo = wb.PPO(lab, prompts=12, samples=2, reward=spread, sampling=wb.Sampling(max_new_tokens=14))
ppo.iterate()
batch = ppo.made["compute_advantages"]
after = lab.actor.compute_log_prob(batch)
panel = lab.panel("samples")
view = panel.views["samples"]
"""

LONG = """
import torch
from workbench.batches.columns import Ragged
ids = Ragged.of([[20 + n % 200 for n in range(900)]] * 2, torch.int64)
long = lab.put({"prompt_ids": Ragged.of([[9]] * 2, torch.int64), "response_ids": ids,
                "old_log_prob": ids.like(torch.zeros(1800)), "rewards": torch.zeros(2)})
"""


def says(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def test_samples_are_found_and_read_token_by_token(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, "panel", "more = ppo.iterate()", LONG])
    notebook.run(0)
    cell = notebook.run(1)
    panel, page = cell.locator(".wb-panel"), notebook.page

    def control(act: str) -> Any:
        return panel.locator(f'.wb-controls [data-act="{act}"]')

    table = panel.locator(".wb-sa-table")
    table.wait_for()
    assert notebook.ask("view.shown_batch() == after.id")
    assert table.locator("tbody tr").count() == 20

    # another version: its tokens are coloured by its advantages
    control("batch").select_option(notebook.ask("batch.id"))
    panel.get_by_text(f"{notebook.ask('batch.id')} (iteration 1").wait_for()

    # pages, by mouse and by keyboard
    panel.get_by_role("button", name="Next rows").click()
    notebook.wait_for("view.page == 1")
    notebook.wait_for_count(table.locator("tbody tr"), 4)
    panel.get_by_role("button", name="Previous rows").press("Enter")
    notebook.wait_for("view.page == 0")

    # sorted by reward: most first by mouse, least first by keyboard
    column = notebook.ask("batch.fetch(['rewards'])['rewards'].tolist()")
    sort = table.locator('[data-key="sort-rewards"]')
    sort.click()
    notebook.wait_for("view.sort == 'rewards' and view.descending")
    panel.get_by_role("button", name="rewards ▼").wait_for()
    best = int(table.locator("tbody [data-item]").first.inner_text().strip("▶ "))
    assert column[best] == max(column)
    sort.press("Enter")
    panel.get_by_role("button", name="rewards ▲").wait_for()
    least = int(table.locator("tbody [data-item]").first.inner_text().strip("▶ "))
    assert column[least] == min(column)

    # a filter; one that is no expression is refused, and changes nothing
    where = control("where")
    where.fill("rewards > 0.5")
    where.press("Enter")
    notebook.wait_for("view.where == 'rewards > 0.5'")
    kept = sum(value > 0.5 for value in column)
    panel.get_by_text(f"{kept} of 24 rows").wait_for()
    where.fill("rewards.mean() > 0")
    where.press("Enter")
    panel.locator('.wb-status[data-kind="error"]').get_by_text("must be an expression").wait_for()
    assert notebook.ask("view.where") == "rewards > 0.5"
    where.fill("")
    where.press("Enter")
    notebook.wait_for("view.where == ''")
    search = control("search")
    search.fill(notebook.ask("batch.df(['prompt'], [5])['prompt'][0]"))
    search.press("Enter")
    notebook.wait_for("set(view.look().found) == {4, 5}")
    search.fill("")
    search.press("Enter")
    notebook.wait_for("view.search == '' and len(view.look().found) == 24")

    # a row by mouse, and another by arrow key and Enter
    table.locator(f'[data-key="page-{least}"]').wait_for()
    rows = [int(text.strip("▶ ")) for text in table.locator("tbody [data-item]").all_inner_texts()]
    table.locator("tbody [data-item]").nth(2).click()
    notebook.wait_for(f"view.row == {rows[2]}")
    table.locator(f'[data-key="page-{rows[2]}"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    notebook.wait_for(f"view.row == {rows[3]}")
    panel.locator(f'section[aria-label="row {rows[3]}"]').wait_for()

    # its tokens: arrows announce the batch's own numbers
    control("colour").select_option("kl")
    notebook.wait_for("view.colour == 'kl'")
    control("colour").press("ArrowUp")
    notebook.wait_for("view.colour == 'advantages'")
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    table.locator('[data-key="sort-rewards"]').press("b")  # a command of the notebook, where it takes the key
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells
    tokens, line = panel.locator(".wb-sa-tokens").first, panel.locator("[data-says]")
    page.wait_for_function("() => document.querySelector('.wb-sa-tokens [data-token]').title.includes('advantages')")
    numbers = notebook.ask(f"batch.df(['advantages'], [{rows[3]}])['advantages'][0]")
    tokens.locator("[data-token]").first.focus()
    for n, value in enumerate(numbers[:5]):
        told = line.inner_text()
        assert told.startswith(f"token {n + 1} of {len(numbers)}") and f"advantages {says(value)}" in told
        page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    assert f"advantages {says(numbers[-1])}" in line.inner_text()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")  # its numbers in all columns
    notebook.wait_for("view.at == 1")
    panel.get_by_role("columnheader", name="token 2").wait_for()
    assert page.evaluate("document.activeElement.dataset.given") == '{"at":1}'
    tokens.locator("[data-token]").nth(3).hover()
    assert f"advantages {says(numbers[3])}" in line.inner_text()
    tokens.locator("[data-token]").nth(3).click()
    notebook.wait_for("view.at == 3")

    # the group of its prompt, with mean and spread, and a row of it chosen
    group = panel.get_by_text("group: 2 samples of one prompt")
    group.wait_for()
    pair = [column[row] for row in (rows[3] // 2 * 2, rows[3] // 2 * 2 + 1)]
    assert f"rewards mean {notebook.ask(f'sum({pair}) / 2'):.6g}" in group.inner_text()
    other = rows[3] ^ 1
    panel.get_by_role("button", name="Show these rows").click()
    panel.get_by_text("2 of 24 rows").wait_for()
    table.locator(f'[data-key="page-{other}"]').click()
    notebook.wait_for(f"view.row == {other}")
    notebook.picture("samples-group")

    # beside it what the update made of it
    control("beside").select_option(notebook.ask("after.id"))
    notebook.wait_for("view.beside == after.id")
    control("colour").select_option("old_log_prob")
    notebook.wait_for("view.colour == 'old_log_prob'")
    panel.get_by_text("the same response").wait_for()
    page.wait_for_function("() => document.querySelector('.wb-sa-tokens [data-token]').title.includes('old_log_prob')")
    theirs = panel.locator(".wb-sa-tokens").nth(1)
    theirs.locator("[data-token]").nth(2).focus()
    old, new = (
        notebook.ask(f"{name}.df(['old_log_prob'], [{other}])['old_log_prob'][0][2]") for name in ("batch", "after")
    )
    assert old != new
    told = line.inner_text()
    assert f"old_log_prob {says(new)}, difference {says(new - old)[:7]}" in told
    theirs.locator("[data-token]").nth(2).press("Enter")
    notebook.wait_for("view.at == 2")
    notebook.picture("samples-beside")
    control("colour").select_option("new_ratio")
    notebook.wait_for("view.colour == 'new_ratio'")
    notebook.ask("setattr(ppo, 'clip', 0.001)")  # the range is the algorithm's
    control("colour").select_option("clipped")
    notebook.wait_for("view.clip == (0.001, 0.001) and view.colour == 'clipped'")
    clipped = notebook.ask("int((view.look().columns['clipped'] != 0).sum())")
    assert clipped > 0
    page.wait_for_function(f"() => document.querySelector('.wb-sa-tokens').querySelectorAll('sup').length == {clipped}")
    notebook.picture("samples-ratio")

    # a point of a curve leads to its iteration; one whose batches are gone says so
    control("beside").select_option("")
    notebook.run(2)
    assert notebook.ask("(view.receive(iteration=1), lab.store.iteration(view.shown_batch()))[1]") == 1
    assert notebook.ask("(view.receive(iteration=77), lab.store.iteration(view.shown_batch()))[1]") > 1
    where.fill("rewards >= 0")
    where.press("Enter")
    panel.get_by_role("alert").get_by_text("Iteration 77 has no batch").wait_for()

    # a long response is read part by part
    notebook.run(3)
    control("batch").select_option("")
    panel.get_by_role("button", name="Later tokens").click()
    notebook.wait_for("view.start == 400")
    panel.locator('[data-token][title^="token 401 of 900"]').wait_for()
    panel.get_by_role("button", name="Earlier tokens").press("Enter")
    notebook.wait_for("view.start == 0")
    panel.locator('[data-token][title^="token 400 of 900"]').wait_for()
