"""Tools of an MCP server: one of the package's own, over stdin and stdout."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.expected import expect_error
from workbench.errors import BadInput

pytest.importorskip("mcp")

SERVER = '''
import os
import time
from mcp.server.mcpserver import MCPServer

server, calls = MCPServer("sums"), []


@server.tool()
def total(text: str) -> int:
    """The sum of numbers with a plus between them."""
    calls.append(text)
    return sum(int(part) for part in text.split("+") if part)


@server.tool()
def made() -> str:
    """How often total was called, and by which process."""
    return f"{len(calls)} {os.getpid()} {os.environ.get('SUMS', '')}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("as asked")


@server.tool()
async def leave(hang: bool = False) -> str:
    """End the server, or hang as a whole."""
    if hang:
        time.sleep(1000)
    os._exit(3)


server.run()
'''


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (path := tmp_path / "server.py").write_text(SERVER)
    return [sys.executable, str(path)]


def answers(tools: wb.Tools, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """What a model is told that makes these calls one after the other, in one event loop."""

    async def talk() -> list[str]:
        conversation, told = tools(), []
        for name, arguments in calls:
            call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
            said, *_ = await conversation.step({"role": "assistant", "content": "", "tool_calls": [call]})
            assert said is not None
            told.append(str(said[0]["content"]))
        return told

    return asyncio.run(talk())


def test_the_tools_of_a_server_are_shown_and_called(command: list[str]) -> None:
    found = wb.adapters.mcp_tools(command, environment={"SUMS": "mine"})
    assert [tool.name for tool in found] == ["total", "made", "fail", "leave"]
    schema = found[0].schema["function"]
    assert (
        schema["description"].startswith("The sum") and schema["parameters"]["properties"]["text"]["type"] == "string"
    )
    calls: list[tuple[str, dict[str, Any]]] = [
        ("total", {"text": "1+2+39"}),
        ("total", {"text": 1}),
        ("fail", {}),
        ("made", {}),
        ("made", {}),
    ]
    right, wrong, failed, first, second = answers(wb.Tools(found, timeout_s=25), *calls)
    assert right == "42"
    assert wrong.startswith("Error: total raised RuntimeError")  # the server checks
    assert failed.startswith("Error: fail raised RuntimeError")
    assert first == second and first.startswith("1 ") and first.endswith(" mine")  # one server for all calls of a loop


@pytest.mark.parametrize("hang", [False, True])
def test_a_server_that_ends_or_hangs_is_started_again(
    command: list[str], monkeypatch: pytest.MonkeyPatch, hang: bool
) -> None:
    monkeypatch.setattr(import_module("workbench.data.adapters.mcp_tools"), "ANSWERING_S", 1.0)  # it never answers
    tools = wb.Tools(wb.adapters.mcp_tools(command), timeout_s=4 if hang else 25)
    before, left, after = answers(tools, ("made", {}), ("leave", {"hang": hang}), ("made", {}))
    assert left.startswith("Error: leave took more than 4 s" if hang else "Error: leave raised")
    (_, pid, *_), (calls, anew, *_) = before.split(), after.split()
    assert calls == "0" and int(anew) != int(pid)


def test_servers_that_cannot_be_asked_are_refused(command: list[str], tmp_path: Path) -> None:
    with expect_error(BadInput, rule="did not list its tools"):
        wb.adapters.mcp_tools([sys.executable, "-c", "pass"])
    with expect_error(BadInput, rule="did not list its tools"):
        wb.adapters.mcp_tools([str(tmp_path / "none")])
    with expect_error(BadInput, rule="starts the server"):
        wb.adapters.mcp_tools([])
