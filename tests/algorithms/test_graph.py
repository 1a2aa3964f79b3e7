"""An algorithm as a graph: what it says, stepping through it, and changing it from a cell."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.algorithms.graph import Graph
from workbench.algorithms.loop import Algorithm
from workbench.display.graph import draw
from workbench.display.palette import ROLE_STYLES
from workbench.errors import BadInput, StageError, StageInterrupted, UnknownColumn

SHORT = wb.Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    with tiny_lab("graph", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def test_what_a_graph_says(lab: wb.Workbench) -> None:
    graph = wb.PPO(lab, prompts=4, clip=0.3).graph()
    assert graph.names == [
        *("prompts", "generate_sequences", "compute_log_prob", "compute_ref_log_prob", "compute_values"),
        *("compute_reward", "compute_advantages", "update_critic", "update_actor"),
    ]
    update = graph["update_actor"]
    assert (update.role, update.inputs, update.kwargs["clip"]) == ("actor", ("compute_advantages",), 0.3)
    assert "old_log_prob" in update.reads
    assert graph["compute_values"].writes == ("values",)
    assert [s.name for s in graph.consumers("compute_advantages")] == ["update_critic", "update_actor"]
    # by what is read, not by the order of the lines: these five could run side by side
    edges = graph.edges()
    assert edges["compute_reward"] == {"prompts", "generate_sequences"}
    assert edges["update_critic"] >= {"compute_values", "compute_advantages"}
    assert lab.runner.counters.run == 0  # nothing was run
    picture = graph._repr_html_()
    assert picture.count("<rect") == 9 + 6  # a box a stage, and the colour of each role
    legend = picture[picture.index("data-legend") :]
    roles = ("actor", "critic", "reference", "reward", "numeric", "prompts")
    assert all(f">{role}</text>" in legend and ROLE_STYLES[role].colour in legend for role in roles)
    assert "compute_ref_log_prob on reference" in picture
    assert draw(graph) == picture


def test_stepping_is_the_loop_is_by_hand(lab: wb.Workbench, tmp_path: Path) -> None:
    """The same numbers from `step`, from `iterate`, which `run` calls, and from the lines in a cell."""
    results = []
    for way in ("step", "iterate", "hand"):
        with tiny_lab(f"way-{way}", tmp_path, backend="inline") as own:
            algorithm = wb.PPO(own, prompts=4, sampling=SHORT)
            if way == "step":
                assert algorithm.next_stage == "prompts"
                batch = algorithm.step()
                assert batch.rows == 4
                for name in algorithm.graph().names[1:]:
                    assert algorithm.next_stage == name
                    algorithm.step()
                assert set(algorithm.made) == set(algorithm.graph().names)
            elif way == "iterate":
                algorithm.step()
                algorithm.step()
                algorithm.iterate()
            else:
                algorithm.define(own)
            results.append(algorithm.metrics())
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 20


def test_stages_are_replaced_inserted_and_removed_by_name(lab: wb.Workbench) -> None:
    algorithm = wb.PPO(lab, prompts=4, sampling=SHORT)
    seen: list[int] = []

    def longest_two(batch: wb.Batch) -> wb.Batch:
        lengths = batch.df(["response_ids"])["response_ids"].map(len)
        seen.append(batch.rows)
        return batch.take(lengths.nlargest(2).index.to_numpy())

    def constant(prompt: str, response: str, **row: Any) -> float:
        return 0.25

    algorithm.insert(longest_two, after="generate_sequences")
    algorithm.replace("compute_reward", function=constant)
    algorithm.replace("compute_advantages", kl_coefficient=0.0)
    algorithm.remove("compute_ref_log_prob")
    assert algorithm.graph().names[:4] == ["prompts", "generate_sequences", "longest_two", "compute_log_prob"]
    metrics = algorithm.iterate()
    assert seen == [4]
    assert metrics["compute_reward/rewards/mean"] == 0.25
    assert algorithm.made["compute_advantages"].rows == 2
    assert "ref_log_prob" not in algorithm.made["compute_advantages"].columns
    algorithm.clip = 0.05  # a field takes effect on the stages that are still to come
    assert algorithm.graph()["update_actor"].kwargs["clip"] == 0.05


EDITS: list[tuple[Any, str]] = [
    (lambda a: a.remove("compute_values"), r"stage 'compute_advantages' would read column 'values'"),
    (lambda a: a.remove("compute_valuse"), r"stage 'compute_valuse'.*PPO has prompts, generate_sequences"),
    (lambda a: a.remove("prompts"), "it takes no batch, and other stages"),
    (lambda a: a.replace("update_actor", epochs=0), "epochs=0"),
    (lambda a: a.replace("update_actor", clipp=0.1), "clipp"),
    (lambda a: a.replace("prompts", m=3), r"prompts with m.*it takes n"),
    (
        lambda a: a.once("update_actor", {"clip": 0.1}),
        r"other arguments by name.*write algo\.once\(stage, name=value\)",
    ),
    (lambda a: a.insert(3, after="prompts", name="three"), "function=3. must be a function"),
    (lambda a: a.insert(len, after="prompts", name="compute_values"), "a second stage 'compute_values'"),
]


def test_edits_that_cannot_be_are_refused_and_change_nothing(lab: wb.Workbench, subtests: pytest.Subtests) -> None:
    for edit, message in EDITS:
        with subtests.test(edit=edit, message=message):
            algorithm = wb.PPO(lab)
            before = algorithm.graph()
            with pytest.raises(BadInput, match=message):
                edit(algorithm)
            assert algorithm.graph().names == before.names


@dataclass
class BestOf(Algorithm):
    """Keeps the better half of the samples: a dataflow with a function and a batch's own methods in it."""

    lab: wb.Workbench

    def define(self, lab: wb.Workbench) -> None:
        batch = lab.prompts.next(2).repeat(4)
        batch = lab.actor.generate_sequences(batch, max_new_tokens=6)
        batch = lab.reward.compute_reward(batch)
        batch = lab.apply(self.better_half, batch)
        batch = lab.compute_advantages(lab.actor.compute_log_prob(batch), estimator="grpo")
        lab.actor.update_actor(batch)

    @staticmethod
    def better_half(batch: wb.Batch) -> wb.Batch:
        rewards = batch.df(["rewards"])["rewards"]
        return batch.take(rewards.nlargest(batch.rows // 2).index.to_numpy())


@dataclass
class Peeping(Algorithm):
    """Does between the lines what is done once a trace of them, not once an iteration."""

    lab: wb.Workbench
    does: Any = None
    clip: float = 0.2

    def define(self, lab: wb.Workbench) -> None:
        self.does(self, lab, lab.actor.generate_sequences(lab.prompts.next(2)))


PEEPING: dict[str, Any] = {
    "Peeping: batch.rows": lambda algorithm, lab, batch: batch.rows,
    r"\['rewards'\] of the output of generate_sequences in define": lambda algorithm, lab, batch: batch["rewards"],
    "a loop over the output of generate_sequences in define": lambda algorithm, lab, batch: [*batch],
    "Peeping: batch.df in define": lambda algorithm, lab, batch: batch.df(),
    "Peeping: batch.failed in define": lambda algorithm, lab, batch: batch.failed(),
    "Peeping: batch.split in define": lambda algorithm, lab, batch: batch.split(2),
    "Peeping: lab.last_metrics in define": lambda algorithm, lab, batch: lab.last_metrics["update_actor"],
    "the output of generate_sequences as a condition in define": lambda algorithm, lab, batch: batch or None,
    r"len\(\) of the output of generate_sequences in define": lambda algorithm, lab, batch: len(batch),
    "Peeping: lab.evaluate in define": lambda algorithm, lab, batch: lab.evaluate("arithmetic/test", n=2),
    "Peeping: lab.actor.training.learning_rate = 1.0 in define": lambda algorithm, lab, batch: setattr(
        lab.actor.training, "learning_rate", 1.0
    ),
    "Peeping.clip = 0.1 in define": lambda algorithm, lab, batch: setattr(algorithm, "clip", 0.1),
}


def test_functions_and_batch_methods_are_stages(lab: wb.Workbench) -> None:
    algorithm = BestOf(lab)
    roles = {stage.name: stage.role for stage in algorithm.graph().stages}
    assert (roles["repeat"], roles["better_half"]) == ("batch", "notebook")
    algorithm.iterate()
    assert algorithm.made["compute_reward"].rows == 8
    assert algorithm.made["better_half"].rows == 4


def test_what_define_may_not_do_is_refused(lab: wb.Workbench, subtests: pytest.Subtests) -> None:
    for value, does in PEEPING.items():
        with subtests.test(value), expect_error(BadInput, value=value, remedy=r"lab\.apply|finish"):
            Peeping(lab, does).graph()


def test_what_define_has_new_runs_before_what_an_earlier_kernel_made_behind_it(lab: wb.Workbench) -> None:
    algorithm = wb.GRPO(lab, prompts=2, samples=4, sampling=SHORT)
    while algorithm.next_stage != "update_actor":
        algorithm.step()
    later = wb.GRPO(lab, prompts=2, samples=4, sampling=SHORT)
    later.insert(BestOf.better_half, after="compute_reward", name="half")
    later.resume_at(algorithm.position({}), dict(algorithm.made))
    assert later.next_stage == "half"
    later.iterate()
    assert later.made["compute_advantages"].rows == 4


def test_the_algorithm_of_the_docs_decides_by_numbers(lab: wb.Workbench) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", page, re.S) if "class Careful" in one)
    made: dict[str, Any] = {"wb": wb}
    exec(block, made)
    careful = made["Careful"](lab, prompts=2, samples=4, sampling=SHORT, reward=vowels, most_kl=20.0)  # no KL is above
    before = lab.weights["actor"].steps
    careful.iterate()
    assert lab.weights["actor"].steps == before + 4  # two minibatches each
    careful.most_kl = -1.0
    careful.run(1)
    assert lab.weights["actor"].steps == before + 6


def test_a_function_is_refused_arguments_that_it_does_not_take(lab: wb.Workbench) -> None:
    algorithm = wb.GRPO(lab, prompts=2, samples=4, sampling=SHORT)
    algorithm.insert(BestOf.better_half, after="compute_reward", name="half")
    with expect_error(BadInput, value="stage 'half': better_half: got an unexpected .*'most_failed'", rule="it takes"):
        algorithm.once("half", most_failed=0.9)
    algorithm.iterate()


def test_a_stage_that_was_forgotten_is_named(lab: wb.Workbench) -> None:
    def define(algorithm: Any, lab: wb.Workbench, batch: Any) -> None:
        lab.actor.update_actor(lab.compute_advantages(lab.reward.compute_reward(batch), estimator="grpo"))

    with expect_error(BadInput, value="column 'old_log_prob'", remedy="call actor.compute_log_prob first"):
        Peeping(lab, define).graph()


def test_a_stage_is_not_put_before_one_that_has_run(lab: wb.Workbench) -> None:
    algorithm = wb.GRPO(lab, prompts=2, samples=4, sampling=SHORT)
    algorithm.replace("prompts", n=1)
    assert algorithm.step().rows == 1
    algorithm.step()
    with expect_error(
        BadInput, value="inserting 'half'", rule="'generate_sequences'.*has already run in this iteration"
    ):
        algorithm.insert(BestOf.better_half, after="prompts", name="half")
    algorithm.insert(BestOf.better_half, after="compute_reward", name="half")
    algorithm.iterate()
    assert algorithm.made["half"].rows == 2
    algorithm.insert(BestOf.better_half, after="prompts", name="of_the_next")  # this iteration is over


@dataclass
class Counted(wb.GRPO):
    """Counts its finished iterations."""

    finished: int = 0

    def finish(self, metrics: Any) -> None:
        self.finished += 1


def test_a_finished_iteration_is_over_whatever_the_graph_becomes(lab: wb.Workbench) -> None:
    algorithm = Counted(lab, prompts=2, samples=2, sampling=SHORT)
    first = algorithm.iterate()
    seen: list[str] = []

    def look(batch: wb.Batch) -> wb.Batch:
        seen.append(batch.id)
        return batch

    algorithm.insert(look, after="generate_sequences")
    assert algorithm.next_stage == "prompts"
    second = algorithm.iterate()
    assert seen == [algorithm.made["generate_sequences"].id]
    assert second["update_actor/optimizer_steps"] == first["update_actor/optimizer_steps"] + 2
    algorithm.step()
    algorithm.step()
    with expect_error(BadInput, rule="'generate_sequences'.*has already run", remedy=r"restart\(\)"):
        algorithm.insert(look, after="prompts", name="again")
    algorithm.restart()
    assert algorithm.next_stage == "prompts"
    algorithm.insert(look, after="prompts", name="again")
    algorithm.iterate()
    assert algorithm.finished == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_beside_an_update_does_not_have_it_made_again(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """after: between its end and the moment when the algorithm has its metrics. before: while it is prepared."""
    algorithm = Counted(lab, prompts=2, samples=2, sampling=SHORT)
    steps = algorithm.iterate()["update_actor/optimizer_steps"]
    while algorithm.next_stage != "update_actor":
        algorithm.step()
    call = Graph.call

    def pressed(*given: Any) -> Any:
        monkeypatch.undo()
        if when == "before":
            signal.raise_signal(signal.SIGINT)
        made = call(*given)
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(Graph, "call", pressed)
    with pytest.raises(StageInterrupted):
        algorithm.step()
    assert ("update_actor" in algorithm.made) == (when == "after")
    assert algorithm.iterate()["update_actor/optimizer_steps"] == steps + 2


def test_a_replaced_stage_runs_again_with_what_has_run_on_it(lab: wb.Workbench) -> None:
    algorithm = Counted(lab, prompts=2, samples=2, sampling=SHORT)
    algorithm.replace("compute_reward", lambda batch: batch)
    with expect_error(UnknownColumn, value="rewards"):
        algorithm.iterate()
    drawn = algorithm.made["generate_sequences"].id
    algorithm.replace("compute_reward", lab.reward.compute_reward, function=lambda prompt, response, **row: 0.5)
    assert algorithm.next_stage == "compute_reward"
    metrics = algorithm.iterate()
    assert metrics["compute_advantages/rewards/mean"] == 0.5
    assert algorithm.made["generate_sequences"].id == drawn

    while algorithm.next_stage != "update_actor":
        algorithm.step()
    algorithm.replace("compute_log_prob", temperature=0.5)
    assert algorithm.next_stage == "compute_log_prob"
    assert "compute_advantages" not in algorithm.made
    while algorithm.next_stage != "update_actor":
        algorithm.step()
    algorithm.remove("update_actor")  # nothing is left of the iteration
    assert algorithm.finished == 2
    assert algorithm.next_stage == "prompts"


def test_what_has_updated_a_role_is_not_run_again(lab: wb.Workbench) -> None:
    algorithm = wb.PPO(lab, prompts=2, sampling=SHORT)
    while algorithm.next_stage != "update_actor":
        algorithm.step()
    for edit in (
        lambda: algorithm.replace("compute_reward", function=vowels),
        lambda: algorithm.replace("update_critic", epochs=2),
        lambda: algorithm.remove("update_critic"),
    ):
        with expect_error(BadInput, rule="'update_critic' has updated 'critic'", remedy=r"iterate\(\).*restart\(\)"):
            edit()
    assert algorithm.next_stage == "update_actor"
    algorithm.restart()
    algorithm.replace("compute_reward", function=vowels)
    algorithm.iterate()


@pytest.mark.parametrize(("made", "said"), [(None, "None"), ("text", "str 'text'")])
def test_a_function_that_returns_no_batch_is_named(lab: wb.Workbench, made: Any, said: str) -> None:
    def forgetful(batch: wb.Batch) -> Any:
        return made

    algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT)
    algorithm.insert(forgetful, after="compute_reward", name="mine")
    with pytest.raises(
        StageError, match=rf"stage 'mine': forgetful returned {said}. the stage 'compute_advantages' needs a batch"
    ):
        algorithm.iterate()
    algorithm.replace("mine", lambda batch: batch)
    algorithm.iterate()


def test_an_arm_that_fails_is_named(lab: wb.Workbench) -> None:
    algorithm = wb.PPO(lab, prompts=2, samples=2, sampling=SHORT)
    while algorithm.next_stage != "compute_advantages":
        batch = algorithm.step()
    fewer = wb.ReMax(lab, samples=2, sampling=SHORT)  # would make two responses of each that there is
    with expect_error(BadInput, value="^arm 'remax': join of ", rule="equally many rows"):
        lab.compare(batch, {"ppo": wb.PPO(lab, sampling=SHORT), "remax": fewer})


def test_an_iteration_of_run_that_fails_is_given_up(lab: wb.Workbench) -> None:
    def broken(prompt: str, response: str, **row: Any) -> float:
        raise ZeroDivisionError

    algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT, reward=broken)
    with expect_error(StageError, value="ZeroDivisionError"):
        algorithm.run(1)
    assert algorithm.next_stage == "prompts"
    assert list(algorithm.made) == ["prompts", "generate_sequences", "compute_log_prob"]  # no promises
    algorithm.reward = vowels
    assert len(algorithm.run(1)) == 1


def test_an_iteration_that_is_left_for_another_is_named(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    def begun() -> Any:
        algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT)
        algorithm.step()
        return algorithm

    begun()  # such as a cell that is run twice
    algorithm, left = begun(), lab.iteration - 1
    assert capsys.readouterr().out == f"iteration {left} of GRPO stays unfinished: GRPO begins another\n"
    algorithm.run(2)
    assert f"iteration {left + 1} of GRPO stays unfinished: GRPO begins another\n" in capsys.readouterr().out
    algorithm.step()
    algorithm.restart()
    algorithm.iterate()
    assert "begins another" not in capsys.readouterr().out
    algorithm.step()
    wb.RLOO(lab, prompts=2, samples=2, sampling=SHORT).restart()  # it has no iteration to give up
    begun()
    assert f"iteration {algorithm.iteration} of GRPO stays unfinished" in capsys.readouterr().out


def test_two_stages_of_one_operation_report_apart(lab: wb.Workbench) -> None:
    algorithm = wb.ReMax(lab, prompts=2, sampling=SHORT, kl_coefficient=0.0)
    metrics = algorithm.iterate()
    for stage in ("compute_reward", "compute_greedy_reward"):
        rewards = algorithm.made[stage].fetch(["rewards"])["rewards"]
        assert metrics[f"{stage}/rewards/mean"] == pytest.approx(float(rewards.mean()))
    assert algorithm.graph()["compute_greedy_reward"].inputs == ("generate_greedy",)
    assert {"generate_sequences/truncated/fraction", "generate_greedy/truncated/fraction"} <= set(metrics)
    assert {"generate_sequences", "generate_greedy"} <= set(lab.metrics()["stage"])
