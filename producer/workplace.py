"""Where the work of a command is done: on a broker and workers of its own, or on those that are there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tokenmill.shared.broker import Broker, WorkerInfo, connect
from tokenmill.shared.errors import BrokerUnreachableError
from tokenmill.shared.local import LocalPool

_logger = logging.getLogger(__name__)


class Workplace(Protocol):
    """A queue and the workers that serve it."""

    broker: Broker

    def workers(self) -> Sequence[WorkerInfo]:
        """The workers that are alive now."""

    def check(self) -> None:
        """Look after the workers; to be called about every half second. Raises when nothing can be done for them."""


class SharedQueue:
    """A queue whose workers are somebody else's: when none of them will come, it says so once."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._warned = False

    def workers(self) -> Sequence[WorkerInfo]:
        """The workers that are alive now."""
        return self.broker.info().workers

    def check(self) -> None:
        """Warn when no worker is alive, or none may begin anything."""
        if self._warned:
            return
        try:
            info = self.broker.info()
        except BrokerUnreachableError:  # told by whoever waits for a reply
            return
        queue = self.broker.keys.queue
        self._warned = info.suspended or not info.workers
        if info.suspended:
            _logger.warning("queue `%s` is suspended; to go on: tokenmill queue resume --queue %s", queue, queue)
        elif not info.workers:
            _logger.warning(
                "no worker is alive on queue `%s`; waiting for one: tokenmill worker --queue %s", queue, queue
            )


def open_broker(redis: str | None, queue: str) -> Broker:
    """The broker at a URL, reached now; raises BrokerUnreachableError, also when no URL is given."""
    if redis is None:
        raise BrokerUnreachableError("no broker is named: give --redis redis://HOST:PORT/0 or set TOKENMILL_REDIS")
    broker = Broker(connect(redis), queue)
    broker.check()
    return broker


@contextmanager
def workplace(
    redis: str | None, queue: str, *, workers: int, slots: int, model: str, on_ready: Callable[[int, int], object]
) -> Iterator[Workplace]:
    """The queue at ``redis``, or without a URL a private one with workers that have loaded their model."""
    if redis is not None:
        yield SharedQueue(open_broker(redis, queue))
        return
    with LocalPool(workers=workers, slots=slots, model=model, queue=queue) as pool:
        pool.wait_ready(on_ready)
        yield pool
