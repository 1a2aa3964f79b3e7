"""Conversations that the user steps by hand with `lab.conversation`: take turns, edit and fork them, make a batch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from workbench.conversations.chat import Chat, NoEnvironment
from workbench.errors import BadInput
from workbench.settings.engines import Sampling
from workbench.support.checked_calls import checked_call
from workbench.support.validation import NonNegativeInt, ZeroToOne

MOST_OPEN = 8  # conversations that keep their environments' process


class Conversations:
    """Begins conversations by hand, `lab.conversation(row, environment=MyEnvironment)`. chats: the conversations that
    were begun, the newest last."""

    def __init__(self, lab: Any) -> None:
        self._lab, self.chats = lab, list[Chat]()

    @checked_call("lab.conversation")
    def __call__(
        self, row: Any, *, environment: Any = None, sampling: Sampling | None = None, gamma: ZeroToOne = 1.0,
        seed: NonNegativeInt = 0,
    ) -> Chat:  # fmt: skip
        """Begin a conversation of the policy with an environment, or with you, turn by turn. `chat.step()` samples a
        turn and shows it, `chat.say(text)` answers it, `chat.edit(...)` replaces a turn or its answer,
        `chat.fork(n, at=turn)` samples continuations from before a turn and estimates the value there, `chat.batch()`
        and `chat.train()` turn branches into rows. A conversation older than the newest eight starts its environment's
        process again when it continues, and replays its turns. See docs/by_hand.md.

        row: a batch of one row, such as `lab.prompts.next(1)`; a prompt's text or messages; or a mapping of a prompt
        and its columns, like a row of `prompts=`. environment: as for `generate_sequences`; None: the environment of
        `sampling`, and without one the policy talks with you, see `chat.say`.
        sampling: how turns are sampled, and the limits of tokens and turns; None: the sampling of the algorithm that
        took the last step, else `wb.Sampling()`. gamma: the discount per turn. seed: equal seeds and weights give equal
        turns.
        Raises `RolloutError` if the environment's `reset` fails.
        """
        lab = self._lab
        if "actor" not in lab.groups or lab.description.generation is None:
            raise BadInput("conversation on a workbench without an actor", "the actor's engine generates the turns")
        if sampling is None:
            sampling = getattr(lab.algorithm, "sampling", None)
        if not isinstance(sampling, Sampling):
            sampling = Sampling()
        sampling = replace(sampling, environment=environment or sampling.environment or NoEnvironment)
        chat = Chat(lab, row, sampling=sampling, gamma=gamma, seed=seed)
        self.chats.append(chat)
        for older in self.chats[:-MOST_OPEN]:
            with suppress(BadInput):  # another thread waits for its answer
                older.close()
        return chat
