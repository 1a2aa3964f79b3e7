"""The engine of a judge on each rank of its pool: it judges that rank's rows, and functions score the judgements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.data.judge import GREEDY, JUDGEMENT, Judgement, asked, is_greedy
from workbench.data.reward_function import FunctionCaller, RewardFunction
from workbench.data.user_functions import Score
from workbench.engines.generation import make_generation_engine
from workbench.errors import RewardError
from workbench.errors.plain_text import shown
from workbench.models import load_tokenizer
from workbench.models.control_tokens import special_tokens
from workbench.models.spec import Model
from workbench.models.tokenizers import render_prompt
from workbench.support.seeds import derive_seed, turn_seed
from workbench.workers.worker import Context


class JudgeEngine:
    """A generation engine with the judge's weights, read from its files."""

    def __init__(self, spec: Model, context: Context) -> None:
        assert spec.judge and spec.generation and spec.dtype
        self._judging, self._context = spec.judge, context
        self._tokenizer, self._longest = load_tokenizer(spec.judge.model), spec.generation.max_model_tokens
        self.generator = make_generation_engine(
            spec.judge.model, spec.generation, tokenizer=self._tokenizer, trainer=None,
            dtype=getattr(torch, spec.dtype), device=context.device, threads=context.host.threads,
            cache_bytes=context.cache_bytes,
        )  # fmt: skip

    @property
    def greedy(self) -> bool:
        """Whether the judge writes the same about a row each time."""
        return is_greedy(self._judging.sampling)

    def reads(self, name: str) -> bool:
        """Return whether the rubric has a place for this argument of functions."""
        return f"{{{name}}}" in self._judging.rubric

    def judgements(self, rows: Mapping[int, Mapping[str, Any]], draw: int = 0) -> tuple[dict[int, str], dict[int, str]]:
        """Return the judge's text about each row, by row number; and for the other rows, why there is no judgement, or
        no complete one. draw: each draw has other seeds. Ranks need not call this in step."""
        sampling = self._judging.sampling
        texts = {i: asked(self._judging.rubric, row, special_tokens(self._tokenizer)) for i, row in rows.items()}
        rendered = {i: render_prompt(self._tokenizer, text) for i, text in texts.items()}
        missing = {
            i: f"the judge's prompt has {len(ids)} tokens, but its Generation.max_model_tokens is {self._longest}"
            for i, ids in rendered.items()
            if len(ids) >= self._longest
        }
        read = [i for i in rendered if i not in missing]
        if not read:
            return {}, missing
        seeds = [turn_seed(derive_seed(self._judging.seed, texts[i]), draw) for i in read]
        with self._context.recorder.span("generate") as counted:
            rollout = self.generator.generate([rendered[i] for i in read], sampling, seeds, self._context.advance)
            counted.tokens = sum(map(len, rollout.response_ids))
        written: dict[int, str] = {}
        for i, ids, finished in zip(read, rollout.response_ids, rollout.finished, strict=True):
            written[i] = str(self._tokenizer.decode(ids, skip_special_tokens=True))
            if finished:
                continue
            limit, longer = f"Sampling.max_new_tokens={sampling.max_new_tokens}", "a larger max_new_tokens"
            if len(ids) < sampling.max_new_tokens:
                limit, longer = f"Generation.max_model_tokens={self._longest}", "a larger max_model_tokens"
            missing[i] = (
                f"the judgement was cut at {limit}, so it is not parsed: give the judge {longer}, or ask for a shorter "
                f"judgement in the rubric{GREEDY * self.greedy}; it is {shown(written.pop(i), 2000)}"
            )
        return written, missing


Ask = Callable[[Sequence[int], FunctionCaller], tuple[dict[int, Score], dict[int, RewardError]]]


class JudgedRows:
    """The rows of one stage with the judge's texts about them, which all functions of the stage share.

    rows: the functions' arguments for each row, by its number. error: makes the error of a row without a judgement.
    """

    def __init__(
        self, engine: JudgeEngine, rows: Mapping[int, dict[str, Any]], error: Callable[[str, int], RewardError]
    ) -> None:
        self._engine, self._rows, self._error = engine, rows, error
        self._drawn: dict[tuple[int, int], tuple[str | None, str]] = {}  # by draw and row: text, or why there is none

    def scores(
        self, function: RewardFunction, ask: Ask, caller: FunctionCaller
    ) -> tuple[dict[int, Score], dict[int, RewardError]]:
        """Return a function's scores, and errors, by row. A row that fails is judged again with another seed, and the
        function is called with the new text, as often as `caller` has retries. A greedy judge would write the same
        again: `parse` of `wb.Judge` is not called again, and another function is called again with the same text."""
        scores: dict[int, Score] = {}
        errors: dict[int, RewardError] = {}
        again, greedy = list(self._rows), self._engine.greedy
        draws = 0 if greedy else caller.retries
        retries = caller.retries if greedy and not isinstance(function, Judgement) else 0
        for draw in range(draws + 1):
            if new := [i for i in again if (draw, i) not in self._drawn]:
                written, missing = self._engine.judgements({i: self._rows[i] for i in new}, draw)
                self._drawn |= {(draw, i): (written.get(i), missing.get(i, "")) for i in new}
            texts = {i: text for i in again if (text := self._drawn[draw, i][0]) is not None}
            for i, text in texts.items():
                self._rows[i][JUDGEMENT] = text
            most = caller.most if draw == draws else len(self._rows)
            found, errors = ask(list(texts), replace(caller, retries=retries, most=most))
            scores |= found
            errors |= {i: self._error(self._drawn[draw, i][1], i) for i in again if i not in texts}
            again = sorted(errors)
            if not again:
                break
        for row in self._rows.values():  # functions without a judge's text must not get it
            row.pop(JUDGEMENT, None)
        return scores, errors
