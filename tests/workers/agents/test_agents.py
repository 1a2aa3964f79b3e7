"""Agents: harnesses that talk HTTP to the policy; what is recorded of them, and how they fail."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.calculator import SUMS, value
from tests.cases import TINY, hosts_of, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, RolloutError

pytest.importorskip("aiohttp")
pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "reward": takes_the_agents}
    with tiny_lab("agents", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def takes_the_agents(environment_rewards: list[float], **row: Any) -> list[float]:
    return environment_rewards


def lists(batch: wb.Batch, *names: str) -> list[Any]:
    table = batch.fetch(names)
    return [
        [row.tolist() for row in column.rows()] if isinstance(column, Ragged) else list(column)
        for column in (table[name] for name in names)
    ]


def failure_of(batch: wb.Batch) -> list[str]:
    return list(map(str, lists(batch, "failure")[0]))


def sampled(**changes: Any) -> dict[str, Any]:
    return {"max_turns": 3, "max_new_tokens": 60, "stop": ("=",), "logit_bias": SUMS, **changes}


class Sums:
    """Answers a sum with a message, as `sums` does over HTTP."""

    def step(self, response: str) -> tuple[Any, float, bool]:
        return [{"role": "user", "content": str(value(response) % 1000)}], 0.0, False


async def sums(row: dict[str, Any], client: Any) -> float:
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message
        reply = {"role": "user", "content": str(value(said.content) % 1000)}
        messages = [*messages, said.model_dump(), reply]
    return 1.0


def test_a_harness_samples_what_an_environment_would_and_is_recorded_as_it_was_sampled(lab: wb.Workbench) -> None:
    names = ("prompt_ids", "response_ids", "response_mask", "rollout_log_prob", "turns")
    prompts = lab.prompts.next(3)
    expected = lab.actor.generate_sequences(prompts, samples=2, seed=3, environment=Sums, **sampled())
    batch = lab.actor.generate_sequences(prompts, samples=2, seed=3, agent=sums, **sampled())
    for name, one, other in zip(names, lists(batch, *names), lists(expected, *names), strict=True):
        if name == "rollout_log_prob":
            assert list(chain(*one)) == pytest.approx(list(chain(*other)), abs=1e-4)
        else:
            assert one == other, name
    rewards, endings, finished = lists(batch, "environment_rewards", "ending", "finished")
    assert all(row[-1] == 1.0 and not any(row[:-1]) for row in rewards)
    assert endings == ["done"] * 6 and all(finished)


def test_recorded_rows_have_the_trainers_log_probs_and_are_trained_in_groups(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), samples=4, agent=rated, **sampled(logit_bias=None))
    assert lists(batch, "prompt_uid")[0] == sorted(lists(batch, "prompt_uid")[0])
    batch = lab.actor.compute_log_prob(batch)
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4
    batch = lab.compute_advantages(lab.reward.compute_reward(batch), estimator="grpo")
    scores = [sum(row) for row in lists(batch, "rewards")[0]]
    assert len(set(scores[:4])) > 1
    advantages, mask = lists(batch, "advantages", "response_mask")
    for row, written in zip(advantages, mask, strict=True):
        assert not any(x for x, mine in zip(row, written, strict=True) if not mine)
    assert lab.actor.update_actor(batch)["grad_norm"] > 0
    (named,) = lists(batch, "environment_components")
    assert [set(one) for one in named] == [{"letters", "even"}] * 8


def rated(row: dict[str, Any], client: Any) -> dict[str, float]:
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": row["prompt"]}], max_tokens=6, stop=["+"]
    )
    text = answer.choices[0].message.content
    assert "+" not in text and answer.usage.completion_tokens <= 6
    return {"letters": float(len(set(text))), "even": 0.5 * (row["sample_seed"] % 2)}


def post(base_url: str, api_key: str, path: str, body: Any) -> Any:
    headers = {"Authorization": f"Bearer {api_key}"}
    return httpx.post(f"{base_url}/{path}", headers=headers, json=body, timeout=60, verify=False)


def tells(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Continues a text; what came back is printed, for the test."""
    text = "1+2="
    for _ in range(2):
        answer = post(base_url, api_key, "completions", {"prompt": text, "max_tokens": 4}).json()["choices"][0]
        text += answer["text"] + ("=" if answer["finish_reason"] == "stop" else "") + " 7;"
    print(json.dumps(text))
    return 0.0


