"""Gymnasium environments (https://gymnasium.farama.org), in which the policy's turns name actions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import MissingDependency
from workbench.support.checked_calls import checked_call

if TYPE_CHECKING:
    import gymnasium

    from workbench.models.turn_messages import Message


class Gymnasium:
    """An environment for conversations that wraps a Gymnasium environment.

        rows = [{"prompt": "Reach G. Say left, down, right or up.", "seed": n} for n in range(100)]
        lake = wb.adapters.Gymnasium("FrozenLake-v1", actions=["left", "down", "right", "up"], render_mode="ansi")
        lab.actor.generate_sequences(batch, environment=lake, max_turns=30)

    make: the id of a registered environment, or a function that makes one. options: for `gymnasium.make`, or for that
    function.
    actions: the names of the actions 0, 1, ... of a discrete space; the last of these words in a turn is the action.
        None: the last whole number in a turn is the action. In a space of texts, the whole turn is the action.
    show: turns an observation into the model's text; None: `render()` if render_mode="ansi", else `str`.
    wrong_reward: the reward of a turn that names no action; the model is told about the error.

    The prompt is the row's `prompt` and the first observation. `reset` gets the row's column `seed`, a whole number:
    samples of one prompt must begin in the same state if they are each other's baseline.
    """

    @checked_call("wb.adapters.Gymnasium")
    def __init__(
        self,
        make: str | Callable[..., Any],
        *,
        actions: Sequence[str] | None = None,
        show: Callable[[Any], str] | None = None,
        wrong_reward: float = 0.0,
        **options: Any,
    ) -> None:
        self.make, self.options = make, options
        self.actions, self.show, self.wrong_reward = actions, show, wrong_reward

    def __workbench_needs__(self) -> None:
        """Raise `MissingDependency` without Gymnasium, see `workbench.support.calls.needs`."""
        try:
            import gymnasium as _  # noqa: F401 (tried)
        except ImportError:
            raise MissingDependency.of("the package gymnasium", "it provides the environment", "agents") from None

    def __call__(self) -> GymnasiumConversation:
        return GymnasiumConversation(self)

    def __repr__(self) -> str:
        name = self.make if isinstance(self.make, str) else getattr(self.make, "__name__", "environment")
        return f"Gymnasium({name})"


class GymnasiumConversation:
    """The environment of one sample, with a Gymnasium environment of its own."""

    def __init__(self, settings: Gymnasium) -> None:
        import gymnasium

        self._settings, make = settings, settings.make
        self._environment: gymnasium.Env[Any, Any] = (
            gymnasium.make(make, **settings.options) if isinstance(make, str) else make(**settings.options)
        )
        self._space = self._environment.action_space

    def reset(self, prompt: str, seed: int) -> list[dict[str, str]]:
        observation, _ = self._environment.reset(seed=int(seed))
        return [{"role": "user", "content": f"{prompt}\n\n{self._shown(observation)}"}]

    def step(self, message: Message) -> tuple[list[dict[str, str]], float, bool]:
        try:
            action = self._action(message["content"])
        except ValueError as problem:
            return [{"role": "user", "content": str(problem)}], self._settings.wrong_reward, False
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return [{"role": "user", "content": self._shown(observation)}], float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._environment.close()

    def _shown(self, observation: Any) -> str:
        if self._settings.show is not None:
            return self._settings.show(observation)
        if self._environment.render_mode == "ansi":
            return str(self._environment.render())
        return str(observation)

    def _action(self, said: str) -> Any:
        """Return the action that a turn names. Raises `ValueError`, with a text for the model, if it names none."""
        from gymnasium.spaces import Discrete, Text

        if isinstance(self._space, Text):
            return said
        if not isinstance(self._space, Discrete):
            raise TypeError(f"the actions of {self._environment} are {self._space}: they must be Text or Discrete")
        if names := self._settings.actions:
            found = re.findall("|".join(rf"\b{re.escape(name.lower())}\b" for name in names), said.lower())
            if not found:
                raise ValueError(f"No action was named. Say one of: {', '.join(names)}.")
            return int(self._space.start) + [name.lower() for name in names].index(found[-1])
        first, last = int(self._space.start), int(self._space.start + self._space.n - 1)
        numbers = [int(number) for number in re.findall(r"-?\d+", said)]
        if not numbers or not first <= numbers[-1] <= last:
            raise ValueError(f"No action was named. Say a number from {first} to {last}.")
        return numbers[-1]
