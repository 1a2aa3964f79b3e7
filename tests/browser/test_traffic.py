"""Traffic in a real notebook, between pools: what moved, and for which stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = """
from pathlib import Path
import workbench as wb
from tests.cases import TINY, vowels
from tests.session.test_moving import opened
models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
opening = opened(models, wb.Placement.split(2), Path("runs-traffic"))
lab = opening.__enter__()
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
ppo.iterate()
shown = lambda **which: wb.display.html.bytes_text(lab.traffic(**which).total_bytes)
view = (panel := lab.panel("traffic")).views["traffic"]
"""


def test_what_moved_is_chosen_by_mouse_and_keyboard(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, "panel"])
    notebook.run(0)
    panel = notebook.run(1).locator(".wb-panel")

    def told(text: str) -> None:
        panel.get_by_text(text).first.wait_for()

    # a matrix of all, with what is held to be its sum
    panel.locator("svg").first.wait_for()
    told(notebook.ask("shown()"))
    assert notebook.ask("lab.traffic().total_bytes == int(lab.transfers()['moved_bytes'].sum()) > 0")
    notebook.picture("traffic")

    # by mouse: for one stage; the picture has that stage's bytes
    panel.get_by_label("for", exact=True).select_option("compute_values")
    notebook.wait_for("view.stage == 'compute_values'")
    told(notebook.ask("shown(stage='compute_values')"))

    # by keyboard: for every stage again
    panel.get_by_label("for", exact=True).press("Home")
    notebook.wait_for("view.stage == 'every stage'")
    told(notebook.ask("shown()"))

    # what has not moved says so; what moves from now on is followed
    panel.get_by_label("what moved", exact=True).select_option("move")
    told("Nothing of this kind has moved between processes yet.")
    notebook.ask("lab.move(wb.Placement.colocate(1).restrict(lab.placement.roles)) is None")
    panel.get_by_label("for", exact=True).select_option("every stage")
    told(notebook.ask("shown(kind='move')"))
    notebook.picture("traffic-move")
