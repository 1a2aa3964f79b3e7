"""Values and exceptions of any class in messages: what is shown of them is short, plain, and never raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from workbench.errors import BadInput, StageError
from workbench.errors.containing import Signal, as_exception, containing
from workbench.errors.plain_text import said, shown
from workbench.messages.calls import Failure
from workbench.support.calls.pickling import name_of


class Text(str):
    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __getitem__(self, key: Any) -> str:
        return "\x1b]0;owned\x07" * 1000


def written(text: Callable[[], str]) -> Any:
    class Written(Exception):
        def __repr__(self) -> str:
            return text()

        __str__ = __repr__

    return Written()


def raising(error: BaseException) -> Callable[[], str]:
    def text() -> str:
        raise error

    return text


HOSTILE: dict[str, Any] = {
    "raises": raising(RuntimeError("half made")),
    "exits": raising(SystemExit(3)),
    "ends": raising(GeneratorExit()),
    "raises one that cannot be said": raising(written(raising(ValueError("again")))),
    "no text": lambda: 5,
    "escapes": lambda: "\x1b]0;owned\x07\x1b[2Ja\x9b31m\u202eb\x00",
    "floods": lambda: "x" * 10**6,
    "lines": lambda: "a\n" * 1000,
    "a text of its own class": lambda: Text("ab"),
    "half a character": lambda: "\ud800",
}


def test_what_is_shown_is_short_plain_and_there(subtests: pytest.Subtests) -> None:
    for name, text in HOSTILE.items():
        with subtests.test(name):
            value = written(text)
            for found in (shown(value), shown([value]), said(value, 60), Failure.of(value).message):
                assert found and len(found) < 2100
                assert not any(character in found for character in "\x1b\x9b\x07\x00\u202e\ud800")
            assert "\n" not in shown(value) and len(shown(value)) <= 60
            assert len(str(StageError(shown(value), said(value)))) < 4000


def test_a_value_that_was_cut_ends_in_dots_in_the_message() -> None:
    assert str(BadInput(shown([1] * 100), "too long")) == f"{str([1] * 100)[:59]}…. too long."


def test_a_deep_list_is_shown_by_its_class() -> None:
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    assert shown(deep) == "<list>"


def test_the_stop_button_ends_a_repr() -> None:
    for show in (shown, said):
        with pytest.raises(KeyboardInterrupt):
            show(written(raising(KeyboardInterrupt())))


def test_a_function_whose_name_raises() -> None:
    class Nameless:
        @property
        def __name__(self) -> str:
            raise RuntimeError("none")

        def __call__(self) -> None: ...

    assert name_of(Nameless()) == "Nameless"


def test_what_would_end_the_process_is_an_error() -> None:
    for error, words in ((SystemExit(3), "raised SystemExit: 3"), (GeneratorExit(), "raised GeneratorExit")):
        with pytest.raises(StageError, match=words) as caught, containing():
            raise error
        assert caught.value.__cause__ is error
    assert as_exception(plain := ValueError("x")) is plain
    for signal in (KeyboardInterrupt, Signal, ValueError):
        with pytest.raises(signal), containing():
            raise signal
