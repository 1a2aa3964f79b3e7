"""Continuations of a conversation, drawn by the stages of its workbench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from workbench.algorithms.lab import Lab
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table
from workbench.conversations.rows import lists
from workbench.conversations.tree import Tree, Turn
from workbench.data.prompt_stream import prompt_table
from workbench.data.prompts import Prompts
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.settings.engines import Sampling
from workbench.support.seeds import derive_seed

TRAVELS = ("temperature", "truncation", "weights_version")  # of the meta of rollouts
STAGE = "conversation/stages"  # as what its stages report their metrics


class Continuations:
    """Draws what may come behind a turn, each time with other random numbers. row: of the prompt, see `row_table`.
    meta: that of the newest rollout which goes into batches."""

    def __init__(self, lab: Lab, row: Table, seed: int) -> None:
        self._lab, self._row, self._seed, self._draws = lab, row, seed, 0
        self.meta: dict[str, Any] = {}

    def ranks(self, role: str) -> int:
        """As many rows as its ranks need at least."""
        role = "rollout" if role == "actor" and "rollout" in self._lab.groups else role
        return len(self._lab.groups[role].hosts)

    def draw(
        self, tree: Tree, path: Sequence[Turn], n: int, sampling: Sampling, *, values: bool = False
    ) -> tuple[Table, float | None, int]:
        """n continuations behind a path: their columns, the critic's value of where they begin (with values), and the
        version of the weights."""
        ids = [*tree.prompt_ids, *tree.tokens(path, answered=True)]
        self._draws += 1
        texts = {name: column for name, column in self._row.items() if isinstance(column, list)}
        table: Table = {
            **texts, "prompt_ids": Ragged.of([ids], torch.int64), "prompt_uid": torch.as_tensor(self._row["prompt_uid"])
        }  # fmt: skip
        rows = max(n, self.ranks("actor"), self.ranks("critic") if values else 1)
        seed = derive_seed("turns", self._seed, self._draws) % 2**31
        settings = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
        with self._lab.runner.isolated(STAGE):
            batch = self._lab.put(table, owner="conversation")
            batch = self._lab.actor.generate_sequences(batch, samples=rows, seed=seed, **settings)
            found = batch.fetch(rows=range(n))
            meta = dict(batch.meta)
            critic = None
            if values:
                valued = self._lab.critic.compute_values(batch)
                # a continuation whose environment failed at once has no token, before which the value would stand
                critic = next((row[0] for row in lists(valued.fetch(["values"]), "values") if row), None)
        self.meta = {name: meta[name] for name in TRAVELS if name in meta}
        return found, critic, int(meta.get("weights_version", 0))


def row_table(lab: Lab, row: Any) -> Table:
    """The columns of one prompt: of a batch of one row, or of a prompt as `prompts=` takes them."""
    if isinstance(row, Batch):
        if row.rows != 1:
            raise BadInput(f"conversation({row!r})", "begins with one row", "take one: batch.take([0])")
        row.need(["prompt_ids", "prompt_uid"], "conversation")
        return row.fetch(["prompt_ids", "prompt_uid", *row.text_names])
    if not isinstance(row, str | Mapping) or not row:
        raise BadInput(
            f"conversation({shown(row)})", "begins with a prompt: a batch of one row, a text, or a row of columns",
            "lab.conversation('What is 2 + 3?', environment=MyEnvironment)",
        )  # fmt: skip
    source = [{"prompt": row} if isinstance(row, str) else dict(row)]
    found = Prompts(source, tokenizer=lab.runner.batches.tokenizer, shuffle=False, overlong="error").next(1)
    return prompt_table(found, 0)
