"""What is known of calls that returned no value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Failed(Protocol):
    """Is told that call number i failed: what it did, the rule, the remedy, the exception behind it, and the frames of
    a crash. It may raise: then no further call is begun."""

    def __call__(
        self, i: int, what: str, rule: str = "", remedy: str = "", *, cause: BaseException | None = None, note: str = ""
    ) -> None: ...


@dataclass(frozen=True)
class Left:
    """Calls that have neither ended nor failed, because their process was killed. suspects: one of these ended the
    process. They are made again one at a time, which shows which one it was. waiting: the others. why: how the process
    ended, the rule and the remedy."""

    waiting: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    why: tuple[str, str, str] = ("", "", "")
