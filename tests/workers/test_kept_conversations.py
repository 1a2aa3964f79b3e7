"""Conversations of a stage that was interrupted: what had ended is not made again, and the others go on."""

from __future__ import annotations

import re
import signal
import string
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.calculator import Calculator, sums
from tests.cases import TINY, hosts_of, tiny_lab
from workbench.engines.generation.transformers_engine import TransformersDecoding
from workbench.errors import StageInterrupted
from workbench.workers.conversation import Compaction
from workbench.workers.worker import Context

NAMES = ("prompt_ids", "response_ids", "response_mask", "environment_rewards", "turns", "ending")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    path = tmp_path_factory.mktemp("runs")
    with tiny_lab("kept", path, backend="inline", models={"actor": TINY}) as lab:
        yield lab


def columns(batch: wb.Batch) -> list[Any]:
    """What was said; log-probabilities differ by rounding where others are decoded beside a row."""
    table: dict[str, Any] = batch.fetch(list(NAMES))
    return [[row.tolist() for row in one.rows()] if hasattr(one, "rows") else list(one) for one in table.values()]


@pytest.fixture
def begun(tmp_path: Path) -> Any:
    """An environment that leaves a mark where it begins, and how often that was."""

    class Marked(Calculator):
        mark = tmp_path

        def reset(self, prompt: str, sample_seed: int, **row: Any) -> str:
            number = len(list(self.mark.glob(f"{sample_seed} *")))
            (self.mark / f"{sample_seed} {number}").touch()
            return super().reset(prompt, sample_seed, **row)

    return Marked, lambda: len(list(tmp_path.iterdir()))


