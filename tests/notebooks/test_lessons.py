"""Every lesson runs from top to bottom in a real kernel, at the tiny settings that its metadata have for a quick check
(`workbench.check`); what is saved shows its pictures alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

LESSONS = Path(__file__).resolve().parents[2] / "notebooks"
CHART = "application/vnd.plotly.v1+json"
MOST_BYTES = 2_000_000  # of a lesson as a page
SAID: list[str] = []  # what the cells of the last lesson printed


@pytest.fixture(autouse=True)
def nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lessons are executed without a browser."""
    monkeypatch.setenv("WORKBENCH_WIDGETS", "static")


def parameters_of(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The cell of the parameters."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return cell


def run(name: str, runs: Path) -> list[str]:
    """Run a lesson, with nothing said on stderr; its pictures and the html of its other outputs."""
    notebook = nbformat.read(LESSONS / name, as_version=4)
    settings = {**notebook.metadata["workbench"]["check"], "RUNS": str(runs)}
    parameters_of(notebook).source += "".join(f"\n{parameter} = {value!r}" for parameter, value in settings.items())
    notebook = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(LESSONS)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stderr"] == []
    assert not any("widget-view" in mimetype for output in outputs for mimetype in output.get("data", {}))
    page, _ = HTMLExporter().from_notebook_node(notebook)  # with no kernel, and no widget's state
    assert len(page) < MOST_BYTES
    assert "wb-panel" not in page
    SAID[:] = [output["text"] for output in outputs if output["output_type"] == "stream"]
    shown = [output["data"] for output in outputs if "data" in output]
    kept = [[kind for kind in ("text/html", "image/svg+xml", CHART) if kind in data] for data in shown]
    return ["".join(f"{kind} {data[kind]}" for kind in kinds) for data, kinds in zip(shown, kept, strict=True) if kinds]


def drawn(html: str) -> bool:
    """It has a picture: a drawing, or one that is saved as an image."""
    return "<svg" in html or "data:image/svg+xml" in html


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_101(tmp_path: Path) -> None:
    html = run("101_ppo_by_hand.ipynb", tmp_path)
    assert sum(map(drawn, html)) == 5  # timelines, memory, the panel: with no widget
    assert sum("rows of batch" in text or "rollout_log_prob" in text for text in html) >= 1  # samples
    assert any("Workbench first" in text for text in html)
    assert (tmp_path / "first").is_dir()
    assert (tmp_path / "first-split").is_dir()


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_102(tmp_path: Path) -> None:
    html = run("102_look_and_branch.ipynb", tmp_path)
    assert sum("Dataflow of PPO" in text for text in html) == 3  # two graphs, and the stepper
    assert sum(CHART in text for text in html) == 1
    assert len(list(tmp_path.glob("branches/*/rollouts.safetensors"))) == 1


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_103(tmp_path: Path) -> None:
    html = run("103_read_the_timeline.ipynb", tmp_path)
    assert sum("idle" in text and "<svg" in text for text in html) == 2  # one pool, two pools
    assert sum(map(drawn, html)) == 3  # and the panel, saved as an image
    assert any("scorers" in text and "other_pool_s" in text for text in html)  # what is left of waiting


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_104(tmp_path: Path) -> None:
    html = run("104_estimate_and_compare.ipynb", tmp_path)
    assert sum("<svg" in text for text in html) == 1  # memory by device
    assert sum(CHART in text for text in html) == 2  # bytes of a sync, advantages of the arms
    assert any("reinforce++" in text for text in html)


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_105(tmp_path: Path) -> None:
    html = run("105_from_notebook_to_script.ipynb", tmp_path)
    assert sum("idle" in text and "<svg" in text for text in html) == 1  # the timeline of the script's run


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_201(tmp_path: Path) -> None:
    html = run("201_swap_placement.ipynb", tmp_path)
    assert sum("idle" in text and "<svg" in text for text in html) >= 3  # a timeline of each placement
    assert len(list((tmp_path / "swap").iterdir())) == 1  # all in one run


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_202(tmp_path: Path) -> None:
    html = run("202_your_own_worker_and_protocol.ipynb", tmp_path)
    assert any("BACK_AND_FORTH" in text for text in html)  # the operation, in the actor's table
    assert sum("idle" in text and "<svg" in text for text in html) == 1
    assert {folder.name for folder in tmp_path.iterdir()} == {"dealt", "dealt-inline"}


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_203(tmp_path: Path) -> None:
    html = run("203_resharding_traffic.ipynb", tmp_path)
    assert sum("(1.00 times)" in text for text in html) == 2  # no more moved than had to: as told, and in the panel


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_204(tmp_path: Path) -> None:
    html = run("204_what_if.ipynb", tmp_path)
    assert sum("placements, exact" in text for text in html) == 2  # of the cluster, and of the workbench
    assert sum("<svg" in text for text in html) == 3  # a simulated iteration, and two that are predicted
    assert sum(CHART in text for text in html) == 1  # the curves
    assert sum("best placement (devices" in text and "not searched yet" not in text for text in html) == 1  # the map
    assert sum("update_actor" in text and "predicted" in text for text in html) == 2
    assert "measured" in "".join(SAID)


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_304(tmp_path: Path) -> None:
    html = run("304_reward_model_and_safe_rlhf.ipynb", tmp_path)
    assert sum("Dataflow of SafeRLHF" in text for text in html) == 1
    assert sum(CHART in text for text in html) == 2  # the reward model's curves; cost, multiplier and reward
    assert len(list(tmp_path.glob("preferences/*/reward_model/*.safetensors"))) == 1


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_301(tmp_path: Path) -> None:
    html = run("301_interrupt_and_reattach.ipynb", tmp_path)
    said = "".join(SAID)
    assert "reward.compute_reward was interrupted. the state is as before the stage" in said
    assert "actor.update_actor was interrupted after optimizer step" in said
    assert "actor.update_actor: continues at optimizer step" in said
    assert "lab.recover() restarts it" in said
    assert "RLOO continues in iteration 2" in said
    assert any("<svg" in text for text in html)


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_302(tmp_path: Path) -> None:
    html = run("302_reload_and_debug.ipynb", tmp_path)
    assert sum("Reload: lesson_reward.share, lesson_reward.digits in 3" in text for text in html) == 1
    assert sum("Reload: failed in 1 of 3" in text and "ZeroDivisionError" in text for text in html) == 1
    assert any("response_length" in text for text in html)


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_303(tmp_path: Path) -> None:
    html = run("303_your_own_algorithm.ipynb", tmp_path)
    assert sum("Dataflow of MedianPO" in text for text in html) == 2
    assert sum(CHART in text for text in html) == 1


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_305(tmp_path: Path) -> None:
    html = run("305_distil_a_teacher.ipynb", tmp_path)
    assert sum("Dataflow of Distill" in text for text in html) == 1
    assert sum(CHART in text for text in html) == 1
    assert "in the teacher's form" in "".join(SAID)


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_306(tmp_path: Path) -> None:
    html = run("306_a_loss_in_a_cell.ipynb", tmp_path)
    assert sum("8 checks: all that apply passed" in text for text in html) == 1
    assert sum("8 checks: " in text and "changes with other rows" in text for text in html) == 1
    said = "".join(SAID).splitlines()[-4:]  # a kernel may send them in several parts
    caught = dict(line.split(": ")[:2] for line in said)
    assert caught == {
        "upside_down": "ratio_1", "over_padding": "mask", "without_gradient": "returns", "averaged": "returns"
    }  # fmt: skip


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_307(tmp_path: Path) -> None:
    html = run("307_rewards_components_and_failures.ipynb", tmp_path)
    assert any("HTTP 503" in text and "judge" in text for text in html)
    assert any("rewards/right" in text for text in html)


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_308(tmp_path: Path) -> None:
    html = run("308_which_prompts_come_next.ipynb", tmp_path)
    said = "".join(SAID)
    assert "does not read 'enable_thinkin'" in said
    assert "chose none of 8 prompts" in said
    assert "lab.prompts.order = hopeful" in said
    assert any("calculator" in re.sub("<[^>]*>", "", text) for text in html)
    assert any("pass_low" in text for text in html)


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_309(tmp_path: Path) -> None:
    html = run("309_is_it_better.ipynb", tmp_path)
    said = "".join(SAID)
    assert "not only the policies differ: sampling/temperature is 1.0 in a, 0.3 in b" in said
    assert "not only the policies differ: seed is 0 in a, 1 in b" in said
    assert sum(CHART in text for text in html) == 1
    assert any("95 % interval over prompts" in text for text in html)
    assert any("passed_a" in text for text in html)


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_310(tmp_path: Path) -> None:
    html = run("310_turn_the_dial.ipynb", tmp_path)
    assert "[False, False, True]" in "".join(SAID)
    assert any("effective sample" in text for text in html)
    assert any("lab.buffer.priority" in text for text in html)
    assert any(map(drawn, html))  # the timeline


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_401(tmp_path: Path) -> None:
    html = run("401_an_agent_with_a_tool_by_hand.ipynb", tmp_path)
    said = "".join(SAID)
    assert "# Tools" in said and "<Turn 1 (by hand): " in said and "391" in said
    assert "<Fork before turn 1: value" in said and "without the call" in said
    assert sum("in the tree" in text for text in html) == 2


@pytest.mark.lesson
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_402(tmp_path: Path) -> None:
    html = run("402_from_one_conversation_to_a_thousand.ipynb", tmp_path)
    said = dict(line.split(": ", 1) for line in "".join(SAID).splitlines() if ": " in line)
    assert float(said["contexts a conversation"]) > 1 and float(said["largest gap, nats"]) < 1e-4
    assert any("of 12 rows failed" in line for line in SAID)
    assert any("HTTP 503" in text for text in html)


@pytest.mark.parametrize("lesson", sorted(LESSONS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_lessons_are_numbered_and_say_how_to_check_them(lesson: Path) -> None:
    notebook = nbformat.read(lesson, as_version=4)
    assert lesson.name[:3].isdigit()
    assert notebook.cells[0].source.startswith(f"# {lesson.name[:3]} · ")
    parameters: dict[str, object] = {}
    for line in ast.parse(parameters_of(notebook).source).body:
        assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        parameters[line.targets[0].id] = ast.literal_eval(line.value)
    assert parameters["RUNS"] == "../runs"
    for name, value in notebook.metadata["workbench"]["check"].items():
        assert type(value) is type(parameters[name]), name
