from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pandas as pd
import pytest

from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.data import sources
from workbench.data.example_rows import pair
from workbench.data.sources import read_rows
from workbench.errors import BadInput, MissingDependency, ModelUnavailable


def test_texts_become_rows_and_dicts_are_copied() -> None:
    assert read_rows(["a", "b"]) == [{"prompt": "a"}, {"prompt": "b"}]
    given: list[dict[str, Any]] = [{"question": "a", "answer": 1}, {"question": "b"}]
    rows = read_rows(given)
    assert rows == given
    rows[0]["answer"] = 2
    assert given[0]["answer"] == 1
    assert read_rows([{"prompt": "a", 3: "b"}]) == [{"prompt": "a", "3": "b"}]  # names of columns are texts


def records(frame: pd.DataFrame) -> Any:
    return frame.to_dict("records")


def test_rows_of_a_parquet_file_in_verls_format(tmp_path: Path) -> None:
    """What pandas makes of list columns: arrays of objects, also inside of dicts. They reach prompts and rewards."""
    frame = pd.DataFrame(
        {
            "data_source": ["sums"] * 4,
            "prompt": [np.array([{"role": "user", "content": f"{i} + 1?"}], dtype=object) for i in range(4)],
            "reward_model": [{"style": "rule", "ground_truth": str(i + 1)} for i in range(4)],
            "extra_info": [{"index": np.int64(i), "tags": np.array(["easy", "sum"], dtype=object)} for i in range(4)],
        }
    )
    rows = read_rows(records(frame))
    assert rows[3]["prompt"] == [{"role": "user", "content": "3 + 1?"}]
    assert (
        rows[3]["extra_info"] == {"index": 3, "tags": ["easy", "sum"]} and type(rows[3]["extra_info"]["index"]) is int
    )

    def reward(prompt: str, response: str, reward_model: dict[str, str], extra_info: dict[str, Any]) -> float:
        return float(reward_model["ground_truth"]) + len(extra_info["tags"])

    prompts = {"source": records(frame), "shuffle": False}
    models = {"actor": TINY, "reward": reward}
    with tiny_lab("parquet", tmp_path, backend="inline", models=models, prompts=prompts) as lab:
        batch = lab.reward.compute_reward(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=2)).fetch()
    assert batch["prompt"] == [f"{i} + 1?" for i in range(4)]
    assert batch["rewards"].tolist() == [3.0, 4.0, 5.0, 6.0]
    pairs = pd.DataFrame(
        {
            "chosen": [np.array([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])],
            "rejected": [np.array([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No"}])],
        }
    )
    read = pair(read_rows(records(pairs))[0], "row 0")
    assert (read.prompt, read.answers) == ([{"role": "user", "content": "Hi"}], ("Hello", "No"))


@pytest.mark.parametrize("as_path", [True, False])
def test_jsonl_files_with_blank_lines_and_a_byte_order_mark(tmp_path: Path, as_path: bool) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('\ufeff{"prompt": "naïve\\u2028 字"}\n\n{"prompt": "b\u2028c", "n": 1}', encoding="utf-8")
    rows = read_rows(path if as_path else str(path))
    assert rows == [{"prompt": "naïve\u2028 字"}, {"prompt": "b\u2028c", "n": 1}]


def test_names_under_datasets() -> None:
    assert len(read_rows("arithmetic")) == len(read_rows("arithmetic/train")) == 2000
    assert len(read_rows("arithmetic/test")) == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', r"some.jsonl, line 2: Expecting value"),
        (b'{"prompt": "a"}\n\n["b"]\n', r"some.jsonl, line 3 is of type list"),
        (b'{"prompt": "\xff"}\n', r"some.jsonl, line 1: 'utf-8' codec"),
        (b"\n\n", r"some.jsonl holds no rows"),
    ],
)
def test_malformed_files_are_named_with_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read_rows(path)


WRONG: list[tuple[Any, str]] = [
    ([], "a list holds no rows"),
    ([1], "row 0 is of type int"),
    (["a", {"prompt": "b"}], "row 1 is of type dict, row 0 of type str"),
    ([{"prompt": "a"}, None], "row 1 is of type NoneType, row 0 of type dict"),
    ({"prompt": ["a"]}, r"a source of type dict\..*to_dict\('records'\)"),
    ("nowhere.jsonl", r"no file 'nowhere.jsonl'\. relative paths start at"),
    ("data/some.parquet", "no file 'data/some.parquet'"),
    (Path("some.csv"), "no file 'some.csv'"),
    ("some.txt", r"is not a file of rows\. its name must end in \.jsonl"),
    ("arithmatic", r"datasets/ holds 'arithmetic'.* did you mean 'arithmetic'\?"),
    ("arithmetic/dev", r"datasets/arithmetic holds 'arithmetic/test', 'arithmetic/train'"),
    ("What is 2 + 3?", "no data set 'What is 2"),
]


def test_wrong_sources_say_what_would_be_right(subtests: pytest.Subtests) -> None:
    for source, message in WRONG:
        with subtests.test(source=source, message=message), pytest.raises(BadInput, match=message):
            read_rows(source)


def test_a_hub_id_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with expect_error(MissingDependency, remedy=r"'\.\[data\]'.*pip install datasets"):
        read_rows("openai/gsm8k")
    # What an import finds in a checkout's root where the library is not installed: the folder datasets/.
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__path__=[str(sources.DATASETS)]))
    with expect_error(MissingDependency, remedy="pip install datasets"):
        read_rows("openai/gsm8k")


