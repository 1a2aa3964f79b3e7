"""Edited code on two living ranks: all processes take it or none, and what they hold stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.edited import Files, edited_files
from tests.expected import expect_error
from workbench.errors import BadInput, ReloadError

TWO: dict[str, Any] = {"placement": wb.Placement.colocate(2), "devices": 2}
LAZY = """
        @wb.register("ONE_TO_ALL")
        def lazily(self):
            from {prefix}_lazy import answer
            return answer()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with edited_files(tmp_path_factory.mktemp("code"), "two") as files:
        files.write("lazy", "def answer():\n    return 1\n")
        yield files


@pytest.fixture(scope="module")
def lab(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = {"critic": wb.Model(TINY, worker=files.module("critic").Bounded), "reward": files.module("rewards").score}
    with tiny_lab("reloaded", tmp_path_factory.mktemp("runs"), models=models, **TWO) as lab:
        yield lab


def rewards(lab: Any) -> list[float]:
    batch = lab.put({**stored(), "prompt": ["2 + 2 ="] * 4})
    scored: list[float] = lab.reward.compute_reward(batch).fetch(["rewards"])["rewards"].tolist()
    return scored


@pytest.mark.slow
def test_an_update_goes_on_with_the_new_code_as_if_it_had_been_there(
    lab: Any, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    table = stored()
    with lab.kept("critic"):
        expected = [dict(lab.critic.update_critic(lab.put(table), clip=clip)) for clip in (0.2, 0.01)]
    first = dict(lab.critic.regress(lab.put(table)))
    files.edit("maths", "return 0.2", "return 0.01")  # which the worker's module imports by name
    capsys.readouterr()
    for told in ("two_maths: edited after the hosts loaded it", ""):  # once
        rewards(lab)
        said = capsys.readouterr().out
        assert told in said
        assert bool(told) == ("edited" in said)
    report = lab.reload()
    assert report.df["changed"].to_dict() == dict.fromkeys(("kernel", "shared-0", "shared-1"), "two_maths.bound")
    assert report.df["rank"].dropna().to_dict() == {"shared-0": 0, "shared-1": 1}
    second = dict(lab.critic.regress(lab.put(table)))
    assert lab.critic.told() == [(2, 0.01, 2.0)] * 2
    assert [first, second] == expected
    assert second["value_clip_fraction"] > first["value_clip_fraction"]


@pytest.mark.slow
def test_all_ranks_or_none(lab: Any, files: Files) -> None:
    before = lab.critic.told()
    texts = {name: files.path(name).read_text() for name in ("maths", "rewards")}
    files.edit("maths", "return 0.01", "return 0.02")
    files.edit("rewards", "return 1.0", "return 1.0)")
    with expect_error(BadInput, value=r"two_rewards\.py, line 8: SyntaxError: unmatched '\)'"):
        lab.reload()
    assert lab.critic.told() == before
    assert rewards(lab) == [1.0] * 4

    only = 'import os\ndef only(f):\n  if os.environ.get("RANK") == "1":\n    raise OSError("only here")\n  return f\n'
    decorated = texts["rewards"].replace("return 1.0", "return 5.0").replace("@wb", "@only\n@wb")
    files.path("rewards").write_text(only + decorated)
    said = (
        r"did not load in shared-1: OSError: only here \(.*two_rewards\.py, line 4\)\. all processes keep the old code"
    )
    with pytest.raises(ReloadError, match=said) as caught:
        lab.reload()
    report: Any = caught.value.report
    assert report.df["error"].astype(bool).to_dict() == {
        "kernel": False, "shared-0": False, "shared-1": True,
    }  # fmt: skip
    assert set(report.df["changed"]) == {""}
    assert lab.critic.told() == before
    assert (files.module("maths").bound(), rewards(lab)) == (0.01, [1.0] * 4)

    files.write("rewards", texts["rewards"].replace("return 1.0", "return 5.0"))
    lab.reload()
    assert lab.critic.told() == [(calls, 0.02, scale) for calls, _, scale in before]
    assert rewards(lab) == [5.0] * 4


@pytest.mark.slow
def test_lines_that_only_new_processes_run_take_effect_when_the_hosts_are_restarted(
    lab: Any, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = lab.put(stored())
    valued = lab.critic.compute_values(batch)
    values = valued.fetch(["values"])["values"].values
    before = lab.critic.told()
    files.edit("maths", "SCALE = 2.0", "SCALE = 4.0")
    with expect_error(
        ReloadError,
        value=r"in shared-0, shared-1: only a new process can run .*two_maths\.py, line 2: SCALE = 4\.0",
        remedy=r"undo the edit, or lab\.save\(path\) and restart the hosts: lab\.recover\(\)",
    ):
        lab.reload()
    assert lab.critic.told() == before
    lab.save(tmp_path / "saved")
    lab.recover()
    assert "pool shared restarted" in (printed := capsys.readouterr().out)
    assert "this kernel did not run a line that a new kernel would run: " in printed
    assert lab.critic.told() == [(0, bound, 4.0) for _, bound, _ in before]
    assert not lab.reload()
    again = lab.critic.compute_values(lab.put(stored()))
    assert again.columns["values"].made_with != valued.columns["values"].made_with
    assert torch.equal(again.fetch(["values"])["values"].values, values)  # the weights that were saved


@pytest.mark.slow
@pytest.mark.thorough
def test_a_new_operation_and_what_only_hosts_have_loaded(
    lab: Any, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.path("critic").write_text(
        files.path("critic").read_text() + LAZY.replace("{prefix}", "two").replace("\n    ", "\n")
    )
    lab.reload()
    assert lab.critic.lazily() == [1, 1]
    assert "two_lazy" not in sys.modules  # of this process
    lab.autoreload()
    files.edit("lazy", "return 1", "return 22")
    assert lab.critic.lazily() == [22, 22]
    assert capsys.readouterr().out == "reloaded two_lazy.answer in 3 process(es)\n"
    lab.autoreload(False)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_cell_run_again_and_another_kernel(lab: Any, files: Files) -> None:
    notebook = vars(sys.modules["__main__"])
    cell = "def cell_score(prompt, response, **row):\n    return {}"
    exec(cell.format("1.5"), notebook)
    lab.reload(reward=notebook["cell_score"])
    assert rewards(lab) == [1.5] * 4
    exec(cell.format("2.5"), notebook)
    report = lab.reload()
    assert list(report.df["roles"]) == ["", "reward", "reward"]
    assert rewards(lab) == [2.5] * 4
    del notebook["cell_score"]

    script = """
import workbench as wb
lab = wb.attach("reloaded", take_over=True)
print(lab.critic.lazily(), lab.reload())
"""
    paths = os.pathsep.join([str(files.folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[22, 22] <Reload: nothing has changed>"
    with wb.attach("reloaded") as lab:  # that kernel has ended
        assert rewards(lab) == [2.5] * 4
