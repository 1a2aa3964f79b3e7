"""Edited code on the living worker of an inline workbench: it takes effect, what the worker holds stays."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, stored, tiny_lab, vowels
from tests.edited import Files, edited_files
from tests.expected import expect_error
from workbench.errors import BadInput, ReloadError
from workbench.workers.roles.actor import ActorWorker

STRICT = "def bound():\n    return 0.01"


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Files]:
    with edited_files(tmp_path / "code", f"m{abs(hash(request.node.name)) % 10**6}") as files:
        yield files


@pytest.fixture
def lab(files: Files, tmp_path: Path) -> Iterator[wb.Workbench]:
    models = {"critic": wb.Model(TINY, worker=files.module("critic").Bounded), "reward": files.module("rewards").score}
    with tiny_lab("edited", tmp_path, backend="inline", devices=1, models=models) as lab:
        yield lab


def regress(lab: Any, table: Any) -> dict[str, float]:
    return dict(lab.critic.regress(lab.put(table)))


def test_an_update_goes_on_with_the_new_code_as_if_it_had_been_there(lab: Any, files: Files, tmp_path: Path) -> None:
    table = stored()
    first = regress(lab, table)
    assert lab.critic.told() == [(1, 0.2, 2.0)]
    files.edit("maths", "def bound():\n    return 0.2", STRICT)
    report = lab.reload()
    name = f"{files.prefix}_maths.bound"
    assert report.df.loc["kernel", "changed"] == name
    assert list(report.df["error"]) == [""]
    assert repr(report) == f"<Reload: {name} in 1 process(es)>"
    assert name in report._repr_html_()
    second = regress(lab, table)
    assert lab.critic.told() == [(2, 0.01, 2.0)]  # the worker is the one that it was
    assert not lab.reload()
    assert repr(lab.reload()) == "<Reload: nothing has changed>"
    assert "Nothing has changed" in lab.reload()._repr_html_()
    lab.close()

    with tiny_lab("from-the-start", tmp_path, backend="inline", devices=1, models={"critic": TINY}) as other:
        batch = other.put(table)
        assert other.critic.update_critic(batch, clip=0.2) == first
        assert other.critic.update_critic(batch, clip=0.01) == second
        assert second["optimizer_steps"] == 4
    assert first["value_clip_fraction"] < second["value_clip_fraction"]


def test_operations_come_change_and_go(lab: Any, files: Files) -> None:
    held = lab.critic.told
    text = files.path("critic").read_text()
    files.edit("critic", "return self.calls, bound(), SCALE", 'return "told anew"')
    files.path("critic").write_text(
        files.path("critic").read_text()
        + '    @wb.register("DP_PROTO", reads=("prompt_ids",), writes=("tokens",))\n'
        + "    def count(self, batch, *, more: int = 0) -> Output:\n"
        + '        """Tokens of the prompts."""\n'
        + '        lengths = [len(row) + more for row in batch.ragged("prompt_ids").rows()]\n'
        + '        return Output(columns={"tokens": torch.tensor(lengths)})\n'
    )
    lab.reload()
    assert lab.critic.told() == held() == ["told anew"]
    assert "count" in dir(lab.critic)
    table = stored()
    counted = lab.critic.count(lab.put(table), more=2).fetch(["tokens"])["tokens"]
    lengths: Any = table["prompt_ids"]
    assert counted.tolist() == [length + 2 for length in lengths.lengths.tolist()]
    assert "count" in lab.critic._repr_html_()

    files.path("critic").write_text(
        text.replace('reads=("prompt_ids", "response_ids"', 'reads=("prompt_ids", "absent"')
    )
    lab.reload()
    with pytest.raises(AttributeError, match="no operation 'count'"):
        _ = lab.critic.count
    with expect_error(KeyError, value="absent"):
        regress(lab, stored())


def test_operations_change_in_all_inline_workbenches_of_the_kernel(lab: Any, files: Files, tmp_path: Path) -> None:
    models = {"critic": wb.Model(TINY, worker=files.module("critic").Bounded)}
    with tiny_lab("beside", tmp_path, backend="inline", devices=1, models=models) as beside:
        files.edit("critic", "def told(self)", "def told(self, *, again: int = 1)")
        lab.reload()
        assert beside.critic.told(again=2) == lab.critic.told(again=2)


def test_a_syntax_error_leaves_the_old_code_running(lab: Any, files: Files) -> None:
    files.edit("maths", "return 0.2", "return 0.01")
    files.edit("rewards", "return 1.0", "return (1.0")
    with expect_error(BadInput, value=r"_rewards\.py, line 8: SyntaxError: '\(' was never closed: 'return \(1\.0'"):
        lab.reload()
    assert lab.critic.told() == [(0, 0.2, 2.0)]
    files.edit("rewards", "return (1.0", "return 2.0")
    assert len(lab.reload().changed) == 2
    assert lab.critic.told() == [(0, 0.01, 2.0)]


def test_code_that_raises_at_import_leaves_the_old_code_running(lab: Any, files: Files) -> None:
    files.edit("maths", "return 0.2", "return 0.01")
    files.edit("rewards", "response, **row", "response, more=[][0], **row")
    with expect_error(
        ReloadError, value=r"in kernel: IndexError: list index out of range \(.*_rewards\.py, line 7\)"
    ) as e:
        lab.reload()
    report: Any = e.value.report
    assert "IndexError" in report.df.loc["kernel", "error"]
    assert "more=[][0]" in e.value.__notes__[0]
    assert lab.critic.told() == [(0, 0.2, 2.0)]


def test_lines_that_only_a_new_process_runs_are_refused(lab: Any, files: Files) -> None:
    files.edit("maths", "return 0.2", "return 0.01")
    files.edit("maths", "SCALE = 2.0", "SCALE = 4.0")
    with expect_error(
        ReloadError,
        value=rf"in kernel: only a new process can run {files.path('maths')}, line 2: SCALE = 4\.0",
        rule="functions, classes, imports and new variables; all processes keep the old code",
        remedy=r"undo the edit, or lab\.save\(path\) and open it again in a new kernel: wb\.restore\(path\)",
    ):
        lab.reload()
    assert lab.critic.told() == [(0, 0.2, 2.0)]
    files.edit("maths", "SCALE = 4.0", "SCALE = 2.0")
    assert lab.reload()
    assert lab.critic.told() == [(0, 0.01, 2.0)]


def test_a_reward_edited_in_its_file_keeps_its_modules_state_and_is_other_code(lab: Any, files: Files) -> None:
    batch = lab.put({**stored(), "prompt": ["2 + 2 ="] * 4})
    first = lab.reward.compute_reward(batch)
    valued = lab.critic.compute_values(batch)
    files.module("rewards").seen.append("kept")
    digest = lab.description.digest
    files.edit("rewards", "return 1.0", "return 2.0 + len(seen)")
    lab.reload()
    with lab.reuse():
        second = lab.reward.compute_reward(batch)
        again = lab.critic.compute_values(batch)
    assert second.fetch(["rewards"])["rewards"].tolist() == [3.0] * 4
    assert second.columns["rewards"].made_with != first.columns["rewards"].made_with
    assert again.columns["values"].location.same(valued.columns["values"].location)  # an edit that does not reach it
    assert lab.description.opened == digest != lab.description.digest

    files.edit("maths", "return 0.2", "return 0.1")  # what the critic's module imports: it may be other code
    lab.reload()
    with lab.reuse():
        third = lab.critic.compute_values(batch)
    assert not third.columns["values"].location.same(valued.columns["values"].location)
    assert torch.equal(third.fetch(["values"])["values"].values, valued.fetch(["values"])["values"].values)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs text as a notebook's cell does, in `__main__`."""
    notebook = vars(sys.modules["__main__"])
    before = set(notebook)

    def run(text: str) -> Any:
        exec(compile(text, "<cell>", "exec"), notebook)
        *_, last = ast.parse(text).body
        return notebook[getattr(last, "name", "")]

    yield run
    for name in set(notebook) - before:
        del notebook[name]


