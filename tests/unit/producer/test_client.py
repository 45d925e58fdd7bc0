"""The client: submit, wait and stream, with clear errors for what cannot be."""

from __future__ import annotations

import pytest

from tokenmill.producer.client import Client, NoReplyError, ReplyGoneError
from tokenmill.producer.request import IdInUseError, QueueFullError
from tokenmill.shared.broker import TokenEntry
from tokenmill.shared.errors import BrokerUnreachableError, UsageError

from .fakes import FakeBroker, make_reply


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def client(broker: FakeBroker) -> Client:
    return Client(broker.as_broker(), clock=broker.clock, sleep=broker.sleep)


def entry(number: int, text: str, end: str | None = None) -> TokenEntry:
    return TokenEntry(f"{number}-0", number, [number], text, end)


def test_submit_sends_the_fields_and_makes_an_id(client: Client, broker: FakeBroker) -> None:
    request_id = client.submit("Hello", max_tokens=5, stop=["\n"])
    [request] = broker.requests()
    assert (request.id, request.prompt, request.max_tokens, request.stop) == (request_id, "Hello", 5, ["\n"])
    assert client.submit("Hello") != request_id


def test_submit_takes_messages_and_token_ids(client: Client, broker: FakeBroker) -> None:
    client.submit(messages=[{"role": "user", "content": "Hi"}])
    client.submit([1, 2, 3])
    chat, ids = broker.requests()
    assert isinstance(chat.messages, list)
    assert chat.messages[0].content == "Hi"
    assert ids.prompt == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({}, "give either"),
        ({"prompt": "Hi", "max_tokens": 0}, "max_tokens: expected `int` >= 1"),
        ({"prompt": "Hi", "colour": "red"}, "unknown field `colour`"),
        ({"prompt": "Hi", "id": "no spaces"}, "id: expected `str` matching"),
    ],
)
def test_a_bad_request_is_refused_before_the_queue(
    arguments: dict[str, object], what: str, client: Client, broker: FakeBroker
) -> None:
    with pytest.raises(UsageError, match=f"^{what}"):
        client.submit(**arguments)  # type: ignore[arg-type]
    assert broker.payloads == {}


def test_the_same_request_twice_is_one_and_another_under_its_id_is_an_error(client: Client, broker: FakeBroker) -> None:
    assert client.submit("Hi", id="a") == client.submit("Hi", id="a") == "a"
    assert len(broker.payloads) == 1
    with pytest.raises(IdInUseError, match="another request has the id `a`"):
        client.submit("Ho", id="a")


def test_wait_gives_the_reply(client: Client, broker: FakeBroker) -> None:
    request_id = client.submit("Hi")
    broker.answer(make_reply(request_id, "there"))
    assert client.wait(request_id).text == "there"


def test_wait_gives_up_in_time_and_says_that_the_request_stays(client: Client, broker: FakeBroker) -> None:
    with pytest.raises(NoReplyError, match="no reply to request `a` in time; it stays on the queue"):
        client.wait("a", 2.5)
    assert broker.now == pytest.approx(2.5)


def test_generate_submits_and_waits(client: Client, broker: FakeBroker) -> None:
    broker.answer(make_reply("a", "there"))
    broker.states.clear()
    assert client.generate("Hi", id="a", timeout=1).text == "there"


def test_a_stream_gives_every_piece_once_and_then_the_reply(client: Client, broker: FakeBroker) -> None:
    stream = client.stream("Hi", id="a")
    assert broker.requests()[0].stream
    broker.entries["a"] = [entry(1, "One"), entry(2, ""), entry(3, ", two"), entry(4, ""), entry(5, "", "stop")]
    broker.answer(make_reply("a", "One, two"))
    with pytest.raises(RuntimeError, match="read the stream to its end"):
        _ = stream.reply
    assert list(stream) == ["One", ", two"]
    assert stream.reply.text == "One, two"
    assert list(stream) == []


