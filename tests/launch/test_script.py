"""Scripts of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

import workbench as wb
from tests.cases import TINY, tiny_lab
from workbench.display.headlines import headlines
from workbench.display.progress import Iterations, Progress
from workbench.errors import BadInput, NameTaken, StageInterrupted
from workbench.support.validation import Rule
from workbench.telemetry import TelemetryStore

got: dict[str, Any] = {}


def everything(
    MODEL: Annotated[str, "100 % of it"] = "tiny",
    MAX_NEW_TOKENS: int = 8,
    LEARNING_RATE: float = 1e-3,
    SHARE: bool = False,
    KL: float | None = 0.1,
    NAME: str | None = None,
    BETAS: tuple[float, float] = (0.9, 0.95),
    LAYERS: list[int] = [1, 2],  # noqa: B006 (it is not changed)
    OPTIONS: dict[str, Any] = {},  # noqa: B006
    ESTIMATOR: Literal["k1", "k3"] = "k1",
    steps_or_all: int | str = "all",
    unsaid=3,
    MODE: Literal["fast", None] = "fast",
    MAYBE: bool | None = None,
    COUNT: Annotated[int, Field(ge=1)] = 1,
    PART: Annotated[float, Field(gt=0, le=1), Rule("must be a share in (0, 1]", "write 0.5")] | None = 1.0,
    SIZES: Annotated[list[int], Field(min_length=2)] = [1, 2],  # noqa: B006
    LABEL: Annotated[str, Field(min_length=2)] | None = None,
) -> None:
    got.update(locals())


def run(main: Callable[..., Any], *words: str) -> int:
    """The exit code of a main with these words."""
    with pytest.raises(SystemExit) as ended:
        wb.script.run(main, words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def laboratory(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A main that opens a workbench and leaves it open."""

    def main(WITH: str = "", SEED: int = 7) -> None:
        got["lab"] = tiny_lab("scripted", tmp_path / "text", models={"actor": TINY}, backend="inline", seed=SEED)
        if WITH == "interrupt":
            raise StageInterrupted("generate_sequences was interrupted")

    got.clear()
    yield main
    with contextlib.suppress(KeyError):
        got["lab"].close()


OPTIONS: list[tuple[str, str, object]] = [
    ("", "MODEL", "tiny"),
    ("--model some/model", "MODEL", "some/model"),
    ("--max-new-tokens 64", "MAX_NEW_TOKENS", 64),
    ("--learning-rate 1e-6", "LEARNING_RATE", 1e-6),
    ("--share", "SHARE", True),
    ("--no-share", "SHARE", False),
    ("--kl none", "KL", None),
    ("--name mine", "NAME", "mine"),
    ("--betas 0.8 0.9", "BETAS", (0.8, 0.9)),
    ("--layers", "LAYERS", []),
    ("--layers 4 5 6", "LAYERS", [4, 5, 6]),
    ("""--options {"zero":{"stage":2}}""", "OPTIONS", {"zero": {"stage": 2}}),
    ("--estimator k3", "ESTIMATOR", "k3"),
    ("--steps-or-all 4", "steps_or_all", 4),
    ("--steps-or-all most", "steps_or_all", "most"),
    ("--unsaid 5", "unsaid", 5),
    ("--mode none", "MODE", None),
    ("--maybe yes", "MAYBE", True),
    ("--maybe none", "MAYBE", None),
    ("--count 2", "COUNT", 2),
    ("--part none", "PART", None),
]


def test_a_parameter_is_an_option(subtests: pytest.Subtests) -> None:
    for words, name, value in OPTIONS:
        with subtests.test(words=words, name=name):
            assert run(everything, *words.split()) == 0
            assert got[name] == value
            assert type(got[name]) is type(value)


WRONG_USAGE: list[tuple[str, str]] = [
    ("--max-new-tokens many", "argument --max-new-tokens: 'many' is not a whole number"),
    ("--kl much", "argument --kl: 'much' is not none or a number"),
    ("--betas 0.9", "argument --betas: expected 2 arguments"),
    ("--estimator k2", "argument --estimator: 'k2' is not one of k1, k3"),
    ("--maybe on", "argument --maybe: 'on' is not none or true or false"),
    ("--count 0", "--count=0. must be at least 1"),
    ("--part 2", "--part=2.0. must be a share in (0, 1]. write 0.5"),
    ("--sizes 1", "--sizes=[1]. must have at least 2 items"),
    ("--backend slurm", "argument --backend: 'slurm' is not one of ray, inline"),
    ("--track tensorbord", "track='tensorbord'. trackers are tensorboard, wandb, mlflow, trackio"),
    ("--max-new 3", "unrecognized arguments: --max-new 3"),
]


