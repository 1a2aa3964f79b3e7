"""A conversation with a server of OpenEnv, on the loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb

pytestmark = pytest.mark.thorough  # the locked environment does not have it

SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.number, self.turns = 1 + (seed or 0) % 9, 0
        return Hint(hint="A number from 1 to 9.", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        self.turns += 1
        guess = int(action.text)
        right = guess == self.number
        hint = "Right." if right else "More." if guess < self.number else "Less."
        return Hint(hint=hint, done=right, reward=float(right))

    @property
    def state(self):
        return State(step_count=self.turns)


uvicorn.run(create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("openenv", reason="openenv is an optional extra that the locked environment does not have")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (path := tmp_path_factory.mktemp("openenv") / "server.py").write_text(SERVER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen([sys.executable, str(path), str(port)], env=environment)
    try:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s and server.poll() is None:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def talk(environment: Any, seed: int, *turns: str) -> list[tuple[str, float, bool]]:
    async def all_of_it() -> list[tuple[str, float, bool]]:
        (first,) = await environment.reset("Guess.", seed=seed)
        said = [(first["content"], 0.0, False)]
        for turn in turns:
            (message,), reward, done = await environment.step({"role": "assistant", "content": turn})
            said.append((message["content"], reward, done))
        await environment.close()
        return said

    return asyncio.run(all_of_it())


def test_turns_are_actions_and_observations_messages(url: str) -> None:
    guessing = wb.adapters.OpenEnv(url, action="text")
    assert talk(guessing(), 6, "3", "8", "7") == [
        ("Guess.\n\nA number from 1 to 9.", 0.0, False),
        ("More.", 0.0, False),
        ("Less.", 0.0, False),
        ("Right.", 1.0, True),
    ]


def test_a_function_makes_the_action_and_says_what_is_none(url: str) -> None:
    def action(text: str) -> dict[str, str]:
        if not text.isdigit():
            raise ValueError("Say a number.")
        return {"text": text}

    guessing = wb.adapters.OpenEnv(url, action=action, show=lambda seen: seen["hint"].upper())
    assert talk(guessing(), 0, "one", "1")[1:] == [("Say a number.", 0.0, False), ("RIGHT.", 1.0, True)]
