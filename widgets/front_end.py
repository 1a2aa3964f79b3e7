"""The front end's modules, as one text: Jupyter takes a widget's module alone, without the files that it imports."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from IPython.core.getipython import get_ipython

FOLDER = Path(__file__).parent / "static"
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)


@cache
def module(name: str) -> str:
    """A file of `static/`, with the files that it imports put before it, each once.

    Each file is an ES module of its own, which a browser, or a checker, takes as it is. Put together they share one
    scope: a name at the top of a file is used in no other (a test looks).
    """
    texts: dict[str, str] = {}

    def put(name: str) -> None:
        if name in texts:
            return
        text = (FOLDER / name).read_text()
        texts[name] = ""  # under way
        for imported in IMPORT.findall(text):
            put(imported)
        del texts[name]  # behind what it imports
        texts[name] = IMPORT.sub("", text)

    put(name)
    main = texts.pop(name)
    inner = [re.sub(r"^export (?=function|const|class|async)", "", text, flags=re.MULTILINE) for text in texts.values()]
    return "\n".join([*inner, main])


def style() -> str:
    """The style sheet of all views."""
    return (FOLDER / "panel.css").read_text()


def in_notebook() -> bool:
    """Whether a kernel runs this, with a front end that may show widgets."""
    return getattr(get_ipython(), "kernel", None) is not None
