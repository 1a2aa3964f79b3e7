"""`wb reshard`: what it prints, what it refuses, and that a large cluster takes seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from workbench import cli
from workbench.errors import BadInput
from workbench.models import resolve
from workbench.resharding.strategies import report

LARGE = LlamaConfig(
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


def ask(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert cli.main(["reshard", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_papers_example(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "--train", "1-4-2", "--generate", "1-2", "--strategy", "hybridflow", "--model", "tiny-llama")
    assert found.keys() == {"ranks", "model_bytes", "sharded_bytes", "groups", "per_rank", "matrix"}
    assert found["ranks"] == 8
    assert found["groups"] == {
        "generation_tensor": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "micro_data": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert [row["rank"] for row in found["per_rank"]] == list(range(8))
    for row in found["per_rank"]:
        assert row.keys() == {"rank", "received_bytes", "sent_bytes", "peak_parameter_bytes", "kept_twice_bytes"}
        assert row["sent_bytes"] == sum(found["matrix"][row["rank"]])
        assert row["received_bytes"] == sum(line[row["rank"]] for line in found["matrix"])
        assert row["kept_twice_bytes"] == 0


def test_bytes_where_every_cut_weight_divides_are_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--train", "1-2-2", "--generate", "1-1", "--model", "tiny-qwen2")
    found = {name: ask(capsys, *options, "--strategy", name) for name in ("hybridflow", "v", "full")}
    cut, model = found["v"]["sharded_bytes"], found["v"]["model_bytes"]
    assert 0 < cut < model  # norms are not cut
    for name in ("hybridflow", "v"):
        assert {row["received_bytes"] for row in found[name]["per_rank"]} == {cut // 2}
    assert {row["received_bytes"] for row in found["full"]["per_rank"]} == {model * 3 // 4}
    assert {row["kept_twice_bytes"] for row in found["full"]["per_rank"]} == {model // 4}
    half = ask(capsys, *options, "--dtype", "bfloat16")
    assert half["model_bytes"] == model // 2


def test_a_model_is_a_name_a_folder_or_a_config_file(tmp_path: Path) -> None:
    folder = resolve("tiny-llama-tied")
    file = tmp_path / "any.json"
    file.write_text((folder / "config.json").read_text())
    found = [report(model, "1-2-1", "1-1", "v") for model in ("tiny-llama-tied", folder, str(folder), file, str(file))]
    assert all(other == found[0] for other in found)
    values = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in values.items() if key not in ("dtype", "torch_dtype")}))
    assert report(file, "1-2-1", "1-1", "v")["model_bytes"] == found[0]["model_bytes"]  # float32 where none is said


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reshard", "--train", "2-1-1", "--generate", "1-1", "--model", "tiny-llama"]) == 0
    shown = capsys.readouterr().out
    assert "generation tensor groups [[0], [1]]" in shown
    assert "peak_parameter_bytes" in shown
    assert "1,452,544" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--train 1-4 --generate 1-2 --model tiny-llama", "--train 1-4. must be P-T-D"),
        ("--train 1-4-x --generate 1-2 --model tiny-llama", "--train 1-4-x. must be P-T-D"),
        ("--train 1-4-1 --generate 1-0 --model tiny-llama", "--generate 1-0. must be PG-TG"),
        ("--train 1-3-1 --generate 1-1 --model tiny-llama", "q_proj.weight: 4 units over t=3"),
        ("--train 1-4-1 --generate 1-3 --model tiny-llama", "t_g=3. must divide t=4"),
        ("--train 1-99999999999-2 --generate 1-2 --model tiny-llama", "use one of 1, 3, 9"),
        ("--train 1-4-20000 --generate 1-2 --model tiny-llama", "at most 8192 ranks. use fewer replicas"),
        ("--train 1-2-1 --generate 1-1 --model {nine}", "9 units over t=2 tensor ranks"),
        ("--train 1-2-1 --generate 1-1 --model {nine}", "use one of t=1, 3"),
        ("--train 1-4-1 --generate 1-2 --model tiny-llama --strategy ring", "must be one of 'hybridflow', 'v', 'full'"),
        ("--train 1-2-1 --generate 1-2 --model tiny-lama", "did you mean 'tiny-llama'?"),
        ("--train 1-2-1 --generate 1-2 --model ./nowhere.json", "no file or folder './nowhere.json'"),
        ("--train 1-2-1 --generate 1-2 --model tiny-llama --dtype half-ish", "must be the name of a torch dtype"),
        ("--train 1-2-1 --generate 1-2 --model {prose}", "not a valid JSON file"),
    ],
)
def test_wrong_input_is_one_clear_line(
    options: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prose.txt").write_text("no configuration")
    nine = LlamaConfig(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, intermediate_size=96)
    (tmp_path / "nine.json").write_text(nine.to_json_string(use_diff=False))
    files = {"prose": tmp_path / "prose.txt", "nine": tmp_path / "nine.json"}
    assert cli.main(["reshard", *options.format(**files).split()]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "must be the config of a language model"),
        ({"model_type": "llama", "num_attention_heads": 0}, "no model loads from"),
        ({"model_type": "llama", "hidden_size": "wide"}, "expected int, got str"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"model_type": "llama", "num_hidden_layers": 2, "dtype": "float7"}, "float7"),
        ({"model_type": "no-such-family"}, "no model loads from"),
        ([1], "no model loads from"),
    ],
)
def test_a_config_that_makes_no_model_is_said(config: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(BadInput, match=said):
        report(file, "1-2-1", "1-1", "v")


@pytest.mark.parametrize(
    "strategy", ["hybridflow", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("v", "full"))]
)
def test_1024_ranks_of_a_70b_model_take_seconds(tmp_path: Path, strategy: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(LARGE.to_json_string(use_diff=False))
    start = time.process_time()
    found = report(file, "8-8-16", "2-4", strategy)
    assert time.process_time() - start < 120  # measured: 1 to 3 s
    assert found["ranks"] == len(found["matrix"]) == 1024
    assert found["model_bytes"] == 141_107_412_992  # bfloat16
