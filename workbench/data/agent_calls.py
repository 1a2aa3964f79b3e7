"""Calls agents in the process of the user's functions. Imports few modules, see `support.calls.server`."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.data.user_functions import accepted, asks_for, finite_number
from workbench.errors.plain_text import shown
from workbench.support.calls import needs
from workbench.support.calls.server import WrongValue


class Harness:
    """An agent's function, in the form sent to its process. Imports `openai` before the time of the first call runs."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.__name__ = function, name
        self._takes_client = asks_for(function, "client")

    def __workbench_needs__(self) -> None:
        needs.check_needs(self.function)
        if self._takes_client:
            import openai  # noqa: F401

    def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """Call the function for a row; return its result, or a coroutine for a coroutine function."""
        function = self.function
        given = accepted(function, {"row": dict(row), "base_url": base_url, "api_key": api_key})
        if not self._takes_client:
            return function(**given)
        import openai

        # no TLS on the loopback interface, since reading certificates takes long; and no proxy, which would see the key
        plain: dict[str, Any] = {"verify": False, "trust_env": False}
        to_server: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
        if not _is_coroutine(function):
            with openai.OpenAI(**to_server, http_client=openai.DefaultHttpxClient(**plain)) as client:
                return function(**given, client=client)

        async def with_client() -> Any:
            async with openai.AsyncOpenAI(**to_server, http_client=openai.DefaultAsyncHttpxClient(**plain)) as client:
                return await function(**given, client=client)

        return with_client()


def call_agent(harness: Harness, state: object, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    return harness(row, base_url, api_key)


def _is_coroutine(function: Any) -> bool:
    function = getattr(function, "func", function)  # the function inside a partial
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def checked_outcome(value: Any, *call: object) -> tuple[float, dict[str, float]]:
    """Return the reward and its components; raise `WrongValue` for an invalid result of an agent."""
    if not isinstance(value, Mapping):
        return (0.0 if value is None else finite_number(value)), {}
    if not all(isinstance(name, str) for name in value):
        raise WrongValue(f"returned {shown(value)}")
    components = {name: finite_number(number) for name, number in value.items()}
    return finite_number(sum(components.values())), components


ADDRESS, STOP, POLL_S = "address.json", "stop", 0.05


@dataclass(frozen=True)
class EndpointCall:
    """The agent of `lab.serve()`: it tells the kernel the server's address, and waits until the kernel says stop.

    folder: a private folder of the kernel. kernel: its process id. The agent also stops if either of them is gone."""

    folder: str
    kernel: int
    records = False  # answers do not become part of a row

    def __call__(self, base_url: str, api_key: str) -> None:
        import psutil

        from workbench.support.files import write_json

        folder = Path(self.folder)
        if not folder.is_dir():
            return
        write_json(folder / ADDRESS, {"base_url": base_url, "api_key": api_key})
        while folder.is_dir() and not (folder / STOP).exists() and psutil.pid_exists(self.kernel):
            time.sleep(POLL_S)


def read_address(folder: Path) -> tuple[str, str] | None:
    """Return the server's URL and key; None if they are not yet known."""
    try:
        found = json.loads((folder / ADDRESS).read_text())
    except FileNotFoundError:
        return None
    return str(found["base_url"]), str(found["api_key"])
