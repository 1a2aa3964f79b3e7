"""An interrupt in the middle of a step that must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from workbench.display.interrupts import stoppable, uninterrupted
from workbench.errors import StageInterrupted


@pytest.fixture(autouse=True)
def _interrupts_are_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which has them ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[int]()

    @uninterrupted()
    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_told_before_an_interrupt() -> None:
    @uninterrupted()
    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        step()


def test_another_thread_is_left_alone() -> None:
    done = list[int]()

    def step() -> None:
        with uninterrupted():
            done.append(1)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert done == [1]


def test_an_interrupt_of_a_long_call_says_what_was_done() -> None:
    done = list[str]()

    @stoppable("saving", lambda: (f"{len(done)} of 2 files are written", "call it again"))
    def save() -> None:
        done.append("first")
        with stoppable("the second file", ("nothing of it is written", "")):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(StageInterrupted, match=r"^the second file was interrupted. nothing of it is written.$"):
        save()
    said = pytest.raises(StageInterrupted, match=r"^saving was interrupted. 1 of 2 files are written. call it again.$")
    with said, stoppable("saving", lambda: (f"{len(done)} of 2 files are written", "call it again")):
        raise KeyboardInterrupt
