"""Assignments to settings of a workbench that lives: checked at once, in force from the next stage on, kept."""

from __future__ import annotations

import copy
import pickle
import re
import signal
import weakref
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, asdict, dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import workbench as wb
from tests.cases import hosts_of, stored, tiny_lab, update_on
from tests.expected import expect_error
from workbench.errors import BadInput, NotFound
from workbench.session.checkpoint import find_checkpoint

OPTIONS: dict[str, Any] = {"prompts": 4, "samples": 2, "sampling": wb.Sampling(max_new_tokens=6)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny_lab("live", tmp_path_factory.mktemp("live"), backend="inline") as lab:
        yield lab


def test_a_rate_holds_from_the_next_update_on(lab: Any) -> None:
    before = update_on(lab, stored())
    assert before["actor/learning_rate"] == before["critic/learning_rate"] == 1e-3
    iteration, events = lab.iteration, len(lab.history.changes())
    lab.actor.training.learning_rate = 5e-6
    lab.actor.training.max_grad_norm = 0.25
    lab.actor.training.learning_rate = 5e-6  # no change, and no event
    after = update_on(lab, stored())
    assert (after["actor/learning_rate"], after["critic/learning_rate"]) == (5e-6, 1e-3)
    assert hosts_of(lab)["shared-0"].workers["actor"].engine.settings.max_grad_norm == 0.25
    assert lab.actor.training == lab.description.models["actor"].training == lab.actor.spec.training
    changes = lab.history.changes().iloc[events:]
    assert changes["setting"].tolist() == ["lab.actor.training.learning_rate", "lab.actor.training.max_grad_norm"]
    assert (changes["before"].tolist(), changes["after"].tolist()) == ([1e-3, 1.0], [5e-6, 0.25])
    assert set(changes["iteration"]) == {iteration}


def test_a_rate_that_no_model_survives_is_warned_of(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.critic.training.learning_rate = 5.0
    assert "lab.critic.training.learning_rate is 5: " in (said := capsys.readouterr().out) and "Write 1e-05" in said
    lab.critic.training.learning_rate = 1e-3
    assert not capsys.readouterr().out


def test_a_rate_of_zero_moves_nothing(lab: Any) -> None:
    update_on(lab, stored())
    lab.critic.training.learning_rate = 0
    before = lab.critic.weight_digests()
    lab.critic.update_critic(lab.put(stored()))
    assert lab.critic.weight_digests() == before
    lab.critic.training.learning_rate = None
    assert lab.critic.training.learning_rate == 1e-5  # a critic's default
    lab.critic.update_critic(lab.put(stored()))
    assert lab.critic.weight_digests() != before


def test_factors_are_assigned_whole(tmp_path: Path) -> None:
    given = {"embed": 0.1}
    with tiny_lab("factors", tmp_path, backend="inline", training={"rates": given}) as lab:
        rates = lab.actor.training.rates
        for change in (
            lambda: rates.__setitem__("embed", -7.0),
            lambda: rates.update(embed=5.0),
            lambda: rates.pop("embed"),
            lambda: rates.__delitem__("embed"),
            lambda: rates.setdefault("head", 2.0),
            lambda: rates.__ior__({"embed": 3.0}),
            rates.clear,
            rates.popitem,
        ):
            with expect_error(BadInput, remedy=r"write lab.actor.training.rates = \{'embed': 0.1\}"):
                change()
        given["embed"] = -7.0
        assert lab.actor.training.rates == lab.critic.training.rates == {"embed": 0.1}
        assert len(lab.history.changes()) == 0
        lab.actor.training.rates = {"embed": 0.5}
        assert (lab.actor.training.rates, lab.critic.training.rates) == ({"embed": 0.5}, {"embed": 0.1})
        assert pickle.loads(pickle.dumps(lab.actor.spec.training)) == lab.actor.training


def test_copies_of_live_training_are_plain_settings(lab: Any) -> None:
    now = lab.actor.spec.training
    for one in (
        copy.copy(lab.actor.training),
        copy.deepcopy(lab.actor.training),
        pickle.loads(pickle.dumps(lab.actor.training)),
        cloudpickle.loads(cloudpickle.dumps(lab.actor.training)),
    ):
        assert type(one) is wb.Training and one == now
        with pytest.raises(FrozenInstanceError):
            one.learning_rate = 1.0  # type: ignore[misc]
    assert not hasattr(lab.actor.training, "__wrong__")


def test_several_fields_at_once(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    kept = lab.actor.spec.training
    lab.actor.training = replace(kept, schedule="linear", total_steps=1000, weight_decay=0.1)
    assert 0 < update_on(lab, stored())["actor/learning_rate"] < kept.learning_rate
    assert "changed no weight" not in capsys.readouterr().err
    lab.actor.training.total_steps = 1
    assert update_on(lab, stored())["actor/learning_rate"] == 0
    assert "actor.update_actor: the rate is 0 after total_steps=1, and this was" in capsys.readouterr().err
    lab.actor.training = kept
    assert lab.actor.training == kept


WRONG = {
    "lab.actor.training.learning_rate = -1": (BadInput, r"Training.learning_rate=-1.*must be at least 0"),
    "lab.actor.training.learning_rate = float('nan')": (BadInput, r"Training.learning_rate=nan"),
    "lab.actor.training.learning_rate = '1e-6'": (BadInput, r"Training.learning_rate='1e-6'.*must be a number"),
    "lab.actor.training.betas = (0.9, 1)": (BadInput, r"Training.betas=.*two numbers in \[0, 1\)"),
    "lab.actor.training.schedule = 'cosine'": (BadInput, r"without total_steps"),
    "lab.actor.training.engine = 'deepspeed'": (BadInput, r"fixed when the role's engine is made.*lab.save\(path\)"),
    "lab.actor.training.lerning_rate = 1": (NotFound, r"its fields are engine.*lab.actor.training.learning_rate"),
    "lab.actor.training = 5": (BadInput, r"training=5.*must be"),
    "lab.actor.learning_rate = 1": (BadInput, r"write lab.actor.training.learning_rate = 1"),
    "lab.reference.training.learning_rate = 1": (BadInput, r"the reference is not trained.*lab.actor.training"),
    "ppo.clip = -1": (BadInput, r"clip=-1.*must be at least 0"),
    "ppo.clip = '0.1'": (BadInput, r"PPO.clip='0.1'.*must be a number"),
    "ppo.samples = 0": (BadInput, r"PPO.samples=0.*at least 1"),
    "ppo.prompts = 3; ppo.samples = 1": (BadInput, r"minibatches of an update must be equally large"),
    "ppo.kl_target = 0.5; ppo.kl_coefficient = 0": (BadInput, r"kl_coefficient=0.*0 would stay 0"),
    "ppo.loss = 'pop'": (BadInput, r"loss='pop'.*'ppo'"),
    "ppo.loss = 'grpo'": (BadInput, r"loss='grpo'.*write loss='ppo', the loss that GRPO uses"),
    "ppo.sampling.temperature = 9": (BadInput, r"temperature=9.*\[0.01, 2\]"),
    "ppo.sampling.temprature = 1": (BadInput, r"PPO.sampling.temprature = 1.*write temperature="),
    "ppo.sampling = 0.7": (BadInput, r"PPO.sampling=0.7.*must be"),
}  # fmt: skip


def test_a_wrong_value_is_refused_and_changes_nothing(lab: Any, subtests: pytest.Subtests) -> None:
    for line in WRONG:
        with subtests.test(line=line):
            kind, match = WRONG[line]
            ppo = wb.PPO(lab, **OPTIONS)
            *first, last = line.split("; ")
            for one in first:
                exec(one, {"lab": lab, "ppo": ppo})
            before = {**ppo.__dict__, "sampling": asdict(ppo.sampling)}
            settings, changes = lab.actor.spec.training, len(lab.history.changes())
            with pytest.raises(kind, match=rf"(?s){match}"):
                exec(last, {"lab": lab, "ppo": ppo})
            assert {**ppo.__dict__, "sampling": asdict(ppo.sampling)} == before
            assert lab.actor.spec.training == settings
            assert len(lab.history.changes()) == changes


def test_fields_of_an_algorithm(lab: Any) -> None:
    ppo = wb.PPO(lab, **OPTIONS)
    events = len(lab.history.changes())
    ppo.iterate()
    ppo.clip = 0.1
    ppo.sampling.temperature = 0.5  # type: ignore[misc]
    ppo.sampling.max_new_tokens = 3  # type: ignore[misc]
    ppo.iterate()
    made = (lab.store.origin(name) for name in reversed(list(lab.store)))
    generated = next(origin for origin in made if origin.stage.endswith("generate_sequences"))
    assert (generated.arguments["temperature"], generated.arguments["max_new_tokens"]) == ("0.5", "3")
    changes = lab.history.changes().iloc[events:]
    assert changes["setting"].tolist() == ["PPO.clip", "PPO.sampling.temperature", "PPO.sampling.max_new_tokens"]
    assert changes["after"].tolist() == [0.1, 0.5, 3]
    assert set(changes["iteration"]) == {lab.iteration - 1}


def test_settings_are_those_of_one_algorithm() -> None:
    """What was given to an algorithm stays as it was; what it gives away is frozen again."""
    given = wb.Sampling()
    with pytest.raises(FrozenInstanceError):
        given.temperature = 0.5  # type: ignore[misc]


def test_settings_of_an_algorithm_are_a_copy(lab: Any) -> None:
    given = wb.Sampling(max_new_tokens=6)
    one, other = wb.PPO(lab, prompts=4, sampling=given), wb.PPO(lab, prompts=4, sampling=given)
    mine = one.sampling
    mine.temperature = 0.5  # type: ignore[misc]
    assert (mine.temperature, one.sampling.temperature) == (0.5, 0.5)
    assert (other.sampling.temperature, given.temperature) == (1.0, 1.0)
    for copied in (pickle.loads(pickle.dumps(mine)), replace(mine)):
        assert copied == mine
        with pytest.raises(FrozenInstanceError):
            copied.temperature = 1.0  # type: ignore[misc]
    known = weakref.ref(one)
    del one
    assert known() is None  # at once: its batches are released with it
    with expect_error(BadInput, rule="no longer exists"):
        mine.temperature = 0.7  # type: ignore[misc]


def test_what_finish_adapts_is_no_change_of_settings(lab: Any) -> None:
    ppo = wb.PPO(lab, **OPTIONS, kl_target=0.5, kl_horizon=20)
    events, before = len(lab.history.changes()), ppo.kl_coefficient
    ppo.iterate()
    assert ppo.kl_coefficient != before
    assert len(lab.history.changes()) == events


@dataclass
class Counting(wb.RLOO):
    """An algorithm of a user's, with a field and a check of its own."""

    most: int = 3
    made_with: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.made_with = self.most
        if self.most < 1:
            raise BadInput(f"most={self.most}", "must be at least 1")


def test_an_algorithm_of_ones_own(lab: Any) -> None:
    mine = Counting(lab, prompts=2, samples=2, kl_coefficient=0.0)
    mine.most = 2
    with expect_error(BadInput, value="most=0"):
        mine.most = 0
    assert (mine.most, mine.made_with) == (2, 3)  # it is checked on a copy
    assert mine._kept_fields() == {"most": 2}


def changing(lab: Any, folder: Path | None = None) -> list[dict[str, float]]:
    """Four iterations with changes after the first and the third; saved after each in `folder`."""
    ppo, found = wb.PPO(lab, **OPTIONS), []
    for number in range(1, 5):
        if number == 2:
            lab.actor.training.learning_rate = 2e-4
            ppo.clip, ppo.sampling.temperature = 0.1, 0.7  # type: ignore[misc]
        if number == 4:
            lab.actor.training.learning_rate = 1e-5
        found.append(ppo.iterate())
        if folder is not None:
            lab.save(folder / str(number), models=False)
    return found


def test_a_checkpoint_keeps_what_was_assigned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_lab("kept", tmp_path, backend="inline") as lab:
        expected = changing(lab, tmp_path)
    assert [m["update_actor/learning_rate"] for m in expected] == [1e-3, 2e-4, 2e-4, 1e-5]
    two = find_checkpoint(tmp_path / "2")
    assert two.values["algorithm"]["fields"] == {"clip": 0.1, "sampling": {"temperature": 0.7}}
    with wb.restore(two.folder, name="restored", runs=tmp_path) as lab:
        ppo = wb.PPO(lab, **OPTIONS)
        said = capsys.readouterr().out
        assert "continues with lab.actor.training.learning_rate = 0.0002, as it was assigned" in said
        assert "with sampling={'temperature': 0.7}, clip=0.1 (assigned)" in said
        assert (lab.actor.training.learning_rate, lab.critic.training.learning_rate) == (2e-4, 1e-3)
        assert ppo.iterate() == expected[2]
        lab.actor.training.learning_rate = 1e-5
        assert ppo.iterate() == expected[3]


def test_a_checkpoint_keeps_arguments_that_were_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_lab("replaced", tmp_path, backend="inline") as lab:
        ppo = wb.PPO(lab, **OPTIONS)
        ppo.iterate()
        ppo.replace("compute_advantages", whiten_advantages=False)
        ppo.replace("compute_advantages", whiten_advantages=True)
        ppo.replace("compute_reward", lambda batch: batch)
        ppo.replace("compute_reward")
        ppo.once("update_actor", clip_high=0.9)
        kept: dict[str, Any] = {"update_actor": {"clip_high": 0.4}, "compute_advantages": {"whiten_advantages": True}}
        ppo.change_argument("update_actor", "clip_high", 0.4, once=False)
        assert ppo._kept_arguments() == kept
        lab.save(tmp_path / "one", models=False)
    with wb.restore(tmp_path / "one", name="replaced-again", runs=tmp_path) as lab:
        ppo = wb.PPO(lab, **OPTIONS)
        assert "update_actor.clip_high=0.4" in capsys.readouterr().out
        arguments = {a.name: a for a in ppo.arguments("update_actor")}
        assert (arguments["clip_high"].value, arguments["clip_high"].source) == (0.4, "changed for this stage")
        assert ppo._kept_arguments() == kept, "the next checkpoint has them, too"
        ppo.replace("update_actor", clip_high=None)
        assert ppo._kept_arguments()["update_actor"] == {"clip_high": None}
        assert ppo.iterate()["update_actor/learning_rate"] > 0
        taken = wb.PPO(lab, **OPTIONS)
        taken.replace("update_actor", lambda batch: batch)
        taken._take_arguments(kept | {"gone": {"x": 1}})
        assert "clip_high" not in taken.graph()["update_actor"].given_arguments


def test_settings_assigned_over_none_are_kept_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {**OPTIONS, "kl_coefficient": 0.0}
    with tiny_lab("whole", tmp_path, backend="inline") as lab:
        grpo = wb.GRPO(lab, **options)
        grpo.correction = wb.Correction(level="sequence")
        grpo.correction.high = 3.0  # type: ignore[misc]
        grpo.loss = wb.KLCov()
        grpo.loss.share = 0.5  # type: ignore[misc]
        with expect_error(BadInput, value="share=7"):
            grpo.loss.share = 7  # type: ignore[misc]
        grpo.loss.share = 0.25  # type: ignore[misc]
        changes = lab.history.changes()
        assert changes["setting"].tolist() == [
            "GRPO.correction", "GRPO.correction.high", "GRPO.loss", "GRPO.loss.share", "GRPO.loss.share",
        ]  # fmt: skip
        grpo.iterate()
        lab.save(tmp_path / "one", models=False)
        expected = grpo.iterate()
    with wb.restore(tmp_path / "one", name="whole-one", runs=tmp_path) as lab:
        grpo = wb.GRPO(lab, **options)
        assert (grpo.correction, grpo.loss) == (wb.Correction(level="sequence", high=3.0), wb.KLCov(share=0.25))
        assert grpo.iterate() == expected
        assert "high" in capsys.readouterr().out
        grpo.correction.high = 4.0  # type: ignore[misc, union-attr]
        assert grpo._kept_fields()["correction"]["high"] == 4.0
        grpo.correction = None
        assert grpo._kept_fields()["correction"] is None


def test_a_recovery_keeps_what_was_assigned_since(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_lab("recovered", tmp_path, backend="inline") as lab:
        ppo = wb.PPO(lab, **OPTIONS)
        ppo.clip = 0.15
        ppo.iterate()
        lab.save(tmp_path / "one", models=False)
        ppo.iterate()
        lab.actor.training.learning_rate = 3e-5
        ppo.clip = 0.1
        lab.recover()
        said = capsys.readouterr().out
        assert "with clip=0.1 (assigned)" in said
        assert "continues with lab.actor.training.learning_rate = 3e-05, as it was assigned" in said
        assert ppo.clip == 0.1
        assert ppo.iterate()["update_actor/learning_rate"] == 3e-5
        assert ppo.iteration == 2


def test_opening_the_same_again_gives_the_living_one(tmp_path: Path) -> None:
    with tiny_lab("same", tmp_path, backend="inline") as lab:
        lab.actor.training.learning_rate = 3e-5
        assert tiny_lab("same", tmp_path, backend="inline", if_exists="attach") is lab


def test_an_interrupted_update_is_known_by_other_rates_and_not_by_other_minibatches(lab: Any) -> None:
    code = lab.actor.update_actor.code({})
    lab.actor.training.learning_rate = 4e-5
    lab.actor.training.weight_decay = 0.01
    assert lab.actor.update_actor.code({}) == code
    lab.actor.training.minibatches = 1
    assert lab.actor.update_actor.code({}) != code
    assert update_on(lab, stored())["actor/learning_rate"] == 4e-5
    lab.actor.training.minibatches = 2


def test_a_change_between_two_steps_of_an_update_takes_no_step_twice(tmp_path: Path) -> None:
    """What the begun update reads is refused, with the way to go on; what it does not read is taken."""
    with tiny_lab("halves", tmp_path, backend="inline") as lab:
        grpo = wb.GRPO(lab, **OPTIONS)
        engine = hosts_of(lab)["shared-0"].workers["actor"].engine
        step, taken = engine.step, []

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            taken.append(step(*args, **kwargs))
            if len(taken) % 2:
                signal.raise_signal(signal.SIGINT)
            return taken[-1]

        engine.step = interrupted
        with expect_error(wb.errors.StageInterrupted, value="step 1 of 2"):
            grpo.run(1)
        refused = {
            "GRPO.clip = 0.1": lambda: setattr(grpo, "clip", 0.1),
            "GRPO.epochs = 2": lambda: setattr(grpo, "epochs", 2),
            "GRPO.sampling = ": lambda: setattr(grpo.sampling, "max_new_tokens", 5),
            r"once\('update_actor'\) with clip": lambda: grpo.once("update_actor", clip=0.1),
            "replacing 'update_actor'": lambda: grpo.replace("update_actor", clip=0.1),
            "replacing 'compute_reward'": lambda: grpo.replace("compute_reward", function=lambda prompt, **row: 1.0),
        }
        for what, change in refused.items():
            with pytest.raises(BadInput, match=rf"{what}.*'update_actor' between two of its steps.*restart\(\)"):
                change()
        assert (grpo.clip, grpo.epochs, grpo.sampling.max_new_tokens) == (None, 1, 6)
        grpo.prompts, grpo.sampling.temperature = 2, 0.5  # type: ignore[misc]
        lab.actor.training.learning_rate = 1e-4
        assert len(grpo.run(1)) == 1
        assert engine.steps == len(taken) == 2 and [one.learning_rate for one in taken] == [1e-3, 1e-4]
        grpo.clip = 0.1  # the update is over
        with expect_error(wb.errors.StageInterrupted, value="step 1 of 2"):
            grpo.run(1)
        with expect_error(BadInput, value="between two of its steps", remedy=r"restart\(\)"):
            lab.save(tmp_path / "half")
        grpo.restart()
        lab.save(tmp_path / "given up", models=False)
        grpo.clip = 0.2  # it was given up
        grpo.prompts = 4
        engine.step = step
        grpo.run(1)
        assert engine.steps == 5


def test_the_lines_of_the_docs_run(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks
    with tiny_lab("docs", tmp_path, backend="inline") as lab:
        for block in blocks:
            exec(block, {"lab": lab, "wb": wb, "ppo": wb.PPO(lab, **OPTIONS)})
        assert len(lab.history.changes()) >= 3


def answers(prompt: str, response: str, answer: str, **row: Any) -> float:
    return float(len(answer))


def letters(prompt: str, response: str, **row: Any) -> float:
    return float(len(response))


def total_of_components(lab: wb.Workbench, ppo: wb.PPO) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = ppo.made["compute_reward"]
    found = batch.fetch(["rewards", "rewards/answers", "rewards/letters"])
    return found["rewards"], {name: found[f"rewards/{name}"] for name in ("answers", "letters")}


@pytest.mark.thorough
def test_weights_of_reward_components(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward: dict[str, Any] = {"answers": answers, "letters": (letters, 0.25)}
    with tiny_lab("weights", tmp_path, backend="inline") as lab:
        ppo = wb.PPO(lab, reward=reward, **OPTIONS)
        for change, answers_weight, letters_weight in (
            ("ppo.reward_weights = {'letters': 0.5}", 1.0, 0.5),
            ("ppo.reward_weights['answers'] = 2", 2.0, 0.5),
            ("ppo.reward['letters'] = (letters, 0.125); ppo.reward_weights.pop('letters')", 2.0, 0.125),
            ("ppo.reward_weights = {'letters': -1}", 1.0, -1.0),
        ):
            exec(change, {"ppo": ppo, "letters": letters})
            metrics = ppo.iterate()
            total, parts = total_of_components(lab, ppo)
            expected = answers_weight * parts["answers"] + letters_weight * parts["letters"]
            assert torch.allclose(total, expected), change
            assert metrics["compute_reward/rewards/mean"] == pytest.approx(float(expected.mean()))
        assert reward["letters"] == (letters, 0.25), "what was given stays as it was"
        changes = lab.history.changes()
        weights = changes[changes["setting"] == "PPO.reward_weights"]
        assert weights["after"].tolist() == [
            {"letters": 0.5}, {"letters": 0.5, "answers": 2.0}, {"answers": 2.0}, {"letters": -1.0},
        ]  # fmt: skip
        assert weights["iteration"].tolist() == [0, 1, 2, 3]
        assert changes["setting"].tolist().count("PPO.reward") == 1
        lab.save(tmp_path / "saved", models=False)
        after = ppo.iterate()
    with wb.restore(tmp_path / "saved", name="weights-again", runs=tmp_path) as lab:
        ppo = wb.PPO(lab, reward={**reward, "letters": (letters, 0.125)}, **OPTIONS)
        assert "with reward_weights={'letters': -1.0} (assigned)" in capsys.readouterr().out
        assert ppo.reward_weights == {"letters": -1.0}
        assert ppo.iterate() == after


WRONG_WEIGHTS: list[tuple[str, str]] = [
    ("ppo.reward_weights = {'leters': 1}", r"components of the reward are answers, letters.*write 'letters'"),
    ("ppo.reward_weights['words'] = 1", r"'words': 1.*components of the reward are answers, letters"),
    ("ppo.reward_weights = {'letters': '1'}", r"PPO.reward_weights\['letters'\]='1'.*must be a number"),
    ("ppo.reward_weights = {'letters': float('nan')}", r"must be a number, not nan"),
    ("ppo.reward_weights = 2", r"PPO.reward_weights=2.*must be a dict"),
    ("ppo.reward = letters", r"the reward has no components.*weights=None"),
    ("ppo.reward.clear()", r"components by name"),
    ("ppo.reward['letters'] = 3", r"must be a function"),
    ("ppo.once('compute_reward', weights={'words': 1})", r"components of the reward are answers, letters"),
]  # fmt: skip


def test_wrong_weights_change_nothing(lab: Any, subtests: pytest.Subtests) -> None:
    for line, match in WRONG_WEIGHTS:
        with subtests.test(line=line, match=match):
            parts: dict[str, Any] = {"answers": answers, "letters": letters}
            ppo: Any = wb.PPO(lab, reward=parts, reward_weights={"letters": 0.5}, **OPTIONS)
            changes = len(lab.history.changes())
            with pytest.raises(BadInput, match=rf"(?s){match}"):
                exec(line, {"ppo": ppo, "letters": letters})
            assert (ppo.reward_weights, ppo.reward) == ({"letters": 0.5}, parts)
            assert len(lab.history.changes()) == changes


def test_each_change_of_a_mapping_is_an_assignment_of_the_whole(lab: Any) -> None:
    parts = {"answers": answers, "letters": letters}
    ppo = wb.PPO(lab, reward=parts, reward_weights={"letters": 0.5}, **OPTIONS)
    weights: Any = ppo.reward_weights
    events = len(lab.history.changes())
    weights.update(answers=3)
    weights |= {"letters": 0.25}
    assert weights.setdefault("letters", 9) == 0.25
    assert weights.pop("answers") == 3
    assert weights.popitem() == ("letters", 0.25)
    assert weights.setdefault("answers", 2) == 2
    del weights["answers"]
    weights["letters"] = 1
    weights.clear()
    weights.clear()  # no change
    with pytest.raises(KeyError):
        weights.pop("answers")
    assert (weights, ppo.reward_weights) == ({}, {})
    assert len(lab.history.changes()) == events + 8
    for copied in (pickle.loads(pickle.dumps(weights)), copy.deepcopy(weights), copy.copy(weights), weights.copy()):
        assert type(copied) is dict
    del ppo
    with expect_error(BadInput, rule="no longer exists"):
        weights["letters"] = 1
