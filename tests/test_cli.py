from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench import cli
from workbench.models.resolve import tiny_folder

HEAVY = ("torch", "transformers", "ray", "deepspeed", "vllm")
LLAMAS = ",".join(f"{role}=llama-7b" for role in ("actor", "critic", "reference", "reward"))


def test_what_computes_nothing_imports_no_engine(tmp_path: Path, subtests: pytest.Subtests) -> None:
    notebook = Path(__file__).parents[1] / "notebooks" / "101_ppo_by_hand.ipynb"
    for words in (
        ["ls"], ["doctor"], ["reshard", "--model", str(tiny_folder(TINY)), "--train", "1-2-1", "--generate", "1-1"],
        ["map", "--models", LLAMAS, "--gpus", "8"], ["export", str(notebook), "-o", str(tmp_path / "script.py")],
    ):  # fmt: skip
        code = f"import sys; from workbench import cli; cli.main({words}); "
        code += f"print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
        with subtests.test(words=words[0]):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert done.stderr.splitlines()[-1] == ""


def test_trace_writes_what_happened_in_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_lab("traced", tmp_path, backend="inline", models={"actor": TINY}) as lab:
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
        folder = lab.run_folder
    target = tmp_path / "trace.json"
    assert cli.main(["trace", str(folder), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    names = {event["name"] for event in json.loads(target.read_text())["traceEvents"]}
    assert "generate_sequences" in names


def test_evaluate_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = wb.Sampling(max_new_tokens=5)
    prompts = {"source": "arithmetic", "max_prompt_tokens": 120, "chat": wb.ChatFormat(system="Be brief.")}
    with tiny_lab(
        "saved", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}, prompts=prompts
    ) as lab:
        lab.save(tmp_path / "saved-here", models=False)
        expected = lab.evaluate("arithmetic/test", n=2, samples=2, sampling=sampling, seed=5)
    before = len(wb.runs(str(tmp_path)))
    asked = ["evaluate", str(tmp_path / "saved-here"), "arithmetic/test", "--n", "2", "--samples", "2", "--seed", "5",
             "--max-new-tokens", "5"]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert cli.main([*asked, "--json", "--rows", str(tmp_path / "rows.jsonl")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["data"]["arithmetic/test"]["reward_mean"] == pytest.approx(expected["reward_mean"].iloc[0], rel=1e-6)
    assert answer["conditions"]["sampling/max_new_tokens"] == 5 and "vowels" in answer["conditions"]["reward"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["response"] for row in rows] == expected.rows["response"].tolist()
    assert answer["conditions"]["data/arithmetic/test/chat/system"] == "Be brief."
    assert cli.main([*asked[:2], *asked[3:], "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["data"]) == ["training prompts"]
    assert not (tmp_path / "runs").exists() and len(wb.runs(str(tmp_path))) == before  # evaluations are no runs
    assert cli.main([*asked, "--reward", "arithmetics"]) == 1
    assert "--reward arithmetic" in capsys.readouterr().err
    assert cli.main([*asked, "--top-p", "3"]) == 1
    assert "top_p" in capsys.readouterr().err


def test_trace_of_what_is_no_run_says_what_one_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (tmp_path, tmp_path / "nowhere"):
        assert cli.main(["trace", str(wrong), "-o", str(tmp_path / "trace.json")]) == 1
        said = capsys.readouterr().err
        assert f"{wrong} has no spans" in said
        assert "spans.jsonl after the first stage" in said
    assert list(tmp_path.iterdir()) == []


def test_map_answers_with_the_keys_that_scripts_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["map", "--algorithm", "ppo", "--models", LLAMAS, "--gpus", "16", "--hardware", "a100-80g"]
    assert cli.main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) >= {"best", "alternatives", "placements_considered", "search_s", "exact"}
    assert set(answer["best"]) >= {"sets", "iteration_s", "throughput_tokens_per_s", "stage_s", "memory_bytes"}
    assert all(set(one) >= {"roles", "devices", "layouts"} for one in answer["best"]["sets"])
    assert (answer["placements_considered"], answer["exact"], len(answer["alternatives"])) == (15, True, 4)
    assert cli.main([*asked, "--placement", "split"]) == 0
    assert "1 placements" not in (said := capsys.readouterr().out)
    assert "tokens/s" in said
    assert cli.main([*asked, "--json", "--response", "256,1792", "--dependencies", "--dtype", "bfloat16"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["best"]["iteration_s"] > answer["best"]["iteration_s"]
    )  # the longest row ends it
    assert cli.main([*asked, "--response", "256;512"]) == 1
    assert "--response 256;512. it must be a length in tokens, or several" in capsys.readouterr().err
    assert cli.main(["map", "--models", "actor", "--gpus", "8"]) == 1
    assert "'actor' must be ROLE=MODEL" in capsys.readouterr().err


def test_a_reader_that_wants_no_more_is_no_error() -> None:
    map_ = "map --algorithm ppo --models actor=llama-7b,critic=llama-7b,reference=llama-7b,reward=llama-7b --gpus 8"
    told = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m workbench {map_} | true"], capture_output=True, text=True
    )
    assert (told.returncode, told.stderr) == (1, "")
