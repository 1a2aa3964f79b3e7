"""Write a notebook file as a script file (`export_notebook`), and cells as the text of a script (`script_of`)."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from workbench.display.interrupts import stoppable
from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import escaped, plain_text
from workbench.export.cells import Cell, python_of, read_notebook
from workbench.export.loops import Repeat, fold_moves, found_repeats, opening_of
from workbench.export.parameters import TAGS, Parameter, possible_parameters, take_parameters
from workbench.export.program import LINE_LENGTH, program
from workbench.export.recorded import Record, as_run, as_written, doubts, find_record, read_record
from workbench.export.selection import select
from workbench.export.statements import Statement, statements_of
from workbench.support.checked_calls import checked_call
from workbench.support.files import SHARED, path_of, write_bytes

Order = Literal["written", "run"]
TEXT_WIDTH = 94  # of a comment within main
# Keys that services issue, by their known prefixes.
KEY = re.compile(
    r"(?<![A-Za-z0-9_])(?:hf_[A-Za-z0-9]{16,}|gsk_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}"
    r"|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|pypi-[\w-]{16,}|nvapi-[\w-]{16,}|xox[abpsr]-[\w-]{10,}|A(?:KIA|SIA)[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----"
)


@dataclass(frozen=True)
class Script:
    """text: the program. told: notes on how it differs from the notebook. parameters: its options, by name."""

    text: str
    told: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # records and notebooks can come from strangers: one line each, without terminal control characters
        object.__setattr__(self, "told", tuple(plain_text(" ".join(line.splitlines())) for line in self.told))


@checked_call("export_notebook")
@stoppable("the export", ("the script is written completely, or not at all", "run the same call again"))
def export_notebook(
    notebook: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    order: Order = "written",
    parameters: Collection[str] = (),
    loops: bool = False,
    moves: Literal["opening", "steps"] = "opening",
    runs: Iterable[str | os.PathLike[str]] | None = None,
) -> Script:
    """The script of a notebook, written to `output` if that is given.

    order: "written", the page's, or "run", that in which cells were run, with the text that they had then. runs: the
    run folders of the notebook's workbenches, where what was run is recorded; None: those of its last run are looked
    for under `runs/` here, beside the notebook, and one folder up. The others: see `script_of`.

    `Script.told` names what the reader should know: cells that were edited after they were run, out of order, stale, or
    not on the page any more; moves and repeats. Raises `BadInput` that names the cell for what cannot be in a script.
    """
    path = path_of(notebook, "notebook")
    page = read_notebook(path)
    output = None if output is None else path_of(output, "output")
    if output is not None and output.suffix != ".py":
        raise BadInput(f"output={str(output)!r}", "a script's name ends in .py", f"write {output.stem + '.py'!r}")
    if output is not None and not output.absolute().parent.is_dir():
        raise BadInput(str(output), f"there is no folder {output.parent}", "create it first, or give another one")
    folders = find_record(page, path) if runs is None else [path_of(run, "runs") for run in runs]
    for folder in folders:
        if not (folder / "events.jsonl").is_file():
            raise BadInput(
                str(folder), "a run folder has events.jsonl", "give runs/NAME/DATE, the value of `lab.run_folder`"
            )
    record = read_record(folders) if folders else Record((), {})
    told: list[str] = []
    missing = [*record.settings, *(record.lost if order == "run" else ())]
    with _refusals():
        cells = as_run(page, record, missing) if order == "run" else as_written(page, record, missing, told)
    script = script_of(
        cells, parameters=parameters, loops=loops, moves=moves, placements=record.placements, missing=missing
    )
    differing = doubts(page, record)
    if order == "run":  # in which nothing is out of order, and what left the page is there
        differing = [line for line in differing if "error" in line or "not run" in line]
    script = replace(script, told=(*differing, *told, *script.told))
    if output is not None:
        write_bytes(output, script.text.encode(), mode=SHARED)
    return script


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn Python's errors about invalid code into `BadInput`."""
    try:
        yield
    except WorkbenchError:
        raise
    except (RecursionError, MemoryError):
        rule = "Python cannot read an expression with many thousands of terms"
        raise BadInput("code that is nested too deeply", rule, "split the long expression into several") from None
    except (SyntaxError, ValueError) as error:  # `break` at a margin; a null character, or half a character
        rule = "the cells together must be a Python program"
        raise BadInput(f"{type(error).__name__}: {error}", rule, "correct the cell, or tag it `skip-export`") from None


