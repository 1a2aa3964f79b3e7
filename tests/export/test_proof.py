"""The proof that notebook and script agree, on lessons, and that it fails where they do not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.expected import expect_error
from workbench.cli import main
from workbench.errors import BadInput
from workbench.export import export_notebook
from workbench.export.cells import read_notebook
from workbench.export.proof import ProofFailed, compare_runs, option, prove, settings_of
from workbench.telemetry.store import TelemetryStore

LESSONS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.lesson
@pytest.mark.parametrize("name", ["104_estimate_and_compare", "303_your_own_algorithm", "306_a_loss_in_a_cell"])
def test_lessons_and_their_scripts_agree_to_the_last_bit(name: str) -> None:
    path = LESSONS / f"{name}.ipynb"
    settings = read_notebook(path).small_settings()
    proof = prove(path, export_notebook(path, runs=[]).text, settings, {"backend": "inline"})
    assert proof.ok, str(proof)
    assert proof.tolerance == 0
    compared = proof.table[proof.table["verdict"] == "equal"]
    assert len(compared) >= 8
    assert compared["metrics"].sum() > 100
    assert set(proof.table["verdict"]) <= {"equal", "only in the notebook"}


def write(folder: Path, *calls: tuple[int, str, dict[str, float]], name: str = "lab") -> Path:
    store = TelemetryStore(folder / name / "20250101-000000")
    for run, (iteration, stage, values) in enumerate(calls):
        store.append_metrics(stage, run, iteration, values)
    return folder


def test_what_differs_is_told(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    first = write(
        tmp_path / "a",
        (1, "x", {"loss": 1.0, "took_s": 3.0, "odd": nan}),
        (1, "y", {"loss": inf}),
        (2, "x", {"loss": 1.0}),
    )
    same = write(
        tmp_path / "b",
        (1, "x", {"loss": 1.0, "took_s": 4.0, "odd": nan}),
        (1, "y", {"loss": inf}),
        (2, "x", {"loss": 1.0}),
    )
    proof = compare_runs(first, same)
    assert proof.ok
    assert proof.table["metrics"].tolist() == [1, 1, 1]
    assert "equal to the last bit" in str(proof)
    other = write(tmp_path / "c", (1, "x", {"loss": 1.0 + 2**-40}), (1, "y", {"loss": inf}))
    proof = compare_runs(first, other)
    assert proof.table["verdict"].tolist() == ["differs", "equal", "missing in the script"]
    assert not proof.ok
    assert "NOT equal" in str(proof)
    more = write(tmp_path / "d", *[(1, "x", {"loss": 1.0})] * 2, (1, "y", {"loss": inf}), (2, "x", {"loss": 1.0}))
    assert "only in the script" in compare_runs(first, more).table["verdict"].tolist()
    updates = [(n, "update_actor", {"loss": 1.0}) for n in (1, 2, 3)]
    fewer = compare_runs(write(tmp_path / "g", *updates), write(tmp_path / "h", updates[0]))
    assert fewer.table["verdict"].tolist() == ["equal", "missing in the script", "missing in the script"]
    assert not fewer.ok
    assert not compare_runs(write(tmp_path / "i", (1, "y", {"a": inf})), write(tmp_path / "j", (1, "y", {"a": 5.0}))).ok
    gaps = [compare_runs(*(write(tmp_path / f"{name}-{n}", (1, "y", {name: x})) for n, x in enumerate((1e-7, 9e-7))))
            for name in ("first_minibatch/rollout_gap/mean", "ratio/max_deviation", "loss")]  # fmt: skip
    assert [proof.table["largest_difference"].item() for proof in gaps] == pytest.approx([8e-4, 8e-4, 0.8])
    assert not any(proof.ok for proof in gaps)  # on one process nothing differs at all
    assert not compare_runs(write(tmp_path / "e"), write(tmp_path / "f")).ok  # nothing was compared


def test_conversations_are_held_to_rounding(tmp_path: Path) -> None:
    """Which of their rows are decoded together depends on time."""
    talks = (1, "generate_sequences", {"turns/mean": 2.0})
    one, near, far = (write(tmp_path / str(x), talks, (1, "x", {"loss": x})) for x in (1.0, 1.0001, 1.01))
    assert compare_runs(one, near).ok and compare_runs(one, near).tolerance == 2e-3
    assert not compare_runs(one, far).ok


def test_calls_that_only_looked_are_passed_by(tmp_path: Path) -> None:
    looked, kept = (1, "compute_reward", {"mean": 0.5}), (1, "compute_reward", {"mean": 0.75})
    first = write(tmp_path / "a", looked, kept, looked)
    proof = compare_runs(first, write(tmp_path / "b", kept))
    assert proof.ok
    assert proof.table["verdict"].tolist() == ["only in the notebook", "equal", "only in the notebook"]


def test_values_of_parameters() -> None:
    assert settings_of(["A=3", "B=tiny-llama", "C=[1, 2]", "D=True"]) == {
        "A": 3,
        "B": "tiny-llama",
        "C": [1, 2],
        "D": True,
    }
    with expect_error(BadInput, value="--set PROMPTS"):
        settings_of(["PROMPTS"])
    assert option("MAX_NEW", -3) == ["--max-new=-3"]
    assert option("ON", False) == ["--no-on"]
    assert option("XS", [1, 2]) == ["--xs", "1", "2"]
    assert option("D", {"a": 1}) == ['--d={"a": 1}']


def test_a_script_with_an_option_output_of_its_own_is_refused(tmp_path: Path) -> None:
    with expect_error(BadInput, value="OUTPUT"):
        prove(tmp_path / "x.ipynb", 'def main(\n    OUTPUT: str = "x",\n) -> None: ...\n', {})


def test_a_value_that_the_notebook_cannot_be_given_is_refused(tmp_path: Path) -> None:
    script = "def main(\n    M: int = 1, N: int = 2,\n) -> None: ...\n"
    with expect_error(BadInput, value="a proof with N", remedy="tag the cell"):
        prove(page(tmp_path, "M = 1", "N = 2"), script, {"M": 3, "N": 3})


def page(folder: Path, *cells: str) -> Path:
    """A notebook of code cells; the first one has the parameters."""
    code: list[dict[str, Any]] = [
        {"cell_type": "code", "id": f"c{n}", "source": text, "outputs": [], "execution_count": None,
         "metadata": {"tags": ["parameters"]} if n == 0 else {}}
        for n, text in enumerate(cells)
    ]  # fmt: skip
    path = folder / "x.ipynb"
    path.write_text(json.dumps({"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


@pytest.mark.parametrize("local", ["output: list[str] = []", "RUNS: str = 'here'"])
def test_a_variable_in_main_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: str) -> None:
    path = page(tmp_path, "N = 2", f"import os\n{local}\nos.putenv('A', str(N))")
    script = export_notebook(path, runs=[])
    assert script.parameters == ("N",) and f"\n    {local[:6]}" in script.text
    commands: list[list[str]] = []

    def noted(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", noted)
    prove(path, script.text, {"N": 3, "RUNS": "there"})
    (options,) = [words for _, program, *words in commands if program.endswith("script.py")]
    assert [word.partition("=")[0] for word in options] == ["--n", "--output"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "NN=3"], "--set without --check. --set is only for --check"),
        (["--backend", "inline"], "--backend without --check. --backend is only for --check"),
        (["--as-run", "--check"], "--as-run --check. --check runs the notebook in the order of the page"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    path = page(tmp_path, "N = 2", "import os\nos.putenv('A', str(N))")
    assert main(["export", str(path), "-o", str(tmp_path / "x.py"), *words]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x.py").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_notebook_that_fails_is_named(tmp_path: Path) -> None:
    path = page(tmp_path, "1 / 0")
    with expect_error(ProofFailed, value=r"notebook ended with exit code 1(.|\n)*ZeroDivisionError"):
        prove(path, "", {})
