"""Wrong inputs that used to end in another library's error, or after work: each is refused at once.

What is no path, for all calls that take one, and manifests: tests/session/checkpoint/test_hostile.py; headers of batch
files: tests/batches/test_file_damage.py; notebooks: tests/fuzz/test_notebooks.py; full disks:
tests/integration/test_full_disk.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from workbench.errors import BadInput, ModelUnavailable
from workbench.export import export_notebook
from workbench.models import resolve
from workbench.models.loading import read_config

Call = Callable[[wb.Workbench, Path], Any]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("raw", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def opened(tmp: Path, **options: Any) -> wb.Workbench:
    return tiny_lab("other", tmp, backend="inline", **options)


def notebook(tmp: Path, cells: Any) -> Path:
    path = tmp / "n.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def with_config(tmp: Path, **changes: Any) -> Path:
    folder = Path(shutil.copytree(resolve(TINY), tmp / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def batch_file(lab: wb.Workbench, tmp: Path) -> Path:
    """A batch file whose header somebody has written anew: the header's length is more than the file has."""
    path = lab.put({"x": [1, 2]}).save(tmp / "rows")
    path.write_bytes((10**9).to_bytes(8, "little") + path.read_bytes()[8:])
    return path


CASES: dict[str, tuple[Call, str]] = {
    "a name of 300 characters": (lambda lab, tmp: wb.open("x" * 300, models={"actor": TINY}), "at most 100 bytes"),
    "a keyword that there is not": (lambda lab, tmp: wb.open("a", modles={"actor": TINY}), r"modles=.*models"),  # type: ignore[call-arg]
    "a path that is a number": (lambda lab, tmp: lab.save(5), "5.*text"),  # type: ignore[arg-type]
    "a path that is None": (lambda lab, tmp: lab.load(None), "None.*text"),  # type: ignore[arg-type]
    "a path with a null": (lambda lab, tmp: lab.put({"x": [1]}).save("a\0b"), "embedded null byte"),
    "a path that is too long": (lambda lab, tmp: lab.trace("/x" * 3000), "a path 4095|a path 4096"),
    "a model with a null": (lambda lab, tmp: opened(tmp, models={"actor": "a\0b"}), "a model's path='a.*null"),
    "a model whose name is too long": (lambda lab, tmp: opened(tmp, models={"actor": "x" * 300}), "at most 255 bytes"),
    "a model whose path is too long": (lambda lab, tmp: opened(tmp, models={"actor": tmp / ("x" * 300)}), "255 bytes"),
    "a configuration whose path is too long": (lambda lab, tmp: read_config("/x" * 3000), "a path 4095|a path 4096"),
    "a model of an unknown type": (
        lambda lab, tmp: opened(tmp, models={"actor": with_config(tmp, model_type="nobody")}), "model type `nobody`",
    ),
    "prompts that are a number": (lambda lab, tmp: opened(tmp, prompts=5), "a source of type int"),
    "half of a character": (lambda lab, tmp: opened(tmp, prompts=["a\ud800"]), "has half a character"),
    "a batch file of another header": (lambda lab, tmp: lab.load(batch_file(lab, tmp)), "rows"),
    "cells that are a number": (lambda lab, tmp: export_notebook(notebook(tmp, 5)), "cells"),
    "a cell whose code is a number": (
        lambda lab, tmp: export_notebook(notebook(tmp, [{"cell_type": "code", "metadata": {}, "source": 5}])), "source",
    ),
}  # fmt: skip


def test_it_is_refused_before_any_work(lab: wb.Workbench, tmp_path: Path, subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case=case):
            call, message = CASES[case]
            before = lab.iteration, len(lab.runs()), len(lab.spans())
            with pytest.raises((BadInput, ModelUnavailable), match=message):
                call(lab, tmp_path)
            assert (lab.iteration, len(lab.runs()), len(lab.spans())) == before
            assert {path.name for path in tmp_path.iterdir()} <= {
                "model",
                "n.ipynb",
                "rows.safetensors",
                "rows",
            }  # no run folder
