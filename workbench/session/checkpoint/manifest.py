"""What a checkpoint's manifest must look like; it is checked before anything that it names is opened."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.placement import ROLES

CONTROLLER, RANDOM, LEDGER = "controller.pkl", "random.safetensors", "ledger.safetensors"


class _Values(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _File(_Values):
    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Role(_Values):
    steps: NonNegativeInt
    moments: bool
    parts: list[str]


class _Weights(_Values):
    steps: NonNegativeInt
    state: str


class _Made(_Values):
    batch: str | None = None
    metrics: dict[str, Any] | None = None


class _KeptBatch(_Values):
    batch: str


class _Waiting(_Values):
    iteration: NonNegativeInt
    stages: list[str]
    made: dict[str, _KeptBatch]
    metrics: dict[str, dict[str, Any]]
    times_drawn: list[NonNegativeInt] | None


class _State(_Values):
    run: int
    iteration: NonNegativeInt
    draws: int
    draws_ahead: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = []
    buffer: list[_Waiting] = []
    priority: str | None = None
    drawn: NonNegativeInt
    weights: dict[str, _Weights]
    prompts: dict[str, Any] | None
    streams: list[dict[str, Any]]


class _Algorithm(_Values):
    iteration: NonNegativeInt
    state: dict[str, Any]
    fields: dict[str, Any] = {}
    under_way: bool
    made: dict[str, _Made]
    last_metrics: dict[str, dict[str, Any]]


class _Manifest(_Values):
    name: str
    saved_s: float
    run_folder: str
    placement: str
    roles: dict[str, _Role]
    state: _State
    algorithm: _Algorithm | None
    files: dict[str, _File]


def check_manifest(values: Any, folder: Path) -> None:
    """Raise `BadInput` for a manifest of other fields or types, and for one that names a file outside the folder, or
    lacks one that the workbench reads."""
    try:
        found = _Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise _wrong(folder, f"{where}: {first['msg']}") from None
    for name in found.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name or not path.parts:
            raise _wrong(folder, f"it names the file {shown(name, 80)}, which is not in the folder")
    made = [] if found.algorithm is None else [one.batch for one in found.algorithm.made.values()]
    made += [one.batch for waiting in found.state.buffer for one in waiting.made.values()]
    for name in (CONTROLLER, RANDOM, *(batch for batch in made if batch is not None)):
        if name not in found.files:
            raise _wrong(folder, f"it does not name the file {shown(name, 80)}")
    for role in found.roles:
        if role not in ROLES:
            raise _wrong(folder, f"it has a role {shown(role, 80)}")


def _wrong(folder: Path, what: str) -> BadInput:
    return BadInput(
        f"the manifest of checkpoint {str(folder)!r} is damaged: {what}", "lab.save writes another one",
        "restore from another checkpoint",
    )  # fmt: skip
