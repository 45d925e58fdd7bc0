"""Logging of every command: to stderr, because stdout is for data."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

ROOT = "tokenmill"
_FORMAT = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
_VERBOSE_FORMAT = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever stderr is now: a live progress bar puts its own in place, to print above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup() -> None:
    """Send the records of all loggers of this package to stderr, from INFO upwards."""
    handler = _StderrHandler(sys.stderr)
    handler.setFormatter(_FORMAT)
    logger = logging.getLogger(ROOT)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def be_verbose() -> None:
    """Log everything (``-v``); errors then come with their traceback."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.DEBUG)
    for handler in logger.handlers:
        handler.setFormatter(_VERBOSE_FORMAT)


def be_quiet() -> None:
    """Log warnings and errors only (``-q``)."""
    logging.getLogger(ROOT).setLevel(logging.WARNING)


def is_verbose() -> bool:
    """Whether ``-v`` was given."""
    return logging.getLogger(ROOT).isEnabledFor(logging.DEBUG)


def is_quiet() -> bool:
    """Whether ``-q`` was given."""
    return not logging.getLogger(ROOT).isEnabledFor(logging.INFO)
