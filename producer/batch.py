"""A file of requests in, a file of replies out, in the same order."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from tokenmill.producer.feed import WINDOW, Feed
from tokenmill.producer.jsonl import STDIO, RequestFile, Size
from tokenmill.producer.progress import Display, Meter, display
from tokenmill.producer.summary import Tally
from tokenmill.producer.workplace import Workplace, workplace
from tokenmill.shared import log
from tokenmill.shared.broker import WorkerInfo
from tokenmill.shared.errors import BrokerUnreachableError, UsageError

POLL_S = 0.05
LOOK_S = 0.5  # between two looks at the workers

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch amounted to."""

    tally: Tally
    seconds: float  # from the first request to the last reply
    workers: Sequence[WorkerInfo]  # as they were at the end


def run_batch(
    source: str, target: str, *, redis: str | None, queue: str, workers: int, slots: int, model: str
) -> Outcome:
    """Answer every request of a JSONL file (``-``: stdin), one line of ``target`` (``-``: stdout) each.

    Raises UsageError, with nothing enqueued and nothing written, when a line of the file is no request.
    """
    with RequestFile(source, prefix=f"run-{uuid.uuid4().hex[:8]}") as file:
        size = file.check()
        _refuse_same_file(source, target)
        with (
            workplace(redis, queue, workers=workers, slots=slots, model=model, on_ready=_tell_ready(model)) as place,
            _open_target(target) as out,
            display(size.requests, quiet=log.is_quiet()) as screen,
        ):
            return _answer(file, size, out, place, screen)


def _answer(file: RequestFile, size: Size, out: BinaryIO, place: Workplace, screen: Display) -> Outcome:
    feed, tally, meter = Feed(place.broker, file.requests()), Tally(), Meter(size)
    workers: Sequence[WorkerInfo] = []
    started = looked = time.monotonic()
    try:
        while not feed.done:
            replies = feed.poll(POLL_S)
            # Whole lines in one write: an interrupted run leaves no half line.
            out.write(b"".join(msgspec.json.encode(reply) + b"\n" for reply in replies))
            out.flush()
            for reply in replies:
                tally.add(reply)
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                place.check()
                workers = _workers(place, workers)
                snapshot = meter.measure(feed, workers)
                feed.window = max(WINDOW, 2 * snapshot.slots)
                screen.show(snapshot)
    except KeyboardInterrupt:
        cancelled = feed.cancel()
        _logger.warning(
            "interrupted: %d of %d requests are answered, %d are cancelled", feed.answered, size.requests, cancelled
        )
        raise
    seconds = time.monotonic() - started
    workers = _workers(place, workers)
    screen.show(meter.measure(feed, workers))
    return Outcome(tally, seconds, workers)


def _workers(place: Workplace, before: Sequence[WorkerInfo]) -> Sequence[WorkerInfo]:
    """The workers as they are, or as they were: it is the feed that waits for a broker that is away, and says so."""
    try:
        return place.workers()
    except BrokerUnreachableError:
        return before


def _tell_ready(model: str) -> Callable[[int, int], None]:
    def tell(ready: int, count: int) -> None:
        _logger.info("loading %s: %d of %d workers are ready", model, ready, count)

    return tell


def _refuse_same_file(source: str, target: str) -> None:
    if STDIO not in (source, target) and Path(target).exists() and Path(source).samefile(target):
        raise UsageError(f"{target} is the input: the replies need a file of their own")


@contextmanager
def _open_target(target: str) -> Iterator[BinaryIO]:
    if target == STDIO:
        yield sys.stdout.buffer
        return
    try:
        file = Path(target).open("wb")  # noqa: SIM115 (closed below; only the opening is guarded)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None
    with file:
        yield file
