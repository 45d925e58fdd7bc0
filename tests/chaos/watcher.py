"""A second witness: the server itself tells of every push on a reply key, whoever does it and by whatever script."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import redis

_WAIT_S = 0.2


class Watcher:
    """Counts the replies ever posted to each id; it may miss some while the broker is down, and invents none."""

    def __init__(self, connect: Callable[[], redis.Redis], reply_prefix: str) -> None:
        self.replies: Counter[str] = Counter()  # by id
        self._connect = connect
        self._prefix = reply_prefix
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher")

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with suppress(redis.RedisError):
                self._listen()
            self._stopping.wait(_WAIT_S)

    def _listen(self) -> None:
        with self._connect() as client, client.pubsub(ignore_subscribe_messages=True) as events:
            client.ping()  # refused while the server replays its file, which tells every push again
            events.psubscribe("__keyevent@*__:rpush")  # a reader's BLMOVE says lpush
            while not self._stopping.is_set():
                event = events.get_message(timeout=_WAIT_S)
                if event is not None and event["data"].decode().startswith(self._prefix):
                    self.replies[event["data"].decode().removeprefix(self._prefix)] += 1
