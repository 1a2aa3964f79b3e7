"""Settings classes: every wrong value is a `BadInput` that names the field, and right ones are kept as plain values."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from fractions import Fraction
from typing import Any

import cloudpickle
import numpy as np
import pytest

import workbench as wb
from workbench.errors import BadInput
from workbench.support.fingerprint import fingerprint

INF, NAN = float("inf"), float("nan")
NO_NUMBER: tuple[Any, ...] = (True, "1", b"1", None, [], {}, 1j, np.True_, object())
NO_WHOLE: tuple[Any, ...] = (*NO_NUMBER, 1.0, np.float64(1.0), NAN, INF)
NO_BOOL: tuple[Any, ...] = (0, 1, "yes", None, np.True_)
NO_TEXTS: tuple[Any, ...] = ("a", 1, (1,), ("a", 1), {"a": 1.0})

# class, field -> values that it refuses
WRONG: dict[tuple[Any, str], tuple[Any, ...]] = {
    (wb.Training, "engine"): ("megatron", "vllm", 1, None, []),
    (wb.Training, "zero_stage"): (*NO_WHOLE, -1, 4),
    (wb.Training, "learning_rate"): (*(x for x in NO_NUMBER if x is not None), -0.5, -1, NAN, INF, -INF),
    (wb.Training, "betas"): (*NO_NUMBER, (0.9,), (0.9, 1.0), (True, 0.5), (0.9, "x"), (0.9, 0.9, 0.9), (-0.1, 0.9)),
    (wb.Training, "eps"): (*NO_NUMBER, 0, 0.0, -1, NAN, INF),
    (wb.Training, "weight_decay"): (*NO_NUMBER, -0.1, NAN, INF),
    (wb.Training, "schedule"): ("exponential", None, 1),
    (wb.Training, "warmup_steps"): (*NO_WHOLE, -1),
    (wb.Training, "total_steps"): (True, "1", 1.0, 0, -1),
    (wb.Training, "max_grad_norm"): (*NO_NUMBER, -1, NAN),
    (wb.Training, "minibatches"): (*NO_WHOLE, 0, -1),
    (wb.Training, "micro_batch_tokens"): (True, "1", 1.0, 0),
    (wb.Training, "activation_checkpointing"): NO_BOOL,
    (wb.Training, "compile"): NO_BOOL,
    (wb.Generation, "engine"): ("sglang", "torch", 1),
    (wb.Generation, "tensor_parallel_size"): (*NO_WHOLE, 0),
    (wb.Generation, "strategy"): ("half", None),
    (wb.Generation, "max_model_tokens"): (*NO_WHOLE, 1),
    (wb.Generation, "kv_cache_gib"): (*NO_NUMBER, 0, -1, NAN),
    (wb.Generation, "gpu_memory_fraction"): (True, "0.5", 0, 1, 1.0, -0.5, NAN),
    (wb.Generation, "max_rows"): (True, "1", 1.0, 0),
    (wb.Generation, "check_sync"): NO_BOOL,
    (wb.Sampling, "temperature"): (*NO_NUMBER, -1, 0.001, 2.5, NAN, INF),
    (wb.Sampling, "top_p"): (*NO_NUMBER, 0, 1.5, NAN),
    (wb.Sampling, "top_k"): (*NO_WHOLE, -1),
    (wb.Sampling, "min_p"): (*NO_NUMBER, -0.1, 1.1, NAN),
    (wb.Sampling, "repetition_penalty"): (*NO_NUMBER, 0, -1, NAN),
    (wb.Sampling, "presence_penalty"): (*NO_NUMBER, -2.5, 2.5, NAN),
    (wb.Sampling, "frequency_penalty"): (*NO_NUMBER, -2.5, 2.5, NAN),
    (wb.Sampling, "logit_bias"): (1, [1], {"a": 1.0}, {5: "x"}, {5: True}, {5: INF}, {5: NAN}),
    (wb.Sampling, "max_new_tokens"): (*NO_WHOLE, 0),
    (wb.Sampling, "min_new_tokens"): (*NO_WHOLE, -1, 65),
    (wb.Sampling, "stop"): (*NO_TEXTS, ("",), None),
    (wb.Sampling, "stop_token_ids"): (1, "1", ("a",), (1.0,), (True,), None),
    (wb.Sampling, "ignore_eos"): NO_BOOL,
    (wb.Sampling, "environment"): (1, "calculator", object()),
    (wb.Sampling, "max_turns"): (*NO_WHOLE, 0),
    (wb.Sampling, "max_calls"): (*(value for value in NO_WHOLE if value is not None), -1),
    (wb.Sampling, "max_seconds"): (*(value for value in NO_NUMBER if value is not None), 0, -1, NAN),
    (wb.Sampling, "concurrency"): (*NO_WHOLE, 0),
    (wb.Sampling, "call_timeout_s"): (*NO_NUMBER, 0, -1, NAN),
    (wb.LoRA, "rank"): (*NO_WHOLE, 0),
    (wb.LoRA, "alpha"): (*NO_NUMBER, 0, -1, NAN, INF),
    (wb.LoRA, "targets"): (*NO_TEXTS, ()),
    (wb.Correction, "level"): ("word", None, []),
    (wb.Correction, "bound"): ("clip", None),
    (wb.Correction, "high"): (*NO_NUMBER, 0.5, NAN),
    (wb.Correction, "reference_size"): (True, "1", 0, 1.5, NAN),
    (wb.KLCov, "share"): (*NO_NUMBER, 0, 1.5, NAN),
    (wb.KLCov, "coefficient"): (*NO_NUMBER, -1, NAN),
    (wb.ClipCov, "share"): (*NO_NUMBER, 0, 1.5, NAN),
    (wb.ClipCov, "low"): (*NO_NUMBER, NAN),
    (wb.ClipCov, "high"): (*NO_NUMBER, NAN),
    (wb.Model, "name"): (1, True, ["tiny-llama"]),
    (wb.Model, "dtype"): ("fp8", 1),
    (wb.Model, "adapter"): ({"rank": 4}, 1, "lora"),
    (wb.Model, "training"): ({"engine": "torch"}, 1, wb.LoRA()),
    (wb.Model, "generation"): ({"engine": "vllm"}, wb.Training()),
    (wb.Model, "worker"): ("ActorWorker", 1),
    (wb.Model, "seed"): (*NO_WHOLE, -1),
    (wb.Layout, "p"): (*NO_WHOLE, 0),
    (wb.Layout, "t_g"): (1.0, True, "1", 0, 2),
    (wb.Layout, "numbering"): ("reverse", None),
}


def test_a_wrong_value_names_the_field(subtests: pytest.Subtests) -> None:
    for kind, field in WRONG:
        with subtests.test(kind=kind, field=field):
            given = {"name": "tiny-llama"} if kind is wb.Model else {}
            called = f"{field}=" if kind is wb.Sampling else f"{kind.__name__}.{field}="
            for value in WRONG[kind, field]:
                if value is None and field == "name":
                    continue
                with pytest.raises(BadInput) as caught:
                    kind(**{**given, field: value})
                assert caught.value.value.startswith(called), value
                assert caught.value.rule.startswith("must "), value


RULES: list[tuple[Any, dict[str, Any], str, str, str]] = [
    (wb.Training, {"minibatches": 0}, "Training.minibatches=0", "must be at least 1",
     "write minibatches=1, its default"),
    (wb.LoRA, {"alpha": INF}, "LoRA.alpha=inf", "must be a finite number", "write alpha=32.0, its default"),
    (wb.Training, {"learning_rate": "1e-6"}, "Training.learning_rate='1e-6'", "must be a number, or None",
     "write learning_rate=1e-6, without quotes"),
    (wb.Sampling, {"ignore_eos": 1}, "ignore_eos=1", "must be True or False", "write ignore_eos=False, its default"),
    (wb.Sampling, {"stop": "a"}, "stop='a'", "must be a sequence of non-empty strings",
     "write a single one as a tuple too: stop=('END',)"),
    (wb.Model, {"name": "tiny-llama", "adapter": {"rank": 4}}, "Model.adapter={'rank': 4}",
     "must be a wb.LoRA(...), or None", "write wb.LoRA(rank=4)"),
    (wb.Training, {"weight_decay": NAN}, "Training.weight_decay=nan", "must be a number, not nan",
     "write weight_decay=0.0, its default"),
    (wb.Training, {"weight_decay": 10**400}, f"Training.weight_decay={str(10**400)[:59]}…",
     "must be at most 1.8e+308, the largest float", "write weight_decay=0.0, its default"),
    (wb.Training, {"warmup_steps": -(10**5000)}, "Training.warmup_steps=<int>", "must fit into 64 bits",
     "write warmup_steps=0, its default"),
]  # fmt: skip


def test_value_rule_and_remedy(subtests: pytest.Subtests) -> None:
    for kind, given, value, rule, remedy in RULES:
        with subtests.test(kind=kind, given=given):
            with pytest.raises(BadInput) as caught:
                kind(**given)
            assert (caught.value.value, caught.value.rule, caught.value.remedy) == (value, rule, remedy)


def test_fields_by_position() -> None:
    with pytest.raises(BadInput) as caught:
        wb.Layout(1, 0)
    assert caught.value.value == "Layout.t=0"
    with pytest.raises(BadInput) as caught:
        wb.Training("torch")  # type: ignore[call-arg]
    assert (caught.value.value, caught.value.remedy) == ("Training('torch')", "write engine=")


KEPT: list[tuple[dict[str, Any], Any]] = [
    ({"max_new_tokens": np.int64(3)}, 3),
    ({"temperature": np.float32(0.5)}, 0.5),
    ({"temperature": Fraction(1, 2)}, 0.5),
    ({"temperature": 0}, 0.0),
    ({"logit_bias": {np.int64(5): -INF}}, {5: -INF}),
    ({"stop": ["a", "b"]}, ("a", "b")),
    ({"stop_token_ids": [np.int32(2)]}, (2,)),
]


def test_values_are_kept_as_plain_ones() -> None:
    for given, kept in KEPT:
        made = getattr(wb.Sampling(**given), next(iter(given)))
        assert made == kept
        assert type(made) is type(kept)


def test_settings_are_dataclasses_that_travel() -> None:
    for settings in (
        wb.Training(betas=[0.5, 0.9]),  # type: ignore[arg-type]
        wb.Generation(),
        wb.Sampling(stop=("a",)),
        wb.LoRA(targets=("q_proj",)),
        wb.Correction(),
        wb.KLCov(share=0.1),
        wb.ClipCov(),
        wb.Layout(2, 2, numbering="generation"),
        wb.Model("tiny-llama", adapter=wb.LoRA(rank=4)),
    ):
        assert copy.copy(settings) == settings == dataclasses.replace(settings)
        assert pickle.loads(pickle.dumps(settings)) == cloudpickle.loads(cloudpickle.dumps(settings)) == settings
        assert hash(copy.deepcopy(settings)) == hash(settings)
        assert list(dataclasses.asdict(settings)) == [field.name for field in dataclasses.fields(settings)]
        with pytest.raises(dataclasses.FrozenInstanceError):
            settings.seed = 3  # type: ignore[misc,union-attr]


def test_a_signature_shows_types_without_their_constraints() -> None:
    signature = inspect.signature(wb.Training)
    assert signature.parameters["minibatches"].annotation is int
    assert signature.parameters["betas"].annotation == tuple[float, float]
    assert "Annotated" not in str(signature)


def test_a_fingerprint_is_equal_in_every_process() -> None:
    code = "import workbench as wb; from workbench.support.fingerprint import fingerprint as f; print(f(wb.Sampling()))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == fingerprint(wb.Sampling())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(wb.Training):
    """As a user derives settings, whose `__post_init__` does not call that of the base."""

    note: str = ""
    unknown: Missing | None = None  # type: ignore[name-defined] # noqa: F821

    def __post_init__(self) -> None:
        if self.note == "bad":
            raise BadInput("Derived.note='bad'", "must be good")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DerivedSampling(wb.Sampling):
    note: str = ""


OF_SUBCLASSES: list[tuple[Any, dict[str, Any], str]] = [
    (Derived, {"learning_rate": "1e-6", "zero_stage": 7}, "Derived.zero_stage=7"),
    (Derived, {"learning_rate": "1e-6"}, "Derived.learning_rate='1e-6'"),
    (Derived, {"note": 3}, "Derived.note=3"),
    (Derived, {"note": "bad"}, "Derived.note='bad'"),
    (Derived, {"nots": "bad"}, "Derived(nots='bad')"),
    (DerivedSampling, {"top_p": 2}, "top_p=2"),
    (DerivedSampling, {"min_new_tokens": 65}, "min_new_tokens=65"),
]


def test_a_subclass_is_checked_as_its_base_is(subtests: pytest.Subtests) -> None:
    for kind, given, value in OF_SUBCLASSES:
        with subtests.test(kind=kind, given=given):
            with pytest.raises(BadInput) as caught:
                kind(**given)
            assert caught.value.value == value


def test_a_subclass_keeps_plain_values_and_travels() -> None:
    made = Derived(betas=[0.5, np.float32(0.5)], minibatches=np.int64(2), unknown=3)  # type: ignore[arg-type]
    assert (made.betas, type(made.minibatches)) == ((0.5, 0.5), int)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == dataclasses.replace(made) == made
    assert wb.Model("tiny-llama", training=made).training is made
