"""Checkpoints: the whole state of a run on disk, for `lab.save`, automatic saves, `wb.restore` and resumed scripts."""

from workbench.session.checkpoint.files import Checkpoint, find_checkpoint

__all__ = ["Checkpoint", "find_checkpoint"]
