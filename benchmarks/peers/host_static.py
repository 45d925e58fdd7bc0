"""batch-inference's way: threads of one process that wait for a model host, which batches what is there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from batch_inference import ModelHost
from batch_inference.batcher import Batcher
from contest import Requests, config, contest
from static_batch import StaticModel


class Plain(Batcher):  # type: ignore[misc]  # the package has no types
    """A batch is the list of its requests: nothing is padded."""

    def batch(self, requests: list[tuple[Any, ...]]) -> tuple[tuple[Any], None]:
        return (requests,), None

    def unbatch(self, responses: list[Any], context: None) -> list[Any]:
        return responses


class Generator:
    def __init__(self, given: dict[str, Any]) -> None:
        self.predict_batch = StaticModel(given)


def main() -> None:
    given = config()
    slots: int = given["slots"]
    host = ModelHost(model_obj=Generator(given), batcher=Plain(), max_batch_size=slots)

    def serve(requests: Requests) -> Sequence[int]:
        with ThreadPoolExecutor(2 * slots) as callers:
            return [made for made, _ in callers.map(lambda request: host.predict(*request), requests)]

    with host:
        contest(serve, given["warm_up"], given["work"])


if __name__ == "__main__":
    main()
