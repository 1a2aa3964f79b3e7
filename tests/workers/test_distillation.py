"""A teacher and a student in an inline workbench: the columns, the divergence and its gradient against transformers'
own logits; however rows are cut, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput, UnknownColumn
from workbench.models.loading import load_causal_lm, load_config
from workbench.models.tokenizers import load_tokenizer
from workbench.objectives.kl import divergence

TEACHER, SIZE = "tiny-llama", 264
FAST: dict[str, Any] = {"engine": "torch", "learning_rate": 1e-3, "minibatches": 1, "micro_batch_tokens": 4096}
SAMPLING = wb.Sampling(max_new_tokens=12, temperature=0.8)


def open_lab(name: str, runs: Path, models: dict[str, Any] | None = None, /, **training: Any) -> wb.Workbench:
    models = models or {"actor": TINY, "teacher": TEACHER}
    return tiny_lab(name, runs, models=models, training={**FAST, **training}, backend="inline")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with open_lab("distil", tmp_path_factory.mktemp("runs")) as lab:
        yield lab


@pytest.fixture(scope="module")
def stored(lab: wb.Workbench) -> tuple[Table, dict[str, Any]]:
    batch = lab.actor.generate_sequences(lab.prompts.next(6), max_new_tokens=12, temperature=0.8)
    return batch.fetch(), dict(batch.meta)


def ragged(batch: wb.Batch, name: str) -> Ragged:
    column = batch.fetch([name])[name]
    assert isinstance(column, Ragged)
    return column


def log_probs(model: str, table: Table, temperature: float = 0.8) -> Tensor:
    """transformers' own, over the vocabulary at each response token, end to end."""
    network = load_causal_lm(model, dtype=torch.float32, device="cpu").eval()
    prompts, responses, found = table["prompt_ids"], table["response_ids"], []
    assert isinstance(prompts, Ragged) and isinstance(responses, Ragged)
    for prompt, response in zip(prompts.rows(), responses.rows(), strict=True):
        with torch.no_grad():
            logits = network(input_ids=torch.cat([prompt, response])[None]).logits[0]
        found.append((logits[len(prompt) - 1 : -1].float() / temperature).log_softmax(-1))
    return torch.cat(found)


def test_the_teachers_columns_are_its_likeliest_tokens(lab: wb.Workbench, stored: tuple[Table, dict[str, Any]]) -> None:
    batch = lab.teacher.compute_teacher_log_prob(lab.put(stored[0], meta=stored[1]), top_k=5)
    whole = log_probs(TEACHER, stored[0])
    ids, chosen = (ragged(batch, name) for name in ("teacher_ids", "teacher_log_prob"))
    assert ids.values.dtype == torch.int32
    expected = whole.topk(5)
    assert torch.equal(ids.values.view(-1, 5).long(), expected.indices)
    torch.testing.assert_close(chosen.values.view(-1, 5), expected.values, rtol=1e-4, atol=1e-4)
    others = whole.scatter(-1, expected.indices, -torch.inf).logsumexp(-1)
    tail = ragged(batch, "teacher_tail_log_prob").values
    torch.testing.assert_close(tail, others, rtol=1e-4, atol=1e-4)
    mask = ragged(batch, "response_mask").values.bool()
    mass = lab.last_metrics["compute_teacher_log_prob"]["teacher_tokens/mass"]
    assert mass == pytest.approx(float((1 - others.exp())[mask].mean()), rel=1e-4)
    assert batch.meta["teacher_temperature"] == 0.8
    sent = ids.values.nbytes + chosen.values.nbytes + tail.nbytes
    assert sent == (8 * 5 + 4) * len(tail)  # what the docstring says


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_with_all_tokens_it_is_the_whole_divergence(
    lab: wb.Workbench, stored: tuple[Table, dict[str, Any]], beta: float
) -> None:
    batch = lab.put(stored[0], meta=stored[1])
    mask = stored[0]["response_mask"]
    assert isinstance(mask, Ragged)
    exact = divergence(log_probs(TEACHER, stored[0]), log_probs(TINY, stored[0]), beta)[mask.values.bool()]
    found = {}
    for k in (4, 64, SIZE):
        with lab.kept("actor"):
            scored = lab.teacher.compute_teacher_log_prob(batch, top_k=k)
            found[k] = lab.actor.update_distill(scored, beta=beta)
    for name in ("loss", "divergence"):
        assert found[SIZE][name] == pytest.approx(float(exact.mean()), rel=1e-4)
    assert found[SIZE]["teacher_tokens/student_mass"] == pytest.approx(1, abs=1e-5)
    assert 0 < found[4]["loss"] < found[64]["loss"] < found[SIZE]["loss"]


