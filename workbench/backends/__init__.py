"""Where hosts live: in Ray actors, or inside the kernel."""

from workbench.backends.base import Backend, Pending
from workbench.backends.inline import InlineBackend
from workbench.backends.ray import RayBackend

__all__ = ["Backend", "InlineBackend", "Pending", "RayBackend"]
