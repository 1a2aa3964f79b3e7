"""The wheel and the sdist hold all that the package needs: built here, installed into an environment of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.cases import TINY
from workbench_widgets import driver

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "workbench", "workbench_widgets", "widgets", "datasets")
BUILD = "from setuptools import build_meta; build_meta.{hook}('dist')"
OFFLINE = ("--no-index", "--no-deps", "-q", "--disable-pip-version-check")
ITERATION = """
import json, sys
from pathlib import Path
import workbench as wb
from workbench import errors

assert not {"torch", "workbench_widgets"} & set(sys.modules), "imported before they were needed"
TINY, runs = sys.argv[1:]


def characters(prompt, response, **row):
    return sum(map(ord, response)) / 1000


models = {"actor": TINY, "reward": characters}
engines = {"training": wb.Training(engine="torch"), "generation": wb.Generation(engine="transformers")}
with wb.open("wheel", models=models, backend="inline", prompts="arithmetic", runs=Path(runs), **engines) as lab:
    wb.GRPO(lab, prompts=2, samples=4, sampling=wb.Sampling(max_new_tokens=4)).run(1)
    metrics = lab.metrics("update_actor").iloc[-1]
    sys.modules["anywidget"] = None  # as where the extra is not installed
    try:
        lab.panel()
    except errors.MissingDependency as error:
        refused = str(error)
    del sys.modules["anywidget"]
    picture = lab.panel().still().bundle()["text/html"]
from workbench_widgets.panel import Front

front = Front(titles=[], shown="")
print(json.dumps({
    "files": [wb.__file__, sys.modules["workbench_widgets"].__file__], "norm": metrics["grad_norm"], "refused": refused,
    "prompts": repr(lab.prompts), "picture": picture, "script": front._esm, "style": front._css,
    "loaded": [name for name in ("ray", "vllm", "deepspeed") if name in sys.modules],
}))
"""
TYPED = """
from workbench.errors import WorkbenchError
from workbench_widgets.view import View
reveal_type(WorkbenchError("value", "rule").remedy)
reveal_type(View.text)
"""
# nothing but these two modules is read, so that it takes seconds
MYPY = "[mypy]\nfollow_imports = skip\n[mypy-workbench.errors.*,workbench_widgets.view]\nfollow_imports = normal\n"


def run(*command: Any, cwd: Path) -> str:
    """What a command prints that finds no package in a checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build writes into its folder."""
    tree = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir() and not (ROOT / name).is_symlink():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """The wheel that is built from the sdist."""
    run(sys.executable, "-c", BUILD.format(hook="build_sdist"), cwd=tree)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    return wheel_of(sdist, tree / "from-sdist")


def wheel_of(source: Path, target: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-build-isolation", "-w", target, source, cwd=target.parent)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel in it."""
    return environment(wheel, tmp_path_factory.mktemp("installed"))


def environment(wheel: Path, folder: Path) -> Path:
    """The programs of an environment that has the wheel, and sees what is installed here but for the project."""
    venv.create(folder, symlinks=True)
    run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", *OFFLINE, wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # a folder on sys.path, whose own .pth files, such as that of an editable install, are not read
    (site / "present.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin"


def test_the_wheel_holds_every_file_of_the_packages_and_the_sdist_builds_the_same(tree: Path, wheel: Path) -> None:
    def contents(wheel: Path) -> dict[str, int]:
        return {entry.filename: entry.CRC for entry in zipfile.ZipFile(wheel).infolist()}

    found = contents(wheel)
    assert contents(wheel_of(tree, tree / "from-tree")) == found
    folders = [os.walk(tree / package, followlinks=True) for package in ("workbench", "workbench_widgets")]
    files = {(Path(path) / name).relative_to(tree) for folder in folders for path, _, names in folder for name in names}
    files = {file for file in files if file.name != "make.py"}  # what made the data sets
    assert {name for name in found if ".dist-info/" not in name} == set(map(str, files))
    assert {file.suffix for file in files} <= {".py", ".typed", ".js", ".css", ".jsonl", ".md", ""}


@pytest.mark.slow
def test_an_iteration_and_a_panel_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "iteration.py"
    script.write_text(ITERATION)
    answer = json.loads(run(installed / "python", script, TINY, tmp_path / "runs", cwd=tmp_path).splitlines()[-1])
    assert [Path(file).is_relative_to(installed.parent) for file in answer["files"]] == [True, True]
    assert "2000 prompts" in answer["prompts"]
    assert answer["norm"] > 0
    assert ".[notebook]" in answer["refused"]
    assert "update_actor" in answer["picture"]
    assert (answer["script"], answer["style"]) == (driver.module("panel.js"), driver.style())
    assert answer["loaded"] == []


@pytest.mark.slow
def test_the_program_starts_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "doctor" in run(installed / "wb", "--help", cwd=tmp_path)
    assert isinstance(json.loads(run(installed / "wb", "ls", "--json", cwd=tmp_path)), list)


@pytest.mark.thorough  # imports mypy anew
def test_a_type_checker_sees_the_types_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(MYPY)
    told = run(sys.executable, "-m", "mypy", "--python-executable", installed / "python", "user.py", cwd=tmp_path)
    assert 'Revealed type is "str"' in told
    assert "def (self: workbench_widgets.view.View) -> str" in told


@pytest.mark.thorough  # what `make` installs for all other tests is one
def test_an_editable_install_finds_data_and_widgets(tree: Path, tmp_path: Path) -> None:
    run(sys.executable, "-c", BUILD.format(hook="build_editable"), cwd=tree)
    (wheel,) = (tree / "dist").glob("*.whl")
    programs = environment(wheel, tmp_path / "environment")
    code = "import workbench_widgets.driver as f; from importlib.resources import files; "
    code += "data = files('workbench') / 'datasets'; print(len(f.style()), len(f.module('panel.js'))); "
    code += "print(f.__file__, data, *(path.name for path in data.iterdir()), sep='\\n')"
    lengths, file, folder, *names = run(programs / "python", "-c", code, cwd=tmp_path).splitlines()
    assert lengths == f"{len(driver.style())} {len(driver.module('panel.js'))}"
    assert Path(file).resolve() == (tree / "widgets" / "front_end.py").resolve()
    assert Path(folder).resolve() == (tree / "datasets").resolve()
    assert "arithmetic" in names
