"""What goes to the broker and comes back, typed: durations in milliseconds, fences as whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tokenmill.shared.protocol import FinishReason


class Enqueued(NamedTuple):
    """What became of an enqueue. ``full`` says that the request was not accepted: try again later."""

    status: Literal["ok", "duplicate", "conflict", "full"]
    state: str  # of the request: waiting, running or its finish reason
    depth: int  # waiting requests
    id: str  # of the request that this is about: under a known idempotency key the first one's
    queued_tokens: int  # of the requests that nobody has begun
    retry_after_ms: int  # 0 unless full


class Finish(NamedTuple):
    """A finished request: its reply, and the tokens since the last checkpoint, which travel only here."""

    id: str
    fence: int
    finish_reason: FinishReason
    body: bytes
    start: int  # output tokens before `token_ids`
    token_ids: Sequence[int]
    text: str


class Checkpoint(NamedTuple):
    """Output tokens of a running request since the last checkpoint, with their text."""

    id: str
    fence: int
    start: int  # output tokens before `token_ids`
    token_ids: Sequence[int]
    text: str


class Claim(NamedTuple):
    """A request that a worker has claimed, and the output tokens of earlier deliveries."""

    id: str  # go by this one, never by the id in the payload
    fence: int
    payload: bytes
    deliveries: int
    queue_ms: int  # from enqueue to the first claim
    age_ms: int  # from enqueue to now
    token_ids: list[int]
    text: str


class Exchanged(NamedTuple):
    """Answer to an exchange; ``finished`` and ``checkpoints`` in the order given: 1 done, 0 fenced, and -1-n to a
    checkpoint that has to be sent again from token n."""

    owned: dict[str, int]  # id → fence of all that the worker owns now; it drops whatever is not among them
    claims: list[Claim]
    finished: list[int]
    checkpoints: list[int]


class Lost(NamedTuple):
    """A request that a worker must not go on with. One that is ``fenced`` it no longer owns; one that is ``cancelled``
    or past its ``deadline`` it still owns, and finishes it with that reason and the text so far."""

    id: str
    fence: int
    why: Literal["fenced", "cancelled", "deadline"]


class TokenEntry(NamedTuple):
    """One entry of a token stream; the last one has ``end``, the finish reason, and no tokens."""

    entry_id: str
    start: int
    token_ids: list[int]
    text: str
    end: str | None


class WorkerInfo(NamedTuple):
    """A worker as it last reported itself."""

    name: str
    age_ms: int  # since its last heartbeat
    busy: int  # requests that it owns
    status: dict[str, Any]


class DeadLetter(NamedTuple):
    """A push that was no request, or a request that was given up."""

    entry_id: str
    why: str
    id: str  # empty where none could be read
    payload: bytes  # whole if it has `size` bytes
    size: int


class QueueInfo(NamedTuple):
    """A queue at a glance. Limits of 0 are none."""

    waiting: int  # all that wait, begun before or not
    resume: int  # those begun before
    running: int
    oldest_age_ms: int | None  # of the next request in line; None: nothing waits, or a bare push that nobody has opened
    workers: list[WorkerInfo]
    stats: dict[str, int]
    high: int = 0  # pushes on the list of high priority
    normal: int = 0
    low: int = 0
    suspects: int = 0  # those to be run alone
    dead: int = 0  # dead letters
    suspended: bool = False
    model: str | None = None  # fingerprint of what the queue's workers run
    queued_tokens: int = 0
    max_queued_tokens: int = 0
    max_depth: int = 0
