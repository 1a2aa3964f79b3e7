"""Which modules of this process the user may edit: those of no installed package, nor of Python itself."""

from __future__ import annotations

import functools
import os
import site
import sysconfig
from types import ModuleType

_NOT_EDITED = ("__main__", "__mp_main__")
_INSTALLED = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
)


def editable(name: str, module: ModuleType | None) -> str | None:
    """The file of a module that the user may edit; this package is one where it is installed in place."""
    path = getattr(module, "__file__", None)
    if name in _NOT_EDITED or not isinstance(path, str) or not path.endswith(".py") or _installed(path):
        return None
    return path


@functools.cache
def _installed(path: str) -> bool:
    known = any(folder in path for folder in ("site-packages", "dist-packages"))
    return known or os.path.realpath(path).startswith(_INSTALLED)
