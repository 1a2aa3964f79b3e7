"""Conversations by hand: turn by turn, edited, forked where it matters, and put into a batch. Made by
`lab.conversation`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.conversations.chat import Chat, Talk
from workbench.errors import BadInput
from workbench.objectives.arguments import within
from workbench.settings.engines import Sampling
from workbench.support.checked_calls import checked_call
from workbench.support.validation import NonNegativeInt, Number


class Conversations:
    """Begins conversations by hand, `lab.conversation(row, environment=MyEnvironment)`. chats: those that were begun,
    the newest last."""

    def __init__(self, lab: Any) -> None:
        self._lab, self.chats = lab, list[Chat]()

    @checked_call("lab.conversation")
    def __call__(
        self, row: Any, *, environment: Any = None, sampling: Sampling | None = None, gamma: Number = 1.0,
        seed: NonNegativeInt = 0,
    ) -> Chat:  # fmt: skip
        """A conversation of the policy with an environment, or with you, by hand: `chat.step()` takes a turn and shows
        it, `chat.say(text)` answers it, `chat.edit(...)` replaces one or its answer, `chat.fork(n, at=turn)` samples
        continuations from there and says what the turn is worth, `chat.batch()` and `chat.train()` make rows of it. See
        docs/by_hand.md.

        row: a batch of one row, such as `lab.prompts.next(1)`; a prompt's text or messages; or a mapping of a prompt
        and its columns, as rows of `prompts=`. environment: as `generate_sequences` takes it; None: that of `sampling`,
        and without one the policy talks with you, see `chat.say`.
        sampling: how turns are drawn, and how many tokens and turns there may be; None: as the algorithm that took the
        last step draws them, else `wb.Sampling()`. gamma: of returns, for each turn. seed: the same one draws the same
        turns from the same weights.
        Raises `RolloutError` where the environment's `reset` fails.
        """
        lab = self._lab
        if "actor" not in lab.groups or lab.description.generation is None:
            raise BadInput("conversation on a workbench without an actor", "its engine takes the turns")
        within("gamma", gamma, 0, 1)
        if sampling is None:
            sampling = getattr(lab.algorithm, "sampling", None)
        if not isinstance(sampling, Sampling):
            sampling = Sampling()
        sampling = replace(sampling, environment=environment or sampling.environment or Talk)
        chat = Chat(lab, row, sampling=sampling, gamma=gamma, seed=seed)
        self.chats.append(chat)
        lab.before_close(chat.close)
        return chat
