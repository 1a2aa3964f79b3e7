from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

import workbench
from workbench import cli
from workbench.launch import doctor


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What `python -m workbench doctor --json` says here, with its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "doctor", "--json"], capture_output=True, text=True, timeout=300
    )
    return {"exit": done.returncode, **json.loads(done.stdout)}


@pytest.mark.slow
def test_doctor_reports_this_machine(answer: dict[str, Any]) -> None:
    checks = {check["name"]: check for check in answer["checks"]}
    assert {"torch and transformers", "generation engine (vLLM)", "devices", "compiler", "bundled model"} <= set(checks)
    import torch

    assert torch.__version__ in checks["torch and transformers"]["found"]
    assert all(check["ok"] or check["remedy"] for check in checks.values())


@pytest.mark.slow
def test_the_exit_code_says_whether_the_main_job_can_run(answer: dict[str, Any]) -> None:
    assert answer["ok"] == all(check["ok"] for check in answer["checks"] if check["needed"])
    assert answer["exit"] == (0 if answer["ok"] else 1)


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
    monkeypatch.setitem(doctor.PROBES, "engine", (code, ("pip",)))
    check = doctor._engine("engine")
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
    monkeypatch.setattr(doctor, "_version", lambda name: {"transformers": "9.0"}.get(name))
    check = doctor._versions()
    assert not check.ok
    assert check.found.startswith("transformers 9.0 (asked for: ")


def test_a_gpu_build_without_gpu_stops_the_main_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: {"vllm": "0.32.0"}.get(name))
    probe = subprocess.CompletedProcess([], 0, json.dumps({"gpus": [], "bf16_is_fast": False}), "")
    build = next(check for check in doctor._devices(probe) if check.name == "vLLM's build")
    assert not build.ok
    assert build.needed


@pytest.mark.parametrize(("fast", "said"), [(True, "float32 by default (dtype='bfloat16' is fast"), (False, "float32")])
def test_the_default_dtype_is_what_open_uses(fast: bool, said: str) -> None:
    probe = subprocess.CompletedProcess([], 0, json.dumps({"gpus": [], "bf16_is_fast": fast}), "")
    found = doctor._devices(probe)[0].found
    assert said in found
    assert ("bfloat16" in found) == fast
    assert f"{inspect.signature(workbench.open).parameters['dtype'].default} by default" in found


def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["no-such-command"])
    assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_tables_have_a_column_for_every_key() -> None:
    table = cli._table([{"name": "a", "hosts": 2}, {"name": "long-name", "state": "idle"}])
    assert table.splitlines() == ["name       hosts  state", "a          2", "long-name         idle"]
