"""Checks of a workbench's description, before any process starts."""

from __future__ import annotations

import difflib
import importlib.util
import re
from typing import TYPE_CHECKING

from workbench.data.reward_function import check_function
from workbench.engines.generation.base import check_model
from workbench.engines.training.deepspeed_engine import check_deepspeed_layout
from workbench.engines.training.model_shard import check_shardable
from workbench.errors import BadInput, MissingDependency
from workbench.errors.plain_text import shown
from workbench.models import BUNDLED, resolve
from workbench.models.loading import load_config
from workbench.models.resolve import config_file
from workbench.models.spec import Judging
from workbench.models.tokenizers import load_tokenizer
from workbench.placement import ROLLOUT, Layout
from workbench.placement.role_model import head_of
from workbench.resharding.weights import model_weights
from workbench.settings.training import WHOLE_TENSORS
from workbench.workers.roles import ROLE_WORKERS, ActorWorker
from workbench.workers.roles.rollout import DELEGATED
from workbench.workers.worker import Worker

if TYPE_CHECKING:
    from workbench.config.description import Description

# By package: a setting that does not need it, and the extra that installs it.
INSTEAD = {
    "deepspeed": ("Training(engine='torch')", "deepspeed"),
    "vllm": ("Generation(engine='transformers')", "vllm-{device}"),
    "ray": ("backend='inline'", "ray"),
    "peft": ("an actor without an adapter", "lora"),
    "bitsandbytes": ("Training(optimizer='adamw')", "adam8bit"),
}


def check(description: Description) -> None:
    """Raise `BadInput`, or another typed error, for a description that cannot work."""
    on_cpu, several = description.device == "cpu", [pool for pool in description.placement.pools if pool.devices > 1]
    if description.devices is not None and description.placement.devices > description.devices:
        declare = f"declare them with wb.open(..., devices={description.placement.devices}), or use fewer"
        join = "" if on_cpu else ", or join a cluster with address="
        raise BadInput(
            f"a placement of {description.placement.devices} devices ({description.placement})",
            f"this workbench has {description.devices} {'slots (shares of its cores)' if on_cpu else 'GPU(s)'}",
            (declare if on_cpu or not several else "use fewer") + join,
        )
    if 0 < description.gpus < 1 and several:
        raise BadInput(
            f"pool {several[0].name!r} of {several[0].devices} devices, each {description.gpus:g} of a GPU",
            "the ranks of a pool communicate by NCCL, so each needs its own GPU; pools may share one",
            "leave devices= out if this machine has enough GPUs, give the pool one device, or join a cluster with "
            "address=",
        )
    in_vllm = description.generation is not None and description.generation.engine == "vllm"
    if 0 < description.gpus < 1 and description.takes_turns and in_vllm:
        raise BadInput(
            f"share_memory={description.share_memory!r} where each device is {description.gpus:g} of a GPU",
            "torch counts the memory of a sleeping vLLM as part of the share, and gives it to no other role",
            "leave devices= out, so that a device is a whole GPU, or leave share_memory out",
        )
    if description.backend == "inline" and description.placement.devices != 1:
        raise BadInput(
            f"a placement of {description.placement.devices} devices with backend='inline'",
            "the inline backend runs everything in the kernel, on one device",
            "use Placement.colocate(devices=1), or backend='ray'",
        )
    for model in description.models.values():  # all names, before weights are fetched or converted
        name = model.judge.model if model.judge is not None else model.name
        if name is not None and name not in BUNDLED:
            config_file(name)
    for role, model in description.models.items():
        if model.function is not None:
            check_function(model.function)
        if model.judge is not None:
            _check_judge(description, role, model.judge)
    _check_workers(description)
    _check_rollout(description)
    _check_environments(description)
    _check_layouts(description)
    _check_tensor_sizes(description)
    _check_installed(description)
    _check_models(description)
    _check_rates(description)
    _check_tensor_groups(description)


def _check_judge(description: Description, role: str, judge: Judging) -> None:
    resolve(judge.model)
    generation, layout = description.models[role].generation, description.placement.layout_of(role)
    if layout.p * layout.t > 1 or (generation and generation.tensor_parallel_size > 1):
        raise BadInput(
            f"models[{role!r}], a judge that is sharded over ranks",
            "each device of its pool holds the whole judge",
            "leave its layout and Generation.tensor_parallel_size out",
        )
    if description.share_memory:
        raise BadInput(
            f"share_memory={description.share_memory!r} with a judge",
            "a judge cannot share memory: its engine keeps its weights",
            f"give {role!r} a pool of its own, and leave share_memory out",
        )
    if generation:
        check_model(load_config(judge.model), generation, f"the judge {judge.model}")


