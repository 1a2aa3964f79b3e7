"""One JupyterLab and one browser for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.browser.notebook import CHROMIUM, PATIENCE_S, Notebook, jupyter_lab

NO_BROWSER = "no Chromium here: install the system's (`apt-get install chromium`), and these tests run"


@pytest.fixture(scope="session")
def lab_address(tmp_path_factory: pytest.TempPathFactory, own_home: Path) -> Iterator[tuple[str, Path]]:
    if not CHROMIUM:
        if os.environ.get("CI"):
            pytest.fail(NO_BROWSER)
        pytest.skip(NO_BROWSER)
    folder = tmp_path_factory.mktemp("jupyter")
    with jupyter_lab(folder) as address:
        yield address, folder


@pytest.fixture(scope="module")
def browser(lab_address: tuple[str, Path]) -> Iterator[Any]:
    """Ended with each file: while it lives, this thread has a running event loop, which others cannot do with."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_notebook(browser: Any, lab_address: tuple[str, Path]) -> Iterator[Callable[[Sequence[str]], Notebook]]:
    """`open_notebook([cell, ...])`: a notebook with these cells in a page of its own; ended with the test."""
    address, folder = lab_address
    opened: list[Notebook] = []
    context = browser.new_context(viewport={"width": 1300, "height": 1100})
    context.set_default_timeout(1000 * PATIENCE_S)

    def make(cells: Sequence[str]) -> Notebook:
        opened.append(Notebook(context.new_page(), address, folder, cells))
        return opened[-1]

    yield make
    for notebook in opened:
        notebook.close()
    context.close()
