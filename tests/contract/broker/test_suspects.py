"""Crashes: who is charged, who runs alone, what ends as a dead letter, and what becomes of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tokenmill.shared.broker import Broker, Checkpoint, Claim
from tokenmill.shared.protocol import Reply

from .driver import LEASE_MS, Worker, body

Crash = Callable[..., list[Claim]]


@pytest.fixture
def crash(
    make_worker: Callable[..., Worker], lapse: Callable[..., None], reclaim: Callable[..., int], client: Any
) -> Crash:
    """Let a worker claim what it gets and die; ``progress`` names those that save a token before."""

    def crash(*progress: str, name: str = "doomed") -> list[Claim]:
        worker = make_worker(name)
        claims = worker.claim()
        for claim in claims:
            if claim.id in progress:
                saved = Checkpoint(claim.id, claim.fence, len(claim.token_ids), [7], "x ")
                assert worker.exchange(checkpoints=[saved], slots=0).checkpoints == [1]
        lapse()
        assert reclaim() == len(claims)
        client.delete(worker.broker.keys.solo)  # the dead worker's place lapses like its leases
        return claims

    return crash


def crash_of(broker: Broker, request_id: str) -> Reply:
    return msgspec.json.decode(broker.wait_reply(request_id, 0) or b"", type=Reply)


def test_after_two_crashes_a_request_is_a_suspect(broker: Broker, crash: Crash) -> None:
    broker.enqueue("a", body("a"))
    crash()
    assert (broker.info().suspects, broker.info().resume) == (0, 1)
    crash()
    assert (broker.info().suspects, broker.info().resume, broker.info().waiting) == (1, 0, 1)
    assert broker.info().stats["suspected"] == 1


def test_progress_clears_the_charge(broker: Broker, crash: Crash) -> None:
    broker.enqueue("a", body("a"))
    for _ in range(3):
        crash()
        crash("a")
    assert (broker.info().suspects, broker.info().resume) == (0, 1)


def test_what_was_saved_before_the_claim_is_no_progress(broker: Broker, crash: Crash) -> None:
    broker.enqueue("a", body("a"))
    crash("a")
    crash()
    crash()
    assert broker.info().suspects == 1


def test_a_drain_charges_nothing(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    for deliveries in range(1, 6):
        claim = worker.claim_one()
        assert claim.deliveries == deliveries
        broker.release("w", [("a", claim.fence)])
    assert (broker.info().suspects, broker.info().resume) == (0, 1)


def make_suspects(broker: Broker, crash: Crash, *names: str) -> None:
    for name in names:
        broker.enqueue(name, body(name))
    for _ in range(2):
        crash()
    assert broker.info().suspects == len(names)


def test_a_suspect_runs_with_nothing_beside_it(broker: Broker, crash: Crash, worker: Worker) -> None:
    make_suspects(broker, crash, "s1", "s2")
    broker.enqueue("good", body("good"))

    for name in ("s1", "s2"):
        claim = worker.claim_one()
        assert claim.id == name
        assert worker.exchange().claims == []
        worker.finish(claim)
    assert [claim.id for claim in worker.claim()] == ["good"]


def test_one_worker_empties_itself_for_suspects_while_the_others_go_on(
    broker: Broker, crash: Crash, make_worker: Callable[..., Worker]
) -> None:
    chosen, other = make_worker("chosen"), make_worker("other", slots=1)
    make_suspects(broker, crash, "suspect")
    broker.enqueue("first", body("first"))
    suspect = chosen.claim_one()
    for name in ("second", "third"):
        broker.enqueue(name, body(name))

    assert [claim.id for claim in other.claim()] == ["first"]
    assert chosen.claim() == []
    assert chosen.finish(suspect) == 1
    assert [claim.id for claim in chosen.claim()] == ["second", "third"]


def test_a_worker_that_holds_requests_gets_nothing_until_it_is_empty(
    broker: Broker, crash: Crash, make_worker: Callable[..., Worker], client: Any
) -> None:
    make_suspects(broker, crash, "suspect")
    client.set(broker.keys.solo, "somebody else", px=60_000)
    busy = make_worker("busy")
    broker.enqueue("running", body("running"))
    running = busy.claim_one()
    client.delete(broker.keys.solo)
    broker.enqueue("waiting", body("waiting"))

    assert busy.claim() == []
    assert client.get(broker.keys.solo) == b"busy"
    assert [claim.id for claim in make_worker("other").claim()] == ["waiting"]
    busy.finish(running)
    assert [claim.id for claim in busy.claim()] == ["suspect"]


def test_a_worker_keeps_its_place_while_the_suspect_runs(
    broker: Broker, crash: Crash, client: Any, worker: Worker
) -> None:
    make_suspects(broker, crash, "suspect")
    claim = worker.claim_one()
    client.pexpire(broker.keys.solo, 10_000)
    broker.renew("w", [("suspect", claim.fence)], lease_ms=LEASE_MS, status=b"{}")
    assert 10_000 < client.pttl(broker.keys.solo) <= LEASE_MS


def test_a_suspect_that_got_on_no_longer_runs_alone(broker: Broker, crash: Crash, worker: Worker) -> None:
    make_suspects(broker, crash, "a")
    crash("a")
    assert worker.claim_one().id == "a"
    broker.enqueue("b", body("b"))
    assert worker.claim_one().id == "b"


def test_a_suspect_that_is_cancelled_while_it_waits_keeps_no_place(broker: Broker, crash: Crash) -> None:
    make_suspects(broker, crash, "suspect")
    assert broker.cancel("suspect") == "cancelled"
    assert (broker.info().suspects, broker.info().waiting) == (0, 0)


def test_a_cancelled_suspect_whose_worker_dies_is_cancelled_not_blamed(
    broker: Broker, crash: Crash, worker: Worker, lapse: Callable[..., None], reclaim: Callable[..., int]
) -> None:
    make_suspects(broker, crash, "suspect")
    crash()  # once more, alone, and it is buried
    assert worker.claim_one().id == "suspect"
    assert broker.cancel("suspect") == "signalled"
    lapse()
    assert reclaim() == 1
    assert (broker.state("suspect"), broker.info().dead) == ("cancelled", 0)


def test_a_leaving_worker_leaves_the_place_beside_suspects_to_another(
    broker: Broker, crash: Crash, make_worker: Callable[..., Worker]
) -> None:
    make_suspects(broker, crash, "suspect")
    first, second = make_worker("first"), make_worker("second")
    claim = first.claim_one()
    assert second.claim() == []
    broker.release("first", [("suspect", claim.fence)])
    assert [claim.id for claim in second.claim()] == ["suspect"]


def test_good_requests_beside_a_poison_one_never_end_as_dead_letters(
    broker: Broker, client: Any, make_worker: Callable[..., Worker], lapse: Any, reclaim: Any
) -> None:
    """Every worker that holds "poison" dies at once; nobody else is blamed for it."""
    good = [f"good{i}" for i in range(5)]
    for name in (*good[:3], "poison", *good[3:]):
        broker.enqueue(name, body(name))
    for generation in range(20):
        worker = make_worker(f"worker{generation}", slots=3)
        while (claims := worker.claim()) and not any(claim.id == "poison" for claim in claims):
            for claim in claims:
                worker.finish(claim)
        lapse()
        reclaim()
        client.delete(broker.keys.solo)

    assert [broker.state(name) for name in good] == ["stop"] * 5
    reply = crash_of(broker, "poison")
    assert reply.error is not None
    assert (reply.finish_reason, reply.error.code) == ("error", "crashed")
    assert reply.error.message == f"its worker died {reply.deliveries} times on it"
    assert [letter.id for letter in broker.dead_letters()] == ["poison"]


def buried(broker: Broker, crash: Crash, name: str = "poison", **fields: Any) -> str:
    """A dead letter; its entry id."""
    broker.enqueue(name, body(name, **fields))
    for _ in range(4):
        assert [claim.id for claim in crash()] == [name]
    assert broker.state(name) == "error"
    return broker.dead_letters()[-1].entry_id


def test_a_dead_letter_keeps_the_whole_request(broker: Broker, crash: Crash) -> None:
    entry_id = buried(broker, crash, text="y" * 100_000)
    letter = broker.dead_letter(entry_id)
    assert letter is not None
    assert (letter.id, letter.payload, letter.why) == (
        "poison",
        body("poison", text="y" * 100_000),
        "its worker died 4 times on it",
    )
    assert letter.size == len(letter.payload)
    assert (broker.info().dead, broker.info().running, broker.info().waiting) == (1, 0, 0)


def test_a_crash_alone_is_forgiven_once_and_progress_forgives_all(broker: Broker, crash: Crash) -> None:
    broker.enqueue("a", body("a"))
    for _ in range(3):
        crash()
    assert broker.info().suspects == 1
    crash("a")
    assert (broker.info().suspects, broker.info().resume, broker.info().dead) == (0, 1, 0)


def test_a_requeued_dead_letter_is_a_new_life_of_its_id(broker: Broker, crash: Crash, worker: Worker) -> None:
    entry_id = buried(broker, crash)

    assert broker.requeue_dead(entry_id) == "ok"

    assert (broker.wait_reply("poison", 0), broker.dead_letters()) == (None, [])
    assert broker.requeue_dead(entry_id) == "gone"
    claim = worker.claim_one()
    assert (claim.id, claim.payload, claim.deliveries) == ("poison", body("poison"), 1)
    assert worker.finish(claim) == 1
    assert broker.state("poison") == "stop"


def test_a_requeued_dead_letter_keeps_its_priority(broker: Broker, client: Any, crash: Crash) -> None:
    entry_id = buried(broker, crash, priority="high")
    client.delete(broker.keys.requests)  # a poke that is there already
    assert broker.requeue_dead(entry_id) == "ok"
    assert client.lrange(broker.keys.high, 0, -1) == [body("poison", priority="high")]
    assert client.lrange(broker.keys.requests, 0, -1) == [b"~"]


def test_a_dead_letter_whose_id_lives_again_is_not_requeued(
    broker: Broker, client: Any, crash: Crash, worker: Worker
) -> None:
    entry_id = buried(broker, crash)
    client.delete(broker.keys.request("poison"), broker.keys.reply("poison"))
    broker.enqueue("poison", body("poison", 1))
    assert broker.requeue_dead(entry_id) == "in use"
    worker.finish(worker.claim_one())
    assert broker.requeue_dead(entry_id) == "in use"
    assert broker.wait_reply("poison", 0) is not None


def test_rubbish_that_was_cut_is_not_requeued(broker: Broker, client: Any, worker: Worker) -> None:
    client.rpush(broker.keys.requests, b"x" * 70_000)
    worker.claim()
    [letter] = broker.dead_letters()
    assert (letter.size, len(letter.payload)) == (70_000, 65_536)
    assert broker.requeue_dead(letter.entry_id) == "cut"


def test_dead_letters_are_read_in_pages_and_dropped_one_by_one_or_all(
    broker: Broker, client: Any, worker: Worker
) -> None:
    client.rpush(broker.keys.requests, *[b"junk %d" % i for i in range(5)])
    worker.claim()
    first = broker.dead_letters(count=2)
    rest = broker.dead_letters(after=first[-1].entry_id)
    assert [letter.payload for letter in first + rest] == [b"junk %d" % i for i in range(5)]
    assert broker.dead_letter("1-1") is None

    assert [broker.drop_dead(first[0].entry_id), broker.drop_dead(first[0].entry_id)] == [1, 0]
    assert [broker.drop_dead(), broker.info().dead] == [4, 0]
