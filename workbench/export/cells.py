"""Read the cells of a notebook file, in page order, and translate IPython's syntax into Python."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workbench.errors import BadInput
from workbench.session.run_record import digest_of
from workbench.support.files import path_of, read_json
from workbench.support.validation import checked

SKIPPED = "skip-export"  # a tag


@dataclass(frozen=True)
class Cell:
    """number: on the page, from 1, counting all cells; 0 for a deleted cell. count: n of `In [n]`; None if it was never
    run. id: the file's cell id; "" in old files. by: what ran it, if that was not a cell."""

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
        """Whether there is no code in it."""
        return not self.text.strip()

    @property
    def exported(self) -> bool:
        """Whether its code belongs in the script."""
        return self.code and not self.blank and SKIPPED not in self.tags

    @cached_property
    def digest(self) -> str:
        """The hash under which the record of a run stores this text."""
        return digest_of(self.text)


@dataclass(frozen=True)
class Notebook:
    """A notebook file. metadata: the notebook's own; `workbench.check` in it has small settings for a quick proof."""

    name: str
    cells: tuple[Cell, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.code and not cell.blank)

    def small_settings(self) -> dict[str, Any]:
        """Parameter values from the notebook's metadata, with which a run takes seconds."""
        return dict(self.metadata.get("workbench", {}).get("check", {}))


def read_notebook(path: str | os.PathLike[str]) -> Notebook:
    """Read the cells of an .ipynb file of format 4. Raises `BadInput` for other files and other languages."""
    path = path_of(path, "notebook")
    rule = "it must be a Jupyter notebook file, format 4, with a Python kernel"
    try:
        content = read_json(path)
        found = checked("cells", content["cells"], list[dict[str, Any]])
        cells = tuple(_cell(number, cell) for number, cell in enumerate(found, 1))
        metadata = _object("metadata", content)
        language = _object("kernelspec", metadata).get("language", "python")
        _object("check", _object("workbench", metadata))
    except FileNotFoundError:
        remedy = "give the path of an .ipynb file that exists; save the notebook first"
        raise BadInput(str(path), rule, remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        remedy = "open it in Jupyter and save it again" if path.suffix == ".ipynb" else "give an .ipynb file"
        kind = "" if isinstance(error, BadInput) else f"{type(error).__name__} "
        raise BadInput(f"{path}: {kind}{error}", rule, remedy) from None
    if language != "python":
        raise BadInput(f"{path} is written in {language}", rule, "only Python can become a script")
    return Notebook(path.name, cells, metadata)


def _object(name: str, within: dict[str, Any], of: str = "") -> dict[str, Any]:
    return checked(f"the {name}{of}", within.get(name, {}), dict[str, Any])


def _cell(number: int, cell: dict[str, Any]) -> Cell:
    of = f" of cell {number}"
    text = checked(f"the source{of}", cell.get("source", ""), str | list[str])
    return Cell(
        number=number,
        text="\n".join((text if isinstance(text, str) else "".join(text)).replace("\r\n", "\n").split("\r")),
        code=cell.get("cell_type") == "code",
        id=str(cell.get("id", "")),
        tags=frozenset(checked(f"the tags{of}", _object("metadata", cell, of).get("tags", []), list[str])),
        count=checked(f"the execution_count{of}", cell.get("execution_count"), int | None),
    )


# Magics that set up the notebook, display, or time; the code that they run, if any, stays.
SILENT = {
    "alias", "autoawait", "autocall", "automagic", "autoreload", "colors", "config", "connect_info", "debug", "dhist",
    "dirs", "doctest_mode", "gui", "hist", "history", "load_ext", "logoff", "logon", "logstart", "logstate", "logstop",
    "ls", "lsmagic", "magic", "matplotlib", "notebook", "page", "pastebin", "pdb", "pdef", "pdoc", "pfile", "pinfo",
    "pinfo2", "precision", "pprint", "psearch", "psource", "pwd", "pylab", "quickref", "recall", "reload_ext", "rep",
    "tb", "unload_ext", "who", "who_ls", "whos", "xmode",
}  # fmt: skip
LOOKING_CELLS = {"html", "HTML", "javascript", "js", "latex", "markdown", "svg", "SVG", "timeit", "mermaid"}
BODIES = {"time", "capture", "prun"}  # cell magics whose body is what counts
SHELL = "a shell command"
ASIDE = "tag the cell `skip-export` if the script does not need it"


def python_of(cell: Cell) -> tuple[str, list[str]]:
    """The cell's text with IPython's syntax translated, and a sentence for each `%timeit` line and display-only shell
    line, which are left out. Raises `BadInput` that names the cell and what cannot be in a script."""
    from IPython.core.inputtransformer2 import TransformerManager

    given, told = cell.text.strip(), list[str]()
    if given.startswith("%%timeit"):
        told.append(f"`{given.splitlines()[0].rstrip()}` is left out, with the code that it runs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = str(TransformerManager().transform_cell(_cell_magic(cell) if given.startswith("%%") else cell.text))
        try:
            tree = ast.parse(text)
            # invalid in a cell but valid in the body of `main`: a `return` there would end the script
            compile(text, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, said = getattr(error, "lineno", None), getattr(error, "msg", error)
            where = f", line {line}" if line else ""
            raise BadInput(f"{cell}{where}: {said}", "cells are Python", "fix it, or tag it `skip-export`") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _notebook_call(node) is not None]
    changes = [(node, _translated(cell, node, told)) for node in calls]
    return replaced(text, changes) if changes else text, told


def _cell_magic(cell: Cell) -> str:
    """Return the body of a cell magic that runs Python; "" for a magic that only displays."""
    head, _, body = cell.text.lstrip().partition("\n")
    name, *statement = head[2:].strip().split(maxsplit=1) or [""]
    if name in BODIES:
        return "\n".join([*statement, body]) if name == "time" else body
    if name in LOOKING_CELLS:
        return ""
    raise BadInput(f"{cell}: %%{name}", "a script has only Python", f"write it in Python, or {ASIDE}")


def _notebook_call(statement: ast.stmt) -> ast.Call | None:
    """The `get_ipython().run_line_magic(...)`, or similar call, that a simple statement makes or assigns."""
    value = getattr(statement, "value", None)
    if not isinstance(statement, ast.Expr | ast.Assign) or not isinstance(value, ast.Call):
        return None
    called = value.func
    if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call)):
        return None
    return value if isinstance(called.value.func, ast.Name) and called.value.func.id == "get_ipython" else None


