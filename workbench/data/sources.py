"""Reads rows from a source: a list, a frame, a file, a bundled data set, a data set of the hub.

| recognised by | convention of | becomes |
| --- | --- | --- |
| `prompt`, and `reward_model` with a `ground_truth` | verl | `answer` is the ground truth |
| `context_messages`, or `input` | OpenRLHF | `messages`, or `prompt`; `output`, or else a text `label`, is `answer` |
| messages in `prompt` or `messages` | TRL | as they are; JSON schemas in `tools` are shown to the model |
| `instruction` with `output` | Alpaca | `prompt`, followed by `input`; `answer` |
| `conversations` of `from` and `value` | ShareGPT | `messages` |
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from workbench.data import readers
from workbench.data.readers import (
    READERS,
    BadRows,
    Blocks,
    Placed,
    Row,
    Rows,
    Skipped,
    file_blocks,
    named,
    numbered,
    table_blocks,
)
from workbench.errors import BadInput, MissingDependency, ModelUnavailable
from workbench.errors.plain_text import first_line, shown
from workbench.models.tokenizers import has_texts
from workbench.support.checked_calls import checked_call

PROMPT_COLUMNS = ("prompt", "question", "messages", "problem")
PICTURES = ("image", "images", "videos")  # columns of data sets for models that see
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "function_call": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


class Convention(NamedTuple):
    """A naming convention for columns. name: for messages; "" if the columns have our names. holds: whether a row
    follows it. read: renames columns; None: they keep their names."""

    name: str
    holds: Callable[[Row], bool]
    read: Callable[[Row], Row] | None = None

    def of(self, row: Row, where: str) -> Row:
        """Return the row with our column names. Raises `BadInput` for a row that does not follow the convention."""
        if self.read is None:
            return row
        if not self.holds(row):
            raise BadInput(
                f"{where} has only {', '.join(map(repr, row))}", f"the first row has {self.name}",
                "complete the row, or drop it",
            )  # fmt: skip
        return self.read(row)


def convention_of(row: Row) -> Convention:
    """Return the convention of a source, from its first row."""
    return next(one for one in CONVENTIONS if one.holds(row))


def _has_messages(value: object, *keys: str) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(one, Mapping) and all(key in one for key in keys) for one in value)  # type: ignore[attr-defined]


def _without_prompt(row: Row) -> bool:
    return not any(name in row for name in PROMPT_COLUMNS)


def _of_openrlhf(row: Row) -> Row:
    name = "context_messages" if "context_messages" in row else "input"
    prompt = "prompt" if isinstance(row[name], str) or "chosen" in row or "output" in row else "messages"
    found = {prompt: row[name], **{key: value for key, value in row.items() if key not in (name, "output")}}
    answers = [row[key] for key in ("output", "label") if isinstance(row.get(key), str)]
    return {"answer": answers[0], **found} if answers else found


def _of_alpaca(row: Row) -> Row:
    rest = {key: value for key, value in row.items() if key not in ("instruction", "input", "output")}
    more = row.get("input")
    prompt = f"{row['instruction']}\n\n{more}" if isinstance(more, str) and more.strip() else row["instruction"]
    return {"prompt": prompt, "answer": row["output"], **rest}


def _of_sharegpt(row: Row) -> Row:
    rest = {key: value for key, value in row.items() if key != "conversations"}
    messages = [{"role": SPEAKERS[one["from"]], "content": one["value"]} for one in row["conversations"]]
    return {"messages": messages, **rest}


def _is_sharegpt(row: Row) -> bool:
    turns = row.get("conversations")
    return _without_prompt(row) and _has_messages(turns, "from", "value") and all(t["from"] in SPEAKERS for t in turns)  # type: ignore[union-attr]


CONVENTIONS = (
    Convention(
        "verl's columns: the answer is reward_model['ground_truth']",
        lambda row: "prompt" in row and isinstance(r := row.get("reward_model"), Mapping) and "ground_truth" in r,
        lambda row: {"answer": row["reward_model"]["ground_truth"], **row},
    ),
    Convention(
        "Alpaca's columns: 'instruction' with 'input' is the prompt, 'output' the answer",
        lambda row: _without_prompt(row) and isinstance(row.get("instruction"), str) and "output" in row,
        _of_alpaca,
    ),
    Convention("ShareGPT's 'conversations': messages with 'from' and 'value'", _is_sharegpt, _of_sharegpt),
    Convention(
        "OpenRLHF's columns: 'context_messages' or 'input' is the prompt, 'output' or 'label' the answer",
        lambda row: _without_prompt(row) and ("context_messages" in row or "input" in row),
        _of_openrlhf,
    ),
    Convention(
        "TRL's conversations: messages in 'prompt' or 'messages'",
        lambda row: any(_has_messages(row.get(name), "role", "content") for name in ("prompt", "messages")),
    ),
    OURS := Convention("", lambda row: True),
)


Source = Any  # see `read_rows`

DATASETS = Path(str(files("workbench") / "datasets"))  # in a checkout, a link to the folder datasets/
HUB_TIMEOUT_S = 3.0
BLOCK_ROWS = 65_536  # rows in a block of a data set in memory-mapped files
_NAME = re.compile(r"(?P<name>[\w.-]+)(?:/(?P<split>[\w.-]+))?")
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:/(?P<split>[\w.-]+))?")
_FORMS = (
    f"give a list of texts or of dicts, a pandas frame, a path that ends in {', '.join(READERS)}, "
    "a name under datasets/ such as 'arithmetic' or "
    "'arithmetic/test', or a hub id such as 'openai/gsm8k'"
)


@checked_call("read_rows")
def read_rows(source: Source, *, bad_rows: BadRows = "error", conventions: bool = True) -> Rows:
    """Return the rows of `source`, one dict per row, never empty.

    source is one of

        list of str                     rows {"prompt": text}
        list of dict                    the dicts (copied), with arrays as lists, and keys as texts
        generator, iterator             its items, read like a list; it must end
        a pandas frame                  its rows; missing values become None
        a table of arrow or polars, a split of the `datasets` library (Dataset, IterableDataset)
        "file.jsonl", Path              one JSON object per line; blank lines are skipped
        "file.json"                     a JSON list of objects
        "file.csv", "file.tsv"          the first line names the columns; all values are texts
        "file.parquet", ".arrow", ".feather"    read by pyarrow
        "arithmetic", "gsm8k/test"      a folder of datasets/: its train.jsonl, or the file named after the slash
        "openai/gsm8k"                  a data set of the hub, read by the `datasets` library: split "train" of the
                                        default configuration; "openai/gsm8k:socratic/test" names both

    bad_rows: "error": an unreadable row raises `BadInput`, which gives its number and the reason; "skip": the row is
    left out, and the rows' `skipped` lists both. conventions: whether columns of verl, TRL, OpenRLHF, Alpaca and
    ShareGPT are recognised by the first row, see `workbench.data.sources`; the rows' `read_as` has the convention. Rows
    that lack its columns, and rows with pictures, are unreadable.

    Raises `BadInput` (empty, malformed or unknown source; with file and line number), `MissingDependency` (the library
    that reads a file or hub id is missing), `ModelUnavailable` (hub id that cannot be fetched).
    """
    name, items = _named_rows(source)
    rows, first, convention = Rows(name, Skipped(bad_rows)), None, None if conventions else OURS
    for placed in items:
        first = first or placed
        try:
            row = row_of(placed, first, name)
            convention = convention or convention_of(row)
            rows.append(convention.of(row, named(placed.place, name)))
        except BadInput as error:
            rows.skipped.add(error)
        else:
            rows.numbers.append(placed.number)
            rows.places.append(placed.place)
    if not rows:
        reason = f"; {rows.skipped[0]}" if rows.skipped else ""
        raise BadInput(f"{name} holds no rows{reason}", "a source needs at least one row", _FORMS)
    rows.read_as = convention.name if convention else ""
    return rows


def row_of(placed: Placed, first: Placed, source: str) -> Row:
    """Return a row as a dict; raise `BadInput` for an unusable row. first: the first row, whose type all must have."""
    item, place = placed.row, placed.place
    if isinstance(item, BadInput):
        raise item
    if not isinstance(item, (str, dict)) or isinstance(item, str) is not isinstance(first.row, str):
        kinds = type(item).__name__
        kinds += "" if placed is first else f", {first.place} of type {type(first.row).__name__}"
        remedy = "write every row as a dict such as {'prompt': 'What is 2 + 3?', 'answer': '5'}"
        raise BadInput(f"{place} is of type {kinds}", "a list must hold only texts, or only dicts", remedy)
    row: Row = {"prompt": item} if isinstance(item, str) else {str(name): one for name, one in _plain(item).items()}
    if isinstance(item, dict) and len(row) < len(item):
        raise BadInput(f"{named(place, source)} has columns {shown([*item])}", "names are unique texts", "rename one")
    if seen := [name for name in PICTURES if row.get(name)]:
        rule = "models read only texts here, and would miss what the row shows"
        raise BadInput(f"{named(place, source)} has {seen[0]!r}", rule, "drop the row, or the column if texts suffice")
    broken = next((name for name, value in row.items() if not has_texts(value)), None)
    if broken is not None:
        raise BadInput(
            f"{named(place, source)}: {broken!r} has half a character: {shown(row[broken])}",
            "texts are Unicode without lone surrogates",
            "decode the source with errors='replace', or drop the row",
        )
    return row


def _named_rows(source: Source) -> tuple[str, Iterable[Placed]]:
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith(tuple(READERS))):
        return _of_file(Path(source).expanduser())
    if isinstance(source, str):
        return _named(source)
    return f"a {type(source).__name__}", numbered(_items(source))


def _of_file(path: Path) -> tuple[str, Iterable[Placed]]:
    blocks = file_blocks(path, whole=True)
    return str(path), (placed for block in range(blocks.count) for placed in blocks.read(block))


def blocks_of(source: Source) -> Blocks:
    """Return the blocks of a source that is larger than memory: a .jsonl, .csv, .tsv, .parquet, .arrow or .feather
    file, a split of the `datasets` library, or a generator function, which is called for each reading. Raises
    `BadInput` for other sources."""
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith(tuple(READERS))):
        return file_blocks(Path(source).expanduser(), whole=False)
    if inspect.isgeneratorfunction(source):
        return Blocks(lambda block: numbered(source()), {"function": source.__qualname__})
    if type(source).__module__.partition(".")[0] == "datasets":
        if hasattr(source, "select"):
            starts = range(0, len(source), BLOCK_ROWS)
            sizes = [min(BLOCK_ROWS, len(source) - start) for start in starts]
            identity = {"rows": len(source), "columns": list(source.column_names)}
            return table_blocks(sizes, lambda block: _ranges(source, starts[block], sizes[block]), identity)
        if not hasattr(source, "items"):
            return Blocks(lambda block: numbered(source), {"columns": source.column_names})
    raise BadInput(
        f"stream=True with a source of type {type(source).__name__}",
        "a stream reads a .jsonl, .csv, .tsv, .parquet, .arrow or .feather file, a split of the datasets library, or "
        "calls a generator function",
        "leave stream= out: data in memory need no stream",
    )


def _ranges(source: Any, start: int, count: int) -> Iterator[list[Row]]:
    for first in range(start, start + count, readers.READ_ROWS):
        columns = source[first : min(first + readers.READ_ROWS, start + count)]
        yield [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def kept_source(source: Source) -> Source:
    """Return a source that can be read repeatedly: a list for a generator or another iterator, else the source."""
    if isinstance(source, Mapping) and "source" in source:
        return {**source, "source": kept_source(source["source"])}
    return list(source) if isinstance(source, Iterator) else source


def _items(source: Source) -> Iterable[Any]:
    """Return the rows of a source that is neither a file nor a name."""
    if isinstance(source, (list, tuple)):
        return source
    library = type(source).__module__.partition(".")[0]
    if library == "pandas" and hasattr(source, "to_dict") and hasattr(source, "columns"):
        return ({str(n): _present(v) for n, v in row.items()} for row in source.to_dict("records"))
    if library == "datasets" and isinstance(source, Mapping):
        splits = ", ".join(map(repr, source))
        raise BadInput(f"a {type(source).__name__}", f"it holds the splits {splits}", "give one of them: data['train']")
    for method in ("to_pylist", "to_dicts"):  # tables of arrow, frames of polars
        if library in ("pyarrow", "polars") and hasattr(source, method):
            return getattr(source, method)()
    if inspect.isgeneratorfunction(source):
        return source()
    if library == "datasets" or isinstance(source, Iterator):
        return source
    raise BadInput(
        f"a source of type {type(source).__name__}",
        "rows are read from a list, a frame, a generator, or by name",
        f"convert other tables by list(table) or .to_dict('records'); or {_FORMS}",
    )


def _present(value: Any) -> Any:
    """Return a frame's value; None for a value that pandas uses for missing ones."""
    import pandas as pd

    return None if value is pd.NA or value is pd.NaT or (isinstance(value, float) and value != value) else value


