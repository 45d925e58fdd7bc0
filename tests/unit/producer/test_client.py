"""The client: submit, wait and stream, with clear errors for what cannot be."""

from __future__ import annotations

import pytest

from tokenmill.producer.client import Client, NoReplyError
from tokenmill.producer.request import IdInUseError
from tokenmill.shared.broker import TokenEntry
from tokenmill.shared.errors import UsageError

from .fakes import FakeBroker, make_reply


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def client(broker: FakeBroker) -> Client:
    return Client(broker.as_broker(), clock=broker.clock)


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
    with pytest.raises(NoReplyError, match=r"no reply to request `a` within 2\.5 s; it stays on the queue"):
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