def test_micro_batches_do_not_change_the_update(stored: tuple[Table, dict[str, Any]], tmp_path: Path) -> None:
    found: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    for budget in (4096, 60):
        with open_lab(f"cut{budget}", tmp_path, micro_batch_tokens=budget, minibatches=2) as cut:
            batch = cut.teacher.compute_teacher_log_prob(cut.put(stored[0], meta=stored[1]), top_k=16)
            found.append((cut.last_metrics["compute_teacher_log_prob"], cut.actor.update_distill(batch, epochs=2)))
    for whole, parts in zip(*found, strict=True):
        assert whole.keys() == parts.keys()
        for name, value in whole.items():
            assert parts[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_the_student_comes_nearer_and_the_algorithm_is_its_lines(tmp_path: Path) -> None:
    with open_lab("nearer", tmp_path, learning_rate=3e-3) as lab:
        algorithm = wb.Distill(lab, prompts=8, sampling=SAMPLING, top_k=32)
        assert algorithm.graph().names == [
            "prompts",
            "generate_sequences",
            "compute_teacher_log_prob",
            "update_distill",
        ]
        found = algorithm.run(8)["update_distill/divergence"].tolist()
        assert found[-1] < 0.75 * found[0]


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    """The same model: no divergence; from other prompts, such as ones with a hint, there is one."""
    with open_lab("self", tmp_path, {"actor": TINY, "teacher": TINY}) as lab:
        batch = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=8, temperature=0.8)
        same = lab.teacher.compute_teacher_log_prob(batch, top_k=32)
        with lab.kept("actor"):
            assert lab.actor.update_distill(same)["loss"] == pytest.approx(0, abs=1e-5)
        table = batch.fetch()
        prompts = table["prompt_ids"]
        assert isinstance(prompts, Ragged)
        hinted = [torch.cat([row, row[-3:]]) for row in prompts.rows()]
        told = lab.put({**table, "teacher_prompt_ids": Ragged.of(hinted, torch.int64)}, meta=batch.meta)
        other = lab.teacher.compute_teacher_log_prob(told, top_k=32, prompt="teacher_prompt_ids")
        with lab.kept("actor"):
            assert lab.actor.update_distill(other)["loss"] > 0.01
        with expect_error(UnknownColumn, value="teacher_prompt_ids"):
            lab.teacher.compute_teacher_log_prob(batch, prompt="teacher_prompt_ids")

        def told_more(prompt: str, answer: str) -> str:
            return f"{prompt} It is {answer}."

        algorithm = wb.Distill(lab, prompts=4, sampling=SAMPLING, top_k=32, teacher_prompt=told_more)
        assert algorithm.graph().names[2] == "tell_teacher"
        assert algorithm.run(1)["update_distill/divergence"].iloc[0] > 0.01
        texts = algorithm.made["compute_teacher_log_prob"].fetch(["prompt", "answer", "teacher_prompt_ids"])
        ids, prompts = texts["teacher_prompt_ids"], lab.prompts.source
        assert isinstance(ids, Ragged) and prompts is not None
        for row, told_ids in enumerate(ids.rows()):
            assert told_ids.tolist() == prompts.render(told_more(str(texts["prompt"][row]), str(texts["answer"][row])))
        with expect_error(BadInput, value="takes 'solution'", rule="parameters must be among: prompt, answer"):
            wb.Distill(lab, teacher_prompt=lambda prompt, solution: prompt)
        with expect_error(BadInput, value="what teacher_prompt returned for row 0 is None"):
            wb.Distill(lab, prompts=4, teacher_prompt=lambda prompt: None).run(1)


