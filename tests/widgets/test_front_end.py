"""The front end's modules, put together as Jupyter needs them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from workbench_widgets.driver import FOLDER, IMPORT, module, style

FILES = sorted(path.name for path in FOLDER.glob("*.js"))


def test_what_is_imported_comes_first_and_once() -> None:
    text = module("panel.js")
    assert not IMPORT.search(text)
    assert 'from "./' not in text
    assert text.count("function make(") == 1
    assert text.index("function make(") < text.index("function render(")
    assert len(re.findall(r"^export ", text, re.MULTILINE)) == 1


def test_no_name_is_used_at_the_top_of_two_files() -> None:
    top = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) ([A-Za-z_$][\w$]*)", re.MULTILINE)
    names = Counter(name for file in FILES for name in top.findall((FOLDER / file).read_text()))
    assert [name for name, times in names.items() if times > 1] == []


def test_every_file_is_used() -> None:
    imported = {name for file in FILES for name in IMPORT.findall((FOLDER / file).read_text())}
    assert set(FILES) - imported == {"panel.js"}


def test_no_address_outside_is_asked() -> None:
    """It works offline: no script, font or picture comes from elsewhere."""
    text = module("panel.js") + style()
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}


@pytest.mark.skipif(shutil.which("node") is None, reason="install node to have the front end's syntax checked here")
@pytest.mark.parametrize("text", [*FILES, "all"])
def test_syntax(text: str, tmp_path: Path) -> None:
    file = tmp_path / "module.mjs"
    file.write_text(module("panel.js") if text == "all" else (FOLDER / text).read_text())
    checked = subprocess.run(["node", "--check", str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
