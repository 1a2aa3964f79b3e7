"""Predicts the time of other placements of a live workbench: the cost model, fitted to the workbench's own spans."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace

import pandas as pd

from workbench.algorithms.loop import Algorithm
from workbench.backends.hosts import Hosts
from workbench.display.html import seconds_text, table
from workbench.display.timeline import Timeline, comparison
from workbench.errors import BadInput, NotFound
from workbench.mapping.costs import Constants, Sample, Terms, fit, spread
from workbench.mapping.hardware import Hardware
from workbench.mapping.hardware import hardware as hardware_of
from workbench.mapping.plan import Plan, Plans, gap_of, ranked
from workbench.mapping.predict import predict
from workbench.mapping.search import search
from workbench.mapping.simulate import simulate
from workbench.mapping.workload import Workload
from workbench.placement import ROLLOUT, Placement
from workbench.placement.role_model import RoleModel
from workbench.session.position import Position
from workbench.session.topology import Topology
from workbench.stages.ledger import Ownership
from workbench.support.validation import NonNegativeInt, PositiveInt
from workbench.telemetry.store import TelemetryStore

# Start values of the first fit, from which the data moves them.
START = Constants(passes=1.5, decoding=1.5, links=1.5, calls=0.02)
BETWEEN = "between calls"


@dataclass
class Calibration:
    """Measurements of a workbench. given: the hardware, where the user described it; None: this machine, whose cores
    are divided among the devices of a placement. samples: by placement, iteration and call, over all calibrations.
    idle_s: by placement and iteration, seconds in which no call ran, without iterations by hand. measured: start and
    end of each call, in seconds of the iteration, from the last calibration under each placement."""

    given: Hardware | None = None
    constants: Constants = START
    samples: dict[tuple[str, int, str], Sample] = field(default_factory=dict)
    idle_s: dict[tuple[str, int], float] = field(default_factory=dict)
    measured: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    @property
    def between_s(self) -> float:
        """The seconds of an iteration in which no call runs, the same for all placements."""
        return sum(self.idle_s.values()) / max(1, len(self.idle_s))

    def hardware(self, devices: int) -> Hardware:
        """Return the hardware whose rates the terms of a placement on `devices` devices are counted with."""
        return self.given or Hardware.this_machine(devices)


@dataclass(frozen=True, eq=False)
class Prediction:
    """A plan, with the measurements of its placement, if the workbench was calibrated under that placement.

    measured: by call and for "iteration": start and end on the slowest rank, in seconds of the iteration; may be empty.
    """

    plan: Plan
    constants: Constants
    measured: dict[str, tuple[float, float]]

    @property
    def iteration_s(self) -> float:
        """The predicted seconds of an iteration in which calls of different pools overlap where they can."""
        return simulate(self.plan).iteration_s

    def frame(self) -> pd.DataFrame:
        """Return one row per call, one for the time between calls, in which no call runs, and one for the iteration:
        pool, role, predicted_s, measured_s (NaN where not measured), error (predicted_s / measured_s - 1)."""
        rows = [
            {"call": call, "pool": pool, "role": role, "predicted_s": self.constants.seconds(terms)}
            for (call, pool, role), terms in _terms_by_call(self.plan).items()
        ]
        for name, seconds in ((BETWEEN, self.plan.workload.between_s), ("iteration", self.iteration_s)):
            rows.append({"call": name, "pool": "", "role": "", "predicted_s": seconds})
        frame = pd.DataFrame(rows)
        took_s = {call: end_s - start_s for call, (start_s, end_s) in self.measured.items()}
        took_s |= {BETWEEN: _idle_s(self.measured)} if self.measured else {}
        frame["measured_s"] = frame["call"].map(took_s).astype("float64")
        frame["error"] = frame["predicted_s"] / frame["measured_s"] - 1
        return frame

    def timeline(self) -> Timeline:
        """Return a picture of the predicted iteration, pool by pool, and below each pool the measured one, if there is
        one, with calls coloured by the error of the prediction."""
        calls, predicted, measured = self.frame().set_index("call").to_dict("index"), [], []
        for span in (one for one in simulate(self.plan).spans if one.rank == 0):  # the other ranks of a set do the same
            row = span.row() | {"told": f"{span.role}, predicted"}
            if span.kind == "compute" and span.stage in self.measured:
                call, (start_s, end_s) = calls[span.stage], self.measured[span.stage]
                predicted_s, measured_s = (seconds_text(call[name]) for name in ("predicted_s", "measured_s"))
                row["told"] = f"{span.role}: {predicted_s} predicted, {measured_s} measured, error {call['error']:+.0%}"
                measured.append({**row, "start_s": start_s, "end_s": end_s, "error": call["error"]})
            predicted.append(row)
        return comparison({"predicted": predicted} | ({"measured": measured} if measured else {}))

    def __repr__(self) -> str:
        return f"<Prediction of {self.plan.placement}: {seconds_text(self.iteration_s)} per iteration>"

    def _repr_html_(self) -> str:
        rows = []
        for row in self.frame().to_dict("records"):
            known = row["measured_s"] == row["measured_s"]
            rows.append({
                **{name: row[name] for name in ("call", "pool", "role")},
                "predicted": seconds_text(row["predicted_s"]),
                "measured": seconds_text(row["measured_s"]) if known else "",
                "error": f"{row['error']:+.0%}" if known else "",
            })  # fmt: skip
        return f"<div>{self.timeline().inline_svg}{table(rows, caption=str(self.plan.placement))}</div>"


class Predictor:
    """Predicts the time of other placements of a workbench. calibration: the result of `calibrate`."""

    def __init__(
        self, hosts: Hosts, ownership: Ownership, topology: Topology, position: Position, telemetry: TelemetryStore
    ) -> None:
        self._hosts, self._ownership, self._topology = hosts, ownership, topology
        self._position, self._telemetry = position, telemetry
        self.calibration: Calibration | None = None

    def calibrate(self, algorithm: Algorithm | None = None, *, hardware: str | Hardware | None = None) -> Constants:
        """Fit the cost model to the calls of the last iteration, as timed on the slowest rank, and to those of earlier
        calibrations. Calibrations under different placements make the fit better. Run two iterations before, because
        the first one warms up.

        algorithm: the one that ran the iteration; None: the one that took the last step. hardware: the machines whose
        peak rates terms are counted with; None: this machine, or, measured, the machines of the hosts and the link
        between two of them. It must be given for GPUs of other machines. Raises `BadInput` where the iteration has not
        ended, or ran under an earlier placement.
        """
        algorithm = self._whose(algorithm)
        if hardware is not None:
            self.calibration = Calibration(hardware_of(hardware))
        if algorithm.under_way:
            raise BadInput(
                f"iteration {algorithm.iteration} of {type(algorithm).__name__} is under way",
                "calibration times the calls of a whole iteration",
                "finish it with iterate(), or give it up with restart() and run another",
            )
        workload = self._workload(algorithm)
        known = self._calibrated()
        terms = _terms_by_call(self._plan(self._hosts.placement, workload, known))
        measured = self._measured({call for call, _, _ in terms}, algorithm)
        for (call, _, role), made_of in terms.items():
            if call in measured:
                key = str(self._hosts.placement), algorithm.iteration, call
                start_s, end_s = measured[call]
                known.samples[key] = Sample(made_of, end_s - start_s, f"{role}.{call}")
        known.constants = fit(list(known.samples.values()), START)
        known.measured[str(self._hosts.placement)] = measured
        if not algorithm.by_hand:  # by hand, the user's pauses would count as time between calls
            known.idle_s[str(self._hosts.placement), algorithm.iteration] = _idle_s(measured)
        return known.constants

    def predict(
        self, placement: Placement | None = None, algorithm: Algorithm | None = None, *, staleness: NonNegativeInt = 0
    ) -> Prediction:
        """Predict the time of an iteration under another placement (None: the present one), after `calibrate`.
        Measurements under that placement are shown beside it. Nothing is changed. staleness: as in `run`; rollout
        workers in a pool of their own then generate while the others train.

        `lab.diff(placement)` says whether the placement has enough memory and devices. Raises `BadInput` for a
        placement that lacks a role, or before any `calibrate`.
        """
        known = self._need_calibration()
        placed = self._hosts.placement if placement is None else placement
        placed = placed.restrict(role for role in (*self._hosts.placement.roles, ROLLOUT) if role in placed.roles)
        plan = self._plan(placed, self._workload(self._whose(algorithm)), known, staleness)
        return Prediction(plan, known.constants, known.measured.get(str(placed), {}))

    def suggest(
        self,
        algorithm: Algorithm | None = None,
        *,
        devices: PositiveInt | None = None,
        top: PositiveInt = 3,
        staleness: NonNegativeInt = 0,
    ) -> Plans:
        """Return the fastest placements of this workbench's models by the fitted cost model: see `wb.mapping.search`.

        devices: None: as many as the workbench has; on a CPU no more are tried than cores, or roles. With no more
        devices than it has, all plans are ones that `move` accepts; `diff` says whether there is room now. staleness:
        as in `run`: rollout workers have a pool of their own, and plans divide the devices between generation and
        training. `.chance` and `.advice` say how certain the best plan is, and what one trial would decide. Raises
        `BadInput` before any `calibrate`, or where no plan is left.
        """
        known = self._need_calibration()
        workload = self._workload(self._whose(algorithm))
        workload = workload.with_rollout(staleness) if staleness else workload
        inline = self._hosts.description.backend == "inline"  # uses one device, however many there are
        has = (not inline and self._hosts.description.devices) or self._hosts.placement.devices
        count = has if devices is None else devices
        best, tried, refused = dict[tuple[tuple[str, ...], ...], Plan](), list[Plans](), list[BadInput]()
        machine = known.hardware(count).cores  # its cores: the fewer devices share them, the faster each is
        most = min(count, max(machine, len(self._models()) + 1)) if machine else count
        for used in range(most, 0 if machine else count - 1, -1):
            try:
                # a role that the algorithm does not call is placed as well, and costs no time
                plans = search(self._models(), devices=used, hardware=known.hardware(used), workload=workload,
                               constants=known.constants, t_g=self._t_g(), uncalled=True,
                               dependencies=True)  # fmt: skip
                found = self._possible(plans) if count <= has else plans.plans
            except BadInput as error:
                refused.append(error)
                continue
            tried.append(plans)
            for plan in found:
                if machine:
                    plan = replace(self._plan(plan.placement, workload, known, staleness), dependencies=True)
                sets = tuple(one.names for one in plan.sets)
                best[sets] = min(best.get(sets, plan), plan, key=lambda one: one.iteration_s)
        if not tried:
            raise refused[0]
        ranks = ranked(best.values())
        times = max(ranks[0].iteration_s / one.best.iteration_s * (1 + one.gap) for one in tried)
        return replace(tried[0], plans=tuple(ranks[:top]), devices=most, gap=gap_of(times),
                       search_s=sum(one.search_s for one in tried), error=spread(known.samples, known.idle_s, START),
                       findings=known.constants.findings)  # fmt: skip

    def _possible(self, plans: Plans) -> list[Plan]:
        """Return the plans whose placement every role's engine accepts; raise the first refusal where none is left."""
        found, refusal = [], None
        for plan in plans:
            try:
                self._hosts.description.placed(plan.placement)
            except BadInput as error:
                refusal = refusal or error
            else:
                found.append(plan)
        if refusal is not None and not found:
            raise refusal
        return found

    def _plan(self, placement: Placement, workload: Workload, known: Calibration, staleness: int = 0) -> Plan:
        workload = workload.with_rollout(staleness) if placement.has_rollout else workload
        return predict(placement, self._models(), hardware=known.hardware(placement.devices), workload=workload,
                       constants=known.constants, t_g=self._t_g())  # fmt: skip

    def _models(self) -> dict[str, RoleModel | None]:
        """Return the model of each role, without rollout workers, which have the actor's model."""
        return {role: model for role, model in self._hosts.description.role_models().items() if role != ROLLOUT}

    def _t_g(self) -> int:
        generation = self._hosts.description.generation
        return generation.tensor_parallel_size if generation is not None else 1

    def _need_calibration(self) -> Calibration:
        self._ownership.check_open()
        if self.calibration is None or not self.calibration.samples:
            raise BadInput(
                f"workbench {self._hosts.description.name!r} is not calibrated",
                "predictions for a placement come from calls that were timed in this workbench",
                "run two iterations, then lab.calibrate()",
            )
        return self.calibration

    def _calibrated(self) -> Calibration:
        if self.calibration is None:
            machines, given = self._hosts.backend.machines_now(), None
            if set(machines.values()) - {socket.gethostname()}:
                if self._hosts.description.device == "cuda":
                    raise BadInput(
                        f"GPUs on {', '.join(sorted(set(machines.values())))}",
                        "their network cannot be measured here, and the GPUs may differ from those of this machine",
                        "describe them: lab.calibrate(hardware='a100-80g'), or a wb.mapping.Hardware",
                    )
                given = self._topology.rates.hardware(machines)
            self.calibration = Calibration(given)
        return self.calibration

    def _whose(self, algorithm: Algorithm | None) -> Algorithm:
        self._ownership.check_open()
        found = algorithm or self._position.algorithm
        if found is None:
            raise BadInput(
                "no algorithm has taken a step here", "its graph says which calls an iteration has",
                "run one, or pass it: lab.calibrate(ppo)",
            )  # fmt: skip
        return found

    def _workload(self, algorithm: Algorithm) -> Workload:
        """Return the workload of the last iteration: its graph, and the lengths of its rows."""
        for made in algorithm.made.values():
            columns = getattr(made, "columns", ())
            if {"prompt_ids", "response_ids"} <= set(columns):
                table = made.fetch(["prompt_ids", "response_ids"])
                prompts, responses = (table[name].lengths.tolist() for name in ("prompt_ids", "response_ids"))
                found = Workload.of_algorithm(algorithm, prompt_tokens=max(1, round(sum(prompts) / len(prompts))),
                                              response_tokens=tuple(max(1, n) for n in responses))  # fmt: skip
                last = self._telemetry.syncs().query("whole_bytes > 0").tail(1)
                share = float((last["moved_bytes"] / last["whole_bytes"]).iloc[0]) if len(last) else 1.0
                return replace(found, sync_share=share,
                               between_s=self.calibration.between_s if self.calibration else 0.0)  # fmt: skip
        raise NotFound("no batch with responses", f"{type(algorithm).__name__} has made none", "run an iteration first")

    def _measured(self, calls: set[str], algorithm: Algorithm) -> dict[str, tuple[float, float]]:
        """Return start and end of the algorithm's last iteration, and of its calls on their slowest ranks, in seconds
        since it began. A call that began earlier, to generate ahead, is moved to the beginning."""
        made = self._telemetry.metrics()
        made = made[(made["iteration"] == algorithm.iteration) & made["stage"].isin(calls)]
        runs = made.groupby("stage")["run"].max()
        spans = self._telemetry.spans()
        spans = spans[(spans["kind"] == "compute") & (spans["parent"] == "") & spans["run"].isin(runs)]
        events = self._telemetry.events()
        moves = events[events["event"].isin(["move", "restored", "recovered"])]["time_s"]
        if spans.empty or (len(moves) and spans["start_s"].min() < moves.max()):
            raise BadInput(
                f"iteration {algorithm.iteration} of {type(algorithm).__name__} was not timed under this placement",
                "constants can be fitted only to calls that were timed under the present placement",
                "run an iteration, or better two, because the first warms up",
            )
        drew = events[(events["event"] == "iteration")]["time_s"].max()  # its rollouts may have been generated before
        begun = float(max(spans["start_s"].min(), drew))
        found = {"iteration": (0.0, float(spans["end_s"].max()) - begun)}
        for span in spans.sort_values("duration_s").to_dict("records"):  # the slowest rank last
            start_s = max(0.0, span["start_s"] - begun)
            found[span["stage"]] = (start_s, start_s + span["duration_s"])
        return found


def _idle_s(measured: dict[str, tuple[float, float]]) -> float:
    """Return the seconds of a measured iteration in which no call ran."""
    reached = idle_s = 0.0
    for start_s, end_s in sorted(span for call, span in measured.items() if call != "iteration"):
        idle_s, reached = idle_s + max(0.0, start_s - reached), max(reached, end_s)
    return idle_s


def _terms_by_call(plan: Plan) -> dict[tuple[str, str, str], Terms]:
    """Return (call, pool, role) -> the call's terms, including those of preparing its weights."""
    found: dict[tuple[str, str, str], Terms] = {}
    named = {call.name for call in plan.workload.calls}
    for pool, one in zip(plan.pools, plan.sets, strict=True):
        for role in one.roles:
            before: dict[str, Terms] = {}
            for call in role.calls:
                if call.name in named:
                    found[call.name, pool, role.role] = call.terms + before.pop(call.stage, Terms())
                else:
                    before[call.stage] = before.get(call.stage, Terms()) + call.terms
    return found
