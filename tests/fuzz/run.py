"""One run: hostile pushes with good requests between them, and what has become of each."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from tokenmill.shared.broker import Broker
from tokenmill.shared.protocol import Reply

from ..chaos.workload import GoodRequest, draw_requests
from .payloads import draw_payload, huge_payload

BATCH = 800  # pushes at a time: the broker keeps the last 1,000 dead letters
GOOD_SHARE = 0.05
HUGE = 3  # pushes of ten megabytes in a run
PATIENCE_S = 60.0
KEPT = 65536  # bytes of a dead letter
ID = re.compile(rb'"id"\s*:\s*"([A-Za-z0-9_.:-]{1,128})"')


@dataclass(slots=True)
class Outcome:
    """What a run has seen; empty lists are what one hopes for."""

    hostile: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    unaccounted: list[bytes] = field(default_factory=list)  # neither a dead letter nor a reply
    wrong: list[str] = field(default_factory=list)  # good requests with another reply than undisturbed
    blamed_us: list[str] = field(default_factory=list)  # replies that call a hostile request our own bug
    seconds: float = 0.0


class Fuzz:
    """Pushes batch after batch, and looks what became of each before the next."""

    def __init__(self, broker: Broker, client: redis.Redis, seed: int, *, alive: Callable[[], None]) -> None:
        self._broker = broker
        self._client = client
        self._rng = random.Random(seed)
        self._alive = alive
        self._number = 0
        self.outcome = Outcome()

    def run(self, count: int) -> Outcome:
        """Push ``count`` hostile payloads; raises where workers do not get through them."""
        began = time.monotonic()
        good = draw_requests(self._rng, round(count * GOOD_SHARE) + 1, plain=False, streams=0.1)
        examples = [request.payload() for request in good]
        huge_left = HUGE
        while self.outcome.hostile < count:
            hostile = [self._draw(examples) for _ in range(min(BATCH, count - self.outcome.hostile))]
            if huge_left:
                hostile[self._rng.randrange(len(hostile))] = huge_payload(self._rng, self._next_id())
                huge_left -= 1
            n_good = round(len(hostile) * GOOD_SHARE)
            self._batch(hostile, [good.pop() for _ in range(min(n_good, len(good)))])
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _next_id(self) -> str:
        self._number += 1
        return f"hostile-{self._number:06d}"

    def _draw(self, examples: Sequence[bytes]) -> bytes:
        payload = draw_payload(self._rng, self._next_id(), examples)
        return payload if payload != b"~" else b"~~"  # a lone tilde wakes workers, and says nothing

    def _batch(self, hostile: list[bytes], good: list[GoodRequest]) -> None:
        pushes = [*hostile, *(request.payload() for request in good)]
        self._rng.shuffle(pushes)
        lists = (self._broker.keys.requests, self._broker.keys.high, self._broker.keys.low)
        with self._client.pipeline(transaction=False) as pipeline:
            for payload in pushes:
                pipeline.rpush(self._rng.choice(lists), payload)
            pipeline.execute()
        self._wait()
        self.outcome.hostile += len(hostile)
        self._account_for(hostile)
        self._compare(good)

    def _wait(self) -> None:
        """Until nothing waits or runs."""
        deadline = time.monotonic() + PATIENCE_S
        while (now := self._broker.info()).waiting or now.running:
            self._alive()
            if time.monotonic() > deadline:
                raise AssertionError(f"workers do not get on: {now}")
            time.sleep(0.01)

    def _account_for(self, hostile: list[bytes]) -> None:
        letters: Any = self._client.xrange(self._broker.keys.dead)
        self._client.xtrim(self._broker.keys.dead, maxlen=0, approximate=False)
        dead = {(letter[b"payload"], int(letter[b"size"])) for _, letter in letters}
        for payload in hostile:
            replies = self._replies(payload)
            if (payload[:KEPT], len(payload)) in dead:
                self.outcome.endings["dead letter, answered" if replies else "dead letter"] += 1
            elif not replies:
                self.outcome.unaccounted.append(payload)
            elif any(reply.error is not None for reply in replies):
                self.outcome.endings["error"] += 1
            else:
                self.outcome.endings["answered"] += 1
            for reply in replies:
                if reply.error is not None and reply.error.code not in ("invalid_request", "context_length"):
                    self.outcome.blamed_us.append(f"{payload[:200]!r}: {reply.error}")

    def _replies(self, payload: bytes) -> list[Reply]:
        """What was answered under the ids that can be read in a payload."""
        ids = {found.decode() for found in ID.findall(_unescaped(payload[:300_000]))}
        bodies = self._broker.read_replies(sorted(ids)) if ids else []
        return [msgspec.json.decode(body, type=Reply) for body in bodies if body is not None]

    def _compare(self, good: Sequence[GoodRequest]) -> None:
        bodies = self._broker.read_replies([request.id for request in good]) if good else []
        for request, body in zip(good, bodies, strict=True):
            reply = msgspec.json.decode(body, type=Reply) if body else None
            expected = request.expected  # None where the worker draws the seed: any text will do
            if reply is None or reply.error is not None:
                self.outcome.wrong.append(f"{request.id}: {reply}")
            elif reply.finish_reason == "deadline" and request.times_out:
                continue  # as it asked, on a machine that had other things to do
            elif expected and (reply.text, reply.finish_reason) != (expected.text, expected.finish_reason):
                self.outcome.wrong.append(f"{request.id}: {reply} instead of {expected}")


def _unescaped(payload: bytes) -> bytes:
    """The payload with the escapes of printable ASCII undone, as JSON readers see ids."""
    return re.sub(rb"\\u00([2-7][0-9a-fA-F])", lambda match: bytes([int(match[1], 16)]), payload)
