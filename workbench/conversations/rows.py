"""Converts branches of a conversation to rows of a batch, rows to branches, and texts written by hand to tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from workbench.algorithms.lab import Lab
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table, ragged_in
from workbench.conversations.tree import Tree, Turn
from workbench.data.prompt_stream import prompt_table, reading
from workbench.data.prompts import Prompts
from workbench.data.user_functions import are_messages
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models.control_tokens import escape
from workbench.models.tokenizers import is_text, render_reply, turn_end
from workbench.settings.engines import Sampling
from workbench.support.seeds import derive_seed


def trained_turns(paths: Sequence[Sequence[Turn]], *, before_edits: bool) -> list[list[bool]]:
    """Return for each branch which of its turns are trained.

    Turns that the policy sampled are trained, except turns before a turn or an answer written by hand (unless
    before_edits), because their return is not the policy's in its environment, and except turns that several branches
    share, because they would be trained several times.
    """
    shared = Counter(turn.number for path in paths for turn in path)
    found = []
    for path in paths:
        last_edit = max((k for k, turn in enumerate(path) if turn.edited), default=-1)
        # also excludes the turn whose answer was written by hand, because the answer comes after it
        found.append(
            [
                turn.written_by == "policy" and shared[turn.number] == 1 and (before_edits or k > last_edit)
                for k, turn in enumerate(path)
            ]
        )
    return found


def branch_table(tree: Tree, paths: Sequence[Sequence[Turn]], endings: Sequence[str], *, before_edits: bool) -> Table:
    """Return the columns of `generate_sequences(environment=...)` for these branches, with `response_mask` 1 on the
    tokens of trained turns."""
    rows: list[list[tuple[int, bool, float, float]]] = []  # (token, whether it is trained, log-probability, reward)
    starts, ends = [list[list[int]]() for _ in range(2)]
    for path, trained in zip(paths, trained_turns(paths, before_edits=before_edits), strict=True):
        row = [(token, False, 0.0, 0.0) for token in tree.first_ids]
        starts.append([])
        ends.append([])
        for turn, counts in zip(path, trained, strict=True):
            starts[-1].append(len(row))
            given = [0.0] * (len(turn.token_ids) - 1) + [turn.reward]
            row += zip(turn.token_ids, [counts] * len(given), turn.log_probs, given, strict=True)
            ends[-1].append(len(row))
            row += [(token, False, 0.0, 0.0) for token in turn.answer_ids if turn is not path[-1]]
        rows.append(row)
    ids, mask, log_probs, rewards = ([[one[i] for one in row] for row in rows] for i in range(4))  # four lists, by row
    return {
        "prompt_ids": Ragged.of([tree.prompt_ids] * len(paths), torch.int64),
        "response_ids": Ragged.of(ids, torch.int64),
        "response_mask": Ragged.of(mask, torch.bool),
        "rollout_log_prob": Ragged.of(log_probs, torch.float32),
        "environment_rewards": Ragged.of(rewards, torch.float32),
        "turn_starts": Ragged.of(starts, torch.int64),
        "turn_ends": Ragged.of(ends, torch.int64),
        "turn_rewards": Ragged.of([[turn.reward for turn in path] for path in paths], torch.float32),
        "turns": torch.tensor([len(path) for path in paths]),
        "ending": list(endings),
        "finished": torch.tensor([ending == "done" for ending in endings]),
    }


def lists(table: Table, name: str) -> list[list[Any]]:
    return [row.tolist() for row in ragged_in(table, name).rows()]


def add_branch(tree: Tree, parent: int | None, table: Table, row: int, version: int) -> Turn:
    """Add the turns of a continuation to a tree, and return the last of them. parent: the number of the turn that they
    follow. table, row: a rollout, and its row. version: of the weights that sampled it."""
    names = ("response_ids", "rollout_log_prob", "turn_starts", "turn_ends", "turn_rewards")
    ids, log_probs, starts, ends, rewards = (lists(table, name)[row] for name in names)
    ending = str(table["ending"][row])  # type: ignore[index]
    turn = None
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        last = k == len(ends) - 1
        answer = [] if last else ids[end : starts[k + 1]]
        turn = tree.add(
            Turn(
                number=len(tree.turns), parent=parent if turn is None else turn.number,
                token_ids=ids[start:end], log_probs=log_probs[start:end], answer_ids=answer, own_ids=answer,
                ending="length" if last and ending == "max_tokens" else "stop", reward=rewards[k],
                done=last and ending == "done", limit=ending if last and ending == "max_calls" else "",
                answered=not last or ending == "done", weights_version=version,
            )
        )  # fmt: skip
    assert turn is not None
    return turn


def as_turn(tokenizer: PreTrainedTokenizerBase, text: str, *, stop: Sequence[str], room: int) -> tuple[list[int], str]:
    """Return a text as the tokens of a turn, and the turn's ending. room: the largest number of tokens."""
    ids, stops = _encoded(tokenizer, text), any(text.endswith(one) for one in stop)
    ids += [] if stops else [turn_end(tokenizer)]
    if len(ids) > room:
        raise BadInput(
            f"a turn of {len(ids)} tokens", f"there is room for {room}", "shorten it, or raise max_new_tokens"
        )
    return ids, "stop" if stops else "eos"