class Hub:
    """Stands for the `datasets` library and the hub behind it, which no test may reach for; it keeps the calls."""

    def __init__(self, default: str | None, names: list[str]) -> None:
        self.default, self.names, self.calls = default, names, list[Any]()

    def get_dataset_default_config_name(self, repo: str) -> str | None:
        return self.default

    def get_dataset_config_names(self, repo: str) -> list[str]:
        return self.names

    def load_dataset(self, repo: str, config: str, *, split: str) -> list[dict[str, str]]:
        self.calls.append((repo, config, split))
        if split not in ("train", "test"):
            raise ValueError(f'Unknown split "{split}". Should be one of [train, test].')
        return [{"question": "1 + 1?", "answer": "#### 2"}]


@pytest.mark.parametrize(
    ("source", "default", "call"),
    [
        ("openai/gsm8k", None, ("openai/gsm8k", "main", "train")),
        ("openai/gsm8k/test", None, ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k:socratic/test", None, ("openai/gsm8k", "socratic", "test")),
        ("Anthropic/hh-rlhf", "default", ("Anthropic/hh-rlhf", "default", "train")),
    ],
)
def test_hub_ids_name_configuration_and_split(
    source: str, default: str | None, call: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(default, ["main", "socratic"])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    assert read_rows(source) == [{"question": "1 + 1?", "answer": "#### 2"}]
    assert hub.calls == [call]


def test_hub_data_sets_that_leave_a_choice_or_lack_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub(None, ["easy", "hard"]))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    with expect_error(BadInput, rule="configurations easy, hard", remedy="write 'some/sums:easy'"):
        read_rows("some/sums")
    with expect_error(BadInput, value="no 'some/sums:easy/dev'", rule="Unknown split"):
        read_rows("some/sums:easy/dev")


def test_no_network_is_said_at_once_and_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, timeout: float, **__: Any) -> None:
        assert timeout <= 5
        raise ConnectionError("Name or service not known")

    hub = Hub(None, ["main"])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with expect_error(ModelUnavailable, value="Name or service not known", remedy=r"local \.jsonl file.*'arithmetic'"):
        read_rows("openai/gsm8k")
    assert hub.calls == []


def test_declared_offline_the_library_answers_from_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub(None, ["main"]))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert len(read_rows("openai/gsm8k")) == 1


def test_a_misspelt_set_of_ours_does_not_go_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: object) -> object:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("workbench.data.sources._from_hub", fetched)
    with expect_error(
        BadInput, value="no data set 'arithmetc/test'", remedy="did you mean 'arithmetic/test'.*'arithmetc/test/train'"
    ):
        read_rows("arithmetc/test")
    for hub in ("openai/gsm8k", "arithmetc/test/train", "arithmetc/other"):
        with pytest.raises(AssertionError, match="the network"):
            read_rows(hub)
