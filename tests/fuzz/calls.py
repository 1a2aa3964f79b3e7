"""Every public callable, with values that would do for its arguments: what `test_calls.py` calls with any values.

The table is made of the public names of `wb`, of its classes, and of the objects that a workbench hands out. A name
without an underscore in front is in it, or in `INTERNAL`; a parameter without a default has values in `right_values`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import workbench as wb
from workbench.stages.group import GroupOperation
from workbench.support.validation import hints_of

SIZES = dict.fromkeys(("actor", "critic", "reference", "reward"), "llama-7b")

# as `checks_calls(internal=)`, for classes without it
INTERNAL = {
    "WorkerGroup": "delegate place set_worker take_back take_edits",
    "ExampleStream": "check resume_if_same",
    "Layout": "coordinates generating generation_place groups mesh rank",  # once a rank in each stage
    "Model": "changed filled of",
    "Generation": "rows_at_once",
    "operations": "measure_gradient publish_weights take_weights",
}
# what takes long, or changes the workbench, when all of its arguments are right: one of them always is of a wrong type
SLOW = {
    "lab": "add calibrate check close compare conversation debug drop end evaluate export load move panel predict "
    "recover refresh_reference reload resize save serve suggest track wait autoreload",
    "algo": "draw_ahead run iterate step",
    "group": "move relayout",
    "wb": "sweep open attach restore stop script.run mapping.search mapping.predict mapping.simulate mapping.what_if "
    "register protocol sandbox.run_python",
    "batch": "save",
    "toolbox": "python",
    "adapters": "mcp_tools",
}


@dataclass
class Call:
    """A callable, and what is known of its arguments. name: as users write it. right: values that would do, by
    parameter; of *several those of one, of **named a dict of them."""

    name: str
    function: Callable[..., Any]
    right: Mapping[str, list[Any]]
    slow: bool = False

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @cached_property
    def hints(self) -> dict[str, Any]:
        if isinstance(self.function, GroupOperation):
            return dict(self.function.operation.hints)
        if isinstance(self.function, type):
            return hints_of(self.function)
        if isinstance(self.function, partial):  # an assignment, which checks by itself
            return {}
        return hints_of(getattr(self.function, "__func__", self.function))

    @property
    def without_values(self) -> list[str]:
        """Parameters that have to be given, and for which no value is known."""
        return [
            name for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty and name not in self.right
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]  # fmt: skip


def public(owner: Any, internal: str = "") -> list[str]:
    """The public callables of an object's class, by name."""
    listed = {name for name in dir(type(owner)) if not name.startswith("_")} & set(dir(owner))
    members = {name: inspect.getattr_static(owner, name) for name in sorted(listed)}
    kinds = (staticmethod, classmethod)
    return [
        name for name, member in members.items()
        if name not in internal.split() and (callable(member) or isinstance(member, kinds))
    ]  # fmt: skip