def test_a_stream_goes_on_where_another_reader_stopped(client: Client, broker: FakeBroker) -> None:
    stream = client.stream("Hi", id="a")
    broker.entries["a"] = [entry(1, "One"), entry(2, ", two"), entry(3, ", three"), entry(4, "", "stop")]
    broker.answer(make_reply("a", "One, two, three"))
    pieces = iter(stream)
    assert [next(pieces), next(pieces)] == ["One", ", two"]
    assert list(client.read("a", after=stream.position)) == [", three"]


def test_a_stream_of_a_request_that_failed_at_once_ends_with_its_reply(client: Client, broker: FakeBroker) -> None:
    stream = client.stream("Hi", id="a")
    broker.answer(make_reply("a", "", finish_reason="error"))
    assert list(stream) == []
    assert stream.reply.finish_reason == "error"


def test_a_stream_gives_up_in_time(client: Client, broker: FakeBroker) -> None:
    with pytest.raises(NoReplyError, match="did not finish in time"):
        list(client.stream("Hi", timeout=3))
    assert broker.now == pytest.approx(3)


def test_submit_tells_the_broker_what_it_goes_by(client: Client, broker: FakeBroker) -> None:
    client.submit("x" * 40, id="a", max_tokens=5, priority="low", timeout_ms=900)
    said = broker.options["a"]
    assert said == {"stream": False, "priority": "low", "timeout_ms": 900, "cost": 15, "reply_to": None}
    client.submit([1, 2, 3], id="b", max_tokens=5)
    client.submit(messages=[{"role": "user", "content": "x" * 8}], id="c", max_tokens=5, stream=True)
    assert (broker.options["b"]["cost"], broker.options["c"]["cost"]) == (8, 7)
    assert broker.options["c"]["stream"]


def test_the_same_idempotency_key_gives_the_first_request(client: Client, broker: FakeBroker) -> None:
    first = client.submit("Hi", idempotency_key="order-7")
    assert client.submit("Hi", idempotency_key="order-7") == first
    assert len(broker.payloads) == 1
    with pytest.raises(IdInUseError, match=r"^idempotency_key: another request was sent under `order-7`"):
        client.submit("Ho", idempotency_key="order-7")


def test_submit_waits_for_room_in_a_full_queue(client: Client, broker: FakeBroker) -> None:
    broker.full_until = 4.0
    client.submit("Hi", id="a")
    assert broker.now == 4.5  # three times 1.5 s, as the broker asked for
    assert broker.states == {"a": "waiting"}


def test_submit_gives_up_in_time_or_at_once_and_says_when_to_try_again(client: Client, broker: FakeBroker) -> None:
    broker.full_until = 100.0
    with pytest.raises(QueueFullError, match=r"try again in 1\.5 s") as caught:
        client.submit("Hi", timeout=2.0)
    assert (caught.value.retry_after, broker.now) == (1.5, 2.0)
    with pytest.raises(QueueFullError):
        client.submit("Hi", when_full="raise")
    assert broker.now == 2.0


def test_generate_counts_the_wait_for_room(client: Client, broker: FakeBroker) -> None:
    broker.full_until = 1.0
    with pytest.raises(NoReplyError):
        client.generate("Hi", timeout=4.0)
    assert broker.now == 4.0


def test_a_broker_that_never_answered_fails_at_once(client: Client, broker: FakeBroker) -> None:
    broker.away_until = 5.0
    with pytest.raises(BrokerUnreachableError):
        client.submit("Hi")
    assert broker.now == 0


