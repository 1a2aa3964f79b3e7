"""An interactive RLHF research workbench: one controller in a notebook over live worker groups.

    import workbench as wb
    lab = wb.open("first", models={...}, placement=wb.Placement.colocate(devices=1), prompts="arithmetic")

What `lab` can do: `Workbench`, and the operations of its roles.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from workbench import errors as errors
from workbench.algorithms import ALGORITHMS
from workbench.support.notebook_cell import note_failures

if TYPE_CHECKING:
    from workbench import mapping as mapping
    from workbench.algorithms import *  # noqa: F403 (every algorithm)
    from workbench.algorithms.loop import Algorithm as Algorithm
    from workbench.batches.batch import Batch as Batch
    from workbench.comparisons.dial import dial as dial
    from workbench.comparisons.diff import diff as diff
    from workbench.comparisons.model_card import model_card as model_card
    from workbench.comparisons.replay import replay as replay
    from workbench.comparisons.runs import runs as runs
    from workbench.comparisons.sweep import sweep as sweep
    from workbench.controller import Workbench as Workbench
    from workbench.data import adapters as adapters
    from workbench.data import sandbox as sandbox
    from workbench.data import toolbox as toolbox
    from workbench.data import verifiers as verifiers
    from workbench.data.batched import batched as batched
    from workbench.data.judge import Judge as Judge
    from workbench.data.tools import Tools as Tools
    from workbench.launch import script as script
    from workbench.launch.listing import ls as ls
    from workbench.launch.opening import attach as attach
    from workbench.launch.opening import open as open
    from workbench.launch.opening import restore as restore
    from workbench.launch.opening import stop as stop
    from workbench.messages.operation import register as register
    from workbench.messages.protocols import PROTOCOLS as PROTOCOLS
    from workbench.messages.protocols import protocol as protocol
    from workbench.models.chat_format import ChatFormat as ChatFormat
    from workbench.models.lora import LoRA as LoRA
    from workbench.models.spec import Model as Model
    from workbench.objectives.correction import Correction as Correction
    from workbench.objectives.losses import ClipCov as ClipCov
    from workbench.objectives.losses import KLCov as KLCov
    from workbench.placement import Layout as Layout
    from workbench.placement import Placement as Placement
    from workbench.settings.context import Context as Context
    from workbench.settings.engines import Generation as Generation
    from workbench.settings.engines import Sampling as Sampling
    from workbench.settings.precision import Precision as Precision
    from workbench.settings.training import Training as Training
    from workbench.support.calls.limits import limits as limits

# OpenMP threads sleep while they wait for each other, instead of spinning: spinning beside a browser, which needs a
# core too, made an inline workbench on a CPU up to 25 times slower. OpenMP reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Put large tensors in host memory into huge pages, where Linux has them: without, an update on a CPU spent a quarter
# of its processor time on page faults. torch reads this when it allocates the first large tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

note_failures()

# by module, the names in it that are public, besides the algorithms
_NAMES_IN = {
    "": "mapping",
    ".algorithms.loop": "Algorithm",
    ".batches.batch": "Batch",
    ".comparisons.dial": "dial",
    ".comparisons.diff": "diff",
    ".comparisons.model_card": "model_card",
    ".comparisons.replay": "replay",
    ".comparisons.runs": "runs",
    ".comparisons.sweep": "sweep",
    ".controller": "Workbench",
    ".data": "adapters sandbox toolbox verifiers",
    ".data.batched": "batched",
    ".data.judge": "Judge",
    ".data.tools": "Tools",
    ".launch": "script",
    ".launch.listing": "ls",
    ".launch.opening": "attach open restore stop",
    ".messages.operation": "register",
    ".messages.protocols": "PROTOCOLS protocol",
    ".models.chat_format": "ChatFormat",
    ".models.lora": "LoRA",
    ".models.spec": "Model",
    ".objectives.correction": "Correction",
    ".objectives.losses": "ClipCov KLCov",
    ".placement": "Layout Placement",
    ".settings.context": "Context",
    ".settings.engines": "Generation Sampling",
    ".settings.precision": "Precision",
    ".settings.training": "Training",
    ".support.calls.limits": "limits",
}
# name -> module. A name is loaded at its first use, so that `import workbench` is quick and imports no engine
_PUBLIC = ALGORITHMS | {name: f"workbench{home}" for home, names in _NAMES_IN.items() for name in names.split()}
_MODULES = ("adapters", "mapping", "sandbox", "script", "toolbox", "verifiers")

__all__ = sorted(_PUBLIC)


if not TYPE_CHECKING:  # with it, a type checker would accept any name as one of the package

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            from workbench.support.named_fields import remedy_for

            near = "" if name.startswith("_") else remedy_for(name, _PUBLIC, "wb.{}".format)
            raise AttributeError(f"module 'workbench' has no attribute {name!r}" + (f": {near}" if near else ""))
        home = _PUBLIC[name]
        value = importlib.import_module(f"{home}.{name}" if name in _MODULES else home)
        value = value if name in _MODULES else getattr(value, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "errors"]
