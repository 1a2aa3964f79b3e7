"""One JupyterLab, one browser and one kernel for all tests of this folder that can share them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.browser.notebook import CHROMIUM, PATIENCE_S, Notebook, jupyter_lab

NO_BROWSER = "no Chromium here: install the system's (`apt-get install chromium`), and these tests run"


@pytest.fixture(scope="package")
def lab_address(tmp_path_factory: pytest.TempPathFactory, own_home: Path) -> Iterator[tuple[str, Path]]:
    if not CHROMIUM:
        if os.environ.get("CI"):
            pytest.fail(NO_BROWSER)
        pytest.skip(NO_BROWSER)
    folder = tmp_path_factory.mktemp("jupyter")
    with jupyter_lab(folder) as address:
        yield address, folder


@pytest.fixture(scope="package")
def browser(lab_address: tuple[str, Path]) -> Iterator[Any]:
    """Ended with this folder: while it lives, this thread has a running event loop, which others cannot do with."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def new_page(browser: Any, **options: Any) -> Any:
    context = browser.new_context(viewport={"width": 1300, "height": 1100}, **options)
    context.set_default_timeout(1000 * PATIENCE_S)
    return context.new_page()


@pytest.fixture
def open_notebook(browser: Any, lab_address: tuple[str, Path]) -> Iterator[Callable[..., Notebook]]:
    """`open_notebook([cell, ...])`: a notebook with these cells, its page and its kernel; ended with the test. More:
    options of the page's context."""
    opened: list[Notebook] = []

    def make(cells: Sequence[str], **options: Any) -> Notebook:
        opened.append(Notebook(new_page(browser, **options), *lab_address, cells))
        return opened[-1]

    yield make
    for notebook in opened:
        notebook.close()


@pytest.fixture(scope="package")
def shared(lab_address: tuple[str, Path], browser: Any) -> Iterator[list[Notebook]]:
    """The notebook that tests share; none before the first of them, and after one that failed."""
    there: list[Notebook] = []
    yield there
    for notebook in there:
        notebook.close()


@pytest.fixture
def shared_notebook(
    shared: list[Notebook], browser: Any, lab_address: tuple[str, Path], request: pytest.FixtureRequest
) -> Iterator[Callable[[Sequence[str]], Notebook]]:
    """`shared_notebook([cell, ...])`: the notebook that tests share, with these cells instead of those of the test
    before. What they call `lab` is closed with the test."""
    failed = request.session.testsfailed

    def make(cells: Sequence[str]) -> Notebook:
        if not shared:
            shared.append(Notebook(new_page(browser), *lab_address, [""]))
        shared[0].take(cells)
        return shared[0]

    yield make
    if shared and (request.session.testsfailed > failed or not shared[0].leave()):
        shared.pop().close()
