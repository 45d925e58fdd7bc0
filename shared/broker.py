"""The only code that talks to Redis: one method per script of ``scripts/``, and the reads of producers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.retry import Retry

from tokenmill.shared import lua
from tokenmill.shared.errors import BrokerUnreachableError, TokenmillError, UsageError
from tokenmill.shared.keys import Keys, check_name
from tokenmill.shared.records import (
    Checkpoint,
    Claim,
    Enqueued,
    Exchanged,
    Finish,
    Lost,
    QueueInfo,
    TokenEntry,
    WorkerInfo,
)
from tokenmill.shared.settings import DEFAULTS

__all__ = [
    "Broker",
    "Checkpoint",
    "Claim",
    "Enqueued",
    "Exchanged",
    "Finish",
    "Lost",
    "QueueInfo",
    "TokenEntry",
    "WorkerInfo",
    "connect",
]

_SOCKET_TIMEOUT_S = 5.0
_LONGEST_BLOCK_S = 2.0  # of one blocking command: well under the socket timeout, so that a dead connection is noticed
_POLL_S = 0.05  # between two looks where blocking is impossible


class _PushedId(msgspec.Struct):
    id: str


def connect(url: str, *, socket_timeout_s: float = _SOCKET_TIMEOUT_S) -> redis.Redis:
    """Make a client for ``redis://``, ``rediss://`` (TLS) or ``unix://``; it connects with the first command.

    The library's own retries are off: they resend a command whose answer was lost, and a plain ``RPUSH`` lands twice.
    """
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            protocol=2,  # no HELLO and no pushed messages: nothing here needs RESP3
        )
    except ValueError as error:
        # The URL itself may hold a password.
        raise UsageError(f"the broker URL is not valid ({error}): use redis://HOST:PORT/DB") from None


class Broker:
    """One queue on one broker. Safe to share between threads; any call may be repeated after an error."""

    def __init__(
        self, client: redis.Redis, queue: str = DEFAULTS.queue, *, max_payload_bytes: int = DEFAULTS.max_payload_bytes
    ) -> None:
        self.keys = Keys(queue)
        self._redis = client
        self._max_payload_bytes = max_payload_bytes

    def __repr__(self) -> str:
        return f"<Broker queue {self.keys.queue!r} at {self.address}>"

    @property
    def address(self) -> str:
        """Host and port of the broker, or the path of its socket; never a secret."""
        where = self._redis.get_connection_kwargs()
        return str(where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}")

    def check(self) -> None:
        """Raise BrokerUnreachableError unless the broker answers now."""
        with self._errors():
            self._redis.ping()

    def enqueue(self, request_id: str, payload: bytes, *, stream: bool = False) -> Enqueued:
        """Push a request, once however often it is called: the same body under the same id is a ``duplicate``."""
        check_name("request id", request_id)
        if len(payload) > self._max_payload_bytes:
            raise UsageError(f"request {request_id}: {len(payload)} bytes, more than {self._max_payload_bytes}")
        status, state, depth = self._run("enqueue", [], [request_id, payload, int(stream)])
        return Enqueued(status.decode(), state.decode(), depth)

    def exchange(
        self,
        worker: str,
        *,
        slots: int,
        ack: int,
        lease_ms: int,
        reply_ttl_ms: int,
        finished: Sequence[Finish] = (),
        checkpoints: Sequence[Checkpoint] = (),
    ) -> Exchanged:
        """Save tokens, post replies and claim up to ``slots`` less what is owned, in this order and in one script.

        ``ack`` is the highest fence received so far: claims above it come (again), so that a lost answer loses nothing.
        ``slots=0`` claims nothing new.
        """
        args: list[str | bytes | int] = [worker, slots, ack, lease_ms, reply_ttl_ms, self._max_payload_bytes]
        args += [len(finished), len(checkpoints)]
        for done in finished:
            args += [done.id, done.fence, done.finish_reason, done.body, *_chunk(done)]
        for saved in checkpoints:
            args += [saved.id, saved.fence, *_chunk(saved)]
        owned, claims, posted, stored = self._run("exchange", [self.keys.own(worker)], args)
        return Exchanged(
            {request_id.decode(): int(fence) for request_id, fence in zip(owned[::2], owned[1::2], strict=True)},
            [_claim(*claim) for claim in claims],
            posted,
            stored,
        )

    def renew(self, worker: str, held: Sequence[tuple[str, int]], *, lease_ms: int, status: bytes) -> list[Lost]:
        """Extend the leases of ``held``, be the worker's heartbeat with its status (JSON), and return what it lost."""
        lost = self._run("renew", [], [worker, lease_ms, status, *_flat(held)])
        return [
            Lost(request_id.decode(), int(fence), why.decode())
            for request_id, fence, why in zip(lost[::3], lost[1::3], lost[2::3], strict=True)
        ]

    def reclaim(self, *, limit: int, lease_ms: int, reply_ttl_ms: int) -> int:
        """Take back up to ``limit`` requests whose lease has lapsed; -1 says that the broker was away and
        all leases were extended."""
        return int(self._run("reclaim", [], [limit, lease_ms, reply_ttl_ms]))

    def release(self, worker: str, held: Sequence[tuple[str, int]]) -> int:
        """Hand back what a leaving worker holds, and forget the worker; returns how many requests went back."""
        return int(self._run("release", [], [worker, *_flat(held)]))

    def peek(self, timeout_s: float) -> bool:
        """Wait for work without taking any: True once something waits, which another worker may get all the same.

        A request that goes back to be resumed ends no wait: it is seen when the time is up.
        """
        with self._errors():
            if self._head(self.keys.requests, timeout_s) is not None:
                return True
            return bool(self._redis.exists(self.keys.resume))

    def wait_reply(self, request_id: str, timeout_s: float) -> bytes | None:
        """Wait for the terminal reply (JSON); None if it does not come in time. Any number of readers get it."""
        deadline = time.monotonic() + timeout_s
        with self._errors():
            while True:
                left = deadline - time.monotonic()
                reply = self._head(self.keys.reply(request_id), left)
                if reply is not None or left <= 0:
                    return reply

    def read_replies(self, request_ids: Sequence[str]) -> list[bytes | None]:
        """The terminal replies that are there now, in one round trip and without taking them."""
        with self._errors():
            look = self._redis.pipeline(transaction=False)
            for request_id in request_ids:
                look.lindex(self.keys.reply(request_id), 0)
            return look.execute()

    def read_tokens(self, request_id: str, after: str = "0", block_ms: int = 0) -> list[TokenEntry]:
        """Entries of a token stream after the entry ``after``; waits up to ``block_ms`` (2 s at most) for the first."""
        key = self.keys.tokens(request_id)
        block = min(block_ms, int(_LONGEST_BLOCK_S * 1000)) or None  # to Redis 0 is for ever
        with self._errors():
            streams: Any = self._redis.xread({key: after}, block=block)
        return [_token_entry(entry_id, fields) for _, entries in streams for entry_id, fields in entries]

    def info(self) -> QueueInfo:
        """Counts, workers and counters; what it shows may have changed between two of its looks."""
        with self._errors():
            look: Any = self._redis.pipeline(transaction=False)
            look.llen(self.keys.requests).llen(self.keys.resume).zcard(self.keys.leases)
            look.zrange(self.keys.workers, 0, -1, withscores=True).hgetall(self.keys.stats).time()
            look.lindex(self.keys.resume, 0).lindex(self.keys.requests, 0)
            pushed, resume, running, heartbeats, stats, (seconds, micros), resumed, first = look.execute()
            now_ms = seconds * 1000 + micros // 1000
            next_id = resumed.decode() if resumed else _pushed_id(first)
            look.hget(self.keys.request(next_id), "enqueued")
            for name, _ in heartbeats:
                look.zcard(self.keys.own(name.decode())).get(self.keys.worker(name.decode()))
            enqueued, *reports = look.execute()
        return QueueInfo(
            waiting=pushed + resume,
            resume=resume,
            running=running,
            oldest_age_ms=now_ms - int(enqueued) if enqueued else None,
            workers=[
                WorkerInfo(name.decode(), now_ms - int(seen), busy, msgspec.json.decode(status or b"{}"))
                for (name, seen), busy, status in zip(heartbeats, reports[::2], reports[1::2], strict=True)
            ],
            stats={name.decode(): int(value) for name, value in stats.items()},
        )

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        with self._errors():
            return lua.run(self._redis, script, [*self.keys.shared, *keys], args)

    def _head(self, key: str, timeout_s: float) -> bytes | None:
        """First element of a list, waited for: moved onto its own place, so that order, expiry and others keep it."""
        if timeout_s > 0:
            try:
                head: Any = self._redis.blmove(key, key, min(timeout_s, _LONGEST_BLOCK_S), "LEFT", "LEFT")  # type: ignore[arg-type]
            except OutOfMemoryError:  # at maxmemory only reads pass
                time.sleep(min(timeout_s, _POLL_S))
            else:
                return head  # type: ignore[no-any-return]
        return self._redis.lindex(key, 0)  # type: ignore[return-value]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the library's errors into ours: one line that names the broker."""
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError, BusyLoadingError, ReadOnlyError) as error:
            raise BrokerUnreachableError(f"no broker at {self.address}: {error}") from error
        except OutOfMemoryError as error:
            raise TokenmillError(
                f"the broker at {self.address} is full (maxmemory): let the workers catch up, or give it more"
            ) from error
        except ResponseError as error:
            kind, _, detail = str(error).partition(" ")
            if kind == "LAYOUT":
                theirs, ours = detail.split()
                raise TokenmillError(
                    f"queue {self.keys.queue!r} on {self.address} has layout {theirs}, this tokenmill knows {ours}: "
                    "use another queue, or the version that wrote it"
                ) from error
            raise TokenmillError(f"the broker at {self.address} refused: {error}") from error


