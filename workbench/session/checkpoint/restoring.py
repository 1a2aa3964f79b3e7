"""Restores a checkpoint into a workbench, under any placement: `wb.restore`, `wb.open(resume=...)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from workbench.backends.starting import Note, settle
from workbench.batches.store import Weights
from workbench.data.prompt_stream import PromptStream
from workbench.errors import BadInput
from workbench.placement import ROLLOUT
from workbench.placement.state import Part, state_of
from workbench.session.checkpoint.checkpoints import saved_parts
from workbench.session.checkpoint.files import Checkpoint
from workbench.session.position import Position
from workbench.stages.runner import StageRunner
from workbench.support.flat_settings import flat
from workbench.workers.role_state import RankState, RoleFiles

if TYPE_CHECKING:
    from workbench.config.description import Description


class Restoring:
    """A checkpoint that was checked against a description before anything is started."""

    def __init__(self, checkpoint: Checkpoint, description: Description) -> None:
        """Verify the files, and that each role of the checkpoint is a role of `description` with the same weights.
        Raises `BadInput` and `MissingDependency`."""
        self.checkpoint, self._description = checkpoint, description
        before, self._states = checkpoint.controller()  # raises unless this user signed the manifest
        checkpoint.verify()
        self._before = before
        models, now = before.role_models(), description.role_models()
        self._files: dict[str, RoleFiles] = {}
        for role, said in checkpoint.values["roles"].items():
            where = f"role {role!r} of {checkpoint!r}"
            if role not in now:
                raise BadInput(
                    where, f"this workbench has {', '.join(now)}",
                    "declare the models that were saved; then you can drop a role with lab.drop",
                )  # fmt: skip
            model, new = models[role], now[role]
            layout = before.layout_of(role)
            parts = saved_parts(models, role, refreshed="weights" in said["parts"])
            standing = layout if model is None else model.rank_layout(layout)
            self._files[role] = found = RoleFiles(
                role=role, folder=str(checkpoint.folder / "roles" / role), parts=parts, layout=standing,
                states=checkpoint.checksums(f"roles/{role}/state-"),
            )  # fmt: skip
            for path in found.expected(moments=said["moments"]):
                checkpoint.require(path)
            if (model is None) != (new is None):
                raise BadInput(where, "it has a worker of another kind here", "declare the model that was saved")
            if model is None or new is None:
                if (size := description.layout_of(role).size) != standing.size and found.states:
                    raise BadInput(
                        f"{where}, for {size} ranks",
                        f"a worker of your own keeps its state by rank, and {standing.size} ranks have saved it",
                        f"give its pool {standing.size} devices",
                    )
                continue
            for part in parts:
                there, saved = _shapes(part.what, state_of(new)), _shapes(part.what, (part,))
                if there != saved:
                    wrong = next(n for n in (*saved, *there) if saved.get(n) != there.get(n))
                    raise BadInput(
                        f"{where}: {wrong} {saved.get(wrong, 'was not saved')}",
                        f"here it is {there.get(wrong, 'not there, or not trained')}",
                        "declare the model that was saved, with the same parts trained",
                    )

    def retrained(self) -> Description:
        """Return the description, with the training settings that were assigned before the checkpoint was saved. Prints
        these, and the other settings that differ from the checkpoint's."""
        self._description = self._description.retrained_as(self._before)
        say_assigned(self._description)
        saved, now = (_settings(one) for one in (self._before, self._description))
        differing = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
        if differing:
            said = ", ".join(f"{name} = {now.get(name)} (was {saved.get(name)})" for name in differing)
            print(f"settings that differ from the checkpoint's: {said}")
        return self._description

    def check(self, prompts: PromptStream) -> None:
        """Raise `BadInput` where the prompts differ from the checkpoint's; needs no host."""
        state = self.checkpoint.values["state"]["prompts"]
        if prompts.source is not None and state:
            prompts.source.load_state_dict(state)

    def load(self, runner: StageRunner, position: Position, prompts: PromptStream, note: Note) -> None:
        """Load the roles' states on the hosts, and the controller's counters."""
        hosts, groups = runner.hosts, runner.groups.by_role
        models, steps = hosts.description.role_models(), []
        random: dict[str, Any] = {}
        for role, files in self._files.items():
            states, model = self._states[role], models[role]
            parts = () if model is None else tuple(state_of(model))
            for rank, host in enumerate(groups[role].hosts):
                mine: RankState = states[rank % len(states)]
                random.setdefault(host, mine.random)
                steps.append(hosts.step(f"restoring {role}", host, "load_role", files, parts, rank, mine))
        if ROLLOUT in groups:
            layout, none = hosts.description.layout_of(ROLLOUT), RankState(steps=0, moments=False, random={}, extra={})
            nothing = RoleFiles(role=ROLLOUT, folder="", parts=(), layout=layout)
            for rank, host in enumerate(groups[ROLLOUT].hosts):
                steps.append(hosts.step("restoring rollout", host, "load_role", nothing, (), rank, none))
        settle(hosts.backend, steps, note)
        last = [hosts.step("going on", host, "continue_random", state) for host, state in random.items()]
        settle(hosts.backend, last, note)
        self._count(runner, position, prompts)

    def _count(self, runner: StageRunner, position: Position, prompts: PromptStream) -> None:
        state, counters = self.checkpoint.values["state"], runner.counters
        prompts.reset()  # for a checkpoint that was saved before the first prompt
        self.check(prompts)
        counters.run, counters.iteration = max(counters.run, state["run"]), state["iteration"]
        prompts.restore(state["drawn"], state["prompts"], self.checkpoint.ledger())
        counters.take_draws(state)
        for role, weights in counters.weights.items():
            # rollout workers are sent the actor's weights again; a reference that was never refreshed has its model's
            saved = state["weights"].get(role)
            if saved and (role in self._files or role == ROLLOUT):
                counters.weights[role] = Weights.fresh(saved["steps"])
            elif saved:
                counters.weights[role] = Weights(steps=saved["steps"], state=weights.state)
        position.saved_streams = list(state["streams"])
        position.saved_algorithm = self.checkpoint.values["algorithm"]
        position.checkpoint = self.checkpoint
        position.fill_buffer(state)
        under_way = bool(position.saved_algorithm and position.saved_algorithm["under_way"])
        counters.iterations_to_skip = counters.iteration - under_way
        runner.telemetry.append_event(
            "restored", folder=str(self.checkpoint.folder), iteration=counters.iteration,
            run_folder=self.checkpoint.values["run_folder"], run=counters.run,
        )  # fmt: skip


def say_assigned(description: Description) -> None:
    """Print the training settings that were assigned while the saved run was open."""
    for role, field in description.changed:
        value = getattr(description.models[role].training, field)
        print(f"continues with lab.{role}.training.{field} = {value!r}, as it was assigned")


def _settings(description: Description) -> dict[str, Any]:
    """Return the settings of the roles, by name; training settings only of trained roles."""
    models = description.declared
    return flat({role: model if model.trained else model.changed(training=None) for role, model in models.items()})


def _shapes(what: str, parts: Iterable[Part]) -> dict[str, str]:
    """Return, as text, the shape and the bytes per element of each weight of the parts named `what`."""
    weights = (weight for part in parts if part.what == what for weight in part.weights)
    return {weight.name: f"{list(weight.shape)} in {weight.item_bytes} bytes" for weight in weights}


def arguments_of(description: Description) -> dict[str, Any]:
    """Return the arguments of `wb.open` that make a description."""
    others = ("id", "models", "defaults", "moved", "opened", "changed", "gpus")
    same = {name: value for name, value in vars(description).items() if name not in others}
    return {"models": description.as_declared(), **description.defaults, **same}
