"""Waiting without sleeping for a fixed time: poll a condition until a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 20.0


def eventually(look: Callable[[], T | None]) -> T:
    """What ``look`` finds, once it is true (not None, 0, or empty); fails after 20 s."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError("it did not happen in time")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # gone in between, or no /proc here
        return not Path("/proc/self").exists()
