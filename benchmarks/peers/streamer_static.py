"""service-streamer's way: a Redis list, and a worker that takes what came within 0.1 s, a batch at most."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from contest import Requests, config, contest, worker
from service_streamer import RedisStreamer, RedisWorker
from service_streamer.managed_model import ManagedModel
from static_batch import StaticModel

MAX_LATENCY_S = 0.1  # its default
REPLY_S = 600


class Managed(ManagedModel):  # type: ignore[misc]  # the package has no types
    def init_model(self, given: dict[str, Any]) -> None:
        self._generate = StaticModel(given)

    def predict(self, batch: list[Sequence[Any]]) -> list[tuple[int, str]]:
        return self._generate([(prompt, n) for prompt, n in batch])


def work(broker: str, given: dict[str, Any]) -> None:
    RedisWorker(Managed, given["slots"], MAX_LATENCY_S, redis_broker=broker, model_init_args=[given]).run_forever()


def main() -> None:
    given = config()
    logging.disable(logging.INFO)
    broker = given["url"].removeprefix("redis://").partition("/")[0]
    streamer = RedisStreamer(redis_broker=broker)

    def serve(requests: Requests) -> Sequence[int]:
        return [made for made, _ in streamer.submit([tuple(request) for request in requests]).result(REPLY_S)]

    with worker(work, broker, given):
        contest(serve, given["warm_up"], given["work"])


if __name__ == "__main__":
    main()
