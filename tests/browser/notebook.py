"""A real JupyterLab with a notebook in it, seen by a real browser; its kernel can also be asked directly."""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import BlockingKernelClient

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
# no inline scripts, nothing from elsewhere: JupyterLab checks its settings with eval, and anywidget loads from blobs
POLICY = (
    "default-src 'self'; script-src 'self' blob: 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' blob: ws:; worker-src 'self' blob:"
)
PATIENCE_S = 240  # what a busy machine may take for anything
ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "runs" / "browser"
OUTPUTS = "(n) => jupyterapp.shell.currentWidget.content.widgets[n].model.outputs.toJSON()"
READY = """async () => {
  const { context, sessionContext } = jupyterapp.shell.currentWidget;
  await Promise.all([context.ready, sessionContext.ready]);
}"""
TAKE = """(cells) => {
  const model = jupyterapp.shell.currentWidget.content.model.sharedModel;
  const before = model.cells.length;
  model.insertCells(0, cells.map((source) => ({ cell_type: "code", source, metadata: {}, outputs: [] })));
  model.deleteCellRange(cells.length, cells.length + before);
}"""
IMPORTS = "import workbench.controller, workbench_widgets.panel, tests.cases, transformers.models.llama.modeling_llama"
STACKS = (  # of the kernel's threads, by name
    "{thread.name: __import__('traceback').format_stack(__import__('sys')._current_frames()[thread.ident])[-4:]"
    " for thread in __import__('threading').enumerate()}"
)


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """A server on a folder; gives its address with token."""
    token, runtime = secrets.token_hex(8), folder / "runtime"
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(folder / "config")}
    environment |= {
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    settings = [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--no-browser", "--port=0"]
    settings.append("--LabApp.expose_app_in_browser=True")  # its model of a notebook tells errors from warnings
    settings.append("--KernelManager.shutdown_wait_time=1")  # for kernels of tests that have ended, in seconds
    settings += ["--ServerApp.disable_check_xsrf=True", "--allow-root", "--ip=127.0.0.1"]
    settings.append(f"--ServerApp.tornado_settings={{'headers': {{'Content-Security-Policy': \"{POLICY}\"}}}}")
    quiet = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    with (folder / "server.log").open("w") as log:
        command = [sys.executable, "-m", "jupyterlab", *settings]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield _address(server, runtime, token)
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[bytes], runtime: Path, token: str) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for found in runtime.glob("jpserver-*.json"):
            with suppress(ValueError, KeyError):
                return f"{json.loads(found.read_text())['url']}doc/tree/{{name}}?token={token}"
        assert server.poll() is None, "JupyterLab ended at once: see server.log"
        time.sleep(0.2)
    raise TimeoutError("JupyterLab did not start")


def two_frames(page: Any) -> None:
    """Until the page has drawn what it has, and has heard of its sizes."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def accessible(element: Any) -> list[dict[str, Any]]:
    """An element's part of the browser's accessibility tree, without what the browser ignores."""
    session = element.page.context.new_cdp_session(element.page)
    element.evaluate("(one) => one.setAttribute('data-read', '')")
    root = session.send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
    node = session.send("DOM.querySelector", {"nodeId": root, "selector": "[data-read]"})["nodeId"]
    backend = session.send("DOM.describeNode", {"nodeId": node})["node"]["backendNodeId"]
    found = session.send("Accessibility.queryAXTree", {"backendNodeId": backend})["nodes"]
    session.detach()
    element.evaluate("(one) => one.removeAttribute('data-read')")
    return [one for one in found if not one["ignored"]]


def picture(page: Any, name: str) -> Path:
    """Keep what the page shows under runs/browser/."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.png"
    page.screenshot(path=str(path))
    return path


def _written(file: Path) -> Path:
    """This file, once all of it is written."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(OSError, json.JSONDecodeError):
            if json.loads(file.read_text()):
                return file
        time.sleep(0.1)
    raise TimeoutError(f"no kernel wrote {file}")


class CellFailed(AssertionError):
    """A cell that should not have failed did; its text is the cell's error."""


class Notebook:
    """A notebook that is open in a page.

    cells: their texts; `run(n)` runs one as a user does, with Shift+Enter in it. `ask(expression)` asks the kernel
    directly, which works whenever no cell is running.
    """

    def __init__(self, page: Any, address: str, folder: Path, cells: Sequence[str], name: str = "test") -> None:
        self.page, self._address = page, address
        file = f"{name}-{secrets.token_hex(3)}.ipynb"
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, folder / file)
        self.path = folder / file
        wanted = {"path": file, "name": file, "type": "notebook", "kernel": {"name": "python3"}}
        self._session = json.loads(self._server("POST", "", wanted))
        connection = folder / "runtime" / f"kernel-{self._session['kernel']['id']}.json"
        self._client = BlockingKernelClient(connection_file=str(_written(connection)))
        self._client.load_connection_file()
        self._client.start_channels()
        self._client.execute(IMPORTS, silent=True)  # while the page is built
        page.goto(address.format(name=file), wait_until="domcontentloaded")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.evaluate(READY)
        self.wait_until_idle()

    def _server(self, method: str, session: str, data: Any = None) -> bytes:
        """Ask the server about sessions."""
        server, _, rest = self._address.partition("/doc/tree/")
        url = f"{server}/api/sessions{session}?{rest.partition('?')[2]}"
        body = None if data is None else json.dumps(data).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, method=method)) as answer:
            told: bytes = answer.read()
        return told

    def take(self, cells: Sequence[str]) -> None:
        """These cells instead of those that there are; the kernel goes on."""
        self.page.set_viewport_size({"width": 1300, "height": 1100})
        self.page.evaluate(TAKE, list(cells))
        self.wait_for_count(self.page.locator(".jp-Notebook .jp-CodeCell"), len(cells))

    def save(self) -> None:
        """Write what the page has to the file, in place of what an earlier test left there."""
        self.page.evaluate("() => jupyterapp.shell.currentWidget.context.save()")

    def leave(self) -> bool:
        """Close what is called `lab`, for the test that comes next; whether that went well."""
        with suppress(Exception):
            self.wait_until_idle()
            self.ask("globals().pop('lab').close() if 'lab' in globals() else None")
            return True
        return False

    def wait_until_idle(self) -> None:
        self.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]')

    def start(self, n: int) -> Any:
        """Run cell n and do not wait; its element."""
        cell = self.page.locator(".jp-Notebook .jp-CodeCell").nth(n)
        cell.scroll_into_view_if_needed()
        before, deadline = cell.locator(".jp-InputPrompt").inner_text(), time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:  # a page that is still being built can take the focus away, or drop a key
            cell.locator(".cm-content").click()
            with suppress(Exception):
                cell.locator(".cm-editor.cm-focused").wait_for(timeout=2_000)
                self.page.keyboard.press("Control+Enter")
                for _ in range(200):
                    if cell.locator(".jp-InputPrompt").inner_text() != before:
                        return cell
                    time.sleep(0.1)
        raise TimeoutError(f"cell {n} did not start, see {self.picture('failed')}")

    def run(self, n: int, timeout_s: float = PATIENCE_S, *, fails: bool = False) -> Any:
        """Run cell n and wait until it has ended; its element. Raises `CellFailed` with the cell's error; fails: raises
        AssertionError where there is none."""
        cell = self.start(n)
        self.wait_until_ended(n, timeout_s)
        error = self.error(n)
        if error and not fails:
            raise CellFailed(f"cell {n}: {error}")
        assert error or not fails, f"cell {n} did not fail, see {self.picture('failed')}"
        return cell

    def number(self, n: int) -> int:
        """The number that cell n has from the kernel."""
        return int(self.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").nth(n).inner_text().strip("[]: \n"))

    def outputs(self, n: int) -> list[dict[str, Any]]:
        """The outputs of cell n, as the page has them and would save them."""
        found: list[dict[str, Any]] = self.page.evaluate(OUTPUTS, n)
        return found

    def error(self, n: int) -> str:
        """The error that cell n ended with; "": none."""
        for output in self.outputs(n):
            if output["output_type"] == "error":
                told = "\n".join(output["traceback"]) or f"{output['ename']}: {output['evalue']}"
                return re.sub(r"\x1b\[[0-9;]*m", "", told)
        return ""

    def wait_until_ended(self, n: int, timeout_s: float = PATIENCE_S) -> None:
        """Until cell n, which was started, has its number."""
        cell = self.page.locator(".jp-Notebook .jp-CodeCell").nth(n)
        deadline = time.monotonic() + timeout_s
        while not cell.locator(".jp-InputPrompt").inner_text().strip("[]: \n").isdigit():
            if time.monotonic() > deadline:
                raise TimeoutError(f"cell {n}, see {self.picture('failed')}: {cell.inner_text()}")
            time.sleep(0.1)

    def ask(self, expression: str, timeout_s: float = PATIENCE_S) -> Any:
        """The value of an expression in the kernel: plain values only."""
        reply = self._client.execute(
            "", silent=True, user_expressions={"asked": f"repr({expression})"}, reply=True, timeout=timeout_s
        )
        told = reply["content"]["user_expressions"]["asked"]
        assert told["status"] == "ok", told
        return ast.literal_eval(ast.literal_eval(told["data"]["text/plain"]))

    def wait_for(self, expression: str, timeout_s: float = PATIENCE_S) -> None:
        """Until the kernel says that an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.ask(f"bool({expression})"):
            assert time.monotonic() < deadline, f"{expression} did not come true"
            time.sleep(0.1)

    def wait_for_count(self, found: Any, n: int, timeout_s: float = PATIENCE_S) -> None:
        """Until the page has n of what a locator finds; the error tells what page and kernel have, and what it does."""
        deadline = time.monotonic() + timeout_s
        while (count := found.count()) != n:
            if time.monotonic() > deadline:
                panels = [panel.inner_text() for panel in self.page.locator(".wb-panel").all()]
                drawn = [(one.get_attribute("data-view"), one.get_attribute("data-drawn")) for one in
                         self.page.locator(".wb-panel section").all()]  # fmt: skip
                picture = self.picture("failed")
                raise TimeoutError(f"{count}, not {n}: {drawn} {panels}, see {picture}\n{self.ask(STACKS)}")
            time.sleep(0.1)

    def in_thread(self, call: str, timeout_s: float = PATIENCE_S) -> None:
        """Make this call in a thread of the kernel, whose main thread stays free for the page, and wait for its end."""
        self.ask(f"__import__('threading').Thread(target=lambda: {call}, name='called').start()")
        self.wait_for("'called' not in [t.name for t in __import__('threading').enumerate()]", timeout_s)

    def picture(self, name: str) -> Path:
        return picture(self.page, name)

    def close(self) -> None:
        """Leave the page, and end its kernel: through the server, which would start a new one for one that died."""
        self._client.stop_channels()
        self.page.context.close()
        self._server("DELETE", f"/{self._session['id']}")
