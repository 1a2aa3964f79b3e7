"""Tools of an MCP server that communicates over stdin and stdout (https://modelcontextprotocol.io), for `wb.Tools`.

    tools = wb.adapters.mcp_tools(["npx", "-y", "@modelcontextprotocol/server-filesystem", "/data"])
    lab.actor.generate_sequences(batch, environment=wb.Tools(tools))

The server is started in this process to list its tools, and ended; then it is started once in each process that makes
calls, for all conversations there. It ends with the rollout.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.data.tools import Tool
from workbench.errors import BadInput, MissingDependency
from workbench.errors.plain_text import plain_text
from workbench.support.checked_calls import checked_call

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

ASKING_S = 60.0  # the time limit for starting a server and listing its tools
ANSWERING_S = 5.0  # the time limit for listing them again, after a call that was cancelled


@dataclass(frozen=True)
class Server:
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def client(self) -> Client:
        """Return a connection, which is open inside `async with`. The server's stderr goes to the stderr of the
        process, because a notebook's `sys.stderr` is no file."""
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError:
            raise MissingDependency.of("the package mcp 2", "it connects to MCP servers", "agents") from None
        program, *rest = self.command
        parameters = StdioServerParameters(command=program, args=rest, env=dict(self.environment))
        return Client(stdio_client(parameters, sys.__stderr__ or sys.stderr))


@checked_call("wb.adapters.mcp_tools")
def mcp_tools(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> list[Tool]:
    """Return the tools of an MCP server, for `wb.Tools`.

    command: starts the server. environment: variables that the server gets besides the usual ones (PATH, HOME and the
    like). The server checks the arguments of calls; the model is told about errors that the server reports.
    Raises `MissingDependency` without the package mcp, `BadInput` for a server that does not start.
    """
    if not command:
        raise BadInput("command=[]", "must be the command that starts the server", "write ['python', 'server.py']")
    server = Server(tuple(command), tuple(sorted((environment or {}).items())))

    async def ask() -> list[Any]:
        async with asyncio.timeout(ASKING_S), server.client() as client:
            return list((await client.list_tools()).tools)

    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may run an event loop, like a notebook
            found = {tool.name: tool for tool in thread.submit(asyncio.run, ask()).result()}
    except MissingDependency:
        raise
    except Exception as error:
        raise BadInput(
            f"the MCP server {' '.join(command)!r:.120}",
            f"did not list its tools: {plain_text(_first(error), 200)}",
            "start it in a shell, and read what it prints",
        ) from error
    return [
        Tool(
            {
                "type": "function",
                "function": {"name": name, "description": tool.description or "", "parameters": tool.input_schema},
            },
            functools.partial(_call, server, name),
            prepare=functools.partial(_connected, server),
        )
        for name, tool in found.items()
    ]


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


# --- in the process that makes the calls ------------------------------------------------------------------------------

_open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Server, Connection]] = weakref.WeakKeyDictionary()


class Connection:
    """A server that is kept running for the calls of an event loop. One task opens and closes the client, because the
    client requires the same task for both. cancelled: whether a call was cancelled, perhaps as the server hangs."""

    cancelled = False

    def __init__(self, server: Server) -> None:
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._task = asyncio.create_task(self._hold(server))

    async def _hold(self, server: Server) -> None:
        try:
            async with server.client() as client:
                self.client.set_result(client)
                await self.lost.wait()  # or until the event loop cancels its tasks
        except Exception as error:
            if self.client.done():
                raise
            self.client.set_exception(RuntimeError(f"the MCP server does not start: {_first(error)}"))
        finally:
            self.lost.set()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Return the result of a tool call. Marks the connection as lost if the server has ended."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            return await self.client.result().call_tool(name, dict(arguments))
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        except MCPError as error:
            if (error.code, error.message) == (CONNECTION_CLOSED, "Connection closed"):  # servers may use the code, too
                self.lost.set()
            raise

    async def check(self) -> None:
        """After a call was cancelled, mark the connection as lost if the server answers nothing. Wait for the end of a
        lost server, so that there are never two."""
        if self.cancelled and not self.lost.is_set():
            try:
                await asyncio.wait_for(self.client.result().list_tools(cache_mode="bypass"), ANSWERING_S)
                self.cancelled = False
            except Exception:
                self.lost.set()
        if self.lost.is_set():
            await asyncio.wait([self._task])


async def _connected(server: Server) -> Connection:
    """Return a connection with a running server; start the server if necessary."""
    connections = _open.setdefault(asyncio.get_running_loop(), {})
    if server in connections:
        await connections[server].check()
    if server not in connections or connections[server].lost.is_set():
        connections[server] = Connection(server)
    await asyncio.shield(connections[server].client)
    return connections[server]


async def _call(server: Server, name: str, /, **arguments: Any) -> str:
    result = await (await _connected(server)).call(name, arguments)
    text = "\n".join(part.text for part in result.content if part.type == "text")
    if result.is_error:
        raise RuntimeError(text or "the server says that the call failed")
    others = [part.type for part in result.content if part.type != "text"]
    return text + (f"\n({', '.join(others)}: not shown)" if others else "")
