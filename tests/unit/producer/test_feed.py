"""The feed: a bounded number outstanding, input order kept, nothing waited for that cannot come."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.producer.feed import Feed
from tokenmill.shared.protocol import StrictRequest

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
    feed = Feed(broker.as_broker(), requests(count), clock=broker.clock)
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
    feed = Feed(broker.as_broker(), source, clock=broker.clock)
    feed.window = 5
    feed.poll(0.1)
    assert next(source).id == "r5"


def test_an_id_in_use_becomes_an_error_reply_in_its_place() -> None:
    broker = FakeBroker()
    broker.enqueue("r1", b"something else")
    feed = Feed(broker.as_broker(), requests(3), clock=broker.clock)
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
    first = Feed(broker.as_broker(), requests(1), clock=broker.clock)
    first.poll(0.1)
    broker.answer(make_reply("r0", "once"))
    again = Feed(broker.as_broker(), requests(1), clock=broker.clock)
    assert [reply.text for reply in again.poll(0.1)] == ["once"]


def test_a_request_whose_reply_is_gone_is_not_waited_for() -> None:
    broker = FakeBroker()
    Feed(broker.as_broker(), requests(1), clock=broker.clock).poll(0.1)
    broker.answer(make_reply("r0"))
    del broker.replies["r0"]
    feed = Feed(broker.as_broker(), requests(1), clock=broker.clock)
    [reply] = feed.poll(0.1)
    assert reply.error is not None
    assert "its reply is gone" in reply.error.message
