"""The whole of a run on disk: `lab.save`, automatic saves, `wb.restore`, and scripts that are resumed."""

from workbench.session.checkpoint.files import Checkpoint, find_checkpoint

__all__ = ["Checkpoint", "find_checkpoint"]
