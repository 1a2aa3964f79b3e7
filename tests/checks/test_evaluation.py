"""Held-out evaluation: the numbers by hand, several data sets, a loop that calls it, and a refreshed reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import workbench as wb
from tests.calculator import sums
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged, ragged_in
from workbench.checks.evaluation import _rows, _scores, majority_at_k, summary
from workbench.conversations.rows import row_table
from workbench.errors import BadInput, RewardError
from workbench.workers.roles import reference
from workbench.workers.weight_exchange import uncut_weights

SHORT = wb.Sampling(max_new_tokens=6)
SYNC = "generate_sequences/sync_gap/mean"


def length(prompt: str, response: str, **row: Any) -> float:
    return len(response) / 10


def letters(prompt: str, response: str, **row: Any) -> list[float] | float:
    return float(sum(c.isalpha() for c in response) > 2)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": length}
    with tiny_lab("evaluate", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def responses(rewards: Any, threshold: float = 1.0, **columns: Any) -> pd.DataFrame:
    """What `summary` reads of responses that are all valid and finished, but for what is said."""
    scores = _scores(rewards)
    known = {"reward": scores, "passed": scores >= threshold, "valid": np.ones(len(scores), dtype=bool)}
    return pd.DataFrame({**known, "response_tokens": 1, "finished": True, **columns})


def test_the_numbers_of_a_data_set() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 0.0])  # three prompts, two samples each
    finished = [True, True, False, True, True, True]
    row = summary(responses(rewards, response_tokens=[1, 2, 3, 4, 5, 6], finished=finished), 2)
    assert row["reward_mean"] == pytest.approx(3.5 / 6)
    means = [0.5, 1.25, 0.0]
    assert row["reward_standard_error"] == pytest.approx(np.std(means, ddof=1) / math.sqrt(3))
    assert row["pass@1"] == pytest.approx(2 / 6)
    assert row["pass@2"] == pytest.approx(2 / 3)
    assert row["response_tokens_mean"] == 3.5
    assert row["truncated_fraction"] == pytest.approx(1 / 6)
    one = summary(responses(torch.ones(6)), 6)
    assert [name for name in one if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert math.isnan(one["reward_standard_error"])


def test_a_prompt_counts_in_each_at_k_with_the_samples_that_did_not_fail() -> None:
    """Four prompts of four samples, two always and two never solved: each k says one half, whichever rewards failed."""
    valid = np.ones(16, dtype=bool)
    valid[[5, 8, 9, 10]] = False  # one of the second prompt, three of the third
    rewards = torch.tensor([1.0] * 4 + [0.0] * 8 + [1.0] * 4)
    row = summary(responses(rewards, valid=valid, answer="a", selection_score=np.arange(16.0)), 4)
    assert [row[f"{of}@{k}"] for k in (1, 2, 4) for of in ("pass", "majority", "best_of")] == [0.5] * 9
    none = summary(responses(rewards[:8], valid=np.repeat([True, False], 4)), 4)  # a prompt with none is nowhere
    assert none["pass@1"] == none["pass@4"] == 1.0 and none["failed_fraction"] == 0.5


def test_a_reward_at_the_threshold_passes() -> None:
    for threshold in (0.9, 0.7, 0.3, 0.6):
        for column in (torch.full((8,), threshold), Ragged.of([[0.0, threshold]] * 8, torch.float32)):
            assert summary(responses(column, threshold), 4)["pass@1"] == 1.0
            assert summary(responses(column, threshold + 1e-6), 4)["pass@1"] == 0.0
    assert summary(responses(torch.tensor([0, 1]), 0.5), 2)["pass@1"] == 0.5  # whole numbers


def test_data_sets_by_name(lab: wb.Workbench) -> None:
    mine = [{"prompt": "Say a."}, {"prompt": "Say b, and c."}]
    frame = lab.evaluate(
        {"sums": {"source": "arithmetic", "max_prompt_tokens": 100}, "mine": mine}, samples=3, sampling=SHORT,
        reward=letters, n=5,
    )  # fmt: skip
    assert frame.index.tolist() == ["sums", "mine"]
    assert frame["prompts"].tolist() == [5, 2]
    assert frame["samples"].tolist() == [3, 3]
    assert frame["pass@1"].tolist() == pytest.approx(frame["reward_mean"].tolist())  # of a reward that is 0 or 1
    assert (frame["pass@3"] >= frame["pass@2"]).all()
    again = lab.evaluate({"mine": mine}, samples=3, sampling=SHORT, reward=letters)
    assert again.loc["mine"].to_dict() == frame.loc["mine"].to_dict()  # the same seed, the same responses
    other = lab.evaluate({"mine": mine}, samples=3, sampling=SHORT, seed=1)
    assert other.loc["mine", "reward_mean"] != lab.evaluate(mine, samples=3, sampling=SHORT).iloc[0]["reward_mean"]
    recorded = lab.metrics("evaluate")
    assert recorded["mine/pass@3"].iloc[0] == frame.loc["mine", "pass@3"]
    assert recorded["iteration"].tolist() == [lab.iteration] * 4


def test_rows_say_what_became_of_each_response(lab: wb.Workbench) -> None:
    mine = [{"prompt": "Say a."}, {"prompt": "Say b, and c."}]

    def tidy(prompt: str, response: str) -> float:
        return float(len(response) % 2)

    def first_letter(response: str) -> str | None:
        return response[0] if response[:1].isalpha() else None

    options: dict[str, Any] = {"samples": 3, "sampling": SHORT, "reward": {"right": letters, "form": (tidy, 0.0)}}
    found = lab.evaluate({"mine": mine}, answer=first_letter, select=length, **options)
    rows = found.rows
    assert rows[["prompt_index", "sample"]].to_numpy().tolist() == [[p, s] for p in (0, 1) for s in (0, 1, 2)]
    assert rows["prompt"].tolist() == ["Say a."] * 3 + ["Say b, and c."] * 3 and set(rows["data"]) == {"mine"}
    assert rows["reward"].tolist() == [letters("", text) for text in rows["response"]]
    assert rows["reward/form"].tolist() == [tidy("", text) for text in rows["response"]]
    assert rows["selection_score"].tolist() == pytest.approx([length("", text) for text in rows["response"]])
    assert rows["passed"].tolist() == (rows["reward"] >= 1).tolist() and rows["valid"].all()
    one = found.loc["mine"]
    assert one["reward/form_mean"] == rows["reward/form"].mean()
    assert one["best_of@1"] == pytest.approx(one["reward_mean"]) and one["majority@1"] == pytest.approx(one["pass@1"])
    answers = [first_letter(text) for text in rows["response"]]
    assert rows["answer"].tolist() == answers and None in answers  # which is no vote
    votes = [majority_at_k(answers[at : at + 3], rows["passed"].tolist()[at : at + 3], 3) for at in (0, 3)]
    assert one["majority@3"] == pytest.approx(np.mean(votes))
    longest = [group.loc[group["selection_score"].idxmax(), "reward"] for _, group in rows.groupby("prompt_index")]
    assert one["best_of@3"] == pytest.approx(np.mean(longest))
    assert one["response_tokens_median"] == rows["response_tokens"].median()
    assert type(found.head(1)) is not type(found) and type(found.head(1)).__name__ == "DataFrame"
    again = lab.evaluate({"mine": mine}, **options)
    assert again.rows["response"].tolist() == rows["response"].tolist()
    compared = lab.compare_evaluations(again, found)
    assert not compared.differs and compared.df.loc["mine", "difference"] == 0.0 and compared.flipped.empty


def test_a_response_whose_selector_failed_is_not_chosen(lab: wb.Workbench) -> None:
    def shortest(prompt: str, response: str) -> float:
        return -1.0 - len(response)  # below the 0 of a row that failed

    def fails_where_good(prompt: str, response: str) -> float:
        if letters(prompt, response):
            raise ValueError("no letters")
        return shortest(prompt, response)

    options: dict[str, Any] = {"n": 8, "samples": 4, "sampling": SHORT, "reward": letters}
    fine = lab.evaluate("arithmetic", select=shortest, **options)
    assert fine["selection_failed_fraction"].iloc[0] == 0
    passed = fine.rows["passed"]
    assert 0 < passed.mean() <= 0.2
    found = lab.evaluate("arithmetic", select=fails_where_good, **options)
    assert found["selection_failed_fraction"].iloc[0] == passed.mean() and found.rows["valid"].all()
    assert found.rows["selection_score"].isna().tolist() == passed.tolist()
    assert found["best_of@1"].iloc[0] == found["best_of@2"].iloc[0] == 0.0  # of those that were scored
    options |= {"reward": fails_where_good, "select": None, "most_failed": 0.0}
    with expect_error(RewardError, value="fails_where_good"):
        lab.evaluate("arithmetic", **options)
    assert lab.evaluate("arithmetic", **{**options, "most_failed": 1.0})["failed_fraction"].iloc[0] == passed.mean()


def test_a_reward_model_chooses_the_best_of_n(tmp_path: Path) -> None:
    models = {"actor": TINY, "reward": TINY}
    with tiny_lab("chosen", tmp_path, backend="inline", models=models) as lab:
        found = lab.evaluate("arithmetic/test", n=4, samples=4, sampling=SHORT, reward=length, select="role")
        by_model = lab.evaluate("arithmetic/test", n=4, samples=4, sampling=SHORT)
    assert found.rows["selection_score"].tolist() == by_model.rows["reward"].tolist()
    best = found.rows.loc[found.rows.groupby("prompt_index")["selection_score"].idxmax(), "reward"]
    assert found["best_of@4"].iloc[0] == pytest.approx(best.mean())


def test_a_stream_that_is_shorter_than_n_counts_each_row_once(lab: wb.Workbench, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}?"}}\n' for n in range(5)))
    source = {"source": str(path), "stream": True, "max_prompt_tokens": 100}
    for n, prompts in ((8, 5), (3, 3)):
        found = lab.evaluate({"stream": source}, n=n, samples=2, sampling=SHORT)
        assert found["prompts"].iloc[0] == prompts
        assert found.rows["prompt"].tolist() == [f"{i}?" for i in range(prompts) for _ in range(2)]


def test_tokens_of_an_environment_are_not_the_policys(lab: wb.Workbench) -> None:
    frame = lab.evaluate("arithmetic/test", n=4, samples=2, sampling=wb.Sampling(**sums()))
    recorded = lab.metrics("evaluate/stages")
    assert recorded["observation_tokens/mean"].dropna().iloc[-1] > 0
    assert frame["response_tokens_mean"].iloc[0] == recorded["response_tokens/mean"].dropna().iloc[-1]


def test_an_algorithm_evaluates_on_its_way(lab: wb.Workbench) -> None:
    before = len(lab.metrics("evaluate"))
    grpo = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT)
    seen: list[int] = []

    def look() -> None:
        lab.evaluate("arithmetic/test", n=2, samples=1, sampling=SHORT)
        seen.append(lab.iteration)

    history = grpo.run(3, evaluate=look, every=2)
    assert seen == [history.index[1]]
    assert len(lab.metrics("evaluate")) == before + 1
    with expect_error(BadInput, value="every=0"):
        grpo.run(1, every=0)


def test_training_sees_nothing_of_it_to_the_bit(tmp_path: Path) -> None:
    histories = []
    for name, evaluates in (("without", False), ("with", True)):
        with tiny_lab(name, tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
            algorithm = wb.RLOO(lab, prompts=2, samples=4, kl_coefficient=0.0, sampling=SHORT)

            def look(lab: wb.Workbench = lab) -> None:
                lab.evaluate("arithmetic/test", n=2, samples=2, sampling=wb.Sampling(max_new_tokens=9, temperature=0.5))

            histories.append(algorithm.run(3, evaluate=look if evaluates else None))
            spans = lab.spans()
    assert {"evaluate/generate_sequences", "evaluate/compute_reward", "generate_sequences"} <= set(spans["stage"])
    assert "evaluate/generate_sequences" in repr(lab.timeline(None).sums(0, None).stages)
    without, having = (one.drop(columns=SYNC, errors="ignore") for one in histories)  # evaluation has synced already
    pd.testing.assert_frame_equal(without, having, check_exact=True)
    assert without["update_actor/grad_norm"].min() > 0


def test_it_prints_what_one_looks_at_and_how_it_was_sampled(lab: wb.Workbench) -> None:
    found = lab.evaluate("arithmetic/test", n=2, samples=2, sampling=SHORT, seed=3)
    printed = repr(found)
    assert "±" in printed and "pass@2" in printed and "..." not in printed and ".rows" in printed
    assert f"samples=2, seed=3, temperature=1.0, top_p=1.0, max_new_tokens={SHORT.max_new_tokens}, reward=" in printed
    other = lab.evaluate(
        "arithmetic/test", n=2, samples=2, sampling=SHORT, seed=3, reward=lambda prompt, response, **row: 1.0
    )
    assert list(lab.compare_evaluations(found, other).differs) == ["reward"]


def test_what_cannot_be_evaluated(lab: wb.Workbench) -> None:
    for options, message in (
        ({"samples": 0}, "samples=0"),
        ({"n": 0}, "n=0"),
        ({"sampling": {"top_p": 1}}, "wb.Sampling"),
        ({"reward": "length"}, "must be a function"),
        ({"threshold": "1"}, "threshold='1'"),
        ({"data": {}}, "at least one data set"),
        ({"answer": "x"}, "answer='x'"),
        ({"answer": lambda response: [response]}, "answer= raised TypeError"),
        ({"select": "model"}, "select='model'"),
        ({"data": "arithmetics"}, "arithmetics"),
    ):
        with pytest.raises(Exception, match=message):
            lab.evaluate(**{"data": "arithmetic", "n": 1, **options})  # type: ignore[arg-type]


def test_a_reference_that_takes_over_the_actor(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.refresh_reference()
    batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=6))
    with lab.reuse():
        old = lab.reference.compute_ref_log_prob(batch)
        scored = lab.compute_advantages(lab.critic.compute_values(lab.reward.compute_reward(batch)))
        lab.actor.update_actor(scored)
        assert lab.check("kl")["kl"].verdict == "not applicable"
        with lab.kept("reference"):
            lab.refresh_reference()
            new = lab.reference.compute_ref_log_prob(batch)  # not from the store: it has other weights
            assert lab.check("kl")["kl"].verdict == "ok"
        assert lab.check("kl")["kl"].verdict == "not applicable"  # back at its old weights
    assert not new.df(["ref_log_prob"]).equals(old.df(["ref_log_prob"]))
    assert lab.reference.compute_ref_log_prob(batch).df(["ref_log_prob"]).equals(old.df(["ref_log_prob"]))
    lab.refresh_reference()
    assert lab.check("kl")["kl"].verdict == "ok"
    assert lab.reference.weight_digests() == lab.actor.weight_digests()
    before = lab.reference.weight_digests()
    another = uncut_weights({"another.weight": (1,)}, "float32")
    monkeypatch.setattr(reference, "weights_of", lambda *of_model: another)
    with expect_error(BadInput, value=r"weight 'another\.weight'", rule="of its own architecture"):
        lab.refresh_reference()
    assert lab.reference.weight_digests() == before
    assert lab.topology()["host_published_bytes"].max() == 0


def test_a_data_set_is_read_as_that_of_training_and_comparisons_say_where_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    brief = wb.ChatFormat(system="Be brief.")
    mine = [{"prompt": "Say a<|tool|>."}, {"prompt": "Say b, and c."}]
    models: dict[str, Any] = {"actor": TINY, "reward": vowels}
    options: dict[str, Any] = {"samples": 1, "sampling": SHORT}
    prompts = {"source": "arithmetic", "max_prompt_tokens": 200, "chat": brief, "control_tokens": True}
    with tiny_lab("chats", tmp_path, backend="inline", models=models, prompts=prompts) as lab:
        as_trained = lab.evaluate({"mine": mine}, **options)
        told = lab.evaluate({"mine": {"source": mine, "chat": brief}, "more": mine[:1]}, **options)
        other = {"source": mine, "chat": True, "control_tokens": False}
        plain = lab.evaluate({"mine": other}, **options)
        tool: Any = lab.runner.batches.tokenizer.convert_tokens_to_ids("<|tool|>")
        read = ([row.prompt_ids.count(tool) for row in _rows(lab, one, 1)] for one in (mine, other))
        assert list(read) == [[1], [0]]
        long = [{"prompt": "a " * 150}, *mine]  # longer than those that training reads
        assert [row.index for row in _rows(lab, long, None)] == [1, 2]
        assert "evaluate: 1 over 200 tokens dropped" in capsys.readouterr().out
        cut = {"source": long, "max_prompt_tokens": 100, "overlong": "cut"}
        assert [row.index for row in _rows(lab, cut, None)] == [0, 1, 2]
        (by_hand,) = ragged_in(row_table(lab, mine[0]["prompt"]), "prompt_ids").rows()
        assert by_hand.tolist() == _rows(lab, mine, 1)[0].prompt_ids
    assert as_trained.rows["response"].tolist() == told.rows["response"].tolist()[:2]
    assert as_trained.rows["response"].tolist() != plain.rows["response"].tolist()
    assert not wb.Workbench.compare_evaluations(as_trained, told).differs
    found = wb.Workbench.compare_evaluations(as_trained, plain)
    assert found.differs == {
        "data/mine/chat/system": ("Be brief.", None), "data/mine/chat": (None, True),
        "data/mine/control_tokens": (True, False),
    }  # fmt: skip
    assert "data/mine/chat/system=Be brief." in repr(as_trained) and "chat" not in repr(found.df)