def test_a_text_that_is_continued_is_one_row(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(1), samples=1, agent=tells, **sampled())
    text = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    (prompt,), (response,), (mask,), (turns,) = lists(batch, "prompt_ids", "response_ids", "response_mask", "turns")
    assert lab.decode(prompt + response) + " 7;" == text
    assert lab.decode([token for token, mine in zip(response, mask, strict=True) if not mine]) == " 7;"
    assert turns == 2


async def in_three_contexts(row: dict[str, Any], client: Any) -> float:
    """A first question, two others beside it, and a follow-up to the first."""

    async def ask(*messages: dict[str, str]) -> str:
        answer = await client.chat.completions.create(model="policy", messages=list(messages), max_tokens=7)
        return str(answer.choices[0].message.content)

    first = {"role": "user", "content": row["prompt"]}
    said = await ask(first)
    await asyncio.gather(ask({"role": "user", "content": "2+2="}), ask({"role": "user", "content": "3+3="}))
    await ask(first, {"role": "assistant", "content": said}, {"role": "user", "content": "and?"})
    return float(row["sample_seed"] % 3)


def test_several_contexts_of_a_sample_are_trained_as_what_they_were_sampled_in(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), samples=3, agent=in_three_contexts, max_new_tokens=60)
    starts, mask, turns = lists(batch, "context_starts", "response_mask", "turns")
    assert [sum(row) for row in starts] == [2] * 6 and turns == [4] * 6
    assert not any(first and mine for s, m in zip(starts, mask, strict=True) for first, mine in zip(s, m, strict=True))
    batch = lab.actor.compute_log_prob(batch)
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4
    lab.actor.compute_log_prob(batch.drop("context_starts", "old_log_prob"))  # in one context it is another number
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] > 1e-2
    batch = lab.compute_advantages(lab.reward.compute_reward(batch), estimator="grpo")
    assert lab.actor.update_actor(batch)["grad_norm"] > 0


# --- failures ---------------------------------------------------------------------------------------------------------


def ask(client: Any, text: str = "1+1=", **more: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}], **more)


def raises(row: dict[str, Any], client: Any) -> float:
    ask(client)
    raise ZeroDivisionError("by nought")


def hangs(row: dict[str, Any], client: Any) -> float:
    ask(client)
    time.sleep(600)
    return 1.0


def floods(row: dict[str, Any], base_url: str, api_key: str) -> float:
    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as http:
        while True:
            http.post(f"{base_url}/completions", json={"prompt": "1+", "max_tokens": 2})


def asks_nothing(row: dict[str, Any]) -> float:
    return 1.0


def returns_text(row: dict[str, Any], client: Any) -> Any:
    ask(client)
    return "much"


