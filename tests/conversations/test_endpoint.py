"""`lab.serve()`: the live actor behind an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

import workbench as wb
from tests.calculator import Calculator
from tests.cases import TINY, tiny_lab, vowels
from workbench import cli
from workbench.errors import BadInput, StageError

httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")
SHORT = wb.Sampling(temperature=0, max_new_tokens=8)
ASKED: list[Any] = [{"role": "user", "content": "2 + 3?"}]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "reward": vowels}
    with tiny_lab("served", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def client(endpoint: Any) -> Any:
    return openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def test_it_answers_as_the_actor_does(lab: wb.Workbench) -> None:
    evaluated: Any = lab.evaluate([{"prompt": "2 + 3?"}], samples=1, sampling=SHORT)
    (expected,) = evaluated.rows["response"]
    with lab.serve(sampling=SHORT) as endpoint:
        ask = client(endpoint).chat.completions.create
        assert [one.id for one in client(endpoint).models.list()] == [endpoint.model]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(model=endpoint.model, messages=ASKED), range(40)))
        assert {one.choices[0].message.content for one in answers} == {expected}
        assert answers[0].usage.completion_tokens <= 8 and ask(model="policy", messages=ASKED, max_tokens=1)
        text = client(endpoint).completions.create(model="policy", prompt="a", max_tokens=2)
        assert text.choices[0].finish_reason in ("stop", "length")
        streamed = list(ask(model="policy", messages=ASKED, stream=True, stream_options={"include_usage": True}))
        assert "".join(one.choices[0].delta.content or "" for one in streamed[:-1]) == expected
        assert streamed[-2].choices[0].finish_reason and streamed[-1].usage == answers[0].usage
        texts = list(client(endpoint).completions.create(model="policy", prompt="a", max_tokens=2, stream=True))
        assert "".join(one.choices[0].text for one in texts) == text.choices[0].text


def test_repeated_requests_are_drawn_anew(lab: wb.Workbench) -> None:
    with lab.serve(sampling=wb.Sampling(max_new_tokens=8)) as endpoint:
        ask = client(endpoint).chat.completions.create
        said = {ask(model="policy", messages=ASKED).choices[0].message.content for _ in range(6)}
        with pytest.raises(openai.BadRequestError, match="the server samples with temperature=1"):
            ask(model="policy", messages=ASKED, temperature=0.2)
    assert len(said) > 1


def test_who_has_no_key_gets_nothing_and_nothing_prints_it(lab: wb.Workbench) -> None:
    with lab.serve(sampling=SHORT) as endpoint:
        assert endpoint.base_url.startswith("http://127.0.0.1:") and endpoint.api_key not in repr(endpoint)
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.get(f"{endpoint.base_url}/models", headers=headers).status_code == 401
    assert endpoint.api_key and repr(endpoint) == "Endpoint(closed)" and not endpoint.is_open
    files = [path for path in lab.run_folder.rglob("*") if path.is_file()]
    assert not [path for path in files if endpoint.api_key.encode() in path.read_bytes()]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{endpoint.base_url}/models")
    endpoint.close()


def test_an_endpoint_that_ends_by_itself_says_why(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(decoding: Any) -> Any:
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(lab_decoding(lab), "step", broken)
    endpoint = lab.serve(sampling=SHORT)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        client(endpoint).chat.completions.create(model="policy", messages=ASKED)
    with pytest.raises(StageError, match="the engine is gone"):
        endpoint.close()
    endpoint.close()  # it has been said


def lab_decoding(lab: wb.Workbench) -> type:
    """The class of the engine's decoding."""
    (host,) = cast(Any, lab.hosts.backend)._hosts.values()
    with host.workers["actor"].generator.decoding(SHORT) as decoding:
        return type(decoding)


def test_no_stage_mixes_with_it_and_training_sees_nothing(tmp_path: Path) -> None:
    def trained(name: str, served: bool) -> Any:
        with tiny_lab(name, tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
            algorithm = wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0, sampling=wb.Sampling(max_new_tokens=6))
            first = algorithm.run(1)
            if served:
                with lab.serve(sampling=SHORT) as endpoint:
                    assert endpoint.weights_version == lab.weights["actor"].steps > 0
                    client(endpoint).chat.completions.create(model="policy", messages=ASKED)
                    for call in (lambda: lab.prompts.next(2), lambda: algorithm.run(1), lambda: lab.serve()):
                        with pytest.raises(BadInput, match=r"lab.serve\(\) is under way.*close\(\) of an endpoint"):
                            call()
            second = algorithm.run(1)
            columns = [name for name in first.columns if not name.endswith(("sync_gap/mean", "/seconds"))]
            return second[columns].to_dict("records"), lab.iteration, len(wb.runs(str(tmp_path)))

    with_it, without = trained("with", True), trained("without", False)
    assert repr(with_it[0]) == repr(without[0]) and with_it[1] == without[1]


def test_a_workbench_that_closes_ends_it(tmp_path: Path) -> None:
    with tiny_lab("ends", tmp_path, backend="inline", models={"actor": TINY}) as lab:
        endpoint = lab.serve(sampling=SHORT)
    assert not endpoint.is_open


def test_what_cannot_be_served(lab: wb.Workbench) -> None:
    with pytest.raises(BadInput, match=r"must be a wb\.Sampling"):
        lab.serve(sampling=5)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="clients ask for each turn themselves"):
        lab.serve(sampling=wb.Sampling(environment=Calculator))


def test_a_checkpoint_is_served_from_the_command_line(
    lab: wb.Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.serve(sampling=SHORT) as endpoint:
        expected = client(endpoint).chat.completions.create(model="policy", messages=ASKED).choices[0].message.content
    lab.save(tmp_path / "saved", models=False)
    lines: list[str] = []

    def ask(text: str, *more: Any, **options: Any) -> None:
        lines.append(text)
        address = json.loads(text)
        client(argparse.Namespace(**address)).chat.completions.create(model=address["model"], messages=ASKED)
        answer = client(argparse.Namespace(**address)).chat.completions.create(model="policy", messages=ASKED)
        lines.append(answer.choices[0].message.content)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cli, "print", ask, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    asked = ["serve", str(tmp_path / "saved"), "--temperature", "0", "--max-new-tokens", "8", "--json"]
    try:
        assert cli.main(asked) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert lines[1] == expected
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{json.loads(lines[0])['base_url']}/models")
