"""What a notebook file holds: its cells, in the order of the page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.session.cell_history import digest_of
from workbench.support.files import path_of, read_json

SKIPPED = "skip-export"  # a tag
JSON_NAMES = {dict: "an object", list: "an array", str: "a text", int: "a whole number", type(None): "null"}


@dataclass(frozen=True)
class Cell:
    """number: on the page, from 1, counting all cells; 0 for one that the page no longer has. count: n of `In [n]`;
    None where it was not run. id: what the file keeps; "" in old files. by: what ran it, where that was no cell."""

    number: int
    text: str
    code: bool = True
    id: str = ""
    tags: frozenset[str] = frozenset()
    count: int | None = None
    by: str = ""

    def __str__(self) -> str:
        if self.by:
            return self.by
        place = f"cell {self.number}" if self.number else "a deleted cell"
        return f"{place} (In [{self.count}])" if self.count else place

    @property
    def blank(self) -> bool:
        """Whether there is nothing to run."""
        return not self.text.strip()

    @property
    def exported(self) -> bool:
        """Whether its code is for the script."""
        return self.code and not self.blank and SKIPPED not in self.tags

    @cached_property
    def digest(self) -> str:
        """With which the record of a run holds this text."""
        return digest_of(self.text)


@dataclass(frozen=True)
class Notebook:
    """name: of the file. metadata: the notebook's own, where `workbench.check` has small settings for a quick proof."""

    name: str
    cells: tuple[Cell, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.code and not cell.blank)

    def small_settings(self) -> dict[str, Any]:
        """Values for parameters with which a run takes seconds, as the notebook's metadata say them."""
        return dict(self.metadata.get("workbench", {}).get("check", {}))


def read_notebook(path: str | os.PathLike[str]) -> Notebook:
    """The cells of an .ipynb file of format 4. `BadInput` for what is none, or is not Python."""
    path = path_of(path, "notebook")
    rule = "a notebook file of Jupyter, format 4, with a Python kernel"
    try:
        content = read_json(path)
        cells, metadata = content["cells"], content.get("metadata", {})
    except FileNotFoundError:
        remedy = "give the path of an .ipynb file that exists; save the notebook first"
        raise BadInput(str(path), rule, remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        remedy = "open it in Jupyter and save it again" if path.suffix == ".ipynb" else "give an .ipynb file"
        raise BadInput(f"{path}: {type(error).__name__} {error}", rule, remedy) from None
    cells, metadata = _of_type(cells, list, "cells"), _of_type(metadata, dict, "metadata")
    kernel = _of_type(metadata.get("kernelspec", {}), dict, "metadata.kernelspec")
    _of_type(_of_type(metadata.get("workbench", {}), dict, "metadata.workbench").get("check", {}), dict, "check")
    language = kernel.get("language", "python")
    if language != "python":
        raise BadInput(f"{path} is written in {language}", rule, "only Python becomes a script")
    return Notebook(path.name, tuple(_cell(number, cell) for number, cell in enumerate(cells, 1)), metadata)


def _of_type(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """A value of the file; `BadInput` where it is of another type."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        rule = f"a notebook of format 4 has {' or '.join(JSON_NAMES[one] for one in kinds)} there"
        raise BadInput(f"{what}: {shown(value)}", rule, "open it in Jupyter and save it again")
    return value


def _cell(number: int, cell: Any) -> Cell:
    where = f"cell {number}"
    cell = _of_type(cell, dict, where)
    text = _of_type(cell.get("source", ""), (str, list), f"{where}, source")
    for line in text if isinstance(text, list) else ():
        _of_type(line, str, f"{where}, a line of its source")
    tags = _of_type(
        _of_type(cell.get("metadata", {}), dict, f"{where}, metadata").get("tags", []), list, f"{where}, tags"
    )
    count = _of_type(cell.get("execution_count"), (int, type(None)), f"{where}, execution_count")
    return Cell(
        number=number,
        text="\n".join((text if isinstance(text, str) else "".join(text)).replace("\r\n", "\n").split("\r")),
        code=cell.get("cell_type") == "code",
        id=str(cell.get("id", "")),
        tags=frozenset(_of_type(tag, str, f"{where}, a tag") for tag in tags),
        count=count,
    )
