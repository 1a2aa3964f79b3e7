"""Chat templates: programs that come with a model, so that they are rendered with a time limit."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import BadInput
from workbench.errors.plain_text import said, shown
from workbench.models.control_tokens import unmarked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TIMEOUT_S = 10.0
TICK_S = 0.25


class TooLong(BaseException):
    """Raised in a thread that is past its time: no `except Exception` of the code that runs there catches it."""


class _TimeLimit:
    """Of Python code in this process. What does not come back to Python, such as one power of huge numbers, it cannot
    stop. One thread watches, so that a limit costs a microsecond."""

    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}
        self._passed: set[int] = set()
        self._changing, self._used = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def __call__(self, seconds: float) -> Iterator[None]:
        """Inside, `TooLong` is raised in this thread after so many seconds."""
        thread = threading.get_ident()
        with self._changing:
            self._deadlines[thread] = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, daemon=True, name="time limit of chat templates")
                self._thread.start()
        self._used.set()
        try:
            yield
        finally:
            with self._changing:
                self._deadlines.pop(thread, None)
                late = thread in self._passed
                self._passed.discard(thread)
            for _ in range(1000 * late):  # what has not been raised yet is raised at a jump backwards, and not later
                pass

    def _watch(self) -> None:
        while True:
            self._used.wait()
            time.sleep(TICK_S)
            with self._changing:
                now_s = time.monotonic()
                for thread in [thread for thread, end_s in self._deadlines.items() if now_s > end_s]:
                    del self._deadlines[thread]
                    self._passed.add(thread)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TooLong))
                if not self._deadlines:
                    self._used.clear()


_time_limit = _TimeLimit()


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    next_turn: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as the tokenizer's chat template writes it, up to where the assistant's next turn begins.

    next_turn: whether that turn's head is written. tools: JSON schemas of functions that the assistant may call.
    arguments: further variables of the template.

    Raises `BadInput` where the template raises, or takes more than ten seconds.
    """
    name = tokenizer.name_or_path
    try:
        with _time_limit(TIMEOUT_S):
            return str(
                tokenizer.apply_chat_template(
                    list(messages),  # type: ignore[arg-type]
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=next_turn,
                    tokenize=False,
                    **(arguments or {}),
                )
            )
    except TooLong:
        raise BadInput(
            f"the chat template of {name!r} took more than {TIMEOUT_S:g} s for {unmarked(shown(messages, 80))}",
            "a template writes a conversation in less than a millisecond",
            "look at chat_template in the model's folder: it may loop; or set tokenizer.chat_template",
        ) from None
    except Exception as error:  # templates raise what they like
        words = f"{type(error).__name__}: {unmarked(said(error, 400))}"
        raise BadInput(
            f"messages {unmarked(shown(messages, 80))}", f"the chat template of {name!r} refuses them: {words}",
            "write them as the template asks for, or set tokenizer.chat_template",
        ) from error  # fmt: skip
