"""The decorator of operations that score responses: their columns, and checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field

from workbench.batches.schema import SCHEMA, STATUS
from workbench.data.batched import over_of
from workbench.data.judge import JUDGEMENT
from workbench.data.reward_function import RewardFunction, Weight, check_function, check_parameters
from workbench.data.user_functions import LAST_TURN, RAW_RESPONSE, asks_for, parameters_of
from workbench.errors import BadInput
from workbench.messages.operation import ALL_TEXT, register
from workbench.messages.protocols import THREE_D_PROTO
from workbench.models.spec import Model
from workbench.support.calls.pickling import name_of
from workbench.support.validation import Rule
from workbench.workers.score_columns import STEP_ENDS
from workbench.workers.scoring import (
    TURN_BOUNDS,
    check_same_components,
    check_weights,
    component_columns,
    components_of,
    notes_columns,
    row_numbers,
)

F = TypeVar("F", bound=Callable[..., Any])
TOKENS = ("prompt_ids", "response_ids")
OF_ROW = (ALL_TEXT, "environment_rewards")  # what a function may ask for beside prompt and response
_NUMBERS = set(SCHEMA) - set(OF_ROW)  # columns that functions cannot ask for
# a function, or components: functions by name, each alone or with its weight
RewardFunctions = Annotated[
    RewardFunction | Mapping[Annotated[str, Field(pattern=r"^\w+$")], RewardFunction | tuple[RewardFunction, Weight]],
    Rule(
        "must be a function, or functions by name (letters, digits, _), each alone or as (function, finite weight)",
        'write {"right": right, "format": (tidy, 0.2)}',
    ),
]


def _check(arguments: Mapping[str, Any]) -> None:
    row_numbers(arguments["only"])
    if arguments.get("steps") == "":
        raise BadInput("steps=''", "a step ends with a text, or where the function says (True)", "write steps='\\n\\n'")
    if arguments["function"] is not None:
        if not components_of(arguments["function"]):
            raise BadInput("function={}", "give components by name", 'write function={"right": right}')
        for function, _ in components_of(arguments["function"]).values():
            check_function(function)


def _check_row(column: str, arguments: Mapping[str, Any], model: Model, columns: Collection[str]) -> None:
    if arguments["function"] is None:
        if arguments.get("steps") is True:
            raise BadInput("steps=True without a function", "a model does not say where steps end", 'give steps="text"')
        if arguments["only"] is not None:
            raise BadInput("only= without a function", "a model scores all rows, or fails for all", "leave it out")
        return
    if arguments["only"] is not None:
        check_same_components(column, arguments["function"], columns)
    given = {
        "prompt",
        "response",
        *RAW_RESPONSE,
        LAST_TURN,
        *(["steps"] if isinstance(arguments.get("steps"), str) else []),
        *([JUDGEMENT] if model.judge is not None else []),
        *(name for name in columns if name not in _NUMBERS and "/" not in name),
    }
    for function, _ in components_of(arguments["function"]).values():
        check_parameters(function, sorted(given))
        if over_of(function) is not None and asks_for(function, JUDGEMENT):
            raise BadInput(f"{name_of(function)} over many rows", "a judgement is about one row", "remove wb.batched")
        if over_of(function) == "group" and "prompt_uid" not in columns:
            raise BadInput(
                f"{name_of(function)} over groups, in a batch without 'prompt_uid'",
                "that column says which rows have the same prompt", "use lab.prompts.next(n), or add the column",
            )  # fmt: skip


def _status(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return STATUS if arguments["function"] is not None else ()


def scoring_stage(column: str) -> Callable[[F], F]:
    """Register an operation that writes scores; with functions also which rows failed, and components."""

    def own(arguments: Mapping[str, Any]) -> tuple[str, ...]:
        more = (*notes_columns(column, arguments["function"]), *([STEP_ENDS] if arguments.get("steps") else []))
        return (column, *component_columns(column, arguments["function"]), *more)

    def writes(arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return (*own(arguments), *_status(arguments))

    def reads(arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return TOKENS if arguments["only"] is None else (*TOKENS, *own(arguments))

    def optional(arguments: Mapping[str, Any]) -> tuple[str, ...]:
        # step ends that an earlier call wrote do not hold for the new rewards
        stale = column == "rewards" and arguments["function"] is not None and not arguments["steps"]
        functions = components_of(arguments["function"] or {}).values()
        named = {name for function, _ in functions for name in parameters_of(function) or ()} - set(SCHEMA)
        given = (*OF_ROW, *named, *TURN_BOUNDS, "response_mask", "prompt_uid", *(_status(arguments) or ("valid",)))
        return (*given, STEP_ENDS) if stale else given

    return register(
        THREE_D_PROTO, reads=reads, optional=optional, writes=writes, minibatched=True, check=_check,
        check_columns=partial(_check_row, column), check_model=check_weights,
        by_hand=lambda arguments: arguments["only"] is not None,
    )  # fmt: skip
