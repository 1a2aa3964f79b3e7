"""Conversations of a stage that was interrupted: the same call again goes on with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from workbench.settings.engines import Sampling
from workbench.support.fingerprint import fingerprint
from workbench.workers.conversation import Conversation


class KeptConversations:
    """Those of one worker. A conversation follows from its seed, its prompt, the settings with the code of the
    environment, the row and the weights: where all of these are the same, it is taken as it was. One that had not ended
    goes on behind its newest answer, with a new environment that is told the turns before."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._key, self._weights = b"", list[int]()
        self._kept: dict[int, Conversation] = {}

    @property
    def state(self) -> dict[str, Any]:
        """What is kept, as plain values for a checkpoint; empty: nothing."""
        kept = [one.state for one in self._kept.values()]
        return {"key": self._key, "weights": self._weights, "conversations": kept} if kept else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Keep what gave a state."""
        self._key, self._weights = state.get("key", b""), state.get("weights", [])
        kept = [Conversation.of_state(one) for one in state.get("conversations", ())]
        self._kept = {one.seed: one for one in kept}

    def only_of(self, weights: Sequence[int]) -> None:
        """Forget those of other weights: none of them can go on. weights: what tells them from others."""
        if [*weights] != self._weights:
            self._forget()

    @contextlib.contextmanager
    def resuming(
        self, key: bytes, weights: Sequence[int], conversations: Sequence[Conversation]
    ) -> Iterator[list[Conversation]]:
        """The conversations of a stage, those that were kept in the place of new ones. They are kept again
        where the stage does not come to its end. key: see `key_of`; empty: nothing is kept."""
        resumed = [*conversations]
        if key and key == self._key:
            resumed = [self._kept.get(new.seed, new) for new in conversations]
        self._forget()
        try:
            yield resumed
        except BaseException:
            if key:
                self._key, self._weights = key, [*weights]
                self._kept = {one.seed: one for one in resumed if one.go_back()}
            raise


def key_of(sampling: Sampling, rows: Sequence[Mapping[str, Any]], weights: Sequence[int]) -> bytes:
    """What conversations follow from beside their seeds and prompts, equal in every process. weights: what tells them
    from others."""
    settings = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    return fingerprint((settings, [*rows], [*weights])).encode()
