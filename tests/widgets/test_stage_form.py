"""The form of a stage's arguments, on a real workbench: what it shows, what it takes, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb
from tests.cases import tiny_lab
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.export.recorded import read_record
from workbench_widgets.stage_form import text_of, value_of

DATA = [
    None, True, 0, -3, 0.1, 1e-06, "ppo", "token-mean", "None", "two words", "", (0.9, 0.999), [1, "a"], {"embed": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("value", DATA, ids=repr)
def test_what_is_shown_is_read_as_the_same(value: Any) -> None:
    text = text_of(value)
    assert text is not None
    found = value_of(text, "x")
    assert found == value
    assert type(found) is type(value)


NOT_EVALUATED: list[str] = [
    "__import__('os').getpid()",
    "lambda: 1",
    "0.1 + x",
    "(" * 300,
    "f'{1}'",
    "a b",
    "",
    "[x for x in (1,)]",
]


def test_nothing_is_evaluated(subtests: pytest.Subtests) -> None:
    for text in NOT_EVALUATED:
        with subtests.test(text), expect_error(BadInput, value="clip=", rule="must be data"):
            value_of(text, "clip")


def test_what_is_no_data_has_no_field() -> None:
    assert text_of(print) is None
    assert text_of(wb.Correction()) is None
    assert text_of(float("nan")) is None


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("form", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def test_a_stage_is_edited_while_it_is_to_run(lab: Any) -> None:
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
    panel = lab.panel("stepper", algorithm=ppo)
    stepper: Any = panel.views["stepper"]
    stepper.act("choose", {"stage": "prompts"})
    field = 'aria-label="n of prompts" value="{}"'
    assert field.format(4) in stepper.picture()
    stepper.act("choose", {"stage": "update_actor"})
    assert re.search(r'aria-label="clip of update_actor" value="None"[^>]*> in effect: 0.2', stepper.picture())
    stepper.act("choose", {"stage": "prompts"})
    seen = stepper.depends_on()
    ppo.prompts = 6  # by a cell
    assert stepper.depends_on() != seen
    assert field.format(6) in stepper.picture()
    given = {"stage": "prompts", "argument": "n", "once": True, "value": "2"}
    stepper.act("change", given)
    assert panel.driver.outcome == "n of prompts is 2 in its next run"
    with expect_error(BadInput, value="n='x'"):
        stepper.act("change", given | {"value": "x"})
    assert field.format(2) in stepper.picture()
    assert ppo.step().rows == 2
    assert "It has run in this iteration" in stepper.picture()
    assert 'aria-label="n of prompts"' not in stepper.picture()
    ppo.iterate()
    assert field.format(6) in stepper.picture()
    assert "aria-label=" not in stepper.still()[stepper.still().index("</svg>") :]  # nothing to press in what is saved


def test_rates_of_the_role(lab: Any) -> None:
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
    stepper: Any = lab.panel("stepper", algorithm=ppo).views["stepper"]
    given = {"stage": "update_critic", "argument": "training.learning_rate", "once": False}
    stepper.act("change", given | {"value": "5e-6"})
    assert lab.critic.training.learning_rate == 5e-6
    with expect_error(BadInput, value="learning_rate=-1"):
        stepper.act("change", given | {"value": "-1"})
    assert lab.critic.training.learning_rate == 5e-6
    stepper.act("choose", {"stage": "update_critic"})
    shown = stepper.picture()
    assert 'aria-label="training.learning_rate of update_critic" value="5e-06"' in shown
    (row,) = re.findall(r'<th scope="row"[^>]*>training.learning_rate</th>(.*?)</tr>', shown)
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row) == ["1e-05", "lab.critic.training"], (
        "the critic's default, its source"
    )


def test_weights_of_the_reward(lab: Any) -> None:
    @wb.limits(own_process=False)  # nothing is sent each time that the form asks for the arguments
    def right(prompt: str, response: str, **row: Any) -> float:
        return 1.0

    reward: dict[str, Any] = {"right": right, "short": (right, 0.25)}
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4), reward=reward)
    stepper: Any = lab.panel("stepper", algorithm=ppo).views["stepper"]
    stepper.act("choose", {"stage": "compute_reward"})
    row = r'aria-label="weights of compute_reward" value="{}"[^>]*> in effect: {}<'
    assert re.search(row.format("None", "right 1, short 0.25"), stepper.picture())
    given = {"stage": "compute_reward", "argument": "weights", "once": False}
    stepper.act("change", given | {"value": "{'short': 0.5}"})
    assert ppo.reward_weights == {"short": 0.5}
    assert re.search(row.format("{&#x27;short&#x27;: 0.5}", "right 1, short 0.5"), stepper.picture())
    stepper.act("change", given | {"value": "{'short': 2}", "once": True})
    with expect_error(BadInput, rule="the components of the reward are right, short"):
        stepper.act("change", given | {"value": "{'shirt': 1}"})
    assert [ppo.iterate()["compute_reward/rewards/mean"] for _ in range(2)] == [3.0, 1.5]
    stepper.act("choose", {"stage": "compute_reward"})
    told = read_record([lab.run_folder]).settings
    assert any(line.startswith("PPO.reward_weights was set to {'short': 0.5} by the panel") for line in told)


def test_while_a_stage_runs_it_has_not_run_yet(lab: Any) -> None:
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
    stepper: Any = lab.panel("stepper", algorithm=ppo).views["stepper"]
    stepper.act("choose", {"stage": "compute_reward"})
    seen: list[str] = []

    @wb.limits(own_process=False)
    def looking(prompt: str, response: str, **row: Any) -> float:
        if not seen:
            seen.append(stepper.picture())
        return 0.0

    ppo.reward = looking
    ppo.iterate()
    assert "It is running" in seen[0] and "It has run" not in seen[0]


def test_the_export_tells_what_no_cell_did(lab: Any) -> None:
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
    ppo.gamma = 0.9  # a cell's line, as far as the record goes
    stepper: Any = lab.panel("stepper", algorithm=ppo).views["stepper"]
    stepper.act("change", {"stage": "compute_advantages", "argument": "lam", "once": False, "value": "0.5"})
    told = read_record([lab.run_folder]).settings
    assert told[-1].startswith("PPO.lam was set to 0.5 by the panel, after iteration ")
    assert told[-1].endswith("write it into a cell")
    assert not any("gamma" in line for line in told)
