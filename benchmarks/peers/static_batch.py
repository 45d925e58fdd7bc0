"""Tokenmill's model behind other batching policies: what a batch function computes, a whole batch at a time.

A request that ends early leaves the batch here, which costs less than the padded batches that people usually run; but
like them the batch takes nobody in before its last request has ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


class StaticModel:
    """Generates for a batch of ``(prompt, output tokens)`` until the last of them is done."""

    def __init__(self, given: dict[str, Any]) -> None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in our workers; before NumPy is imported
        from tokenmill.worker.engine import ContinuousBatcher
        from tokenmill.worker.models import load_model

        settings = {name: given[name] for name in ("slots", "threads", "backend")}
        loaded = load_model(given["spec"], **settings)
        assert loaded.tokenizer is not None
        self._tokenizer = loaded.tokenizer
        self._batcher = ContinuousBatcher(loaded.model, given["slots"])

    def __call__(self, batch: Sequence[tuple[str, int]]) -> list[tuple[int, str]]:
        """The number of tokens made for each, and their text."""
        handles = [
            self._batcher.submit(self._tokenizer.encode(prompt), max_tokens=n, ignore_eos=True) for prompt, n in batch
        ]
        ended = {finished.handle: finished.output for finished in self._batcher.run()}
        return [(len(ended[handle]), self._text(ended[handle])) for handle in handles]

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")
