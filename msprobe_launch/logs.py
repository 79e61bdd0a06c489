"""The one logger set-up of both commands and of the ranks."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOGGER_NAME = "msprobe"


def get_logger() -> logging.Logger:
    """The project's logger; `configure` gives it its handler."""
    return logging.getLogger(LOGGER_NAME)


def configure(prefix: str = "msprobe", *, level: int = logging.INFO, stream: TextIO | None = None) -> logging.Logger:
    """One handler that writes `[prefix] message` lines to `stream` (default: the current stderr).

    The logger does not propagate: a training script's own logging set-up neither repeats nor loses our lines,
    and we never touch the root logger.
    """
    logger = get_logger()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(f"[{prefix}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return logger
