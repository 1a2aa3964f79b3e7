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
from workbench_widgets.placement import NEW_POOL, PlacementEditor, put, same

WAIT_S = 60.0


def drawn(editor: PlacementEditor) -> str:
    """What it shows when the hosts have answered."""
    editor.payload()
    assert editor._costs.wait(WAIT_S)
    html: str = editor.payload()[0]["html"]
    return html


def ended(driver: Driver) -> str:
    """How what was started ended."""
    assert driver.wait(WAIT_S)
    assert driver.error == ""
    return driver.outcome


@pytest.fixture
def inline(tmp_path: Path) -> Iterator[Any]:
    with tiny_lab("editor", tmp_path, backend="inline") as lab:
        yield lab


def test_inline_shows_its_one_process_and_refuses_another(inline: Any) -> None:
    shown = panel(inline, ("placement",))
    editor: Any = shown.views["placement"]
    html = drawn(editor)
    assert "one process, the kernel" in html
    assert html.count('class="wb-pe-card"') == 4
    assert "cpu:0" in html and "tiny-llama-tied" in html
    capacity = bytes_text(inline.read_memory()[0].capacity_bytes)
    assert f"the machine has {capacity}," in html, "as the view of memory says"
    before = editor.depends_on()
    with expect_error(BadInput, rule="runs everything in the kernel"):
        editor.act("put", {"role": "critic", "value": NEW_POOL})
    assert editor.draft is None
    assert editor.depends_on() != before, "fields and cards go back to what is"
    assert editor.payload()[0]["refused"] == 1
    still = shown.still().bundle()["text/html"]
    assert "data-act" not in still
    assert "this machine" in still and "4 roles on 1 device" in still
    assert "placement: shared[1]: actor, critic, reference, reward" in repr(shown.still())


def test_processes_of_environments_are_drafted_and_applied(inline: Any) -> None:
    inline.move(inline.placement.with_role("environment", "environments", 2))
    driver = Driver(inline)
    editor: Any = PlacementEditor(inline, driver)
    still = editor.picture()
    assert "process 1" in still and "process 2" not in still and "<span>2 processes</span>" in still
    editor.act("resize", {"pool": "environments", "value": "3"})
    assert editor.draft == inline.placement.with_devices("environments", 3)
    assert "process 2" in drawn(editor)
    editor.act("apply", {})
    ended(driver)
    assert inline.placement.environments.devices == 3
    drawn(editor)
    editor.act("take", {"name": "colocate"})
    assert editor.draft is None  # a plan of devices leaves the processes as they are


def test_a_role_is_put_into_pools() -> None:
    shared = wb.Placement.of({"shared": (2, ["actor", "critic"])}).with_layout("critic", (1, 2, 1))
    made = put(shared, "critic", NEW_POOL, shared)
    assert made == wb.Placement.of({"shared": (2, ["actor"]), "critic": (1, ["critic"])})
    assert same(put(made, "critic", "shared", shared), shared), "as it is live, with its layout"
    alone = put(made, "actor", "critic", shared)  # of the live pool nothing is left
    assert same(put(put(alone, "actor", "shared", shared), "critic", "shared", shared), shared)
    taken = wb.Placement.of({"critic": (1, ["actor", "critic"])})
    assert put(taken, "critic", NEW_POOL, taken).pool_of("critic").name == "critic_2"
    with expect_error(BadInput, rule="alone in pool"):
        put(made, "critic", NEW_POOL, shared)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("workbench.config.description.device_count", lambda device: int(device == "cpu"))
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    with opened(models, wb.Placement.colocate(1), tmp_path) as lab:
        yield lab


def test_a_draft_is_priced_applied_and_undone(shared: Any) -> None:
    driver = Driver(shared)
    editor: Any = PlacementEditor(shared, driver)
    live = shared.placement
    update_on(shared, stored())
    with expect_error(BadInput, rule="there is no draft"):
        editor.act("apply", {})
    with expect_error(BadInput, rule="the first pool"):
        editor.act("step", {"role": "critic", "by": -1})
    editor.act("step", {"role": "critic", "by": 1})
    html = editor.payload()[0]["html"]
    assert html.count("a free slot") == 1, "the new pool's, not the live one's"
    assert 'disabled title="asking' in editor.controls()
    html, change = drawn(editor), shared.diff(editor.draft)
    assert shared.placement == live, "a draft touches nothing"
    assert "moves from shared" in html
    assert change.expected_text.startswith("at least "), "no move has been made yet"
    assert f"{change.expected_text} in all" in html and bytes_text(change.total_bytes) in html
    assert "\N{CHECK MARK} fits" in html
    editor.act("apply", {})
    told = ended(driver)
    assert told.startswith("moved ") and ", predicted at least " in told
    assert editor.draft is None
    assert set(shared.topology().query("role == 'critic'")["pool"]) == {"critic"}
    update_on(shared, stored())
    editor.act("put", {"role": "reward", "value": "critic"})
    editor.act("resize", {"pool": "critic", "value": "2"})
    assert "critic[2]: critic, reward" in editor.text()
    for value, rule in (("8", "this workbench has 4 slots"), ("two", "whole number")):
        with expect_error(BadInput, rule=rule):
            editor.act("resize", {"pool": "critic", "value": value})
    editor.act("resize", {"pool": "critic", "value": "1"})
    editor.act("apply", {})
    ended(driver)
    for _ in range(2):
        editor.act("undo", {})
        ended(driver)
    assert shared.placement == live
    update_on(shared, stored())


