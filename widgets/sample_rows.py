"""The rows of one batch as they are looked through: one number a row for all of them, tokens only for those shown."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from workbench.batches.columns import Ragged, nbytes
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench_widgets.token_columns import Sample

SEARCHED_ROWS = 64  # whose tokens are here at a time while a text is looked for
KEPT_SAMPLES = 256
# what an expression over columns may be made of
ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Invert, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod, ast.BitAnd, ast.BitOr, ast.Compare, ast.Load),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.Name, ast.Constant),
)


class SampleRows:
    """What is looked at of one batch, by its name in the store: it keeps no handle, so that the store can release it.

    numbers: a frame of all rows with the columns of one number a row, `response_tokens`, counted on the hosts, and
    `truncated`. token_names: columns of numbers that are, in every row, as many as the response's tokens. Columns of
    tokens and text are brought here for the rows asked for. brought_bytes: what came so far.
    """

    def __init__(self, lab: Any, name: str) -> None:
        self.lab, self.name, self.brought_bytes = lab, name, 0
        batch = lab.batch(name)
        self.meta = dict(batch.meta)
        columns = batch.columns
        self.rows = batch.rows
        self.text_names = [n for n, c in columns.items() if c.dtype == "object"]
        lengths = batch.lengths("response_ids")
        ragged = [n for n, c in columns.items() if c.row_shape == ("*",) and not n.endswith("_ids")]
        by_token = [n for n in ragged if np.array_equal(batch.lengths(n), lengths)]
        self.token_names = [n for n in by_token if n != "response_mask"]
        number_names = [n for n, c in columns.items() if c.row_shape == () and c.dtype != "object"]
        self._wanted = [n for n in (*by_token, "prompt_ids", "response_ids") if n in columns]
        self._wanted += self.text_names
        table = self._fetch(number_names, None) if number_names else {}
        self.numbers = pd.DataFrame({n: np.asarray(column) for n, column in table.items()}, index=range(self.rows))
        self.numbers["response_tokens"] = lengths
        if "finished" in self.numbers:
            self.numbers["truncated"] = ~self.numbers["finished"].astype(bool)
        self._samples: dict[int, Sample] = {}
        self._found: tuple[tuple[str, str], list[int]] = (("", ""), list(range(self.rows)))

    def _fetch(self, names: Sequence[str], rows: Sequence[int] | None) -> dict[str, Any]:
        table: dict[str, Any] = self.lab.batch(self.name).fetch(names, rows)
        self.brought_bytes += sum(nbytes(column) for column in table.values())
        return table

    # --- which rows ---------------------------------------------------------------------------------------------------

    def find(self, where: str, text: str, sort: str = "", descending: bool = False) -> list[int]:
        """The rows for which `where` is true and that have `text` in prompt or response, in order of a column.

        Numbers decide first; then the tokens of the rows that are left are brought here, some at a time, to look for
        the text, upper or lower case. Raises `BadInput` for an expression that is none.
        """
        if self._found[0] != (where, text):
            rows = np.flatnonzero(chosen(self.numbers, where)).tolist()
            self._found = ((where, text), self._with_text(rows, text) if text else rows)
        rows = self._found[1]
        if sort not in self.numbers:
            return rows
        return list(self.numbers.loc[rows, sort].sort_values(ascending=not descending, kind="stable").index)

    def _with_text(self, rows: Sequence[int], text: str) -> list[int]:
        found = []
        for start in range(0, len(rows), SEARCHED_ROWS):
            part = rows[start : start + SEARCHED_ROWS]
            names = [name for name in ("prompt_ids", "response_ids") if name in self._wanted]
            tokens = [column.rows() for column in self._fetch(names, part).values()]
            for row, *ids in zip(part, *tokens, strict=True):
                if any(text.lower() in self.lab.decode(each.tolist()).lower() for each in ids):
                    found.append(row)
        return found

    def group(self, row: int) -> list[int]:
        """The rows of the same prompt, itself among them."""
        if "prompt_uid" not in self.numbers:
            return [row]
        uids = self.numbers["prompt_uid"]
        return list(uids.index[uids == uids[row]])

    # --- their tokens -------------------------------------------------------------------------------------------------

    def samples(self, rows: Sequence[int]) -> list[Sample]:
        """Tokens, text and numbers of some rows; those that are not here yet are brought."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._samples]
        if len(self._samples) + len(missing) > KEPT_SAMPLES:
            self._samples, missing = {}, list(dict.fromkeys(rows))
        if missing:
            self._samples |= self._bring(missing)
        return [self._samples[row] for row in rows]

    def _bring(self, rows: Sequence[int]) -> dict[int, Sample]:
        table = self._fetch(self._wanted, rows)
        split = {name: column.rows() if isinstance(column, Ragged) else column for name, column in table.items()}
        found = {}
        for n, row in enumerate(rows):
            ids = split["response_ids"][n].tolist()
            mask = (
                split["response_mask"][n].bool() if "response_mask" in split else torch.ones(len(ids), dtype=torch.bool)
            )
            tokens = {name: split[name][n] for name in self.token_names}
            texts = {name: str(split[name][n]) for name in self.text_names}
            prompt = self.lab.decode(split["prompt_ids"][n].tolist()) if "prompt_ids" in split else ""
            found[row] = Sample(
                row=row, prompt=prompt, token_ids=ids, mask=mask, columns={**tokens, "response_mask": mask.float()},
                values={str(name): self.numbers[name].iat[row] for name in self.numbers}, texts=texts,
            )  # fmt: skip
        return found

    def counterpart(self, sample: Sample, mine: SampleRows) -> Sample | None:
        """The row here that a sample of another batch is beside: of the same prompt, with the same response where there
        is one, else the one that is as many-th of its prompt. Without `prompt_uid`: of the same number. None: no row.
        """
        if "prompt_uid" not in self.numbers or "prompt_uid" not in mine.numbers:
            return self.samples([sample.row])[0] if sample.row < self.rows else None
        uids = self.numbers["prompt_uid"]
        rows = list(uids.index[uids == mine.numbers["prompt_uid"][sample.row]])[:KEPT_SAMPLES]
        if not rows:
            return None
        same = [other for other in self.samples(rows) if other.token_ids == sample.token_ids]
        by_row = {other.row: other for other in same}
        place = min(mine.group(sample.row).index(sample.row), len(rows) - 1)
        return by_row.get(rows[place]) or (same[0] if same else self.samples([rows[place]])[0])


