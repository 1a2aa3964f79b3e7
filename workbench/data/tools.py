"""`wb.Tools`: an environment in which the model may call functions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # before Python 3.12, pydantic accepts only this one

from workbench.data.user_functions import short
from workbench.errors import BadInput
from workbench.errors.plain_text import plain_text
from workbench.models.tokenizers import is_text
from workbench.support.calls.needs import check_needs
from workbench.support.checked_calls import checked_call
from workbench.support.time_limit import TooLong, time_limit
from workbench.support.validation import PositiveFloat, PositiveInt, one_of

if TYPE_CHECKING:
    from workbench.models.turn_messages import Message

OnError = Literal["message", "fail"]
PLACE = "{tools}"  # stands for the schemas in a system message


class ToolFailed(RuntimeError):
    """A tool raised, took too long, or returned an invalid result."""


class _WrongCall(ValueError):
    """The model's call is wrong and cannot be made."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    schema: JSON schema in the form for chat templates. function: called with the arguments by name; may be async.
    types: the types of its arguments, by which they are checked and converted; None: arguments are passed unchanged to
    a function that checks them itself. prepare: awaited before each call, outside its time limit (starts a server).
    """

    schema: Mapping[str, Any]
    function: Callable[..., Any]
    types: Mapping[str, Any] | None = None
    prepare: Callable[[], Awaitable[Any]] | None = None

    @classmethod
    def of(cls, function: Callable[..., Any] | Tool) -> Tool:
        """Make a tool of a function with types and a docstring. Raises `BadInput` for a function without."""
        if isinstance(function, Tool):
            return function
        from workbench.models.turn_messages import schema_of

        schema = schema_of(function)
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise BadInput(
                    f"a tool {schema['function']['name']!r} with {parameter}",
                    "a model gives arguments by name",
                    "write each argument with its name",
                )
        hints = get_type_hints(function, include_extras=True)
        return cls(schema, function, {parameter.name: hints[parameter.name] for parameter in parameters})

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments, converted to the function's types. Raises `_WrongCall` with the error."""
        if self.types is None:
            return dict(given)
        try:
            return self.checks.validate_python(dict(given))
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise _WrongCall(f"wrong arguments of {self.name}: {'; '.join(wrong)}") from None

    @functools.cached_property
    def checks(self) -> TypeAdapter[dict[str, Any]]:
        """The validator of the arguments as a dict, in which arguments with a default may be missing."""
        parameters, kinds = inspect.signature(self.function).parameters, self.types or {}
        optional = {name for name in kinds if parameters[name].default is not inspect.Parameter.empty}
        fields = {name: NotRequired[kind] if name in optional else kind for name, kind in kinds.items()}
        make: Any = TypedDict
        made = make("Arguments", fields)
        made.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        return TypeAdapter(made)


class Tools:
    """An environment that executes the model's tool calls: `generate_sequences(environment=wb.Tools([add]))`.

    The prompt shows the model the tools' JSON schemas. A turn with calls is answered by one message per call; a turn
    without calls is the answer, and ends the conversation.

    tools: functions with types and docstrings, `async` or not, such as those of `wb.toolbox`. They run in the process
        of the environment, see `wb.limits`.
    system: a text for the system message, before the row's own. If it contains "{tools}", the schemas replace that,
        and the chat template does not show them.
    tool_format: the format of calls, see `workbench.models.turn_messages`; None: the tokenizer's.
    timeout_s: for one call. Tools of one turn run at the same time. A tool that holds Python's lock outside Python
        cannot be stopped; then `call_timeout_s` of the rollout fails the row.
    max_characters: the maximum length of a result; the rest is cut off.
    on_error: how to treat a tool that raises, takes too long, or returns a value that is too long or not JSON.
        "message": the model is told. "fail": its row fails. The model's own wrong calls (no JSON, an unknown name,
        wrong arguments) are always told to the model.

    Rewards of turns are 0: score the conversation with `compute_reward`. Raises `BadInput` for functions without types
    or descriptions, and for two tools of the same name.
    """

    @checked_call("wb.Tools")
    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool],
        *,
        system: str | None = None,
        tool_format: str | Mapping[str, Any] | None = None,
        timeout_s: PositiveFloat = 10.0,
        max_characters: PositiveInt = 4000,
        on_error: OnError = "message",
    ) -> None:
        from workbench.models.turn_messages import FORMATS, check_template

        if not tools:
            raise BadInput("tools=[]", "must be a list of functions", "write wb.Tools([add])")
        if isinstance(tool_format, Mapping):
            check_template(tool_format)
        elif tool_format is not None:
            one_of("tool_format", tool_format, tuple(FORMATS))
        made = [Tool.of(tool) for tool in tools]
        self.by_name = {tool.name: tool for tool in made}
        if len(self.by_name) < len(made):
            names = [tool.name for tool in made]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInput(f"two tools {twice!r}", "the model calls them by name", "rename one of them")
        self.system, self.tool_format, self.timeout_s = system, tool_format, timeout_s
        self.max_characters, self.on_error = max_characters, on_error

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self.by_name.values()]

    @property
    def shows_tools(self) -> bool:
        """Whether the system message shows the tools, instead of the chat template."""
        return self.system is not None and PLACE in self.system

    @functools.cached_property
    def system_message(self) -> str:
        shown = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.tools)
        return (self.system or "").replace(PLACE, shown)

    def __workbench_needs__(self) -> None:
        """Raise an error if one of the tools cannot work here, see `workbench.support.calls.needs`."""
        for tool in self.by_name.values():
            check_needs(tool.function)

    def __call__(self) -> ToolConversation:
        return ToolConversation(self)

    def __repr__(self) -> str:
        return f"Tools({', '.join(self.by_name)})"


