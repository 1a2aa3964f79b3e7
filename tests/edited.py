"""Module files of a test's own, which it edits."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

CRITIC = """
    import torch
    import workbench as wb
    from workbench.messages.calls import Output
    from workbench.workers.roles.critic import CriticWorker
    from {prefix}_maths import bound, SCALE


    class Bounded(CriticWorker):
        calls = 0

        @wb.register(
            "3D_PROTO", reads=("prompt_ids", "response_ids", "response_mask", "values", "returns"),
            minibatched=True, updates=True,
        )
        def regress(self, batch) -> Output:
            self.calls += 1
            return self.update_critic(batch, clip=bound())

        @wb.register("ONE_TO_ALL")
        def told(self):
            return self.calls, bound(), SCALE
"""
MATHS = """
    SCALE = 2.0

    def bound():
        return 0.2
"""
REWARDS = """
    import workbench as wb

    seen = []

    @wb.limits(own_process=False)
    def score(prompt, response, **row):
        return 1.0
"""


class Files:
    """Modules `<prefix>_<name>` in a folder that can be imported from."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix

    def path(self, name: str) -> Path:
        return self.folder / f"{self.prefix}_{name}.py"

    def write(self, name: str, text: str) -> None:
        self.path(name).write_text(dedent(text).replace("{prefix}", self.prefix))

    def edit(self, name: str, old: str, new: str) -> None:
        text = self.path(name).read_text()
        assert text.count(old) == 1, (old, text)
        self.path(name).write_text(text.replace(old, new))

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.prefix}_{name}")


@contextmanager
def edited_files(folder: Path, prefix: str) -> Iterator[Files]:
    """The files of a worker, of what it computes with, and of a reward; forgotten at the end."""
    folder.mkdir(exist_ok=True)
    files = Files(folder, prefix)
    for name, text in {"critic": CRITIC, "maths": MATHS, "rewards": REWARDS}.items():
        files.write(name, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield files
    for name in [name for name in sys.modules if name.startswith(f"{prefix}_")]:
        del sys.modules[name]