def right_values(lab: wb.Workbench, batch: wb.Batch, algorithm: wb.Algorithm, folder: Path) -> dict[str, list[Any]]:
    """Values for parameters by name; "CALL.parameter" stands for one call alone."""
    evaluation = lab.evaluate("arithmetic/test", n=1, samples=1, sampling=wb.Sampling(max_new_tokens=2))
    return {
        "n": [1, 2], "rows": [[0], [1, 0], range(2)], "columns": [["prompt"], ("prompt_ids", "prompt_uid")],
        "column": ["prompt_uid", "prompt"], "lengths.column": ["response_ids"], "drop.columns": ["prompt"],
        "select.columns": ["prompt"], "seed": [0, 7],
        "other": [batch.select("prompt_uid").rename(prompt_uid="same")], "batches": [[batch, batch]],
        "path": [folder / "file", str(folder / "other")], "placement": [lab.placement], "algorithm": [algorithm, None],
        "ranks": [1], "minibatches": [1], "name": [batch.id], "release.name": ["gone"], "token_ids": [[1, 2, 3]],
        "function": [lambda *batches, **_: batches], "stage": ["compute_log_prob"], "metrics": [{"mean": 1.0}],
        "roles": ["actor"], "restrict.roles": [["actor"]], "split.devices": [2], "split.n": [1, 2],
        "traffic.kind": ["batch"], "transfers.kind": ["batch"], "apply.batches": [batch], "autosave.keep": [1],
        "autosave.models": [False], "traffic.stage": [None], "autosave.folder": [str(folder / "saved")],
        "diff.models": [{}], "estimate.placement": [lab.placement], "names": ["masks"], "views": ["timeline"],
        "what": ["a test"], "stopping": [lambda: False], "role": ["actor"], "pool": ["shared"], "devices": [1],
        "layout": [(1, 1, 1), wb.Layout()], "layouts": [{}], "pools": [{"a": (1, ["actor"])}], "batch": [batch],
        "arms": [{"same": algorithm}], "data": ["arithmetic/test"], "source": [[{"prompt": "a", "response": "b"}]],
        "lab.feedback.source": [[{"prompt": "a", "response": "b", "label": True}]],
        "lab.pairs.source": [[{"prompt": "a", "chosen": "b", "rejected": "c"}]], "table": [{"prompt": ["a", "b"]}],
        "keep": [[True] * batch.rows], "draw.keep": [False], "groups": [1], "max_staleness": [0, 2], "older_than": [0],
        "tracker": ["tensorboard"], "output": [str(folder / "script.py")], "iterations": [1], "main": [lambda: None],
        "models": [SIZES], "hardware": ["a100-80g"], "workload": ["ppo"], "protocol": ["DP_PROTO"],
        "wb.protocol.name": ["MINE"], "wb.attach.name": ["nobody"], "wb.stop.name": ["nobody"],
        "plan": [wb.mapping.search(SIZES, devices=8, top=1).plans[0]], "prompt": ["1+1="],
        "lab.prompts.ledger.by": ["prompt", "version"], "lab.prompts.show.prompt": ["1+1=", {"prompt": "a"}],
        "program": ["print(1)"], "tests": ["assert True"], "wb.dial.lab": [lab], "wb.model_card.run": [lab],
        "wb.model_card.role": ["actor"], "instruction_id_list": [["punctuation:no_comma"]],
        "curves.metrics": ["generate_sequences/response_tokens/mean"], "wb.diff.a": [lab], "wb.sweep.name": ["mine"],
        "train": [lambda seed: 1.0], "wb.replay.run": [lab],
        "wb.sweep.arms": [{"a": {}}], "wb.diff.b": [lab, str(lab.run_folder)],
        "reweigh.weights": [{"a": 1.0}], "compute_reward.weights": [None], "rubric": ["{response}"],
        "model": ["tiny-qwen2"], "one": ["prompt_uid"], "two": ["finished"], "row": ["1+1="],
        "limits": [{"timeout_s": 1.0}], "response": ["2"], "answer": ["2"], "gsm8k.answer": ["#### 2"],
        "group_diversity.prompt": [["1+1="]], "group_diversity.response": [["2"]], "response_ids": [[[1, 2]]],
        "expression": ["1 + 1"], "corpus": [["a text"]], "make": ["FrozenLake-v1"], "url": ["http://localhost:8000"],
        "action": ["message"], "command": [["python", "server.py"]], "toolbox.search.name": ["search"],
        "code": ["print(1)"], "tools": [[wb.toolbox.calculator]], "group_length.prompt": [["1+1="]],
        "group_length.response": [["2"]], "standalone.devices": [{"actor": 1}],
        "rename.names": [{"prompt": "question"}], "replace.stage": ["update_actor"],
        "replace.arguments": [{"clip": 0.1}], "remove.stage": ["nothing"], "insert.after": ["nothing"],
        "add.role": ["actor"], "kept.roles": ["actor"], "options": [{}], "max_response_tokens": [3],
        "correction": [wb.Correction()], "beta": [0.1], "gamma": [1.0], "lam": [0.9], "kl": [0.5], "multiplier": [1.0],
        "evaluate.answer": [None, len], "evaluate.select": [None, "role"], "compare_evaluations.a": [evaluation],
        "compare_evaluations.b": [evaluation], "of": ["reward", "passed"], "samples": [4], "evaluate.samples": [1],
    }  # fmt: skip


