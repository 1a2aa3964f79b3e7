"""Every lesson runs from top to bottom in a real kernel, at tiny settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

LESSONS = Path(__file__).resolve().parents[2] / "notebooks"
TINY: dict[str, Any] = {
    "MODEL": "tiny-llama-tied", "TRAINING": "torch", "GENERATION": "transformers",
    "PROMPTS": 8, "SAMPLES": 2, "ITERATIONS": 1, "MAX_NEW_TOKENS": 6,
}  # fmt: skip


def run(name: str, runs: Path) -> list[str]:
    """Run a lesson, with nothing said on stderr; the html of its outputs."""
    notebook = nbformat.read(LESSONS / name, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    for parameter, value in {**TINY, "RUNS": str(runs)}.items():
        if f"{parameter} = " in parameters.source:
            parameters.source += f"\n{parameter} = {value!r}"
    notebook = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(LESSONS)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stderr"] == []
    return [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_101(tmp_path: Path) -> None:
    html = run("101_ppo_by_hand.ipynb", tmp_path)
    assert sum("<svg" in text for text in html) == 3  # timelines, with no widget
    assert any("Workbench first" in text for text in html)
    assert (tmp_path / "first").is_dir()
    assert (tmp_path / "first-split").is_dir()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_102(tmp_path: Path) -> None:
    html = run("102_look_and_branch.ipynb", tmp_path)
    assert sum("Dataflow of PPO" in text for text in html) == 2
    assert sum("<polyline" in text for text in html) == 1
    assert len(list(tmp_path.glob("branches/*/rollouts.safetensors"))) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_201(tmp_path: Path) -> None:
    html = run("201_swap_placement.ipynb", tmp_path)
    assert sum("idle" in text and "<svg" in text for text in html) >= 3  # a timeline of each placement
    assert len(list((tmp_path / "swap").iterdir())) == 1  # all in one run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_203(tmp_path: Path) -> None:
    html = run("203_resharding_traffic.ipynb", tmp_path)
    assert sum("(1.00 times)" in text for text in html) == 1  # no more moved than had to


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lesson_303(tmp_path: Path) -> None:
    html = run("303_your_own_algorithm.ipynb", tmp_path)
    assert sum("Dataflow of MedianPO" in text for text in html) == 2
    assert sum("<polyline" in text for text in html) == 1


def test_lessons_are_numbered_and_have_parameters() -> None:
    lessons = sorted(LESSONS.glob("*.ipynb"))
    assert lessons
    for lesson in lessons:
        assert lesson.name[:3].isdigit()
        notebook = nbformat.read(lesson, as_version=4)
        assert any("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells)
        assert notebook.cells[0].source.startswith(f"# {lesson.name[:3]}")
