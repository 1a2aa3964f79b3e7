"""Unknown argument names are refused, and the message suggests the right name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown

KEYWORD, SEVERAL = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL
NAMED = inspect.Parameter.VAR_KEYWORD

# The name of a field in other libraries -> ours; of several, the first that the class has.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "adam_epsilon": ("eps",),
    "batch_size": ("prompts", "rows"),
    "beta": ("kl_coefficient", "beta"),
    "clip_ratio": ("clip",),
    "clip_ratio_c": ("dual_clip",),
    "clip_ratio_high": ("clip_high",),
    "cliprange": ("clip",),
    "cliprange_value": ("value_clip",),
    "data": ("source",),
    "dataset": ("source", "data"),
    "entropy_coeff": ("entropy_coefficient",),
    "epsilon": ("clip",),
    "epsilon_high": ("clip_high",),
    "experiment_name": ("name",),
    "file": ("source",),
    "gae_lambda": ("lam",),
    "gpu_memory_utilization": ("gpu_memory_fraction",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "group_size": ("samples",),
    "init_kl_coef": ("kl_coefficient",),
    "kl_coef": ("kl_coefficient",),
    "kl_loss_coef": ("kl_coefficient",),
    "lora_alpha": ("alpha",),
    "lr": ("learning_rate",),
    "lr_scheduler_type": ("schedule",),
    "max_completion_length": ("max_new_tokens",),
    "max_length": ("max_tokens", "max_model_tokens", "max_new_tokens"),
    "max_model_len": ("max_model_tokens",),
    "max_num_seqs": ("max_rows",),
    "max_prompt_length": ("max_prompt_tokens",),
    "max_tokens": ("max_new_tokens", "max_model_tokens"),
    "model_name_or_path": ("name",),
    "n": ("samples",),
    "n_gpus_per_node": ("devices",),
    "num_generations": ("samples",),
    "num_iterations": ("epochs",),
    "num_mini_batches": ("minibatches",),
    "num_ppo_epochs": ("epochs",),
    "num_train_epochs": ("epochs",),
    "optim": ("optimizer",),
    "output_dir": ("runs",),
    "path": ("source",),
    "peft_config": ("adapter",),
    "per_device_train_batch_size": ("prompts", "rows"),
    "ppo_epochs": ("epochs",),
    "ppo_max_token_len_per_gpu": ("micro_batch_tokens",),
    "r": ("rank",),
    "report_to": ("track",),
    "response_length": ("max_new_tokens",),
    "reward_fn": ("reward",),
    "reward_funcs": ("reward",),
    "rollout_n": ("samples",),
    "run_name": ("name",),
    "save_steps": ("save_every",),
    "target_modules": ("targets",),
    "tensor_model_parallel_size": ("tensor_parallel_size",),
    "torch_dtype": ("dtype",),
    "total_training_steps": ("total_steps",),
    "train_batch_size": ("prompts", "rows"),
    "train_dataset": ("source",),
}

# Fields that users give to the wrong one of these.
FIELDS_OF: dict[str, tuple[str, ...]] = {
    "Sampling": ("temperature", "top_p", "top_k", "min_p", "keep_mask", "max_new_tokens", "min_new_tokens",
                 "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "environment", "agent", "max_turns",
                 "max_calls", "max_seconds"),
    "Training": ("learning_rate", "weight_decay", "schedule", "warmup_steps", "zero_stage", "max_grad_norm",
                 "minibatches", "micro_batch_tokens", "activation_checkpointing"),
    "Generation": ("max_model_tokens", "kv_cache_gib", "gpu_memory_fraction", "max_rows", "tensor_parallel_size"),
    "GRPO": ("prompts", "samples", "reward", "kl_coefficient", "clip", "clip_high", "dual_clip", "entropy_coefficient",
             "epochs"),
    "PPO": ("gamma", "lam", "value_clip"),
}  # fmt: skip

# What is done in another place -> how it is written there.
ELSEWHERE: dict[str, str] = {
    "data": "wb.open(..., prompts=...)",
    "dataset": "wb.open(..., prompts=...)",
    "fit": "algorithm.run(steps), as in wb.PPO(lab).run(3)",
    "generate": "lab.actor.generate_sequences(batch)",
    "gradient_accumulation_steps": "wb.Training(minibatches=..., micro_batch_tokens=...)",
    "load_checkpoint": "wb.restore(path)",
    "max_steps": "algorithm.run(steps), as in wb.PPO(lab).run(3)",
    "restore": "wb.restore(path)",
    "resume": "wb.open(..., resume=path)",
    "resume_from_checkpoint": "wb.restore(path)",
    "source": "wb.open(..., prompts=...)",
    "step": "algorithm.step(), as in wb.PPO(lab).step()",
    "train": "algorithm.run(steps), as in wb.PPO(lab).run(3)",
    "train_dataset": "wb.open(..., prompts=...)",
}


def meant(name: str, known: Iterable[str], written: Callable[[str], str] = "{}=".format) -> str:
    """A remedy for an unknown name: its synonym in `known`, the settings or the algorithm that has it, where else it is
    known, the name with the nearest spelling, or one that begins so; else "".

    written: how a name is shown in the message. In quotes it is one of data, such as a column: no setting is meant.
    """
    names, others = list(known), SYNONYMS.get(name, ())
    for other in others:
        if other in names and not (other == "prompts" and "models" in names):  # of `wb.open` they are the data
            return f"write {written(other)}, its name here"
    for other in (name.removesuffix(suffix) for suffix in ("Trainer", "Config", "TrainerConfig")):
        if other != name and other in names:
            return f"write {written(other)}, its name here"
    is_setting = "'" not in written(name)
    for other in (name, *others) if is_setting else ():
        for settings, fields in FIELDS_OF.items():
            if other in fields:
                return f"it is a field of wb.{settings}: write wb.{settings}({other}=...)"
    if is_setting and name in ELSEWHERE:
        return f"write {ELSEWHERE[name]}"
    begun = [other for other in names if len(name) > 2 and other.startswith(name)]
    near = difflib.get_close_matches(name, names, n=1) or begun
    return f"write {written(near[0])} (the nearest)" if near else ""


def check_names(called: str, parameters: Iterable[inspect.Parameter], names: Mapping[str, Any], given: int = 0) -> None:
    """Raise `BadInput` for the first keyword argument that is not among the parameters, and for parameters without a
    default that are missing. given: how many arguments come before, by position. called: what the user calls."""
    parameters = list(parameters)
    named = [parameter for parameter in parameters if parameter.kind not in (SEVERAL, NAMED)]
    fields = [parameter.name for parameter in parameters if parameter.kind is not NAMED]
    for name, value in names.items():
        if name not in fields and len(fields) == len(parameters):
            rule = f"it takes {', '.join(fields) or 'no arguments'}"
            raise BadInput(f"{called}({name}={shown(value)})", rule, meant(name, fields) or f"leave {name} out")
    needed = [p.name for p in named[given:] if p.default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in names]:
        remedy = f"write {called}({', '.join(f'{name}=...' for name in missing)}, ...)"
        raise BadInput(f"{called}() without {', '.join(missing)}", "it has no default", remedy)


def check_call(
    called: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call by parameter; `BadInput` where they do not fit the signature."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        given = len(args) - (len(signature.parameters) - len(parameters))
        check_names(called, parameters, kwargs, given)
        named = [p for p in parameters if p.kind not in (SEVERAL, NAMED)]
        by_place = [p for p in named if p.kind is not KEYWORD]
        rule, remedy = f"it takes {', '.join(p.name for p in named) or 'no arguments'}", f"see help({called})"
        if len(by_place) >= given:
            raise BadInput(f"{called}(...): {error}", rule, remedy) from None
        if not by_place:
            decorates = given == 1 and inspect.isfunction(args[-1])
            rule, remedy = (f"{rule}, by name", f"write {named[0].name}=") if named else (rule, f"write {called}()")
            remedy = f"above a function write @{called}(...), with brackets" if decorates else remedy
        elif len(by_place) < len(named):
            rule += f", {len(by_place)} by position"
        raise BadInput(f"{called}({', '.join(map(shown, args[-given:]))})", rule, remedy) from None
