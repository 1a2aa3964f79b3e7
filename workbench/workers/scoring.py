"""Scores a shard's rows by the user's functions: one function, or several named components with weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.batches.columns import ColumnValues, Ragged, Table, numbers_in
from workbench.batches.schema import SCHEMA, STATUS
from workbench.data.batched import over_of
from workbench.data.judge import JUDGEMENT
from workbench.data.reward_function import ALIKE, NOT_ASKED, FunctionCaller, RewardFunction, score_groups, score_rows
from workbench.data.user_functions import LAST_TURN, RAW_RESPONSE, Noted, Score, Steps, asks_for
from workbench.errors import BadInput, RewardError
from workbench.errors.plain_text import shown
from workbench.messages.calls import Output
from workbench.messages.metrics import Metrics
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.support.calls.needs import AT_ONCE, NOTES, mark_of
from workbench.support.calls.pickling import name_of
from workbench.support.named_fields import remedy_for
from workbench.workers.hints import RowFailures, failed_rows
from workbench.workers.judge import JudgedRows, JudgeEngine
from workbench.workers.score_columns import STEP_ENDS, mean_score, reported, step_ends, steps_of, weighted, zero_failed
from workbench.workers.worker import Context

GENERATED = "generate_sequences"
TURN_BOUNDS = ("turn_starts", "turn_ends")
Components = Mapping[str, tuple[RewardFunction, float]]
OfRow = tuple[str, int, Score | RewardError]  # component, number of the row, its function's result


def components_of(function: Any) -> Components:
    """Return the components of a user's `function` argument: by name, each with its weight. A single function has the
    name ""."""
    if not isinstance(function, Mapping):
        return {"": (function, 1.0)}
    return {name: one if isinstance(one, tuple) else (one, 1.0) for name, one in function.items()}


def weights_in_effect(function: Any, weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return each component's weight by name; empty for one function or a model. weights: of `compute_reward`."""
    given = {name: weight for name, (_, weight) in components_of(function).items() if name}
    return {**given, **(weights or {})}


def check_weights(arguments: Mapping[str, Any], model: Model) -> None:
    """Raise `BadInput` for weights of components that neither the call's function nor the role's has."""
    if (weights := arguments.get("weights")) is None:
        return
    known = list(weights_in_effect(arguments["function"], None))
    what = f"reward weights {shown(dict(weights))}"
    if not known:
        remedy = 'give functions by name, {"right": right, "format": tidy}, or weights=None'
        raise BadInput(what, "the reward has no components", remedy)
    for name in weights:
        if name not in known:
            rule = f"the components of the reward are {', '.join(known)}"
            raise BadInput(what, rule, remedy_for(name, known, repr) or "give weights for these, or None")


def component_columns(column: str, function: Any) -> tuple[str, ...]:
    """Return the columns of components, without the column of their sum."""
    return tuple(f"{column}/{name}" for name in components_of(function) if name)


def notes_columns(column: str, function: Any) -> tuple[str, ...]:
    """Return the text column in which functions explain their scores, if one of them does."""
    given = any(mark_of(one, NOTES) for one, _ in components_of(function).values())
    return (f"{column}_notes",) if given else ()


def check_same_components(column: str, function: Any, columns: Collection[str]) -> None:
    """Raise `BadInput` if the functions for some rows of a batch with these columns are not those of its other rows."""
    given = {name for name in components_of(function) if name}
    there = {name.removeprefix(f"{column}/") for name in columns if name.startswith(f"{column}/")}
    if given == there:
        return

    said = [f"components {', '.join(sorted(names))}" if names else "no components" for names in (given, there)]
    remedy = "give only= functions of the same names, or leave only= out"
    if there - given:
        drop = ", ".join(f'"{column}/{name}"' for name in sorted(there - given))
        remedy += f"; if these columns are from an earlier call, batch.drop({drop})"
    raise BadInput(
        f"only= with {said[0]}, in a batch with {said[1]}",
        f"the {column} of all rows must be the sum of the same components", remedy,
    )  # fmt: skip