def _chunk(part: Finish | Checkpoint) -> tuple[int, int, str, str]:
    return part.start, len(part.token_ids), ",".join(map(str, part.token_ids)), part.text


def _flat(held: Sequence[tuple[str, int]]) -> list[str | int]:
    return [part for pair in held for part in pair]


def _token_ids(joined: bytes) -> list[int]:
    return [int(token) for token in joined.split(b",")] if joined else []


def _claim(
    request_id: bytes,
    fence: bytes,
    payload: bytes,
    deliveries: bytes,
    queue_ms: bytes,
    age_ms: bytes,
    ids: bytes,
    text: bytes,
) -> Claim:
    return Claim(
        request_id.decode(),
        int(fence),
        payload,
        int(deliveries),
        int(queue_ms),
        int(age_ms),
        _token_ids(ids),
        text.decode(),
    )


def _token_entry(entry_id: bytes, fields: dict[bytes, bytes]) -> TokenEntry:
    if b"end" in fields:
        return TokenEntry(entry_id.decode(), 0, [], "", fields[b"end"].decode())
    ids, text = _token_ids(fields[b"ids"]), fields[b"text"].decode()
    return TokenEntry(entry_id.decode(), int(fields[b"start"]), ids, text, None)


def _pushed_id(payload: bytes | None) -> str:
    """The id in a waiting payload; an empty one, which no request has, where there is none to read."""
    try:
        return msgspec.json.decode(payload or b"", type=_PushedId).id
    except msgspec.DecodeError:
        return ""
