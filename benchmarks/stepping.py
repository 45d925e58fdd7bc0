"""A batcher full of decoding rows, and the time of its steps; for functions that run in a process of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from benchmarks.settings import Backend
from benchmarks.workload import prompt
from tokenmill.worker.engine import ContinuousBatcher, StepLimit
from tokenmill.worker.models import LoadedModel


@lru_cache(1)
def loaded(backend: Backend, threads: int, slots: int) -> LoadedModel:
    """The model, loaded once in this process."""
    return backend.load(slots=slots, threads=threads)


def tokens(model: LoadedModel, n: int, *, seed: int) -> list[int]:
    """``n`` tokens of ordinary words."""
    assert model.tokenizer is not None
    return model.tokenizer.encode(prompt(np.random.default_rng(seed), n))[:n]


def decoding(model: LoadedModel, rows: int, n_prompt: int, *, max_step_tokens: StepLimit = None) -> ContinuousBatcher:
    """A batcher with one more slot than the ``rows`` that decode in it, and do not end."""
    batcher = ContinuousBatcher(model.model, rows + 1, max_step_tokens=max_step_tokens)
    for seed in range(rows):
        batcher.submit(tokens(model, n_prompt, seed=seed), max_tokens=2**30, ignore_eos=True)
    while len(batcher.step().handles) < rows:
        pass
    return batcher


def step_ms(batcher: ContinuousBatcher, steps: int) -> list[float]:
    """Milliseconds of each of the next steps: what lies between two tokens of every decoding row."""
    return [timed_step(batcher)[0] for _ in range(steps)]


def timed_step(batcher: ContinuousBatcher) -> tuple[float, Sequence[int]]:
    """Milliseconds of the next step, and the handles of those who got a token."""
    start = time.perf_counter()
    step = batcher.step()
    return (time.perf_counter() - start) * 1000, step.handles.tolist()
