"""What the engine costs, with a model that costs nothing.

Prints microseconds of engine time per step and per token, the wall time of 100,000 requests, and the number of steps
against the list-scheduling bound. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine import Batch, ContinuousBatcher, Request

MEAN_OUTPUT = 32
PROMPT = [1, 2, 3, 4]
N_REQUESTS, CAPACITY, TARGET_S = 100_000, 1024, 10.0
N_SCHEDULED, TARGET_RATIO = 1_000, 1.01


class InstantModel:
    """Answers a function of the last token; the time spent in it is kept apart."""

    vocab_size: int | None = 50_000
    eos_token_ids: tuple[int, ...] = (0,)
    max_context: int | None = None
    gives_logits = False

    def __init__(self) -> None:
        self.seconds = 0.0

    def forward(self, batch: Batch) -> NDArray[Any]:
        start = time.perf_counter()
        last = batch.tokens[batch.lengths.cumsum() - 1][batch.complete]
        answer: NDArray[Any] = last * 31 % 49_999 + 1
        self.seconds += time.perf_counter() - start
        return answer

    def truncate(self, slot: int, length: int) -> None:
        """There is nothing to forget."""


def output_lengths(n: int) -> list[int]:
    lengths: list[int] = np.ceil(np.random.default_rng(7).exponential(MEAN_OUTPUT, n)).astype(int).tolist()
    return [max(1, length) for length in lengths]


def fill(
    capacity: int, lengths: list[int], key: Callable[[Request], float] | None = None
) -> tuple[ContinuousBatcher, InstantModel]:
    model = InstantModel()
    batcher = ContinuousBatcher(model, capacity, admission_key=key)
    for length in lengths:
        batcher.submit(PROMPT, max_tokens=length)
    return batcher, model


def count_steps(batcher: ContinuousBatcher) -> int:
    steps = 0
    while not batcher.idle:
        batcher.step()
        steps += 1
    return steps


def bench_step(capacity: int) -> None:
    """Engine time of whole runs: admission, batch, stops and retirement; neither submit nor the model."""
    lengths = output_lengths(max(2_000, 20 * capacity))
    batcher, model = fill(capacity, lengths)
    start = time.perf_counter()
    steps = count_steps(batcher)
    seconds = time.perf_counter() - start - model.seconds
    print(
        f"engine time, B = {capacity:4}: {seconds / steps * 1e6:7.1f} µs per step,"
        f" {seconds / sum(lengths) * 1e6:6.3f} µs per token"
    )


def bench_requests() -> bool:
    lengths = output_lengths(N_REQUESTS)
    start = time.perf_counter()
    batcher, _ = fill(CAPACITY, lengths)
    finished = batcher.run()
    seconds = time.perf_counter() - start
    assert len(finished) == N_REQUESTS
    passed = seconds <= TARGET_S
    print(
        f"{N_REQUESTS:,} requests, {sum(lengths):,} tokens, B = {CAPACITY}: {seconds:.2f} s"
        f" (target ≤ {TARGET_S:.0f} s: {verdict(passed)})"
    )
    return passed


def bench_schedule(capacity: int) -> bool:
    lengths = output_lengths(N_SCHEDULED)
    bound = max(math.ceil(sum(lengths) / capacity), max(lengths))
    fifo = count_steps(fill(capacity, lengths)[0])
    longest = count_steps(fill(capacity, lengths, lambda request: -request.params.max_tokens)[0])
    passed = longest / bound <= TARGET_RATIO
    print(
        f"{N_SCHEDULED:,} requests, B = {capacity:2}: bound {bound} steps; FIFO {fifo} ({fifo / bound:.3f});"
        f" longest first {longest} ({longest / bound:.3f}, target ≤ {TARGET_RATIO}: {verdict(passed)})"
    )
    return passed


def verdict(passed: bool) -> str:
    return "met" if passed else "MISSED"


def main() -> int:
    for capacity in (8, 64, 1024):
        bench_step(capacity)
    passed = [bench_requests(), *(bench_schedule(capacity) for capacity in (8, 32, 64))]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
