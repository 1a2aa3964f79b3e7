"""Running a `main` as a script: its parameters become options of the command line, added to those of every script.

    if __name__ == "__main__":
        wb.script.run(main)

A parameter is a whole number, a number, a text, a bool (--flag, --no-flag), one of a `Literal`, any of these or None
("none"), a list or tuple of them, or a dict (as JSON); `Annotated[int, "of the loop"]` gives its help. A parameter
with the name of an option of every script replaces that option, and the script decides what it does.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal, NoReturn, get_args, get_origin

from workbench.errors import BadInput, StageInterrupted, WorkbenchError
from workbench.launch.arguments import ARGUMENTS
from workbench.launch.script_options import add_option, option_of, parameters_of
from workbench.support.checked_calls import checked_call
from workbench.support.command_line import Parser

DONE, FAILED, WRONG_USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143

FLAGS = {
    "--keep": "leave the workbench living, for wb.attach, also where the script closes it",
    "--quiet": "show no progress",
    "--traceback": "show where an error of the workbench comes from",
}


@checked_call("wb.script.run")
def run(main: Callable[..., Any], argv: Sequence[str] | None = None) -> NoReturn:
    """Call `main` with the options of the command line, close the workbenches that it opened, and exit.

    A coroutine function runs in `asyncio.run`. argv: default `sys.argv[1:]`. The message of a `WorkbenchError` goes to
    stderr, other exceptions keep their traceback. The run folders are printed at the end.
    """
    try:
        own, parser = _parser(main)
    except BadInput as error:
        _fail(error)
    arguments = vars(parser.parse_args(argv))
    from workbench.display import progress
    from workbench.launch import overrides

    opening = {name: arguments[f"open.{name}"] for name in ARGUMENTS if f"open.{name}" in arguments}
    for name, value in opening.items():
        try:
            overrides.check(name, value, _option(name))
        except BadInput as error:
            parser.error(str(error))
        except WorkbenchError as error:
            _fail(error)
    given = sys.argv[1:] if argv is None else argv
    script = overrides.Script(
        command=(sys.argv[0], *(word.partition("=")[0] for word in given if word.startswith("--"))),
        options={name: arguments.get(name, parameter.default) for name, parameter in own.items()},
        opening=opening,
        keep=arguments.get("script.keep", False),
    )
    before, shown = overrides.running, progress.show("nothing" if arguments.get("script.quiet") else "logged")
    overrides.running = script
    try:
        code = _carry_out(main, script, arguments.get("script.traceback", False))
    finally:
        overrides.running = before
        progress.show(shown)
    raise SystemExit(code)


def _carry_out(main: Callable[..., Any], script: Any, with_traceback: bool) -> int:
    code = FAILED
    with _termination() as terminated:
        try:
            made = main(**script.options)
            if inspect.iscoroutine(made):
                asyncio.run(made)
            code = DONE
        except (KeyboardInterrupt, StageInterrupted) as error:
            code = TERMINATED if terminated.is_set() else INTERRUPTED
            print(str(error) or "interrupted", file=sys.stderr)
        except WorkbenchError as error:
            if with_traceback:
                traceback.print_exc()
            print(f"{_program()}: {error}", file=sys.stderr)
        finally:
            _close(script, failed=code != DONE)
    return code


def _close(script: Any, failed: bool) -> None:
    """Close what the script has opened and not closed itself, and say where it is written."""
    from workbench.display import progress

    with contextlib.ExitStack() as each:  # also where one of them does not close
        for lab in script.labs:
            print(lab.run_folder)
            if lab.stays and not progress.is_quiet():
                print(f"{lab.name} lives on: wb.attach({lab.name!r}), or wb stop {lab.name}", file=sys.stderr)
            if not lab.attached:
                each.callback(lab.close)
            each.callback(lab.telemetry.sinks.close, failed=failed)


@contextlib.contextmanager
def _termination() -> Iterator[threading.Event]:
    """Inside, SIGTERM interrupts as Ctrl-C does, so that no host is left behind; the event says that it came."""
    terminated = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # closing goes on
        terminated.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser(main: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], argparse.ArgumentParser]:
    """The parameters of `main` by name, and the parser of all options."""
    parameters = parameters_of(main)
    text = getattr(sys.modules.get(main.__module__), "__doc__", None) or main.__doc__ or ""
    parser = Parser(description=inspect.cleandoc(text), formatter_class=argparse.RawDescriptionHelpFormatter)
    if parameters:
        own = parser.add_argument_group("options of this script")
        for option, parameter in parameters.items():
            add_option(own, option, parameter)
    every = parser.add_argument_group("options of every script", "They override what the script says.")
    for name, argument in ARGUMENTS.items():
        if argument.help and _option(name) not in parameters:
            reading: dict[str, Any] = {"type": int} if argument.metavar == "N" else {"choices": _choices(argument.hint)}
            reading |= {"action": "append"} if name == "track" else {}
            every.add_argument(
                _option(name), dest=f"open.{name}", default=argparse.SUPPRESS,
                help=argument.help, metavar=argument.metavar, **reading,
            )  # fmt: skip
    for option, text in FLAGS.items():
        if option not in parameters:
            every.add_argument(option, dest=f"script.{option[2:]}", action="store_true", help=text)
    return {parameter.name: parameter for parameter in parameters.values()}, parser


def _option(name: str) -> str:
    """What the option of an argument of `wb.open` is called."""
    return ARGUMENTS[name].option or option_of(name)


def _choices(hint: Any) -> tuple[str, ...] | None:
    """The values of an argument that takes one of a few."""
    literals = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
    return get_args(literals[0]) if literals else None


def _fail(error: WorkbenchError) -> NoReturn:
    print(f"{_program()}: {error}", file=sys.stderr)
    raise SystemExit(FAILED)


def _program() -> str:
    return sys.argv[0].rpartition("/")[2]