FAILING: dict[str, tuple[Any, str]] = {
    "raises": (raises, "raised ZeroDivisionError: by nought"),
    "hangs": (hangs, "took more than 3 s"),
    "floods": (floods, "continued after 200 refused or abandoned requests"),
    "asks nothing": (asks_nothing, "sent no request to the server"),
    "returns text": (returns_text, "returned 'much'"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_harness_that_fails_costs_its_row(lab: wb.Workbench, name: str) -> None:
    fails, said = FAILING[name]
    batch = lab.prompts.next(3)
    doomed = lists(batch, "prompt")[0][1]

    def agent(row: dict[str, Any], client: Any, base_url: str, api_key: str) -> Any:
        given = {"row": row, "client": client, "base_url": base_url, "api_key": api_key}
        if row["prompt"] == doomed:
            return fails(**{name: given[name] for name in fails.__code__.co_varnames[: fails.__code__.co_argcount]})
        return float(len(ask(client).choices[0].message.content))

    batch = lab.actor.generate_sequences(
        batch, agent=agent, call_timeout_s=3 if name == "hangs" else 60, most_failed=0.5, **sampled()
    )
    assert lists(batch, "valid")[0] == [True, False, True]
    assert said in failure_of(batch)[1] and failure_of(batch)[::2] == ["", ""]
    assert lists(batch, "ending")[0] == ["done", "failed", "done"]
    if name != "asks nothing":  # what was sampled before is kept, to look at
        assert lists(batch, "response_ids")[0][1]


def test_too_many_failures_fail_the_stage(lab: wb.Workbench) -> None:
    with expect_error(RolloutError, value=r"agent raises raised ZeroDivisionError: by nought for row \d") as caught:
        lab.actor.generate_sequences(lab.prompts.next(2), agent=raises, **sampled())
    assert caught.value.batch.rows == 2


async def raises_later(row: dict[str, Any], client: Any) -> float:
    await client.completions.create(model="policy", prompt="1+", max_tokens=2)
    raise LookupError("in a coroutine")


@pytest.mark.parametrize(("agent", "error"), [(raises, ZeroDivisionError), (raises_later, LookupError)])
def test_a_failed_stage_is_run_again_for_a_debugger(lab: wb.Workbench, agent: Any, error: type[Exception]) -> None:
    with pytest.raises(RolloutError):
        lab.actor.generate_sequences(lab.prompts.next(2), agent=agent, **sampled())
    with pytest.raises(error) as caught:
        lab.debug()
    assert caught.traceback[-1].name == agent.__name__  # where the debugger stops


def test_a_failed_call_begins_again(lab: wb.Workbench, tmp_path: Path) -> None:
    marks = str(tmp_path)

    def agent(row: dict[str, Any], client: Any) -> float:
        mark = Path(marks) / str(row["sample_seed"])
        text = ask(client).choices[0].message.content
        if not mark.exists():
            mark.write_text(text)
            raise ValueError("once")
        assert mark.read_text() == text  # the same seed draws the same
        return 1.0

    batch = lab.actor.generate_sequences(lab.prompts.next(2), agent=agent, retries=1, **sampled())
    assert lists(batch, "valid")[0] == [True, True] and lists(batch, "turns")[0] == [1, 1]


def test_a_call_that_was_given_up_returns_after_it_began_again(lab: wb.Workbench, tmp_path: Path) -> None:
    marks = str(tmp_path)

    def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        def until(name: str) -> None:
            while not (Path(marks) / name).exists():
                time.sleep(0.01)

        def ask() -> int:
            return int(post(base_url, api_key, "completions", {"prompt": "1+", "max_tokens": 2}).status_code)

        if (first := Path(marks) / "first").exists():
            (Path(marks) / "second").touch()
            until("returns")
            return float(ask() + ask() == 400)
        first.touch()
        while ask() != 401:
            pass
        until("second")
        (Path(marks) / "returns").touch()
        return 9.0

    settings = sampled(max_turns=2, call_timeout_s=60)
    batch = lab.actor.generate_sequences(lab.prompts.next(1), agent=agent, retries=1, **settings)
    assert lists(batch, "valid")[0] == [True] and lists(batch, "turns")[0] == [2]
    assert sum(lists(batch, "environment_rewards")[0][0]) == 1.0


HALF = "\ud800"  # of a surrogate pair
USER = {"role": "user", "content": "1+1="}
TOOL = {"type": "function", "function": {"name": "f", "description": HALF}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": HALF})}}
BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": [1_000_000]}),
    ("completions", {"prompt": [10**30]}),
    ("completions", {"prompt": [-1]}),
    ("chat/completions", {"messages": [{"role": f"user{HALF}", "content": "1+1="}]}),
    ("chat/completions", {"messages": [{**USER, HALF: 1}]}),
    ("chat/completions", {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}),
    ("chat/completions", {"messages": [USER], "tools": [TOOL]}),
]


def test_a_request_that_no_tokens_can_be_made_of_is_refused_and_the_stage_goes_on(lab: wb.Workbench) -> None:
    def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}"}
        with httpx.Client(headers=headers, timeout=60) as http:

            def status(path: str, body: Any) -> int:
                return int(http.post(f"{base_url}/{path}", content=json.dumps(body).encode()).status_code)

            refused = [status(*bad) for bad in BAD_REQUESTS]
            return float(refused == [400] * len(refused) and status("completions", {"prompt": [30, 31]}) == 200)

    batch = lab.actor.generate_sequences(lab.prompts.next(1), agent=agent, **sampled())
    assert sum(lists(batch, "environment_rewards")[0][0]) == 1.0


def test_limits_of_turns_and_tokens_are_errors_and_endings(lab: wb.Workbench) -> None:
    async def agent(row: dict[str, Any], client: Any) -> float:
        import openai

        messages = [{"role": "user", "content": "1+1="}]
        while True:
            try:
                answer = await client.chat.completions.create(model="policy", messages=messages)
            except openai.BadRequestError as error:
                return {"max_turns": 1.0, "context_length_exceeded": 2.0}[str(error.code)]
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]

    prompts = lab.prompts.next(2)
    few = lab.actor.generate_sequences(prompts, agent=agent, **sampled(max_turns=2, max_new_tokens=90))
    assert {row[-1] for row in lists(few, "environment_rewards")[0]} == {1.0}
    assert lists(few, "ending", "turns", "finished") == [["max_turns"] * 2, [2, 2], [False] * 2]
    short = lab.actor.generate_sequences(prompts, agent=agent, **sampled(max_turns=90, max_new_tokens=30))
    assert {row[-1] for row in lists(short, "environment_rewards")[0]} == {2.0}
    assert set(lists(short, "ending")[0]) == {"max_tokens"}
    assert max(map(len, lists(short, "response_ids")[0])) <= 30


