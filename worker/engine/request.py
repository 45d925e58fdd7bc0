"""Request, Finished and Step: what goes into the batcher and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .params import GenerationParams

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
StopReason = int | list[int] | str | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output token, from the raw logits."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), the most likely first


@dataclass(frozen=True, slots=True)
class Finished:
    """How one request ended."""

    handle: int
    request_id: Any  # the caller's own
    output: list[int]  # without the matched stop, unless include_stop
    n_generated: int  # output tokens, resumed ones and the matched stop included
    finish_reason: FinishReason
    stop_reason: StopReason = None  # token id, stop sequence, the text layer's string; "context": the context is full
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one step did."""

    handles: NDArray[np.int64]  # [n] requests that got an output token
    tokens: NDArray[np.int32]  # [n] these tokens
    logprobs: dict[int, TokenLogprobs]  # by handle, only of requests that asked
    finished: list[Finished]
    n_rows: int  # rows of the model call
    n_tokens: int  # tokens computed in it


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request as the batcher keeps it; the handle is the batcher's own, request ids may repeat."""

    handle: int
    request_id: Any  # the caller's own
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]  # tokens generated before, when the request is resumed
    params: GenerationParams
    seed: int  # 0 ≤ seed < 2⁶⁴
    callback: Callable[[Finished], object] | None

    @property
    def n_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt) + len(self.output)
