"""The HTTP server of agents, attacked: keys, sizes, forms; and every field that cannot be honoured."""

from __future__ import annotations

import gc
import hmac
import json
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from workbench.settings.engines import Sampling
from workbench.workers.agents.recording import Answer
from workbench.workers.agents.requests import Refused, parse
from workbench.workers.agents.server import MOST_REQUEST_BYTES, AgentServer

pytest.importorskip("aiohttp")
httpx = pytest.importorskip("httpx")
CHAT = {"messages": [{"role": "user", "content": "1+1="}]}


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    server = AgentServer(Sampling(temperature=0.5, logit_bias={7: 2.0}))
    with server.running():
        for row in range(3):
            server.new_key(row)
        yield server


def key(server: AgentServer, row: int = 0) -> str:
    return server._keys[row]


def post(server: AgentServer, body: Any = CHAT, *, api_key: str | None = None, path: str = "chat/completions") -> Any:
    headers = {"Authorization": f"Bearer {key(server) if api_key is None else api_key}".encode("latin-1")}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    options = {"timeout": 30, "verify": False}  # without reading all certificates of this machine
    return httpx.post(f"{server.base_url}/{path}", headers=headers, content=content, **options)


def test_who_has_no_key_of_this_call_gets_nothing(server: AgentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[bytes]()
    compare = hmac.compare_digest

    def spied(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spied)
    mine, theirs = key(server, 0), key(server, 1)
    assert len({mine, theirs}) == 2 and len(mine) > 40
    wrong = ["x", mine[:-1], mine + "x", theirs + mine, "\xe9"]
    for api_key in wrong:
        for path in ("chat/completions", "completions"):
            refused = post(server, b"{" * 1000, api_key=api_key, path=path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "wrong_key"), api_key
    assert httpx.get(f"{server.base_url}/models").status_code == 401
    assert len(compared) == 3 * (2 * len(wrong) + 1)  # with each of the three keys, in constant time
    old = key(server, 2)
    server.forget(2)  # the call begins again, under another number
    assert post(server, api_key=old).status_code == 401
    assert server.requests.empty()


def test_it_listens_on_the_loopback_alone_and_sends_no_permission_to_pages(server: AgentServer) -> None:
    port = int(server.base_url.split(":")[2].partition("/")[0])
    addresses = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    for address in addresses:
        if not address.startswith("127."):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((address, port), timeout=5)
    asked = httpx.options(f"{server.base_url}/chat/completions", headers={"Origin": "http://a.page"})
    answers = [asked, httpx.get(f"{server.base_url}/models", headers={"Origin": "http://a.page"})]
    assert asked.status_code == 405
    assert not [name for one in answers for name in one.headers if name.lower().startswith("access-control")]


def test_sizes_and_forms(server: AgentServer) -> None:
    assert post(server, b" " * (MOST_REQUEST_BYTES + 1)).status_code == 413
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (b"", b"{", b"\xff\xfe", b"[1]", b'"x"', deep, b'{"n": ' + b"9" * 5000 + b"}", b'{"messages": NaN}'):
        refused = post(server, body)
        assert refused.status_code == 400 and refused.json()["error"]["message"], body[:20]
    assert post(server, path="embeddings").status_code == 404
    assert server.requests.empty()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "the server samples with temperature=0.5"),
    ({"temperature": "0.5"}, "the server samples with temperature=0.5"),
    ({"temperature": True}, "the server samples with temperature=0.5"),
    ({"top_p": 0.9}, r"generate_sequences\(agent=..., top_p=...\)"),
    ({"logit_bias": {"7": 1.0}}, "the server samples with logit_bias"),
    ({"n": 2}, "send n requests"),
    ({"stream": "false"}, "must be true or false"),
    ({"logprobs": True}, "the batch has them in its column rollout_log_prob"),
    ({"max_tokens": "x", "max_completion_tokens": 6}, "max_tokens='x'"),
    ({"tools": [{"type": "function"}]}, "must be a list of at most 128"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "must be a list of at most 128"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "the policy decides whether it calls a tool"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "calls as the server sent them"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": "{"}}]}]},
        "calls as the server sent them",
    ),
    ({"response_format": {"type": "json_object"}}, "the server accepts only"),
    ({"seed": 3}, "accepts a seed only at temperature 0"),
    ({"colour": "red"}, "does not know this field"),
    ({"model": "gpt-4o"}, "write model='policy'"),
    ({"max_tokens": 0}, "at least 1"),
    ({"max_completion_tokens": 2.5}, "at least 1"),
    ({"stop": [""]}, "none of them empty"),
    ({"stop": ["x"] * 17}, "at most 16"),
    ({"messages": []}, "at least one message"),
    ({"messages": "hi"}, "at least one message"),
    ({"messages": ["hi"]}, "an object with a role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type 'text'"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "must be a text"),
]


