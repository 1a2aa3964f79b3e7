"""Keep the progress bars and notices of libraries out of the reader's cells."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers logs errors only and draws no progress bars; what was set before is put back."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def no_chatter() -> Iterator[None]:
    """`quiet_transformers`, and no progress bars or warnings of what transformers imports while it writes a model.

    Works on the whole process, so only around work that happens once: preparing a model folder.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)