@_refusals()
def script_of(
    cells: Sequence[Cell],
    *,
    parameters: Collection[str] = (),
    loops: bool = False,
    moves: str = "opening",
    placements: Mapping[str, str] | None = None,
    missing: Sequence[str] = (),
) -> Script:
    """A program of the cells, in their order.

    parameters: names of assignments that become options, beside those of cells tagged `parameters`. loops: write lines
    that are repeated as a loop; how often becomes an option. moves: "opening": a workbench that was moved opens where
    it ended; "steps": the moves stay. placements: name of a workbench -> where it ended, as an expression, where that
    was recorded. missing: what the notebook did and no cell says, a sentence each: they stand in the script's head.

    Raises `BadInput` that names the cell for what cannot be in a script.
    """
    code = [cell for cell in cells if cell.exported]
    if not code:
        raise BadInput(
            "a notebook without code", "a script needs code", "save the notebook, or check the tags `skip-export`"
        )
    statements = [statement for cell in code for statement in statements_of(cell)]
    options, statements = take_parameters(statements, parameters)
    tagged = bool(options)
    kept = select(statements, [option.name for option in options])
    told = list(missing)
    if moves == "opening":
        kept, said = fold_moves(kept, placements or {})
        told += said
    steps = found_repeats(kept)
    repeats = [step for step in steps if isinstance(step, Repeat)]
    for number, repeat in enumerate(repeats, 1):
        repeat.number = number
    if loops:
        options += [Parameter(one.name, "int", str(one.count), f"how often ({one})") for one in repeats]
    else:
        told += [f"{repeat}; `--loops` writes them as a loop" for repeat in repeats]
        steps = list(kept)
    told += [
        f"{statement.cell} opens with if_exists='replace', and so does the script: it ends a workbench of that name"
        for statement in kept
        if (opening := opening_of(statement)) and "if_exists='replace'" in ast.unparse(opening)
    ]
    bound = Counter(name for statement in kept for name in statement.names.binds)
    text = program(_title(cells), options, steps, bound, _explanations(cells, kept))
    for cell in code:
        lines = [ast.unparse(one.node).replace("\n    ", " ") for one in kept if one.cell is cell and cell.by]
        told += [f"{cell}: `{'; '.join(lines)}` is in the script, but in no cell"] * bool(lines)
    told += [f"{cell}: {said}" for cell in code for said in python_of(cell)[1]]
    if not tagged and (possible := possible_parameters(kept)):
        names = [name for statement in possible for name in sorted(statement.names.binds)]
        places = ", ".join(dict.fromkeys(str(statement.cell) for statement in possible))
        become = "become options if their cell in the notebook has the tag `parameters`"
        none = "This script has no options of its own."
        text = _with_head(
            text, f"{none} {', '.join(names)} {become}; or list them: `wb export NOTEBOOK --parameters NAME ...`."
        )
        told.append(f"{none} {', '.join(names)} ({places}) {become}, or by `--parameters {' '.join(names)}`")
    for line in reversed(missing):
        text = _with_head(text, plain_text(f"Not in this script: {' '.join(line.split())}."))
    compile(text, "script", "exec")
    told += _keys_told(cells, text)
    return Script(text, tuple(told), tuple(option.name for option in options))


def _with_head(script: str, told: str) -> str:
    comment = textwrap.wrap(told, LINE_LENGTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
    lines, first = script.split("\n"), ast.parse(script).body[0]
    docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    end = (first.end_lineno or 0) if docstring else 0
    return "\n".join([*lines[:end], *[""] * docstring, *comment, *[""] * (not docstring), *lines[end:]])


def _keys_told(cells: Sequence[Cell], text: str) -> list[str]:
    """The cell and line of each text that looks like a service's API key and is also in the script."""
    told = []
    for cell in cells:
        numbered = enumerate(cell.text.split("\n"), 1)
        lines = [str(number) for number, line in numbered if any(key in text for key in KEY.findall(line))]
        if lines:
            told.append(
                f"{cell} seems to hold a key in line {', '.join(lines)}; the script has it too: "
                "read it from the environment instead"
            )
    return told


def _title(cells: Sequence[Cell]) -> str:
    """The first text of the page, if it comes before any code."""
    above = next((cell for cell in cells if not cell.blank), None)
    if above is None or above.code:
        return ""
    first, _, rest = escaped(above.text).strip().partition("\n")
    return f"{first.lstrip('#').strip()}\n{rest}".strip()


def _explanations(cells: Sequence[Cell], kept: Sequence[Statement]) -> dict[int, str]:
    """The page's text above a cell, by the first kept statement below it."""
    first_of: dict[int, Statement] = {}
    for statement in kept:
        if statement.is_import:
            continue
        before = first_of.get(id(statement.cell))
        if before is None or (before.is_definition and not statement.is_definition):
            first_of[id(statement.cell)] = statement
    explained: dict[int, str] = {}
    texts: list[str] = []
    for cell in [cell for cell in cells if not cell.blank][bool(_title(cells)) :]:  # without the title
        if not cell.code:
            texts.append(cell.text)
            continue
        if id(cell) in first_of and texts and not cell.tags & TAGS:
            explained[id(first_of[id(cell)])] = "\n\n".join(map(_plain, texts))
        texts.clear()
    return explained


def _plain(text: str) -> str:
    """Remove heading signs from Markdown, and wrap long paragraphs."""
    lines: list[str] = []
    for line in escaped(text).strip().split("\n"):
        lines += [line.lstrip("#").strip(), ""] if line.startswith("#") else [line.rstrip()]
    return "\n\n".join(map(_wrapped, re.split(r"\n{2,}", "\n".join(lines).strip())))


def _wrapped(paragraph: str) -> str:
    lines = paragraph.split("\n")
    running = all(line[:1].isalnum() or line[:1] in '*`("' for line in lines) and not lines[0].startswith("* ")
    if not running or max(map(len, lines)) <= TEXT_WIDTH:
        return paragraph
    return "\n".join(textwrap.wrap(paragraph, TEXT_WIDTH, break_long_words=False, break_on_hyphens=False))
