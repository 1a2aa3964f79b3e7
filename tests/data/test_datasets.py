"""Every data set of the repository is what its card says."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.data.sources import read_rows
from workbench.data.verifiers import arithmetic, gsm8k
from workbench.errors import BadInput

DATASETS = Path(__file__).parents[2] / "datasets"
FOLDERS = sorted(path for path in DATASETS.iterdir() if path.is_dir() and path.name != "__pycache__")


def card(folder: Path) -> dict[str, tuple[int, str]]:
    """The card's table of files: name -> (rows, sha256)."""
    lines = re.findall(r"^\| (\S+\.jsonl) \| (\d+) \| `([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.M)
    return {name: (int(rows), checksum) for name, rows, checksum in lines}


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def problem(prompt: str) -> tuple[int, str, int]:
    found = re.findall(r"(\d+) ([-+*]) (\d+)", prompt)
    assert len(found) == 1, prompt
    return int(found[0][0]), found[0][1], int(found[0][2])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_card_states_origin_licence_schema_and_the_checksum_of_every_file(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert [word for word in ("**Origin.**", "**Licence.**", "**Schema.**") if word not in text] == []
    files = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    measured = {name: (data.count(b"\n"), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    assert measured and measured == card(folder)


def test_the_script_makes_the_same_bytes_again(tmp_path: Path) -> None:
    folder = DATASETS / "arithmetic"
    shutil.copy(folder / "make.py", tmp_path)
    subprocess.run([sys.executable, "-I", "make.py"], cwd=tmp_path, check=True, capture_output=True)
    assert {path.name for path in tmp_path.glob("*.jsonl")} == set(card(folder))
    for path in tmp_path.glob("*.jsonl"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_sample_is_made_of_the_file_that_its_card_names_alone(tmp_path: Path) -> None:
    shutil.copy(DATASETS / "gsm8k" / "make.py", tmp_path)
    (tmp_path / "other.jsonl").write_text('{"question": "1?", "answer": "#### 1"}\n')
    made = subprocess.run(
        [sys.executable, "-I", "make.py", "other.jsonl"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 1 and "sha256" in made.stderr and not (tmp_path / "test.jsonl").exists()


def test_rows_of_gsm8k_are_read_by_name_and_judged_by_its_verifier() -> None:
    rows = read_rows("gsm8k/test")
    assert len(rows) == 200
    for row in rows:
        assert gsm8k(row["question"], row["answer"], answer=row["answer"]) == 1.0
        assert gsm8k(row["question"], "I do not know 123454321", answer=row["answer"]) == 0.0
    with pytest.raises(BadInput, match=r"datasets/gsm8k holds 'gsm8k/test'"):
        read_rows("gsm8k")


@pytest.mark.parametrize("split", ["train", "test"])
def test_arithmetic_answers_are_right(split: str) -> None:
    result = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    for row in read(DATASETS / "arithmetic" / f"{split}.jsonl"):
        assert set(row) == {"prompt", "answer"}
        a, sign, b = problem(row["prompt"])
        assert row["answer"] == str(result[sign](a, b))
        assert arithmetic(**row, response=f"{a} {sign} {b} = {row['answer']}.") == 1.0
        assert arithmetic(**row, response=f"The answer is {int(row['answer']) + 1}.") == 0.0


def test_no_arithmetic_problem_is_in_both_files_and_no_prompt_occurs_twice() -> None:
    train, test = (read(DATASETS / "arithmetic" / f"{split}.jsonl") for split in ("train", "test"))
    prompts = [row["prompt"] for row in train + test]
    assert len(set(prompts)) == len(prompts) == 2200

    def problems(rows: list[dict[str, str]]) -> set[tuple[str, int, int]]:
        parts = [problem(row["prompt"]) for row in rows]
        return {(sign, a, b) if sign == "-" else (sign, min(a, b), max(a, b)) for a, sign, b in parts}

    assert len(problems(test)) > 50
    assert problems(train) & problems(test) == set()