def row_numbers(only: Any) -> list[int] | None:
    """Return the row numbers that a user gives as `only`: a frame from `batch.failed()` (empty if no row failed), or
    numbers; None: all rows."""
    if only is None:
        return None
    is_frame = hasattr(only, "columns")
    try:
        given = list(only["row"] if is_frame else only)
        numbers = [int(row) for row in given]
        right = numbers == given and min(numbers, default=0 if is_frame else -1) >= 0
    except (TypeError, ValueError, KeyError, OverflowError):
        right = False
    if not right:
        raise BadInput(
            f"only={shown(only)}", "the rows to score: a frame of batch.failed(), or one or more row numbers",
            "write only=batch.failed(), or only=[0]",
        )  # fmt: skip
    return numbers


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """One call of `compute_reward` or `compute_cost` with functions, on one rank.

    column: the column to write. concurrency, timeout_s, retries, most_failed, only, steps: see `compute_reward`.
    """

    batch: Shard
    context: Context
    tokenizer: PreTrainedTokenizerBase
    column: str
    components: Components
    concurrency: int | None
    timeout_s: float
    retries: int
    most_failed: float
    only: Any
    steps: str | bool = False
    judge: JudgeEngine | None = None

    @property
    def stage(self) -> str:
        return "compute_reward" if self.column == "rewards" else "compute_cost"

    def output(self) -> Output:
        """Return the columns of all rows, with new scores for the asked rows and the earlier scores of the others."""
        batch, context = self.batch, self.context
        numbers, only = batch.rows.tolist(), row_numbers(self.only)
        replicas = context.layout.p * context.layout.t
        total = int(context.communicator.all_reduce(torch.tensor([len(batch)])).item()) // replicas
        if only and max(only) >= total:
            raise BadInput(f"only=[..., {max(only)}]", f"the batch has rows 0 to {total - 1}", "only=batch.failed()")
        status = RowFailures(batch)
        without = status.failed_in(GENERATED)  # these rows have no whole response to score
        wanted = [only is None or number in only for number in numbers]
        asked = [i for i in range(len(batch)) if wanted[i] and not without[i]]
        failed_before = status.failed_in(self.stage)
        stay = only is not None and any(not (w or f) for w, f in zip(wanted, failed_before, strict=True))
        whole = [i for i, failed in enumerate(without) if not failed]
        scores, errors, several = self._ask_all(asked, whole, total, stay)
        names = {name: name or name_of(function) for name, (function, _) in self.components.items()}
        told = {i: {names[name]: failed[i] for name, failed in errors.items() if i in failed} for i in asked}
        for i, of_row in told.items():
            status.note(self.stage, i, of_row)
        right = [not (w or f) for w, f in zip(without, status.failed_in(self.stage), strict=True)]
        columns = self._columns(asked, scores, several, right)
        columns |= status.columns()
        for said in notes_columns(self.column, self.components):
            columns[said] = self._notes(said, asked, scores)
        if self.steps:
            before = batch.columns.get(STEP_ENDS) if only is not None else None
            columns[STEP_ENDS] = step_ends(batch, asked, list(scores.values()), before)
        elif STEP_ENDS in batch.columns and only is None:  # the column is of earlier rewards: now each token is a step
            ends = batch.ragged(STEP_ENDS)
            columns[STEP_ENDS] = ends.like(torch.ones_like(ends.values))
        metrics, report = failed_rows(
            {i: next(iter(found.values())) for i, found in told.items() if found}, numbers, self.most_failed
        )  # fmt: skip
        notes: tuple[str, ...] = ()
        if only is not None and (left := sum(w and f for w, f in zip(wanted, without, strict=True))):
            notes = (f"{left} rows of only= have no whole response, because {GENERATED} failed: they stay unchanged",)
        valid = numbers_in(columns, "valid")
        told_of = reported(self.column, columns[self.column], valid, batch)
        told_of["metrics"] = {**metrics, **told_of["metrics"], **self._means(columns, valid)}
        return Output(columns=columns, failed=report, notes=notes, **told_of)

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask_all(
        self, asked: Sequence[int], whole: Sequence[int], total: int, stay: bool
    ) -> tuple[dict[str, dict[int, Score]], dict[str, dict[int, RewardError]], dict[str, bool]]:
        """Return, for each component, the scores and the errors of the asked rows, and whether it gives a row several
        numbers. whole: rows with a response. stay: whether scores of an earlier call stay. All ranks meet before the
        first call and after the last one, even a rank that was stopped."""
        context = self.context
        rows, tokens = self._rows()
        everywhere = self._everywhere(rows, tokens, asked, whole)
        scores: dict[str, dict[int, Score]] = {name: {} for name in self.components}
        errors: dict[str, dict[int, RewardError]] = {name: {} for name in self.components}
        shared: list[OfRow] = []
        calls = len(self.components) * len(asked)
        where = f"rank {context.host.rank} of pool {context.host.pool}"
        numbers = self.batch.rows.tolist()

        def unscored(what: str, i: int) -> RewardError:
            return row_error(what, f"row {numbers[i]} on {where}: {what}")

        try:
            with context.recorder.span("reward"), context.stopping.in_step_with((context.host.rank,)):
                of_asked = {i: rows[i] for i in asked}
                judged = None if self.judge is None else JudgedRows(self.judge, of_asked, unscored)
                for k, (name, (function, _)) in enumerate(self.components.items()):

                    def tick(ended: int, k: int = k) -> None:
                        context.advance(min(calls, k * len(asked) + ended), calls, 0)

                    caller = FunctionCaller(
                        calls=context.calls, concurrency=self.concurrency or mark_of(function, AT_ONCE),
                        timeout_s=self.timeout_s, retries=self.retries, most=self.most_failed * total, tick=tick,
                    )  # fmt: skip
                    if over_of(function) is not None:
                        shared += self._ask_groups(name, function, everywhere, caller, where)
                    elif asked:
                        ask = partial(self._ask_rows, function, rows, tokens, where)
                        if judged is not None and asks_for(function, JUDGEMENT):
                            scores[name], errors[name] = judged.scores(function, ask, caller)
                        else:
                            scores[name], errors[name] = ask(asked, caller)
                        if len(errors[name]) > caller.most:  # the stage fails: make no more calls
                            break
        finally:
            kinds = self._share(shared, scores, errors, asked, stay)
        several = self._require_alike(kinds, scores)
        for name in self.components:
            for i in asked:
                if i not in scores[name] and i not in errors[name]:
                    errors[name][i] = unscored(NOT_ASKED, i)
        return scores, errors, several

    def _ask_rows(
        self, function: RewardFunction, rows: Sequence[Mapping[str, Any]], tokens: Sequence[int | Steps], where: str,
        called: Sequence[int], caller: FunctionCaller,
    ) -> tuple[dict[int, Score], dict[int, RewardError]]:  # fmt: skip
        found, failures = score_rows(
            function, [rows[i] for i in called], [tokens[i] for i in called], caller=caller, where=where,
            row_numbers=[int(self.batch.rows[i]) for i in called],
        )  # fmt: skip
        scores = {i: one for i, one in zip(called, found, strict=True) if one is not None}
        return scores, {called[k]: error for k, error in failures.items()}

    def _rows(self) -> tuple[list[dict[str, Any]], list[int | Steps]]:
        """Return, for each row, the arguments that a function may get, and the tokens of its response, or its steps."""
        batch = self.batch
        responses = batch.ragged("response_ids").rows()
        rewards = batch.ragged("environment_rewards").rows() if "environment_rewards" in batch.columns else None
        bounds = [batch.ragged(name).rows() for name in TURN_BOUNDS if name in batch.columns]
        texts = {n: column for n, column in batch.columns.items() if isinstance(column, list) and n not in STATUS}
        own = {n: column for n, column in batch.columns.items() if n not in (*SCHEMA, *texts) and "/" not in n}
        numbers = {n: column.rows() if isinstance(column, Ragged) else column for n, column in own.items()}
        rows: list[dict[str, Any]] = []
        functions = [function for function, _ in self.components.values()]
        reads = (lambda name: False) if self.judge is None else self.judge.reads
        by_name = (*RAW_RESPONSE, LAST_TURN)
        asked = [name for name in by_name if reads(name) or any(asks_for(one, name) for one in functions)]
        for i, response in enumerate(responses):
            row = {name: column[i] for name, column in texts.items()}
            row |= {name: column[i].tolist() for name, column in numbers.items()}
            if rewards is not None:
                row["environment_rewards"] = rewards[i].tolist()
            row["response"] = self.tokenizer.decode(response.tolist(), skip_special_tokens=True)
            if "raw_response" in asked:
                row.setdefault("raw_response", self.tokenizer.decode(response.tolist()))
            if "response_ids" in asked:
                row["response_ids"] = response.tolist()
            if LAST_TURN in asked:
                turns = [*zip(*(bound[i].tolist() for bound in bounds), strict=True)]
                said = response[slice(*turns[-1])] if turns else response
                row[LAST_TURN] = self.tokenizer.decode(said.tolist(), skip_special_tokens=True)
            rows.append(row)
        tokens = [len(response) for response in responses]
        if not isinstance(self.steps, str):
            return rows, [Steps(count, None) for count in tokens] if self.steps else list(tokens)
        steps = steps_of(batch, self.tokenizer, self.steps)
        for row, (_, of_row) in zip(rows, steps, strict=True):
            row["steps"] = of_row
        return rows, [Steps(count, ends) for count, (ends, _) in zip(tokens, steps, strict=True)]

    def _everywhere(
        self, rows: Sequence[Any], tokens: Sequence[int | Steps], asked: Collection[int], whole: Sequence[int]
    ) -> list[tuple[int, int, bool, Any, int | Steps]]:
        """Return (number, prompt, whether it is asked, the function's arguments, tokens) of the rows of all ranks, in
        order, if a function is called with rows of several ranks."""
        if not any(over_of(function) for function, _ in self.components.values()):
            return []
        batch, wanted = self.batch, set(asked)
        uids = batch.numbers("prompt_uid").tolist() if "prompt_uid" in batch.columns else [0] * len(batch)
        here = [(int(batch.rows[i]), uids[i], i in wanted, rows[i], tokens[i]) for i in whole]
        communicator = self.context.communicator
        found = communicator.shared_by_group(communicator.world_size, lambda: here)
        return [row for _, row in sorted({row[0]: row for row in found}.items())]

    def _ask_groups(
        self, name: str, function: RewardFunction, everywhere: Sequence[tuple[int, int, bool, Any, int | Steps]],
        caller: FunctionCaller, where: str,
    ) -> list[OfRow]:  # fmt: skip
        """Make this rank's share of the calls with rows of several ranks."""
        groups: dict[int, list[tuple[int, int, bool, Any, int | Steps]]] = {}
        for row in everywhere:
            groups.setdefault(row[1] if over_of(function) == "group" else 0, []).append(row)
        communicator = self.context.communicator
        called = [group for group in groups.values() if any(row[2] for row in group)]
        called = called[communicator.rank :: communicator.world_size]
        found, failures = score_groups(
            function, [[row[3] for row in group] for group in called], [[row[4] for row in group] for group in called],
            caller=caller, where=where, row_numbers=[[row[0] for row in group] for group in called],
        )  # fmt: skip
        given: list[OfRow] = []
        for i, group in enumerate(called):
            scores: Sequence[Score | RewardError] = found.get(i, ())
            if (error := failures.get(i)) is not None:
                by = f"reward function {name_of(function)} {error.what} for row"
                scores = [row_error(error.what, f"{by} {row[0]} on {where}", error.rule, error.remedy) for row in group]
            given += [(name, row[0], score) for row, score in zip(group, scores, strict=True)]
        return given

    def _share(
        self, shared: list[OfRow], scores: dict[str, dict[int, Score]], errors: dict[str, dict[int, RewardError]],
        asked: Sequence[int], stay: bool,
    ) -> Tensor:  # fmt: skip
        """Take in other ranks' results for rows of this rank. Returns, for each component, whether any rank has several
        numbers per row, and whether any has one, [components, 2]: from this call, or in rows that stay."""
        communicator = self.context.communicator
        if any(over_of(function) for function, _ in self.components.values()):
            place = {int(self.batch.rows[i]): i for i in asked}
            for name, number, given in communicator.shared_by_group(communicator.world_size, lambda: shared):
                if number in place:
                    into: Any = errors if isinstance(given, RewardError) else scores
                    into[name][place[number]] = given
        kinds = [
            [*(isinstance(one, list) for one in found.values()), *([isinstance(self._before(name), Ragged)] * stay)]
            for name, found in scores.items()
        ]
        return communicator.all_reduce_max(torch.tensor([[any(kind), not all(kind)] for kind in kinds]).float())

    def _require_alike(self, kinds: Tensor, scores: Mapping[str, Mapping[int, Score]]) -> dict[str, bool]:
        """Return, for each component, whether it gives a row several numbers. Raises `RewardError`, on all ranks, if it
        gives some rows one number and others several."""
        found: dict[str, bool] = {}
        for name, (several, one) in zip(self.components, kinds.bool().tolist(), strict=True):
            if several and one:
                told = [f"; it gave {shown(score)} for row {self.batch.rows[i]}" for i, score in scores[name].items()]
                raise RewardError(
                    f"reward function {name_of(self.components[name][0])}: column {self._name(name)!r} would have one "
                    f"number in some rows, and several in others{''.join(told[:1])}",
                    ALIKE,
                    "" if self.only is None else "leave out only=, so that all rows are scored",
                )
            found[name] = several or (not one and isinstance(self._before(name), Ragged))
        return found

    # --- columns ------------------------------------------------------------------------------------------------------

    def _name(self, component: str) -> str:
        return f"{self.column}/{component}" if component else self.column

    def _before(self, component: str) -> ColumnValues | None:
        """Return the column of a component from an earlier call, if some of its rows stay."""
        return self.batch.columns.get(self._name(component)) if self.only is not None else None

    def _columns(
        self, asked: Sequence[int], scores: Mapping[str, Mapping[int, Score]], several: Mapping[str, bool],
        right: Sequence[bool],
    ) -> Table:  # fmt: skip
        """Return the column of each component, and of their weighted sum, which is 0 in rows that failed."""
        parts = {name: self._column(name, asked, found, several[name]) for name, found in scores.items()}
        if "" in parts:
            return {self.column: zero_failed(parts[""], right)}
        weights = [weight for _, weight in self.components.values()]
        whole = weighted(list(parts.values()), weights, self.batch.columns.get("response_mask"))
        return {self.column: zero_failed(whole, right), **{self._name(name): part for name, part in parts.items()}}

    def _notes(self, column: str, asked: Sequence[int], scores: Mapping[str, Mapping[int, Score]]) -> list[str]:
        """Return the functions' explanations of each row's scores, one line per component."""
        before = self.batch.columns.get(column) if self.only is not None else None
        told = list(before) if isinstance(before, list) else [""] * len(self.batch)
        for i in asked:
            noted = [(name, one.note) for name, found in scores.items() if isinstance(one := found.get(i), Noted)]
            told[i] = "\n".join(f"{name}: {note}" if name else note for name, note in noted)
        return told

    def _column(self, name: str, asked: Sequence[int], found: Mapping[int, Score], several: bool) -> ColumnValues:
        batch, before = self.batch, self._before(name)
        if not several:
            column = before.float().clone() if isinstance(before, Tensor) else torch.zeros(len(batch))
            for i in asked:
                column[i] = found.get(i, 0.0)  # type: ignore[assignment]
            return column
        lengths = batch.ragged("response_ids").lengths.tolist()
        rows: list[Any] = before.rows() if isinstance(before, Ragged) else [[0.0] * n for n in lengths]
        for i in asked:
            rows[i] = found.get(i, [0.0] * lengths[i])
        column_BT = Ragged.of(rows, torch.float32)
        if "response_mask" in batch.columns:
            mask = batch.ragged("response_mask").values.bool()
            column_BT = column_BT.like(torch.where(mask, column_BT.values, 0.0))
        return column_BT

    def _means(self, columns: Table, valid: Tensor) -> Metrics:
        return {
            f"{name}/mean": mean_score(column, valid)
            for name, column in columns.items()
            if name not in (*STATUS, self.column) and not isinstance(column, list)
        }


def row_error(what: str, message: str, rule: str = "", remedy: str = "") -> RewardError:
    """Make the error of a row without a score. what: in few words, for the column `failure`."""
    error = RewardError(message, rule, remedy)
    error.what = what
    return error
