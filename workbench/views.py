"""What a workbench shows of itself: what happened, and when. Read from disk; what is where: `whereabouts`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import NotFound
from workbench.telemetry.spans import TRANSFER_KINDS, TransferKind, check_kind
from workbench.whereabouts import Whereabouts
from workbench.workers.logs import tail

if TYPE_CHECKING:
    import pandas as pd

    from workbench.display.timeline import Timeline
    from workbench.display.traffic import Traffic


class Views(Whereabouts):
    """The methods of a `Workbench` that only look."""

    def spans(self) -> pd.DataFrame:
        """Every timed piece of work on every rank, one a row, seconds and bytes."""
        return self.telemetry.spans()

    def transfers(self, kind: TransferKind | None = None) -> pd.DataFrame:
        """Every movement of bytes from one host to another, one a row: of rows for stages ("batch"), of "weights" for
        generation, of what `lab.move` moves ("move"), or of all."""
        if kind is not None:
            check_kind("transfers(kind)", kind, TRANSFER_KINDS)
        moved = self.telemetry.transfers()
        return moved if kind is None else moved[moved["kind"] == kind].reset_index(drop=True)

    def traffic(self, kind: TransferKind | None = None, *, stage: str | None = None) -> Traffic:
        """Who sent how many bytes to whom: a matrix as a picture, `.matrix` and `.frame()` as tables.

        kind: as in `transfers`. stage: only what moved for stages of this name. Of "weights" it also says what their
        syncs would move at the least: what each rank lacks.
        """
        from workbench.display.traffic import traffic

        moved = self.transfers(kind)
        if stage is not None:
            known = sorted(set(moved["stage"]))
            if stage not in known:
                raise NotFound(
                    f"stage {stage!r}", f"bytes moved for {', '.join(known) or 'none'}", "choose one of these"
                )
            moved = moved[moved["stage"] == stage]
        syncs = moved[moved["stage"] != "take_weights"]  # which is the reference's
        what = {"batch": "rows", "weights": "weights", "move": "state", None: "all that moved"}[kind]
        return traffic(
            moved,
            names=[info.name for info in self._infos],
            what=f"{what} for {stage}" if stage else what,
            minimum_bytes=self._least_sync_bytes() * syncs["run"].nunique() if kind == "weights" else None,
        )

    def _least_sync_bytes(self) -> int:
        """What a weight sync of the actor moves at least: between its ranks, or to the rollout workers."""
        from workbench.models import load_config
        from workbench.workers.roles.rollout import plan_of_rollout, rollout_layout
        from workbench.workers.weight_transition import plan_of, trained_slices

        actor, rollout = self.groups.get("actor"), self.groups.get("rollout")
        if actor is not None and rollout is not None:
            taker = rollout_layout(rollout.spec, len(rollout.hosts))
            return int(plan_of_rollout(rollout.spec, actor.layout, taker).figures().received.sum())
        if actor is None or (slices := trained_slices(actor.spec, actor.layout)) is None:
            return 0
        spec, layout = actor.spec, actor.layout
        assert spec.name is not None
        assert spec.generation is not None
        assert spec.dtype is not None
        plan = plan_of(load_config(spec.name), layout, spec.generation, spec.dtype, "hybridflow", slices)
        return int(plan.figures().received.sum())

    def syncs(self) -> pd.DataFrame:
        """The ledger of weights: one row a sync and one a generation, in order, with what is wrong with it.

        version, trained_version: of the engine's and the trainer's weights, in optimizer steps. strategy: by which
        slices moved between ranks. moved_bytes: between ranks, on all of them; taken_bytes: handed to the engines.
        checksum_sent, checksum_received: of what moved, in the memory of those who sent it and of those who have it;
        taken where `Generation.check_sync` says so.
        verdict: "ok"; "checksum differs"; "not synced", drawn with other weights than the trainer had; "synced twice",
        the engine had these weights; "failed". With culprit (weight, rank) and remedy.
        """
        return self.telemetry.syncs()

    def metrics(self, stage: str | None = None) -> pd.DataFrame:
        """One row a stage call, a column a metric; of one stage only, if named."""
        return self.telemetry.metrics(stage)

    def timeline(self, iterations: int | None = 1) -> Timeline:
        """A picture of the last iterations (None: all) by device: what ran where, when, and what stood idle."""
        from workbench.display.timeline import timeline

        spans = self.spans()
        start = None
        if iterations is not None and len(spans):
            events = self.telemetry.events()
            starts = events[events["event"] == "iteration"]["time_s"].to_list()[-iterations:]
            start = starts[0] if starts else None
        return timeline(spans, devices=[info.device for info in self._infos], start=start)

    def trace(self, path: str | Path) -> Path:
        """Write everything that happened as a Chrome trace, for Perfetto."""
        return self.telemetry.chrome_trace(path)

    def logs(self, pool: str | None = None, rank: int | None = None, lines: int = 40) -> None:
        """Print the last lines that worker processes wrote."""
        for info in self._infos:
            if pool in (None, info.pool) and rank in (None, info.rank) and info.log_path:
                print(f"--- {info.name}: {info.log_path}")
                print(tail(Path(info.log_path), lines))

    def __repr__(self) -> str:
        state = " (closed)" if self._closed else ""
        shared = "; reference: the actor" if self.description.actor_is_reference else ""
        return f"<Workbench {self.name}{state}: {self.placement}{shared}>"[:79]

    def _repr_html_(self) -> str:
        from workbench.display.html import table

        rows = []
        for pool in self.placement.pools:
            for role, group in self.groups.items():
                if group.pool is not pool:
                    continue
                spec = group.spec
                engine: str = spec.training.engine if spec.training and spec.trained else ""
                if role in ("actor", "rollout") and spec.generation:
                    engine = " + ".join(filter(None, (engine, spec.generation.engine)))
                rows.append(
                    {
                        "role": role,
                        "model": group.model,
                        "engines": engine,
                        "dtype": spec.dtype if spec.name else "",
                        "pool": pool.name,
                        "devices": ", ".join(i.device for i in self._infos if i.pool == pool.name),
                    }
                )
        state = ", closed" if self._closed else ""
        return table(
            rows, caption=f"Workbench {self.name} ({self.description.backend}{state}), run folder {self.run_folder}"
        )