def test_wrong_usage(capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    for words, said in WRONG_USAGE:
        with subtests.test(words=words, said=said):
            assert run(everything, *words.split()) == 2
            assert said in capsys.readouterr().err


def test_help_has_what_the_script_says_of_itself_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(everything, "--help") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Scripts of the tests." in said
    assert "--model MODEL 100 % of it (default: tiny)" in said
    assert "--betas BETAS BETAS (default: 0.9 0.95)" in said
    assert "--share, --no-share (default: False)" in said
    assert "--output FOLDER" in said
    assert "--name NAME of the workbench" not in said  # the script's own, in its place
    assert run(lambda NEEDED: None) == 2
    assert "required: --needed" in capsys.readouterr().err


def test_mains_that_no_command_line_can_call(capsys: pytest.CaptureFixture[str]) -> None:
    def both(SEED: int = 0, seed: int = 0) -> None: ...
    def rest(**options: Any) -> None: ...
    def placement(PLACEMENT: wb.Placement | None = None) -> None: ...

    for main, said in (
        (both, "--seed belongs to SEED"),
        (rest, "a parameter that can be given by name"),
        (placement, "an option must be a number"),
    ):
        assert run(main) == 1
        assert said in capsys.readouterr().err


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)  # Ray's, where a test before this one has joined it

    def raising(error: BaseException) -> Callable[[], None]:
        def main() -> None:
            raise error

        return main

    async def awaiting(SECONDS: float = 0.0) -> None:
        await asyncio.sleep(SECONDS)
        raise BadInput("awaited", "rule", "remedy")

    def terminated() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal comes first")

    assert run(raising(NameTaken("a name", "is taken", "use another"))) == 1
    assert "a name. is taken. use another.\n" in capsys.readouterr().err
    assert run(raising(NameTaken("a name")), "--traceback") == 1
    assert "Traceback" in capsys.readouterr().err
    assert run(awaiting) == 1
    assert "awaited. rule. remedy." in capsys.readouterr().err
    assert run(raising(KeyboardInterrupt())) == 130
    assert run(terminated) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ZeroDivisionError):
        wb.script.run(raising(ZeroDivisionError()), ())