def interrupted(lab: wb.Workbench, batch: wb.Batch, after: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Press stop when so many conversations have ended; how many had."""
    progress, had = Context.advance, 0

    def pressed(self: Context, done: int, total: int, tokens: int) -> None:
        nonlocal had
        if done >= after and not had:
            had = done
            signal.raise_signal(signal.SIGINT)
        progress(self, done, total, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Context, "advance", pressed)
        with pytest.raises(StageInterrupted):
            lab.actor.generate_sequences(batch, **options)
    return had


def test_the_same_call_again_makes_only_the_others(
    lab: wb.Workbench, begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, count = begun
    batch = lab.prompts.next(4)
    options: dict[str, Any] = {"samples": 2, "seed": 5, **sums(environment=environment, most_open=2)}
    expected = columns(lab.actor.generate_sequences(batch, **options))
    before = count()
    assert before == 8
    had = interrupted(lab, batch, 3, monkeypatch, **options)
    middle = count()
    assert 3 <= had < 8 and had <= middle - before < 8
    assert columns(lab.actor.generate_sequences(batch, **options)) == expected
    assert count() - middle == 8 - had  # those that had ended did not begin again
    assert columns(lab.actor.generate_sequences(batch, **options)) == expected
    assert count() - middle == 16 - had  # and nothing is kept of a stage that came to its end


def test_another_call_begins_anew(lab: wb.Workbench, begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other settings, rows, code of the environment or weights: what was kept would be another call's."""
    environment, count = begun
    batch = lab.prompts.next(2)
    options: dict[str, Any] = {"seed": 5, **sums(environment=environment, most_open=1)}

    class Edited(environment):  # type: ignore[misc, valid-type]
        def step(self, response: str) -> Any:
            return "!", 1.0, True

    table = dict(batch.fetch())
    other = lab.put({**table, "answer": ["7", "8"]})
    for given, changes in (
        (batch, {"temperature": 0.9}), (other, {}), (batch, {"environment": Edited}),
    ):  # fmt: skip
        assert interrupted(lab, batch, 1, monkeypatch, **options) == 1
        before = count()
        lab.actor.generate_sequences(given, **{**options, **changes})
        assert count() - before == 2
    assert interrupted(lab, batch, 1, monkeypatch, **options) == 1
    scored = lab.actor.generate_sequences(lab.prompts.next(2), seed=1, max_new_tokens=4)
    lab.actor.update_actor(scored, loss=lambda log_prob: -log_prob)
    before = count()
    lab.actor.generate_sequences(batch, **options)
    assert count() - before == 2


def test_conversations_go_on_behind_their_newest_answer_also_from_a_checkpoint(
    lab: wb.Workbench, begun: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment, count = begun
    batch = lab.prompts.next(4)
    options: dict[str, Any] = {"samples": 2, "seed": 8, **sums(environment=environment, max_turns=6)}
    expected = columns(lab.actor.generate_sequences(batch, **options))
    for after in range(1, 8):  # whose turn it is then depends on how quick the environments are
        interrupted(lab, batch, after, monkeypatch, **options)
        ended, open_ = halves(lab)
        if ended and open_:
            break
    assert ended and open_
    for one in open_:  # each stands behind an answer, and its tokens are those of the whole conversation
        (whole,) = [ids for ids in expected[1] if ids[: len(one["response_ids"])] == one["response_ids"]]
        assert len(whole) > len(one["response_ids"]) > one["turn_ends"][-1]
    folder = tmp_path_factory.mktemp("saved")
    lab.save(folder / "middle")
    table = batch.fetch()
    with wb.restore(folder / "middle", name="later", runs=folder) as later:
        assert halves(later) == (ended, open_)
        before = count()
        sampled = turns_sampled(later, monkeypatch)
        assert columns(later.actor.generate_sequences(later.put(table, meta=dict(batch.meta)), **options)) == expected
        assert count() - before == 8 - len(ended)
        kept = sum(len(one["turn_ends"]) for one in (*ended, *open_))
        assert len(sampled) == sum(expected[4]) - kept  # no turn that was answered is sampled again
    assert columns(lab.actor.generate_sequences(batch, **options)) == expected  # and it goes on here, too


def test_an_environment_that_says_other_words_begins_its_conversation_anew(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Wordy(Calculator):
        """Answers with a letter of its own each time that it is made, with the same rewards."""

        mark = tmp_path / "made"

        def reset(self, prompt: str, sample_seed: int, **row: Any) -> str:
            with self.mark.open("a") as file:
                file.write("x")
            self.letter = string.ascii_letters[self.mark.stat().st_size % 52]
            return super().reset(prompt, sample_seed)

        def step(self, response: str) -> tuple[str, float, bool]:
            return self.letter, 0.5, False

    batch = lab.prompts.next(4)
    options: dict[str, Any] = {"samples": 2, "seed": 8, **sums(environment=Wordy, max_turns=6)}
    for after in range(1, 8):
        interrupted(lab, batch, after, monkeypatch, **options)
        if open_ := halves(lab)[1]:
            break
    assert open_ and all(len(one["observed"]) == 1 + len(one["turn_ends"]) for one in open_)
    made: dict[str, Any] = lab.actor.generate_sequences(batch, **options).fetch(["response_ids", "response_mask"])
    decode = lab.runner.batches.tokenizer.decode
    for ids, mask in zip(made["response_ids"].rows(), made["response_mask"].rows(), strict=True):
        answers = str(decode(ids[~mask.bool()].tolist()))
        assert len(set(re.sub(r"[^a-zA-Z]", "", answers))) <= 1, answers  # of one environment


def test_what_was_kept_is_let_go_when_the_weights_have_changed(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batch, (host,) = lab.prompts.next(2), hosts_of(lab).values()
    worker: Any = host.workers["actor"]
    scored = lab.actor.generate_sequences(lab.prompts.next(2), seed=1, max_new_tokens=4)
    options: dict[str, Any] = {"seed": 5, **sums(most_open=1)}
    numbers = count()
    for look in (lambda: lab.save(tmp_path / "later"), lambda: lab.actor.generate_sequences(batch, max_new_tokens=4)):
        interrupted(lab, batch, 1, monkeypatch, **options)
        lab.actor.generate_sequences(batch, max_new_tokens=4)  # of the same weights
        lab.save(tmp_path / f"same {next(numbers)}")
        assert worker.kept.state
        lab.actor.update_actor(scored, loss=lambda log_prob: -log_prob)
        look()
        assert not worker.kept.state


def test_a_conversation_that_waits_for_its_summary_goes_on_there(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Talks(Calculator):
        def step(self, response: str) -> tuple[str, float, bool]:
            return f" {len(response)} go on ", 0.5, False

    batch = lab.prompts.next(1)
    context = wb.Context(max_tokens=100, turn_tokens=16, keep_turns=1, summary="Sum up.")
    options: dict[str, Any] = sums(environment=Talks, max_turns=12, max_new_tokens=300, context=context, seed=4)
    asked, pressed = list[list[int]](), list[bool]()
    progress, question = Context.advance, Compaction.question

    def asks(self: Compaction, *given: Any) -> list[int]:
        asked.append(question(self, *given))
        return asked[-1]

    def press(self: Context, done: int, total: int, tokens: int) -> None:
        if any(asked) and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        progress(self, done, total, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Compaction, "question", asks)
        patch.setattr(Context, "advance", press)
        with pytest.raises(StageInterrupted):
            lab.actor.generate_sequences(batch, **options)
    ((), (half,)) = halves(lab)
    assert half["held_ids"] and half["response_ids"][-len(asked[0]) :] == asked[0]  # the answered turn is kept
    made = lab.actor.generate_sequences(batch, **options)
    assert columns(made)[1][0][: len(half["response_ids"])] == half["response_ids"]
    whole = columns(made)
    assert columns(lab.actor.generate_sequences(batch, **options)) == whole  # as without an interrupt


def halves(lab: wb.Workbench) -> tuple[list[Any], list[Any]]:
    """What is kept: conversations that had ended, and the others."""
    worker: Any = next(iter(hosts_of(lab).values())).workers["actor"]
    kept = worker.kept.state["conversations"]
    return [one for one in kept if one["ending"]], [one for one in kept if not one["ending"]]


def turns_sampled(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The turns that the engine is asked for from now on."""
    asked: list[Any] = []
    add = TransformersDecoding.add

    def noted(self: Any, *call: Any) -> None:
        asked.append(call)
        add(self, *call)

    monkeypatch.setattr(TransformersDecoding, "add", noted)
    return asked
