"""The description of a workbench. It is checked before any process starts, and compared when a name is reopened."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.config.requirements import check
from workbench.data.sources import kept_source
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.messages.calls import HostInfo
from workbench.models.loading import load_config
from workbench.models.spec import Model
from workbench.placement import ROLLOUT, Layout, Placement, Pool, check_role, host_name
from workbench.placement.estimate import Room, device_numbers, rooms
from workbench.placement.role_model import AUTOMATIC_TOKENS, RoleModel, head_of
from workbench.settings.engines import Generation, ShareMemory
from workbench.settings.training import Training
from workbench.support.fingerprint import fingerprint
from workbench.support.machine import computing_threads, device_count
from workbench.workers.roles import ROLE_WORKERS


@dataclass(frozen=True, kw_only=True)
class Description:
    """All arguments of a workbench. models: by role, with all defaults filled in.

    id: unique for each opening; part of the names of all that the workbench starts.
    defaults: dtype, training and generation settings for models that do not set their own.
    devices: the number of devices; None: as many as the joined cluster has. gpus: GPUs per device: 1, or a share of a
    GPU where more devices are declared than this machine has; 0 on a CPU.
    share_memory: whether roles on a device take turns in its memory, see `workbench.open`.
    moved: the hosts, if `lab.move` has changed them. opened: the digest at the opening, if it differs from the present
    digest. changed: role and field of each training setting that was assigned after the opening. The `digest` leaves
    out id, gpus, moved, opened and changed. record: whether cells and command lines are recorded.
    """

    id: str
    name: str
    models: dict[str, Model]
    placement: Placement
    prompts: Any
    backend: str
    device: str
    devices: int | None
    gpus: float
    seed: int
    address: str | None
    defaults: Mapping[str, Any]
    share_memory: ShareMemory = False
    moved: tuple[HostInfo, ...] = ()
    opened: str = ""
    record: bool = True
    changed: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        *,
        models: Mapping[str, Any],
        placement: Placement | None,
        prompts: Any,
        training: Training | None,
        generation: Generation | None,
        dtype: str | None,
        backend: str,
        device: str | None,
        devices: int | None,
        seed: int,
        address: str | None,
        share_memory: ShareMemory = False,
        record: bool = True,
        elsewhere: bool = False,
    ) -> Description:
        """Fill in defaults and check everything that can be checked without starting a process. elsewhere: the devices
        belong to a cluster that the user has joined."""
        if not isinstance(models, Mapping):
            raise BadInput(f"models={shown(models)}", "must map roles to models", "models={'actor': 'smollm2-135m'}")
        for role in models:
            check_role(role)
        if ROLLOUT in models:
            raise BadInput(
                f"models={{{ROLLOUT!r}: ...}}",
                "rollout workers have the actor's model, dtype and generation settings",
                "leave it out, and name 'rollout' in a pool of the placement",
            )
        if address is not None and device is None:
            raise BadInput(
                f"address={address!r} without device=",
                "this process cannot see which devices another cluster has",
                "add device='cuda' or device='cpu'",
            )
        device = device or ("cuda" if device_count("cuda") else "cpu")
        if device == "cuda" and address is None and not device_count("cuda"):
            raise BadInput(
                "device='cuda'", "torch finds no GPU on this machine", "leave device= out, or see `wb doctor`"
            )
        dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
        defaults = {"dtype": dtype, "training": training or Training(), "generation": generation or Generation()}
        filled = {role: Model.of(role, value).filled(role, **defaults) for role, value in models.items()}  # type: ignore[arg-type]
        if placement is not None and placement.has_rollout:
            filled = _with_rollout(filled)
        if all(model.name is None for model in filled.values()):
            raise BadInput(
                f"models={{{', '.join(filled)}}} without a model",
                "a model must give the tokenizer for all roles",
                "declare an actor",
            )
        # The default is one device; the inline backend allows no more.
        placement = (placement or Placement.colocate(1)).restrict(filled)
        here = None if address is not None else device_count(device)
        gpus = 0.0 if device == "cpu" else 1.0
        if gpus and here and devices and devices > here and backend != "inline" and not elsewhere:
            gpus = math.floor(1e4 / math.ceil(devices / here)) / 1e4  # Ray counts them in ten-thousandths
        description = cls(
            id=f"{name}-{secrets.token_hex(4)}",
            name=name,
            models=filled,
            placement=placement,
            prompts=kept_source(prompts),
            backend=backend,
            device=device,
            devices=devices or here,
            gpus=gpus,
            seed=seed,
            address=address,
            defaults=defaults,
            share_memory=share_memory,
            record=record,
        )
        check(description)
        return description

    @property
    def takes_turns(self) -> bool:
        """Whether roles of a GPU take turns in its memory, see `workbench.open`."""
        return bool(self.share_memory) and self.device == "cuda"

    @property
    def lead(self) -> str:
        """The role whose tokenizer makes the tokens for all roles: the actor, else the first role with a model."""
        return "actor" if "actor" in self.models else next(r for r, model in self.models.items() if model.name)

    @property
    def generation(self) -> Generation | None:
        """The settings of the engine that generates for the actor, on its ranks or on rollout workers; None without an
        actor."""
        generating = self.models.get(ROLLOUT) or self.models.get("actor")
        return None if generating is None else generating.generation

    @property
    def max_model_tokens(self) -> int:
        """The tokens of the longest sequence, for all roles."""
        return int((self.generation or self.defaults["generation"]).max_model_tokens)

    @property
    def actor_is_reference(self) -> bool:
        """Whether the reference is the actor without its adapter: it has one, and no reference is declared."""
        actor = self.models.get("actor")
        return actor is not None and actor.adapter is not None and "reference" not in self.models

    def layout_of(self, role: str) -> Layout:
        """Return a role's layout over the devices of its pool. Without rollout workers, an actor that is cut over ranks
        also generates on them, in replicas of one stage and `Generation.tensor_parallel_size` tensor ranks."""
        layout, model = self.placement.layout_of(role), self.models.get(role)
        if role != "actor" or model is None or layout.p * layout.t == 1 or not self.is_ours(role):
            return layout
        if model.generation is None:
            return layout
        where, t_g = f"layouts['actor']={layout}", model.generation.tensor_parallel_size
        if layout.p_g not in (None, 1):
            raise BadInput(
                where,
                "engines generate without pipeline stages; p_g > 1 is only for planning and resharding",
                "use p_g=1, or leave it out",
            )
        if layout.t % t_g or layout.t_g not in (None, t_g):
            raise BadInput(
                f"{where} with Generation.tensor_parallel_size={t_g}",
                "a tensor group of generation is part of one of training: its size must be t_g, and divide t",
                f"use Generation(tensor_parallel_size={layout.t_g or layout.t}), or another layout",
            )
        return layout.generating(t_g)

    def is_ours(self, role: str) -> bool:
        """Whether a role has a model and a worker of the role's class, so that its memory and layout are known."""
        model = self.models[role]
        return model.name is not None and (model.worker is None or issubclass(model.worker, ROLE_WORKERS[role]))

    @property
    def declared(self) -> dict[str, Model]:
        """The models as the user declares them: none for rollout workers, whose generation settings the actor has."""
        models = dict(self.models)
        if rollout := models.pop(ROLLOUT, None):
            models["actor"] = models["actor"].changed(generation=rollout.generation)
        return models

    def as_declared(self) -> dict[str, Model]:
        """Return `declared` with None for settings that a role has from `defaults`, so that new defaults apply when the
        workbench is reopened. A setting that was assigned after the opening counts as not set: see `retrained_as`."""
        found = {}
        for role, model in self.declared.items():
            unset: dict[str, Any] = dict.fromkeys(self.defaults)
            default = replace(model, **unset).filled(role, **self.defaults)
            assigned = {name: getattr(default.training, name) for of, name in self.changed if of == role}
            assert model.training is not None
            own = replace(model, training=replace(model.training, **assigned))
            if model.trained and not default.trained:  # a reward model is trained only if its settings are given
                del unset["training"]
            for name in [name for name in unset if getattr(own, name) != getattr(default, name)]:
                del unset[name]
            found[role] = replace(model, **unset)
        return found

    def declaring(self, models: Mapping[str, Any]) -> dict[str, Model]:
        """Return `declared` plus models of more roles. models: as `wb.open` takes them."""
        more = {role: Model.of(check_role(role), model).filled(role, **self.defaults) for role, model in models.items()}
        return self.declared | more

    def placed(self, placement: Placement, models: dict[str, Model] | None = None) -> Description:
        """Return the description with another placement, checked as at the opening.

        models: as `declared`; None: the same models. A pool for rollout workers adds their model.
        """
        models = self.declared if models is None else models
        if placement.has_rollout:
            models = _with_rollout(models)
        changed = replace(
            self, models=models, placement=placement.restrict(models), moved=(), opened=self.opened or self.digest
        )
        check(changed)
        return changed

    def retrained(self, role: str, training: Training, fields: Iterable[str]) -> Description:
        """Return the description with other training settings of a role. fields: the fields that were assigned."""
        models = {**self.models, role: self.models[role].changed(training=training)}
        changed = tuple(dict.fromkeys([*self.changed, *((role, field) for field in fields)]))
        return replace(self, models=models, changed=changed, opened=self.opened or self.digest)

    def retrained_as(self, before: Description) -> Description:
        """Return this description with the training settings that were assigned while `before` was in force. Skips
        roles that follow the default training settings if these have changed since: the new default is newer."""
        found, default = self, self.defaults["training"]
        for role in dict(before.changed):
            model, now = before.models.get(role), found.models.get(role)
            names = [field for of, field in before.changed if of == role]
            if model is None or now is None or model.training is None or now.training is None or not now.trained:
                continue
            if default != before.defaults["training"] and now.training == default.of_role(role):
                continue
            values = {name: getattr(model.training, name) for name in names}
            found = found.retrained(role, replace(now.training, **values), names)
        return found

    def role_models(self) -> dict[str, RoleModel | None]:
        """Return by role the facts that decide its memory; None for a function, or a worker not of the role's class."""
        found: dict[str, RoleModel | None] = {}
        rollout = self.models[ROLLOUT].generation if ROLLOUT in self.models else None
        patched = rollout is not None and rollout.sync != "whole"
        for role, model in self.models.items():
            if not self.is_ours(role):
                found[role] = None
                continue
            assert model.name is not None and model.dtype is not None and model.training is not None
            found[role] = RoleModel(
                config=load_config(model.name),
                head=head_of(role),
                dtype=model.dtype,
                training=model.training,
                trained=model.trained and role != ROLLOUT,
                generation=model.generation if role in ("actor", ROLLOUT) else None,
                adapter=model.adapter,
                samples_only=role == ROLLOUT,
                publishes=role == "actor" and model.adapter is None and patched,
                automatic_tokens=AUTOMATIC_TOKENS[self.device],
            )
        return found

    def rooms(self) -> dict[str, Room]:
        """Return by role the facts that decide its automatic sizes on its GPUs; empty on a CPU, and if the size of a
        model's weights is not known."""
        if self.device == "cpu":
            return {}
        models = self.role_models()
        for role, model in self.models.items():
            if model.judge is not None and model.generation is not None:
                assert model.dtype is not None
                models[role] = RoleModel(
                    config=load_config(model.judge.model), head="lm", dtype=model.dtype, training=Training(),
                    trained=False, generation=model.generation, samples_only=True,
                )  # fmt: skip
        try:
            return rooms(self.placement, models, device_numbers(self.placement), take_turns=self.takes_turns)
        except BadInput:  # a model whose configuration does not tell its weights
            return {}

    def hosts(self, run_folder: Path) -> list[HostInfo]:
        """Return one host for each device, pool by pool."""
        if self.moved:
            return list(self.moved)
        places = [(pool, rank) for pool in self.placement.pools for rank in range(pool.devices)]
        return [self.host(pool, rank, number, run_folder) for number, (pool, rank) in enumerate(places)]

    def host(self, pool: Pool, rank: int, number: int, run_folder: Path, again: int = 0) -> HostInfo:
        """Return the host of a rank of a pool. number: the device's number. again: the number of earlier pools of that
        name. On a CPU, all pools compute at the same time and share the cores."""
        settings = ((self.layout_of(role), getattr(self.models.get(role), "generation", None)) for role in pool.roles)
        tensor_sizes = (size for layout, own in settings for size in (layout.t, own.tensor_parallel_size if own else 1))
        log_path = run_folder / "logs" / f"{host_name(pool.name, rank, again)}.log"
        return HostInfo(
            lab=self.id,
            pool=pool.name,
            rank=rank,
            world_size=pool.devices,
            device=f"{self.device}:{number}",
            threads=self.threads,
            log_path=None if self.backend == "inline" else str(log_path),
            share_memory=self.share_memory,
            again=again,
            gpus=self.gpus,
            tensor_ranks=math.lcm(*tensor_sizes),
        )

    @property
    def threads(self) -> int:
        """The number of threads of each host: its share of a machine's cores, at most OMP_NUM_THREADS."""
        return computing_threads(self.placement.devices)

    @property
    def summary(self) -> dict[str, Any]:
        """Texts and numbers by name that tell runs apart in a table."""
        models = {f"models/{role}": str(model) for role, model in self.models.items()}
        where = {"placement": str(self.placement), "backend": self.backend, "device": self.device}
        return {"workbench": self.name, "seed": self.seed, **where, **models}

    @property
    def digest(self) -> str:
        """A hash that is equal for equal descriptions in every process; it covers the code of functions and workers."""
        return fingerprint(self._compared)[:16]

    @property
    def _compared(self) -> dict[str, Any]:
        return {
            field: value
            for field, value in vars(self).items()
            if field not in ("id", "moved", "opened", "changed", "gpus") and (field, value) != ("record", True)
        }

    def differences(self, other: Description) -> list[str]:
        """Return the arguments of `wb.open` that differ, such as `training` or `models['reward']`."""

        def differ(these: Mapping[str, Any], those: Mapping[str, Any]) -> list[str]:
            names = dict.fromkeys([*these, *those])
            return [name for name in names if fingerprint(these.get(name)) != fingerprint(those.get(name))]

        found = differ(self._compared, other._compared)
        if "defaults" in found:  # the models of roles that use the defaults contain them, too
            found[found.index("defaults") : found.index("defaults") + 1] = differ(self.defaults, other.defaults)
        if "models" in found:
            roles = {role: (self.models.get(role), other.models.get(role)) for role in {**self.models, **other.models}}
            found[found.index("models") : found.index("models") + 1] = [
                f"models[{role!r}]" for role, (one, two) in roles.items()
                if one is None or two is None or not set(differ(vars(one), vars(two))) <= set(found)
            ]  # fmt: skip
        return found

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of this workbench's descriptions: the present one, and the one it was opened with."""
        return tuple(dict.fromkeys(filter(None, (self.digest, self.opened))))


def _with_rollout(models: dict[str, Model]) -> dict[str, Model]:
    """Return the models plus one for rollout workers, which takes over the actor's generation settings."""
    actor = models.get("actor")
    if actor is None:
        raise BadInput(
            "a pool for 'rollout' without an actor", "rollout workers generate with the actor's weights",
            "declare an actor in models=, or leave 'rollout' out of the placement",
        )  # fmt: skip
    return {**models, "actor": actor.changed(generation=None), ROLLOUT: replace(actor, worker=None)}
