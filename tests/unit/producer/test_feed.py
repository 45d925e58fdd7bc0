"""The feed: a bounded number outstanding, input order kept, nothing waited for that cannot come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.producer.feed import Feed
from tokenmill.shared.errors import BrokerUnreachableError
from tokenmill.shared.protocol import Reply, StrictRequest

from .fakes import FakeBroker, make_reply


def requests(count: int) -> Iterator[StrictRequest]:
    for number in range(count):
        yield StrictRequest(id=f"r{number}", prompt="Hi", max_tokens=10)


@given(count=st.integers(0, 30), window=st.integers(1, 8), order=st.randoms(use_true_random=False))
def test_replies_come_in_input_order_whatever_finishes_first(
    count: int,
    window: int,
    order: object,
) -> None:
    broker = FakeBroker()
    feed = Feed(broker.as_broker(), requests(count), clock=broker.clock, sleep=broker.sleep)
    feed.window = window
    replies = []
    while not feed.done:
        replies += feed.poll(1.0)
        unanswered = [name for name in broker.payloads if name not in broker.replies]
        assert len(unanswered) <= window
        if unanswered:
            broker.answer(make_reply(order.choice(unanswered)))  # type: ignore[attr-defined]
    assert [reply.id for reply in replies] == [f"r{n}" for n in range(count)]
    assert (feed.answered, feed.answered_max_tokens, feed.answered_tokens) == (count, 10 * count, 4 * count)


def test_requests_are_read_no_further_than_the_window() -> None:
    broker = FakeBroker()
    source = requests(100)
    feed = Feed(broker.as_broker(), source, clock=broker.clock, sleep=broker.sleep)
    feed.window = 5
    feed.poll(0.1)
    assert next(source).id == "r5"


def test_an_id_in_use_becomes_an_error_reply_in_its_place() -> None:
    broker = FakeBroker()
    broker.payloads["r1"], broker.states["r1"] = b"something else", "waiting"
    feed = Feed(broker.as_broker(), requests(3), clock=broker.clock, sleep=broker.sleep)
    feed.poll(0.1)
    broker.answer(make_reply("r0"))
    broker.answer(make_reply("r2"))
    replies = feed.poll(0.1) + feed.poll(0.1)
    assert [reply.finish_reason for reply in replies] == ["stop", "error", "stop"]
    assert replies[1].error is not None
    assert "another request has the id `r1`" in replies[1].error.message
    assert feed.done


def test_a_request_answered_before_gives_its_reply_again() -> None:
    broker = FakeBroker()
    first = Feed(broker.as_broker(), requests(1), clock=broker.clock, sleep=broker.sleep)
    first.poll(0.1)
    broker.answer(make_reply("r0", "once"))
    again = Feed(broker.as_broker(), requests(1), clock=broker.clock, sleep=broker.sleep)
    assert [reply.text for reply in again.poll(0.1)] == ["once"]


def test_a_request_whose_reply_is_gone_is_not_waited_for() -> None:
    broker = FakeBroker()
    Feed(broker.as_broker(), requests(1), clock=broker.clock, sleep=broker.sleep).poll(0.1)
    broker.answer(make_reply("r0"))
    del broker.replies["r0"]
    feed = Feed(broker.as_broker(), requests(1), clock=broker.clock, sleep=broker.sleep)
    [reply] = feed.poll(0.1)
    assert reply.error is not None
    assert "its reply is gone" in reply.error.message


def poll_until(feed: Feed, broker: FakeBroker, when: float) -> list[Reply]:
    replies: list[Reply] = []
    turns = 0
    while broker.now < when:
        turns += 1
        assert turns < 10_000, "the clock stands still"
        replies += feed.poll(0.5)
        broker.now += 0.01
    return replies


def test_a_full_queue_is_waited_for() -> None:
    broker = FakeBroker()
    broker.full_until = 4.0
    feed = Feed(broker.as_broker(), requests(3), clock=broker.clock, sleep=broker.sleep)
    assert poll_until(feed, broker, 4.0) == []
    assert broker.payloads == {}
    assert not feed.done
    poll_until(feed, broker, 6.0)
    assert list(broker.payloads) == ["r0", "r1", "r2"]


def test_replies_come_while_a_full_queue_takes_no_more() -> None:
    broker = FakeBroker()
    feed = Feed(broker.as_broker(), requests(2), clock=broker.clock, sleep=broker.sleep)
    feed.window = 1
    feed.poll(0.1)
    broker.full_until = 1000.0
    broker.answer(make_reply("r0"))
    assert [reply.id for reply in feed.poll(0.1)] == ["r0"]
    feed.poll(0.1)
    assert list(broker.payloads) == ["r0"]


def test_a_broker_that_never_answered_fails_at_once() -> None:
    broker = FakeBroker()
    broker.away_until = 1.0
    feed = Feed(broker.as_broker(), requests(3), clock=broker.clock, sleep=broker.sleep)
    with pytest.raises(BrokerUnreachableError):
        feed.poll(0.1)


def test_an_outage_is_waited_for_and_what_it_cost_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    broker = FakeBroker()
    feed = Feed(broker.as_broker(), requests(4), clock=broker.clock, sleep=broker.sleep)
    feed.window = 3
    feed.poll(0.1)
    broker.away_until = broker.now + 2.0
    for lost in ("r1", "r2"):
        del broker.payloads[lost], broker.states[lost]
    with caplog.at_level("WARNING", logger="tokenmill"):
        assert poll_until(feed, broker, broker.away_until + 1.5) == []
    assert [message.split(" ")[0:3] for message in caplog.messages] == [["no", "broker", "at"], ["the", "broker", "is"]]
    assert sorted(broker.payloads) == ["r0", "r1", "r2"]
    for number in range(3):
        broker.answer(make_reply(f"r{number}"))
    assert [reply.id for reply in poll_until(feed, broker, broker.now + 0.5)] == ["r0", "r1", "r2"]


def test_a_reply_taken_by_somebody_else_holds_nothing_up() -> None:
    broker = FakeBroker()
    feed = Feed(broker.as_broker(), requests(2), clock=broker.clock, sleep=broker.sleep)
    feed.poll(0.1)
    broker.answer(make_reply("r0"))
    broker.answer(make_reply("r1"))
    del broker.replies["r0"]
    replies = poll_until(feed, broker, broker.now + 3.0)
    assert [reply.finish_reason for reply in replies] == ["error", "stop"]
    assert replies[0].error is not None
    assert "its reply is gone" in replies[0].error.message
    assert feed.done
    assert feed.answered_max_tokens == 20


def test_lines_under_one_idempotency_key_are_one_request_with_a_reply_for_each() -> None:
    broker = FakeBroker()
    lines = (StrictRequest(id=name, prompt="Hi", idempotency_key="k") for name in ("a", "b"))
    feed = Feed(broker.as_broker(), lines, clock=broker.clock, sleep=broker.sleep)
    feed.poll(0.1)
    assert list(broker.payloads) == ["a"]
    broker.answer(make_reply("a", "once"))
    replies = poll_until(feed, broker, broker.now + 0.5)
    assert [(reply.id, reply.text) for reply in replies] == [("a", "once"), ("b", "once")]
    assert feed.done


def test_cancel_takes_back_what_is_outstanding() -> None:
    broker = FakeBroker()
    feed = Feed(broker.as_broker(), requests(5), clock=broker.clock, sleep=broker.sleep)
    feed.window = 3
    feed.poll(0.1)
    broker.answer(make_reply("r1"))
    poll_until(feed, broker, broker.now + 1.0)
    assert feed.cancel() == 3
    assert broker.cancelled == ["r0", "r2", "r3"]
    broker.away_until = broker.now + 10
    feed.cancel()
