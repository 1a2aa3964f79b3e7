"""Saving and going on, inline: the numbers of a run that was never interrupted, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import workbench as wb
from tests.cases import TINY, hosts_of, tiny_lab, vowels
from tests.expected import expect_error
from workbench.errors import BadInput, NameTaken, NotFound
from workbench.models import load_tokenizer
from workbench.session.checkpoint import find_checkpoint
from workbench.session.checkpoint.files import MANIFEST

OPTIONS: dict[str, Any] = {"prompts": 4, "samples": 2, "sampling": wb.Sampling(max_new_tokens=6)}


def ppo_of(lab: wb.Workbench) -> wb.PPO:
    return wb.PPO(lab, **OPTIONS, kl_coefficient=0.05, kl_target=0.5, kl_horizon=20)


@dataclass
class Uninterrupted:
    """A run with checkpoints on its way. metrics: of iterations 3 and 4. logits: of the actor after iteration 2."""

    folder: Path
    metrics: list[dict[str, float]]
    coefficient: float
    logits: torch.Tensor
    ids: torch.Tensor


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("saved")
    with tiny_lab("saved", folder, backend="inline") as lab:
        ppo = ppo_of(lab)
        ppo.run(2)
        coefficient = ppo.kl_coefficient
        saved = lab.save(folder / "two")
        assert saved.iteration == 2
        assert (
            saved.nbytes
            == sum(f.stat().st_size for f in saved.folder.rglob("*") if f.is_file())
            - (saved.folder / MANIFEST).stat().st_size
        )
        module: Any = hosts_of(lab)["shared-0"].workers["actor"].engine.module.model
        ids = torch.tensor([load_tokenizer(TINY)("checkpoints").input_ids])
        with torch.no_grad():
            logits = module(ids).logits
        for _ in range(4):
            ppo.step()
        lab.save(folder / "middle", models=False)
        metrics = [ppo.iterate()]
        lab.save(folder / "three", models=False)
        metrics.append(ppo.iterate())
    return Uninterrupted(folder, metrics, coefficient, logits, ids)


def test_the_next_iterations_are_those_of_the_run(run: Uninterrupted, tmp_path: Path) -> None:
    with wb.restore(find_checkpoint(run.folder / "two"), name="again", runs=tmp_path) as lab:
        assert lab.iteration == 2
        assert lab.checkpoint is not None
        assert repr(lab.checkpoint).startswith("<Checkpoint after 2 iterations of 'saved'")
        ppo = ppo_of(lab)
        assert ppo.kl_coefficient == run.coefficient != 0.05  # at once, not only when it steps
        assert [ppo.iterate(), ppo.iterate()] == run.metrics
        assert ppo_of(lab).kl_coefficient == 0.05  # another one, once it has gone on, begins as it is told to


def test_it_goes_on_in_the_middle_of_an_iteration(run: Uninterrupted, tmp_path: Path) -> None:
    with wb.restore(run.folder / "middle", name="again", runs=tmp_path) as lab:
        ppo = ppo_of(lab)
        assert ppo.under_way
        assert ppo.next_stage == ppo.graph().names[4]
        frame = ppo.run(2)  # the rest of that iteration is its first
        assert frame.to_dict("records") == run.metrics
        assert frame.index.to_list() == [3, 4]


@pytest.mark.parametrize("leave", ["iterate", "restart"])
def test_an_iteration_that_is_over_is_not_taken_up_again(leave: str, run: Uninterrupted, tmp_path: Path) -> None:
    with wb.restore(run.folder / "middle", name="again", runs=tmp_path) as lab:
        getattr(ppo_of(lab), leave)()
        assert not ppo_of(lab).under_way


def test_it_names_the_iteration_that_it_goes_on_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_lab("under-way", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
        grpo = wb.GRPO(lab, **OPTIONS)
        grpo.step()
        lab.prompts.next(2)  # by hand: another iteration
        lab.save(tmp_path / "saved")
    with wb.restore(tmp_path / "saved", name="other") as lab:
        wb.GRPO(lab, **OPTIONS).step()
        assert lab.iteration == 2
    assert "GRPO continues in iteration 1" in capsys.readouterr().out


def test_another_algorithm_says_what_it_leaves(
    run: Uninterrupted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with wb.restore(run.folder / "middle", name="again", runs=tmp_path) as lab:
        wb.GRPO(lab, **OPTIONS).step()
    assert "iteration 3 of PPO stays unfinished: GRPO begins another" in capsys.readouterr().out


def test_what_is_restored_can_be_saved(run: Uninterrupted, tmp_path: Path) -> None:
    with wb.restore(run.folder / "two", name="again", runs=tmp_path) as lab:
        lab.save(tmp_path / "copy")
    for file in sorted((run.folder / "two" / "roles").rglob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "copy" / file.relative_to(run.folder / "two")).read_bytes()


def test_transformers_loads_the_saved_actor(run: Uninterrupted) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.folder / "two" / "roles" / "actor" / "model", dtype="float32")
    with torch.no_grad():
        torch.testing.assert_close(model(run.ids).logits, run.logits)  # another attention than for packed sequences


def test_a_resumed_program_leaves_out_what_was_done(run: Uninterrupted, tmp_path: Path) -> None:
    def program(**more: Any) -> tuple[list[int], list[dict[str, float]]]:
        with tiny_lab("saved", tmp_path, backend="inline", **more) as lab:
            ppo, by_hand, made = ppo_of(lab), [], list[dict[str, float]]()
            frame = ppo.run(2)
            for number in lab.iterations(2):
                by_hand.append(number)
                made.append(ppo.iterate())
            return [*frame.index, *by_hand], made

    assert program(resume=run.folder / "two") == ([1, 2], run.metrics)
    assert program(resume=run.folder / "three") == ([2], run.metrics[1:])
    with tiny_lab("saved", tmp_path, backend="inline", resume=run.folder / "three") as lab:
        for line in (lambda: lab.prompts.next(4), lambda: lab.critic.update_critic(lab.put({"x": [1]}))):
            with expect_error(BadInput, value="resumed after 3 iterations, 3 of them still", rule="lab.iterations"):
                line()
        with expect_error(BadInput, value=r"refresh_reference\(\) in a run that is resumed"):
            lab.refresh_reference()
        assert lab.check("ratio").ok  # puts everything back
        ppo = ppo_of(lab)
        assert ppo.run(2).empty
        turns = iter(lab.iterations(2))
        assert next(turns) == 2
        found, expected = ppo.iterate(), dict(run.metrics[1])
        del expected["generate_sequences/sync_gap/mean"]  # the check has had the engine synced
        assert found == expected  # nothing that was refused has drawn prompts
        ppo.iterate()
        with expect_error(BadInput, value=r"turn 2 of lab.iterations\(2\) began 2 iterations"):
            next(turns)


def test_a_resumed_program_keeps_what_it_had_saved(tmp_path: Path) -> None:
    def program(**more: Any) -> list[int]:
        with tiny_lab("saves", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}, **more) as lab:
            grpo, made = wb.GRPO(lab, **OPTIONS), list[int]()
            for number in range(3):
                assert lab.save(tmp_path / str(number), models=False).iteration == number
                made += grpo.run(1).index.to_list()
            return made

    assert program() == [1, 2, 3]
    with expect_error(BadInput, value="0' is not empty"):
        program()
    with expect_error(BadInput, value="2' is not empty"):  # of another run: it is newer
        program(resume=tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    assert program(resume=tmp_path / "1") == [2, 3]
    with wb.restore(tmp_path / "1", name="other") as lab:
        with expect_error(BadInput, value="1' is not empty", rule="saved to '.*1-2'"):
            lab.save(tmp_path / "1")
        assert find_checkpoint(tmp_path / "1-2").iteration == lab.iteration


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_automatic_saves(run: Uninterrupted, tmp_path: Path) -> None:
    with tiny_lab("saved", tmp_path, backend="inline", save_every=1) as lab:
        ppo_of(lab).run(3)
        folder = lab.run_folder
        found = names(folder / "checkpoints")
        assert found == ["iteration-000002", "iteration-000003"]
        lab.autosave(minutes=1000)
        ppo_of(lab).run(1)
        assert names(folder / "checkpoints") == found
        lab.autosave(None)
        ppo_of(lab).run(1)
        assert names(folder / "checkpoints") == found
        lab.save(tmp_path / "elsewhere" / "by hand", models=False)
        lab.autosave(minutes=1e-9, folder=tmp_path / "elsewhere", keep=1)
        lab.prompts.next(4)
        batch = lab.prompts.next(4)  # by hand: what is over is saved before the next one begins
        lab.prompts.next(4)  # and what it saved itself before it deletes: nothing else
        assert names(tmp_path / "elsewhere") == [f"{folder.name}-iteration-000007", "by hand"]
        assert batch.rows == 4
    for where in (folder, folder / "checkpoints", folder.parent):
        assert find_checkpoint(where).iteration == 3
    with wb.restore(folder, name="again", runs=tmp_path) as lab:
        assert ppo_of(lab).iterate() == run.metrics[1]


def test_examples_go_on_where_they_stood(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "response": str(n)} for n in range(12)]
    models = {"actor": TINY}
    with tiny_lab("sft", tmp_path, backend="inline", models=models, prompts=None) as lab:
        sft = lab.demonstrations(rows)
        lab.actor.update_sft(sft.next(4))
        lab.save(tmp_path / "one")
        expected: Any = sft.next(4).fetch(["prompt_uid", "response_ids"])
    with wb.restore(tmp_path / "one", name="again", runs=tmp_path) as lab:
        others = lab.demonstrations(rows[:6])
        assert others.drawn == 0
        found: Any = lab.demonstrations(rows).next(4).fetch(["prompt_uid", "response_ids"])
        assert found["prompt_uid"].tolist() == expected["prompt_uid"].tolist()
        assert found["response_ids"].values.tolist() == expected["response_ids"].values.tolist()
        assert lab.iteration == 2


@pytest.mark.thorough
def test_an_adapter_goes_on(tmp_path: Path) -> None:
    models = {"actor": wb.Model(TINY, adapter=wb.LoRA(rank=2)), "critic": TINY, "reference": TINY, "reward": len_of}
    with tiny_lab("adapted", tmp_path, models=models, backend="inline") as lab:
        ppo = ppo_of(lab)
        ppo.iterate()
        saved = lab.save(tmp_path / "one")
        expected = ppo.iterate()
    with wb.restore(saved.folder, name="again", runs=tmp_path) as lab:
        assert ppo_of(lab).iterate() == expected
    adapted = wb.Model(TINY, adapter=wb.LoRA(rank=4))
    with expect_error(BadInput, remedy="declare the model that was saved"):
        wb.restore(saved.folder, name="other", runs=tmp_path, models={**models, "actor": adapted})


def len_of(response: str, **row: Any) -> float:
    return float(len(response))


def test_a_refreshed_reference_is_saved(tmp_path: Path) -> None:
    with tiny_lab("refreshed", tmp_path, backend="inline") as lab:
        lab.save(tmp_path / "before", models=False)
        ppo_of(lab).iterate()
        lab.refresh_reference()
        lab.save(tmp_path / "after", models=False)
        digests = lab.reference.weight_digests()
    assert not (tmp_path / "before" / "roles" / "reference").exists()
    with wb.restore(tmp_path / "after", name="again", runs=tmp_path) as lab:
        assert lab.reference.weight_digests() == digests == lab.actor.weight_digests()
        lab.save(tmp_path / "once more", models=False)
    assert (tmp_path / "once more" / "roles" / "reference").exists()


def test_bad_input(run: Uninterrupted, tmp_path: Path) -> None:
    with expect_error(NotFound, value="no checkpoint in .*nowhere", rule="there is no such folder"):
        wb.restore(tmp_path / "nowhere")
    with expect_error(BadInput, value=r"wb.restore\(..., colour=\)", rule="arguments are those of wb.open"):
        wb.restore(run.folder / "two", colour="red")
    with expect_error(BadInput, value="role 'critic' of <Checkpoint", rule="has actor"):
        tiny_lab("x", tmp_path, backend="inline", models={"actor": TINY}, resume=run.folder / "two")
    with expect_error(BadInput, value="role 'reward'", rule="of another kind"):
        tiny_lab("x", tmp_path, backend="inline", models={"actor": TINY, "critic": TINY, "reference": TINY,
                 "reward": TINY}, resume=run.folder / "two").close()  # fmt: skip
    with expect_error(BadInput, value="prompts differ in"):
        tiny_lab("x", tmp_path, backend="inline", prompts=["a", "b"], resume=run.folder / "two")
    assert "x" not in [lab["name"] for lab in wb.ls()]
    with tiny_lab("x", tmp_path, backend="inline") as lab:
        with expect_error(BadInput, value="is not empty", rule="new or empty"):
            lab.save(run.folder)
        with expect_error(BadInput, value="inside lab.kept"), lab.kept("actor"):
            lab.save(tmp_path / "in")
        with expect_error(BadInput, value="keep=0"):
            lab.autosave(keep=0)
        with expect_error(NameTaken, rule="not restored to a checkpoint"):
            tiny_lab("x", tmp_path, backend="inline", resume=run.folder / "two", if_exists="attach")


def test_damage_is_found_before_anything_is_opened(run: Uninterrupted, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(run.folder / "three", tmp_path / "copy"))
    file = copy / "roles" / "actor" / "exp_avg-00000.safetensors"
    text = bytearray(file.read_bytes())
    text[-3] ^= 1
    file.write_bytes(text)
    with expect_error(BadInput, value=r"exp_avg-00000.safetensors has \d+ bytes with another checksum"):
        wb.restore(copy, name="again", runs=tmp_path)
    file.unlink()
    with expect_error(BadInput, value="exp_avg-00000.safetensors is gone"):
        wb.restore(copy, name="again", runs=tmp_path)
    values = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**values, "format": 99}))
    with expect_error(BadInput, value="has format 99", rule="reads 4"):
        wb.restore(copy)


def test_a_disk_that_is_full_leaves_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    """A real full disk: /dev/full answers every write with ENOSPC."""
    from workbench.errors import StageError

    with tiny_lab("full", tmp_path, backend="inline") as lab:
        ppo = ppo_of(lab)
        ppo.iterate()
        worker = hosts_of(lab)["shared-0"].workers["actor"]
        write, state = worker.save_model, tmp_path / "state"

        def to_a_full_disk(path: Path) -> None:
            full = os.open("/dev/full", os.O_WRONLY)
            try:
                os.write(full, b"weights")
            finally:
                os.close(full)

        worker.save_model = to_a_full_disk
        with expect_error((StageError, OSError), value="No space left on device"):
            lab.save(state)
        assert not state.exists()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".state")]
        lab.autosave(1, folder=tmp_path / "auto", models=True)
        with pytest.warns(UserWarning, match=r"no checkpoint after iteration 2.*No space left"):
            ppo.iterate()
        worker.save_model = write
        lab.save(state)
        assert ppo.iterate()


KILLED = """
import sys
from pathlib import Path
from tests.cases import tiny_lab
import workbench as wb
from workbench.session.checkpoint import saving

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    lab = tiny_lab("killed", folder, backend="inline")
    ppo = wb.PPO(lab, prompts=4, samples=2, sampling=wb.Sampling(max_new_tokens=6))
    lab.autosave(1, folder=folder / "auto")
    ppo.iterate()
    write = saving.write_manifest

    def pausing(*args, **kwargs):
        print("all but the manifest is written", flush=True)
        sys.stdin.read()
        return write(*args, **kwargs)

    saving.write_manifest = pausing
    ppo.iterate()
"""


@pytest.mark.thorough  # a kill while saving: tests/crash_points
def test_who_is_killed_while_saving_has_the_checkpoint_before(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "all but" in process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    half, whole = names(tmp_path / "auto")
    assert half.startswith(".")
    assert whole.endswith("iteration-000001")
    assert find_checkpoint(tmp_path / "auto").iteration == 1
    with wb.restore(tmp_path / "auto", name="again", runs=tmp_path) as lab:
        assert lab.iteration == 1
        left, yours = tmp_path / "auto" / half, tmp_path / "auto" / ".cache.0123abcd"
        yours.mkdir()
        (yours / "notes").touch()
        lab.save(tmp_path / "auto" / "two")
        assert left.exists()  # somebody may still write to it
        for path in (left, yours, *left.rglob("*")):
            os.utime(path, (0, 0))
        lab.save(tmp_path / "auto" / "three")
        assert not left.exists()
        assert yours.exists()
