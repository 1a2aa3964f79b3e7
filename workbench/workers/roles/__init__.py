"""The roles. A new role is one file here and one line in ROLE_WORKERS."""

from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.critic import CostCriticWorker, CriticWorker
from workbench.workers.roles.numeric import NumericWorker
from workbench.workers.roles.reference import ReferenceWorker, TeacherWorker
from workbench.workers.roles.reward import CostWorker, RewardWorker
from workbench.workers.roles.rollout import RolloutWorker

ROLE_WORKERS = {
    "actor": ActorWorker,
    "critic": CriticWorker,
    "reference": ReferenceWorker,
    "reward": RewardWorker,
    "cost": CostWorker,
    "cost_critic": CostCriticWorker,
    "teacher": TeacherWorker,
    "rollout": RolloutWorker,
    "numeric": NumericWorker,
}