def test_everything_outlasts_an_outage_with_one_warning_at_each_end(
    client: Client, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    client.submit("Hi", id="a")
    broker.away_until = 3.0
    with caplog.at_level("WARNING", logger="tokenmill"):
        client.submit("Hi", id="b")
    assert caplog.messages == [
        "no broker at here: gone; trying again until it is back",
        f"the broker is back after {broker.now:.1f} s",
    ]
    broker.answer(make_reply("a"))
    for call in (lambda: client.wait("a"), lambda: client.cancel("a"), lambda: list(client.read("a"))):
        broker.away_until = broker.now + 3.0
        call()
        assert broker.now >= broker.away_until


def test_an_outage_is_waited_for_no_longer_than_the_timeout(client: Client, broker: FakeBroker) -> None:
    client.submit("Hi", id="a")
    broker.away_until = 100.0
    with pytest.raises(BrokerUnreachableError):
        client.wait("a", timeout=5.0)
    assert 3.0 < broker.now < 5.0


def test_a_reply_that_is_gone_is_not_waited_for(client: Client, broker: FakeBroker) -> None:
    client.submit("Hi", id="a")
    broker.answer(make_reply("a"))
    del broker.replies["a"]
    for wait in (lambda: client.wait("a"), lambda: list(client.read("a"))):
        with pytest.raises(ReplyGoneError, match=r"request `a` ended \(stop\), but its reply was taken"):
            wait()


def test_cancel_tells_what_it_did(client: Client, broker: FakeBroker) -> None:
    client.submit("Hi", id="a")
    assert (client.cancel("a"), client.cancel("b")) == ("cancelled", "remembered")


def test_a_stream_left_early_cancels_if_asked(client: Client, broker: FakeBroker) -> None:
    broker.entries["a"] = broker.entries["b"] = [entry(1, "One"), entry(2, ", two")]
    for request_id, asked in (("a", True), ("b", False)):
        for _ in client.stream("Hi", id=request_id, cancel_on_close=asked):
            break
    with client.stream("Hi", id="c", cancel_on_close=True):
        pass
    assert broker.cancelled == ["a", "c"]


def test_a_stream_out_of_time_says_whether_its_request_goes_on(client: Client, broker: FakeBroker) -> None:
    with pytest.raises(NoReplyError, match="did not finish in time; it is cancelled"):
        list(client.stream("Hi", id="a", timeout=3, cancel_on_close=True))
    assert broker.cancelled == ["a"]


def test_a_stream_read_to_its_end_cancels_nothing(client: Client, broker: FakeBroker) -> None:
    broker.entries["a"] = [entry(1, "One"), entry(2, "", "stop")]
    with client.stream("Hi", id="a", cancel_on_close=True) as stream:
        broker.answer(make_reply("a", "One"))
        assert list(stream) == ["One"]
    assert broker.cancelled == []


def test_closing_a_stream_waits_for_no_broker(client: Client, broker: FakeBroker) -> None:
    with client.stream("Hi", cancel_on_close=True):
        broker.away_until = 100.0
    assert broker.now == 0


def test_map_answers_in_order_and_refuses_in_place(client: Client, broker: FakeBroker) -> None:
    for name in ("a", "b", "d"):
        broker.answer(make_reply(name, f"text of {name}"))
    broker.states.clear()
    items: list[dict[str, object]] = [
        {"prompt": "Hi", "id": "a"},
        {"prompt": "", "id": "c"},
        {"prompt": "Ho", "id": "b"},
    ]
    replies = list(client.map([*items, {"prompt": [1, 2], "id": "d"}], max_tokens=5))
    assert [reply.id for reply in replies] == ["a", "c", "b", "d"]
    assert [reply.text for reply in replies] == ["text of a", "", "text of b", "text of d"]
    assert replies[1].error is not None
    assert replies[1].error.message == "the prompt is empty"
    assert {request.max_tokens for request in broker.requests()} == {5}


def test_map_gives_plain_prompts_an_id_and_keeps_to_its_window(client: Client, broker: FakeBroker) -> None:
    waits: list[int] = []

    def answer(request_id: str, timeout_s: float) -> bytes | None:
        waits.append(len(broker.requests()) - len(broker.replies))
        broker.answer(make_reply(request_id))
        return broker.replies[request_id]

    broker.wait_reply = answer  # type: ignore[method-assign]
    replies = list(client.map(["one", [1, 2], "three", "four", "five"], window=2))
    assert [reply.id for reply in replies] == [request.id for request in broker.requests()]
    assert waits == [2, 2, 2, 2, 1]


def test_map_left_early_cancels_what_is_outstanding(client: Client, broker: FakeBroker) -> None:
    replies = client.map(({"prompt": "Hi", "id": f"r{n}"} for n in range(100)), window=3)
    broker.answer(make_reply("r0"))
    broker.states.clear()
    assert next(replies).id == "r0"
    replies.close()
    assert broker.cancelled == ["r1", "r2"]
