"""A connection to one queue on one broker: its keys, its scripts, and errors that name the broker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.retry import Retry

from tokenmill.shared import lua
from tokenmill.shared.calls import Call
from tokenmill.shared.errors import BrokerFullError, BrokerUnreachableError, TokenmillError, UsageError
from tokenmill.shared.keys import Keys
from tokenmill.shared.settings import DEFAULTS

T = TypeVar("T")

LONGEST_BLOCK_S = 2.0  # of one blocking command: well under the socket timeout, so that a dead connection is noticed

_SOCKET_TIMEOUT_S = 5.0
_POLL_S = 0.05  # between two looks where blocking is impossible


def connect(url: str, *, socket_timeout_s: float = _SOCKET_TIMEOUT_S) -> redis.Redis:
    """Make a client for ``redis://``, ``rediss://`` (TLS) or ``unix://``; it connects with the first command.

    The library's own retries are off: they resend a command whose answer was lost, and a plain ``RPUSH`` lands twice.
    """
    with _url_errors():
        return redis.Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            command_packer=_Packer(),
            redis_connect_func=_connect_tls if url.startswith("rediss:") else None,
            **_options(socket_timeout_s),
        )


def connect_async(url: str, *, socket_timeout_s: float = _SOCKET_TIMEOUT_S) -> redis.asyncio.Redis:
    """The same for an event loop."""
    retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
    with _url_errors():
        return redis.asyncio.Redis.from_url(url, retry=retry, **_options(socket_timeout_s))


def _options(socket_timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": socket_timeout_s,
        "health_check_interval": 0,
        "protocol": 2,  # no HELLO and no pushed messages: nothing here needs RESP3
        "driver_info": None,  # no CLIENT SETINFO, which users of few rights may not run
    }


@contextmanager
def _url_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        # The URL itself may hold a password.
        raise UsageError(f"the broker URL is not valid ({error}): use redis://HOST:PORT/DB") from None


class _Packer(HiredisRespSerializer):
    """Turns numbers into text before hiredis does.

    It asks Python for their digits, and crashes the process if a signal's handler raises just then, as Ctrl-C does.
    """

    def pack(self, *args: Any) -> list[bytes]:
        """A command as the broker reads it."""
        texts: Any = [str(arg) if isinstance(arg, int | float) else arg for arg in args]
        packed: list[bytes] = super().pack(*texts)
        return packed


def _connect_tls(connection: Any) -> None:
    """Log in, and ask for a first answer: the session tickets that a server sends come before it.

    The library takes a new connection with anything left to read for a broken one.
    """
    connection.on_connect()
    connection.send_command("PING")
    with suppress(ResponseError):  # a user who may not ask gets an answer all the same
        connection.read_response()


def address_of(client: redis.Redis | redis.asyncio.Redis) -> str:
    """Host and port of a client's broker, or the path of its socket; never a secret."""
    where = client.get_connection_kwargs()
    return str(where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}")


@contextmanager
def plain_errors(address: str, queue: str) -> Iterator[None]:
    """Turn the library's errors into ours: one line that names the broker."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, BusyLoadingError, ReadOnlyError) as error:
        raise BrokerUnreachableError(f"no broker at {address}: {error}") from error
    except OutOfMemoryError as error:
        raise BrokerFullError(
            f"the broker at {address} is full (maxmemory): let the workers catch up, or give it more"
        ) from error
    except ResponseError as error:
        kind, _, detail = str(error).partition(" ")
        if kind == "LAYOUT":
            theirs, ours = detail.split()
            raise TokenmillError(
                f"queue {queue!r} on {address} has layout {theirs}, this tokenmill knows {ours}: "
                "use another queue, or the version that wrote it"
            ) from error
        raise TokenmillError(f"the broker at {address} refused: {error}") from error


class Connection:
    """What every call to the broker goes through. Safe to share between threads."""

    def __init__(
        self, client: redis.Redis, queue: str = DEFAULTS.queue, *, max_payload_bytes: int = DEFAULTS.max_payload_bytes
    ) -> None:
        self.keys = Keys(queue)
        self._redis = client
        self._max_payload_bytes = max_payload_bytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} queue {self.keys.queue!r} at {self.address}>"

    @property
    def address(self) -> str:
        """Host and port of the broker, or the path of its socket; never a secret."""
        return address_of(self._redis)

    def check(self) -> None:
        """Raise BrokerUnreachableError unless the broker answers now."""
        with self._errors():
            self._redis.ping()

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        with self._errors():
            return lua.run(self._redis, script, [*self.keys.shared, *keys], args)

    def _send(self, call: Call[T]) -> T:
        with self._errors():
            if call.script is None:
                return call.read(self._redis.execute_command(*call.command))  # type: ignore[no-untyped-call]
            return call.read(lua.send(self._redis, call.script, call.command))

    def _head(self, key: str, timeout_s: float) -> bytes | None:
        """First element of a list, waited for: moved onto its own place, so that order, expiry and others keep it."""
        if timeout_s > 0:
            try:
                head: Any = self._redis.blmove(key, key, min(timeout_s, LONGEST_BLOCK_S), "LEFT", "LEFT")  # type: ignore[arg-type]
            except OutOfMemoryError:  # at maxmemory only reads pass
                time.sleep(min(timeout_s, _POLL_S))
            else:
                return head  # type: ignore[no-any-return]
        return self._redis.lindex(key, 0)  # type: ignore[return-value]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors as ours; an interrupted call leaves no unread answer to the next."""
        try:
            with plain_errors(self.address, self.keys.queue):
                yield
        except (KeyboardInterrupt, SystemExit):
            # The connection may be back in the pool with the answer to this call still to come.
            self._redis.connection_pool.disconnect(inuse_connections=False)
            raise
