"""The exchange thread against a broker that can be told to fail, to be slow, and to have nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tokenmill.shared.broker import Checkpoint, Claim, Exchanged, Finish
from tokenmill.shared.errors import BrokerUnreachableError
from tokenmill.worker.exchange import FIRST_PAUSE_S, Exchange

NOTHING = Exchanged(owned={}, claims=[], finished=[], checkpoints=[])
DEADLINE_S = 5.0


class FakeBroker:
    """Answers exchanges from a list, the last one for ever; an exception in it is raised."""

    def __init__(self) -> None:
        self.answers: list[Exchanged | Exception] = [NOTHING]
        self.calls: list[dict[str, Any]] = []
        self.arrivals: queue.Queue[bool] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()

    def exchange(self, worker: str, **call: Any) -> Exchanged:
        self.calls.append({"worker": worker, **call})
        assert self.gate.wait(DEADLINE_S)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def peek(self, timeout_s: float) -> bool:
        try:
            return self.arrivals.get(timeout=0.02)
        except queue.Empty:
            return False


def claim(request_id: str, fence: int) -> Claim:
    return Claim(id=request_id, fence=fence, payload=b"{}", deliveries=1, queue_ms=0, age_ms=0, token_ids=[], text="")


def reply(request_id: str) -> Finish:
    return Finish(request_id, 7, "stop", b"{}", 0, [], "")


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def exchange(broker: FakeBroker) -> Iterator[Exchange]:
    exchange = Exchange(broker, "w", slots=4, lease_ms=1000, reply_ttl_ms=1000, block_s=0.02)  # type: ignore[arg-type]
    exchange.start()
    yield exchange
    broker.gate.set()
    exchange.close(0)


def test_a_post_carries_replies_and_checkpoints_and_brings_claims(broker: FakeBroker, exchange: Exchange) -> None:
    checkpoint = Checkpoint("b", 8, 0, [1, 2], "xy")
    broker.answers = [Exchanged(owned={"c": 9}, claims=[claim("c", 9)], finished=[1], checkpoints=[1])]
    exchange.post([reply("a")], [checkpoint])
    [(answer, about)] = exchange.collect(DEADLINE_S)
    assert [c.id for c in answer.claims] == ["c"]
    assert about == [checkpoint]
    assert exchange.owned == {"c": 9}
    assert broker.calls[0]["finished"] == [reply("a")]
    assert broker.calls[0]["slots"] == 4


def test_a_slow_broker_does_not_hold_up_the_loop(broker: FakeBroker, exchange: Exchange) -> None:
    broker.gate.clear()
    exchange.post([reply("a")], [])
    exchange.post([reply("b")], [])
    assert exchange.collect(0) == []
    broker.gate.set()
    exchange.collect(DEADLINE_S)
    assert [f.id for call in broker.calls for f in call["finished"]] == ["a", "b"]


def test_requests_that_end_together_go_in_two_calls_so_that_the_first_brings_work_meanwhile(
    broker: FakeBroker, exchange: Exchange
) -> None:
    first = Exchanged(owned={"e": 9}, claims=[claim("e", 9)], finished=[1, 1], checkpoints=[])
    broker.answers = [first, NOTHING]
    exchange.post([reply(name) for name in "abcd"], [])
    answers = exchange.collect(DEADLINE_S)
    assert [answer for answer, _ in answers] == [first, NOTHING]
    assert [[f.id for f in call["finished"]] for call in broker.calls] == [["a", "b"], ["c", "d"]]


def test_the_first_answer_is_there_while_the_second_call_is_under_way(broker: FakeBroker, exchange: Exchange) -> None:
    first = Exchanged(owned={"e": 9}, claims=[claim("e", 9)], finished=[1, 1], checkpoints=[])
    take = broker.exchange

    def exchange_once(worker: str, **call: Any) -> Exchanged:
        answer = take(worker, **call)
        broker.gate.clear()
        return answer

    broker.answers = [first, NOTHING]
    broker.exchange = exchange_once  # type: ignore[method-assign]
    exchange.post([reply(name) for name in "abcd"], [])
    assert [answer for answer, _ in exchange.await_work(DEADLINE_S)] == [first]


def test_a_call_that_failed_is_repeated_unchanged(broker: FakeBroker, exchange: Exchange) -> None:
    broker.answers = [BrokerUnreachableError("away"), BrokerUnreachableError("away"), NOTHING]
    exchange.post([reply("a")], [])
    exchange.collect(DEADLINE_S)
    assert len(broker.calls) == 3
    assert broker.calls[0] == broker.calls[1] == broker.calls[2]


def test_the_highest_fence_received_is_acknowledged(broker: FakeBroker, exchange: Exchange) -> None:
    broker.answers = [
        Exchanged(owned={"a": 5, "b": 9}, claims=[claim("a", 5), claim("b", 9)], finished=[], checkpoints=[]),
        NOTHING,
    ]
    for _ in range(2):
        exchange.post([], [])
        exchange.collect(DEADLINE_S)
    assert [call["ack"] for call in broker.calls] == [0, 9]


def test_a_request_whose_reply_the_broker_has_lost_is_left_to_lapse(broker: FakeBroker, exchange: Exchange) -> None:
    owned = {"a": 7, "b": 9}
    broker.answers = [
        Exchanged(owned, [claim("a", 7), claim("b", 9)], [], []),
        Exchanged(owned, [], [1], []),  # as from a replica that took over and had not heard of the reply
    ]
    exchange.post([], [])
    exchange.collect(DEADLINE_S)
    assert exchange.owned == owned
    exchange.post([reply("a")], [])
    exchange.collect(DEADLINE_S)
    assert exchange.owned == {"b": 9}


def test_an_idle_worker_claims_only_when_a_request_is_there(broker: FakeBroker, exchange: Exchange) -> None:
    assert exchange.await_work(0.1) == []
    assert broker.calls == []
    broker.answers = [Exchanged(owned={"a": 5}, claims=[claim("a", 5)], finished=[], checkpoints=[])]
    broker.arrivals.put(True)
    [(answer, _)] = exchange.await_work(DEADLINE_S)
    assert [c.id for c in answer.claims] == ["a"]


def test_claims_that_bring_nothing_are_paced(broker: FakeBroker, exchange: Exchange) -> None:
    for _ in range(50):
        broker.arrivals.put(True)
    began = time.monotonic()
    while len(broker.calls) < 6 and time.monotonic() - began < DEADLINE_S:
        exchange.await_work(0.05)
    assert len(broker.calls) >= 6
    assert time.monotonic() - began >= FIRST_PAUSE_S * (1 + 2 + 4 + 8 + 16)


def test_a_bug_in_the_thread_reaches_the_loop(broker: FakeBroker, exchange: Exchange) -> None:
    broker.answers = [ZeroDivisionError("a bug")]
    exchange.post([], [])
    with pytest.raises(ZeroDivisionError):
        exchange.collect(DEADLINE_S)


def test_after_claim_no_more_an_exchange_only_carries_out(broker: FakeBroker, exchange: Exchange) -> None:
    exchange.claim_no_more()
    exchange.post([reply("a")], [])
    exchange.collect(DEADLINE_S)
    assert broker.calls[0]["slots"] == 0


def test_close_carries_out_what_was_posted(broker: FakeBroker, exchange: Exchange) -> None:
    exchange.post([reply("a")], [])
    assert exchange.close(DEADLINE_S)
    assert broker.calls[-1]["finished"] == [reply("a")]


def test_close_gives_up_on_a_broker_that_is_away(broker: FakeBroker, exchange: Exchange) -> None:
    broker.answers = [BrokerUnreachableError("away")]
    exchange.post([reply("a")], [])
    assert not exchange.close(0.05)


def test_a_wait_at_the_broker_is_no_longer_than_the_loop_has_nothing_to_run(
    broker: FakeBroker, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    peeked = threading.Event()

    def peek(timeout_s: float) -> bool:
        waits.append(timeout_s)
        peeked.set()
        return False

    monkeypatch.setattr(broker, "peek", peek)
    exchange.await_work(0.01)
    assert peeked.wait(DEADLINE_S)
    exchange.await_work(0.1)
    assert waits[0] == 0.01
    assert max(waits) == 0.02  # an idle worker's
