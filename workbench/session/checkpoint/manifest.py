"""What a checkpoint's manifest holds; it is checked before anything that it names is opened."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.settings.roles import ROLES

FORMAT: Literal[4] = 4
CONTROLLER, RANDOM, LEDGER = "controller.pkl", "random.safetensors", "ledger.safetensors"


def _inside(name: str) -> str:
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise ValueError(f"the file {shown(name, 80)} is not in the folder")
    return name


def _known(role: str) -> str:
    if role not in ROLES:
        raise ValueError(f"there is no role {shown(role, 80)}")
    return role


class _Values(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _File(_Values):
    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Role(_Values):
    layout: str
    steps: NonNegativeInt
    moments: bool
    loss_scale: list[float] | None
    parts: list[str]


class _Weights(_Values):
    steps: NonNegativeInt
    state: str


class _Made(_Values):
    batch: str | None = None
    metrics: dict[str, Any] | None = None


class _Waiting(_Values):
    iteration: NonNegativeInt
    stages: list[str]
    made: dict[str, _Made]
    metrics: dict[str, dict[str, Any]]
    times_drawn: list[NonNegativeInt] | None


class _State(_Values):
    run: int
    iteration: NonNegativeInt
    draws: int
    draws_ahead: list[list[int]]
    buffer: list[_Waiting]
    priority: str | None
    drawn: NonNegativeInt
    weights: dict[str, _Weights]
    prompts: dict[str, Any] | None
    streams: list[dict[str, Any]]


class _Algorithm(_Values):
    class_: str = Field(alias="class")
    iteration: NonNegativeInt
    state: dict[str, Any]
    fields_: dict[str, Any] = Field(alias="fields")
    arguments: dict[str, Any]
    under_way: bool
    made: dict[str, _Made]
    last_metrics: dict[str, dict[str, Any]]


class _Manifest(_Values):
    format: Literal[4]
    name: str
    saved_s: float
    run_folder: str
    placement: str
    roles: dict[Annotated[str, AfterValidator(_known)], _Role]
    state: _State
    algorithm: _Algorithm | None
    files: dict[Annotated[str, AfterValidator(_inside)], _File]
    signature: str | None = None


def check_manifest(values: Any, folder: Path) -> None:
    """Raise `BadInput` for a manifest of another format, of other fields or types, or with a file outside the
    folder."""
    if isinstance(values, dict) and (wrote := values.get("format")) != FORMAT:
        what = f"checkpoint {str(folder)!r} has format {shown(wrote, 80)}"
        raise BadInput(what, f"this version reads {FORMAT}", "use the version of workbench that wrote it")
    try:
        _Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise BadInput(
            f"the manifest of checkpoint {str(folder)!r} is damaged: {where}: {first['msg']}",
            "lab.save writes another one", "restore from another checkpoint",
        ) from None  # fmt: skip
