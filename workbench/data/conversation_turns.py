"""What passes between the loop of conversations and their environments."""

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
    """What the policy said in one turn of row `row`, the ending included.

    lead_ids: the tokens between the policy's turn before and this one.
    """

    row: int
    response_ids: list[int]
    lead_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Told:
    """A turn that an environment has answered before, for one that is told it again. ids, lead_ids: as of `Turn`.
    reward, observed: what it gave, see `Reply`."""

    ids: list[int]
    lead_ids: Sequence[int]
    reward: float
    observed: str = ""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answered to one turn, or to `reset`: tokens of its observation, reward, whether it is over.

    prompt_ids: the prompt that `reset` made of messages, in place of the row's. limit: what the conversation ran out
    of, so that it ends, although the environment has not said so. again: the conversation is to begin again, with a new
    environment. failure: why it ends instead. observed: `digest` of the observation. summary_ids: what the
    function of `Context.summary` returned, where it was asked.
    """

    observation_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    reward: float = 0.0
    done: bool = False
    limit: Literal["max_seconds", "max_calls"] | None = None
    again: bool = False
    failure: RolloutError | None = None
    observed: str = ""
    summary_ids: list[int] | None = None


RULE = "its answers must follow from sample_seed and the turns"


@dataclass(frozen=True, kw_only=True)
class Said:
    """A turn that an environment was told before. text, more: what its `step` gets, see `Environments.arguments`.
    reward, done: what it gave. observed: `digest` of what it answered; "": not known, and not compared."""

    text: str
    more: Mapping[str, Any]
    reward: float
    done: bool
    observed: str = ""


def digest(observation: Any) -> str:
    """A short text for a text or messages, equal in every process."""
    return fingerprint(observation or None)[:16]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Makes environments that begin behind earlier turns, in place of `make`: their `reset` is that of a new one, from
    the same `sample_seed`, and tells it these turns. It returns None, since the prompt has what was said.

    An environment that answers otherwise than before (another observation or reward, or another end) is not decided by
    its seed and by what it is told: what comes behind would be another conversation's. Its `reset` raises, and its row
    fails. began: `digest` of what its `reset` gave, as of `Said.observed`.
    """

    make: Callable[[], Any]
    sample_seed: int
    said: Sequence[Said]
    began: str = ""

    def __getattr__(self, name: str) -> Any:
        """What is said of `make` holds here too: its name, limits, format of tool calls."""
        if name == "make" or (name.startswith("__") and name not in (LIMITS, "__name__", "__qualname__", "__module__")):
            raise AttributeError(name)
        return getattr(self.make, name)

    def __call__(self) -> Any:
        environment = self.make()
        own = vars(environment).get("reset")

        def reset(**row: Any) -> Any:
            if own is None:
                del environment.reset  # the class's again
            else:
                environment.reset = own
            return _run(self._replay(environment, {**row, "sample_seed": self.sample_seed}))

        environment.reset = reset
        return environment

    def _replay(self, environment: Any, row: Mapping[str, Any]) -> Generator[Any, Any, None]:
        """The calls of its methods, one after the other; what they gave, or a coroutine of it, is sent in."""
        state = {0: environment}
        first, _ = yield user_functions.reset(lambda: environment, state, 0, row)
        if self.began and digest(first) != self.began:
            raise RuntimeError(f"reset gave {shown(first)} where it gave something else before: {RULE}")
        for number, turn in enumerate(self.said):
            answer = yield user_functions.step(self.make, state, 0, turn.text, turn.more)
            observation, reward, done = user_functions.checked_reply(answer)
            if not done and turn.observed and digest(observation) != turn.observed:
                raise RuntimeError(
                    f"told turn {number} again, the environment answered {shown(observation)} where it answered "
                    f"something else before: {RULE}"
                )
            if done != turn.done or not math.isclose(reward, turn.reward, rel_tol=1e-6, abs_tol=1e-6):
                raise RuntimeError(
                    f"told turn {number} again, the environment gave reward {reward:g} and done={done}, where it gave "
                    f"{turn.reward:g} and {turn.done} before: {RULE}"
                )


def resume(
    make: Callable[[], Any], state: dict[int, Any], row: int, values: Mapping[str, Any], said: Sequence[Said],
    began: str = "",
) -> Any:  # fmt: skip
    """Make the environment of a row behind earlier turns; as `user_functions.reset`."""
    resumed = Resumed(make=make, sample_seed=values["sample_seed"], said=said, began=began)
    return user_functions.reset(resumed, state, row, values)


def _run(calls: Generator[Any, Any, None]) -> Any:
    """Make calls one after the other: at once, or, from the first coroutine on, in a coroutine."""
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