def _translated(cell: Cell, statement: ast.stmt, told: list[str]) -> str:
    """Translate one line of IPython. told: gets a sentence if a line that is not display-only is left out."""
    call = _notebook_call(statement)
    assert call is not None and isinstance(call.func, ast.Attribute)
    given = [str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)]
    if len(given) != len(call.args) or not given:
        raise BadInput(f"{cell}: {ast.unparse(call)}", "a script runs outside of a notebook", ASIDE)
    if call.func.attr in ("system", "getoutput"):  # what IPython makes of `!command`
        if isinstance(statement, ast.Expr) and only_looks(given[0]):
            told.append(f"`!{given[0]}` is left out: it only shows something")
            return "pass"
        what = "subprocess.run(..., check=True)" if call.func.attr == "system" else "subprocess.check_output(...)"
        raise BadInput(f"{cell}: !{given[0]}", f"{SHELL} is not Python", f"write {what}, or {ASIDE}")
    if call.func.attr != "run_line_magic":
        raise BadInput(f"{cell}: {ast.unparse(call)}", "a script runs outside of a notebook", ASIDE)
    name, line = given[0], given[1].strip() if len(given) > 1 else ""
    target = f"{ast.unparse(statement.targets[0])} = " if isinstance(statement, ast.Assign) else ""
    if name == "timeit" and not target:
        told.append(f"`{f'%timeit {line}'.rstrip()}` is left out, with the code that it runs")
        return "pass"
    if name in SILENT and not target:
        return "pass"
    if name == "time" and line:
        return target + line
    module, found = _meaning(name, line)
    if not found:
        rule = f"{SHELL} is not Python" if name in ("sx", "system", "sc", "bash", "sh") else "a script has only Python"
        remedy = "declare the script's requirements where it is installed" if name in ("pip", "conda", "uv") else ""
        remedy = f"{remedy}, and {ASIDE}" if remedy else f"write it in Python, or {ASIDE}"
        raise BadInput(f"{cell}: %{name} {line}".rstrip(), rule, remedy)
    return f"import {module}; {target}{found}"


def _meaning(magic: str, line: str) -> tuple[str, str]:
    """The Python of a line magic, and the module that it needs; empty if a script has no equivalent."""
    option = not line or line.startswith("-")
    if magic == "cd" and not option:
        return "os", f"os.chdir(os.path.expanduser({line!r}))"
    if magic == "run" and not option and line.endswith(".py") and len(line.split()) == 1:
        return "runpy", f"globals().update(runpy.run_path({line!r}, run_name='__main__'))"
    if magic in ("env", "set_env") and line:
        name, equals, value = line.partition("=" if "=" in line else " ")
        if equals != "=" and not value:
            return "os", f"os.environ.get({name.strip()!r})"
        if "$" not in value and "{" not in value:  # IPython would fill in a variable
            return "os", f"os.environ[{name.strip()!r}] = {value.strip()!r}"
    return "", ""


def replaced(text: str, changes: Sequence[tuple[ast.stmt | ast.expr, str]]) -> str:
    """Replace these parts of the text, last first, so that earlier positions stay valid."""
    lines = text.split("\n")
    for node, new in sorted(changes, key=lambda change: (-change[0].lineno, -change[0].col_offset)):
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        joined = first[: node.col_offset].decode() + new + last[node.end_col_offset :].decode()
        lines[node.lineno - 1 : node.end_lineno] = [joined]
    return "\n".join(lines)


# --- shell lines that only show something, which a script leaves out ---

# Commands that write nothing, and the arguments with which some of them do.
SHOWS = re.compile(
    r"(cat|cmp|cut|df|diff|du|echo|[ef]?grep|free|groups|head|id|ls|lsblk|lscpu|lspci|md5sum|nproc|printenv|ps|pwd|"
    r"sha256sum|stat|tail|uname|uptime|vmstat|wc|whereis|which|whoami|date(?=$| (\+\S+|-[uIR])$)|"
    r"hostname(?=$| -[fisI]$)|nvidia-smi(?=$| (-L|-q|-i|--query-\S+|topo|--list-gpus)\b)(?!.* -(c|pl|pm|r)\b)|"
    r"conda (info|list)|git (log(?!.* --output)|rev-parse|status)|"
    r"pip (freeze|list|show)|wb (doctor|ls))( [^<>&$`(){}\n]*)?"
)
SILENCED = re.compile(r"\d?>\s*/dev/null(?=\s|$)|2>&1")
FILLED_IN = re.compile(r"\$\w+|\{\w+\}")  # IPython puts the value of a variable there


def only_looks(line: str) -> bool:
    """Whether a shell line, written after `!`, changes no file, process or device: display-only commands joined by
    pipes, no redirection to a file, and nothing that the shell or Python would run first. Unknown commands count as
    changes."""
    commands = re.split(r"\|\|?|&&|;", SILENCED.sub("", FILLED_IN.sub("value", line)))
    return all(SHOWS.fullmatch(command.strip()) for command in commands)
