"""Each wrong input is refused before a process starts or a stage runs, and the message says what to do."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, ModelUnavailable, NotFound, UnknownColumn, WorkbenchError
from workbench.support.named_fields import FIELDS_OF

FOUR: dict[str, Any] = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}


OPENINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"models": {**FOUR, "critik": TINY}}, BadInput, r"unknown role 'critik'.*write 'critic' \(the nearest\)"),
    ({"models": FOUR, "restore": "folder"}, BadInput, r"write wb\.restore\(path\)"),
    ({"models": FOUR, "beta": 0.1}, BadInput, r"write wb\.GRPO\(kl_coefficient=\.\.\.\)"),
    ({"models": FOUR, "num_generations": 4}, BadInput, r"write wb\.GRPO\(samples=\.\.\.\)"),
    ({"models": FOUR, "batch_size": 4}, BadInput, r"write wb\.GRPO\(prompts=\.\.\.\)"),
    ({"models": FOUR, "source": ["1+1="]}, BadInput, r"write wb\.open\(\.\.\., prompts=\.\.\.\)"),
    ({"models": FOUR, "dataset": ["1+1="]}, BadInput, r"write wb\.open\(\.\.\., prompts=\.\.\.\)"),
    ({"models": FOUR, "max_completion_length": 8}, BadInput, r"write wb\.Sampling\(max_new_tokens=\.\.\.\)"),
    ({"models": {"reward": vowels}}, BadInput, "without a model.*declare an actor"),
    ({"models": {"actr": TINY}}, BadInput, "unknown role 'actr'"),
    ({"models": TINY}, BadInput, "must map roles to models"),
    ({"device": "cuda"}, BadInput, "torch finds no GPU"),
    ({"models": {**FOUR, "actor": 7}}, BadInput, r"models\['actor'\]=7"),
    ({"models": {**FOUR, "critic": vowels}}, BadInput, "only reward and cost can be one"),
    ({"models": {**FOUR, "actor": "smolm2-135m"}}, ModelUnavailable, "smollm2-135m"),
    ({"models": {**FOUR, "critic": "/no/such/folder"}}, ModelUnavailable, "/no/such/folder"),
    ({"placement": wb.Placement.colocate(9), "devices": 2}, BadInput, "devices=9"),
    ({"placement": wb.Placement.colocate(2), "devices": 2}, BadInput, "backend='inline'"),
    ({"placement": wb.Placement.standalone(actor=1)}, BadInput, "'critic' has no pool"),
    ({"backend": "slurm"}, BadInput, "must be one of 'ray', 'inline'"),
    ({"if_exists": "keep"}, BadInput, "must be one of 'attach', 'replace', 'error'"),
    ({"share_memory": "sometimes"}, BadInput, "must be one of False, True, 'always'"),
    ({"prompts": "arithmetics"}, WorkbenchError, "arithmetic"),
    ({"prompts": []}, BadInput, "at least one row"),
]


def test_opening(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for options, kind, message in OPENINGS:
        with subtests.test(options=options, kind=kind):
            with pytest.raises(kind, match=message):
                tiny_lab("wrong", tmp_path, **{"backend": "inline", **options})
            assert wb.ls() == []


def test_a_wrong_name_is_refused_before_another_model_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    models = {"actor": "smollm2-135m", "critic": "/no/such/folder", "reward": vowels}
    with expect_error(ModelUnavailable, value="/no/such/folder"):
        tiny_lab("wrong", tmp_path, models=models, backend="inline")
    assert not [*tmp_path.glob("models/smollm2*")]


SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: wb.Training(schedule="cosine"), "total_steps"),
    (lambda: wb.Model(), "give exactly one of the two"),
]


def test_settings(subtests: pytest.Subtests) -> None:
    for make, message in SETTINGS:
        with subtests.test(make=make, message=message), pytest.raises(BadInput, match=message):
            make()


def test_a_malformed_line_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": \n')
    with expect_error(BadInput, value=r"mine\.jsonl.*2"):
        tiny_lab("wrong", tmp_path, backend="inline", prompts=file)


def test_an_engine_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "deepspeed" else find(name, *a))
    with expect_error(wb.errors.MissingDependency, value="deepspeed", remedy="pip install.*engine='torch'"):
        tiny_lab("wrong", tmp_path, engine="deepspeed", backend="inline")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("inputs", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


@pytest.fixture(scope="module")
def batch(lab: wb.Workbench) -> wb.Batch:
    return lab.actor.generate_sequences(lab.prompts.next(6), max_new_tokens=4)


def test_a_missing_column_names_the_stage_that_makes_it(lab: wb.Workbench, batch: wb.Batch) -> None:
    with expect_error(
        UnknownColumn, value="update_actor reads column 'old_log_prob'", remedy="run actor.compute_log_prob"
    ):
        lab.actor.update_actor(batch)
    with expect_error(UnknownColumn, value="'values'"):
        lab.compute_advantages(lab.reward.compute_reward(batch))
    with expect_error(UnknownColumn, value="nonsense"):
        batch.fetch(["nonsense"])


STAGE_ARGUMENTS: list[tuple[Callable[[wb.Workbench, wb.Batch], Any], str]] = [
    (lambda lab, batch: lab.actor.generate_sequences(), "the first argument must be a batch"),
    (lambda lab, batch: lab.actor.generate_sequences([1, 2]), "the first argument must be a batch"),
    (
        lambda lab, batch: lab.wait(3),  # type: ignore[call-arg]
        r"lab\.wait\(3\).*it takes no arguments.*write lab\.wait\(\)",
    ),
    (
        lambda lab, batch: lab.demonstrations(),  # type: ignore[call-arg]
        r"lab\.demonstrations\(\) without source.*write .*source=",
    ),
    (
        lambda lab, batch: lab.actor.generate_sequences(batch, temprature=1.0),
        "temprature.*it takes .*write temperature=",
    ),
    (lambda lab, batch: lab.actor.generate_sequences(batch, seed="a"), "seed='a'.*whole number"),
    (lambda lab, batch: lab.actor.generate_sequences(batch, max_new_tokens="32"), "'32'.*must be a whole number"),
    (lambda lab, batch: lab.reward.compute_reward(batch, function=lambda prompts: 0.0), "takes no 'prompt'"),
    (
        lambda lab, batch: lab.compute_advantages(lab.reward.compute_reward(batch), estimator="grpo"),
        "one response per prompt.*samples=2",
    ),
    (lambda lab, batch: wb.GRPO(lab, samples=1), "GRPO.samples=1"),
    (lambda lab, batch: wb.GRPO(lab, sampling=wb.Sampling(max_new_tokens=4000)), "max_new_tokens=4000.*=192"),
    (lambda lab, batch: lab.evaluate("arithmetic", sampling=wb.Sampling(max_new_tokens=4000)), "=4000.*=192"),
    (lambda lab, batch: wb.GRPO(lab).run(2.5), "iterations=2.5.*whole number"),  # type: ignore[arg-type]
    (lambda lab, batch: wb.PPO(lab, reward="accuracy"), "PPO.reward='accuracy'.*must be a function"),  # type: ignore[arg-type]
    (lambda lab, batch: lab.compute_advantages(batch, estimator="gea"), "estimator='gea'"),
    (lambda lab, batch: batch.take([99]), "row numbers from 0 to 5"),
    (lambda lab, batch: lab.put({"a": torch.zeros(2), "b": torch.zeros(3)}), "equally many rows"),
]


def test_stage_arguments(lab: wb.Workbench, batch: wb.Batch, subtests: pytest.Subtests) -> None:
    for call, message in STAGE_ARGUMENTS:
        with subtests.test(call=call, message=message), pytest.raises(WorkbenchError, match=message):
            call(lab, batch)


def test_rows_that_minibatches_do_not_divide(lab: wb.Workbench, batch: wb.Batch) -> None:
    five = lab.critic.compute_values(lab.actor.compute_log_prob(lab.reward.compute_reward(batch.take(range(5)))))
    with expect_error(BadInput, value="5 rows in 2 minibatches"):
        lab.actor.update_actor(lab.compute_advantages(five))


def needy(prompt: str, response: str, ground_truth: str, *, strict: bool = True) -> float:
    return 0.0


def test_a_reward_function_that_asks_for_what_no_row_has(lab: wb.Workbench, batch: wb.Batch) -> None:
    message = (
        "reward function needy takes 'ground_truth'.*by name: answer, ending, last_turn, prompt, raw_response, resp"
    )
    with pytest.raises(BadInput, match=message):
        lab.reward.compute_reward(batch, function=needy)
    with lab.overlap(), pytest.raises(BadInput, match=message):  # also where the batch is still to come
        lab.reward.compute_reward(lab.actor.generate_sequences(batch, max_new_tokens=2), function=needy)
    with pytest.raises(BadInput, match=message):
        lab.evaluate("arithmetic", n=2, reward=needy)
    algorithm = wb.GRPO(lab, prompts=2, samples=2, reward=needy, sampling=wb.Sampling(max_new_tokens=2))
    drawn = lab.prompts.drawn
    with pytest.raises(BadInput, match=message):
        algorithm.run(1)
    assert lab.prompts.drawn == drawn

    def with_truth(batch: wb.Batch) -> wb.Batch:
        return batch.join(lab.put({"ground_truth": ["7"] * batch.rows}))

    algorithm.insert(with_truth, after="generate_sequences")  # a column that another stage brings
    assert len(algorithm.run(1)) == 1
    near = lambda prompt, response, answr: 0.0  # noqa: E731
    with expect_error(BadInput, value="takes 'answr'", remedy=r"write 'answer' \(the nearest\)"):
        lab.reward.compute_reward(batch, function=near)


def test_rows_are_counted_before_anything_runs(lab: wb.Workbench, tmp_path: Path) -> None:
    for make, message in (
        (lambda: wb.GRPO(lab, prompts=1, samples=3), r"GRPO\(prompts=1, samples=3\): update_actor: 3 rows in 2 mini"),
        (lambda: wb.DAPO(lab, prompts=3, samples=3), r"DAPO\(prompts=3, samples=3\): update_actor: 9 rows in 2"),
        (lambda: wb.ReMax(lab, prompts=3, samples=1), r"ReMax\(prompts=3, samples=1\): update_actor: 3 rows in 2"),
        (lambda: wb.PPO(lab, prompts=5), r"PPO\(prompts=5, samples=1\): update_critic: 5 rows in 2 minibatches"),
    ):
        with pytest.raises(BadInput, match=message):
            make()
    rows = [{"prompt": str(i), "response": "b", "chosen": "b", "rejected": "c"} for i in range(8)]
    with expect_error(BadInput, value=r"SFT\(rows=3\): update_sft: 3 rows in 2 minibatches"):
        wb.SFT(lab, lab.demonstrations(rows), rows=3)
    with expect_error(BadInput, value=r"DPO\(rows=5\): update_dpo: 5 rows"):
        wb.DPO(lab, lab.pairs(rows), rows=5)
    with expect_error(BadInput, value="vowels, which is not trained", remedy="training="):
        wb.RewardModeling(lab, lab.pairs(rows), rows=4)
    with expect_error(
        BadInput, value=r"lab\.pairs\(max_length=5\)", rule="it takes source, max_tokens, ", remedy="write max_tokens="
    ):
        lab.pairs(rows, max_length=5)
    with expect_error(
        BadInput, value=r"prompts=dict\(path='arithmetic'\)", rule="it takes source, ", remedy="write source="
    ):
        tiny_lab("wrong", tmp_path, backend="inline", prompts={"path": "arithmetic"})
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_dict({"prompt": ["1+1="]})
    splits = datasets.DatasetDict(train=held, test=held)  # as `load_dataset` without `split=` gives them
    with expect_error(BadInput, rule="it holds the splits 'train', 'test'", remedy=r"data\['train'\]"):
        tiny_lab("wrong", tmp_path, backend="inline", prompts=splits)
    with tiny_lab("right", tmp_path, backend="inline", models={"actor": TINY}, prompts={"source": held}) as right:
        assert right.prompts.next(1).rows == 1
    with expect_error(BadInput, value=r"prompts=dict\(\) without source"):
        tiny_lab("wrong", tmp_path, backend="inline", prompts={})


def test_a_column_of_another_kind(lab: wb.Workbench, batch: wb.Batch) -> None:
    scored = lab.actor.compute_log_prob(batch.drop("prompt"))
    rows = scored.join(lab.put({"advantages": torch.ones(scored.rows)}))
    with expect_error(BadInput, value=r"'advantages' is a Tensor \[rows\]", remedy="repeat_interleave"):
        lab.actor.update_actor(rows)
    mask = batch.fetch(["response_mask"])["response_mask"]
    assert isinstance(mask, Ragged)
    each = mask.like(torch.repeat_interleave(torch.ones(batch.rows), mask.lengths))
    lab.actor.update_actor(scored.join(lab.put({"advantages": each})))  # what the remedy says
    valued = lab.reward.compute_reward(lab.critic.compute_values(batch)).join(lab.put({"final_values": each}))
    with expect_error(
        BadInput, value="'final_values' is a Ragged", rule=r"it must be one number a row, a Tensor \[rows\]"
    ):
        lab.compute_advantages(valued, bootstrap=True)


def test_a_function_that_cannot_be_sent_to_its_process_is_refused_before_anything_is_opened(
    lab: wb.Workbench, batch: wb.Batch, tmp_path: Path
) -> None:
    lock = threading.Lock()

    def locked(prompt: str, response: str, **row: Any) -> float:
        with lock:
            return 2.0

    message = r"locked cannot be sent to a process of its own: .*lock.*own_process=False"
    with pytest.raises(BadInput, match=message):
        lab.reward.compute_reward(batch, function=locked)
    with pytest.raises(BadInput, match=message):
        tiny_lab("locked", tmp_path, backend="inline", models={"actor": TINY, "reward": locked})
    with expect_error(BadInput, value="takes nothing", remedy=r"write def fn\(prompt, response, \*\*row\)"):
        tiny_lab("locked", tmp_path, backend="inline", models={"actor": TINY, "reward": lambda: 1})
    assert "locked" not in [found["name"] for found in wb.ls()]
    in_host = wb.limits(own_process=False)(locked)
    assert set(lab.reward.compute_reward(batch, function=in_host).fetch(["rewards"])["rewards"].tolist()) == {2.0}


def test_roles_and_operations_that_are_not_there(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError, match="has no cost; it has actor, critic, reference, reward"):
        _ = lab.cost
    with pytest.raises(AttributeError, match=r"no attribute 'actr': write actor \(the nearest\)"):
        _ = lab.actr
    ppo, drawn = wb.PPO(lab), lab.prompts.next(1)
    for named, name, remedy in (
        (lab, "restore", "wb.restore(path)"), (wb, "load_checkpoint", "wb.restore(path)"),
        (lab, "sweep", "wb.sweep"), (wb, "evaluate", "lab.evaluate"),
        (lab, "save_model", "lab.actor.save_model"),
        (lab, "save_checkpoint", "lab.save(path)"), (lab, "run", "algorithm.run(3)"),
        (ppo, "train", "algorithm.run(3)"), (ppo, "clp", "clip (the nearest)"), (drawn, "tak", "take (the nearest)"),
        (lab.prompts, "nxt", "next (the nearest)"), (drawn, "prompt", ".df(['prompt'])"),
        (drawn, "prompts", ".df(['prompt'])"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=re.escape(f"write {remedy}")):
            getattr(named, name)
    with expect_error(BadInput, value="lab.actor.lr = 1", remedy=r"write lab\.actor\.training\.learning_rate = 1"):
        lab.actor.lr = 1
    with expect_error(BadInput, remedy=r"batch\.drop\('prompt'\)\.join\(lab\.put\(\{'prompt': values\}\)\)"):
        drawn.prompt = ["1+1="]  # type: ignore[attr-defined]
    assert drawn.drop("prompt").join(lab.put({"prompt": ["1+1="]})).df(["prompt"])["prompt"].tolist() == ["1+1="]
    with expect_error(UnknownColumn, remedy=r"write 'prompt' \(the nearest\)"):
        lab.prompts.next(1).fetch(["prompts"])  # a column, and no field of wb.GRPO
    with pytest.raises(BadInput, match=r"write data=, its name here"):
        lab.evaluate(dataset=["1+1="])  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match=r"write wb\.GRPO, its name here"):
        _ = wb.GRPOConfig  # type: ignore[attr-defined]
    with pytest.raises(
        AttributeError, match=r"no operation 'compute_valuse'; write compute_values \(the nearest\); it has"
    ):
        _ = lab.critic.compute_valuse
    high = {"learning_rate": 0.5}
    few = tiny_lab("few", Path(lab.run_folder), backend="inline", models={"actor": TINY}, training=high)
    assert "lab.actor.training.learning_rate is 0.5: " in capsys.readouterr().out
    with few:
        with expect_error(BadInput, value="PPO on a workbench without critic and reference and reward"):
            wb.PPO(few)
        with expect_error(
            BadInput, value="GRPO on a workbench without reward", remedy=r"lab\.add\('reward', my_function\)"
        ):
            wb.GRPO(few)


def test_batches_stay_with_their_workbench(lab: wb.Workbench, batch: wb.Batch, tmp_path: Path) -> None:
    other = tiny_lab("other", tmp_path, backend="inline", models={"actor": TINY})
    with other, expect_error(BadInput, rule="another workbench"):
        other.actor.compute_log_prob(batch)
    with expect_error(NotFound, value="closed"):
        other.prompts.next(1)


def test_stopping_what_is_not_there() -> None:
    with expect_error(NotFound, value="no workbench named 'ghost'"):
        wb.stop("ghost")
    with expect_error(BadInput, rule="letters, digits"):
        wb.stop("../ghost")


NO_FIELDS: list[tuple[Any, dict[str, Any], str]] = [
    (wb.Training, {"learningrate": 1e-3}, r"Training\(learningrate=0.001\).*write learning_rate="),
    (wb.Generation, {"max_tokens": 64}, r"Generation\(max_tokens=64\).*write max_model_tokens="),
    (wb.Generation, {"temperature": 0.7}, r"is a field of wb.Sampling: write wb.Sampling\(temperature=...\)"),
    (wb.Sampling, {"temprature": 0.5}, r"Sampling\(temprature=0.5\).*write temperature="),
    (wb.Model, {"name": TINY, "adaptor": None}, r"Model\(adaptor=None\).*it takes name, .*write adapter="),
    (wb.LoRA, {"rang": 4}, r"LoRA\(rang=4\).*it takes rank, alpha, targets"),
    (wb.LoRA, {"r": 4}, r"LoRA\(r=4\).*write rank="),
    (wb.Training, {"lr": 1e-3}, r"Training\(lr=0.001\).*write learning_rate="),
    (wb.GRPO, {"lab": None, "beta": 0.1}, r"GRPO\(beta=0.1\).*write kl_coefficient="),
    (wb.GRPO, {"lab": None, "num_generations": 4}, r"GRPO\(num_generations=4\).*write samples="),
    (wb.Training, {"ppo_mini_batch_size": 64}, r"write wb.Training\(minibatches=...\), how many there are"),
    (wb.Sampling, {"do_sample": False}, "write temperature=0, which is greedy"),
    (wb.Sampling, {"stop_strings": ["a"]}, "write stop="),
    (wb.open, {"max_prompt_length": 64}, r'write prompts=\{"source": ..., "max_prompt_tokens": ...\}'),
    (partial(replace, wb.Sampling()), {"zzz": 1}, r"Sampling\(zzz=1\). it takes temperature, "),
]


def test_a_field_that_there_is_not(subtests: pytest.Subtests) -> None:
    for make, wrong, message in NO_FIELDS:
        with subtests.test(make=make, wrong=wrong), pytest.raises(BadInput, match=message):
            make(**wrong)


def test_fields_of_other_settings_are_fields_of_theirs() -> None:
    for settings, fields in FIELDS_OF.items():
        assert set(fields) <= set(inspect.signature(getattr(wb, settings)).parameters)
