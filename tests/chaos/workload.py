"""The good requests of a run, and what an undisturbed worker answers to each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokenmill.shared.broker import Claim
from tokenmill.shared.keys import Keys
from tokenmill.shared.protocol import Reply
from tokenmill.worker.models import load_model
from tokenmill.worker.runner import Runner

Way = Literal["submit", "push"]
_DISTINCT = 1000  # bodies; more requests than that share them
_UNSEEDED = 0.3  # of the streams: where a worker that lost a request still gets a word in, reply and stream differ
_NEVER = 1_000_000  # tokens between checkpoints


@dataclass(frozen=True, slots=True)
class GoodRequest:
    """A request that must be answered as if nothing had happened."""

    id: str
    fields: dict[str, Any]  # all but the id
    way: Way  # by the client, or by a bare RPUSH
    expected: Reply | None  # None: the worker that claims it draws the seed, so two claims give two texts

    @property
    def streams(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def times_out(self) -> bool:
        return "timeout_ms" in self.fields

    def list_in(self, keys: Keys) -> str:
        """The list that a bare push of it goes to."""
        return {"high": keys.high, "low": keys.low}.get(self.fields.get("priority", ""), keys.requests)

    def payload(self) -> bytes:
        """What a service in any language would push."""
        return json.dumps({"id": self.id, **self.fields}).encode()


def draw_requests(rng: random.Random, count: int, *, plain: bool, streams: float) -> list[GoodRequest]:
    """``count`` requests, some of them with the same body; ``plain`` ones have nothing but a prompt and max_tokens."""
    draw = _draw_plain if plain else _draw_fields
    bodies = [draw(rng) for _ in range(min(count, _DISTINCT))]
    replies = undisturbed(bodies)
    requests: list[GoodRequest] = []
    for number in range(count):
        which = rng.randrange(len(bodies))
        fields = bodies[which]
        expected: Reply | None = replies[which]
        if rng.random() < streams:
            fields = {**fields, "stream": True}
            if rng.random() < _UNSEEDED:
                fields, expected = {**fields, "temperature": 1.0, "seed": None}, None
        way: Way = "push" if rng.random() < 0.4 else "submit"
        if way == "submit" and not plain and rng.random() < 0.1:
            fields = {**fields, "idempotency_key": f"key{number:06d}"}
        requests.append(GoodRequest(f"r{number:06d}", fields, way, expected))
    return requests


def _draw_plain(rng: random.Random) -> dict[str, Any]:
    text = " ".join(rng.choice(("mill", "token", "naïve", "水車", "grain")) for _ in range(rng.randint(1, 12)))
    return {"prompt": f"{text} {rng.random()}", "max_tokens": rng.choice((1, 8, 40, 80, 120))}


def _draw_fields(rng: random.Random) -> dict[str, Any]:
    fields = _draw_plain(rng)
    kind = rng.random()
    if kind < 0.10:
        fields["prompt"] = [rng.randrange(1, 256) for _ in range(rng.randint(1, 60))]
    elif kind < 0.20:
        fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
    if rng.random() < 0.3:
        fields |= {"temperature": 1.0, "seed": rng.randrange(2**32), "top_p": rng.choice((1.0, 0.9))}
    if rng.random() < 0.2:
        fields["stop"] = [rng.choice(("e", "a ", "th")), "qu"]
    if rng.random() < 0.2:
        fields["ignore_eos"] = True
    if rng.random() < 0.25:
        fields["priority"] = rng.choice(("high", "low"))
    if rng.random() < 0.06:
        fields["timeout_ms"] = rng.choice((150, 500, 600_000))
    return fields


def undisturbed(bodies: Sequence[dict[str, Any]]) -> list[Reply]:
    """The reply to each body from one worker's own code, in this process, without a broker."""
    slots = min(len(bodies), 64)
    loaded = load_model("toy", slots=slots)
    runner = Runner(loaded, worker="undisturbed", slots=slots, max_step_tokens=2048, checkpoint_tokens=_NEVER)
    replies: dict[str, Reply] = {}
    waiting = [_claim(str(number), fields) for number, fields in enumerate(bodies)]
    while len(replies) < len(bodies):
        while waiting and len(runner) < slots:
            rejected = runner.admit(waiting.pop())
            assert rejected is None, rejected
        for finish in runner.step().replies:
            replies[finish.id] = msgspec.json.decode(finish.body, type=Reply)
    return [replies[str(number)] for number in range(len(bodies))]


def _claim(request_id: str, fields: dict[str, Any]) -> Claim:
    payload = json.dumps({"id": request_id, **fields}).encode()
    return Claim(request_id, 1, payload, deliveries=1, queue_ms=0, age_ms=0, token_ids=[], text="")
