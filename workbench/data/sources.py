"""Where prompts come from: a list, a .jsonl file, a bundled data set, a data set of the hub."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from workbench.errors import BadInput, MissingDependency, ModelUnavailable
from workbench.models.tokenizers import is_text

Row = dict[str, Any]
Source = str | Path | Sequence[str] | Sequence[Row]

DATASETS = Path(str(files("workbench") / "datasets"))  # in a checkout a link to the folder datasets/
HUB_TIMEOUT_S = 3.0
_NAME = re.compile(r"(?P<name>[\w.-]+)(?:/(?P<split>[\w.-]+))?")
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:/(?P<split>[\w.-]+))?")
_OTHER_FORMATS = (".json", ".csv", ".tsv", ".parquet", ".txt")
_FORMS = (
    "give a list of texts or of dicts, a path that ends in .jsonl, a name under datasets/ such as 'arithmetic' or "
    "'arithmetic/test', or a hub id such as 'openai/gsm8k'"
)


class Rows(list[Row]):
    """Rows of a source, which can say where each of them stands in it.

    lines: the line number of each row in a file, from 1; None where the source has no lines.
    """

    def __init__(self, rows: Iterable[Row], name: str, lines: Sequence[int] | None = None) -> None:
        super().__init__(rows)
        self.name, self.lines = name, lines

    def where(self, index: int) -> str:
        """Row `index` as an error names it, such as "pairs.jsonl, line 7"."""
        return f"row {index} of {self.name}" if self.lines is None else f"{self.name}, line {self.lines[index]}"


def read_rows(source: Source) -> Rows:
    """The rows of `source`, one dict a row, never empty.

    source is one of

        list of str                     rows {"prompt": text}
        list of dict                    as they are (copied), arrays as lists; so a parquet file is read by
                                        pandas.read_parquet(path).to_dict("records")
        "path/to/file.jsonl", Path      one JSON object a line; blank lines are passed over
        "arithmetic", "arithmetic/test" a folder of datasets/: its train.jsonl, or the file named behind the slash
        "openai/gsm8k"                  a data set of the hub, read by the `datasets` library: split "train" of the
                                        default configuration; "openai/gsm8k:socratic/test" names both

    Raises `BadInput` (empty, malformed or unknown source; a bad line is named by file and number), `MissingDependency`
    (hub id without the `datasets` library), `ModelUnavailable` (hub id that cannot be fetched).
    """
    if isinstance(source, (list, tuple)):
        rows = Rows(_listed(source), f"a {type(source).__name__}")
    elif isinstance(source, Path) or (isinstance(source, str) and source.endswith(".jsonl")):
        rows = _lines(Path(source).expanduser())
    elif isinstance(source, str):
        rows = _named(source)
    else:
        raise BadInput(
            f"a source of type {type(source).__name__}",
            "rows are read from a list or by name",
            f"a DataFrame gives a list by .to_dict('records'), other tables by list(table); or else {_FORMS}",
        )
    if not rows:
        raise BadInput(f"{rows.name} holds no rows", "a source has at least one row", _FORMS)
    for index, row in enumerate(rows):
        if broken := next((name for name, value in row.items() if not _is_readable(value)), None):
            raise BadInput(
                f"{rows.where(index)}: {broken!r} holds half of a surrogate pair: {row[broken]!r:.60}",
                "a text is made of characters",
                "decode the source with errors='replace', or drop the row",
            )
    return rows


def _is_readable(value: Any) -> bool:
    """Whether all texts in a value are made of characters."""
    if isinstance(value, Mapping):
        return all(map(_is_readable, value.values()))
    return is_text(value) if isinstance(value, str) else not isinstance(value, list) or all(map(_is_readable, value))


def _listed(items: Sequence[Any]) -> list[Row]:
    rows: list[Row] = []
    for index, item in enumerate(items):
        if not isinstance(item, (str, dict)) or isinstance(item, str) is not isinstance(items[0], str):
            kinds = f"{type(item).__name__}, row 0 of type {type(items[0]).__name__}" if index else type(item).__name__
            raise BadInput(
                f"row {index} is of type {kinds}",
                "a list holds texts only, or dicts only",
                "write every row as a dict such as {'prompt': 'What is 2 + 3?', 'answer': '5'}",
            )
        rows.append({"prompt": item} if isinstance(item, str) else _plain(item))
    return rows


def _plain(value: Any) -> Any:
    """A value with Python's lists and numbers in place of arrays and their numbers, such as a parquet file's are."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _lines(path: Path) -> Rows:
    if path.suffix != ".jsonl":
        raise BadInput(
            f"{str(path)!r} is no .jsonl file",
            "files are read as one JSON object a line",
            "read other formats with pandas and pass table.to_dict('records')",
        )
    if not path.is_file():
        raise BadInput(f"no file {str(path)!r}", f"paths start from {str(Path.cwd())!r}", "correct the path")
    rows, numbers = list[Row](), list[int]()
    rule = "each line is one JSON object in UTF-8"
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # bad JSON as well as bad UTF-8
                raise BadInput(f"{path}, line {number}: {error}", rule, "correct or delete the line") from error
            if not isinstance(row, dict):
                raise BadInput(f"{path}, line {number} is of type {type(row).__name__}", rule, 'write {"prompt": ...}')
            rows.append(row)
            numbers.append(number)
    return Rows(rows, str(path), numbers)


