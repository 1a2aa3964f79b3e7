"""What a notebook file holds: its cells, in the order of the page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ValidationError

from workbench.errors import BadInput
from workbench.session.cell_history import digest_of
from workbench.support.files import path_of, read_json


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

    @cached_property
    def digest(self) -> str:
        """With which the record of a run holds this text."""
        return digest_of(self.text)


@dataclass(frozen=True)
class Notebook:
    """name: of the file. small_settings: values for parameters with which a run takes seconds, which the notebook's
    metadata have as `workbench.check`."""

    name: str
    cells: tuple[Cell, ...]
    small_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.code and not cell.blank)


class _CellMetadata(BaseModel, strict=True):
    tags: list[str] = []


class _Cell(BaseModel, strict=True):
    cell_type: str = ""
    id: Any = ""
    source: str | list[str] = ""
    execution_count: int | None = None
    metadata: _CellMetadata = _CellMetadata()

    def as_cell(self, number: int) -> Cell:
        text = self.source if isinstance(self.source, str) else "".join(self.source)
        return Cell(
            number=number,
            text="\n".join(text.replace("\r\n", "\n").split("\r")),
            code=self.cell_type == "code",
            id=str(self.id),
            tags=frozenset(self.metadata.tags),
            count=self.execution_count,
        )


class _Kernel(BaseModel, strict=True):
    language: str = "python"


class _Settings(BaseModel, strict=True):
    check: dict[str, Any] = {}


class _Metadata(BaseModel, strict=True):
    kernelspec: _Kernel = _Kernel()
    workbench: _Settings = _Settings()


class _File(BaseModel, strict=True):
    """What is read of a notebook file."""

    cells: list[_Cell]
    metadata: _Metadata = _Metadata()


def read_notebook(path: str | os.PathLike[str]) -> Notebook:
    """The cells of an .ipynb file of format 4. `BadInput` for what is none, or is not Python."""
    path = path_of(path, "notebook")
    rule = "a notebook file of Jupyter, format 4, with a Python kernel"
    remedy = "open it in Jupyter and save it again" if path.suffix == ".ipynb" else "give an .ipynb file"
    try:
        file = _File.model_validate(read_json(path))
    except FileNotFoundError:
        remedy = "give the path of an .ipynb file that exists; save the notebook first"
        raise BadInput(str(path), rule, remedy) from None
    except ValidationError as error:
        wrong = error.errors()[0]
        raise BadInput(f"{path}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}", rule, remedy) from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: {type(error).__name__} {error}", rule, remedy) from None
    if file.metadata.kernelspec.language != "python":
        language = file.metadata.kernelspec.language
        raise BadInput(f"{path} is written in {language}", rule, "only Python becomes a script")
    cells = tuple(cell.as_cell(number) for number, cell in enumerate(file.cells, 1))
    return Notebook(path.name, cells, file.metadata.workbench.check)
