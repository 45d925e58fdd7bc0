"""The client for event loops, on a real broker whose workers are played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import Any

import msgspec
import pytest

from tokenmill.producer.aio import AsyncClient
from tokenmill.producer.client import NoReplyError, ReplyGoneError
from tokenmill.producer.request import IdInUseError, QueueFullError
from tokenmill.shared.broker import Broker, Checkpoint, Claim
from tokenmill.shared.errors import BrokerUnreachableError, UsageError
from tokenmill.shared.protocol import Reply, Usage
from tokenmill.shared.records import Finish

from .driver import LEASE_MS, TTL_MS, Worker, pull_deadline

Play = Callable[[AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture
def play(server_url: str, broker: Broker) -> Callable[[Play], None]:
    """Run a coroutine with a client of the test's queue."""

    async def with_client(scene: Play) -> None:
        async with AsyncClient(server_url, broker.keys.queue) as client, asyncio.timeout(20):
            await scene(client)
            assert len(client._inbox) == 0

    return lambda scene: asyncio.run(with_client(scene))


def answer(worker: Worker, claim: Claim, text: str = "fine") -> None:
    reply = Reply(id=claim.id, finish_reason="stop", text=text, usage=Usage(prompt_tokens=1, output_tokens=1))
    worker.exchange(Finish(claim.id, claim.fence, "stop", msgspec.json.encode(reply), 0, [], ""), slots=0)


def save(worker: Worker, claim: Claim, start: int, *token_ids: int, text: str) -> None:
    worker.exchange(checkpoints=[Checkpoint(claim.id, claim.fence, start, token_ids, text)], slots=0)


async def eventually(look: Callable[[], Any]) -> Any:
    """What ``look`` finds, once it is true."""
    async with asyncio.timeout(10):
        while not (found := look()):
            await asyncio.sleep(0.002)
    return found