def test_a_cell_run_again_is_picked_up(tmp_path: Path, cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cell("def cell_weight():\n    return 1.0")
    score = cell("def cell_score(prompt, response, **row):\n    return cell_weight()")
    critic = cell(
        "import workbench as wb\nfrom workbench.workers.roles.critic import CriticWorker\n"
        "class CellCritic(CriticWorker):\n    calls = 0\n    @wb.register('ONE_TO_ALL')\n"
        "    def told(self):\n        self.calls += 1\n        return 'old', self.calls"
    )
    models = {"critic": wb.Model(TINY, worker=critic), "reward": score}
    with tiny_lab("cells", tmp_path, backend="inline", devices=1, models=models) as opened:
        lab: Any = opened
        batch = lab.put({**stored(), "prompt": ["2 + 2 ="] * 4})
        assert lab.critic.told() == [("old", 1)]
        assert not lab.reload()
        cell("def cell_weight():\n    return 2.0")  # which the reward calls
        assert lab.reload().changed == ("reward",)
        cell("def cell_score(prompt, response, **row):\n    # another text, the same code\n    return cell_weight()")
        assert not lab.reload()
        cell("def cell_score(prompt, response, **row):\n    return 1 + cell_weight()")
        cell(
            "class CellCritic(CriticWorker):\n    calls = 0\n    @wb.register('ONE_TO_ALL')\n"
            "    def told(self):\n        self.calls += 1\n        return 'new', self.calls\n"
            "    @wb.register('ONE_TO_ALL')\n    def more(self):\n        return super().describe()['role']"
        )
        capsys.readouterr()
        assert [lab.critic.told(), lab.critic.told()] == [[("old", 2)], [("old", 3)]]  # it is said once
        told = capsys.readouterr().out
        assert told.count("cell_score was defined again: the reward role still runs") == 1
        assert told.count("CellCritic was defined again") == 1 and "lab.reload()" in told
        report = lab.reload()
        assert report.df.loc["kernel", "roles"] == "critic, reward"
        assert lab.critic.told() == [("new", 4)]
        assert lab.critic.more() == ["CellCritic"]
        assert lab.reward.compute_reward(batch).fetch(["rewards"])["rewards"].tolist() == [3.0] * 4


def test_a_function_that_is_decorated_and_what_it_reads(
    tmp_path: Path, cell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cell(
        "import functools\ndef cell_timed(function):\n    @functools.wraps(function)\n    def call(*given, **named):\n"
        "        return function(*given, **named)\n    return call"
    )
    score = cell("@cell_timed\ndef cell_score(prompt, response, **row):\n    return 1.0")
    with tiny_lab("decorated", tmp_path, backend="inline", models={"critic": TINY, "reward": score}) as lab:
        cell("@cell_timed\ndef cell_score(prompt, response, **row):\n    return 2.0")
        assert lab.reload().changed == ("reward",)
        batch = lab.put({**stored(), "prompt": ["2 + 2 ="] * 4})
        assert lab.reward.compute_reward(batch).fetch(["rewards"])["rewards"].tolist() == [2.0] * 4
        lab.reload(reward=cell("CELL_SCALE = 1.0\ndef cell_score(prompt, response, **row):\n    return CELL_SCALE"))
        cell("CELL_SCALE = 3.0\ndef cell_score(prompt, response, **row):\n    return CELL_SCALE")
        capsys.readouterr()
        lab.reward.compute_reward(batch)
        assert "cell_score was defined again: the reward role still runs the old code" in capsys.readouterr().out


def test_a_function_of_an_algorithm_is_assigned_anew(
    tmp_path: Path, cell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    score = cell("def cell_score(prompt, response, **row):\n    return 1.0")
    with tiny_lab("fields", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
        grpo = wb.GRPO(
            lab, prompts=2, samples=2, kl_coefficient=0.0, reward=score, sampling=wb.Sampling(max_new_tokens=4)
        )
        score = cell("def cell_score(prompt, response, **row):\n    return 2.0")
        assert {grpo.iterate()["compute_reward/rewards/mean"] for _ in range(2)} == {1.0}
        said = "cell_score was defined again: GRPO.reward is still the old one; assign it: grpo.reward = cell_score"
        assert capsys.readouterr().out.count(said) == 1
        grpo.reward = score
        assert grpo.iterate()["compute_reward/rewards/mean"] == 2.0 and said not in capsys.readouterr().out


def test_a_role_is_given_another_function_or_worker_class(lab: Any, files: Files) -> None:
    batch = lab.put({**stored(), "prompt": ["2 + 2 ="] * 4})
    regress(lab, stored())
    before = lab.critic.compute_values(batch)

    def twice(prompt: str, response: str, **row: Any) -> float:
        return 2.0

    bounded = lab.critic.worker_class

    class Telling(bounded):  # type: ignore[misc, valid-type]
        @wb.register("ONE_TO_ALL")
        def again(self) -> int:
            return 2 * self.calls

    report = lab.reload(reward=twice, critic=Telling)
    assert report.df.loc["kernel", "roles"] == "reward, critic"
    assert lab.reward.compute_reward(batch).fetch(["rewards"])["rewards"].tolist() == [2.0] * 4
    assert lab.critic.again() == [2]  # the instance is the one that it was
    after = lab.critic.compute_values(batch)
    assert torch.equal(after.fetch(["values"])["values"].values, before.fetch(["values"])["values"].values)
    assert "twice" in repr(lab.reward)


def test_what_does_not_fit_is_refused_and_nothing_changes(lab: Any, files: Files) -> None:
    def wrong(text: str) -> float:
        return 0.0

    files.edit("maths", "return 0.2", "return 0.01")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"rewards": wrong}, r"reload\(rewards=wrong\)\. this workbench has critic, reward\. write reward"),
        ({"critic": vowels}, "has no function to replace"),
        ({"reward": 3}, "give a function"),
        ({"reward": wrong}, "takes no 'prompt'"),
        ({"critic": ActorWorker}, "derive it from CriticWorker"),
        ({"critic": int}, "a class derived from"),
    ]
    for given, said in refused:
        with pytest.raises(BadInput, match=said):
            lab.reload(**given)
    with lab.overlap(), expect_error(BadInput, value=r"inside lab\.overlap\(\)"):
        lab.reload()
    with lab.kept("critic"), expect_error(BadInput, value=r"inside lab\.kept\(\)"):
        lab.reload()
    assert lab.critic.told() == [(0, 0.2, 2.0)]


def test_autoreload(lab: Any, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.edit("maths", "return 0.2", "return 0.1")
    assert lab.critic.told() == [(0, 0.2, 2.0)]
    lab.autoreload()
    assert lab.critic.told() == [(0, 0.1, 2.0)]
    name = f"{files.prefix}_maths"
    assert capsys.readouterr().out == f"reloaded {name}.bound in 1 process(es)\n"
    assert lab.critic.told() == [(0, 0.1, 2.0)]
    assert capsys.readouterr().out == ""
    files.edit("maths", "return 0.1", "return 0.")
    files.edit("critic", "def told(self):", "def told(self)")
    with expect_error(BadInput, value=r"_critic\.py, line 21: SyntaxError", remedy=r"lab\.autoreload\(False\)"):
        lab.critic.told()
    lab.autoreload(False)
    assert lab.critic.told() == [(0, 0.1, 2.0)]
    files.edit("critic", "def told(self)", "def told(self):")
    lab.autoreload()
    with lab.overlap():
        run = lab.critic.told()
    assert run.result() == [(0, 0.1, 2.0)]  # what belongs together runs the same code
    run = lab.critic.told.submit()
    assert run.result() == [(0, 0.0, 2.0)]
    with expect_error(BadInput, value="on='yes'"):
        lab.autoreload("yes")
