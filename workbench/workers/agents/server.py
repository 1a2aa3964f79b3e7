"""The HTTP side: an OpenAI-compatible server on the loopback, in a thread of its own.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models

Each call of the function has a random key. A request without a valid key is answered with 401 before its body is read.
A stream is the whole answer in one event. The thread knows neither tokenizer nor engine: it passes a request on, and
waits for its answer.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from workbench.errors import MissingDependency
from workbench.settings.engines import Sampling
from workbench.workers.agents.recording import Answer
from workbench.workers.agents.requests import MODEL, Kind, Refused, Request, parse, wrong_key

HOST = "127.0.0.1"
MOST_REQUEST_BYTES = 2**23
END_TIMEOUT_S = 5.0
_numbers = itertools.count(1)


@dataclass(eq=False)
class Waiting:
    """A request that waits for its answer. call: the function call that sent it. gone: the client stopped waiting."""

    call: int
    request: Request
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Answer] = field(repr=False)
    gone: bool = False

    def answer(self, answer: Answer | Refused) -> None:
        """Send the answer; thread-safe."""
        self.loop.call_soon_threadsafe(self._settle, answer)

    def _settle(self, answer: Answer | Refused) -> None:
        if self.future.done():
            return
        if isinstance(answer, Refused):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


class AgentServer:
    """The server of one call of `generate_sequences`. sampling: the stage's. requests: a queue of received requests."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._keys: dict[int, str] = {}
        self.requests: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self.base_url = ""

    def new_key(self, call: int) -> str:
        self._keys[call] = secrets.token_urlsafe(32)
        return self._keys[call]

    def knows(self, call: int) -> bool:
        """Return whether requests of a call are accepted."""
        return call in self._keys

    def forget(self, call: int) -> None:
        """Accept no further request of a call."""
        self._keys.pop(call, None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Listen at `base_url` while the block runs."""
        try:
            from aiohttp import web
        except ImportError as error:
            raise MissingDependency(
                "agent= without aiohttp", "the server for agents needs it", "pip install aiohttp"
            ) from error
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind((HOST, 0))
        self.base_url = f"http://{HOST}:{listening.getsockname()[1]}/v1"
        loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

        async def serve() -> None:
            runner = web.AppRunner(
                self._app(web), access_log=None, handle_signals=False, shutdown_timeout=0.1, handler_cancellation=True
            )
            await runner.setup()
            await web.SockSite(runner, listening).start()
            started.set()
            await stop.wait()
            # accept no further connection, and begin those that were: asyncio does not close what is accepted meanwhile
            loop.remove_reader(listening)
            await asyncio.sleep(0)
            await runner.cleanup()

        def run() -> None:
            try:
                # at its end, the runner closes connections that are being accepted, and lets all free their sockets
                with asyncio.Runner(loop_factory=lambda: loop) as running:
                    running.run(serve())
            finally:
                started.set()  # also if it could not start: requests then fail at once

        thread = threading.Thread(target=run, daemon=True, name="server of agents")
        thread.start()
        started.wait()
        try:
            yield
        finally:
            self._keys.clear()
            if not loop.is_closed():  # it is, if the server could not start
                loop.call_soon_threadsafe(stop.set)
            thread.join(END_TIMEOUT_S)
            listening.close()

    def _app(self, web: Any) -> Any:
        @web.middleware
        async def in_openais_form(request: Any, handler: Any) -> Any:
            try:
                return await handler(request)
            except Refused as refused:
                problem = refused
            except web.HTTPException as error:
                problem = Refused(f"{request.method} {request.path}: {error.reason}", status=error.status, code="http")
            return web.json_response(problem.body, status=problem.status)

        async def models(request: Any) -> Any:
            self._call_of(request)
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "workbench"}
            return web.json_response({"object": "list", "data": [model]})

        async def answered(http: Any, kind: Kind) -> Any:
            asked, answer = await self._ask(http, kind)
            body = body_of(kind, answer)
            if not asked.stream:
                return web.json_response(body)
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            return web.Response(body=events(kind, body, with_usage=asked.usage), headers=headers)

        app = web.Application(middlewares=[in_openais_form], client_max_size=MOST_REQUEST_BYTES)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", partial(answered, kind="chat"))
        app.router.add_post("/v1/completions", partial(answered, kind="text"))
        return app

    def _call_of(self, request: Any) -> int:
        """Return the call whose key a request has. Raises `Refused`."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        # a copy: the rank's thread adds and removes keys meanwhile
        found = [call for call, own in list(self._keys.items()) if hmac.compare_digest(key, own.encode())]
        if not found:
            raise wrong_key()
        return found[0]

    async def _ask(self, http: Any, kind: Kind) -> tuple[Request, Answer]:
        call = self._call_of(http)
        try:
            body = json.loads(await http.read())
        except (ValueError, RecursionError):
            raise Refused("the body is no JSON") from None
        loop = asyncio.get_running_loop()
        waiting = Waiting(call, parse(kind, body, self._sampling), loop, loop.create_future())
        self.requests.put(waiting)
        try:
            return waiting.request, await waiting.future
        finally:
            waiting.gone = waiting.future.cancelled()


def body_of(kind: Kind, answer: Answer) -> dict[str, Any]:
    """Return an answer in OpenAI's format."""
    said: dict[str, Any] = {"text": answer.text}
    name, prefix = "text_completion", "cmpl"
    if kind == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            message |= {"content": answer.text or None, "tool_calls": answer.tool_calls}
        name, prefix, said = "chat.completion", "chatcmpl", {"message": message}
    reason = "tool_calls" if answer.tool_calls else "length" if answer.ending == "length" else "stop"
    total = answer.prompt_tokens + answer.tokens
    return {
        "id": f"{prefix}-{next(_numbers)}", "object": name, "created": int(time.time()), "model": MODEL,
        "choices": [{**said, "index": 0, "logprobs": None, "finish_reason": reason}],
        "usage": {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": total},
    }  # fmt: skip


def events(kind: Kind, body: dict[str, Any], *, with_usage: bool) -> bytes:
    """Return an answer as server-sent events in OpenAI's format: the whole answer in one event, then why it ended."""
    (choice,) = body["choices"]
    same = {name: body[name] for name in ("id", "object", "created", "model")}
    if kind == "chat":
        same["object"] = "chat.completion.chunk"
        calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
        delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        parts: list[dict[str, Any]] = [{"delta": delta}, {"delta": {}}]
    else:
        parts = [{"text": choice["text"]}, {"text": ""}]
    reasons = (None, choice["finish_reason"])
    made = [
        {**same, "choices": [{"index": 0, "logprobs": None, "finish_reason": reason, **part}]}
        for part, reason in zip(parts, reasons, strict=True)
    ]
    if with_usage:
        made.append({**same, "choices": [], "usage": body["usage"]})
    return "".join(f"data: {text}\n\n" for text in (*map(json.dumps, made), "[DONE]")).encode()