def _named(source: str) -> Rows:
    """A name under datasets/ is preferred to a hub id of the same spelling."""
    bundled = {path.parent.name for path in DATASETS.glob("*/train.jsonl")}
    local = _NAME.fullmatch(source)
    if local and local["name"] in bundled:
        path = DATASETS / local["name"] / f"{local['split'] or 'train'}.jsonl"
        if not path.is_file():
            splits = ", ".join(repr(f"{local['name']}/{p.stem}") for p in sorted(path.parent.glob("*.jsonl")))
            raise BadInput(f"no data set {source!r}", f"datasets/{local['name']} holds {splits}", "name one of these")
        return _lines(path)
    path = Path(source).expanduser()
    if path.exists() or path.suffix in _OTHER_FORMATS:
        return _lines(path)  # refuses: only .jsonl is read
    if hub := _HUB_ID.fullmatch(source):
        return Rows(_from_hub(hub["repo"], hub["config"], hub["split"] or "train"), source)
    known = ", ".join(map(repr, sorted(bundled)))
    rule = f"datasets/ holds {known}" if known else f"there are no data sets in {str(DATASETS)!r}"
    close = get_close_matches(source.partition("/")[0], bundled, n=1)
    raise BadInput(
        f"no data set {source!r}", rule, (f"did you mean {close[0]!r}? Otherwise " if close else "") + _FORMS
    )


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
    except ValueError as error:  # unknown configuration or split: the library's message lists those there are
        raise BadInput(
            f"no '{repo}:{config}/{split}'", _first_line(error), "write 'owner/name:configuration/split'"
        ) from error
    except Exception as error:  # no network, gated, a broken file: the kinds depend on the library's version
        raise _unavailable(repo, error) from error


def _datasets_library(repo: str) -> Any:
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        library = None
    # In a checkout's root, where the library is not installed, the import finds the folder datasets/ instead.
    if not hasattr(library, "load_dataset"):
        raise MissingDependency(
            f"{repo!r} is read as a data set of the hub",
            "that needs the `datasets` library, which is not installed",
            f"run `pip install datasets` and restart the kernel, or else {_FORMS}",
        )
    return library


def _check_reachable(repo: str) -> None:
    """Fail within seconds: the library retries for 20 s before it reports that there is no network."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:  # the user's word for: answer from the local cache
        return
    try:
        HfApi().dataset_info(repo, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # kinds depend on the hub client's transport
        raise _unavailable(repo, error) from error


def _unavailable(repo: str, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(
        f"the data set {repo!r} could not be fetched from the hub ({type(error).__name__}: {_first_line(error)})",
        "a hub id names data that you may read; it needs the network, or HF_HUB_OFFLINE=1 where the cache has them",
        "correct the id, or give a local .jsonl file, a list, or a name under datasets/ such as 'arithmetic'",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
