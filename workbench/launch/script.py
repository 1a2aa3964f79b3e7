"""Runs a `main` as a script: its parameters become command-line options, in addition to those of every script.

    if __name__ == "__main__":
        wb.script.run(main)

A parameter is a whole number, a number, a text, a bool (--flag, --no-flag), one of a `Literal`, any of these or None
("none"), a list or tuple of them, or a dict (as JSON); `Annotated[int, "of the loop"]` sets its help. A parameter with
the name of an option of every script replaces that option, and the script decides what it does.

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
from typing import Any, NoReturn

from workbench.display import progress
from workbench.errors import BadInput, StageInterrupted, WorkbenchError
from workbench.launch import arguments as of_open
from workbench.launch.options import Option, Parser, options_of
from workbench.support.checked_calls import checked_call
from workbench.support.replaced import replaced

DONE, FAILED, WRONG_USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143

FLAGS = {
    "--keep": "keep the workbench running for wb.attach, even if the script closes it",
    "--quiet": "show no progress",
    "--traceback": "show where an error of the workbench comes from",
}


@checked_call("wb.script.run")
def run(main: Callable[..., Any], argv: Sequence[str] | None = None) -> NoReturn:
    """Call `main` with the options of the command line, close the workbenches that it opened, and exit.

    A coroutine function runs in `asyncio.run`. argv: default `sys.argv[1:]`. The message of a `WorkbenchError` goes to
    stderr; other exceptions keep their traceback. The run folders are printed at the end.
    """
    try:
        options = options_of(main)
        parser = _parser(main, options)
    except BadInput as error:
        _fail(error)
    read = vars(parser.parse_args(argv))
    opening_options = {f"open.{name}": option for name, option in of_open.OPTIONS.items()}
    try:
        for name, option in (opening_options | options).items():
            if name in read:
                read[name] = option.value(read[name])
        if read.get("open.resume") is not None:
            from workbench.session.checkpoint import find_checkpoint

            find_checkpoint(read["open.resume"])
    except BadInput as error:
        parser.error(str(error))
    except WorkbenchError as error:
        _fail(error)
    given = sys.argv[1:] if argv is None else argv
    defaults = {name: parameter.default for name, parameter in inspect.signature(main).parameters.items()}
    script = of_open.Script(
        command=(sys.argv[0], *(word.partition("=")[0] for word in given if word.startswith("--"))),
        options={name: read.get(name, default) for name, default in defaults.items()},
        opening={name: read[f"open.{name}"] for name in of_open.OPTIONS if f"open.{name}" in read},
        keep=read.get("script.keep", False),
    )
    shown = progress.show("nothing" if read.get("script.quiet") else "logged")
    try:
        with replaced(of_open, "running", script):
            code = _carry_out(main, script, read.get("script.traceback", False))
    finally:
        progress.show(shown)
    raise SystemExit(code)


def _carry_out(main: Callable[..., Any], script: of_open.Script, with_traceback: bool) -> int:
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


def _close(script: of_open.Script, failed: bool) -> None:
    """Close the workbenches that the script has opened and not closed itself, and print their run folders."""
    with contextlib.ExitStack() as each:  # continue even if one of them does not close
        for lab in script.labs:
            print(lab.run_folder)
            if lab.stays and not progress.is_quiet():
                print(f"{lab.name} keeps running: wb.attach({lab.name!r}), or wb stop {lab.name}", file=sys.stderr)
            if not lab.attached:
                each.callback(lab.close)
            each.callback(lab.telemetry.sinks.close, failed=failed)


@contextlib.contextmanager
def _termination() -> Iterator[threading.Event]:
    """Inside, SIGTERM interrupts like Ctrl-C, so that no host is left behind; the event is set when SIGTERM came."""
    terminated = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that closing is not interrupted
        terminated.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser(main: Callable[..., Any], options: dict[str, Option]) -> Parser:
    text = getattr(sys.modules.get(main.__module__), "__doc__", None) or main.__doc__ or ""
    parser = Parser(description=inspect.cleandoc(text), formatter_class=argparse.RawDescriptionHelpFormatter)
    if options:
        own = parser.add_argument_group("options of this script")
        for name, option in options.items():
            option.add_to(own, name)
    taken = {option.flag for option in options.values()}
    every = parser.add_argument_group("options of every script", "They override values in the script.")
    for name, option in of_open.OPTIONS.items():
        if option.flag not in taken:
            option.add_to(every, f"open.{name}")
    for flag, text in FLAGS.items():
        if flag not in taken:
            every.add_argument(flag, dest=f"script.{flag[2:]}", action="store_true", help=text)
    return parser


def _fail(error: WorkbenchError) -> NoReturn:
    print(f"{_program()}: {error}", file=sys.stderr)
    raise SystemExit(FAILED)


def _program() -> str:
    return sys.argv[0].rpartition("/")[2]
