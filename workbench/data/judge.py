"""`wb.Judge`: a model that judges responses. Its engine is in `workbench.workers.judge`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.data.reward_function import check_function
from workbench.data.user_functions import Noted, short
from workbench.errors import BadInput
from workbench.errors.plain_text import said, shown
from workbench.models.control_tokens import MARK
from workbench.models.spec import Judging, Model
from workbench.settings.engines import DType, Generation, Sampling
from workbench.support.calls.needs import with_notes
from workbench.support.calls.server import WrongValue
from workbench.support.checked_calls import checked_call

JUDGEMENT = "judgement"
GREEDY = " (retries= do not help: a greedy judge writes the same text each time; give it a temperature)"
Parse = Callable[[str], float]


@checked_call("wb.Judge")
def Judge(
    model: str | Path,
    *,
    rubric: str,
    parse: Parse | None = None,
    sampling: Sampling | None = None,
    dtype: DType | None = None,
    generation: Generation | None = None,
    seed: int = 0,
) -> Model:
    """Make the role `reward` (or `cost`) a model that reads a rubric with the response and writes a judgement.

        wb.open(..., models={"actor": ..., "reward": wb.Judge("org/name", rubric="Rate from 0 to 10: {response}")})

    model: any causal language model, also a generative reward model; its tokenizer may differ from the actor's. It
        generates on each device of the role's pool, with an engine of its own.
    rubric: a text in which {prompt}, {response} and the names of the row's other text columns are replaced by their
        values, and {raw_response} by the response with its special tokens. The model's chat template, if it has one,
        renders it as a user's message. Control tokens in a row's values stay text.
    parse: turns the judgement, a text, into the score, a number; raises if there is none. Default: `stated_score`.
    sampling: default: greedy, 256 tokens. The same text gets the same judgement on every rank.
    dtype, generation: see `wb.Model`; default: the workbench's. seed: for sampled judgements.

    The judgement is kept in the column `rewards_notes`. A row whose judgement cannot be parsed, or is cut at
    `max_new_tokens`, has failed, and its text is in `failure`. With `compute_reward(retries=...)` a judge that samples
    is asked again about such a row, with another seed; a greedy judge would write the same text. Your own function also
    gets the text if it has a parameter `judgement`, so a judge can be one of several components:
    `compute_reward(batch, function={"right": right, "judge": mine})`.
    Raises `BadInput` for a rubric without {response}.
    """
    if not any(name in rubric for name in ("{response}", "{raw_response}")):
        raise BadInput(f"rubric={short(rubric)!r}", "the judge reads the response", "put {response} into it")
    sampling = sampling or Sampling(temperature=0.0, max_new_tokens=256)
    if sampling.environment is not None or sampling.agent is not None:
        raise BadInput("sampling with an environment or an agent", "a judge answers once", "leave it out")
    function = Judgement(parse or stated_score, greedy=is_greedy(sampling))
    check_function(function)
    judging = Judging(model=str(model), rubric=rubric, sampling=sampling, seed=seed)
    return Model(function=function, judge=judging, dtype=dtype, generation=generation)


NUMBER = r"-?\d+(?:\.\d+)?"
STATED = (
    re.compile(rf"\\boxed\{{\s*({NUMBER})\s*\}}"),
    re.compile(rf"(?i)\b(?:score|rating|grade|verdict)[\s:*=]{{0,6}}(?:(?:is|of)[\s:*]{{1,6}})?({NUMBER})"),
    re.compile(rf"(?i)({NUMBER})\s*(?:/|out of)\s*{NUMBER}"),
)


def stated_score(text: str) -> float:
    """Return the score in a judgement: its last box; else the last number after "Score", "Rating", "Grade" or
    "Verdict"; else the last x of "x/10" or "x out of 10"; else its only number. Raises `BadInput` otherwise, because a
    judgement with several numbers does not say which number is the score."""
    for form in STATED:
        if found := form.findall(text):
            return float(found[-1])
    numbers = re.findall(NUMBER, text)
    if len(numbers) != 1:
        raise BadInput(
            f"{short(text)!r} with {len(numbers)} numbers, none of them marked as the score",
            "a judgement must say Score: 8, 8/10, or one number",
            "ask for that in the rubric, or give parse=",
        )
    return float(numbers[0])


@with_notes
class Judgement:
    """The reward function that turns a row's judgement into its score."""

    def __init__(self, parse: Parse, greedy: bool = False) -> None:
        self.parse, self.greedy, self.__name__ = parse, greedy, "judge"

    def __call__(self, prompt: str, response: str, judgement: str, **_: Any) -> float:
        try:
            return Noted.of(float(self.parse(judgement)), judgement)
        except Exception as error:
            words = f"{type(error).__name__}: {said(error, 200)}"
            no_score = f"found no score in the judgement {shown(judgement, 2000)} ({words:.200})"
            raise WrongValue(no_score + GREEDY * self.greedy) from None


def is_greedy(sampling: Sampling) -> bool:
    """Whether the same text always gets the same answer, whatever the seed."""
    return sampling.temperature == 0 or sampling.top_k == 1


def asked(rubric: str, row: Mapping[str, Any], special: Sequence[str] = ()) -> str:
    """Return the text that the judge reads about a row. Braces with a name that the row does not have stay unchanged.

    special: texts that the judge's tokenizer reads as special tokens. If a value of the row spells one, alone or with
    the text beside it, a mark is put into it, so that a response cannot write the judge's turn.
    """
    text = ""
    own: list[bool] = []  # for each character of the text, whether it comes from the rubric
    for i, part in enumerate(re.split(r"(\{\w+\})", rubric)):
        filled = i % 2 and part[1:-1] in row
        part = str(row[part[1:-1]]) if filled else part
        text, own = text + part, own + [not filled] * len(part)
    tokens = "|".join(re.escape(one) for one in sorted(special, key=len, reverse=True)) or r"(?!)"
    for start, end in reversed([found.span(1) for found in re.finditer(f"(?=({tokens}))", text)]):
        if not all(own[start:end]):
            text = f"{text[: start + 1]}{MARK}{text[start + 1 :]}"
    return text
