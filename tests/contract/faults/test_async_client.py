"""The client for event loops loses nothing to a broker that goes away, or to answers that do not arrive."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tokenmill.producer.aio import AsyncClient
from tokenmill.shared.broker import Broker, Checkpoint, Claim, Finish
from tokenmill.shared.errors import BrokerUnreachableError
from tokenmill.shared.protocol import Reply, Usage

from ...chaos.proxy import Fault, Proxy
from ..broker.driver import Worker


def end(worker: Worker, claim: Claim, text: str) -> None:
    reply = Reply(id=claim.id, finish_reason="stop", text=text, usage=Usage(prompt_tokens=1, output_tokens=1))
    worker.exchange(Finish(claim.id, claim.fence, "stop", msgspec.json.encode(reply), 0, [], ""), slots=0)


@pytest.mark.parametrize("fault", ["cut", "part", "swallow"])
def test_a_request_whose_answer_is_lost_is_submitted_once(fault: Fault, proxy: Proxy, broker: Broker) -> None:
    async def scene() -> None:
        async with AsyncClient(proxy.url, broker.keys.queue) as client, asyncio.timeout(20):
            await client.submit("Hi", id="first")
            proxy.strike(fault, 1.0)
            assert await client.submit("Hi", id="a") == "a"

    asyncio.run(scene())
    assert broker.info().waiting == 2


def test_waits_and_streams_outlast_an_outage(
    proxy: Proxy, broker: Broker, fault_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(broker)

    async def scene() -> None:
        async with AsyncClient(proxy.url, broker.keys.queue) as client, asyncio.timeout(20):
            stream = await client.stream("Hi", id="a")
            waits = [asyncio.create_task(client.generate("Hi", id=name)) for name in ("b", "c")]
            claim = worker.claim_one()
            worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 0, [1], "One")], slots=0)
            assert await anext(stream) == "One"
            while len(client._inbox) < 3:
                await asyncio.sleep(0.002)
            proxy.move(1)  # where nobody listens
            worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 1, [2], ", two")], slots=0)
            for ended in (claim, *worker.claim()):
                end(worker, ended, f"text of {ended.id}")
            with pytest.raises(BrokerUnreachableError):
                await client.submit("Hi", id="d", timeout=0.1)
            proxy.move(int(fault_url.rpartition(":")[2].partition("/")[0]))
            assert [piece async for piece in stream] == [", two"]
            assert [reply.text for reply in await asyncio.gather(*waits)] == ["text of b", "text of c"]
            assert stream.reply.text == "text of a"

    with caplog.at_level("WARNING", logger="tokenmill"):
        asyncio.run(scene())
    told = [message.partition("; ")[2] or message[:18] for message in caplog.messages]
    assert told == ["trying again until it is back", "the broker is back"]


def test_an_event_loop_goes_on_while_the_broker_is_slow(proxy: Proxy, broker: Broker) -> None:
    async def scene() -> Any:
        async with AsyncClient(proxy.url, broker.keys.queue) as client, asyncio.timeout(20):
            await client.submit("Hi", id="first")
            broker._redis.execute_command("CLIENT", "PAUSE", 500, "ALL")  # type: ignore[no-untyped-call]
            slow = asyncio.create_task(client.submit("Hi", id="a"))
            turns = 0
            while not slow.done():
                turns += 1
                await asyncio.sleep(0)
            return turns, slow.result()

    turns, request_id = asyncio.run(scene())
    assert turns > 10
    assert request_id == "a"