def as_answer(tokenizer: PreTrainedTokenizerBase, answer: Any, turn: Turn) -> list[int]:
    """Return a text, or messages, as the tokens that answer a turn."""
    if isinstance(answer, str):
        return _encoded(tokenizer, answer)
    if not isinstance(answer, list):
        raise BadInput(f"answer={shown(answer)}", "must be a text, or messages", "answer='= 42'")
    if not are_messages(answer):
        rule = "messages need a role and a content, without lone surrogates"
        raise BadInput(f"answer={shown(answer)}", rule, "answer=[{'role': 'tool', 'content': '= 42'}]")
    return render_reply(tokenizer, escape(tokenizer, answer), after=turn.token_ids[-1])


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if not is_text(text):
        raise BadInput(f"the text {shown(text)}", "has half a character (a lone surrogate)", "remove it")
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


COPIED_META = ("temperature", "truncation", "weights_version")  # entries of a rollout's meta that batches of chats get
STAGE = "conversation/stages"  # the name under which a conversation's stages report their metrics


class Continuations:
    """Samples continuations of a turn, each time with other random numbers. row: the prompt's columns, see `row_table`.
    meta: the entries `COPIED_META` of the newest rollout's meta."""

    def __init__(self, lab: Lab, row: Table, seed: int) -> None:
        self._lab, self._row, self._seed, self._draws = lab, row, seed, 0
        self.meta: dict[str, Any] = {}

    def ranks(self, role: str) -> int:
        """Return the number of rows that a role needs at least: its number of ranks."""
        role = "rollout" if role == "actor" and "rollout" in self._lab.groups else role
        return len(self._lab.groups[role].hosts)

    def draw(
        self, tree: Tree, path: Sequence[Turn], n: int, sampling: Sampling, *, values: bool = False
    ) -> tuple[Table, float | None, int]:
        """Sample n continuations of a path. Returns their columns, the critic's value at their beginning (if `values`;
        else None), and the version of the weights."""
        ids = [*tree.prompt_ids, *tree.tokens(path)]
        self._draws += 1
        texts = {name: column for name, column in self._row.items() if isinstance(column, list)}
        table: Table = {
            **texts, "prompt_ids": Ragged.of([ids], torch.int64), "prompt_uid": torch.as_tensor(self._row["prompt_uid"])
        }  # fmt: skip
        rows = max(n, self.ranks("actor"), self.ranks("critic") if values else 1)
        seed = derive_seed("turns", self._seed, self._draws) % 2**31
        with self._lab.runner.isolated(STAGE):
            batch = self._lab.put(table, owner="conversation")
            batch = self._lab.actor.generate_sequences(batch, samples=rows, seed=seed, **vars(sampling))
            found = batch.fetch(rows=range(n))
            meta = dict(batch.meta)
            critic = None
            if values:
                valued = self._lab.critic.compute_values(batch)
                # a continuation whose environment failed at once has no token, and so no value
                critic = next((row[0] for row in lists(valued.fetch(["values"]), "values") if row), None)
        self.meta = {name: meta[name] for name in COPIED_META if name in meta}
        return found, critic, int(meta.get("weights_version", 0))


def row_table(lab: Lab, row: Any) -> Table:
    """Return the columns of one prompt. row: a batch of one row, or a prompt as `prompts=` takes it."""
    if isinstance(row, Batch):
        if row.rows != 1:
            raise BadInput(f"conversation({row!r})", "a conversation begins with one row", "take one: batch.take([0])")
        row.need(["prompt_ids", "prompt_uid"], "conversation")
        return row.fetch(["prompt_ids", "prompt_uid", *row.text_names])
    row = {"prompt": row} if isinstance(row, str | list) and row else row
    if not isinstance(row, Mapping) or not row:
        raise BadInput(
            f"conversation({shown(row)})",
            "a conversation begins with a prompt: a batch of one row, a text, messages, or a row of columns",
            "lab.conversation('What is 2 + 3?', environment=MyEnvironment)",
        )  # fmt: skip
    read = reading(lab.description.prompts, {"overlong": "error"})
    found = Prompts([dict(row)], tokenizer=lab.runner.batches.tokenizer, shuffle=False, **read).next(1)
    return prompt_table(found, 0)
