"""`wb.toolbox`: ready-made tools for `wb.Tools`.

    wb.Tools([wb.toolbox.calculator])
    wb.Tools([wb.toolbox.search(["Paris is the capital of France.", ...])])
    wb.Tools([wb.toolbox.python])

None of them uses a network.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import operator
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from workbench.data.sandbox import REMEDY, check_sandbox, run_python
from workbench.data.sources import read_rows
from workbench.data.tools import Tool
from workbench.errors import BadInput, MissingDependency
from workbench.support.calls.needs import needs
from workbench.support.checked_calls import checked_call
from workbench.support.validation import PositiveInt

MOST_BITS = 4096  # bits of a whole number: 1,234 digits
MOST_PLACES = 400  # decimal places for rounding; floats have 308
MOST_DEPTH = 64  # levels of nesting in a formula
OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def _round(value: Any, places: int | None = None) -> Any:
    if places is not None and abs(places) > MOST_PLACES:
        raise OverflowError("there are too many places")
    return round(value, places)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}
PYTHON_S = 5.0  # less than `timeout_s` of `wb.Tools`
TEXT_FILES = ("*.txt", "*.md")
WORD = re.compile(r"\w+")


@checked_call("wb.toolbox.calculator")
def calculator(expression: str) -> int | float:
    """Calculate the value of a formula.

    Args:
        expression: The formula, such as "12 * (3 + 4) / 2" or "sqrt(2)". "^" and "**" are powers.
    """
    try:
        tree = ast.parse(expression.replace("^", "**").strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadInput(f"{expression!r:.80}", "is not a formula that can be read") from None
    try:
        value = _value(tree.body, 0)
    except ZeroDivisionError:
        raise BadInput(f"{expression!r:.80}", "divides by zero") from None
    except (OverflowError, ValueError, TypeError) as error:
        raise BadInput(f"{expression!r:.80}", f"has no value: {error}") from None
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise BadInput(f"{expression!r:.80}", "has no value among the real numbers")
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _value(node: ast.AST, depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise ValueError("it is too deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _small(node.value)
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand, depth + 1))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            if isinstance(left, int) and isinstance(right, int) and (left.bit_length() - 1) * right > MOST_BITS:
                raise OverflowError("it is too large")
            return _small(left**right)
        if type(node.op) in OPERATORS:
            return _small(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if (function := FUNCTIONS.get(node.func.id)) is None:
            raise ValueError(f"there is no function {node.func.id!r:.40}; there are {', '.join(FUNCTIONS)}")
        return _small(function(*(_value(argument, depth + 1) for argument in node.args)))
    raise ValueError("it may have numbers, + - * / // % ^, brackets, and functions such as sqrt")


def _small(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise OverflowError("it is too large")
    return value


# --- search -----------------------------------------------------------------------------------------------------------


@checked_call("wb.toolbox.search")
def search(
    corpus: Sequence[str | Mapping[str, Any]] | str | Path, *, results: PositiveInt = 3,
    words: Annotated[PositiveInt, Field(le=64)] = 60, name: str = "search",
) -> Tool:  # fmt: skip
    """Make a tool that finds texts of a corpus by their words, best match first (SQLite's full-text search, BM25).

    corpus: texts; or rows with a "text" and perhaps a "title"; or a file of such rows, see `read_rows`; or a folder,
        whose .txt and .md files are the texts, with their names as titles. The index is kept under `$WORKBENCH_HOME`,
        and made again if the corpus has changed. On a cluster, all machines must see that folder.
    results: the most results of one call. words: words to show around a match, at most 64. name: the tool's name.

    To try it: `tool.function("capital France")`. Raises `BadInput` for a corpus without texts.
    """
    if not name.isidentifier():
        raise BadInput(f"name={name!r:.60}", "the name of a tool must be one word", "write name='search_papers'")
    rows = list(_rows(corpus))
    if not rows:
        raise BadInput("a corpus without texts", "a search needs texts", "give texts, or a folder of them")
    path = _index(rows)

    def find(query: str) -> list[dict[str, str]]:
        """Find texts by words.

        Args:
            query: Words to look for.
        """
        return _found(str(path), query, results, words)

    find.__name__ = name
    return Tool.of(find)


def _rows(corpus: Any) -> Iterator[tuple[str, str]]:
    if isinstance(corpus, str | Path):
        path = Path(corpus).expanduser()
        if path.is_dir():
            for file in sorted(file for pattern in TEXT_FILES for file in path.rglob(pattern)):
                yield file.stem, file.read_text(errors="replace")
            return
        if not path.exists():
            raise BadInput(
                f"corpus={str(corpus)!r:.80}", f"there is no such file or folder in {str(Path.cwd())!r:.80}",
                "give the path of a folder or a file of rows; texts of your own go in a list: search(['...'])",
            )  # fmt: skip
        corpus = read_rows(path, conventions=False)
    for n, row in enumerate(corpus):
        text, title = (row, "") if isinstance(row, str) else (None, "")
        if isinstance(row, Mapping):
            text, title = row.get("text"), row.get("title", "")
        if not isinstance(text, str) or not isinstance(title, str):
            raise BadInput(f"entry {n} of a corpus, {row!r:.60}", "'text' and 'title' are texts", 'write {"text": ...}')
        yield title, text


def _index(rows: Sequence[tuple[str, str]]) -> Path:
    """Return the path of the search index of these rows, and make the index if it is missing."""
    from workbench.support.files import home, locked, private_folder, replacing

    key = hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
    path = private_folder(home() / "search") / f"{key}.sqlite"
    with locked("search"):
        if not path.exists():
            with replacing(path) as file, closing(sqlite3.connect(file.name)) as database, database:
                database.execute("CREATE VIRTUAL TABLE texts USING fts5(title, text, tokenize='porter unicode61')")
                database.executemany("INSERT INTO texts VALUES (?, ?)", rows)
    return path


def _found(path: str, query: str, results: int, words: int) -> list[dict[str, str]]:
    if not (asked := list(dict.fromkeys(WORD.findall(query)))):
        raise BadInput(f"query={query!r:.80}", "has no words")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        rows = database.execute(
            "SELECT title, snippet(texts, 1, '', '', ' ... ', ?) FROM texts WHERE texts MATCH ? ORDER BY rank LIMIT ?",
            (words, " OR ".join(f'"{word}"' for word in asked[:64]), results),
        ).fetchall()
    return [{"title": title, "text": text} if title else {"text": text} for title, text in rows]


# --- code -------------------------------------------------------------------------------------------------------------


@needs(check_sandbox)
@checked_call("wb.toolbox.python")
def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It has no network, sees no files, and may run for five seconds. Print what you want to see.
    """
    ran = run_python(code, timeout_s=PYTHON_S)
    if not ran.began:
        raise MissingDependency(f"the sandbox did not start: {ran.stderr.strip():.200}", "", REMEDY)
    if ran.ended != "exit":
        limits = {"time": f"it took more than {PYTHON_S:g} s", "memory": "it took too much memory"}
        return f"{ran.stdout}\n({limits.get(ran.ended, 'it started too many processes or threads')})".strip()
    if ran.exit_code:
        return f"{ran.stdout}\n{ran.stderr.strip()[-2000:]}".strip()
    return ran.stdout