def _check_rates(description: Description) -> None:
    """Raise `BadInput` for a pattern in `Training.rates` that matches no trained weight of its role."""
    for role, model in description.role_models().items():
        if model is None or not model.trained or not model.training.rates:
            continue
        names = [weight.name for weight in model.trained_weights]
        for pattern in model.training.rates:
            if not any(re.search(pattern, name) for name in names):
                parts = {part for name in names for part in (name, *name.split("."))}
                near = difflib.get_close_matches(pattern, sorted(parts), n=3, cutoff=0.5)
                raise BadInput(
                    f"Training.rates with the pattern {pattern!r}, for the {role}",
                    f"it matches none of its {len(names)} trained weights, such as {', '.join(names[:3])}, {names[-1]}",
                    (f"the nearest: {', '.join(map(repr, near))}; or " if near else "")
                    + "give the role settings of its own: wb.Model(name, training=...)",
                )


def _check_tensor_groups(description: Description) -> None:
    generation = description.generation
    if generation is None:
        return
    ranks = description.placement.pool_of(ROLLOUT if ROLLOUT in description.models else "actor").devices
    if ranks % generation.tensor_parallel_size:
        raise BadInput(
            f"Generation.tensor_parallel_size={generation.tensor_parallel_size} on a pool of {ranks} devices",
            "the pool's ranks are divided into tensor groups of that size",
            f"choose a size that divides {ranks}",
        )


def _check_layouts(description: Description) -> None:
    for role, model in description.models.items():
        layout = description.placement.layout_of(role)
        if layout.p * layout.t == 1 or not description.is_ours(role):
            continue
        assert model.training is not None
        assert model.name is not None
        if model.adapter is not None:
            raise BadInput(
                f"layouts[{role!r}]={layout} with {model.adapter}",
                "an adapter is trained on a whole model: p*t must be 1",
                f"leave the layout out, which gives {Layout(d=layout.size)}",
            )
        try:
            if model.trained and model.training.engine == "deepspeed":
                check_deepspeed_layout(layout, model.training)
            check_shardable(load_config(model.name), layout, head_of(role))
            optimizer = model.training.optimizer
            if model.trained and optimizer in WHOLE_TENSORS and layout.t > 1:
                raise BadInput(
                    f"Training(optimizer={optimizer!r})",
                    f"{WHOLE_TENSORS[optimizer]}, and t={layout.t} splits them",
                    "use t=1 (p and d are free), or optimizer='adamw'",
                )
        except BadInput as error:
            raise BadInput(f"layouts[{role!r}]={layout}: {error.value}", error.rule, error.remedy) from None
        description.layout_of(role)


def _check_tensor_sizes(description: Description) -> None:
    """Raise `BadInput` for DeepSpeed roles of one pool with different t: it has one tensor group per process."""
    first: dict[str, str] = {}
    for role, model in description.models.items():
        if not (
            description.is_ours(role) and model.trained and model.training and model.training.engine == "deepspeed"
        ):
            continue
        other = first.setdefault(description.placement.pool_of(role).name, role)
        t, of_other = description.placement.layout_of(role).t, description.placement.layout_of(other).t
        if t != of_other:
            raise BadInput(
                f"t={of_other} for {other!r} and t={t} for {role!r} with Training(engine='deepspeed')",
                "roles that DeepSpeed trains on the same devices must have the same t",
                "give them layouts with the same t, or use Training(engine='torch') for one of them",
            )


