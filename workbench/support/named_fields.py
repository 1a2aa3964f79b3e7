"""Refuses unknown argument names, and suggests the right name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown

KEYWORD, SEVERAL = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL
NAMED = inspect.Parameter.VAR_KEYWORD

# Our names of a field -> the names in other libraries. Of several of ours, the first one that the class has counts.
_NAMES_ELSEWHERE: dict[str, str] = {
    "activation_checkpointing": "gradient_checkpointing",
    "adapter": "lora peft_config",
    "alpha": "lora_alpha",
    "clip": "clip_ratio cliprange epsilon",
    "clip_high": "clip_ratio_high epsilon_high",
    "devices": "gpus n_gpus_per_node num_gpus",
    "dtype": "torch_dtype",
    "dual_clip": "clip_ratio_c",
    "entropy_coefficient": "entropy_coeff",
    "epochs": "num_iterations num_ppo_epochs num_train_epochs ppo_epochs",
    "eps": "adam_epsilon",
    "gpu_memory_fraction": "gpu_memory_utilization",
    "iterations": "num_steps steps",
    "kl_coefficient": "init_kl_coef kl_coef kl_loss_coef",
    "kl_coefficient beta": "beta",
    "lam": "gae_lambda",
    "learning_rate": "lr",
    "max_model_tokens": "max_model_len",
    "max_new_tokens": "max_completion_length max_response_length response_length",
    "max_new_tokens max_model_tokens": "max_tokens",
    "max_prompt_tokens": "max_prompt_length",
    "max_rows": "max_num_seqs",
    "max_tokens max_model_tokens max_new_tokens": "max_length",
    "micro_batch_tokens": "ppo_max_token_len_per_gpu",
    "minibatches": "num_mini_batches",
    "name": "experiment_name model_name_or_path run_name",
    "optimizer": "optim",
    "prompts rows": "batch_size per_device_train_batch_size train_batch_size",
    "rank": "lora_rank r",
    "reward": "reward_fn reward_funcs",
    "runs": "output_dir",
    "samples": "group_size num_generations num_return_sequences rollout_n",
    "samples iterations": "n",
    "save_every": "save_steps",
    "schedule": "lr_scheduler_type",
    "source": "data file path train_dataset",
    "source data": "dataset",
    "stop": "stop_strings",
    "targets": "target_modules",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "total_steps": "total_training_steps",
    "track": "report_to",
    "value_clip": "cliprange_value",
}
SYNONYMS = {name: tuple(ours.split()) for ours, names in _NAMES_ELSEWHERE.items() for name in names.split()}

# Fields that users often give to a wrong class.
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

# Names of things that are done in another place -> how to write them there.
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("data", "dataset", "source", "train_dataset"), "wb.open(..., prompts=...)"),
    **dict.fromkeys(("fit", "learn", "max_steps", "run", "train"), "algorithm.run(3), as in wb.PPO(lab).run(3)"),
    **dict.fromkeys(("checkpoint", "load_checkpoint", "restore", "resume_from_checkpoint"), "wb.restore(path)"),
    **dict.fromkeys(("mini_batch_size", "ppo_mini_batch_size"), "wb.Training(minibatches=...), how many there are"),
    **{name: f'prompts={{"source": ..., "{name}": ...}}'
       for name in ("bad_rows", "chat", "control_tokens", "max_prompt_tokens", "overlong", "shuffle", "stream")},
    **dict.fromkeys(("push_to_hub", "save_model", "save_pretrained"), "lab.actor.save_model(folder)"),
    **{name: f"lab.{name}(...)" for name in ("compare_evaluations", "evaluate", "serve")},
    "chat": 'prompts={"source": ..., "chat": ...}, or to talk with the policy lab.conversation("Hi")',
    "do_sample": "temperature=0, which is greedy, or leave it out",
    "generate": "lab.actor.generate_sequences(batch)",
    "ledger": "lab.prompts.ledger()",
    "gradient_accumulation_steps": "wb.Training(minibatches=..., micro_batch_tokens=...)",
    "resume": "wb.open(..., resume=path)",
    "save_checkpoint": "lab.save(path)",
    "sweep": "wb.sweep(name, train, arms)",
    "step": "algorithm.step(), as in wb.PPO(lab).step()",
}  # fmt: skip


class NamedAttributes:
    """A base class of objects that users hold: the error for an unknown attribute says what to write."""

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raises an `AttributeError` of its own
                return object.__getattribute__(self, name)
            known = [] if name.startswith("_") else [one for one in dir(self) if not one.startswith("_")]
            near = self._instead_of(name) or (remedy_for(name, known, str) if known else "")
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}" + (f": {near}" if near else ""))

    def _instead_of(self, name: str) -> str:
        """Return a remedy that takes precedence over those of `remedy_for`; "": none."""
        return ""


def remedy_for(name: str, known: Iterable[str], written: Callable[[str], str] = "{}=".format) -> str:
    """Return a remedy for an unknown name: its synonym in `known`, the settings or the algorithm that have it, another
    place where it is known, the name with the nearest spelling, or a name that begins with it; otherwise "".

    written: formats a name for the message. A name in quotes is one of data, such as a column: no setting is suggested.
    """
    names, others = list(known), SYNONYMS.get(name, ())
    for other in (*others, *(name.removesuffix(suffix) for suffix in ("Trainer", "Config", "TrainerConfig"))):
        if other != name and other in names and not (other == "prompts" and "models" in names):  # `wb.open`'s are data
            return f"write {written(other)}, its name here"
    is_setting = "'" not in written(name)
    for other in (name, *others) if is_setting else ():
        for settings, fields in FIELDS_OF.items():
            if other in fields:
                return f"it is a field of wb.{settings}: write wb.{settings}({other}=...)"
    for other in (name, *others) if is_setting else ():
        if other in ELSEWHERE:
            return f"write {ELSEWHERE[other]}"
    begun = [other for other in names if len(name) > 2 and other.startswith(name)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.65) or begun
    return f"write {written(near[0])} (the nearest)" if near else ""


def check_names(called: str, parameters: Iterable[inspect.Parameter], names: Mapping[str, Any], given: int = 0) -> None:
    """Raise `BadInput` for the first keyword argument that is not a parameter, and for missing parameters without a
    default. given: how many positional arguments there are. called: what the user calls."""
    parameters = list(parameters)
    named = [parameter for parameter in parameters if parameter.kind not in (SEVERAL, NAMED)]
    fields = [parameter.name for parameter in parameters if parameter.kind is not NAMED]
    for name, value in names.items():
        if name not in fields and len(fields) == len(parameters):
            rule = f"it takes {', '.join(fields) or 'no arguments'}"
            raise BadInput(f"{called}({name}={shown(value)})", rule, remedy_for(name, fields) or f"leave {name} out")
    needed = [p.name for p in named[given:] if p.default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in names]:
        remedy = f"write {called}({', '.join(f'{name}=...' for name in missing)}, ...)"
        raise BadInput(f"{called}() without {', '.join(missing)}", "it has no default", remedy)


def check_call(
    called: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of a call by parameter. Raises `BadInput` where they do not fit the signature."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        given = len(args) - (len(signature.parameters) - len(parameters))
        check_names(called, parameters, kwargs, given)
        named = [p for p in parameters if p.kind not in (SEVERAL, NAMED)]
        by_place = [p for p in named if p.kind is not KEYWORD]
        rule, remedy = f"it takes {', '.join(p.name for p in named) or 'no arguments'}", f"see help({called})"
        if by_place == named and parameters[-1:] and parameters[-1].kind is NAMED:
            rule += ", and other arguments by name"
            remedy = f"write {called}({', '.join(p.name for p in by_place)}, name=value)"
        if len(by_place) >= given:
            raise BadInput(f"{called}(...): {error}", rule, remedy) from None
        if not by_place:
            decorates = given == 1 and inspect.isfunction(args[-1])
            rule, remedy = (f"{rule}, by name", f"write {named[0].name}=") if named else (rule, f"write {called}()")
            remedy = f"above a function write @{called}(...), with brackets" if decorates else remedy
        elif len(by_place) < len(named):
            rule += f", {len(by_place)} by position"
        raise BadInput(f"{called}({', '.join(map(shown, args[-given:]))})", rule, remedy) from None
