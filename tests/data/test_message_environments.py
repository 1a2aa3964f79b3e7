"""Environments that speak in messages: a prompt of their own, and turns that were taken apart."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import workbench as wb
from tests.calculator import EQUALS, segments
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.errors import BadInput, RolloutError
from workbench.models.tokenizers import load_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    path = tmp_path_factory.mktemp("runs")
    with tiny_lab("messages", path, backend="inline", models={"actor": TINY, "critic": TINY}) as lab:
        yield lab


def column(batch: wb.Batch, name: str) -> Any:
    return batch.fetch([name])[name]


class Teacher:
    """Asks a question of its own, and counts the turns."""

    def reset(self, prompt: str) -> list[dict[str, str]]:
        self.turns = 0
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Say {prompt[:5]}"}]

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        assert message.keys() == {"role", "content"} and message["role"] == "assistant"
        self.turns += 1
        return [{"role": "user", "content": f"Again {self.turns}"}], len(message["content"]) / 100, self.turns == 3


TALK: dict[str, Any] = {"max_new_tokens": 120, "logit_bias": {EOS: 6.0}}


def test_messages_of_reset_are_the_prompt_that_engine_and_trainer_see(lab: wb.Workbench) -> None:
    prompts = lab.prompts.next(3)
    before, texts = column(prompts, "prompt_ids").rows(), column(prompts, "prompt")
    batch = lab.actor.generate_sequences(prompts, samples=2, seed=1, environment=Teacher, **TALK)
    for row, ids in enumerate(column(batch, "prompt_ids").rows()):
        said = f"Say {texts[row // 2][:5]}"
        assert lab.decode(ids.tolist()) == f"<|bos|><|system|>Be brief.<|eos|><|user|>{said}<|eos|><|assistant|>"
    assert [ids.tolist() for ids in column(prompts, "prompt_ids").rows()] == [ids.tolist() for ids in before]
    heard = [lab.decode(ids) for parts in segments(batch) for mine, ids in parts if not mine]
    assert any("<|user|>Again 2<|eos|><|assistant|>" in text for text in heard)
    assert segments(batch)[0][0][0]  # nothing comes between prompt and first turn
    rewards = [round(100 * sum(row.tolist())) for row in column(batch, "environment_rewards").rows()]
    lengths = [len("".join(lab.decode(ids) for mine, ids in parts if mine)) for parts in segments(batch)]
    assert any(rewards) and all(reward <= length for reward, length in zip(rewards, lengths, strict=True))
    lab.critic.compute_values(lab.actor.compute_log_prob(batch.drop("rollout_log_prob")))
    engine = torch.cat(
        column(lab.actor.generate_sequences(prompts, seed=1, environment=Teacher), "rollout_log_prob").rows()
    )
    assert engine.any()


def test_log_probs_agree_behind_a_prompt_of_messages(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(
        lab.prompts.next(3), environment=Teacher, max_new_tokens=60, stop_token_ids=range(8, 264, 5)
    )
    assert column(batch, "turns").max() > 1
    lab.actor.compute_log_prob(batch)
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4


def test_no_token_of_a_turn_is_tokenized_again(lab: wb.Workbench) -> None:
    """Bytes are sampled that are no UTF-8: a tokenizer that is given their text writes other tokens."""

    def number(ids: list[int]) -> float:
        return float(sum(place * token for place, token in enumerate(ids, 1)))

    class Listener:
        def step(self, message: dict[str, Any], response_ids: list[int]) -> tuple[list[dict[str, str]], float, bool]:
            return [{"role": "user", "content": message["content"]}], number(response_ids), False

    alone = {token: 12.0 for token in range(8, 264) if "\ufffd" in lab.decode([token])}  # half of a character
    sampling: dict[str, Any] = {"seed": 3, "max_new_tokens": 100, "stop": ("=",), "logit_bias": {**alone, EQUALS: 15.0}}
    prompts = lab.prompts.next(4)
    batch = lab.actor.generate_sequences(prompts, environment=Listener, max_turns=3, **sampling)
    tokenizer, changed, turns = load_tokenizer(TINY), 0, 0
    for said, rewards in zip(segments(batch), segments(batch, "environment_rewards"), strict=True):
        for (mine, ids), (_, given) in zip(said, rewards, strict=True):
            if mine and given[-1]:
                assert given[-1] == number(ids)  # what the environment was told is what the batch has
                changed += tokenizer.encode(lab.decode(ids), add_special_tokens=False) != ids
                turns += 1
    assert changed > turns / 2 > 2
    single = lab.actor.generate_sequences(prompts, **sampling)  # no environment, no text
    assert [ids.tolist() for ids in column(single, "response_ids").rows()] == [parts[0][1] for parts in segments(batch)]


def test_tool_calls_come_apart_in_the_format_that_the_class_names(lab: wb.Workbench) -> None:
    class Mistral:
        tool_format: ClassVar[Any] = {
            "defaults": {"role": "assistant"},
            "start_anchor": "<|assistant|>",
            "fields": {
                "tool_calls": {
                    "open_pattern": r"(?P<name>\w)", "close": "=", "repeats": True,
                    "transform": {"type": "function", "function": {"name": "{name}", "arguments": {}}},
                },
                "content": {},
            },
        }  # fmt: skip

        def step(self, response: str, message: dict[str, Any]) -> tuple[None, float, bool]:
            names = [call["function"]["name"] for call in message.get("tool_calls", ())]
            return None, float(names == [response[0]]) - 2.0 * (not names), True

    bias = {**dict.fromkeys(range(23, 33), 14.0), 36: 14.0}
    sampling: dict[str, Any] = {"stop": ("=",), "logit_bias": bias, "max_new_tokens": 60}
    batch = lab.actor.generate_sequences(lab.prompts.next(4), environment=Mistral, **sampling)
    assert sum(sum(row.tolist()) for row in column(batch, "environment_rewards").rows()) > 0
    with expect_error(BadInput, value="tool_format='x'", rule="must be one of"):
        lab.actor.generate_sequences(lab.prompts.next(1), environment=type("X", (Teacher,), {"tool_format": "x"}))


def test_wrong_messages_fail_their_row(lab: wb.Workbench) -> None:
    class Wrong:
        def __init__(self) -> None:
            self.first: Any = [{"content": "no role"}]

        def reset(self) -> Any:
            return self.first

        def step(self, message: dict[str, Any]) -> Any:
            return None, 0.0, True

    def long() -> Wrong:
        wrong = Wrong()
        wrong.first = [{"role": "user", "content": "x" * 5000}]
        return wrong

    def robot() -> Wrong:
        wrong = Wrong()
        wrong.first = [{"role": "robot", "content": "x"}]
        return wrong

    prompts = lab.prompts.next(1)
    with expect_error(RolloutError, value=r"reset of .* returned role 'robot'", rule="does not know it"):
        lab.actor.generate_sequences(prompts, environment=robot)
    with expect_error(
        RolloutError, value=r"reset of environment Wrong returned \[", rule="it must return a text, messages or None"
    ):
        lab.actor.generate_sequences(prompts, environment=Wrong)
    with expect_error(RolloutError, value=r"returned messages of \d+ tokens", rule="Generation.max_model_tokens"):
        lab.actor.generate_sequences(prompts, environment=long)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "us\ud800er", "content": "a"},
        {"role": "user", "content": "a", "name": "\ud800"},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"\ud800": 1}}}]},
    ],
)
def test_half_a_character_anywhere_in_a_message_fails_its_row_alone(lab: wb.Workbench, message: Any) -> None:
    class Half:
        def __init__(self, at: str) -> None:
            self.at = at

        def reset(self, sample_seed: int) -> Any:
            self.bad = bool(sample_seed % 2)
            return [message] if self.bad and self.at == "reset" else [{"role": "user", "content": "hello"}]

        def step(self, response: str) -> Any:
            return [message if self.bad else {"role": "user", "content": "go on"}], 0.0, False

    for at in ("reset", "step"):
        batch = lab.actor.generate_sequences(
            lab.prompts.next(2), samples=4, seed=1, environment=functools.partial(Half, at), most_failed=1.0,
            max_turns=2, **TALK,
        )  # fmt: skip
        valid, failures = column(batch, "valid").tolist(), column(batch, "failure")
        assert 0 < sum(valid) < 8
        told = [failure.startswith(f"generate_sequences Half: {at} returned") for failure in failures]
        assert told == [not fine for fine in valid], failures


def test_what_the_tokenizer_raises_for_messages_fails_the_row(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fine(Teacher):
        def reset(self, prompt: str) -> Any:
            self.turns = 0
            return [{"role": "user", "content": "a", "extra": object()}]  # which the template does not read

    batch = lab.actor.generate_sequences(lab.prompts.next(1), environment=Fine, **TALK)
    assert column(batch, "prompt_ids").rows()

    def raises(*given: Any, **more: Any) -> str:
        raise TypeError("no \x1b[31mtokens")

    for name, method in (("with_tools", "reset"), ("render_reply", "step")):
        with monkeypatch.context() as patch:
            patch.setattr(f"workbench.data.environment.{name}", raises)
            with pytest.raises(RolloutError, match=f"{method} .* cannot be rendered: TypeError: no tokens"):
                lab.actor.generate_sequences(lab.prompts.next(1), environment=Teacher, **TALK)


def test_a_conversation_that_begins_again_has_its_prompt_from_the_new_environment(lab: wb.Workbench) -> None:
    class Flaky(Teacher):
        made = 0

        def reset(self, prompt: str) -> Any:
            Flaky.made += 1
            self.number = Flaky.made
            return super().reset(prompt) if self.number == 1 else None

        async def step(self, message: dict[str, Any]) -> Any:
            if self.number == 1:
                raise ZeroDivisionError
            return None, 1.0, True

    prompts = lab.prompts.next(1)
    batch = lab.actor.generate_sequences(prompts, environment=Flaky, retries=1, **TALK)
    assert torch.equal(column(batch, "prompt_ids").values, column(prompts, "prompt_ids").values)
    assert column(batch, "ending") == ["done"]
