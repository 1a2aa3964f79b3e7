"""The placement editor on a live workbench of one process, and on one whose pools are all in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, stored, tiny_lab, update_on, vowels
from tests.expected import expect_error
from tests.session.test_moving import opened
from workbench.display.html import bytes_text
from workbench.errors import BadInput
from workbench_widgets import Driver, panel
from workbench_widgets.placement_editor import PlacementEditor

WAIT_S = 60.0


def drawn(editor: PlacementEditor) -> str:
    """What it shows when the hosts have answered."""
    editor.payload(whole=True)
    assert editor._costs.wait(WAIT_S)
    html: str = editor.payload(whole=True)[0]["html"]
    return html


@pytest.fixture
def inline(tmp_path: Path) -> Iterator[Any]:
    with tiny_lab("editor", tmp_path, backend="inline") as lab:
        yield lab


def test_inline_shows_its_one_process_and_refuses_another(inline: Any) -> None:
    editor = PlacementEditor(inline, Driver(inline))
    html = drawn(editor)
    assert "one process, the kernel" in html
    assert html.count('class="wb-pe-card"') == 4
    assert "cpu:0" in html
    capacity = bytes_text(inline.read_memory()[0].capacity_bytes)
    assert f"this machine, of {capacity}," in html, "as the view of memory says"
    before = editor.depends_on()
    with expect_error(BadInput, rule="runs everything in the kernel"):
        editor.act("put", {"role": "critic", "value": "new pool"})
    assert editor.draft is None
    assert editor.depends_on() != before, "fields and cards go back to what is"
    assert editor.payload(whole=False)[0]["refused"] == 1
    still = editor.picture()
    assert "data-act" not in still
    assert "this machine, of" in still
    assert 'data-plan="standalone"' in still
    assert "4 roles on 1 device" in still


def test_processes_of_environments_are_drafted_and_applied(inline: Any) -> None:
    inline.move(inline.placement.with_role("environment", "environments", 2))
    driver = Driver(inline)
    editor = PlacementEditor(inline, driver)
    still = editor.picture()
    assert "process 1" in still and "process 2" not in still and "<span>2 processes</span>" in still
    editor.act("grow", {"pool": "environments", "by": 1})
    assert editor.draft == inline.placement.with_devices("environments", 3)
    assert "process 2" in drawn(editor)
    editor.act("apply", {})
    ended(driver)
    assert inline.placement.environments.devices == 3
    drawn(editor)
    assert "colocate" in [offer.plan.name for offer in editor._costs.offers]
    editor.act("take", {"name": "colocate"})
    assert editor.draft is None  # a plan of devices leaves the processes as they are


def test_it_is_a_tab_of_the_panel(inline: Any) -> None:
    shown = panel(inline, ("placement",))
    html = shown.still().bundle()["text/html"]
    assert "tiny-llama-tied" in html
    assert "placement: shared[1]: actor, critic, reference, reward" in repr(shown.still())
    shown.close()


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("workbench.config.description.cores", lambda: 1)
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    with opened(models, wb.Placement.colocate(1), tmp_path) as lab:
        yield lab


def ended(driver: Driver) -> str:
    """How what was started ended."""
    assert driver.wait(WAIT_S)
    assert driver.error == ""
    return driver.outcome


def test_a_draft_is_priced_applied_and_undone(shared: Any) -> None:
    driver = Driver(shared)
    editor, live = PlacementEditor(shared, driver), shared.placement
    update_on(shared, stored())
    with expect_error(BadInput, rule="nothing is drafted"):
        editor.act("apply", {})
    editor.act("step", {"role": "critic", "by": 1})
    html = editor.payload(whole=True)[0]["html"]
    assert "asking the hosts what it would move" in html
    assert html.count("a free slot") == 1, "the new pool's, not the live one's"
    assert "cpu:0" in html
    assert 'disabled title="asking' in editor.controls()
    html, change = drawn(editor), shared.diff(editor.draft)
    assert shared.placement == live, "a draft touches nothing"
    assert "moves from shared" in html
    assert f"{change.expected_text} in all" in html
    assert change.expected_text.startswith("at least "), "no move has been made yet"
    assert bytes_text(change.total_bytes) in html
    assert "\N{CHECK MARK} fits" in html
    editor.act("apply", {})
    told = ended(driver)
    assert told.startswith("moved ")
    assert ", predicted at least " in told
    assert editor.draft is None
    assert shared.placement.pool_of("critic").name == "critic"
    assert set(shared.topology().query("role == 'critic'")["pool"]) == {"critic"}
    update_on(shared, stored())
    assert shared.diff(live.with_role("reference", "own", 1)).expected_text.startswith("about ")
    editor.act("put", {"role": "reward", "value": "critic"})
    editor.act("apply", {})
    ended(driver)
    for left in (1, 0):
        editor.act("undo", {})
        ended(driver)
        assert len(editor._before) == left
    assert shared.placement == live
    update_on(shared, stored())


def test_plans_are_priced_again_when_asked_or_when_their_bytes_are_others(shared: Any) -> None:
    editor = PlacementEditor(shared, Driver(shared))
    drawn(editor)
    offers = editor._costs.offers
    shared.runner.counters.iteration += 1
    drawn(editor)
    assert editor._costs.offers is offers
    update_on(shared, stored())  # the first step: there are moments to move from now on
    drawn(editor)
    assert editor._costs.offers is not offers
    offers = editor._costs.offers
    update_on(shared, stored())
    drawn(editor)
    assert editor._costs.offers is offers
    editor.act("ask_again", {})
    drawn(editor)
    assert editor._costs.offers is not offers


def test_it_follows_what_cells_move(shared: Any) -> None:
    driver = Driver(shared)
    editor = PlacementEditor(shared, driver)
    editor.act("put", {"role": "critic", "value": "new pool"})
    wanted = editor.draft
    before = editor.depends_on()
    shared.move(shared.placement.with_role("reward", "scorers", devices=1))
    assert editor.depends_on() != before
    assert "This draft was made when the placement was shared[1]" in drawn(editor)
    editor.act("keep", {})
    assert "This draft was made" not in drawn(editor)
    shared.move(wanted)
    assert editor.draft is None, "it is what there is"


def test_a_draft_that_cells_made_impossible_says_why_and_moves_nothing(shared: Any) -> None:
    driver = Driver(shared)
    editor = PlacementEditor(shared, driver)
    editor.act("put", {"role": "critic", "value": "new pool"})
    shared.add("cost", vowels)
    live = shared.placement
    assert "role &#x27;cost&#x27; has no pool" in drawn(editor)
    assert 'disabled title="it cannot be done' in editor.controls()
    editor.act("apply", {})
    assert driver.wait(WAIT_S)
    assert "role 'cost' has no pool" in driver.error
    assert shared.placement == live
    assert editor.draft is not None
    editor.act("discard", {})
    assert "nothing is drafted" in editor.controls()


def test_layouts_sizes_and_rollout_workers_are_drafted(shared: Any) -> None:
    editor: Any = PlacementEditor(shared, Driver(shared))
    editor.act("open", {"role": "actor"})
    html = drawn(editor)
    assert "live ranks" in html
    assert "shared-0" in html
    editor.act("resize", {"pool": "shared", "value": "2"})
    editor.act("lay_out", {"role": "critic", "axis": "t", "value": "2"})
    assert editor.draft.layout_of("critic") == wb.Layout(1, 2, 1)
    with expect_error(BadInput, remedy="give the pool"):
        editor.act("grow", {"pool": "shared", "by": 1})
    with expect_error(BadInput, rule="this workbench has 4 slots"):
        editor.act("resize", {"pool": "shared", "value": "8"})
    editor.act("take_back", {"role": "critic"})
    editor.act("rollout", {})
    assert editor.draft.pool_of("rollout").devices == 1
    assert "is added" in drawn(editor)
    editor.act("rollout", {})
    editor.act("grow", {"pool": "shared", "by": -1})
    assert editor.draft is None


def test_plans_are_priced_and_taken(shared: Any) -> None:
    editor: Any = PlacementEditor(shared, Driver(shared))
    drawn(editor)
    offers = {offer.plan.name: offer for offer in editor._costs.offers}
    assert list(offers) == ["colocate", "split", "standalone"]
    editor.act("take", {"name": "standalone"})
    assert editor.draft == wb.Placement.standalone(actor=1, critic=1, reference=1, reward=1)
    assert offers["standalone"].change.total_bytes == shared.diff(editor.draft).total_bytes > 0
    editor.act("discard", {})
    assert editor.draft is None
    shared.move(shared.placement.with_role("critic", "scorers", devices=1))
    figures = bytes_text(offers["standalone"].change.total_bytes)
    assert figures not in editor.payload(whole=True)[0]["html"].split('data-plan="standalone"')[1]
    assert bytes_text(shared.diff(wb.Placement.colocate(4)).total_bytes) in drawn(editor)
    with expect_error(BadInput, rule="not on offer"):
        editor.act("take", {"name": "best"})


def test_the_quickest_placements_are_suggested_and_taken(shared: Any) -> None:
    editor: Any = PlacementEditor(shared, Driver(shared))
    assert "No iteration is predicted: workbench" in drawn(editor)
    with expect_error(BadInput, value="no algorithm has taken a step"):
        editor.act("suggest", {})
    ppo = wb.PPO(shared, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
    ppo.run(2)
    editor.act("suggest", {})
    html = drawn(editor)
    offers = {offer.plan.name: offer.plan for offer in editor._costs.offers}
    assert list(offers) == ["colocate", "split", "standalone", "quickest", "second", "third"]
    found = [plan.placement for plan in shared.suggest(devices=shared.description.devices or 1)]
    names = ("quickest", "second", "third")
    assert all(offers[name].placement in found for name in names)
    taken = [offers[name].predicted_s for name in names]
    assert taken == sorted(taken)
    assert offers["colocate"].predicted_s == shared.predict(offers["colocate"].placement).iteration_s
    assert 'data-plan="quickest"' in html
    assert "predicted:" not in html and "not predicted" not in html
    editor.act("take", {"name": "second"})
    assert editor.draft == offers["second"].placement
