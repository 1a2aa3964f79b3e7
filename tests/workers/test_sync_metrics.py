"""The metrics of a weight sync reach the generation that follows it, also where that is made again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import hosts_of, tiny_lab
from workbench.errors import StageInterrupted
from workbench.workers.worker import Context


def test_a_generation_that_was_interrupted_reports_the_sync_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after the sync, between two tokens; then when its result was on the way to its caller."""
    with tiny_lab("interrupted", tmp_path, backend="inline") as lab:
        ppo = wb.PPO(lab, prompts=2, sampling=wb.Sampling(max_new_tokens=6))
        ppo.iterate()
        clean_path = lab.save(tmp_path / "one").folder
        expected = ppo.iterate()
        assert "generate_sequences/sync_gap/mean" in expected
        (host,) = hosts_of(lab).values()
        keep, progress = host._keep, Context.advance

        def pressed_between_tokens(self: Any, *given: int) -> None:
            monkeypatch.setattr(Context, "advance", progress)
            signal.raise_signal(signal.SIGINT)
            progress(self, *given)

        def pressed_at_the_end(*given: Any) -> Any:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
            return keep(*given)

        for between in (True, False):
            lab.recover(clean_path)
            ppo.step()
            if between:
                monkeypatch.setattr(Context, "advance", pressed_between_tokens)
            else:
                monkeypatch.setattr(host, "_keep", pressed_at_the_end)
            with pytest.raises(StageInterrupted, match="as before the stage"):
                ppo.step()
            assert ppo.next_stage == "generate_sequences"
            assert ppo.iterate() == expected
