"""Hundreds of requests that wait at once over two connections, on an event loop: python async_client.py"""

import asyncio
import os

from tokenmill.producer.aio import AsyncClient
from tokenmill.producer.client import NoReplyError


async def tell(client: AsyncClient, number: int) -> str:
    """One of many tasks; each waits for its own reply."""
    reply = await client.generate(f"{number} plus {number} is", max_tokens=4, timeout=60)
    return reply.text


async def main() -> None:
    """Ask many things at once, stream one, and give up on another."""
    async with AsyncClient(os.environ.get("TOKENMILL_REDIS", "redis://127.0.0.1:6379/0")) as client:
        print(await asyncio.gather(*(tell(client, number) for number in range(1, 17))))

        async with await client.stream("The capital of France is", max_tokens=12, timeout=60) as stream:
            async for text in stream:
                print(text, end="", flush=True)
        print(f"\n{stream.reply.finish_reason}")

        request_id = await client.submit("Once upon a time", max_tokens=1000, ignore_eos=True)
        try:
            await client.wait(request_id, timeout=0.2)
        except NoReplyError:
            print(await client.cancel(request_id))
            print((await client.wait(request_id, timeout=60)).finish_reason)


if __name__ == "__main__":
    asyncio.run(main())
