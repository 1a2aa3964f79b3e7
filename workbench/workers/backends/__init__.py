"""Where hosts live: in Ray actors, or inside the kernel."""

from workbench.workers.backends.base import Backend, Pending
from workbench.workers.backends.inline import InlineBackend
from workbench.workers.backends.ray import RayBackend

__all__ = ["Backend", "InlineBackend", "Pending", "RayBackend"]
