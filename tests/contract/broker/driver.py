"""What the broker's tests drive it with: request bodies, a worker's side of the exchange, a look at the keys left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.shared.broker import Broker, Checkpoint, Claim, Exchanged, Finish

LEASE_MS = 30_000
TTL_MS = 60_000


def unexpected_keys(client: Any, broker: Broker) -> list[str]:
    """Keys of a queue that should have an expiry and have none, or should not be there at all."""
    keys, prefix = broker.keys, broker.keys.meta.removesuffix("meta")
    for_ever = set(keys.shared) - {keys.solo}
    unexpected = []
    for key in sorted(k.decode() for k in client.scan_iter(f"{prefix}*", count=1000)):
        kind, _, name = key.removeprefix(prefix).partition(":")
        expires = client.ttl(key) >= 0
        if kind in ("request", "tokens"):
            state = client.hget(keys.request(name), "state")
            expected = expires != (state in (b"waiting", b"running"))  # a tombstone has no state
        elif kind in ("reply", "replies", "worker", "idem", "solo"):
            expected = expires
        else:
            expected = key in for_ever or kind == "own"
        if not expected:
            unexpected.append(key)
    return unexpected


def pull_deadline(client: Any, broker: Broker, request_id: str) -> None:
    """Let a request be overdue now."""
    client.hset(broker.keys.request(request_id), "due", 1)
    client.zadd(broker.keys.deadlines, {request_id: 1})


def body(request_id: str, variant: int = 0, **fields: Any) -> bytes:
    """A request as JSON; another variant is another body."""
    return json.dumps({"id": request_id, "prompt": f"variant {variant}", **fields}).encode()


@dataclass
class Worker:
    """The broker's side of a worker: remembers what has reached it."""

    broker: Broker
    name: str = "w"
    slots: int = 8
    ack: int = 0

    def exchange(
        self, *finished: Finish, checkpoints: Sequence[Checkpoint] = (), slots: int | None = None
    ) -> Exchanged:
        answer = self.send(*finished, checkpoints=checkpoints, slots=slots)
        self.ack = max([self.ack, *(claim.fence for claim in answer.claims)])
        return answer

    def send(self, *finished: Finish, checkpoints: Sequence[Checkpoint] = (), slots: int | None = None) -> Exchanged:
        """An exchange whose answer does not arrive."""
        return self.broker.exchange(
            self.name,
            slots=self.slots if slots is None else slots,
            ack=self.ack,
            lease_ms=LEASE_MS,
            reply_ttl_ms=TTL_MS,
            finished=finished,
            checkpoints=checkpoints,
        )

    def claim(self) -> list[Claim]:
        return self.exchange().claims

    def claim_one(self) -> Claim:
        [claim] = self.claim()
        return claim

    def finish(self, claim: Claim, reason: Any = "stop") -> int:
        return self.exchange(done(claim, reason), slots=0).finished[0]


def done(claim: Claim, reason: Any = "stop", start: int = 0, token_ids: Sequence[int] = (), text: str = "") -> Finish:
    return Finish(claim.id, claim.fence, reason, f"{claim.id} {claim.fence}".encode(), start, token_ids, text)
