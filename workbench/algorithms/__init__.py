"""The RL algorithms, each a dataflow of stages; their estimators and losses are functions in `workbench.objectives`.

To add an algorithm: write it in its own file, like `ppo.py`; add it to `_MODULES`, and to the imports for type
checkers below; write a lesson. Then it is available as `wb.Mine(lab)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# class -> file; each is imported when its class is first used, so that `import workbench` stays fast
_MODULES = {
    "ArCHer": "archer", "DAPO": "dapo", "DPO": "dpo", "Distill": "distill", "GRPO": "grpo", "HPT": "hpt", "IPO": "ipo",
    "KTO": "kto", "ORPO": "orpo", "PPO": "ppo", "RLOO": "rloo", "ReMax": "remax", "ReinforcePP": "reinforce_pp",
    "RewardModeling": "reward_modeling", "SFT": "sft", "SafeRLHF": "safe_rlhf",
}  # fmt: skip
ALGORITHMS = {name: f"workbench.algorithms.{module}" for name, module in _MODULES.items()}

if TYPE_CHECKING:
    from workbench.algorithms.archer import ArCHer as ArCHer
    from workbench.algorithms.dapo import DAPO as DAPO
    from workbench.algorithms.distill import Distill as Distill
    from workbench.algorithms.dpo import DPO as DPO
    from workbench.algorithms.grpo import GRPO as GRPO
    from workbench.algorithms.hpt import HPT as HPT
    from workbench.algorithms.ipo import IPO as IPO
    from workbench.algorithms.kto import KTO as KTO
    from workbench.algorithms.orpo import ORPO as ORPO
    from workbench.algorithms.ppo import PPO as PPO
    from workbench.algorithms.reinforce_pp import ReinforcePP as ReinforcePP
    from workbench.algorithms.remax import ReMax as ReMax
    from workbench.algorithms.reward_modeling import RewardModeling as RewardModeling
    from workbench.algorithms.rloo import RLOO as RLOO
    from workbench.algorithms.safe_rlhf import SafeRLHF as SafeRLHF
    from workbench.algorithms.sft import SFT as SFT


if not TYPE_CHECKING:  # with a `__getattr__`, a type checker would accept any name as a member of the package

    def __getattr__(name: str) -> Any:
        if name not in ALGORITHMS:
            raise AttributeError(f"module 'workbench.algorithms' has no attribute {name!r}")
        return getattr(importlib.import_module(ALGORITHMS[name]), name)
