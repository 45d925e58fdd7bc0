"""Cancels and deadlines: whatever a request is doing, it ends once, with the output it has so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tokenmill.shared.broker import Broker, Checkpoint, Lost
from tokenmill.shared.protocol import Reply

from .driver import LEASE_MS, TTL_MS, Worker, body, done, pull_deadline


def reply_to(broker: Broker, request_id: str) -> Reply:
    return msgspec.json.decode(broker.wait_reply(request_id, 0) or b"", type=Reply)


def heard(broker: Broker, *held: tuple[str, int]) -> list[Lost]:
    return broker.renew("w", held, lease_ms=LEASE_MS, status=b"{}")


def forget(client: Any, broker: Broker, request_id: str) -> None:
    """As if its retention had passed."""
    keys = broker.keys
    client.delete(keys.request(request_id), keys.reply(request_id), keys.tokens(request_id))


def begun(broker: Broker, worker: Worker, **fields: Any) -> None:
    """A request "a" that waits with two tokens saved."""
    broker.enqueue("a", body("a", **fields), stream=bool(fields.get("stream")))
    claim = worker.claim_one()
    worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 0, [7, 8], "two \x01 „words“ ")])
    broker.release("w", [("a", claim.fence)])


def test_a_waiting_request_ends_at_once_and_spares_its_neighbours(broker: Broker, worker: Worker) -> None:
    for name in ("a", "b", "c"):
        broker.enqueue(name, body(name))

    assert broker.cancel("b") == "cancelled"

    reply = reply_to(broker, "b")
    assert (reply.id, reply.finish_reason, reply.text, reply.deliveries) == ("b", "cancelled", "", 0)
    assert (broker.info().waiting, broker.state("b")) == (2, "cancelled")
    assert [claim.id for claim in worker.claim()] == ["a", "c"]
    assert broker.info().waiting == 0


def test_a_request_begun_before_ends_with_its_text_so_far(broker: Broker, worker: Worker) -> None:
    begun(broker, worker)
    assert broker.cancel("a") == "cancelled"
    reply = reply_to(broker, "a")
    assert (reply.text, reply.token_ids, reply.usage.output_tokens) == ("two \x01 „words“ ", None, 2)
    assert (reply.deliveries, broker.info().waiting) == (1, 0)


@pytest.mark.parametrize("prompt", [[1, 2], []])
def test_a_prompt_of_token_ids_is_answered_with_token_ids(broker: Broker, worker: Worker, prompt: list[int]) -> None:
    begun(broker, worker, prompt=prompt)
    broker.cancel("a")
    assert reply_to(broker, "a").token_ids == [7, 8]


def test_a_cancelled_stream_has_its_end(broker: Broker, worker: Worker) -> None:
    begun(broker, worker, stream=True)
    broker.cancel("a")
    assert [entry.end for entry in broker.read_tokens("a")] == [None, "cancelled"]


def test_the_worker_of_a_running_request_hears_of_a_cancel_and_ends_it(broker: Broker, worker: Worker) -> None:
    for name in ("a", "b"):
        broker.enqueue(name, body(name))
    a, b = worker.claim()

    assert broker.cancel("a") == "signalled"

    assert heard(broker, ("a", a.fence), ("b", b.fence)) == [Lost("a", a.fence, "cancelled")]
    assert worker.exchange(slots=0).owned == {"a": a.fence, "b": b.fence}  # until it posts what it has
    assert worker.finish(a, "cancelled") == 1
    assert broker.cancel("a") == "cancelled"


def test_a_request_that_ends_before_its_worker_hears_of_the_cancel_ends_as_it_did(
    broker: Broker, worker: Worker
) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    broker.cancel("a")
    assert worker.finish(claim) == 1
    assert broker.cancel("a") == "stop"


def test_a_cancelled_request_whose_worker_dies_ends_with_its_text_so_far(
    broker: Broker, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 0, [7], "word")])
    broker.cancel("a")
    lapse()

    assert reclaim() == 1

    reply = reply_to(broker, "a")
    assert (reply.finish_reason, reply.text) == ("cancelled", "word")
    assert worker.finish(claim, "cancelled") == 0


def test_a_cancel_overtakes_the_push_that_it_is_for(broker: Broker, client: Any, worker: Worker) -> None:
    assert [broker.cancel("bare"), broker.cancel("bare"), broker.cancel("enqueued")] == ["remembered"] * 3
    assert 0 < client.pttl(broker.keys.request("bare")) <= 3_600_000
    client.rpush(broker.keys.requests, body("bare"))

    assert broker.enqueue("enqueued", body("enqueued"))[:2] == ("ok", "cancelled")
    assert worker.claim() == []

    assert [reply_to(broker, name).finish_reason for name in ("bare", "enqueued")] == ["cancelled"] * 2
    assert broker.enqueue("enqueued", body("enqueued"))[:2] == ("duplicate", "cancelled")


def test_a_cancel_of_a_forgotten_id_does_not_touch_a_request_that_is_enqueued_later(
    broker: Broker, client: Any, worker: Worker
) -> None:
    for name, seconds in (("in-time", 50), ("later", 70)):
        broker.cancel(name)
        client.pexpire(broker.keys.request(name), 3_600_000 - seconds * 1000)  # so much time passes

    assert broker.enqueue("in-time", body("in-time"))[:2] == ("ok", "cancelled")
    assert broker.enqueue("later", body("later"))[:2] == ("ok", "waiting")

    assert client.pttl(broker.keys.request("later")) == -1
    assert worker.finish(worker.claim_one()) == 1
    assert broker.state("later") == "stop"


def test_a_reused_id_is_a_new_request_that_the_old_cancel_does_not_touch(
    broker: Broker, client: Any, worker: Worker
) -> None:
    broker.enqueue("a", body("a"))
    old = worker.claim_one()
    broker.cancel("a")
    worker.finish(old, "cancelled")
    assert broker.enqueue("a", body("a"))[:2] == ("duplicate", "cancelled")
    forget(client, broker, "a")

    assert broker.enqueue("a", body("a", 1)).status == "ok"
    new = worker.claim_one()

    assert heard(broker, ("a", new.fence)) == []
    assert worker.finish(old, "cancelled") == 0
    assert worker.finish(new) == 1


def test_the_push_of_a_cancelled_request_begins_no_second_life_however_late_it_is_met(
    broker: Broker, client: Any, worker: Worker
) -> None:
    broker.enqueue("a", body("a"))
    broker.cancel("a", reply_ttl_ms=TTL_MS)
    assert client.pttl(broker.keys.request("a")) > 6 * 86_400_000
    client.delete(broker.keys.reply("a"))  # an hour later

    assert worker.claim() == []
    assert broker.wait_reply("a", 0) is None
    assert 0 < client.pttl(broker.keys.request("a")) <= TTL_MS + 60_000  # met: it is forgotten like any other
    assert broker.info().waiting == 0


def test_a_push_of_another_life_than_the_cancelled_one_is_not_taken_for_it(
    broker: Broker, client: Any, worker: Worker
) -> None:
    client.rpush(broker.keys.requests, body("a", 1))
    broker.enqueue("a", body("a"))
    broker.cancel("a")
    assert worker.claim() == []
    assert (broker.info().waiting, broker.info().stats["duplicates"]) == (0, 1)


def test_what_waits_past_its_deadline_is_answered_with_no_worker_alive(
    broker: Broker, reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"), timeout_ms=1)
    broker.enqueue("b", body("b"), timeout_ms=1_000_000)
    give_up = time.monotonic() + 10
    while broker.wait_reply("a", 0.01) is None and time.monotonic() < give_up:
        reclaim()

    reply = reply_to(broker, "a")
    assert (reply.finish_reason, reply.text) == ("deadline", "")
    assert reply.e2e_ms is not None
    assert reply.e2e_ms >= 1
    assert (broker.info().waiting, broker.state("b")) == (1, "waiting")


def test_a_request_that_is_late_is_answered_instead_of_begun(broker: Broker, client: Any, worker: Worker) -> None:
    for name in ("a", "b"):
        broker.enqueue(name, body(name), timeout_ms=60_000)
    pull_deadline(client, broker, "a")
    worker.slots = 1
    assert [claim.id for claim in worker.claim()] == ["b"]
    assert reply_to(broker, "a").finish_reason == "deadline"
    assert client.zrange(broker.keys.deadlines, 0, -1) == [b"b"]


def test_the_worker_of_a_late_request_hears_of_it_and_ends_it(
    broker: Broker, client: Any, worker: Worker, reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"), timeout_ms=60_000)
    claim = worker.claim_one()
    assert heard(broker, ("a", claim.fence)) == []
    pull_deadline(client, broker, "a")

    assert reclaim() == 0  # its worker is alive
    assert heard(broker, ("a", claim.fence)) == [Lost("a", claim.fence, "deadline")]
    assert worker.exchange(done(claim, "deadline", text="so far"), slots=0).finished == [1]
    assert client.exists(broker.keys.deadlines) == 0


def test_a_late_request_whose_worker_dies_ends_with_its_text_so_far(
    broker: Broker, client: Any, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"), timeout_ms=60_000)
    claim = worker.claim_one()
    worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 0, [7], "word")])
    pull_deadline(client, broker, "a")
    reclaim()
    lapse()

    assert reclaim() == 1
    assert (reply_to(broker, "a").finish_reason, reply_to(broker, "a").text) == ("deadline", "word")


def test_the_deadline_of_a_bare_push_counts_from_its_claim(broker: Broker, client: Any, worker: Worker) -> None:
    client.rpush(broker.keys.requests, body("a", timeout_ms=60_000))
    claim = worker.claim_one()
    seconds, micros = client.time()
    due = client.zscore(broker.keys.deadlines, "a")
    assert 0 <= seconds * 1000 + micros / 1000 + 60_000 - due < 10_000
    worker.finish(claim)
    assert client.exists(broker.keys.deadlines) == 0


@pytest.mark.parametrize("timeout", ["0", "-5", '"10"', "1e300", "[]", "null", "true", "{}"])
def test_a_timeout_that_cannot_be_is_left_to_the_worker_to_refuse(
    timeout: str, broker: Broker, client: Any, worker: Worker
) -> None:
    client.rpush(broker.keys.requests, b'{"id": "a", "prompt": "x", "timeout_ms": %s}' % timeout.encode())
    assert worker.claim_one().id == "a"
    assert client.exists(broker.keys.deadlines) == 0


def test_the_sweep_of_deadlines_ends_no_more_than_its_limit(
    broker: Broker, client: Any, reclaim: Callable[..., int]
) -> None:
    for i in range(5):
        broker.enqueue(str(i), body(str(i)), timeout_ms=60_000)
        pull_deadline(client, broker, str(i))
    assert [reclaim(limit=2) for _ in range(4)] == [2, 2, 1, 0]
