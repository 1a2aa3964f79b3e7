"""An interactive RLHF research workbench: one controller in a notebook over live worker groups.

    import workbench as wb
    lab = wb.open("first", models={...}, placement=wb.Placement.colocate(devices=1), prompts="arithmetic")

What `lab` can do: `Workbench`, with the `stages` and `views` that it is made of, and the operations of its roles.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workbench.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from workbench import mapping as mapping
    from workbench import script as script
    from workbench.algorithms import *  # noqa: F403 (every algorithm)
    from workbench.algorithms.correction import Correction as Correction
    from workbench.algorithms.loop import Algorithm as Algorithm
    from workbench.controller import Workbench as Workbench
    from workbench.dataflow import verifiers as verifiers
    from workbench.dataflow.batch import Batch as Batch
    from workbench.engines.settings import Generation as Generation
    from workbench.engines.settings import Sampling as Sampling
    from workbench.engines.settings import Training as Training
    from workbench.models.lora import LoRA as LoRA
    from workbench.models.spec import Model as Model
    from workbench.opening import attach as attach
    from workbench.opening import ls as ls
    from workbench.opening import open as open
    from workbench.opening import restore as restore
    from workbench.opening import stop as stop
    from workbench.placement import Layout as Layout
    from workbench.placement import Placement as Placement
    from workbench.workers.operation import register as register
    from workbench.workers.protocols import PROTOCOLS as PROTOCOLS
    from workbench.workers.protocols import protocol as protocol

# name -> module; loaded when first used, so that `import workbench` is quick and pulls in no engine
_PUBLIC = {
    **ALGORITHMS,
    "Algorithm": "workbench.algorithms.loop",
    "Batch": "workbench.dataflow.batch",
    "Correction": "workbench.algorithms.correction",
    "Generation": "workbench.engines.settings",
    "Layout": "workbench.placement",
    "LoRA": "workbench.models.lora",
    "Model": "workbench.models.spec",
    "PROTOCOLS": "workbench.workers.protocols",
    "Placement": "workbench.placement",
    "Sampling": "workbench.engines.settings",
    "Training": "workbench.engines.settings",
    "Workbench": "workbench.controller",
    "attach": "workbench.opening",
    "ls": "workbench.opening",
    "open": "workbench.opening",
    "restore": "workbench.opening",
    "protocol": "workbench.workers.protocols",
    "register": "workbench.workers.operation",
    "mapping": "workbench",
    "script": "workbench",
    "stop": "workbench.opening",
    "verifiers": "workbench.dataflow",
}
_MODULES = ("mapping", "script", "verifiers")

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    home = _PUBLIC[name]
    value = importlib.import_module(f"{home}.{name}" if name in _MODULES else home)
    value = value if name in _MODULES else getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "errors"]
