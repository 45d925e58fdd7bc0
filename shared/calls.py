"""Calls of producers as values: what to send and how to read the answer. Threads and event loops send the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

import msgspec

from tokenmill.shared.keys import Keys, check_name
from tokenmill.shared.protocol import Priority
from tokenmill.shared.records import Enqueued, TokenEntry
from tokenmill.shared.settings import DEFAULTS

T = TypeVar("T")

_POKE_KEPT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One command, or one script with its arguments; either may be sent again after an error."""

    command: tuple[str | bytes | int, ...]  # of a script: its keys and arguments, the number of keys in front
    read: Callable[[Any], T]
    script: str | None = None


class EnqueueOptions(TypedDict, total=False):
    """How a request is enqueued, beside its id and body."""

    stream: bool
    priority: Priority
    timeout_ms: int | None
    cost: int  # tokens against the queue's limit
    reply_to: str | None  # the name on whose stream the ending is announced
    idempotency_key: str | None
    idempotency_ttl_ms: int


def enqueue(keys: Keys, request_id: str, payload: bytes, options: EnqueueOptions) -> Call[Enqueued]:
    """Push a request once; see ``Broker.enqueue``."""
    args: list[str | bytes | int] = [check_name("request id", request_id), payload]
    args += [int(options.get("stream", False)), options.get("priority", "normal")]
    args += [options.get("timeout_ms") or 0, options.get("cost", 0)]
    args.append(check_name("reply_to", reply_to) if (reply_to := options.get("reply_to")) is not None else "")
    if (key := options.get("idempotency_key")) is None:
        args += ["", "", 0]
    else:
        kept_ms = options.get("idempotency_ttl_ms", DEFAULTS.idempotency_ttl_ms)
        args += [check_name("idempotency key", key), _sha1_without_id(payload), kept_ms]
    return _script("enqueue", keys, args, _enqueued)


def cancel(keys: Keys, request_id: str, *, reply_ttl_ms: int = DEFAULTS.reply_ttl_ms) -> Call[str]:
    """End a request with what it has so far; see ``Broker.cancel``."""
    return _script("cancel", keys, [check_name("request id", request_id), reply_ttl_ms], bytes.decode)


def state(keys: Keys, request_id: str) -> Call[str | None]:
    """Waiting, running or the finish reason; None: forgotten, or a bare push that nobody has opened."""
    return Call(("HGET", keys.request(request_id), "state"), lambda found: found.decode() if found else None)


def reply(keys: Keys, request_id: str) -> Call[bytes | None]:
    """The terminal reply (JSON), if it is there now; it stays."""
    return Call(("LINDEX", keys.reply(request_id), 0), _as_it_is)


def tokens(keys: Keys, request_id: str, after: str) -> Call[list[TokenEntry]]:
    """The entries of a token stream that are there now, after the entry ``after``."""
    command = ("XREAD", "STREAMS", keys.tokens(request_id), after)
    return Call(command, lambda streams: [token_entry(*entry) for _, entries in streams or () for entry in entries])


def workers(keys: Keys) -> Call[list[str]]:
    """Names of workers that have registered lately."""
    return Call(("ZRANGE", keys.workers, 0, -1), lambda names: [name.decode() for name in names])


def worker_status(keys: Keys, worker: str) -> Call[bytes | None]:
    """What a worker last said of itself (JSON); it expires when the worker is silent."""
    return Call(("GET", keys.worker(worker)), _as_it_is)


def keep_job(keys: Keys, job_id: str, record: bytes, ttl_ms: int) -> Call[Any]:
    """Keep what the gateway has to know of a job."""
    return Call(("SET", keys.job(job_id), record, "PX", ttl_ms), _as_it_is)


def job(keys: Keys, job_id: str) -> Call[bytes | None]:
    """What was kept of a job."""
    return Call(("GET", keys.job(job_id)), _as_it_is)


def ping() -> Call[Any]:
    """Whether the broker answers."""
    return Call(("PING",), _as_it_is)


def poke(keys: Keys, name: str) -> list[Call[Any]]:
    """Wake who blocks on the replies of ``name``: an entry without an id, on a stream that soon expires."""
    stream = keys.replies(name)
    return [Call(("XADD", stream, "*", "id", ""), _as_it_is), Call(("PEXPIRE", stream, _POKE_KEPT_MS), _as_it_is)]


def token_ids(joined: bytes) -> list[int]:
    """Token ids as the broker keeps them, separated by commas."""
    return [int(token) for token in joined.split(b",")] if joined else []


def token_entry(entry_id: bytes, fields: dict[bytes, bytes]) -> TokenEntry:
    """One entry of a token stream."""
    if b"end" in fields:
        return TokenEntry(entry_id.decode(), 0, [], "", fields[b"end"].decode())
    ids, text = token_ids(fields[b"ids"]), fields[b"text"].decode()
    return TokenEntry(entry_id.decode(), int(fields[b"start"]), ids, text, None)


def _script(name: str, keys: Keys, args: list[str | bytes | int], read: Callable[[Any], T]) -> Call[T]:
    return Call((len(keys.shared), *keys.shared, *args), read, name)


def _enqueued(answer: list[Any]) -> Enqueued:
    status, state, depth, about, queued_tokens, retry_after_ms = answer
    return Enqueued(status.decode(), state.decode(), depth, about.decode(), queued_tokens, retry_after_ms)


def _as_it_is(answer: Any) -> Any:
    return answer


def _sha1_without_id(payload: bytes) -> str:
    body = msgspec.json.decode(payload)
    body.pop("id", None)
    return hashlib.sha1(msgspec.json.encode(body, order="deterministic"), usedforsecurity=False).hexdigest()
