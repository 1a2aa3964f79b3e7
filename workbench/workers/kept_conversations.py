"""Keeps the conversations of an interrupted stage; the same call made again continues them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from workbench.settings.engines import Sampling
from workbench.support.fingerprint import fingerprint
from workbench.workers.conversation import Conversation


class KeptConversations:
    """The kept conversations of one worker. A conversation follows from its seed, its prompt, the settings with the
    environment's code, the row and the weights: if all of these are the same, the kept conversation is used again. If
    it had no ending, it continues after its newest answer, with a new environment that is told the earlier turns."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._key, self._weights = b"", list[int]()
        self._kept: dict[int, Conversation] = {}

    @property
    def state(self) -> dict[str, Any]:
        """The kept conversations as plain values for a checkpoint; empty if there are none."""
        kept = [one.state for one in self._kept.values()]
        return {"key": self._key, "weights": self._weights, "conversations": kept} if kept else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore conversations from a `state`."""
        self._key, self._weights = state.get("key", b""), state.get("weights", [])
        kept = [Conversation.of_state(one) for one in state.get("conversations", ())]
        self._kept = {one.seed: one for one in kept}

    def drop_other_weights(self, weights: Sequence[int]) -> None:
        """Forget conversations of other weights: they cannot continue. weights: numbers that identify the weights."""
        if [*weights] != self._weights:
            self._forget()

    @contextlib.contextmanager
    def resuming(
        self, key: bytes, weights: Sequence[int], conversations: Sequence[Conversation]
    ) -> Iterator[list[Conversation]]:
        """Yield the conversations of a stage, with kept conversations in place of new ones. They are kept again if the
        stage does not complete. key: see `key_of`; empty: nothing is kept."""
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
    """Fingerprint the conditions of conversations other than seeds and prompts, equal in every process. weights:
    numbers that identify the weights."""
    settings = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    return fingerprint((settings, [*rows], [*weights])).encode()