def test_it_follows_what_cells_move(shared: Any) -> None:
    driver = Driver(shared)
    editor: Any = PlacementEditor(shared, driver)
    editor.act("put", {"role": "critic", "value": NEW_POOL})
    wanted, before = editor.draft, editor.depends_on()
    shared.move(shared.placement.with_role("reward", "scorers", devices=1))
    assert editor.depends_on() != before
    assert "moves from scorers" in drawn(editor), "the draft is priced from what is live"
    shared.move(wanted)
    assert editor.draft is None, "it is live now"

    # a draft that a cell made impossible says why and moves nothing
    editor.act("put", {"role": "reference", "value": "critic"})
    shared.add("cost", vowels, pool="critic")
    live = shared.placement
    assert "role &#x27;cost&#x27; has no pool" in drawn(editor)
    assert 'disabled title="this change is not possible' in editor.controls()
    editor.act("apply", {})
    assert driver.wait(WAIT_S)
    assert "role 'cost' has no pool" in driver.error
    assert shared.placement == live and editor.draft is not None
    editor.act("discard", {})
    assert "there is no draft" in editor.controls()


def test_placements_with_a_name_are_priced_and_taken(shared: Any) -> None:
    editor: Any = PlacementEditor(shared, Driver(shared))
    drawn(editor)
    offers = {offer.name: offer for offer in editor._costs.offers}
    assert list(offers) == ["colocate", "split", "standalone"]
    editor.act("take", {"name": "standalone"})
    assert editor.draft == wb.Placement.standalone(actor=1, critic=1, reference=1, reward=1)
    assert offers["standalone"].change.total_bytes == shared.diff(editor.draft).total_bytes > 0
    with expect_error(BadInput, rule="not offered"):
        editor.act("take", {"name": "best"})
    editor.act("discard", {})
    for trains, priced_again in ((True, True), (True, False), (False, False)):
        before = editor._costs.offers  # from the first step on there are moments to move
        update_on(shared, stored()) if trains else setattr(shared.runner.counters, "iteration", 7)
        drawn(editor)
        assert (editor._costs.offers is not before) == priced_again
    shared.move(shared.placement.with_role("critic", "scorers", devices=1))
    assert 'aria-label="plans"' not in editor.payload()[0]["html"], "prices of the old placement are not shown"
    assert bytes_text(shared.diff(wb.Placement.colocate(4)).total_bytes) in drawn(editor)


def test_the_fastest_placements_are_suggested_and_taken(shared: Any) -> None:
    editor: Any = PlacementEditor(shared, Driver(shared))
    assert "No iteration is predicted: workbench" in drawn(editor)
    with expect_error(BadInput, value="no algorithm has taken a step"):
        editor.act("suggest", {})
    ppo = wb.PPO(shared, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
    ppo.run(2)
    editor.act("suggest", {})
    html = drawn(editor)
    offers = {offer.name: offer for offer in editor._costs.offers}
    assert list(offers) == ["colocate", "split", "standalone", "fastest", "second", "third", "staleness=1"]
    found = [plan.placement for plan in shared.suggest(devices=shared.description.devices or 1)]
    suggested = [offers[name] for name in ("fastest", "second", "third")]
    assert all(offer.placement in found for offer in suggested)
    assert [offer.predicted_s for offer in suggested] == sorted(offer.predicted_s for offer in suggested)
    assert offers["colocate"].predicted_s == shared.predict(offers["colocate"].placement).iteration_s
    ahead = offers["staleness=1"]
    assert ahead.placement == shared.suggest(staleness=1).best.placement and ahead.placement.has_rollout
    assert ahead.predicted_s == shared.predict(ahead.placement, staleness=1).iteration_s
    assert "take fastest" in html and "predicted:" not in html and "not predicted" not in html
    editor.act("take", {"name": "second"})
    assert editor.draft == offers["second"].placement