def _check_installed(description: Description) -> None:
    actor = description.models.get("actor")
    wanted = {str(m.training.engine) for m in description.models.values() if m.training and m.trained} - {"torch"}
    if description.generation and description.generation.engine != "transformers":
        wanted.add(description.generation.engine)
    judges = [m for m in description.models.values() if m.judge is not None and m.generation is not None]
    wanted |= {m.generation.engine for m in judges if m.generation} - {"transformers"}
    if actor and actor.adapter:
        wanted.add("peft")
        in_vllm = description.generation is not None and description.generation.engine == "vllm"
        if in_vllm and description.device == "cuda" and actor.dtype == "float32":
            raise BadInput(
                f"{actor.adapter} in float32 with Generation(engine='vllm') on a GPU",
                "on a GPU, vLLM computes adapters only in bfloat16 or float16",
                "leave dtype out, or use Generation(engine='transformers')",
            )
    if any(m.training and m.trained and m.training.optimizer == "adamw_8bit" for m in description.models.values()):
        wanted.add("bitsandbytes")
    if description.backend == "ray":
        wanted.add("ray")
    for package in sorted(wanted):
        if importlib.util.find_spec(package) is None:
            instead, extra = INSTEAD[package]
            extra = extra.format(device="cpu" if description.device == "cpu" else "gpu")
            raise MissingDependency.of(package, "the settings of this workbench need it", extra, instead)


def _check_rollout(description: Description) -> None:
    """Check the actor's class, memory sharing and tensor-parallel size for rollout workers, if there are any."""
    if ROLLOUT not in description.models:
        return
    worker, own = description.models["actor"].worker or ActorWorker, ActorWorker
    changed = [n for n in DELEGATED if getattr(worker, n, None) is not getattr(own, n)]
    if changed:
        raise BadInput(
            f"models['actor'] with worker={worker.__name__}, which has a {changed[0]} of its own",
            "the placement has rollout workers, which do this instead of the actor",
            "leave 'rollout' out of the placement: then the actor generates",
        )
    beside = [r for r in description.placement.pool_of(ROLLOUT).roles if r != ROLLOUT and description.models[r].name]
    if description.share_memory and beside:
        raise BadInput(
            f"share_memory={description.share_memory!r} with {beside[0]} in the pool of 'rollout'",
            "rollout workers cannot share memory: their engine keeps its weights",
            "give 'rollout' a pool of its own, or leave share_memory out",
        )
    model = description.models[ROLLOUT]
    assert model.name and model.generation
    size = model.generation.tensor_parallel_size
    if size > 1:
        model_weights(load_config(model.name)).check(1, size)


def _check_environments(description: Description) -> None:
    """Check that a pool for environments has at least one process for each rank that generates."""
    placement = description.placement
    if (pool := placement.environments) is None:
        return
    ranks = placement.pool_of(ROLLOUT if ROLLOUT in description.models else "actor").devices
    if pool.devices < ranks:
        raise BadInput(
            f"pool {pool.name!r} of {pool.devices} processes of environments, for {ranks} ranks that generate",
            "each of these ranks needs at least one process of its own",
            f"give the pool {ranks} processes or more",
        )


def _check_workers(description: Description) -> None:
    for role, model in description.models.items():
        worker, own = model.worker, ROLE_WORKERS[role]
        if worker is None:
            continue
        if not isinstance(worker, type) or not issubclass(worker, Worker):
            raise BadInput(
                f"models[{role!r}] with worker={shown(worker)}",
                f"a worker of this role is a class derived from {own.__name__}",
                f"class Mine({own.__name__}): ...",
            )
        others = [name for name, kind in ROLE_WORKERS.items() if issubclass(worker, kind)]
        if others and not issubclass(worker, own):
            raise BadInput(
                f"models[{role!r}] with worker={worker.__name__}",
                f"this class is for {' or '.join(others)}",
                f"derive it from {own.__name__}",
            )


def _check_models(description: Description) -> None:
    lead = description.models[description.lead]
    assert lead.name is not None
    vocabulary = load_tokenizer(lead.name).get_vocab()
    for role, model in description.models.items():
        if model.name not in (None, lead.name) and load_tokenizer(str(model.name)).get_vocab() != vocabulary:
            raise BadInput(
                f"models[{role!r}]={str(model.name)!r} has another vocabulary than the {description.lead}'s",
                "all roles must use the same tokens",
                "use a model of the same family" + (", or score with a function" if role in ("reward", "cost") else ""),
            )
    if description.generation:
        config = load_config(lead.name)
        check_model(config, description.generation, str(lead.name))
        if config.model_type == "gpt_oss" and lead.adapter is None and description.generation.engine == "vllm":
            raise BadInput(
                f"Generation.engine='vllm' for {lead.name}, a gpt_oss without an adapter",
                "vLLM does not reload its experts: a weight sync would leave them as they were",
                "use engine='transformers'",
            )