def test_what_the_command_line_says_goes_before_the_text(
    laboratory: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--output", str(tmp_path / "out"), "--dtype", "bfloat16")
    assert run(laboratory, *words) == 2  # dtype is the text's
    assert run(laboratory, *words[:2], "--seed", "3", "--name", "mine", "--with", "interrupt") == 130
    lab, said = got["lab"], capsys.readouterr()
    assert (lab.name, lab.seed, lab.ownership.closed) == ("mine", 3, True)  # seed by way of the text, which reads SEED
    assert said.out == f"{lab.run_folder}\n"
    assert lab.run_folder.parent == tmp_path / "out" / "mine"
    assert f"wb.open: name='mine' (not 'scripted'), runs='{tmp_path / 'out'}' (not " in said.err
    assert "from the command line\n" in said.err
    events = lab.telemetry.events().set_index("event")["details"]
    assert events["overridden"]["arguments"] == {"runs": None, "name": None}  # no text is recorded
    assert events["script"]["command"][1:] == ["--output", "--seed", "--name", "--with"]
    assert events["script"]["options"] == {"WITH": None, "SEED": 3}


def test_a_script_does_not_take_up_what_another_has_opened(
    laboratory: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_lab("scripted", tmp_path, models={"actor": TINY}, backend="inline", seed=7) as living:
        assert run(laboratory) == 1
        assert "a workbench named 'scripted' runs" in capsys.readouterr().err
        assert not living.ownership.closed
        assert run(laboratory, "--if-exists", "attach") == 0
        assert got["lab"] is living
    assert run(laboratory, "--keep") == 1
    assert "--keep with backend='inline'" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_line_says_how_far_the_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, now_s = _Terminal(), 0.0
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("workbench.display.progress.time", SimpleNamespace(monotonic=lambda: now_s))
    with Iterations("PPO", 3) as shown:
        assert terminal.getvalue() == "\rPPO  0/3\x1b[K"
        now_s = 10.0
        shown.done({"compute_reward/rewards/mean": 0.42, "compute_advantages/reference_kl": 0.0125, "other/loss": 1})
        assert terminal.getvalue().endswith("\rPPO  1/3  ~20 s left  reward 0.42  KL 0.0125\x1b[K")
        with Progress("update_actor", after_s=-1) as bar:
            bar.update(1, 4)
            assert "KL 0.0125  update_actor  1/4 micro-batches" in terminal.getvalue()
        with shown.aside():
            assert terminal.getvalue().endswith("\r\x1b[K")
    assert terminal.getvalue().endswith("\r\x1b[KPPO  1/3  ~20 s left  reward 0.42  KL 0.0125\n")
    assert headlines({"update_sft/first_minibatch/loss": 1.0, "update_sft/loss": 2.0}) == "loss 2"
    assert headlines({"other/loops": 1.0}) == ""


SCRIPT = '''
"""A tiny loop.

More of it.
"""

from typing import Annotated

import workbench as wb


def varied(prompt, response, **row):
    return sum(map(ord, response)) % 97 / 97  # hardly two responses have the same


def main(
    MODEL: Annotated[str, "of all roles"] = "tiny-llama-tied",
    ITERATIONS: int = 2,
) -> None:
    lab = wb.open(
        "first",
        models={"actor": MODEL, "reference": MODEL, "reward": varied},
        training=wb.Training(engine="torch"),
        generation=wb.Generation(engine="transformers", max_model_tokens=192),
        prompts="arithmetic",
    )
    wb.GRPO(lab, prompts=2, samples=2, sampling=wb.Sampling(max_new_tokens=4)).run(ITERATIONS)
    lab.close()


if __name__ == "__main__":
    wb.script.run(main)
'''


def start(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return subprocess.run([sys.executable, path, *words], capture_output=True, text=True, cwd=tmp_path, timeout=300)


@pytest.mark.slow
def test_a_script_in_a_process_of_its_own(tmp_path: Path) -> None:
    ended = start(tmp_path, "--backend", "inline", "--seed", "3", "--track", "tensorboard", "--output", "here")
    assert ended.returncode == 0, ended.stderr
    folder = Path(ended.stdout.strip())
    assert folder.parent == tmp_path / "here" / "first"
    assert [path.name.split(".")[2] for path in (folder / "tensorboard").iterdir()] == ["tfevents"]
    opened, *lines = ended.stderr.splitlines()
    assert opened.startswith("wb.open: seed=3 (not 0), runs='here' (not 'runs'), backend='inline' (not 'ray')")
    assert [line.split("  ")[:2] for line in lines] == [["GRPO", "1/2"], ["GRPO", "2/2"]]  # a plain line an iteration
    assert all("reward " in line for line in lines)
    rewards = TelemetryStore(folder).metrics("compute_reward")
    assert f"reward {rewards['rewards/mean'][1]:.4g}" in lines[1]


@pytest.mark.thorough  # attaching from another process: tests/kernel/test_attach.py
@pytest.mark.slow
def test_a_workbench_that_a_script_keeps_lives_on(tmp_path: Path) -> None:
    ended = start(tmp_path, "--keep", "--iterations", "1", "--quiet", "--device", "cpu")
    assert (ended.returncode, ended.stderr) == (0, "")
    lab = wb.attach("first")
    try:
        assert (lab.iteration, str(lab.run_folder)) == (1, ended.stdout.strip())
        assert start(tmp_path, "--iterations", "1", "--device", "cpu").returncode == 1  # it is not taken up
        assert lab.lead.model == TINY
    finally:
        lab.close()
    assert [row["name"] for row in wb.ls()] == []


TERMINATED = """
import os, signal, time
from pathlib import Path
import workbench as wb
from tests.cases import TINY, tiny_lab

def main() -> None:
    lab = tiny_lab("ended", Path("runs").resolve(), models={"actor": TINY}, backend="ray")
    close = lab.close
    def slowly():
        for second in range(6):
            time.sleep(1)
            print("closing", second, flush=True)
        close()
    object.__setattr__(lab, "close", slowly)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

if __name__ == "__main__":
    wb.script.run(main)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_script_on_ray_that_is_terminated_closes_what_it_has_opened(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TERMINATED)
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root},
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 143, done.stderr
    assert "closing 5" in done.stdout  # Ray's own handler would have ended it after three seconds
    assert "SIGTERM received" not in done.stderr


def test_an_address_where_nothing_listens_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.backends.ray_access.RAYS_TOKEN", tmp_path / "none")  # nor one of the user's clusters
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()  # a process that tests of Ray ran in is joined to their head

    def main() -> None:
        tiny_lab("nowhere", tmp_path / "runs", models={"actor": TINY}, backend="ray")

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.warns(UserWarning, match="is joined without a token"):
        assert run(main, "--address", f"127.0.0.1:{port}", "--device", "cpu") == 1
    said = capsys.readouterr().err
    assert f"no Ray cluster answers at '127.0.0.1:{port}' ([Errno 111] Connection refused)" in said
    assert "ray start --head" in said
    assert not list((tmp_path / "runs").rglob("*.jsonl"))
    assert not list((tmp_path / "runs" / "nowhere").glob("*"))