class ToolConversation:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def reset(self, prompt: str, messages: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        first = list(messages or [{"role": "user", "content": prompt}])
        if not (system := self._tools.system_message):
            return first
        if first[0]["role"] != "system":
            return [{"role": "system", "content": system}, *first]
        return [{**first[0], "content": f"{system}\n\n{first[0]['content']}"}, *first[1:]]

    async def step(self, message: Message) -> tuple[list[dict[str, Any]] | None, float, bool]:
        calls, invalid = message.get("tool_calls", []), message.get("invalid_tool_calls", [])
        if not calls and not invalid:
            return None, 0.0, True
        results = await asyncio.gather(*(self._answer(call["function"]) for call in calls))
        answers = [
            {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return [*answers, *({"role": "tool", "content": f"Error: {one['error']}"} for one in invalid)], 0.0, False

    async def _answer(self, call: Mapping[str, Any]) -> str:
        tool = self._tools.by_name.get(call["name"])
        if tool is None:
            return f"Error: there is no tool {call['name']!r:.60}; there are {', '.join(self._tools.by_name)}"
        try:
            arguments = tool.arguments(call["arguments"])
        except _WrongCall as wrong:
            return f"Error: {short(str(wrong), self._tools.max_characters)}"
        try:
            text = result_text(tool.name, await self._result(tool, arguments))
            if len(text) > self._tools.max_characters and self._tools.on_error == "fail":
                raise ToolFailed(f"{tool.name} returned {len(text)} characters, over {self._tools.max_characters}")
        except ToolFailed as failure:
            if self._tools.on_error == "fail":
                raise
            return f"Error: {short(str(failure), self._tools.max_characters)}"
        most = self._tools.max_characters
        return text if len(text) <= most else f"{text[:most]}\n(cut: these are {most} of {len(text)} characters)"

    async def _result(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        seconds = self._tools.timeout_s
        try:
            if tool.prepare is not None:
                await tool.prepare()
            call = functools.partial(tool.function, **arguments)
            result = call() if inspect.iscoroutinefunction(call) else await _in_thread(call, seconds)
            return await _within(seconds, asyncio.ensure_future(result)) if inspect.isawaitable(result) else result
        except TooLong:
            raise ToolFailed(f"{tool.name} took more than {seconds:g} s") from None
        except Exception as error:
            raise ToolFailed(f"{tool.name} raised {type(error).__name__}: {plain_text(str(error))}") from error


def result_text(name: str, result: Any) -> str:
    """Return a tool's result as text for the model: a text unchanged, other values as JSON. Raises `ToolFailed` for a
    value that JSON cannot hold."""
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailed(
            f"{name} returned {type(result).__name__}, which is not JSON: {plain_text(str(error))}"
        ) from error
    if not is_text(text):
        raise ToolFailed(f"{name} returned a text with half a character")
    return text


async def _within(seconds: float, future: asyncio.Future[Any]) -> Any:
    """Return the result of a future. After so many seconds, cancel it and raise `TooLong`."""
    try:
        if not (await asyncio.wait({future}, timeout=seconds))[0]:
            raise TooLong
        value, error = _outcome(future.result)
        if error is not None:
            raise error
        return value
    finally:
        future.cancel()


async def _in_thread(call: Callable[[], Any], seconds: float) -> Any:
    """Make a call in a thread of its own, and return its result. Raises `TooLong` after so many seconds; then the call
    ends as soon as it executes Python code again."""
    answered: concurrent.futures.Future[tuple[Any, Exception | None]] = concurrent.futures.Future()

    def run() -> None:
        # after the time limit the thread ends, and its result is dropped
        with contextlib.suppress(TooLong, concurrent.futures.InvalidStateError):
            with time_limit(seconds):
                outcome = _outcome(call)
            answered.set_result(outcome)

    thread = threading.Thread(target=run, daemon=True, name="tool")
    thread.start()
    try:
        value, error = await _within(seconds, asyncio.wrap_future(answered))
    finally:
        time_limit.end(thread)
    if error is not None:
        raise error
    return value


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of a call, or its error in a class that a future accepts."""
    try:
        return call(), None
    except TooLong:
        raise
    except StopIteration as problem:
        return None, RuntimeError(f"StopIteration: {problem}")
    except Exception as problem:
        return None, problem
    except BaseException as problem:  # a tool must not end its process (SystemExit) or task (CancelledError)
        return None, RuntimeError(f"{type(problem).__name__}: {problem}")