@asynccontextmanager
async def begun(waiting: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Something that goes on beside the block."""
    task = asyncio.create_task(waiting)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def wait_until_waiting(client: AsyncClient, requests: int = 1) -> None:
    await eventually(lambda: len(client._inbox) == requests)


def test_a_reply_is_announced_and_delivered(play: Any, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.producer.inbox.SWEEP_S", 1000.0)

    async def scene(client: AsyncClient) -> None:
        async with begun(client.generate("Hi", id="a", max_tokens=5)) as task:
            await wait_until_waiting(client)
            claim = worker.claim_one()
            assert msgspec.json.decode(claim.payload) == {"id": "a", "prompt": "Hi", "max_tokens": 5}
            answer(worker, claim, "there")
            assert (await task).text == "there"

    play(scene)


def test_a_bare_push_may_ask_to_be_announced(play: Any, worker: Worker, client: Any) -> None:
    keys = worker.broker.keys
    client.rpush(keys.requests, b'{"id":"a","prompt":"Hi","reply_to":"desk.1"}')
    client.rpush(keys.requests, b'{"id":"b","prompt":"Hi","reply_to":"no name"}')
    for claim in worker.claim():
        answer(worker, claim)
    assert [fields for _, fields in client.xrange(keys.replies("desk.1"))] == [{b"id": b"a"}]
    assert 0 < client.pttl(keys.replies("desk.1")) <= 60_000


Ending = Callable[[Worker, Claim, Any], Any]
ENDINGS: dict[str, Ending] = {
    "cancelled while it waits": lambda worker, _claim, _client: worker.broker.cancel("a"),
    "emptied": lambda worker, _claim, _client: worker.broker.empty(),
    "overdue": lambda worker, _claim, client: (
        pull_deadline(client, worker.broker, "a"),
        worker.broker.reclaim(limit=10, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS),
    ),
    "overdue when claimed": lambda worker, _claim, client: (
        client.hset(worker.broker.keys.request("a"), "due", 1),
        worker.claim(),
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_is_announced(ending: str, worker: Worker, client: Any) -> None:
    worker.broker.enqueue("a", b'{"id":"a","prompt":"Hi"}', reply_to="me", timeout_ms=100_000)
    ENDINGS[ending](worker, None, client)  # type: ignore[arg-type]
    assert [fields for _, fields in client.xrange(worker.broker.keys.replies("me"))] == [{b"id": b"a"}]


@pytest.mark.parametrize("ending", ["cancelled", "given up"])
def test_an_ending_after_a_crash_is_announced(ending: str, worker: Worker, client: Any, lapse: Any) -> None:
    broker = worker.broker
    broker.enqueue("a", b'{"id":"a","prompt":"Hi"}', reply_to="me")
    for _ in range(4 if ending == "given up" else 1):
        worker.claim_one()
        if ending == "cancelled":
            broker.cancel("a")
        broker.reclaim(limit=10, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS)
        lapse("a")
        broker.reclaim(limit=10, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS)
    assert broker.state("a") == ("cancelled" if ending == "cancelled" else "error")
    assert [fields for _, fields in client.xrange(broker.keys.replies("me"))] == [{b"id": b"a"}]


def test_what_was_not_announced_is_found(play: Any, worker: Worker) -> None:
    """Sent by somebody else; a duplicate; a reply that was there before."""
    worker.broker.enqueue("a", b'{"id":"a","prompt":"Hi"}')

    async def scene(client: AsyncClient) -> None:
        async with begun(client.wait("a")) as first, begun(client.generate("Hi", id="a")) as second:
            await wait_until_waiting(client, 2)
            answer(worker, worker.claim_one(), "there")
            assert ((await first).text, (await second).text) == ("there", "there")
        assert (await client.wait("a")).text == "there"

    play(scene)


def test_an_id_or_key_of_another_request_is_refused(play: Any, worker: Worker) -> None:
    async def scene(client: AsyncClient) -> None:
        assert await client.submit("Hi", id="a", idempotency_key="k") == "a"
        assert await client.submit("Hi", id="b", idempotency_key="k") == "a"
        for fields in ({"id": "a"}, {"id": "c", "idempotency_key": "k"}):
            with pytest.raises(IdInUseError):
                await client.submit("Ho", **fields)
        with pytest.raises(UsageError, match="unknown field `colour`"):
            await client.submit("Hi", colour="red")

    play(scene)


def test_a_full_queue_is_waited_for_or_raised(play: Any, worker: Worker) -> None:
    worker.broker.set_limits(max_depth=1)

    async def scene(client: AsyncClient) -> None:
        await client.submit("Hi", id="a")
        with pytest.raises(QueueFullError):
            await client.submit("Hi", when_full="raise")
        async with begun(client.submit("Hi", id="b")) as task:
            worker.claim()
            assert await task == "b"

    play(scene)


def test_a_wait_ends_in_time(play: Any) -> None:
    async def scene(client: AsyncClient) -> None:
        with pytest.raises(NoReplyError, match="no reply to request `a` in time; it stays on the queue"):
            await client.wait("a", 0.02)
        with pytest.raises(NoReplyError, match="did not finish in time; it stays"):
            async for _ in client.read("a", timeout=0.02):
                pass

    play(scene)


def test_a_reply_that_is_gone_is_not_waited_for(play: Any, worker: Worker, client: Any) -> None:
    worker.broker.enqueue("a", b'{"id":"a","prompt":"Hi"}')
    answer(worker, worker.claim_one())
    client.delete(worker.broker.keys.reply("a"))

    async def scene(client: AsyncClient) -> None:
        with pytest.raises(ReplyGoneError, match=r"request `a` ended \(stop\)"):
            await client.wait("a")
        with pytest.raises(ReplyGoneError):
            async for _ in client.read("a"):
                pass

    play(scene)


def test_a_stream_gives_every_piece_once_and_then_the_reply(play: Any, worker: Worker) -> None:
    async def scene(client: AsyncClient) -> None:
        stream = await client.stream("Hi", id="a")
        claim = worker.claim_one()
        save(worker, claim, 0, 1, text="One")
        assert await anext(stream) == "One"
        async with begun(anext(stream)) as task:  # type: ignore[arg-type]
            await eventually(lambda: client._inbox._deaf)
            save(worker, claim, 1, 2, text=", two")
            assert await task == ", two"
        with pytest.raises(RuntimeError):
            _ = stream.reply
        save(worker, claim, 2, 3, text="")
        answer(worker, claim, "One, two")
        assert [piece async for piece in stream] == []
        assert stream.reply.text == "One, two"
        assert [piece async for piece in client.read("a")] == ["One", ", two"]

    play(scene)


def test_a_stream_that_begins_later_wakes_the_read_that_it_shares(play: Any, worker: Worker) -> None:
    async def scene(client: AsyncClient) -> None:
        async with begun(client.wait("another")):
            await eventually(lambda: client._inbox._deaf)
            loop = asyncio.get_running_loop()
            stream = await client.stream("Hi", id="a")
            claim = worker.claim_one()
            async with begun(anext(stream)) as task:  # type: ignore[arg-type]
                await eventually(lambda: "a" in client._inbox._waiters and client._inbox._deaf)
                began = loop.time()
                save(worker, claim, 0, 1, text="One")
                assert await task == "One"
            assert loop.time() - began < 1.5  # a block lasts 2 s
            await stream.aclose()

    play(scene)


def test_streams_share_their_read_and_go_on_where_another_stopped(play: Any, worker: Worker) -> None:
    names = [f"s{i}" for i in range(20)]

    async def scene(client: AsyncClient) -> None:
        streams = [await client.stream("Hi", id=name) for name in names]
        texts = [asyncio.create_task(collect(stream)) for stream in streams]
        worker.slots = len(names)
        claims = worker.claim()
        for i, letter in enumerate("abc"):
            for claim in claims:
                save(worker, claim, i, i, text=letter)
        for claim in claims:
            answer(worker, claim, "abc")
        assert await asyncio.gather(*texts) == ["abc"] * len(names)
        again = client.read("s0")
        assert await anext(again) == "a"
        await again.aclose()
        assert await collect(client.read("s0", after=again.position)) == "bc"

    play(scene)


async def collect(stream: Any) -> str:
    return "".join([piece async for piece in stream])


def test_a_stream_that_failed_at_once_ends_with_its_reply(play: Any, worker: Worker) -> None:
    async def scene(client: AsyncClient) -> None:
        stream = await client.stream("Hi", id="a")
        worker.broker.cancel("a")
        assert await collect(stream) == ""
        assert stream.reply.finish_reason == "cancelled"

    play(scene)


def test_a_stream_left_early_cancels_if_asked(play: Any, worker: Worker) -> None:
    async def scene(client: AsyncClient) -> None:
        for name, asked in (("a", True), ("b", False)):
            async with await client.stream("Hi", id=name, cancel_on_close=asked):
                pass
        assert (worker.broker.state("a"), worker.broker.state("b")) == ("cancelled", "waiting")
        assert await client.cancel("b") == "cancelled"
        with pytest.raises(NoReplyError, match="it is cancelled"):
            await collect(await client.stream("Hi", id="c", timeout=0.02, cancel_on_close=True))
        assert worker.broker.state("c") == "cancelled"

    play(scene)


async def serve(worker: Worker, served: Callable[[], bool]) -> int:
    """Answer everything with its prompt; returns how many waited at most."""
    most = 0
    while not served():
        claims = worker.claim()
        most = max(most, len(claims))
        for claim in claims:
            answer(worker, claim, msgspec.json.decode(claim.payload)["prompt"])
        await asyncio.sleep(0.001)
    return most


def test_map_answers_in_order_within_its_window(play: Any, worker: Worker) -> None:
    worker.slots = 1000
    items: list[Any] = [f"prompt {i}" for i in range(300)]
    items[7] = {"prompt": "", "id": "bad"}
    items[8] = {"prompt": "mine", "id": "own"}

    async def scene(client: AsyncClient) -> None:
        numbers = count()
        async with begun(serve(worker, lambda: False)):
            replies = [reply async for reply in client.map(items, window=50, max_tokens=next(numbers) + 1)]
        assert [reply.text for reply in replies[:7]] == items[:7]
        assert (replies[7].id, replies[7].error and replies[7].error.message) == ("bad", "the prompt is empty")
        assert (replies[8].id, replies[8].text) == ("own", "mine")
        assert [reply.text for reply in replies[9:]] == items[9:]

    play(scene)


def test_map_keeps_no_more_than_its_window_on_the_queue_and_cancels_it_when_closed(play: Any, worker: Worker) -> None:
    async def scene(client: AsyncClient) -> None:
        async with aclosing(client.map((f"prompt {i}" for i in count()), window=5)) as replies:
            async with begun(anext(replies)) as task:  # type: ignore[arg-type]
                await eventually(lambda: worker.broker.info().waiting == 5)
                worker.slots = 1
                answer(worker, worker.claim_one(), "one")
                assert (await task).text == "one"
            await eventually(lambda: worker.broker.info().waiting == 5)
        assert worker.broker.info().waiting == 0
        assert worker.broker.info().stats["finished_cancelled"] == 5

    play(scene)


def test_map_raises_what_is_wrong_with_its_input_after_what_was_before(play: Any, worker: Worker) -> None:
    def prompts() -> Any:
        yield "one"
        raise ValueError("a broken file")

    async def scene(client: AsyncClient) -> None:
        replies = client.map(prompts())
        async with begun(serve(worker, lambda: False)):
            assert (await anext(replies)).text == "one"
            with pytest.raises(ValueError, match="a broken file"):
                await anext(replies)

    play(scene)


def test_what_the_broker_has_forgotten_is_sent_again(
    play: Any, worker: Worker, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.producer.inbox.SWEEP_S", 0.01)

    async def scene(aio: AsyncClient) -> None:
        async with begun(aio.generate("Hi", id="b", idempotency_key="k")) as task:
            await wait_until_waiting(aio)
            client.delete(worker.broker.keys.request("b"), worker.broker.keys.requests, worker.broker.keys.idem("k"))
            claims = await eventually(worker.claim)
            answer(worker, claims[0], "there")
            assert (await task).text == "there"

    play(scene)


def test_a_broker_that_never_answered_fails_at_once() -> None:
    async def scene() -> None:
        async with AsyncClient("redis://127.0.0.1:1/0") as client:
            calls: list[Awaitable[Any]] = [client.submit("Hi"), client.wait("a"), client.cancel("a")]
            for call in calls:
                with pytest.raises(BrokerUnreachableError, match=r"no broker at 127\.0\.0\.1:1"):
                    await call

    asyncio.run(scene())


def test_thousands_wait_over_two_connections(play: Any, worker: Worker, client: Any) -> None:
    worker.slots = 500

    async def scene(aio: AsyncClient) -> None:
        tasks = [asyncio.create_task(aio.generate(f"prompt {i}")) for i in range(2000)]
        await wait_until_waiting(aio, 2000)
        mine = [peer for peer in client.client_list() if peer["db"] == "0"]
        await serve(worker, lambda: all(task.done() for task in tasks))
        assert [task.result().text for task in tasks] == [f"prompt {i}" for i in range(2000)]
        assert len(mine) <= 4  # two of the test's own

    play(scene)
