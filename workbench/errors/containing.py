"""Exceptions that would end the process in which a user's function raises them, such as `SystemExit`: here they are
errors of the call alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from workbench.errors import StageError
from workbench.errors.plain_text import said


class Signal(BaseException):
    """Base of exceptions of our own that handlers of errors let through."""


def passes(error: BaseException) -> bool:
    """Whether an exception is to go through all handlers: a signal of ours, or the stop button, which only the main
    thread gets."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, Signal)


def contained(error: BaseException) -> Exception:
    """An exception that does not pass, as one that ends no process."""
    if isinstance(error, Exception):
        return error
    found = StageError(
        f"raised {type(error).__name__}: {said(error)}".rstrip(": "), "it would end the process of the host",
        "raise an Exception, such as ValueError",
    )  # fmt: skip
    found.__cause__ = error
    return found


@contextmanager
def containing() -> Iterator[None]:
    """Inside, what would end the process is a `StageError`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or passes(error):
            raise
        raise contained(error) from error