def calls(lab: wb.Workbench, batch: wb.Batch, algorithm: wb.Algorithm, folder: Path) -> list[Call]:
    """The table, of a living workbench."""
    values = right_values(lab, batch, algorithm, folder)
    examples = lab.demonstrations([{"prompt": "a", "response": "b"}] * 4, held_out=1)
    run = lab.actor.compute_log_prob.submit(batch)
    owners: list[tuple[str, Any, str]] = [
        ("lab", lab, ""), ("batch", batch, ""),
        ("algo", algorithm, ""), ("Placement", wb.Placement.colocate(), ""),
        ("lab.prompts", lab.prompts, ""), ("examples", examples, INTERNAL["ExampleStream"]),
        ("group", lab.actor, INTERNAL["WorkerGroup"]), ("lab.buffer", lab.buffer, ""),
    ]  # fmt: skip
    found = [
        _call(f"{called}.{name}", getattr(owner, name), values)
        for called, owner, internal in owners
        for name in public(owner, internal)
    ]
    found += [_call(f"run.{name}", getattr(run, name), values) for name in ("result", "wait", "cancel", "submit")]
    for role, group in lab.groups.items():
        found += [
            _call(f"{role}.{name}", operation, values)
            for name, operation in group.operations.items()
            if name not in INTERNAL["operations"].split()
        ]
    found.append(_call("lab.compute_advantages", lab.compute_advantages, values))
    found.append(_call("lab.conversation", lab.conversation.__call__, values))
    found += [
        _call("lab.history.changes", lab.history.changes, values),
        _call("timeline.sums", lab.timeline().sums, values),
    ]
    for name in ("limit_bytes", "limit_batches"):
        found.append(Call(f"store.{name}", partial(setattr_of, lab.store, name), {"value": [10**9]}))
    found.append(Call("buffer.priority", partial(setattr_of, lab.buffer, "priority"), {"value": [None, len]}))
    for name, value in (("order", [None, lambda ledger: ledger]), ("threshold", [1.0, 0.5])):
        found.append(Call(f"lab.prompts.{name}", partial(setattr_of, lab.prompts, name), {"value": value}))
    found += [_call(f"wb.{name}", getattr(wb, name), values) for name in ("open", "attach", "restore", "stop", "ls")]
    runs = wb.runs(str(lab.run_folder.parents[1]))
    found += [
        _call(f"wb.{name}", getattr(wb, name), values)
        for name in ("runs", "dial", "diff", "sweep", "model_card", "replay")
    ]
    found += [_call(f"runs.{name}", getattr(runs, name), values) for name in ("arms", "curves", "differing")]
    found += [
        _call(f"wb.{name}", getattr(wb, name), values) for name in ("register", "protocol", "batched", "Judge", "Tools")
    ]
    found.append(_call("wb.script.run", wb.script.run, values))
    mapping = ("search", "predict", "simulate", "what_if")
    found += [_call(f"wb.mapping.{n}", getattr(wb.mapping, n), values) for n in mapping]
    found += [_call(f"wb.sandbox.{n}", getattr(wb.sandbox, n), values) for n in ("run_python",)]
    verifiers = ("arithmetic", "gsm8k", "math", "code", "format", "instructions", "group_diversity", "group_length")
    found += [_call(f"verifiers.{n}", getattr(wb.verifiers, n), values) for n in verifiers]
    found += [_call(f"adapters.{n}", getattr(wb.adapters, n), values) for n in ("Gymnasium", "OpenEnv", "mcp_tools")]
    found += [_call(f"toolbox.{n}", getattr(wb.toolbox, n), values) for n in ("calculator", "search", "python")]
    return found


def setattr_of(owner: Any, name: str, value: Any, **_: Any) -> None:
    """Assign a field, as a call; it has no other arguments."""
    setattr(owner, name, value)


def _call(name: str, function: Callable[..., Any], values: Mapping[str, list[Any]]) -> Call:
    owner, _, short = name.partition(".")
    right = {}
    for parameter in inspect.signature(function).parameters:
        known = (f"{name}.{parameter}", f"{name.rpartition('.')[2]}.{parameter}", parameter)
        if found := [values[key] for key in known if key in values]:
            right[parameter] = found[0]
    slow = isinstance(function, GroupOperation) or short in SLOW.get(owner, "").split()
    return Call(name, function, right, slow=slow)
