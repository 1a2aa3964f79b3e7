"""The vocabulary of a workbench: which tokens its token ids stand for."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from workbench.batches.columns import Table
from workbench.batches.schema import TOKEN_COLUMNS
from workbench.batches.schema_check import check_column
from workbench.errors import BadInput
from workbench.models.loading import Limits, load_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Identity(BaseModel, frozen=True, strict=True, extra="forbid"):
    """The identity of a `Vocabulary`, as saved files keep it."""

    name: str
    size: int
    digest: str


class Vocabulary:
    """The vocabulary of the model whose tokenizer makes the tokens for all roles.

    size: the number of ids that the model knows; its tokenizer may have fewer.
    """

    def __init__(self, name: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self._tokenizer = str(name), tokenizer
        self.size = int(load_config(name).get_text_config().vocab_size)

    @functools.cached_property
    def digest(self) -> str:
        """A hash that is equal for tokenizers with the same id for each token."""
        return hashlib.sha256(json.dumps(sorted(self._tokenizer.get_vocab().items())).encode()).hexdigest()[:16]

    @property
    def identity(self) -> Identity:
        """The identity that a file keeps beside its token ids."""
        return Identity(name=self.name, size=self.size, digest=self.digest)

    def check_identity(self, identity: Identity, where: str) -> None:
        """Raise `BadInput` if saved token ids belong to another vocabulary. identity: of the saved ids."""
        if identity.digest != self.digest:
            raise BadInput(
                f"{where} holds token ids of {identity.name!r} ({identity.size} ids, {identity.digest})",
                f"this workbench has those of {self.name!r} ({self.size} ids, {self.digest}): there the same ids "
                "mean other texts",
                "load it in a workbench whose actor has that tokenizer, or copy its texts over instead of its ids",
            )

    def check(self, table: Table, where: str) -> None:
        """Raise `BadInput` naming column, row and id if a table's column of token ids holds an invalid value."""
        for name in TOKEN_COLUMNS:
            if name in table:
                column = table[name]
                check_column(name, column, range(len(column)), Limits(vocabulary=self.size), f"{where}: ")
