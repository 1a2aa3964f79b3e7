"""`lab.changed()`: its figures are those of the weights before and after, wherever their elements lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import workbench as wb
from tests.cases import TINY, hosts_of, stored, tiny_lab
from tests.engines.training_ranks import run_ranks
from tests.expected import expect_error
from tests.integration.test_weight_sync import drawn
from tests.workers.test_rollout import apart
from tests.workers.update_ranks import context_here
from workbench.display.traffic import changed_map
from workbench.errors import BadInput
from workbench.models.loading import load_causal_lm
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.settings.engines import DType
from workbench.settings.training import Training
from workbench.telemetry.syncs import CHANGED_COLUMNS, Sync, changed_frame
from workbench.workers.roles import ActorWorker

Weights = dict[str, Tensor]


def lab_of(runs: Path, rate: float = 1e-5, **options: Any) -> wb.Workbench:
    options = {"models": {"actor": wb.Model(TINY, dtype="bfloat16")}, "backend": "inline", **options}
    return tiny_lab("changed", runs, training={"minibatches": 1, "learning_rate": rate}, **options)


def update(lab: wb.Workbench, seed: int = 0) -> None:
    lab.actor.update_sft(lab.put(drawn(seed)))


def generate(lab: wb.Workbench) -> None:
    lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)


def masters(lab: wb.Workbench) -> Weights:
    (host,) = hosts_of(lab).values()
    return {name: tensor.clone() for name, tensor in host.workers["actor"].engine.held_state("parameters")}


def require(found: pd.DataFrame, before: Weights, after: Weights, dtype: torch.dtype = torch.bfloat16) -> None:
    """The rows of one note are what these weights say."""
    assert list(found["weight"]) == list(before)
    for row in found.to_dict("records"):
        old, new = before[row["weight"]], after[row["weight"]]
        assert row["elements"] == old.numel()
        assert row["trained"] == (old != new).double().mean()
        assert row["visible"] == (old.to(dtype) != new.to(dtype)).double().mean()
        assert row["norm"] == pytest.approx(float((old.double() - new.double()).norm()), rel=1e-6)


def test_each_sync_and_each_call_notes_what_updates_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lab_of(tmp_path) as lab:
        update(lab)  # before anyone asked
        assert lab.changed().dtypes.astype(str).to_dict() == CHANGED_COLUMNS
        first = masters(lab)
        assert f"a copy of {sum(w.nbytes for w in first.values()) / 1e6:.1f} MB" in capsys.readouterr().err
        update(lab, 1)
        generate(lab)  # which syncs
        second = masters(lab)
        update(lab, 2)
        update(lab, 3)
        found = lab.changed()
        assert capsys.readouterr().err == ""
        per_note = len(first)
        assert [*found["since"]] == [1] * per_note + [2] * per_note
        assert [*found["version"]] == [2] * per_note + [4] * per_note
        require(found[:per_note], first, second)
        require(found[per_note:], second, masters(lab))
        assert 0 < found["visible"].mean() < found["trained"].mean()
        assert set(found["layer"]) >= {"model.embed_tokens", "model.layers.0", "model.norm"}
        pd.testing.assert_frame_equal(lab.changed(), found)  # nothing is new
        pd.testing.assert_frame_equal(lab.changed(1), found[per_note:].reset_index(drop=True))
        assert [*lab.syncs()["event"]] == ["sync", "generation"]  # the ledger of syncs is as without
        with expect_error(BadInput, value="last=0", rule="at least 1"):
            lab.changed(0)
        view = lab.panel("traffic").views["traffic"]
        before = view.depends_on()
        assert view.picture().count("<title>model.layers.0, ") == 2
        update(lab)
        lab.changed()
        assert view.depends_on() != before
        assert view.picture().count("<title>model.layers.0, ") == 3
        part: dict[str, Any] = {"stage": "s", "run": 99, "role": "rollout", "version": 5, "trained_version": 5}
        sizes: dict[str, Any] = {"whole_bytes": 4000, "moved_bytes": 1000}
        lab.telemetry.append_syncs(
            Sync(**part, **sizes, event="sync", rank=rank, start_s=0, end_s=1) for rank in range(2)
        )
        assert "Syncs saved 6.0 kB of 8.0 kB." in view.picture()
    assert len(lab.changed()) == 3 * per_note  # of a closed workbench, what was noted


def test_weights_that_are_put_back_are_no_change(tmp_path: Path) -> None:
    with lab_of(tmp_path) as lab:
        lab.changed()
        update(lab)
        saved = lab.save(tmp_path / "saved")
        with lab.kept("actor") as go_back:
            update(lab)
            go_back()
        assert not len(lab.changed())  # the copy is of the version that it went back to
        for back in (False, True):
            if back:
                lab.recover(saved.folder)
            before = masters(lab)
            update(lab)
            require(lab.changed(1), before, masters(lab))
        assert {*zip(lab.changed()["since"], lab.changed()["version"], strict=True)} == {(1, 2)}
        assert [*lab.changed(1)["run"]] != [*lab.changed(2)["run"]][: len(before)]


@pytest.mark.parametrize("rate", [1e-9, 1e-4])
def test_a_warning_where_generation_sees_almost_nothing(tmp_path: Path, rate: float) -> None:
    with lab_of(tmp_path, rate) as lab:
        lab.changed()
        update(lab)
        view = lab.panel("traffic").views["traffic"]
        if rate > 1e-5:
            lab.changed()  # warnings are errors
            assert "almost the same policy" not in view.picture()
            return
        words = r"^0\.\d+ % of the actor's weights changed in bfloat16 .*\(versions 0 to 1\), \d.* % in float32: roll"
        with pytest.warns(UserWarning, match=words) as shown:
            lab.changed()
        assert shown[0].filename == __file__
        assert "rollouts come from almost the same policy; float32 masters keep the other changes" in view.picture()


def test_of_an_adapter_its_own_weights_are_meant(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    models = {"actor": wb.Model(TINY, dtype="bfloat16", adapter=wb.LoRA(rank=2))}
    with lab_of(tmp_path, 1e-3, models=models) as lab:
        lab.changed()
        before = masters(lab)
        update(lab)
        found = lab.changed()
        require(found, before, masters(lab))
        assert {name.rpartition(".lora_")[2] for name in found["weight"]} == {"A.weight", "B.weight"}
        assert set(found["layer"]) == {"model.layers.0", "model.layers.1"}


def test_rollout_workers_in_a_pool_of_their_own(tmp_path: Path) -> None:
    with apart(tmp_path, {"actor": TINY}) as lab:
        lab.changed()
        for _ in range(2):
            lab.actor.update_actor(lab.put(stored()))
            generate(lab)
        steps = lab.weights["actor"].steps // 2
        found = lab.telemetry.changed()
        assert [*dict.fromkeys(zip(found["since"], found["version"], strict=True))] == [(0, steps), (steps, 2 * steps)]
        assert (found["visible"] == found["trained"]).all()  # a role in float32
        pd.testing.assert_frame_equal(lab.changed(), found)


def test_without_a_trained_actor_there_is_nothing_to_compare(tmp_path: Path) -> None:
    unfit = expect_error(BadInput, value="without an actor", remedy="open it with an actor")
    with tiny_lab("none", tmp_path, backend="inline", models={"reward": TINY}) as lab, unfit:
        lab.changed()


# --- several ranks ----------------------------------------------------------------------------------------------------

LAYOUTS = [
    ("torch", Layout(d=2)), ("torch", Layout(t=2)), ("torch", Layout(p=2)),
    ("zero1", Layout(d=2)), ("zero2", Layout(d=2)), ("zero3", Layout(d=2)),
]  # fmt: skip


def grown(weight: Tensor) -> Tensor:
    """Another value for some elements, whichever rank holds them: half of these changes are lost in bfloat16."""
    return torch.where(weight > 0, weight * (1 + 2**-9), weight)


def noted(engine: str, layout: Layout, dtype: DType) -> list[dict[str, Any]]:
    """What this rank notes of an update that makes `grown` weights of those rounded to bfloat16."""
    _, _, stage = engine.partition("zero")
    training = Training(engine="deepspeed", zero_stage=int(stage)) if stage else Training(engine="torch")
    spec = Model(TINY).filled("actor", dtype=dtype, training=training, generation=wb.Generation())
    worker = ActorWorker(replace(spec, generation=None), replace(context_here(), layout=layout))

    def write(change: Callable[[Tensor], Tensor]) -> None:
        for _, tensor in worker.engine.held_state("parameters"):
            tensor.copy_(change(tensor))

    write(lambda weight: weight.bfloat16().float())
    worker.watch_weights()
    write(grown)
    worker.engine.steps += 1
    with worker.context.recorder.bind(stage="s", run=1, role="actor", pool="main", rank=dist.get_rank()):
        worker.watch_weights()
    return [part.row() for part in worker.context.recorder.drain()[2]]


def all_noted(cases: list[tuple[str, Layout, DType]]) -> list[list[dict[str, Any]]]:
    return [noted(*case) for case in cases]


@pytest.mark.slow
def test_each_element_counts_once_whichever_ranks_hold_it() -> None:
    dtypes: tuple[DType, ...] = ("bfloat16", "float32")
    cases = [(engine, layout, dtype) for engine, layout in LAYOUTS for dtype in dtypes]
    by_rank = run_ranks(all_noted, 2, cases)
    held = {name: weight.detach().bfloat16().float() for name, weight in load_causal_lm(TINY).named_parameters()}
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        found = changed_frame([part for parts in ranks for part in parts]).set_index("weight")
        assert {*found.index} == {*held}, case
        after = {name: grown(weight) for name, weight in held.items()}
        require(found.loc[[*held]].reset_index(), held, after, getattr(torch, case[2]))
        assert (found["visible"] < found["trained"]).any() == (case[2] == "bfloat16")


# --- the picture ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "notes"), [(1, 1), (30, 100)])
def test_a_cell_for_each_layer_and_note(layers: int, notes: int) -> None:
    rows = [
        (note, note, note + 1, f"model.layers.{layer}.{name}", f"model.layers.{layer}", 100 * size, 0.5, 0.01, 3.0)
        for note in range(notes)
        for layer in range(layers)
        for name, size in (("q", 1), ("k", 3))
    ]
    picture = changed_map(pd.DataFrame(rows, columns=list(CHANGED_COLUMNS)).astype(CHANGED_COLUMNS))
    assert picture.count("<title>") == layers * notes
    assert "model.layers.0, version 0 to 1: 1 % changed, 50 % in float32, norm 4.2" in picture
    assert f"heat map of {layers} layers over {notes} weights versions" in picture
    assert "weights version after the update, in optimizer steps" in picture
