"""What this process and its children write to a file descriptor, below Python's streams."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Inside, what is written to descriptor 2 is held back: written out where the body raises, else dropped.

    A compiler that the body starts writes there. `contextlib.redirect_stderr` would not hold it back, and in a Jupyter
    kernel `sys.stderr.fileno()` is another descriptor.
    """
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