def test_most_open_bounds_the_samples_that_are_under_way(lab: wb.Workbench, tmp_path: Path) -> None:
    marks = str(tmp_path)

    async def agent(row: dict[str, Any], client: Any) -> float:
        mark = Path(marks) / str(row["sample_seed"])
        mark.touch()
        await client.completions.create(model="policy", prompt="1+", max_tokens=3)
        open_now = len(list(Path(marks).iterdir()))
        mark.unlink()
        return float(open_now)

    batch = lab.actor.generate_sequences(lab.prompts.next(6), agent=agent, most_open=2, concurrency=6, **sampled())
    most = [row[-1] for row in lists(batch, "environment_rewards")[0]]
    assert len(most) == 6 and max(most) <= 2 and all(lists(batch, "valid")[0])


def test_the_process_of_agents_imports_little(lab: wb.Workbench) -> None:
    def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        import sys

        post(base_url, api_key, "completions", {"prompt": "1+", "max_tokens": 2})
        return float(sum(name in sys.modules for name in ("torch", "transformers", "vllm", "ray", "pydantic")))

    lab.actor.generate_sequences(lab.prompts.next(1), agent=asks_nothing, most_failed=1.0)
    worker = next(iter(hosts_of(lab).values())).workers["actor"]
    worker.context.calls.close()  # what other functions have imported goes with their process
    batch = lab.actor.generate_sequences(lab.prompts.next(1), agent=agent, **sampled())
    assert lists(batch, "environment_rewards")[0][0][-1] == 0.0


def test_what_cannot_be_an_agent_is_refused_at_once(lab: wb.Workbench) -> None:
    prompts = lab.prompts.next(1)

    def asks_for_more(row: Any, model: Any) -> None: ...

    for wrong, said in (
        (3, "agent=3. must be the function of an agent"),
        (asks_for_more, r"missing a required argument: 'model'.*an agent gets row, client, base_url, api_key"),
    ):
        with pytest.raises(BadInput, match=said):
            lab.actor.generate_sequences(prompts, agent=wrong)
    with expect_error(BadInput, value="environment= and agent= together"):
        lab.actor.generate_sequences(prompts, agent=sums, environment=Sums)


def test_an_algorithm_trains_on_what_agents_did(lab: wb.Workbench) -> None:
    grpo = wb.GRPO(lab, prompts=2, samples=2, reward=digits, sampling=wb.Sampling(agent=sums, **sampled()))
    assert grpo.iterate()["update_actor/optimizer_steps"]


def digits(response: str, **row: Any) -> float:
    return float(sum(map(str.isdigit, response)))