def chosen(numbers: pd.DataFrame, where: str) -> np.ndarray:
    """For which rows an expression such as `rewards > 0.5 and response_tokens < 100` is true: bool [rows].

    It may compare and reckon with columns of one number a row, and nothing else: no calls, no attributes. Empty: all.
    """
    if not where.strip():
        return np.ones(len(numbers), dtype=bool)
    rule = f"an expression such as rewards > 0.5, of {', '.join(map(str, numbers))}"
    try:
        tree = ast.parse(where.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"rows where {shown(where, 80)}", f"must be {rule}", "use and, or, not, < and ==") from error
    for node in ast.walk(tree):
        number = not isinstance(node, ast.Constant) or isinstance(node.value, bool | int | float)
        if not isinstance(node, ALLOWED) or not number:
            raise BadInput(f"{shown(ast.unparse(node))} in rows where {shown(where, 80)}", f"must be {rule}")
        if isinstance(node, ast.Name) and node.id not in numbers:
            raise BadInput(f"{node.id!r} in rows where {shown(where, 80)}", f"must be {rule}")
    try:
        found = numbers.eval(where.strip(), engine="python")
    except Exception as error:  # pandas raises many kinds
        raise BadInput(f"rows where {shown(where, 80)}", f"must be {rule}: {error}") from error
    if not isinstance(found, pd.Series) or found.dtype != bool:
        raise BadInput(f"rows where {shown(where, 80)}", f"is no truth value a row; must be {rule}")
    return np.asarray(found)
