"""OpenEnv environments (https://github.com/meta-pytorch/OpenEnv): servers that a conversation talks to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.errors import MissingDependency
from workbench.support.checked_calls import checked_call

if TYPE_CHECKING:
    from workbench.models.turn_messages import Message

ABOUT = ("done", "reward", "metadata")  # fields of an observation that are not shown to the model


class OpenEnv:
    """An environment for conversations on a running OpenEnv server.

        echo = wb.adapters.OpenEnv("http://localhost:8000", action="message")
        lab.actor.generate_sequences(batch, environment=echo, max_turns=8)

    url: the server's address; the server must allow as many sessions as open conversations (`most_open`).
    action: the action's field for the text of a turn; or a function of that text that returns the action as a dict. It
        raises `ValueError` for a text that is no action: the model is told the error, and the turn has reward 0.
    show: turns an observation, a dict, into the model's text; None: its only text field, else all fields as JSON.

    The prompt is the row's `prompt` and the first observation. The server's reset gets the row's column `seed`, if any.
    """

    @checked_call("wb.adapters.OpenEnv")
    def __init__(
        self,
        url: str,
        *,
        action: str | Callable[[str], Mapping[str, Any]],
        show: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        self.url, self.action, self.show = url, action, show

    def __workbench_needs__(self) -> None:
        """Raise `MissingDependency` without OpenEnv, see `workbench.support.calls.needs`."""
        try:
            from openenv.core import generic_client as _  # noqa: F401 (tried)
        except ImportError as error:
            raise MissingDependency(
                f"openenv cannot be imported: {error}", "it connects to OpenEnv's servers",
                "pip install openenv, in an environment with mcp 1",
            ) from None  # fmt: skip

    def __call__(self) -> OpenEnvConversation:
        return OpenEnvConversation(self)

    def __repr__(self) -> str:
        return f"OpenEnv({self.url})"


class OpenEnvConversation:
    """The environment of one sample, with a server session of its own."""

    def __init__(self, settings: OpenEnv) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._settings, self._client = settings, GenericEnvClient(base_url=settings.url)

    async def reset(self, prompt: str, seed: int | None = None) -> list[dict[str, str]]:
        found = await self._client.reset(**({} if seed is None else {"seed": int(seed)}))
        return [{"role": "user", "content": f"{prompt}\n\n{self._shown(found.observation)}"}]

    async def step(self, message: Message) -> tuple[list[dict[str, str]], float, bool]:
        action = self._settings.action
        try:
            given = {action: message["content"]} if isinstance(action, str) else dict(action(message["content"]))
        except ValueError as problem:
            return [{"role": "user", "content": str(problem)}], 0.0, False
        found = await self._client.step(given)
        told = [{"role": "user", "content": self._shown(found.observation)}]
        return told, float(found.reward or 0.0), bool(found.done)

    async def close(self) -> None:
        await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._settings.show is not None:
            return self._settings.show(observation)
        seen = {name: value for name, value in observation.items() if name not in ABOUT}
        texts = [value for value in seen.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(seen, ensure_ascii=False)
