"""The messages between the rollout loop and the environments, and the replay of earlier turns to an environment."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.data import user_functions
from workbench.errors import RolloutError
from workbench.errors.plain_text import shown
from workbench.support.calls.needs import LIMITS
from workbench.support.fingerprint import fingerprint


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The policy's tokens in one turn of row `row`, with the end token.

    lead_ids: the tokens between the policy's previous turn and this one.
    """

    row: int
    response_ids: list[int]
    lead_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class AnsweredTurn:
    """An answered turn, to be replayed to a new environment. ids, lead_ids: as `response_ids`, `lead_ids` of `Turn`.
    reward, observed: from the first answer, see `Reply`."""

    ids: list[int]
    lead_ids: Sequence[int]
    reward: float
    observed: str = ""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of an environment to one turn, or to `reset`: tokens of its observation, reward, whether it is over.

    prompt_ids: the prompt from messages of `reset`, which replaces the row's. limit: the limit that ends the
    conversation, although the environment has not ended it. again: the conversation must begin again, with a new
    environment. failure: the error that ends the conversation. observed: `digest` of the observation.
    """

    observation_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    reward: float = 0.0
    done: bool = False
    limit: Literal["max_seconds", "max_calls"] | None = None
    again: bool = False
    failure: RolloutError | None = None
    observed: str = ""


RULE = "its answers must follow from sample_seed and the turns"


@dataclass(frozen=True, kw_only=True)
class ReplayedTurn:
    """A turn to replay to an environment. text, more: the arguments of `step`, see `Environments.arguments`. reward:
    from the first answer. observed: `digest` of its observation; "": unknown, and not compared."""

    text: str
    more: Mapping[str, Any]
    reward: float
    observed: str = ""


def digest(observation: Any) -> str:
    """Return a short hash of a text or messages that is equal in every process."""
    return fingerprint(observation or None)[:16]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Replaces `make`: makes environments that begin after earlier turns. Their `reset` resets a new environment with
    the same `sample_seed`, and replays the turns to it. It returns None, because the prompt already has the turns.

    If the environment answers differently than before (another observation, reward or end), its answers depend on more
    than its seed and the turns, and continuations would belong to another conversation. Then `reset` raises, and the
    row fails. began: `digest` of the result of the first `reset`; "": not compared.
    """

    make: Callable[[], Any]
    sample_seed: int
    turns: Sequence[ReplayedTurn]
    began: str = ""

    def __getattr__(self, name: str) -> Any:
        """Return attributes of `make`, such as its name, limits and tool format."""
        if name == "make" or (name.startswith("__") and name not in (LIMITS, "__name__", "__qualname__", "__module__")):
            raise AttributeError(name)
        return getattr(self.make, name)

    def __call__(self) -> Any:
        environment = self.make()
        own = vars(environment).get("reset")

        def reset(**row: Any) -> Any:
            if own is None:
                del environment.reset  # restores the method of the class
            else:
                environment.reset = own
            return _run(self._replay(environment, {**row, "sample_seed": self.sample_seed}))

        environment.reset = reset
        return environment

    def _replay(self, environment: Any, row: Mapping[str, Any]) -> Generator[Any, Any, None]:
        """Yield calls of the environment's methods. Each result, or a coroutine's awaited result, is sent in."""
        state = {0: environment}
        first, _ = yield user_functions.reset(lambda: environment, state, 0, row)
        if self.began and digest(first) != self.began:
            raise RuntimeError(f"reset gave {shown(first)}, and something else before: {RULE}")
        for number, turn in enumerate(self.turns):
            answer = yield user_functions.step(self.make, state, 0, turn.text, turn.more)
            observation, reward, done = user_functions.checked_reply(answer)
            if not done and turn.observed and digest(observation) != turn.observed:
                raise RuntimeError(
                    f"when turn {number} was repeated, the environment answered {shown(observation)}, and something "
                    f"else before: {RULE}"
                )
            if done or not math.isclose(reward, turn.reward, rel_tol=1e-6, abs_tol=1e-6):
                raise RuntimeError(
                    f"when turn {number} was repeated, the environment gave reward {reward:g} and done={done}, and "
                    f"before {turn.reward:g} and False: {RULE}"
                )


def resume(
    make: Callable[[], Any], state: dict[int, Any], row: int, values: Mapping[str, Any], turns: Sequence[ReplayedTurn],
    began: str = "",
) -> Any:  # fmt: skip
    """Make the environment of a row, and replay earlier turns to it. Returns as `user_functions.reset` does."""
    resumed = Resumed(make=make, sample_seed=values["sample_seed"], turns=turns, began=began)
    return user_functions.reset(resumed, state, row, values)


def _run(calls: Generator[Any, Any, None]) -> Any:
    """Make the calls one after the other; from the first coroutine on, return a coroutine for the remaining calls."""
    value = None
    with suppress(StopIteration):
        while True:
            value = calls.send(value)
            if inspect.isawaitable(value):
                return _awaited(calls, value)


async def _awaited(calls: Generator[Any, Any, None], value: Any) -> None:
    with suppress(StopIteration):
        while True:
            value = calls.send(await value if inspect.isawaitable(value) else value)
