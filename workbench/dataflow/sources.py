"""Where prompts come from: a list, a .jsonl file, a data set of the repository's datasets/ folder, a data set of the hub."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from workbench.errors import BadInput, MissingDependency, ModelUnavailable

Row = dict[str, Any]
Source = str | Path | Sequence[str] | Sequence[Row]

DATASETS = Path(__file__).resolve().parents[2] / "datasets"
HUB_TIMEOUT_S = 3.0
_NAME = re.compile(r"(?P<name>[\w.-]+)(?:/(?P<split>[\w.-]+))?")
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:/(?P<split>[\w.-]+))?")
_FORMS = (
    "give a list of texts or of dicts, a path that ends in .jsonl, a name under datasets/ such as 'arithmetic' or "
    "'arithmetic/test', or a hub id such as 'openai/gsm8k'"
)


def read_rows(source: Source) -> list[Row]:
    """The rows of `source`, one dict a row, never empty.

    source:
        list of str                     rows {"prompt": text}
        list of dict                    as they are (copied)
        "path/to/file.jsonl", Path      one JSON object a line; blank lines are passed over
        "arithmetic", "arithmetic/test" a folder of datasets/: its train.jsonl, or the file named behind the slash
        "openai/gsm8k"                  a data set of the Hugging Face hub, through the `datasets` library: split "train" of
                                        the default configuration; "openai/gsm8k:socratic/test" names both

    Raises `BadInput` (empty, malformed or unknown source; a bad line is named by file and number), `MissingDependency`
    (hub id without the `datasets` library), `ModelUnavailable` (hub id that cannot be fetched).
    """
    if isinstance(source, (list, tuple)):
        rows, name = _listed(source), f"a {type(source).__name__}"
    elif isinstance(source, Path) or (isinstance(source, str) and source.endswith(".jsonl")):
        rows, name = _lines(Path(source).expanduser()), str(source)
    elif isinstance(source, str):
        rows, name = _named(source), source
    else:
        raise BadInput(f"a source of type {type(source).__name__}", "rows are read from a list or by name", f"{_FORMS}; "
                       "a DataFrame gives such a list by .to_dict('records'), other tables by list(table)")  # fmt: skip
    if not rows:
        raise BadInput(f"{name} holds no rows", "a source has at least one row", _FORMS)
    return rows


def _listed(items: Sequence[Any]) -> list[Row]:
    rows: list[Row] = []
    for index, item in enumerate(items):
        if type(item) is not type(items[0]) or not isinstance(item, (str, dict)):
            raise BadInput(
                f"row {index} is of type {type(item).__name__}"
                + (f", row 0 is of type {type(items[0]).__name__}" if index else ""),
                "a list holds texts only, or dicts only",
                "write every row as a dict such as {'prompt': 'What is 2 + 3?', 'answer': '5'}",
            )
        rows.append({"prompt": item} if isinstance(item, str) else dict(item))
    return rows


def _lines(path: Path) -> list[Row]:
    if path.suffix != ".jsonl":
        raise BadInput(f"{str(path)!r} is no .jsonl file", "files are read as one JSON object a line",
                       "read other formats with pandas and pass table.to_dict('records')")  # fmt: skip
    if not path.is_file():
        raise BadInput(
            f"no file {str(path)!r}", "a path is taken from the current folder, " + repr(str(Path.cwd())), "correct it"
        )
    rows: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # both bad JSON and bad UTF-8
                raise BadInput(f"{path}, line {number}: {error}", "each line is one JSON object in UTF-8",
                               "correct the line; a file that is one JSON list is no .jsonl: read it and pass the list") from error  # fmt: skip
            if not isinstance(row, dict):
                raise BadInput(f"{path}, line {number} is of type {type(row).__name__}", "each line is one JSON object",
                               'write it as {"prompt": ...}')  # fmt: skip
            rows.append(row)
    return rows


def _named(source: str) -> list[Row]:
    """A name under datasets/ goes before a hub id of the same spelling."""
    bundled = {path.parent.name for path in DATASETS.glob("*/train.jsonl")}
    local = _NAME.fullmatch(source)
    if local and local["name"] in bundled:
        path = DATASETS / local["name"] / f"{local['split'] or 'train'}.jsonl"
        if not path.is_file():
            splits = ", ".join(repr(f"{local['name']}/{p.stem}") for p in sorted(path.parent.glob("*.jsonl")))
            raise BadInput(f"no data set {source!r}", f"datasets/{local['name']} holds {splits}", "name one of these")
        return _lines(path)
    hub = _HUB_ID.fullmatch(source)
    if hub and not Path(source).exists() and Path(source).suffix not in (".json", ".csv", ".tsv", ".parquet", ".txt"):
        return _from_hub(hub["repo"], hub["config"], hub["split"] or "train")
    if Path(source).suffix or Path(source).exists():
        return _lines(Path(source))  # a file of another kind: the message for files says more
    where = (
        f"datasets/ holds {', '.join(map(repr, sorted(bundled)))}"
        if bundled
        else f"there are no data sets in {str(DATASETS)!r}"
    )
    close = get_close_matches(source.partition("/")[0], bundled, n=1)
    raise BadInput(
        f"no data set {source!r}", where, (f"did you mean {close[0]!r}? Otherwise " if close else "") + _FORMS
    )


def _from_hub(repo: str, config: str | None, split: str) -> list[Row]:
    # From a checkout's root `import datasets` finds the folder datasets/ where the library is not installed.
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        library = None
    if not hasattr(library, "load_dataset"):
        raise MissingDependency(
            f"the hub data set {repo!r} needs the `datasets` library",
            "it is not installed",
            f"run `pip install datasets` and restart the kernel, or else {_FORMS}",
        )
    _check_reachable(repo)
    try:
        config = config or library.get_dataset_default_config_name(repo)
        if config is None:
            names = library.get_dataset_config_names(repo)
            config = "main" if "main" in names else None
            if config is None:
                raise BadInput(
                    f"{repo!r} without a configuration", f"it has {', '.join(names)}", f"write '{repo}:{names[0]}'"
                )
        return [dict(row) for row in library.load_dataset(repo, config, split=split)]
    except BadInput:
        raise
    except ValueError as error:  # unknown configuration or split; the library's message lists those there are
        raise BadInput(f"{repo}:{config}/{split}", str(error), "write 'owner/name:configuration/split'") from error
    except Exception as error:
        raise _unavailable(repo, error) from error


def _check_reachable(repo: str) -> None:
    """Fail within seconds: the library by itself retries for 20 s before it says that there is no network."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:  # the user's word for: answer from the local cache
        return
    try:
        HfApi().dataset_info(repo, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # kinds depend on the hub client's transport
        raise _unavailable(repo, error) from error


def _unavailable(repo: str, error: Exception) -> ModelUnavailable:
    reason = (str(error).strip().splitlines() or ["no message"])[0]
    return ModelUnavailable(
        f"the data set {repo!r} could not be fetched from the hub",
        f"{type(error).__name__}: {reason}",
        "if it was fetched before, set HF_HUB_OFFLINE=1 before the kernel starts and the library's cache answers; "
        f"otherwise give a local .jsonl file, a list, or a name under datasets/ such as 'arithmetic'",
    )