def test_demonstrations_can_be_distilled_and_tokens_can_be_left_out(lab: wb.Workbench) -> None:
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(4)]
    batch = lab.teacher.compute_teacher_log_prob(lab.demonstrations(rows).next(4), top_k=8, vocabulary=200)
    ids, chosen = (ragged(batch, name).values.view(-1, 8) for name in ("teacher_ids", "teacher_log_prob"))
    assert int(ids.max()) < 200
    cut = log_probs(TEACHER, batch.fetch(), temperature=1.0)[:, :200].log_softmax(-1)
    torch.testing.assert_close(chosen, cut.topk(8).values, rtol=1e-4, atol=1e-4)
    with lab.kept("actor"):
        assert lab.actor.update_distill(batch)["loss"] > 0


def test_an_adapter_learns_from_the_model_under_it(tmp_path: Path) -> None:
    models = {"actor": wb.Model(TINY, adapter=wb.LoRA(rank=2))}
    with open_lab("lora", tmp_path, models) as lab:
        found = wb.Distill(lab, prompts=4, sampling=SAMPLING, top_k=16, teacher="reference").run(1)
        assert found["update_distill/divergence"].iloc[0] == pytest.approx(0, abs=1e-5)


def test_what_is_wrong_is_said(lab: wb.Workbench, stored: tuple[Table, dict[str, Any]], tmp_path: Path) -> None:
    tokenizer, other = load_tokenizer(TINY), tmp_path / "other"
    tokenizer.add_tokens(["<one more>"])
    load_config(TINY).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with expect_error(BadInput, value="another vocabulary than the actor's", rule="all roles must use the same tokens"):
        open_lab("other", tmp_path, {"actor": TINY, "teacher": str(other)})
    with expect_error(BadInput, value="Distill on a workbench without reference"):
        wb.Distill(lab, prompts=4, teacher="reference")
    with expect_error(BadInput, value="top_k=265", rule="among 264 tokens"):
        wb.Distill(lab, prompts=4, top_k=265)
    with expect_error(BadInput, value="beta"):
        wb.Distill(lab, prompts=4, beta=1.5)
    batch = lab.put(stored[0], meta=stored[1])
    with expect_error(UnknownColumn, remedy=r"run teacher\.compute_teacher_log_prob first"):
        lab.actor.update_distill(batch)
    table = lab.teacher.compute_teacher_log_prob(batch, top_k=4).fetch()
    ids, chosen = table["teacher_ids"], table["teacher_log_prob"]
    assert isinstance(ids, Ragged) and isinstance(chosen, Ragged)
    with expect_error(BadInput, value="token id 300", remedy="vocabulary=264"):
        lab.actor.update_distill(lab.put({**table, "teacher_ids": ids.like(ids.values * 0 + 300)}))
    short = Ragged.of([row[1:] for row in chosen.rows()], torch.float32)
    with expect_error(BadInput, rule="the same number of values"):
        lab.actor.update_distill(lab.put({**table, "teacher_log_prob": short}))


def test_rows_that_are_not_valid_have_no_part_in_it(lab: wb.Workbench, stored: tuple[Table, dict[str, Any]]) -> None:
    table = {**stored[0], "valid": torch.tensor([1, 0, 1, 1, 1, 0])}
    keep = [0, 2, 3, 4]
    kept: Table = {}
    for name, column in stored[0].items():
        if isinstance(column, Tensor):
            kept[name] = column[torch.tensor(keep)]
        else:
            kept[name] = column.take(keep) if isinstance(column, Ragged) else [column[i] for i in keep]
    found = []
    for given in (table, kept):
        batch = lab.teacher.compute_teacher_log_prob(lab.put(given, meta=stored[1]), top_k=5)
        mass = lab.last_metrics["compute_teacher_log_prob"]["teacher_tokens/mass"]
        with lab.kept("actor"):
            metrics = lab.actor.update_distill(batch)
        names = ("loss", "grad_norm", "divergence", "teacher_tokens/student_mass")
        found.append([mass, *(metrics[name] for name in names)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
