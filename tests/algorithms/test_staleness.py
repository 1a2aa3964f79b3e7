"""`algo.run(n, staleness=k)` inline: which weights draw what, that the draws are the same however it is stepped, and
what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.cases import tiny_lab
from tests.expected import expect_error
from workbench.algorithms.loop import Algorithm
from workbench.engines.generation.transformers_engine import TransformersDecoding
from workbench.errors import BadInput, StageError, StageInterrupted

SHORT = wb.Sampling(max_new_tokens=6)
MAKERS: dict[str, Callable[[wb.Workbench], Algorithm]] = {
    "PPO": lambda lab: wb.PPO(lab, prompts=4, sampling=SHORT),
    "GRPO": lambda lab: wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT, correction=wb.Correction()),
    "ReMax": lambda lab: wb.ReMax(lab, prompts=4, sampling=SHORT),  # two generations, and a join
}


@dataclass
class Opened:
    """A workbench, and the checkpoint of its beginning."""

    lab: wb.Workbench
    start: Path

    def again(self, kind: str = "PPO") -> Algorithm:
        """An algorithm at the beginning."""
        self.lab.recover(self.start)
        return MAKERS[kind](self.lab)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("runs")
    with tiny_lab("stale", folder, backend="inline", prompts="arithmetic") as lab:
        yield Opened(lab, lab.save(folder / "start", models=False).folder)


def assert_same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """To the last bit, and the same metrics."""
    there, wanted = (frame.to_dict("index") for frame in (found, expected))
    assert list(there) == list(wanted)
    differ = {
        (iteration, name): (there[iteration].get(name), value)
        for iteration, values in wanted.items()
        for name, value in values.items()
        if there[iteration].get(name) != value and not (pd.isna(value) and pd.isna(there[iteration].get(name, value)))
    }
    assert not differ and sorted(found.columns) == sorted(expected.columns)


def versions(lab: wb.Workbench, after_run: int) -> list[int]:
    """The weights version of each generation after a run, in order."""
    syncs = lab.syncs()
    return [int(v) for v in syncs[(syncs["event"] == "generation") & (syncs["run"] > after_run)]["version"]]


@pytest.mark.parametrize("kind", MAKERS)
def test_no_staleness_is_the_synchronous_run(opened: Opened, kind: str) -> None:
    """Also when the rollouts of an iteration have come through the buffer: drawn ahead with the weights that it would
    have used, they are the ones that it would have drawn."""
    expected = opened.again(kind).run(2)
    assert_same(opened.again(kind).run(2, staleness=0), expected)
    algorithm = opened.again(kind)
    found = []
    for _ in range(2):
        algorithm.draw_ahead()
        found.append(algorithm.iterate())
        assert found[-1].pop("buffer/age_steps/mean") == found[-1].pop("buffer/age_steps/max") == 0
        assert len(opened.lab.buffer) == 0
    assert_same(pd.DataFrame(found, index=expected.index), expected)


@pytest.mark.parametrize(("kind", "staleness"), [("PPO", 1), ("GRPO", 2)])
def test_an_iteration_trains_on_what_weights_of_some_iterations_ago_drew(
    opened: Opened, kind: str, staleness: int
) -> None:
    lab, algorithm = opened.lab, opened.again(kind)
    run, before = lab.runner.counters.run, lab.weights["actor"].steps
    found = algorithm.run(4, staleness=staleness)
    steps = (lab.weights["actor"].steps - before) // 4
    assert versions(lab, run) == [before] * (1 + staleness) + [before + i * steps for i in (1, 2, 3)]
    ages = found["buffer/age_steps/max"].fillna(0).tolist()
    assert ages == [min(i, staleness) * steps for i in range(4)]
    assert found["generate_sequences/response_tokens/mean"].notna().all()  # of the rollouts that it trained on
    assert len(lab.buffer) == staleness * algorithm.prompts  # type: ignore[attr-defined]
    assert lab.buffer.df()["age_steps"].max() == staleness * steps


def test_the_draws_are_the_same_however_it_is_stepped(opened: Opened, tmp_path: Path) -> None:
    """In one call, in two, by hand stage for stage, and from a checkpoint with a buffer that is not empty."""
    lab = opened.lab
    expected = opened.again().run(4, staleness=1)
    algorithm = opened.again()
    first = algorithm.run(1, staleness=1)
    saved = lab.save(tmp_path / "middle", models=False)
    by_hand = []
    for _ in range(2):
        assert algorithm.step().names[0] == "prompt_ids"
        assert algorithm.next_stage == "compute_log_prob"  # what generation made came with the prompts
        algorithm.draw_ahead()
        by_hand.append(algorithm.iterate())
    last = algorithm.run(1)  # what waits is drawn before anything is generated
    assert len(lab.buffer) == 0
    assert_same(pd.concat([first, pd.DataFrame(by_hand, index=[2, 3]), last]), expected)
    lab.recover(saved.folder)
    assert len(lab.buffer) == 4 and lab.buffer.df()["prompt_uid"].tolist() == [4, 5, 6, 7]
    assert_same(algorithm.run(3, staleness=1), expected.iloc[1:])


def test_what_was_interrupted_goes_on_and_loses_no_rollouts(opened: Opened) -> None:
    expected = opened.again().run(3, staleness=1)
    lab, algorithm = opened.lab, opened.again()
    pressed: list[str] = []

    def stopping(batch: wb.Batch) -> wb.Batch:
        if lab.iteration == 2 and not pressed:
            pressed.append("once")
            raise KeyboardInterrupt
        return batch

    algorithm.insert(stopping, after="compute_values")
    first = algorithm.run(1, staleness=1)
    with pytest.raises(StageInterrupted):
        algorithm.run(2, staleness=1)
    assert algorithm.under_way and lab.iteration == 2
    assert len(lab.buffer) == 4  # of iteration 3
    assert_same(pd.concat([first, algorithm.run(2, staleness=1)]), expected)


def test_a_stage_that_fails_throws_no_rollouts_away(opened: Opened) -> None:
    """What was drawn for the iteration that is given up waits again, unless an update has used it."""
    lab, algorithm = opened.lab, opened.again()

    def broken(batch: wb.Batch) -> wb.Batch:
        raise StageError("no", "", "")

    algorithm.run(1, staleness=1)
    algorithm.insert(broken, after="generate_sequences", name="broken")
    waiting = lab.buffer.df()["prompt_uid"].tolist()
    with expect_error(StageError, value="no"):
        algorithm.run(1, staleness=1)
    assert lab.iteration == 2
    assert waiting == [4, 5, 6, 7] and lab.buffer.df()["prompt_uid"].tolist() == [*range(4, 12)]
    algorithm.remove("broken")
    algorithm.insert(broken, after="update_actor", name="broken")  # which needs a batch, and an update makes none
    steps = lab.weights["actor"].steps
    with expect_error(StageError, value="update_actor returned"):
        algorithm.run(1, staleness=1)
    assert lab.weights["actor"].steps > steps
    assert lab.buffer.df()["prompt_uid"].tolist() == [*range(8, 12)]
    algorithm.remove("broken")
    algorithm.run(1, staleness=1)
    waiting = lab.buffer.df()["prompt_uid"].tolist()
    lab.buffer.priority = broken  # type: ignore[assignment]
    try:
        with expect_error(BadInput, value=r"lab\.buffer\.priority raised no", remedy="response_tokens"):
            algorithm.run(1, staleness=1)
    finally:
        lab.buffer.priority = None
    assert lab.buffer.df()["prompt_uid"].tolist() == waiting  # none of the iteration before, which has trained on them


def test_groups_that_do_not_fill_an_iteration_are_filled_up(opened: Opened) -> None:
    lab, algorithm = opened.lab, opened.again()
    algorithm.run(1, staleness=1)
    algorithm.prompts = 8
    frame = algorithm.run(3, staleness=1)
    steps = lab.weights["actor"].steps // 4
    assert frame["buffer/age_steps/mean"].fillna(0).tolist() == [0, 1.5 * steps, steps]
    assert lab.buffer.df()["prompt_uid"].tolist() == [*range(28, 36)]


def test_rollouts_are_trained_on_once(opened: Opened) -> None:
    """Also where the next iteration is interrupted as it begins, or one that was stepped by hand is given up."""
    lab, algorithm = opened.lab, opened.again()

    class Pressed(dict[str, Any]):
        def clear(self) -> None:
            super().clear()
            raise KeyboardInterrupt

    algorithm.run(2, staleness=1)
    algorithm._made = Pressed(algorithm.made)
    with pytest.raises(StageInterrupted, match="iteration 2 has ended"):
        algorithm.run(1, staleness=1)
    assert lab.buffer.df()["prompt_uid"].tolist() == [*range(8, 12)]
    algorithm.step()
    assert len(lab.buffer) == 0
    algorithm.restart()
    assert lab.buffer.df()["prompt_uid"].tolist() == [*range(8, 12)]
    while algorithm.next_stage != "update_actor":
        algorithm.step()
    algorithm.restart()  # an update of the critic has used them
    assert len(lab.buffer) == 0


def test_what_holds_once_holds_for_one_generation(opened: Opened) -> None:
    lab, algorithm = opened.lab, opened.again()
    algorithm.once("generate_sequences", max_new_tokens=2)
    algorithm.draw_ahead()
    algorithm.draw_ahead()
    longest = [batch["response_tokens"].max() for _, batch in lab.buffer.df().groupby("iteration")]
    assert longest[0] <= 2 < longest[1]
    algorithm = opened.again()
    algorithm.run(1, staleness=1)
    algorithm.once("generate_sequences", max_new_tokens=2)
    found = algorithm.run(2, staleness=1)  # generates for iterations 3 and 4
    second, third = found["generate_sequences/response_tokens/mean"]
    assert third <= 2 < second
    assert lab.buffer.df()["response_tokens"].max() > 2


def test_a_priority_is_asked_for_again_after_a_restore(opened: Opened, tmp_path: Path) -> None:
    def newest(groups: pd.DataFrame) -> pd.Series:
        return groups.prompt_uid

    lab, algorithm = opened.lab, opened.again("GRPO")
    try:
        algorithm.draw_ahead()
        lab.buffer.priority = newest
        assert lab.history.changes()["setting"].tolist()[-1] == "lab.buffer.priority"
        saved = lab.save(tmp_path / "with")
    finally:
        lab.buffer.priority = None
    with wb.restore(saved.folder, runs=tmp_path, name="again") as again:
        later = MAKERS["GRPO"](again)
        with pytest.raises(BadInput, match=r"lab\.buffer\.priority = .*newest.*run again the cell that assigns it"):
            later.iterate()
        assert len(again.buffer) == 2
        again.buffer.priority = newest
        later.iterate()
        assert len(again.buffer) == 0


def test_draws_by_priority_are_in_the_ledger_with_the_weights_of_each_prompt(opened: Opened) -> None:
    """Rollouts of two iterations, drawn with different weights, make one iteration."""
    lab, algorithm = opened.lab, opened.again("GRPO")
    algorithm.draw_ahead()
    steps = lab.weights["actor"].steps
    update = opened.lab.actor.generate_sequences(lab.prompts.next(2), samples=2, max_new_tokens=2)
    update = lab.reward.compute_reward(lab.actor.compute_log_prob(update))
    lab.actor.update_actor(lab.compute_advantages(update, estimator="grpo"))
    algorithm.draw_ahead()
    later = lab.weights["actor"].steps
    lab.buffer.priority = lambda groups: groups.prompt_uid % 2  # an odd one of each
    try:
        metrics = algorithm.iterate()
    finally:
        lab.buffer.priority = None
    batch: Any = algorithm.made["compute_reward"]
    drawn = sorted({*batch.df(["prompt_uid"])["prompt_uid"]})
    assert batch.meta["weights_versions"] == {str(drawn[0]): steps, str(drawn[1]): later} and later > steps
    assert metrics["generate_sequences/response_tokens/mean"] > 0
    ledger = lab.prompts.ledger().sort_index()
    scored = ledger[ledger["responses"] > 0]
    assert scored["last_version"].tolist().count(later) == 1
    assert len(scored) == 4  # the two drawn by hand, and these two


def test_priority_decides_which_groups_an_iteration_draws(opened: Opened) -> None:
    lab, algorithm = opened.lab, opened.again("GRPO")
    for _ in range(3):
        algorithm.draw_ahead()
    lab.buffer.priority = lambda groups: groups.prompt_uid
    try:
        algorithm.iterate()
        assert lab.buffer.groups()["prompt_uid"].tolist() == [0, 1, 2, 3]
        lab.buffer.priority = lambda groups: groups.prompt_uid == 1
        metrics = algorithm.iterate()
    finally:
        lab.buffer.priority = None
    assert metrics["buffer/age_steps/mean"] == 2
    made: Any = algorithm.made
    assert made["generate_sequences"].df(["prompt_uid"])["prompt_uid"].tolist() == [0, 0, 1, 1]
    assert made["generate_sequences"].meta["iteration"] == lab.iteration == 2
    logged = lab.telemetry.events()
    last = logged[logged["event"] == "drawn from the buffer"].iloc[-1]["details"]
    assert last["prompts"] == [0, 1] and last["waiting"] == 2
    assert len(lab.buffer.df()) == 4 and np.isnan(lab.buffer.df()["reward"]).all()


PAUSING: dict[str, Any] = {"staleness": 2, "pause_after": 4}


def long(lab: wb.Workbench) -> wb.GRPO:
    """Responses of one to twenty tokens."""
    sampling = wb.Sampling(max_new_tokens=20, stop_token_ids=tuple(range(0, 256, 16)))
    return wb.GRPO(lab, prompts=2, samples=2, sampling=sampling, correction=wb.Correction())


def test_responses_that_paused_go_on_beside_new_ones(opened: Opened, tmp_path: Path) -> None:
    """With the weights of then, and the same in one call, in several, from a checkpoint, and after an interrupt."""
    lab = opened.lab
    opened.again()
    algorithm, drawn = long(lab), list[Any]()

    def look(batch: wb.Batch) -> wb.Batch:
        if lab.iteration == 3 and pressed:
            pressed.clear()
            raise KeyboardInterrupt
        assert len(set(batch.df(["prompt_uid"])["prompt_uid"])) == 2
        drawn.append(batch.fetch(["ending", "token_versions"] if "token_versions" in batch.names else ["ending"]))
        return batch

    pressed: list[str] = []
    algorithm.insert(look, after="generate_sequences")
    expected = algorithm.run(5, **PAUSING)
    assert not any("paused" in list(table["ending"]) for table in drawn)
    versions = [row.tolist() for table in drawn[1:] for row in table["token_versions"].rows()]
    assert all(row == sorted(row) for row in versions)
    assert any(len(set(row)) > 1 and len(row) > 4 for row in versions)
    assert all(row.count(version) % 4 == 0 or version == row[-1] for row in versions for version in row)
    waiting = lab.buffer.df()["prompt_uid"].nunique() + sum(found.group_count for found in lab.buffer.waiting)
    assert waiting >= 4  # as many as staleness=2 lets be under way, those that paused among them
    ages = lab.buffer.groups()["age_steps"]
    assert ages.nunique() > 1
    assert lab.buffer.clear(older_than=int(ages.min())) == sum(ages > ages.min())
    assert lab.buffer.groups()["age_steps"].tolist() == [ages.min()] * sum(ages == ages.min())

    opened.again()
    algorithm = long(lab)
    first = algorithm.run(2, **PAUSING)
    saved = lab.save(tmp_path / "paused", models=False).folder
    last = algorithm.run(3, **PAUSING)
    assert_same(pd.concat([first, last]), expected)
    lab.recover(saved)
    pressed.append("once")
    algorithm.insert(look, after="generate_sequences")
    with pytest.raises(StageInterrupted):
        algorithm.run(3, **PAUSING)
    assert algorithm.under_way and lab.iteration == 3
    assert_same(algorithm.run(3, **PAUSING), expected.iloc[2:])
    algorithm.run(4)  # nothing pauses any more, and what has is finished first
    assert lab.buffer.waiting == []


def test_the_metrics_of_an_iteration_are_of_the_responses_that_it_trains_on(opened: Opened) -> None:
    """Those of a call are of all that it drew."""
    lab = opened.lab
    opened.again()
    algorithm, lengths = long(lab), list[float]()

    def look(batch: wb.Batch) -> wb.Batch:
        lengths.append(batch.lengths("response_ids").mean())
        return batch

    algorithm.insert(look, after="generate_sequences")
    frame = algorithm.run(6, **PAUSING)
    assert frame["generate_sequences/response_tokens/mean"].tolist() == lengths
    assert "generate_sequences/ending_paused/fraction" not in frame


def test_groups_with_and_without_parts_come_together(opened: Opened) -> None:
    """Those that were left when nothing paused any more, and further draws of DAPO, which are in one part."""
    lab = opened.lab
    opened.again()
    algorithm = long(lab)
    algorithm.run(3, **PAUSING)
    algorithm.prompts = 3
    algorithm.run(4, **PAUSING)
    algorithm.run(4, staleness=2)
    lab.buffer.clear()
    sampling = algorithm.sampling
    dapo = wb.DAPO(lab, prompts=2, samples=2, sampling=sampling, rounds=1, reward=lambda prompt, response: 1.0)
    assert dapo.run(3, **PAUSING)["dynamic_sampling/rounds"].min() == 1


def test_an_interrupt_while_it_waits_for_what_paused_leaves_that_unknown(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = opened.lab
    opened.again()
    algorithm = long(lab)
    algorithm.draw_ahead(pause_after=1)

    def pressed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wb.Batch, "fetch", pressed)
        with pytest.raises(KeyboardInterrupt):
            len(lab.buffer)
    assert len(lab.buffer) == 0 and lab.buffer.count(paused=True) == 2
    assert repr(lab.buffer).startswith("<Buffer: 0 groups, 2 under way of 1 iterations")
    assert "0 steps, 4 responses, 4 paused" in lab.buffer._repr_html_()
    assert not lab.buffer.may_start(2, 0)


def test_a_generation_that_fails_keeps_what_had_paused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = opened.lab
    opened.again()
    algorithm = long(lab)
    for _ in range(3):
        algorithm.draw_ahead(pause_after=3)
    expected = algorithm.iterate()

    opened.again()
    algorithm = long(lab)
    algorithm.draw_ahead(pause_after=3)
    algorithm.draw_ahead(pause_after=3)

    def stopped(decoding: TransformersDecoding) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TransformersDecoding, "step", stopped)
        with pytest.raises(StageInterrupted):
            algorithm.draw_ahead(pause_after=3)
    algorithm.draw_ahead(pause_after=3)
    assert algorithm.iterate() == expected


def test_what_cannot_run_ahead_is_refused(opened: Opened) -> None:
    lab = opened.lab
    algorithm = opened.again()
    with expect_error(BadInput, value="staleness=-1"):
        algorithm.run(1, staleness=-1)
    with expect_error(BadInput, value="staleness='1'"):
        algorithm.run(1, staleness="1")  # type: ignore[arg-type]
    with expect_error(BadInput, value="pause_after=4 with staleness=0", remedy=r"run\(1, staleness=2, pause_after=4\)"):
        algorithm.run(1, pause_after=4)
    with expect_error(
        BadInput, value="ReMax with pause_after", rule="may follow the prompts; here: generate_greedy, gen"
    ):
        MAKERS["ReMax"](lab).run(1, **PAUSING)
    stream = lab.demonstrations([{"prompt": "a", "response": "b"}] * 8)
    sft = wb.SFT(lab, stream, rows=4)
    with expect_error(BadInput, value="SFT with staleness", rule="only lab.prompts.next, as the first stage"):
        sft.run(1, staleness=1)
    with expect_error(BadInput, rule="only lab.prompts.next, as the first stage"):
        sft.draw_ahead()
    assert lab.iteration == 0 and len(lab.buffer) == 0
