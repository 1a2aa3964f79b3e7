"""A parser of command lines that names the nearest option, command or choice when one is misspelt."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from workbench.errors.plain_text import plain_text

CHOICE = re.compile(r"(?s)(.*)invalid choice: '?(.*?)'? \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser`, of whole option names only. Exit code 2 for wrong usage, as there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As there, but that arguments which are not known are an error of this parser, and of none above it."""
        found, more = super().parse_known_args(args, namespace)
        if more:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(more)}" + _nearest(more[0].partition("=")[0], options))
        return found, more

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit."""
        if wrong := CHOICE.match(message):
            message += _nearest(wrong[2], re.findall(r"[^\s,']+", wrong[3]))
        super().error(plain_text(message))


def _nearest(wrong: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(wrong, known, n=1)
    return f". write {near[0]} (the nearest)" if near else ""
