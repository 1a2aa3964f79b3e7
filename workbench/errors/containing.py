"""Turns exceptions of user functions that would end the process, such as `SystemExit`, into errors of the call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from workbench.errors import StageError
from workbench.errors.plain_text import said


class Signal(BaseException):
    """Base class of our own control-flow exceptions, which error handlers let through."""


def must_propagate(error: BaseException) -> bool:
    """Whether an exception has to pass all handlers: a `Signal` of ours, or a `KeyboardInterrupt` in the main thread
    (the stop button interrupts only this thread)."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, Signal)


def as_exception(error: BaseException) -> Exception:
    """Return an `Exception` for an error that need not propagate: itself, or a `StageError` caused by it."""
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
    """Inside the block, raise a `StageError` in place of an exception that would end the process."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or must_propagate(error):
            raise
        raise as_exception(error) from error
