from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.cases import tiny_lab
from workbench import cli, errors
from workbench.telemetry import store
from workbench.telemetry.syncs import CHANGED_COLUMNS, SYNC_COLUMNS

ROOT = Path(__file__).parent.parent
TEXTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))
FOLDERS = "workbench|widgets|tests|docs|notebooks|benchmarks|scripts|datasets"
# a role of other placements, an example's own operation, names that stand for others
NOT_HERE = ("lab.rollout", "lab.critic.count_prompt", "wb.NAME", "wb.Mine", "workbench/algorithms/mine.py")


def test_every_public_name_has_a_page() -> None:
    folders = re.findall(r"^REFERENCE := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    assert all((ROOT / "workbench" / folder).is_dir() for folder in folders)
    homes = {home.split(".")[1] for home in workbench._PUBLIC.values() if home != "workbench"}
    assert homes <= {*folders, "controller"}


def test_a_page_shows_every_class_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    pdoc = [sys.executable, "-m", "pdoc", "-t", str(ROOT / "docs/reference"), "-o", str(tmp_path)]
    subprocess.run([*pdoc, "workbench.errors"], check=True)
    page = (tmp_path / "workbench/errors.html").read_text()
    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert len(classes) > 10
    assert [name for name in classes if f'id="{name}"' not in page] == []
    files = "".join(file.read_text() for file in tmp_path.rglob("*.*"))
    assert re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="(?:https?:)?//', files) == []


def test_each_promise_about_security_names_tests_that_are_there() -> None:
    promised = (ROOT / "SECURITY.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line for line in promised.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row.rpartition(" | ")[2])
        assert named and all((ROOT / name).exists() for name in named), row


def links() -> Iterator[tuple[Path, str]]:
    for text in TEXTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", text.read_text()):
            yield text, target


def test_links_of_the_texts_lead_somewhere() -> None:
    found = [(text, target) for text, target in links() if not target.startswith("http")]
    assert len(found) > 20
    broken = []
    for text, target in found:
        path, _, anchor = target.partition("#")
        file = (text.parent / path).resolve() if path else text
        if not file.exists() or (anchor and anchor not in headings(file)):
            broken.append(f"{text.name}: {target}")
    assert broken == []


def headings(file: Path) -> list[str]:
    """The anchors of a Markdown file's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_files_of_algorithms_are_those_that_there_are() -> None:
    rows = [line for line in (ROOT / "docs" / "algorithms.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+\.py)`", row)}
    there = {path.name for part in ("algorithms", "objectives") for path in (ROOT / "workbench" / part).glob("*.py")}
    assert len(named) > 10 and named <= there


def test_every_lesson_is_in_the_page_of_lessons() -> None:
    page = (ROOT / "docs" / "lessons.md").read_text()
    assert [path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if path.name not in page] == []


@pytest.mark.parametrize(
    "columns",
    [
        store.SPAN_COLUMNS,
        store.TRANSFER_COLUMNS,
        store.METRIC_COLUMNS,
        store.MEMORY_COLUMNS,
        store.EVENT_COLUMNS,
        SYNC_COLUMNS,
        CHANGED_COLUMNS,
    ],
)
def test_every_column_of_the_frames_is_explained(columns: dict[str, str]) -> None:
    page = (ROOT / "docs" / "telemetry.md").read_text()
    assert [column for column in columns if f"`{column}`" not in page] == []


def snippets(text: Path) -> Iterator[str]:
    """Lines of a text's blocks of code, and what its sentences have in backquotes."""
    blocks = re.split(r"^```.*$", text.read_text(), flags=re.M)
    for number, block in enumerate(blocks):
        yield from block.splitlines() if number % 2 else re.findall(r"`([^`\n]+)`", block)


def test_commands_of_the_texts_exist(capsys: pytest.CaptureFixture[str]) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    benchmarks = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    wrong, seen = [], 0
    for text in (*TEXTS, ROOT / "CHANGELOG.md"):
        for snippet in snippets(text):
            if made := re.match(r"make (?!PYTHON=)([a-z-]+)(?:.* NAME=([a-z_]+))?", snippet):
                seen += 1
                if made[1] not in targets or (made[2] or "list") not in benchmarks:
                    wrong.append(f"{text.name}: {snippet}")
            if called := re.match(r"(?:\.venv/bin/)?wb ([a-z]+)([^#|]*)", snippet):
                seen += 1
                with pytest.raises(SystemExit):
                    cli.main([called[1], "--help"])
                if {*re.findall(r"--[a-z][a-z-]*", called[2])} - {*re.findall(r"--[a-z-]+", capsys.readouterr().out)}:
                    wrong.append(f"{text.name}: {snippet}")
    assert wrong == []
    assert seen > 60


def test_names_and_files_of_the_texts_exist(tmp_path: Path) -> None:
    wrong = []
    with tiny_lab("docs", tmp_path, backend="inline") as lab:
        for text in TEXTS:
            written = text.read_text()
            for dotted in sorted({*re.findall(r"(?<![\w.])(?:lab|wb)(?:\.[A-Za-z_]\w*)+", written)}):
                first, *names = dotted.split(".")
                value: Any = lab if first == "lab" else workbench
                for name in names if not dotted.startswith(NOT_HERE) else ():
                    if not hasattr(value, name):
                        wrong.append(f"{text.name}: {dotted}")
                        break
                    value = getattr(value, name)
            paths = {*re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./*-]*\w", written)}.difference(NOT_HERE)
            wrong += [f"{text.name}: {path}" for path in sorted(paths) if not any(ROOT.glob(path))]
    assert wrong == []
