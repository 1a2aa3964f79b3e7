"""Write the API reference into build/docs/: static pages from docstrings, by pdoc; `make docs` calls this.

Why pdoc: it adds one small package to what JupyterLab brings, and its pages ask nothing of the network. It reads
docstrings as Markdown, as they are; only paragraphs of arguments, a line each, are made lists here.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workbench

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "docs"
# What a user calls, reads or writes a subclass of, beside the public names; packages with all their modules.
ROOMS = (
    "workbench.algorithms",
    "workbench.checks.report",
    "workbench.cli",
    "workbench.algorithms.branch",
    "workbench.batches.columns",
    "workbench.algorithms.graph",
    "workbench.data.prompts",
    "workbench.stages.run",
    "workbench.data.sources",
    "workbench.batches.store",
    "workbench.errors",
    "workbench.export",
    "workbench.checks.evaluation",
    "workbench.data.examples",
    "workbench.objectives",
    "workbench.placement.change",
    "workbench.placement.estimate",
    "workbench.data.prompt_stream",
    "workbench.resharding.plan",
    "workbench.resharding.strategies",
    "workbench.stages.runner",
    "workbench.telemetry.memory",
    "workbench.telemetry.spans",
    "workbench.telemetry.store",
    "workbench.telemetry.syncs",
    "workbench.session.history",
    "workbench.session.topology",
    "workbench.messages",
    "workbench.data.environment",
    "workbench.stages.group",
    "workbench.workers.roles",
    "workbench.workers.worker",
)
_NAME = r"\*{0,2}[A-Za-z_]\w*(?:\([\w, ]*\))?"
_ARGUMENT = re.compile(rf"({_NAME}(?:, {_NAME})*): ")


def pages() -> list[str]:
    """The modules that have a page: the package itself, `ROOMS`, and wherever a public name is defined."""
    return sorted({"workbench", *map(home, workbench.__all__), *(part for room in ROOMS for part in _parts(room))})


def home(name: str) -> str:
    """The module in which a public name is defined; "workbench" for a value that does not say."""
    value: Any = getattr(workbench, name)
    return str(getattr(value, "__module__", None) or getattr(value, "__name__", "workbench"))


def _parts(room: str) -> list[str]:
    folders = getattr(importlib.import_module(room), "__path__", ())
    return [room, *(part.name for part in pkgutil.walk_packages(folders, f"{room}."))]


def arguments_as_list(docstring: str) -> str:
    """The docstring with each paragraph of the form "name: meaning", a line each, as a list of Markdown."""
    return "\n\n".join(map(_listed, docstring.split("\n\n")))


def _listed(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not lines or not _ARGUMENT.match(lines[0]):
        return paragraph
    if not all(_ARGUMENT.match(line) or line.startswith(" ") for line in lines):
        return paragraph
    return "\n".join(_ARGUMENT.sub(r"- `\1`: ", line, count=1) if line[0] != " " else line for line in lines)


def render(names: Sequence[str]) -> dict[str, str]:
    """File -> text: a page of html for each module, the index, and what the search box looks in."""
    import pdoc.doc
    import pdoc.render

    pdoc.render.configure(template_directory=ROOT / "docs" / "reference", footer_text="workbench")
    pdoc.render.env.filters["to_markdown"] = arguments_as_list
    modules = {name: pdoc.doc.Module.from_name(name) for name in names}
    with warnings.catch_warnings():
        # of the __init__ that a dataclass makes: they are shown as they are written
        warnings.filterwarnings("ignore", "Error parsing type annotation")
        files = {f"{name.replace('.', '/')}.html": pdoc.render.html_module(modules[name], modules) for name in names}
    index, search = pdoc.render.html_index(modules), pdoc.render.search_index(modules)
    return {**files, "index.html": index, "search.js": search}


def main() -> None:
    for path, text in render(pages()).items():
        (TARGET / path).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / path).write_text(text)
    print(f"API reference: {TARGET / 'index.html'}")


if __name__ == "__main__":
    main()
