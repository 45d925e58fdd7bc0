"""The services that put requests on the queue and read the answers: threads, each with connections of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import redis

from tokenmill.producer.client import Client, NoReplyError
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.errors import TokenmillError

from .ledger import Ledger, Seen
from .workload import GoodRequest

_PRODUCERS = 6
_READERS = 8
_RETRY_S = 0.1
_SEND_S = 2.0
_SOCKET_TIMEOUT_S = 3.0  # a producer stuck on a half-open connection must not hold up the plan for long
_READ_S = 1.0


class Traffic:
    """Sends the planned requests at an even pace, no faster than they are answered, and reads every stream."""

    def __init__(
        self,
        requests: Sequence[GoodRequest],
        ledger: Ledger,
        *,
        queue_name: str,
        proxied_url: str,
        connect_directly: Callable[[], redis.Redis],
        per_second: float,
        window: int,
    ) -> None:
        self._requests = requests
        self._ledger = ledger
        self._queue = queue_name
        self._proxied_url = proxied_url
        self._connect_directly = connect_directly
        self._per_second = per_second
        self._window = window
        self._next = 0
        self._next_lock = threading.Lock()
        self._stopping = threading.Event()
        self._to_read: queue.Queue[GoodRequest] = queue.Queue()
        self._producers = [threading.Thread(target=self._guard, args=(self._produce,)) for _ in range(_PRODUCERS)]
        self._readers = [threading.Thread(target=self._guard, args=(self._read,)) for _ in range(_READERS)]

    @property
    def progress(self) -> float:
        """Share of the requests that have been taken up, 0 to 1."""
        return self._next / len(self._requests)

    @property
    def sending(self) -> bool:
        """Whether a producer still works."""
        return any(thread.is_alive() for thread in self._producers)

    @property
    def unread(self) -> int:
        """Streams whose reader has not come to the end."""
        return self._to_read.unfinished_tasks

    def start(self) -> None:
        """Begin."""
        self._started = time.monotonic()
        for thread in (*self._producers, *self._readers):
            thread.start()

    def stop(self) -> None:
        """End all threads, finished or not."""
        self._stopping.set()
        for thread in (*self._producers, *self._readers):
            thread.join()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._ledger.complain(f"a client failed: {error!r}")

    def _take(self) -> GoodRequest | None:
        with self._next_lock:
            if self._next == len(self._requests):
                return None
            self._next += 1
            return self._requests[self._next - 1]

    def _produce(self) -> None:
        client = Client(Broker(connect(self._proxied_url, socket_timeout_s=_SOCKET_TIMEOUT_S), self._queue))
        direct = self._connect_directly()
        while not self._stopping.is_set():
            due = self._next / self._per_second
            if time.monotonic() - self._started < due or len(self._ledger.owed) >= self._window:
                self._stopping.wait(0.02)
            elif (request := self._take()) is None:
                return
            else:
                self._insist(client, direct, request)

    def _insist(self, client: Client, direct: redis.Redis, request: GoodRequest) -> None:
        """Send until the broker has said yes; a repeated push is harmless, since the id makes it one request."""
        while not self._stopping.is_set():
            try:
                if request.way == "push":
                    direct.rpush(request.list_in(client.broker.keys), request.payload())
                else:
                    client.submit(id=request.id, when_full="raise", timeout=_SEND_S, **request.fields)
            except (redis.RedisError, TokenmillError):
                self._stopping.wait(_RETRY_S)
            else:
                self._ledger.accept(request)
                if request.streams:
                    self._to_read.put(request)
                return

    def _read(self) -> None:
        client = Client(Broker(connect(self._proxied_url), self._queue))
        while not self._stopping.is_set():
            try:
                request = self._to_read.get(timeout=_RETRY_S)
            except queue.Empty:
                continue
            self._follow(client, request)
            self._to_read.task_done()

    def _follow(self, client: Client, request: GoodRequest) -> None:
        """Read one stream to its end, going on after the last entry whenever the connection breaks."""
        position, pieces = "0-0", list[str]()
        while not self._stopping.is_set():
            stream = client.read(request.id, after=position, timeout=_READ_S)
            try:
                for piece in stream:
                    pieces.append(piece)
            except NoReplyError:
                pass
            except TokenmillError:
                self._stopping.wait(_RETRY_S)
            else:
                self._ledger.see(Seen(request, "".join(pieces), stream.reply))
                return
            finally:
                position = stream.position
