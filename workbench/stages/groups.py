"""The worker groups of a workbench: one for each role, and one for the arithmetic of advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.backends.hosts import Hosts
from workbench.batches.store import Weights
from workbench.errors import NotFound
from workbench.models.spec import Model
from workbench.placement import ROLLOUT
from workbench.stages.counters import Counters
from workbench.stages.group import GroupOperation, Placer, WorkerGroup
from workbench.stages.live_training import Assign
from workbench.stages.ownership import Ownership
from workbench.workers.roles import ROLE_WORKERS


class Groups:
    """by_role: the groups. lead: the group whose tokenizer makes the tokens, and to whose hosts tables are put.

    caller: carries out the calls of the groups. delegate_rollout: called when the groups of rollout workers were made,
    so that they generate for the actor. when_changed: called when a role was added or dropped. assign: changes the
    training of a role, see `LiveSettings`.
    """

    lead: WorkerGroup
    numeric: WorkerGroup

    def __init__(self, hosts: Hosts, ownership: Ownership, counters: Counters, caller: Placer) -> None:
        self._hosts, self._ownership, self._counters, self._caller = hosts, ownership, counters, caller
        self.by_role: dict[str, WorkerGroup] = {}
        self.delegate_rollout: Callable[[], object] = lambda: None
        self.when_changed: list[Callable[[], object]] = []
        self.assign: Assign

    def make(self) -> None:
        """Make the groups of a workbench that is opened."""
        self._refresh()
        self.lead = self.by_role[self._hosts.description.lead]
        place = self._hosts.place_of("numeric")
        self.numeric = WorkerGroup("numeric", *place, self.lead.spec, ROLE_WORKERS["numeric"], self._caller)

    def follow_hosts(self) -> None:
        """Place all groups on the current hosts; handles of the roles that stay are valid."""
        self._refresh()
        for group in (*self.by_role.values(), self.numeric):
            group.place(*self._hosts.place_of(group.worker_role))

    def take_new_code(self) -> None:
        """Give the groups the operations that their worker classes have now."""
        for role, (model, _) in self._wanted().items():
            self.by_role[role].become(model, model.worker or ROLE_WORKERS[role])
        self.numeric.become(self.numeric.spec, ROLE_WORKERS["numeric"])
        if ROLLOUT in self.by_role:
            self.delegate_rollout()

    @property
    def compute_advantages(self) -> GroupOperation:
        """The operation of no role."""
        return self.numeric.operations["compute_advantages"]

    def check_alive(self, group: WorkerGroup) -> None:
        """Raise where the group cannot take a stage: the workbench is closed or another kernel's, the role was dropped,
        its pool was lost."""
        self._ownership.check_open()
        self._ownership.check_drives()
        if group.dropped:
            there = f"the workbench has {', '.join(self.by_role)}"
            raise NotFound(f"the {group.role} was dropped", there, f"lab.add({group.role!r}, ...)")
        self._hosts.require_whole(group.pool, group.role)

    def _wanted(self) -> dict[str, tuple[Model, str]]:
        """For each role its model, and the role whose workers carry out its operations."""
        description = self._hosts.description
        wanted = {role: (model, role) for role, model in description.models.items()}
        if description.actor_is_reference:
            wanted["reference"] = replace(description.models["actor"], adapter=None, worker=None), "actor"
        return wanted

    def _refresh(self) -> None:
        """Make a group for each role that lacks one, and drop those of roles that are gone."""
        wanted = self._wanted()
        for role, group in list(self.by_role.items()):
            if role not in wanted or group.worker_role != wanted[role][1]:
                del self.by_role[role]
                self._counters.weights.pop(role, None)
                group.dropped = True
                if role == ROLLOUT:
                    self.by_role["actor"].take_back()
        for role, (model, worker_role) in wanted.items():
            if role in self.by_role:
                self.by_role[role].spec = model
            else:
                self._add(role, model, worker_role)
        for act in self.when_changed:
            act()

    def _add(self, role: str, model: Model, worker_role: str) -> None:
        kind = model.worker or ROLE_WORKERS[role]
        place = self._hosts.place_of(worker_role)
        self.by_role[role] = WorkerGroup(role, *place, model, kind, self._caller, worker_role, self.assign)
        if model.trained or (role in ("reference", ROLLOUT) and worker_role == role):
            # an actor with a worker class of the user's may load other weights than rollout workers do
            own = role == ROLLOUT and self._hosts.description.models["actor"].worker is not None
            self._counters.weights[role] = Weights.fresh(0) if own else Weights(steps=0, state="")
        if role == ROLLOUT:
            self.delegate_rollout()
