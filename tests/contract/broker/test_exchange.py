"""What reaches a worker, what it may post, and what survives a lost answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tokenmill.shared.broker import Broker, Checkpoint, TokenEntry
from tokenmill.shared.protocol import Reply

from .driver import TTL_MS, Worker, body, done


def test_a_bare_push_is_claimed_like_an_enqueued_request(broker: Broker, client: Any, worker: Worker) -> None:
    client.rpush(broker.keys.requests, body("bare", stream=True))
    broker.enqueue("enqueued", body("enqueued", stream=True), stream=True)

    bare, enqueued = worker.claim()

    fields = [client.hgetall(broker.keys.request(claim.id)) for claim in (bare, enqueued)]
    assert fields[0].keys() == fields[1].keys()
    assert (bare.payload, bare.deliveries, bare.queue_ms, bare.text) == (body("bare", stream=True), 1, 0, "")


def test_a_claim_whose_answer_was_lost_comes_again_and_nothing_else(broker: Broker, worker: Worker) -> None:
    for name in ("a", "b", "c"):
        broker.enqueue(name, body(name))
    worker.slots = 2
    lost = worker.send()

    again = worker.exchange()

    assert [claim[:4] for claim in again.claims] == [claim[:4] for claim in lost.claims]
    assert again.owned == lost.owned
    assert worker.exchange().claims == []  # acknowledged, and the slots are full


def test_a_draining_worker_learns_of_a_lost_claim_without_taking_more(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    worker.send()
    broker.enqueue("b", body("b"))

    answer = worker.exchange(slots=0)

    assert [claim.id for claim in answer.claims] == ["a"]
    assert list(answer.owned) == ["a"]


def test_an_exchange_finishes_before_it_claims(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    broker.enqueue("b", body("b"))
    worker.slots = 1
    first = worker.claim_one()

    answer = worker.exchange(done(first))

    assert (answer.finished, [claim.id for claim in answer.claims]) == ([1], ["b"])


def test_an_old_exchange_that_arrives_late_changes_nothing(broker: Broker, worker: Worker, client: Any) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    saved = Checkpoint("a", claim.fence, 0, [1, 2], "one two ")
    worker.send(checkpoints=[saved])
    assert worker.exchange(done(claim)).finished == [1]
    before = client.dump(broker.keys.reply("a"))

    late = worker.send(done(claim, "error"), checkpoints=[saved])

    assert (late.finished, late.checkpoints) == ([1], [1])
    assert client.dump(broker.keys.reply("a")) == before


def test_generation_goes_on_from_the_checkpoint_with_another_worker(
    broker: Broker, make_worker: Callable[..., Worker], lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    broker.enqueue("a", body("a"))
    first, second = make_worker("first"), make_worker("second")
    claim = first.claim_one()
    for start, text in ((0, "Grüße "), (2, "an alle")):
        saved = [Checkpoint("a", claim.fence, start, [start, start + 1], text)]
        assert first.exchange(checkpoints=saved).checkpoints == [1]
    lapse()
    assert reclaim() == 1

    resumed = second.claim_one()

    assert (resumed.token_ids, resumed.text, resumed.deliveries) == ([0, 1, 2, 3], "Grüße an alle", 2)
    assert resumed.fence > claim.fence
    assert first.exchange(done(claim)).finished == [0]
    assert second.exchange(done(resumed)).finished == [1]


def test_a_stream_gets_its_last_chunk_and_an_end(broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"), stream=True)
    claim = worker.claim_one()
    worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 0, [5], "Hello")])

    assert worker.exchange(done(claim, "length", start=1, token_ids=[6, 7], text=" world!")).finished == [1]

    entries = broker.read_tokens("a")
    assert [entry[1:] for entry in entries] == [
        (0, [5], "Hello", None),
        (1, [6, 7], " world!", None),
        (0, [], "", "length"),
    ]
    assert broker.read_tokens("a", after=entries[1].entry_id) == [TokenEntry(entries[2].entry_id, 0, [], "", "length")]
    assert 0 < client.pttl(broker.keys.tokens("a")) <= TTL_MS


def test_a_stream_gets_the_text_that_was_held_back_until_the_end(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"), stream=True)
    claim = worker.claim_one()
    worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 0, [5, 6], "Hello")])

    assert worker.exchange(done(claim, start=2, token_ids=[], text="!")).finished == [1]
    assert [(entry.start, entry.text, entry.end) for entry in broker.read_tokens("a")] == [
        (0, "Hello", None),
        (2, "!", None),
        (0, "", "stop"),
    ]


def test_a_checkpoint_and_the_finish_of_one_request_may_travel_together(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"), stream=True)
    claim = worker.claim_one()
    saved = Checkpoint("a", claim.fence, 0, [5], "Hello")

    answer = worker.exchange(done(claim, "length", start=1, token_ids=[6], text="!"), checkpoints=[saved])

    assert (answer.finished, answer.checkpoints) == ([1], [1])
    assert [entry.text for entry in broker.read_tokens("a")] == ["Hello", "!", ""]


def test_a_checkpoint_after_a_gap_is_asked_for_from_where_the_stream_ends(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()

    def save(start: int, *token_ids: int) -> int:
        return worker.exchange(checkpoints=[Checkpoint("a", claim.fence, start, token_ids, "x")]).checkpoints[0]

    assert [save(2, 7), save(0, 5, 6), save(1, 6, 7), save(0, 5, 6), save(2, 7)] == [-1, 1, -3, 1, 1]


def test_a_finish_counts_even_after_the_broker_lost_tokens_of_its_stream(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"), stream=True)
    claim = worker.claim_one()

    assert worker.exchange(done(claim, start=2, token_ids=[7], text="!")).finished == [1]
    assert [entry.end for entry in broker.read_tokens("a")] == ["stop"]
    assert broker.wait_reply("a", 0) is not None


def test_a_checkpoint_and_the_finish_of_one_request_may_come_together_and_twice(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"), stream=True)
    claim = worker.claim_one()
    checkpoint = Checkpoint("a", claim.fence, 0, [5], "Hello")
    finish = done(claim, start=1, token_ids=[6], text=" world")

    answers = [worker.exchange(finish, checkpoints=[checkpoint]) for _ in range(2)]

    assert [(answer.finished, answer.checkpoints) for answer in answers] == [([1], [1])] * 2
    assert [entry.text for entry in broker.read_tokens("a")] == ["Hello", " world", ""]


def test_a_finished_request_keeps_only_what_a_repeat_needs(broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 0, [5], "Hello")])
    worker.finish(claim)

    assert set(client.hgetall(broker.keys.request("a"))) == {b"state", b"fence", b"sha1"}
    assert client.exists(broker.keys.tokens("a")) == 0
    reply_ttl, hash_ttl = client.pttl(broker.keys.reply("a")), client.pttl(broker.keys.request("a"))
    assert 59_000 <= hash_ttl - reply_ttl <= 61_000
    assert broker.enqueue("a", body("a"))[:2] == ("duplicate", "stop")
    assert broker.enqueue("a", body("a", 1))[:2] == ("conflict", "stop")


@pytest.mark.parametrize(
    ("push", "why"),
    [
        (b"\x00\x01junk", "the request is not valid JSON"),
        (b"", "the request is not valid JSON"),
        (b"[" * 5000, "the request is not valid JSON"),
        (b"[1]", "the request has no valid id"),
        (b'{"prompt": "no id"}', "the request has no valid id"),
        (b'{"id": 5}', "the request has no valid id"),
        (b'{"id": null}', "the request has no valid id"),
        (b'{"id": "two words"}', "the request has no valid id"),
        (b'{"id": "%s"}' % (b"x" * 129), "the request has no valid id"),
        (b'{"id": "{tag}", "prompt":', "the request is not valid JSON"),
        (b'"' + b"y" * 300_000 + b'"', "the request is larger than the limit"),
    ],
)
def test_bytes_that_are_no_request_are_a_dead_letter_and_spare_their_neighbours(
    push: bytes, why: str, broker: Broker, client: Any, worker: Worker
) -> None:
    client.rpush(broker.keys.requests, body("before"), push, body("after"))

    assert [claim.id for claim in worker.claim()] == ["before", "after"]
    [(_, letter)] = client.xrange(broker.keys.dead)
    assert letter == {b"why": why.encode(), b"id": b"", b"payload": push[:65536], b"size": b"%d" % len(push)}


@pytest.mark.parametrize(
    "push", [b'{"id": "r1", "prompt": ', b'{"prompt": "x", "id" : "r1"} and more', b'{"id":"r1","x":"' + b"y" * 300_000]
)
def test_a_broken_request_with_an_id_is_answered_with_a_valid_error(
    push: bytes, broker: Broker, client: Any, worker: Worker
) -> None:
    client.rpush(broker.keys.requests, push)

    assert worker.claim() == []
    reply = msgspec.json.decode(broker.wait_reply("r1", 0) or b"", type=Reply)
    assert reply.error is not None
    assert (reply.id, reply.finish_reason, reply.error.code) == ("r1", "error", "invalid_request")
    assert [letter[b"id"] for _, letter in client.xrange(broker.keys.dead)] == [b"r1"]


def test_the_id_is_that_of_the_claim_even_where_the_payload_names_two(
    broker: Broker, client: Any, worker: Worker
) -> None:
    client.rpush(broker.keys.requests, b'{"id": "first", "id": "second", "prompt": "x"}')
    claim = worker.claim_one()
    assert claim.id in ("first", "second")
    assert worker.finish(claim) == 1
    assert broker.wait_reply(claim.id, 0) is not None


def test_rubbish_costs_a_bounded_amount_of_work_per_call(broker: Broker, client: Any, worker: Worker) -> None:
    client.rpush(broker.keys.requests, *[b"junk"] * 100, body("good"))
    worker.slots = 1

    assert worker.claim() == []
    assert client.llen(broker.keys.requests) > 50
    claims = [claim for _ in range(10) for claim in worker.claim()]
    assert [claim.id for claim in claims] == ["good"]


def test_dead_letters_are_capped(broker: Broker, client: Any, worker: Worker) -> None:
    client.rpush(broker.keys.requests, *[b"junk %d" % i for i in range(1100)])
    while client.llen(broker.keys.requests):
        worker.exchange()
    assert client.xlen(broker.keys.dead) == 1000
    assert client.xrevrange(broker.keys.dead, count=1)[0][1][b"payload"] == b"junk 1099"


def test_a_key_of_another_type_in_the_way_spares_the_neighbours(broker: Broker, client: Any, worker: Worker) -> None:
    client.set(broker.keys.request("evil"), "x", px=TTL_MS)
    client.set(broker.keys.reply("good"), "x")
    client.rpush(broker.keys.requests, body("evil"), body("good"))

    claim = worker.claim_one()
    assert claim.id == "good"
    assert worker.finish(claim) == 1
    assert client.lrange(broker.keys.reply("good"), 0, -1) == [f"good {claim.fence}".encode()]
    assert [letter[b"payload"] for _, letter in client.xrange(broker.keys.dead)] == [body("evil")]
    client.delete(broker.keys.request("evil"))


def test_a_request_whose_state_is_damaged_ends_with_an_error_instead_of_going_round(
    broker: Broker, client: Any, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    for name in ("a", "b"):
        broker.enqueue(name, body(name))
    worker.claim()
    client.hdel(broker.keys.request("a"), "payload")
    client.set(broker.keys.request("b"), "x")
    lapse()

    assert reclaim() == 1
    assert Worker(broker, "other").claim() == []
    for name in ("a", "b"):
        reply = msgspec.json.decode(broker.wait_reply(name, 0) or b"", type=Reply)
        assert reply.error is not None
        assert reply.error.code == "internal"


def test_fences_only_grow_even_when_the_broker_lost_everything(broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    first = worker.claim_one()
    client.delete(*client.scan_iter(f"{broker.keys.meta.removesuffix('meta')}*"))
    broker.enqueue("a", body("a"))
    second = worker.claim_one()

    assert second.fence > first.fence
    assert worker.finish(first) == 0
    assert worker.finish(second) == 1


def test_a_fence_ahead_of_the_clock_is_still_passed(broker: Broker, client: Any, worker: Worker) -> None:
    ahead = 4_000_000_000_000_000
    client.hset(broker.keys.meta, "fence", ahead)
    for name in ("a", "b"):
        broker.enqueue(name, body(name))
    assert [claim.fence for claim in worker.claim()] == [ahead + 1, ahead + 2]
    assert worker.exchange().owned == {"a": ahead + 1, "b": ahead + 2}
    broker.enqueue("c", body("c"))
    assert Worker(broker, "other").claim_one().fence > ahead + 2


def test_a_broker_that_lost_fences_and_whose_clock_lags_still_repeats_an_answer(
    broker: Broker, client: Any, worker: Worker
) -> None:
    client.hset(broker.keys.meta, "fence", 4_000_000_000_000_000)
    for name in ("a", "b"):
        broker.enqueue(name, body(name))
    worker.slots = 1
    first = worker.claim_one()
    client.hdel(broker.keys.meta, "fence")  # as on a replica that had not heard of the claim

    worker.send(done(first))  # its answer is lost
    again = worker.claim_one()

    assert again.id == "b"
    assert again.fence > first.fence


def test_the_wait_of_a_request_ends_with_its_first_claim(broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    first = worker.claim_one()
    client.hincrby(broker.keys.request("a"), "claimed", 4000)
    broker.release("w", [("a", first.fence)])
    assert worker.claim_one().queue_ms == first.queue_ms + 4000


def test_an_id_among_those_to_be_resumed_does_not_begin_a_request_that_is_new(
    broker: Broker, client: Any, worker: Worker
) -> None:
    broker.enqueue("a", body("a"))
    client.rpush(broker.keys.resume, "a")  # of an earlier life
    claim = worker.claim_one()
    assert (claim.payload, claim.deliveries) == (body("a"), 1)
    assert broker.info().dead == 0


def test_what_one_bad_item_answers_leaves_the_others_alone(broker: Broker, client: Any, worker: Worker) -> None:
    for name in ("a", "b"):
        broker.enqueue(name, body(name), stream=True)
    a, b = worker.claim()
    client.set(broker.keys.tokens("a"), "not a stream")

    chunk: dict[str, Any] = {"token_ids": [1], "text": "x"}
    answer = worker.exchange(done(a, **chunk), done(b, **chunk), checkpoints=[Checkpoint("a", a.fence, 0, [1], "x")])

    assert (answer.finished, answer.checkpoints) == ([0, 1], [0])
    assert broker.info().stats["script_errors"] == 2


def test_counters_tell_what_happened(broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    client.rpush(broker.keys.requests, body("a"), body("b"), b"junk")
    a, b = worker.claim()
    worker.exchange(done(a), done(b._replace(fence=1)), done(a))
    broker.release("w", [(b.id, b.fence)])

    assert broker.info().stats == {
        "enqueued": 2,
        "duplicates": 1,
        "dead_letters": 1,
        "finished_stop": 1,
        "fenced": 1,
        "released": 1,
    }


def test_the_scripts_run_on_fakeredis(fake_client: Any) -> None:
    broker = Broker(fake_client, "fake")
    worker = Worker(broker)
    assert broker.enqueue("a", body("a"), stream=True).status == "ok"
    assert broker.enqueue("a", body("a")).status == "duplicate"
    fake_client.rpush(broker.keys.requests, body("b"), body("b"), b'{"id": "c", ')
    a, b = worker.claim()
    saved = Checkpoint("a", a.fence, 0, [1, 2], "x y ")
    assert worker.exchange(checkpoints=[saved, saved]).checkpoints == [1, 1]
    assert broker.renew("w", [("a", a.fence), ("b", 1)], lease_ms=1000, status=b"{}") == [("b", 1, "fenced")]
    assert broker.release("w", [("a", a.fence)]) == 1
    other = Worker(broker, "other", slots=1)
    again = other.claim_one()
    assert (again.token_ids, again.text) == ([1, 2], "x y ")
    assert (worker.finish(a), other.finish(again), worker.finish(b)) == (0, 1, 1)
    error: Any = json.loads(broker.wait_reply("c", 0) or b"")
    assert error["error"]["code"] == "invalid_request"
