from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import workbench
import workbench_widgets
from scripts import setup_env
from scripts.lock import normal, pins_of
from workbench.algorithms import ALGORITHMS

ROOT = Path(__file__).parent.parent


def test_every_room_is_a_package_and_so_part_of_a_wheel() -> None:
    folders = {path.parent for room in ("workbench", "widgets") for path in (ROOT / room).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_widgets_are_installed_under_their_import_name() -> None:
    assert Path(workbench_widgets.__file__).resolve().parent == ROOT / "widgets"


def test_public_names_are_those_of_all_for_a_type_checker_as_for_python() -> None:
    tree = ast.parse(Path(workbench.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = [
        alias for block in blocks for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert {alias.asname for alias in imported if alias.name != "*"} | {*ALGORITHMS} == {*workbench.__all__}
    for package in (workbench, workbench_widgets):
        assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert {*dir(workbench)} == {*workbench.__all__, "errors"}


def test_importing_workbench_loads_no_engine_and_no_widget() -> None:
    heavy = ("torch", "transformers", "vllm", "deepspeed", "ray", "pandas", "plotly", "ipywidgets", "anywidget")
    code = f"import sys, workbench; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_mapping_and_placement_answer_without_a_runtime() -> None:
    code = "import sys, workbench.mapping.search, workbench.placement.estimate as _; "
    code += "print(sorted({'ray', 'vllm', 'deepspeed'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_set_up_installs_extras_and_versions_that_pyproject_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*setup_env.EXTRAS, "vllm-cpu", "vllm-gpu"} <= set(project["optional-dependencies"])
    assert setup_env.CPU_TORCH.removesuffix("+cpu") in project["dependencies"]


def test_set_up_says_what_it_downloads_and_how_much_is_left() -> None:
    told = map(setup_env.Progress(270).of, (
        "Requirement already satisfied: numpy in ./.venv/lib", "Collecting typing_extensions>=4 (from torch)",
        "Collecting torch==2.13.0+cpu", "  Downloading torch-2.13.0%2Bcpu-cp311-manylinux.whl (180.5 MB)",
        "Collecting typing-extensions", "  Downloading x-1-py3-none-any.whl.metadata (4 kB)",
        "Installing collected packages: torch, typing-extensions",
    ))  # fmt: skip
    assert list(filter(None, told)) == [
        "3 of about 270 packages: downloading torch (180.5 MB)",
        "installing 2 packages, which takes a minute or two",
    ]


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_each_requirement_is_locked_to_a_version_that_its_range_allows(build: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins, other = pins_of(build), {"cpu": "vllm-gpu", "cuda": "vllm-cpu"}[build]
    installed = [extra for extra in (*setup_env.EXTRAS, "vllm-cpu", "vllm-gpu") if extra != other]
    for text in (*project["dependencies"], *(text for extra in installed for text in extras[extra])):
        requirement = Requirement(text)
        assert pins[normal(requirement.name)] in requirement.specifier, text
