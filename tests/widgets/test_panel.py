"""The panel and the thread behind its buttons, on a real workbench in this process."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.display.html import as_images
from workbench.errors import BadInput
from workbench.telemetry import Transfer
from workbench_widgets import Panel, View
from workbench_widgets.saved_picture import MOST_BYTES, SavedPicture


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("panel", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


@pytest.fixture(scope="module")
def ppo(lab: wb.Workbench) -> Any:
    return wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))


def test_the_same_views_are_one_panel(lab: wb.Workbench) -> None:
    assert lab.panel() is lab.panel()
    assert lab.panel("stepper", "checks") is not lab.panel()


def test_a_kernel_that_has_called_nothing_tells_of_the_iterations_before(tmp_path: Path) -> None:
    models = {"actor": TINY, "reward": vowels}
    with tiny_lab("before", tmp_path, backend="inline", models=models) as lab:
        shown: Any = lab.panel("stepper").views["stepper"]
        assert "There has been no stage yet" in shown.picture()
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
        lab.prompts.next(2)
        assert "No stage has been called in iteration 2 yet" in shown.picture() and "iteration 2" in shown.text()
        wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0, sampling=wb.Sampling(max_new_tokens=2)).iterate()
        folder = lab.save(tmp_path / "one", models=False).folder
    with wb.restore(folder, name="after", runs=tmp_path) as lab:
        shown = lab.panel("stepper").views["stepper"]
        shown.algorithm = wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0)
        for told in (
            shown.picture(),
            shown.text(),
        ):  # and shows none of its stages as those of iteration 3, which has ended
            assert "RLOO has begun no iteration here; the last iteration is 3" in told
        shown.act("choose_algorithm", {"value": "by hand"})
        assert "Iteration 3 is the last; this kernel has called no stage yet" in shown.picture()


def test_a_view_that_there_is_not(lab: wb.Workbench) -> None:
    with expect_error(BadInput, value="view 'steper'", rule="a panel has stepper"):
        lab.panel("steper")


def test_outside_a_notebook_it_is_a_picture_of_every_view(lab: wb.Workbench) -> None:
    views = list(lab.panel().views.values())
    bundle, *charts = kept(lab, views)
    assert set(bundle) == {"text/html", "text/plain"}
    assert all(f"<summary>{view.title}</summary>" in bundle["text/html"] for view in views)
    assert len(charts) == sum(view.has_figure for view in views) == 2
    assert [chart["text/plain"] for chart in charts] == ["", ""], "a console has their numbers once"


def kept(lab: wb.Workbench, views: list[View]) -> list[dict[str, Any]]:
    """What a cell keeps of views."""
    saved = SavedPicture()
    saved._draw_all(views)
    return list(saved._bundles(views, lab).values())


class TestStepper:
    def press(self, panel: Any, action: str, **given: Any) -> None:
        panel.views["stepper"].act(action, given)
        assert panel.driver.wait(60)
        assert panel.driver.error == ""

    def test_step_iterate_run(self, lab: wb.Workbench, ppo: Any) -> None:
        panel = lab.panel(algorithm=ppo)
        self.press(panel, "step")
        assert list(ppo.made) == ["prompts"]
        assert "next" in panel.views["stepper"].text()
        before = lab.weights["actor"].steps
        self.press(panel, "iterate")
        assert lab.weights["actor"].steps == before + 2  # minibatches
        iteration = lab.iteration
        self.press(panel, "iterations", value="2")
        self.press(panel, "run")
        assert lab.iteration == iteration + 2
        assert "2 iterations: done" in panel.driver.outcome

    def test_a_number_that_is_none(self, lab: wb.Workbench, ppo: Any) -> None:
        stepper = lab.panel(algorithm=ppo).views["stepper"]
        iteration = lab.iteration
        with expect_error(BadInput, value="iterations='many'"):
            stepper.act("iterations", {"value": "many"})
        with expect_error(BadInput, value="iterations='many'"):  # as the field shows it
            stepper.act("run", {})
        assert lab.iteration == iteration
        stepper.act("iterations", {"value": "2"})

    def test_an_algorithm_that_is_none(self, lab: wb.Workbench) -> None:
        with expect_error(BadInput, value=r"panel\(algorithm='ppo'\)"):
            lab.panel(algorithm="ppo")

    def test_the_menu_keeps_the_algorithms_that_it_was_given(self, lab: wb.Workbench, ppo: Any) -> None:
        panel = lab.panel(algorithm=ppo)
        stepper: Any = panel.views["stepper"]
        stepper.act("choose_algorithm", {"value": "by hand"})
        assert stepper.algorithm is None
        stepper.act("choose_algorithm", {"value": "RLOO"})
        assert (type(stepper.algorithm), getattr(stepper.algorithm, "prompts", None)) == (wb.RLOO, 4)
        stepper.act("choose_algorithm", {"value": "PPO"})
        assert stepper.algorithm is ppo

    def test_run_finishes_what_was_begun(self, lab: wb.Workbench, ppo: Any) -> None:
        panel = lab.panel(algorithm=ppo)
        ppo.restart()
        self.press(panel, "step")
        begun = lab.iteration
        self.press(panel, "iterations", value="1")
        self.press(panel, "run")
        updated = lab.metrics("update_actor")["iteration"].tolist()
        assert updated[-2:] == [begun, begun + 1]

    def test_an_iteration_by_hand_is_not_mixed_with_the_algorithm_s(self, lab: wb.Workbench, ppo: Any) -> None:
        panel = lab.panel(algorithm=ppo)
        self.press(panel, "iterate")
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=3)
        stepper: Any = panel.views["stepper"]
        assert stepper.text().startswith(f"PPO, iteration {lab.iteration - 1}\n")
        assert f"Cells have begun iteration {lab.iteration} by hand" in stepper.picture()
        stepper.act("choose_algorithm", {"value": "by hand"})
        assert "compute_values" not in stepper.text()

    def test_branching_leaves_all_as_it_was(self, lab: wb.Workbench, ppo: Any) -> None:
        panel = lab.panel(algorithm=ppo)
        self.press(panel, "step")
        self.press(panel, "step")
        steps, iteration = dict(lab.weights), lab.iteration
        panel.views["stepper"].act("choose", {"stage": "generate_sequences"})
        self.press(panel, "branch")
        assert "compared below" in panel.driver.outcome
        assert (dict(lab.weights), lab.iteration) == (steps, iteration)
        assert "arms on" in panel.views["stepper"].picture()
        # what the arms ran is not taken for what this iteration ran
        assert "compute_advantages: waiting" in panel.views["stepper"].text()
        ppo.restart()

    def test_it_follows_what_is_called_by_hand(self, lab: wb.Workbench) -> None:
        panel = lab.panel("stepper")
        panel.views["stepper"].act("choose_algorithm", {"value": "by hand"})
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=3)
        text = panel.views["stepper"].text()
        assert text.splitlines()[0].startswith("what cells called in iteration")
        assert "generate_sequences: done" in text
        panel.views["stepper"].act("choose_algorithm", {"value": "RLOO"})  # which has not begun
        assert "generate_sequences: waiting" in panel.views["stepper"].text()
        panel.views["stepper"].act("choose_algorithm", {"value": "by hand"})

    def test_a_stage_that_failed(self, lab: wb.Workbench) -> None:
        batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=3)

        def broken(prompt: str, response: str, **row: Any) -> float:
            raise ZeroDivisionError("on purpose")

        with pytest.raises(wb.errors.RewardError):
            lab.reward.compute_reward(batch, function=broken)
        view = lab.panel("stepper").views["stepper"]
        assert "compute_reward: failed" in view.text()
        view.act("choose", {"stage": "compute_reward"})
        assert "on purpose" in view.picture()


class TestDriver:
    def test_cells_that_call_stages_are_refused_meanwhile(self, lab: wb.Workbench) -> None:
        driver, begun, go_on = lab.panel().driver, threading.Event(), threading.Event()
        batch = lab.prompts.next(2)

        def work() -> None:
            begun.set()
            go_on.wait(20)

        driver.start("a long thing", work)
        assert begun.wait(20)
        try:
            with expect_error(BadInput, rule=r"a long thing \(started in the panel\) is under way"):
                lab.actor.generate_sequences(batch, max_new_tokens=2)
            drawn = lab.prompts.drawn
            with expect_error(BadInput, rule="a long thing"):
                lab.prompts.next(2)
            assert lab.prompts.drawn == drawn
            with expect_error(BadInput, remedy="press Stop"):
                driver.start("another", work)
            lab.spans()  # looking is not refused
        finally:
            go_on.set()
        assert driver.wait(20)
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)

    def test_an_error_is_told(self, lab: wb.Workbench) -> None:
        driver = lab.panel().driver
        driver.start("it", lambda: 1 / 0)
        assert driver.wait(20)
        assert driver.error == "it: ZeroDivisionError: division by zero"

    def test_stop_ends_checks_too(self, lab: wb.Workbench) -> None:
        panel = lab.panel()
        checks: Any = panel.views["checks"]
        checks.act("check", {})
        panel.driver.stop()
        assert panel.driver.wait(60)
        assert "stopped" in panel.driver.outcome
        assert checks.report is None
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)

    def test_a_stop_is_no_failure_and_says_how_far_it_came(self, lab: wb.Workbench, ppo: Any) -> None:
        panel = lab.panel(algorithm=ppo)
        ppo.restart()
        before = lab.iteration
        panel.views["stepper"].act("iterations", {"value": "500"})
        panel.views["stepper"].act("run", {})
        wait_until(lambda: lab.iteration >= before + 3)
        panel.driver.stop()
        assert panel.driver.wait(60)
        assert panel.driver.error == ""
        done = lab.metrics("update_actor")["iteration"].nunique()
        said = re.match(r"stopped after (\d+) of 500 iterations", panel.driver.outcome)
        assert said is not None, panel.driver.outcome
        assert int(said[1]) <= lab.iteration - before <= int(said[1]) + 1
        assert done > 0
        assert not {"failed", "cancelled"} & set(lab.runs().tail(9)["state"])
        panel.views["stepper"].act("iterations", {"value": "2"})
        ppo.restart()

    def test_stop_ends_between_stages(self, lab: wb.Workbench, ppo: Any) -> None:
        panel = lab.panel(algorithm=ppo)
        stepper, driver = panel.views["stepper"], panel.driver
        ppo.restart()
        stepped = ppo.step

        def slow_step() -> Any:
            made = stepped()
            driver.stop()
            return made

        ppo.step = slow_step
        try:
            stepper.act("iterate", {})
            assert driver.wait(60)
        finally:
            del ppo.step
        assert driver.outcome == "stopped after prompts; Step continues from there"
        assert list(ppo.made) == ["prompts"]
        ppo.restart()


def test_what_was_called_is_told_in_order(lab: wb.Workbench) -> None:
    first = len(lab.runs())
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
    lab.actor.compute_log_prob(batch)
    runs = lab.runs().iloc[first:]
    assert list(runs["stage"]) == ["generate_sequences", "compute_log_prob"]
    assert set(runs["state"]) == {"done"}
    assert (runs["duration_s"] > 0).all()
    assert runs["batch"].iloc[0] == batch.id


def test_a_reading_that_follows_costs_what_is_new(lab: wb.Workbench, tmp_path: Path) -> None:
    follower = lab.telemetry.follow("spans")
    assert len(follower.new()) == len(lab.spans())
    assert follower.new() == []
    lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
    assert {row["stage"] for row in follower.new()} == {"generate_sequences"}


def test_while_nothing_happens_nothing_is_sent(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = lab.panel("stepper", "timeline")
    sent: list[str] = []
    monkeypatch.setattr(panel, "send", lambda message, buffers=(): sent.append(message["kind"]))
    panel._live()
    panel._jobs.put(lambda: panel._receive({"act": "hello"}))
    wait_until(lambda: "draw" in sent and "status" in sent)
    sent.clear()
    spent_s = panel.work_s
    time.sleep(2.0)
    assert sent == []
    assert panel.work_s - spent_s < 0.5  # of processor time: some looks at sizes of files
    lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
    wait_until(lambda: "draw" in sent)


def test_a_fault_in_what_the_page_asked_for_ends_nothing(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = lab.panel("stepper", "traffic")
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(panel, "send", lambda message, buffers=(): sent.append(message))
    panel._live()
    panel._jobs.put(lambda: panel._receive({"act": "keep", "view": "of another version"}))
    panel._jobs.put(lambda: panel._receive({"act": "hello"}))
    wait_until(lambda: any(message["kind"] == "draw" for message in sent))
    drawn = [(message["number"], message["whole"]) for message in sent if message["kind"] == "draw"]
    assert drawn[0] == (1, True)
    assert panel._thread and panel._thread.is_alive()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Slow(View):
    """A view whose host does not answer, until it is let go."""

    name, title = "slow", "Slow"
    answers = threading.Event()

    def depends_on(self) -> int:
        return 0

    def picture(self) -> str:
        assert self.answers.wait(60)
        return "drawn"


class Broken(View):
    """A view that cannot be drawn."""

    name, title = "broken", "Broken"

    def depends_on(self) -> int:
        return 0

    def picture(self) -> str:
        raise ValueError("<no> picture")


def test_a_slow_host_keeps_no_cell_waiting(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Panel, "answer_s", 0.5)
    driver = lab.panel().driver
    panel = Panel(lab, [Slow(lab, driver), Broken(lab, driver)], driver)
    panel._live()
    panel._jobs.put(lambda: panel._receive({"act": "hello"}))
    began_s = time.monotonic()
    assert panel.still().bundle()["text/html"] == "<div>the hosts did not answer in time</div>"
    panel.close()
    assert time.monotonic() - began_s < 30  # the view would wait for a minute
    Slow.answers.set()


def test_one_view_that_cannot_be_drawn_takes_no_other_with_it(lab: wb.Workbench) -> None:
    driver = lab.panel().driver
    Slow.answers.set()
    html = kept(lab, [Broken(lab, driver), Slow(lab, driver)])[0]["text/html"]
    assert "&lt;no&gt; picture" in html
    assert "drawn" in html


def test_a_page_that_is_gone_is_drawn_for_no_more(lab: wb.Workbench) -> None:
    panel = lab.panel("checks", "stepper")
    panel._receive({"act": "hello"})
    panel._unanswered = 1000
    panel._look()
    assert not panel._page_is_there
    panel._receive({"act": "here"})
    assert panel._page_is_there


def test_a_panel_ends_with_its_workbench(tmp_path: Path) -> None:
    lab = tiny_lab("gone", tmp_path, backend="inline")
    lab.panel(algorithm=wb.PPO(lab, prompts=2)).still()
    held = weakref.ref(lab)
    lab.close()
    del lab
    gc.collect()
    assert held() is None


def test_a_still_picture_has_nothing_to_press(lab: wb.Workbench, ppo: Any) -> None:
    panel = lab.panel(algorithm=ppo)
    panel.views["stepper"].act("choose", {"stage": "prompts"})
    html = kept(lab, list(panel.views.values()))[0]["text/html"]
    for control in ("data-act", "<button", "<select", "<input", 'role="button"'):
        assert control not in html, control


def test_every_picture_is_followed_by_its_table(tmp_path: Path) -> None:
    with tiny_lab("tables", tmp_path, backend="inline") as lab:
        ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
        ppo.run(2)
        lab.check("ratio", "weights")  # all of them take 10 s
        lab.telemetry.append_transfers(
            [Transfer(run=1, stage="update_actor", source="a", destination="b", columns="rewards", bytes=4096,
                      start_s=1.0, end_s=1.5, kind="batch")]
        )  # fmt: skip
        views: dict[str, Any] = {**lab.panel(algorithm=ppo).views, **lab.strip().views}
        views["traffic"].shape = "flow"
        htmls = {name: view.still() for name, view in views.items()}
        htmls |= {"memory by call": lab.memory()._repr_html_(), "timeline by call": lab.timeline()._repr_html_()}
        htmls["traffic by call"] = lab.traffic()._repr_html_()
        behind = {name: as_images(html).split("<img ")[1:] for name, html in htmls.items()}
        assert [name for name, parts in behind.items() for part in parts if "<table" not in part] == []
        pictures = {name: len(parts) for name, parts in behind.items()}
        assert {name for name, count in pictures.items() if not count} == {
            "samples", "conversation", "checks", "metrics", "placement",
        }, "text, tables; metrics are a figure"  # fmt: skip
        assert "<table" in htmls["metrics"]
        assert "reward of the last 2 iterations" in htmls["strip"]
        for value in lab.metrics("compute_reward")["rewards/mean"]:
            assert f"<td>{value:.4g}</td>" in htmls["strip"]
        assert (
            "<td>b</td><td>4.1 kB</td>" in htmls["traffic"] and "<td>b</td><td>4.1 kB</td>" in htmls["traffic by call"]
        )
        # what a cell keeps has images in the place of inline svg, which GitHub drops
        html = kept(lab, list(views.values()))[0]["text/html"]
        assert html.count("<img ") == sum(pictures[name] for name in views)
        assert len(html.encode()) < MOST_BYTES
        assert not [word for word in ("<svg", "<script", "<link", "http", "onclick") if word in html]
        assert "<img " in lab.panel(algorithm=ppo).still().bundle()["text/html"]