def _plain(value: Any) -> Any:
    """Return a value with Python lists and numbers in place of arrays and NumPy numbers, such as a parquet file has."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _named(source: str) -> tuple[str, Iterable[Placed]]:
    """Return the name and rows of a source given by name. Prefers a name under datasets/ to an equal hub id."""
    bundled = {path.parent.name for path in DATASETS.glob("*/*.jsonl")}
    local = _NAME.fullmatch(source)
    if local and local["name"] in bundled:
        path = DATASETS / local["name"] / f"{local['split'] or 'train'}.jsonl"
        if not path.is_file():
            splits = ", ".join(repr(f"{local['name']}/{p.stem}") for p in sorted(path.parent.glob("*.jsonl")))
            raise BadInput(f"no data set {source!r}", f"datasets/{local['name']} holds {splits}", "name one of these")
        return _of_file(path)
    path = Path(source).expanduser()
    if path.exists() or path.suffix == ".txt":
        return _of_file(path)  # raises an error, because the name has no known ending
    known = ", ".join(map(repr, sorted(bundled)))
    head, _, split = source.partition("/")
    hub = _HUB_ID.fullmatch(source)
    close = "".join(get_close_matches(head, bundled, n=1, cutoff=0.8 if hub else 0.6))
    remedy = (f"did you mean {close!r}? Otherwise " if close else "") + _FORMS
    if hub:
        if split not in {path.stem for path in (DATASETS / close).glob("*.jsonl")}:
            return source, numbered(_from_hub(hub["repo"], hub["config"], hub["split"] or "train"))
        remedy = f"did you mean '{close}/{split}'? A data set of the hub with that name is '{source}/train'"
    raise BadInput(f"no data set {source!r}", f"datasets/ holds {known}", remedy)


def _from_hub(repo: str, config: str | None, split: str) -> list[Row]:
    library = _datasets_library(repo)
    _check_reachable(repo)
    try:
        if not (config := config or library.get_dataset_default_config_name(repo)):
            names = library.get_dataset_config_names(repo)
            if "main" not in names:
                rule = f"it has the configurations {', '.join(names)}"
                raise BadInput(f"the data set {repo!r} without a configuration", rule, f"write '{repo}:{names[0]}'")
            config = "main"
        return [dict(row) for row in library.load_dataset(repo, config, split=split)]
    except BadInput:
        raise
    except ValueError as error:  # unknown configuration or split: the library's message lists the existing ones
        raise BadInput(
            f"no '{repo}:{config}/{split}'", first_line(error), "write 'owner/name:configuration/split'"
        ) from error
    except Exception as error:  # no network, gated, a broken file: the classes depend on the library's version
        raise _unavailable(repo, error) from error


def _datasets_library(repo: str) -> Any:
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        library = None
    # Without the library, an import in a checkout's root finds the folder datasets/ instead.
    if not hasattr(library, "load_dataset"):
        rule = f"it reads {repo!r} as a data set of the hub"
        raise MissingDependency.of("the library datasets", rule, "data", f"`pip install datasets`; or {_FORMS}")
    return library


def _check_reachable(repo: str) -> None:
    """Raise `ModelUnavailable` within seconds without a network; the library would retry for 20 s first."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:  # the user asks for the local cache
        return
    try:
        HfApi().dataset_info(repo, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the classes depend on the hub client's transport
        raise _unavailable(repo, error) from error


def _unavailable(repo: str, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(
        f"the data set {repo!r} could not be fetched from the hub ({type(error).__name__}: {first_line(error)})",
        "a hub id must name data that you may read; it needs the network, or HF_HUB_OFFLINE=1 if the cache has them",
        "correct the id, or give a local .jsonl file, a list, or a name under datasets/ such as 'arithmetic'",
    )
