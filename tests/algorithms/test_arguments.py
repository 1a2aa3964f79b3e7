"""The arguments of stages: where each comes from, and a change of one, for one run or from now on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import workbench as wb
from tests.cases import tiny_lab
from workbench.algorithms.edits import Argument
from workbench.errors import BadInput
from workbench.stages.live_settings import changed_by

SHORT = wb.Sampling(max_new_tokens=6)
# By field, another value that it may have: those that are arguments of PPO's stages.
OTHERS: dict[str, Any] = {
    "prompts": 6, "samples": 2, "gamma": 0.5, "lam": 0.5, "kl_coefficient": 0.25, "kl": "k2", "macro_tokens": 3,
    "bootstrap": True, "clip": 0.1, "value_clip": None, "dual_clip": 4.0, "entropy_coefficient": 0.125, "epochs": 2,
    "loss": "gspo", "sampling.temperature": 0.5, "sampling.top_k": 7, "sampling.max_new_tokens": 3,
    "sampling.ignore_eos": True, "sampling.stop": ("x",), "correction": wb.Correction(),
}  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("arguments", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def ppo_of(lab: Any) -> Any:
    return wb.PPO(lab, prompts=4, sampling=SHORT)


def by_name(algorithm: Any, stage: str) -> dict[str, Argument]:
    return {argument.name: argument for argument in algorithm.arguments(stage)}


def test_every_argument_is_there_with_the_operation_s_default(lab: Any) -> None:
    ppo = ppo_of(lab)
    for stage in ppo.graph().stages[1:]:
        group = lab if stage.role == "numeric" else lab.groups[stage.role]
        parameters = dict(getattr(group, stage.operation).__signature__.parameters)
        del parameters["batch"]
        found = by_name(ppo, stage.name)
        assert list(found) == list(parameters)
        assert {name: one.default for name, one in found.items()} == {n: p.default for n, p in parameters.items()}
        for name, one in found.items():
            assert one.value == stage.kwargs.get(name, parameters[name].default)
            assert (one.source == "default") == (name not in stage.kwargs)


@dataclass
class Scaled:
    scale: float = 1.0

    def __call__(self, log_prob: Tensor, advantages: Tensor) -> Tensor:
        return -self.scale * log_prob * advantages


def test_a_loss_may_be_an_object_without_a_hash(lab: Any) -> None:
    ppo = wb.PPO(lab, prompts=4, sampling=SHORT, loss=Scaled())
    assert by_name(ppo, "update_actor")["loss"].value == Scaled()


def test_an_argument_comes_from_the_field_that_changes_it(lab: Any) -> None:
    ppo = ppo_of(lab)
    before = {(stage, a.name): a for stage in ppo.graph().names for a in ppo.arguments(stage)}
    named = {argument.field for argument in before.values() if argument.field}
    assert named == {*OTHERS, *(f for f in named if f.startswith("sampling.")), "reward", "reward_weights"}
    for field, other in OTHERS.items():
        owner, _, last = field.rpartition(".")
        ppo = ppo_of(lab)
        setattr(getattr(ppo, owner) if owner else ppo, last, other)
        found = {place for place, argument in before.items() if argument.field == field}
        graph = ppo.graph()
        assert found
        assert all(graph[stage].given_arguments[name] == other for stage, name in found)
        # and no other argument is changed by it, but for `on_policy`, which follows from several fields
        changed = {
            (stage, name)
            for (stage, name), argument in before.items()
            if graph[stage].given_arguments.get(name, argument.default) != argument.value
        }
        assert changed - {("update_actor", "on_policy")} == found
    (place, *_) = found
    assert by_name(ppo, place[0])[place[1]].source == f"PPO.{field}, changed"


def test_a_change_for_one_run_alone(lab: Any) -> None:
    ppo = ppo_of(lab)
    ppo.step()
    ppo.change_argument("generate_sequences", "max_new_tokens", 2, once=True)
    assert by_name(ppo, "generate_sequences")["max_new_tokens"].source == "changed for the next run"
    batch = ppo.step()
    assert batch.fetch()["response_ids"].lengths.max() <= 2
    assert by_name(ppo, "generate_sequences")["max_new_tokens"].value == 6
    ppo.iterate()
    ppo.step()
    assert ppo.step().fetch()["response_ids"].lengths.max() > 2


def test_a_stage_that_fails_keeps_it(lab: Any) -> None:
    ppo = ppo_of(lab)

    def broken(prompt: str, response: str, **row: Any) -> float:
        raise ZeroDivisionError("on purpose")

    ppo.once("compute_reward", function=broken)
    with pytest.raises(wb.errors.RewardError):
        ppo.iterate()
    assert ppo.next_stage == "compute_reward"
    assert by_name(ppo, "compute_reward")["function"].value is broken
    ppo.once("compute_reward", function=None)
    ppo.iterate()


def test_the_numbers_are_those_of_the_field(tmp_path: Path) -> None:
    """One step with another clip gives what an algorithm of that clip gives, and the next step goes on with the old."""
    metrics = []
    for way in ("field", "once"):
        with tiny_lab(f"way-{way}", tmp_path, backend="inline") as own:
            ppo = ppo_of(own)
            if way == "field":
                ppo.entropy_coefficient = 0.25
            else:
                ppo.once("update_actor", entropy_coefficient=0.25)
            metrics.append(ppo.iterate())
            assert ppo.graph()["update_actor"].kwargs["entropy_coefficient"] == (0.25 if way == "field" else 0.0)
    assert metrics[0] == metrics[1]


def test_from_now_on_is_the_field_s_or_the_stage_s(lab: Any) -> None:
    ppo = ppo_of(lab)
    assert by_name(ppo, "update_actor")["clip"].in_effect == "0.2"
    ppo.once("update_actor", clip=0.4, epochs=2)
    ppo.change_argument("update_actor", "clip", 0.3, once=False)
    assert ppo.clip == 0.3
    assert by_name(ppo, "update_actor")["clip"].value == 0.3  # not the one for the next run
    high = by_name(ppo, "update_actor")["clip_high"]
    assert (high.value, high.in_effect) == (None, "0.3")
    assert by_name(ppo, "update_actor")["epochs"].value == 2
    ppo.change_argument("update_actor", "aggregation", "sequence-mean-token-mean", once=False)
    found = by_name(ppo, "update_actor")
    assert (found["aggregation"].value, found["aggregation"].source) == (
        "sequence-mean-token-mean", "changed for this stage",
    )  # fmt: skip
    assert found["epochs"].value == 1  # a replace takes back what was for one run


WRONG = {
    ("update_actor", "clip", -1): r"clip=-1.*must be at least 0",
    ("update_actor", "clip", "x"): r"clip='x'.*must be a number",
    ("update_actor", "clap", 1): r"update_actor\(clap=...\).*clip",
    ("update_actor", "loss", "pop"): r"loss='pop'",
    ("prompts", "n", "many"): r"='many'.*must be a whole number",
    ("prompts", "n", 0): r"at least 1",
    ("prompts", "n", 3): r"minibatches of an update must be equally large|prompts",
    ("updata_actor", "clip", 1): r"stage 'updata_actor'",
}


def test_a_wrong_value_changes_nothing(lab: Any, subtests: pytest.Subtests) -> None:
    for once in [True, False]:
        for wrong in WRONG:
            with subtests.test(wrong=wrong, once=once):
                ppo, events = ppo_of(lab), len(lab.history.changes())
                before = [stage.kwargs for stage in ppo.graph().stages]
                with pytest.raises(BadInput, match=rf"(?s){WRONG[wrong]}"):
                    ppo.change_argument(*wrong, once=once)
                assert [stage.kwargs for stage in ppo.graph().stages] == before
                assert len(lab.history.changes()) == events


def test_changes_are_recorded(lab: Any) -> None:
    ppo, events = ppo_of(lab), len(lab.history.changes())
    with changed_by("the panel"):
        ppo.change_argument("update_actor", "clip", 0.3, once=True)
    ppo.change_argument("update_actor", "clip", 0.2, once=False)
    ppo.change_argument("update_actor", "kl", "k1", once=False)
    found = lab.history.changes().iloc[events:]
    assert found["setting"].tolist() == ["PPO.update_actor.clip once", "PPO.clip", "PPO.update_actor.kl"]
    assert found["before"].tolist() == [0.2, 0.2, "k3"]  # no clip was given: the loss's own
    assert found["cell"].tolist() == ["panel", None, None]
    assert found["time"].dt.date.tolist() == [date.today()] * 3
    assert found["after"].tolist() == [0.3, 0.2, "k1"]
    settings = lab.telemetry.events().query("event == 'setting'")["details"].tolist()[events:]
    assert [one["by"] for one in settings] == ["the panel", "", ""]


def test_a_batch_s_own_method(lab: Any) -> None:
    remax = wb.ReMax(lab, prompts=4, samples=2, sampling=SHORT)
    assert [(a.name, a.value, a.source) for a in remax.arguments("repeat")] == [("n", 2, "ReMax.samples")]
    assert remax.arguments("join") == []


def test_a_notebook_shows_an_algorithm_and_its_metrics_as_tables(lab: Any) -> None:
    html = wb.PPO(lab, prompts=4, sampling=SHORT)._repr_html_()
    texts = re.findall("<td[^>]*>([^<]*)", html)
    assert texts[:6] == ["prompts", "4", "16", "samples", "1", ""]  # the last: that of the default
    assert "wb.Sampling(max_new_tokens=6)" in texts
    ppo_of(lab).run(1)
    assert ">compute_reward<" in lab.last_metrics._repr_html_() and ">rewards/mean<" in lab.last_metrics._repr_html_()