def test_a_seed_is_taken_where_nothing_is_drawn() -> None:
    """As lm-eval sends one with each request."""
    assert parse("chat", {**CHAT, "seed": 3}, Sampling(temperature=0)).messages
    with pytest.raises(Refused, match="temperature 0"):
        parse("chat", {**CHAT, "seed": 3}, Sampling())
    with pytest.raises(Refused, match="seed"):
        parse("chat", {**CHAT, "seed": "3"}, Sampling(temperature=0))


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=lambda x: "" if isinstance(x, str) else next(iter(x)))
def test_what_cannot_be_honoured_is_an_error_that_says_why(
    server: AgentServer, fields: dict[str, Any], said: str
) -> None:
    refused = post(server, {**CHAT, **fields})
    error = refused.json()["error"]
    assert refused.status_code == (404 if "model" in fields else 400)
    assert error["type"] == "invalid_request_error" and error["param"].partition("[")[0] in fields
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(error["message"])
    assert server.requests.empty()


def test_prompts_of_completions(server: AgentServer) -> None:
    for prompt in ("", [], ["a", "b"], [1.5], [[1]], None, 3):
        refused = post(server, {"prompt": prompt}, path="completions")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_an_answer_has_openais_form_and_reaches_who_asked(server: AgentServer) -> None:
    asked = {"temperature": 0.5, "logit_bias": {"7": 2.0}, "n": 1, "stream": False, "user": "me", "stop": "x"}
    rows, got = [], {}

    def serve() -> None:
        for _ in range(2):
            waiting = server.requests.get(timeout=30)
            rows.append((waiting.call, waiting.request.kind, waiting.request.stop))
            waiting.answer(Answer(text=f"of {waiting.call}", ending="eos", prompt_tokens=3, tokens=2))

    thread = threading.Thread(target=serve)
    thread.start()
    got["chat"] = post(server, {**CHAT, **asked, "model": "policy"}, api_key=key(server, 1)).json()
    got["text"] = post(server, {"prompt": "1+1="}, api_key=key(server, 0), path="completions").json()
    thread.join()
    assert rows == [(1, "chat", ("x",)), (0, "text", None)]
    choice = got["chat"]["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "of 1"} and choice["finish_reason"] == "stop"
    assert got["chat"]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert got["text"]["choices"][0]["text"] == "of 0"
    models = httpx.get(f"{server.base_url}/models", headers={"Authorization": f"Bearer {key(server)}"}).json()
    assert [model["id"] for model in models["data"]] == ["policy"]


def test_who_does_not_wait_any_more_is_known(server: AgentServer) -> None:
    with httpx.Client(timeout=0.2, headers={"Authorization": f"Bearer {key(server)}"}) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"{server.base_url}/chat/completions", json=CHAT)
        waiting = server.requests.get(timeout=30)
    deadline_s = time.monotonic() + 30
    while not waiting.gone and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert waiting.gone
    waiting.answer(Answer(text="late", ending="eos", prompt_tokens=3, tokens=2))  # reaches nobody, and breaks nothing


def test_openais_client_reads_calls_of_tools(server: AgentServer) -> None:
    openai = pytest.importorskip("openai")
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    offered = {"type": "function", "function": {"name": "add"}}
    shown = list[Any]()

    def serve() -> None:
        waiting = server.requests.get(timeout=30)
        shown.extend(waiting.request.tools)
        waiting.answer(Answer(text="", tool_calls=[call], ending="eos", prompt_tokens=3, tokens=2))

    thread = threading.Thread(target=serve)
    thread.start()
    with openai.OpenAI(base_url=server.base_url, api_key=key(server), max_retries=0) as client:
        made = client.chat.completions.create(model="policy", messages=CHAT["messages"], tools=[offered])
    thread.join()
    (choice,) = made.choices
    assert shown == [offered] and choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].id) == ("add", "call00000")


def test_nothing_listens_afterwards() -> None:
    server = AgentServer(Sampling())
    with server.running():
        port = int(server.base_url.split(":")[2].partition("/")[0])
        api_key = server.new_key(0)
        assert httpx.get(f"{server.base_url}/models", headers={"Authorization": f"Bearer {api_key}"}).status_code == 200
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/compl"])
def test_connections_that_come_as_the_server_ends_are_closed(sent: bytes) -> None:
    gc.collect()  # what earlier tests left
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        for clients in range(1, 6):
            server = AgentServer(Sampling())
            with server.running():
                address = ("127.0.0.1", int(server.base_url.split(":")[2].partition("/")[0]))
                connections = [socket.create_connection(address, timeout=5) for _ in range(clients)]
                for connection in connections:
                    connection.sendall(sent)
            for connection in connections:
                connection.close()
        gc.collect()
    assert [str(one.message) for one in told] == []
