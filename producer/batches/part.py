"""The answers to one chunk, in a file that only grows: whoever goes on with it repeats nothing."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from tokenmill.producer.batches.line import Outcome, parse_outcome

_LOCK_POLL_S = 0.1


class Part:
    """One chunk's outcomes, in the order of its lines; one process at a time holds it.

    Half a line at its end, left by a process that was killed, is cut off.
    """

    def __init__(self, path: Path, *, alive: Callable[[], None]) -> None:
        self.completed = self.failed = 0
        self._file = path.open("a+b")
        try:
            while not _lock(self._file.fileno()):
                alive()  # raises when this process has no business any more
                time.sleep(_LOCK_POLL_S)
            self._recover()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def lines(self) -> int:
        """Outcomes that are there."""
        return self.completed + self.failed

    def append(self, outcomes: list[Outcome]) -> None:
        """Add outcomes, whole lines in one write."""
        if outcomes:
            self._file.write(b"".join(msgspec.json.encode(outcome) + b"\n" for outcome in outcomes))
            self._file.flush()
            for outcome in outcomes:
                self._count(outcome)

    def _recover(self) -> None:
        self._file.seek(0)
        end = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break
            self._count(parse_outcome(raw))
            end += len(raw)
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)

    def _count(self, outcome: Outcome) -> None:
        if outcome.failed:
            self.failed += 1
        else:
            self.completed += 1


def outcomes(path: Path) -> Iterator[tuple[bytes, Outcome]]:
    """The whole lines of a part, raw and read."""
    if path.exists():
        with path.open("rb") as file:
            for raw in file:
                if raw.endswith(b"\n"):
                    yield raw, parse_outcome(raw)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
