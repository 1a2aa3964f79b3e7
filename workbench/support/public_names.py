"""What `import workbench as wb` offers, beside the algorithms: each name, and the module that defines it."""

from __future__ import annotations

PUBLIC_NAMES = {
    "Algorithm": "workbench.algorithms.loop",
    "Batch": "workbench.batches.batch",
    "Correction": "workbench.objectives.correction",
    "Generation": "workbench.settings.engines",
    "Layout": "workbench.placement",
    "LoRA": "workbench.models.lora",
    "Model": "workbench.models.spec",
    "PROTOCOLS": "workbench.messages.protocols",
    "Placement": "workbench.placement",
    "Precision": "workbench.settings.precision",
    "Sampling": "workbench.settings.engines",
    "Training": "workbench.settings.engines",
    "Workbench": "workbench.controller",
    "attach": "workbench.launch.opening",
    "batched": "workbench.data.batched",
    "limits": "workbench.support.calls.limits",
    "ls": "workbench.launch.listing",
    "open": "workbench.launch.opening",
    "restore": "workbench.launch.opening",
    "protocol": "workbench.messages.protocols",
    "register": "workbench.messages.operation",
    "mapping": "workbench",
    "sandbox": "workbench.data",
    "script": "workbench.launch",
    "stop": "workbench.launch.opening",
    "verifiers": "workbench.data",
}
