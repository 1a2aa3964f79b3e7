"""The settings of a role's model: `wb.Model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models.lora import LoRA
from workbench.settings.engines import DType, Generation, Sampling
from workbench.settings.roles import TRAINED_ROLES
from workbench.settings.training import Training
from workbench.support.validation import NonNegativeInt, settings


@settings()
class Judging:
    """A judge's model, its rubric, and the sampling of its answers; see `wb.Judge`."""

    model: str
    rubric: str
    sampling: Sampling
    seed: NonNegativeInt = 0


@settings(kw_only=False)
class Model:
    """The model of one role and its settings. Settings that are None are taken from the workbench's defaults.

    name: hub id, local folder, `smollm2-135m` (bundled), or a tiny random model (`tiny-llama`, ...).
    function: for reward and cost, a function in place of a model: `fn(prompt, response, **row) -> float`.
    dtype: "float32", "bfloat16" or "float16". A trained role computes in it and keeps fp32 master weights. With
        "float16" losses are scaled: a step whose gradient overflows is skipped, and the scale is halved (metrics
        `skipped/fraction`, `loss_scale`).
    adapter: for the actor: only the adapter is trained, and the actor without it is the reference if none is declared.
    training, generation: engine settings of trained roles, and of the actor's rollouts. A reward or cost model is
        trained only if its training settings are given here; else it only scores, with less memory.
    worker: a subclass of the role's worker class, with operations of your own.
    seed: seeds the adapter, and the head of a critic, reward or cost model without a saved head.
    judge: for a function that scores judgements, the model that writes them: see `wb.Judge`, which makes both.
    """

    name: str | Path | None = None
    function: Callable[..., Any] | None = None
    dtype: DType | None = None
    adapter: LoRA | None = None
    training: Training | None = None
    generation: Generation | None = None
    worker: type | None = None
    seed: NonNegativeInt = 0
    judge: Judging | None = None
    trained: bool = field(default=False, init=False)  # set by `filled`

    def __post_init__(self) -> None:
        if (self.name is None) == (self.function is None):
            raise BadInput(f"Model(name={self.name!r}, function={self.function!r})", "give exactly one of the two")

    def __str__(self) -> str:
        """Return the name of the model, with its adapter, or the name of the judge or function."""
        name = str(
            self.name or (self.judge and f"judge {self.judge.model}") or getattr(self.function, "__name__", "function")
        )
        return name if self.adapter is None else f"{name} + {self.adapter}"

    @classmethod
    def of(cls, role: str, value: Any) -> Model:
        """Return a `Model` from an entry of models=: a name, a folder, a function, or a `Model`."""
        if isinstance(value, Model):
            model = value
        elif isinstance(value, str | Path):
            model = cls(name=value)
        elif callable(value):
            model = cls(function=value)
        else:
            raise BadInput(
                f"models[{role!r}]={shown(value)}",
                "a role's model is a name, a folder, a function (reward, cost) or a wb.Model",
            )
        if model.function is not None and role not in ("reward", "cost"):
            raise BadInput(f"models[{role!r}] is a function", "only reward and cost can be one", "give a model name")
        if model.adapter is not None and role != "actor":
            raise BadInput(f"models[{role!r}] with an adapter", "only the actor can have one", "leave out adapter=")
        return model

    def filled(self, role: str, *, dtype: DType, training: Training, generation: Generation) -> Model:
        """Return the model with the workbench's defaults in place of None, and with `trained` set for the role."""
        model = replace(
            self,
            dtype=self.dtype or dtype,
            training=(self.training or training).of_role(role),
            generation=self.generation or generation,
        )
        asked = role in ("reward", "cost") and self.name is not None and self.training is not None
        object.__setattr__(model, "trained", role in TRAINED_ROLES or asked)
        return model

    def changed(self, **fields: Any) -> Model:
        """Return a filled model with other fields, and with the same `trained`."""
        model = replace(self, **fields)
        object.__setattr__(model, "trained", self.trained)
        return model
