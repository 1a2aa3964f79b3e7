"""Changes of placement among pools of one rank, all in this process: what moves, what goes on, what an error leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, hosts_of, stored, tiny_lab, update_on, vowels
from tests.expected import expect_error
from tests.light import Together
from workbench.backends.base import Pending
from workbench.backends.starting import begin_loading, settle
from workbench.config.description import Description
from workbench.controller import Workbench
from workbench.errors import BadInput, NotFound, StageError
from workbench.placement import ROLES
from workbench.workers.model_worker import digest
from workbench.workers.role_state import RoleMove
from workbench.workers.roles.critic import CriticWorker
from workbench.workers.roles.reward import RewardWorker
from workbench.workers.weight_exchange import Snapshot

TRAINED = ("actor", "critic")
TRAINING: dict[str, Any] = {"engine": "torch", "learning_rate": 1e-3, "minibatches": 2, "micro_batch_tokens": 256}


class OfOneRank(Together):
    """Hosts in this process whose pools have one rank each, so that none needs a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    def work(self, host: str, method: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append((host, method))
        if method == "join" or method == "open_store":
            return self.ask(host, "status")
        return self.ask(host, method, *args, **kwargs)


@contextmanager
def opened(models: dict[str, Any], placement: wb.Placement, runs: Path) -> Iterator[Workbench]:
    """A workbench whose hosts are all in this process."""
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    description = Description.of(
        "moving", models=models, placement=placement, devices=4, device="cpu", backend="ray", prompts="arithmetic/test",
        training=wb.Training(**TRAINING), generation=wb.Generation(engine="transformers", max_model_tokens=192),
        dtype="float32", seed=0, address=None,
    )  # fmt: skip
    lab = Workbench(replace(description, backend="inline"), runs)
    # of one device, says the inline backend; here there is room for more, and no record of it
    lab.hosts.description = description
    lab.hosts.backend = OfOneRank()
    lab.hosts.backend.start(lab.hosts.infos)
    settle(lab.hosts.backend, begin_loading(lab.hosts.backend, lab.hosts.infos, description, print), print)
    yield lab
    lab.hosts.backend.close()
    torch.set_num_threads(threads)
    torch.set_rng_state(random)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    # as many threads, whatever the placement
    monkeypatch.setattr("workbench.config.description.device_count", lambda device: int(device == "cpu"))
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    with opened(models, wb.Placement.colocate(1), tmp_path) as found:
        yield found


def hosts(lab: Workbench) -> dict[str, Any]:
    found: dict[str, Any] = hosts_of(lab)
    return found


def state(lab: Workbench) -> dict[str, Any]:
    """What must not change: all weights, all moments, all counts."""
    found: dict[str, Any] = {role: getattr(lab, role).weight_digests() for role in (*TRAINED, "reference")}
    for role in TRAINED:
        engine = hosts(lab)[getattr(lab, role).hosts[0]].workers[role].engine
        kinds: Any = ("exp_avg", "exp_avg_sq")
        found[f"{role} moments"] = {f"{k} {n}": digest(t) for k in kinds for n, t in engine.held_state(k)}
        assert len(found[f"{role} moments"]) == 2 * len(found[role][0])
        found[f"{role} steps"] = engine.steps
    return {**found, "weights": dict(lab.weights), "iteration": lab.iteration, "drawn": lab.prompts.drawn}


def test_a_role_that_does_not_close_is_gone_all_the_same(lab: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("not closed")

    (host,) = hosts(lab).values()
    monkeypatch.setattr(host.workers["reference"], "close", broken)
    with pytest.warns(UserWarning, match="closing reference failed: .*not closed"):
        lab.drop("reference")
    assert "reference" not in host.workers
    update_on(lab, stored())


def test_walk(lab: Workbench, tmp_path: Path) -> None:
    table = stored()
    held = lab.actor.compute_log_prob(lab.put(table), temperature=1.0)
    before: Any = held.fetch(["old_log_prob"])["old_log_prob"]
    metrics = [update_on(lab, table)]
    said = lab.diff(wb.Placement.split(2))
    assert said.seconds == said.total_bytes / (said.bandwidth_bytes_s or 0) > 0
    assert said.measured == "a probe of 67.1 MB from a host to this process"
    assert not any(host["published_bytes"] for host in lab.hosts.describe())
    steps = [
        wb.Placement.split(2),
        wb.Placement.of({"critic": (1, ["critic", "reference"]), "rest": (1, ["actor", "reward"])}),
        wb.Placement.colocate(1),
    ]
    for placement in steps:
        here, names = state(lab), set(hosts(lab))
        change = lab.move(placement)
        assert lab.placement == change.new
        assert change.took_s is not None
        assert 0 < (change.transfer_s or 0) < change.took_s
        assert "; took " in str(change)
        assert "; took " not in str(lab.diff(placement))
        assert state(lab) == here
        assert set(hosts(lab)) == {info.name for info in lab.hosts.infos}
        assert {n for n in hosts(lab) if n in names} == {f"{pool}-0" for pool in change.kept}
        transfers = lab.transfers("move")
        mine = transfers[transfers["run"] == transfers["run"].max()]
        counted = mine.groupby(["source", "destination"])["moved_bytes"].sum()
        expected = change.traffic().frame().set_index(["source", "destination"])["moved_bytes"]
        assert counted.to_dict() == expected.to_dict()
        assert mine["moved_bytes"].sum() == change.total_bytes > 0
        assert not any(host["published_bytes"] for host in lab.hosts.describe())
        metrics.append(update_on(lab, table))
    after: Any = held.fetch(["old_log_prob"])["old_log_prob"]
    assert torch.equal(after.values, before.values)
    assert held.lengths("old_log_prob").tolist() == before.lengths.tolist()
    assert lab.critic.compute_values(held).rows == 4
    assert [info.name for info in lab.hosts.infos] == ["shared-0.1"]
    models = dict.fromkeys(TRAINED, TINY)
    with tiny_lab("still", tmp_path / "still", models=models, training=TRAINING, backend="inline") as still:
        assert [update_on(still, table) for _ in metrics] == metrics
    drawn = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
    assert drawn.meta["weights_version"] == lab.weights["actor"].steps == 2 * len(metrics)
    assert lab.actor.check_sync()[0] < 1e-3
    assert lab.telemetry.events()["event"].to_list().count("move") == len(steps)


def test_a_setting_that_is_assigned_while_models_move_is_kept(lab: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = lab.hosts.backend
    work = backend.work

    def assigning(host: str, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "take_role":
            lab.actor.training.learning_rate = 3e-4
        return work(host, method, *args, **kwargs)

    monkeypatch.setattr(backend, "work", assigning)
    change = lab.move(wb.Placement.split(2))
    monkeypatch.undo()
    assert lab.placement == change.new
    assert lab.actor.training.learning_rate == 3e-4
    assert update_on(lab, stored())["actor/learning_rate"] == 3e-4


def test_how_long_starting_takes_is_what_it_took(lab: Workbench) -> None:
    for host in hosts(lab).values():
        host._start_s, host._load_s = 5.0, {"actor": 2.0, "critic": 1.0, "reference": 0.5, "numeric": 0.1}
    # the pools of actor and reference, and of critic and reward, start at the same time
    assert lab.diff(wb.Placement.split(2)).start_s == 7.5
    assert lab.diff(lab.placement.with_role("critic", "own", devices=1)).start_s == 6.0
    assert lab.diff(lab.placement).start_s == 0.0
    lab.critic.move("own", devices=1)
    change = lab.diff(lab.placement.with_role("reference", "other", devices=1))
    assert change.rest_s is not None
    event = lab.telemetry.events().query("event == 'move'")["details"].iloc[-1]
    assert event["start_seconds"] == 6.0 and event["starts_processes"] and change.expected_s is not None
    assert change.rest_s == max(0.0, event["seconds"] - event["transfer_seconds"] - 6.0)
    assert change.expected_s == pytest.approx((change.seconds or 0.0) + change.start_s + change.rest_s)
    assert lab.diff(lab.placement.with_role("reference", "own")).rest_s is None, (
        "no move without new processes was made"
    )
    assert change.capacity_bytes == lab.read_memory()[0].capacity_bytes
    (built,) = (host._load_s for name, host in hosts(lab).items() if name == "own-0")
    assert 0 < built["critic"] < 60


def test_before_the_first_step_there_are_no_moments(lab: Workbench) -> None:
    change = lab.move(wb.Placement.of({"other": (1, ROLES)}))
    assert change.total_bytes == lab.transfers("move")["moved_bytes"].sum()
    update_on(lab, stored())
    assert lab.diff(wb.Placement.colocate(1)).total_bytes > 2 * change.total_bytes


def test_one_role_goes_and_comes_back(lab: Workbench) -> None:
    critic, shared = lab.critic, hosts(lab)["shared-0"]
    update_on(lab, stored())
    here = state(lab)
    change = lab.critic.move("own", devices=1)
    assert [role.role for role in change.roles if role.action != "stays"] == ["critic"]
    assert lab.critic is critic
    assert critic.hosts == ("own-0",)
    assert hosts(lab)["shared-0"] is shared
    assert set(shared.workers) == {"actor", "reference", "reward", "numeric"}
    assert state(lab) == here
    assert not lab.critic.relayout((1, 1, 1)).total_bytes
    lab.critic.move("shared")
    assert lab.placement.pool_of("critic").name == "shared"
    assert set(hosts(lab)) == {"shared-0"}
    assert state(lab) == here


def test_a_host_has_a_name_of_its_own(lab: Workbench) -> None:
    seen, there, back = set(hosts(lab)), wb.Placement.of({"other": (1, ROLES)}), wb.Placement.colocate(1)
    for placement in (there, back, there):
        before = set(hosts(lab))
        lab.move(placement)
        new = set(hosts(lab)) - before
        assert new
        assert not new & seen
        seen |= new
    assert seen == {"shared-0", "other-0", "shared-0.1", "other-0.1"}


def test_a_pool_that_is_still_at_work_on_what_was_given_up(lab: Workbench) -> None:
    class Later(Pending):
        over = False

        def done(self) -> bool:
            return self.over

        def result(self) -> None:
            return None

    later = Later()
    lab.hosts.pending_cleanup["shared"] = [("a move", later)]
    for _ in range(2):
        with expect_error(StageError, value="'shared' still works on a move"):
            lab.actor.check_sync()
    later.over = True
    assert lab.actor.check_sync()[0] < 1e-3
    assert not lab.hosts.pending_cleanup


@pytest.mark.parametrize("where", ["build", "cut", pytest.param("load", marks=pytest.mark.thorough)])
def test_an_error_leaves_everything_as_it_was(lab: Workbench, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    update_on(lab, stored())
    here, names, placement = state(lab), set(hosts(lab)), lab.placement
    lab.diff(wb.Placement.split(2))  # which takes something from a host to see how fast that is
    with monkeypatch.context() as patched:
        if where == "cut":  # a flipped bit on the way
            cut = Snapshot.cut

            def flipped(self: Snapshot, wanted: Any) -> list[torch.Tensor]:
                parts = [part.clone() for part in cut(self, wanted)]
                parts[0][0] += 1
                return parts

            patched.setattr(Snapshot, "cut", flipped)
            error, message = StageError, "parameters of actor: .* is not what was sent.*still in use"
        elif where == "build":
            patched.setattr("workbench.workers.roles.critic.CriticWorker.__init__", _not_built)
            error, message = StageError, "loading critic failed on pool scorers, rank 0: ValueError.*still in use"
        else:

            def full(self: Any, *args: Any) -> None:
                raise MemoryError("no room")

            patched.setattr("workbench.workers.weight_intake.WeightIntake.place", full)
            error, message = StageError, "taking actor failed on pool policy, rank 0: MemoryError.*still in use"
        with pytest.raises(error, match=message):
            lab.move(wb.Placement.split(2))
    assert set(hosts(lab)) == names
    assert lab.placement == placement
    assert state(lab) == here
    assert not any(host["published_bytes"] for host in lab.hosts.describe())
    lab.move(wb.Placement.split(2))
    assert state(lab) == here


def _not_built(self: Any, *args: Any) -> None:
    raise ValueError("no critic")


def test_a_role_that_was_not_built_leaves_the_one_that_lives_alone(lab: Workbench) -> None:
    update_on(lab, stored())
    here, host = state(lab), hosts(lab)["shared-0"]
    parts = lab.diff(wb.Placement.split(2)).parts("critic")
    both = wb.Layout(), (0,)
    move = RoleMove(role="critic", key="m", hosts=("shared-0",), parts=parts, source=both, destination=both)
    carried = host.publish_role(move, 0)
    with expect_error(StageError, value="critic was not built"):
        host.take_role(move, 0, carried, 1, beside=True)
    host.release(move.published)
    assert state(lab) == here


def test_a_pool_of_another_size_keeps_p_and_t_where_they_divide_it() -> None:
    placement = wb.Placement.of({"a": (2, ["actor"]), "b": (1, ["critic"])}, {"actor": (1, 2, 1)})
    larger = placement.with_devices("a", 4)
    assert larger == wb.Placement.of({"a": (4, ["actor"]), "b": (1, ["critic"])}, {"actor": (1, 2, 2)})
    assert larger.with_devices("a", 2) == placement
    for pool, devices, message in (("a", 3, "p.t.d is 2"), ("a", 0, "devices"), ("c", 1, "the pools are a, b")):
        with pytest.raises(BadInput, match=message):
            placement.with_devices(pool, devices)


@pytest.mark.parametrize("lora", [None, wb.LoRA(rank=4)])
def test_rollout_workers_are_sent_what_they_generate_with(tmp_path: Path, lora: wb.LoRA | None) -> None:
    before = wb.Placement.of({"policy": (1, ["actor"]), "engines": (1, ["rollout"])})
    with opened({"actor": wb.Model(TINY, adapter=lora)}, before, tmp_path) as lab:
        table = {name: column for name, column in stored().items() if name not in ("values", "returns")}
        lab.actor.update_actor(lab.put(table))
        for placement in (before.with_role("rollout", "others", devices=1), before.with_role("actor", "trainer", 1)):
            change = lab.move(placement)
            assert (change.total_bytes > 0) == (change.new.pool_of("actor").name == "trainer")
            drawn = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
            assert drawn.meta["weights_version"] == lab.weights["actor"].steps == 2
            assert lab.actor.check_sync()[0] < 1e-3


def too_long(prompt: str, response: str, **row: Any) -> float:
    return float(len(response) > 3)


def test_roles_come_and_go(tmp_path: Path) -> None:
    with opened({"actor": TINY, "reward": vowels}, wb.Placement.colocate(1), tmp_path) as lab:
        actor = lab.actor
        scored = lab.reward.compute_reward(actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4))
        assert lab.add("cost", too_long).total_bytes == 0
        costs = lab.cost.compute_cost(scored)
        assert set(costs.columns) - set(scored.columns) == {"costs"}
        added = lab.add("critic", wb.Model(TINY, seed=3), "scorers", devices=1)
        assert [(change.role, change.action) for change in added.roles if change.action != "stays"] == [
            ("critic", "added")
        ]
        row = added.frame().set_index("role").loc["critic"]
        assert (row["pool"], row["new_pool"]) == ("", "scorers")
        with tiny_lab("same", tmp_path / "same", models={"actor": TINY, "critic": wb.Model(TINY, seed=3)},
                      training=TRAINING, backend="inline") as same:  # fmt: skip
            assert lab.critic.weight_digests() == same.critic.weight_digests()
            assert update_on(lab, stored()) == update_on(same, stored())
        assert lab.critic.compute_values(costs).rows == 2  # of another pool
        with lab.reuse():
            values = lab.critic.compute_values(costs).fetch(["values"])["values"].values
        here = lab.actor.weight_digests()
        critic, held = lab.critic, lab.critic.compute_values(costs)
        change = lab.drop("critic")
        assert [c.role for c in change.roles if c.action == "dropped"] == ["critic"]
        assert set(hosts(lab)) == {"shared-0"}
        assert held.fetch(["values"])["values"].lengths.tolist() == costs.lengths("response_ids").tolist()
        with expect_error(NotFound, value="the critic was dropped", rule="has actor, reward, cost"):
            critic.compute_values(costs)
        with pytest.raises(AttributeError, match=r"has no critic; it has actor, reward, cost.*lab.add\('critic'"):
            lab.critic  # noqa: B018
        assert set(lab.weights) == {"actor"}
        said = lab.diff(lab.placement.with_role("critic", "scorers", devices=1), critic=TINY)
        assert {c.role for c in said.roles if c.action == "added"} == {"critic"}
        assert said.during(1) > said.during(0) / 4
        lab.add("critic", wb.Model(TINY, seed=4))
        with lab.reuse():  # what another model made is not its
            others = lab.critic.compute_values(costs).fetch(["values"])["values"].values
        assert not torch.equal(values, others)
        lab.drop("critic")
        lab.drop("cost")
        assert (lab.actor, lab.actor.weight_digests()) == (actor, here)
        assert "cost" not in hosts(lab)["shared-0"].workers


def test_rollout_workers_come_and_go(tmp_path: Path) -> None:
    with opened({"actor": TINY}, wb.Placement.colocate(1), tmp_path) as lab:
        table = {name: column for name, column in stored().items() if name not in ("values", "returns")}
        lab.actor.update_actor(lab.put(table))
        drawn: list[torch.Tensor] = []
        seeded: dict[str, Any] = {"max_new_tokens": 4, "seed": 1}

        def draw() -> None:
            made = lab.actor.generate_sequences(prompts, **seeded)
            assert made.meta["weights_version"] == lab.weights["actor"].steps
            assert lab.actor.check_sync()[0] < 1e-3
            drawn.append(made.fetch(["response_ids"])["response_ids"].values)

        prompts, generate = lab.prompts.next(2), lab.actor.generate_sequences
        draw()
        change = lab.add("rollout", pool="engines", devices=1)
        assert {c.role: c.action for c in change.roles} == {"actor": "engine", "rollout": "added"}
        held = lab.topology().set_index("role")["generation_weights_bytes"]
        assert held["actor"] == 0 < held["rollout"]
        draw()
        lab.actor.update_actor(lab.put(table))
        here = lab.actor.weight_digests()
        rollout, delegated = lab.rollout, lab.actor.generate_sequences
        assert generate(prompts, **seeded).meta["weights_version"] == 4
        assert lab.move(wb.Placement.colocate(1)).frame()["action"].tolist() == ["engine", "dropped"]
        with expect_error(NotFound, value="the rollout was dropped"):
            rollout.generate_sequences(prompts, **seeded)
        with expect_error(NotFound, value="the rollout was dropped"):
            rollout.check_sync()
        assert delegated(prompts, **seeded).meta["weights_version"] == 4
        assert lab.actor.weight_digests() == here
        draw()
        lab.move(wb.Placement.of({"shared": (1, ["actor"]), "engines": (1, ["rollout"])}))
        draw()
        assert torch.equal(drawn[0], drawn[1])
        assert torch.equal(drawn[2], drawn[3])


def test_roles_that_cannot_come_or_go(lab: Workbench) -> None:
    for role, model, options, message in (
        ("critic", TINY, {}, "has a critic, on pool 'shared'"),
        ("costs", TINY, {}, "unknown role 'costs'"),
        ("cost", None, {}, "a model, or a function"),
        ("cost", 3, {}, "a role's model is a name"),
        ("cost", too_long, {"pool": "other"}, "with_role.*devices=1"),
        ("rollout", TINY, {"pool": "other", "devices": 1}, "have the actor's model"),
        ("rollout", None, {}, "a role is in one pool"),
        ("cost", too_long, {"pool": "other", "devices": 0}, "must be at least 1"),
        ("cost_critic", TINY, {"pool": "other", "devices": 9}, "10 devices"),
    ):
        with pytest.raises(BadInput, match=message):
            lab.add(role, model, **options)
    lab.critic.move("scorers", devices=1)
    with expect_error(BadInput, rule="the pools are shared, scorers", remedy="choose one, pool='shared'"):
        lab.add("cost", too_long)
    for role, message in (("cost", "has actor, critic"), ("actor", "read tokens of its tokenizer"), ("a", "unknown")):
        with pytest.raises(BadInput, match=message):
            lab.drop(role)


def test_a_reference_beside_an_adapter(tmp_path: Path) -> None:
    models = {"actor": wb.Model(TINY, adapter=wb.LoRA(rank=2))}
    with tiny_lab("adapter", tmp_path, models=models, training=TRAINING, backend="inline") as lab:
        with expect_error(BadInput, rule="the actor without its adapter"):
            lab.drop("reference")
        shared = lab.reference
        lab.add("reference", TINY)
        assert lab.reference is not shared
        assert lab.reference.worker_role == "reference"
        assert "reference" in lab.weights
        lab.drop("reference")
        assert lab.reference.worker_role == "actor"
        assert "reference" not in lab.weights


class Counting(CriticWorker):
    """A critic with a state of its own, and no way for it to other processes."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "count": 1}


class CountingRewards(RewardWorker):
    def state(self) -> dict[str, Any]:
        return {**super().state(), "count": 1}


@pytest.mark.parametrize(("role", "worker"), [("critic", Counting), ("reward", CountingRewards)])
def test_a_state_of_its_own_does_not_get_lost(tmp_path: Path, role: str, worker: type) -> None:
    models = {"actor": TINY, role: wb.Model(TINY, worker=worker)}
    with opened(models, wb.Placement.colocate(1), tmp_path) as lab:
        with expect_error(
            BadInput,
            value=f"moving {worker.__name__}",
            rule="state of its own",
            remedy="still in use.*`extra_state`",
        ):
            lab.groups[role].move("own", devices=1)
        assert lab.groups[role].pool.name == "shared"


def test_what_cannot_be_moved_is_refused(lab: Workbench, tmp_path: Path) -> None:
    with expect_error(BadInput, rule="must be a Placement"):
        lab.move("split")  # type: ignore[arg-type]
    with expect_error(BadInput, value="5 devices"):
        lab.move(wb.Placement.colocate(5))
    with lab.kept("actor"), expect_error(BadInput, value=r"inside lab.kept\(\)"):
        lab.move(wb.Placement.split(2))
    with tiny_lab("in", tmp_path / "in", backend="inline", models={"actor": TINY}) as inline:
        assert inline.move(wb.Placement.colocate(1)).total_bytes == 0
        elsewhere = wb.Placement.of({"other": (1, ["actor"])})
        with expect_error(BadInput, value="new processes for other", remedy="backend='ray'"):
            inline.move(elsewhere)
        assert inline.diff(elsewhere).fits is False
        assert "cannot be done now: new processes for other" in str(inline.diff(elsewhere))
