"""GenerationParams: how one request is generated and when it stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_INT: Final = 2**31 - 1
# What one request may ask of the padded matrices, whose widths all slots share.
MAX_STOP_TOKENS: Final = 256
MAX_STOP_SEQUENCES: Final = 64
MAX_STOP_SEQUENCE_LENGTH: Final = 256
MAX_LOGIT_BIASES: Final = 1024

_NONE: Final = ()
_INTEGERS: Final = (("max_tokens", 1), ("min_tokens", 0), ("top_k", 0))
# Name, neutral value, whether another value holds, and the rule in words.
_NUMBERS: Final[tuple[tuple[str, float, Callable[[float], bool], str], ...]] = (
    ("temperature", 0.0, lambda x: 0 <= x < math.inf, "a number of at least 0"),
    ("top_p", 1.0, lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    ("min_p", 0.0, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    ("repetition_penalty", 1.0, lambda x: 0 < x < math.inf, "a number above 0"),
    ("presence_penalty", 0.0, math.isfinite, "a finite number"),
    ("frequency_penalty", 0.0, math.isfinite, "a finite number"),
)
_NEED_LOGITS: Final[tuple[tuple[str, Any], ...]] = (
    *((name, neutral) for name, neutral, _, _ in _NUMBERS),
    ("top_k", 0),
    ("logit_bias", {}),
    ("logprobs", None),
)


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How one request is generated and when it stops; a value that cannot be served raises ValueError."""

    max_tokens: int = 128  # output tokens, resumed ones and the stop included
    min_tokens: int = 0  # no stop but length before that many output tokens
    stop_token_ids: Sequence[int] = _NONE
    stop_sequences: Sequence[Sequence[int]] = _NONE
    ignore_eos: bool = False
    include_stop: bool = False  # leave the matched stop in the output
    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # 0: all; tokens as likely as the k-th are kept
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; n: of the token and of the n most likely ones
    seed: int | None = None  # None: the batcher draws one

    def __post_init__(self) -> None:
        for name, least in _INTEGERS:
            _check_integer(name, getattr(self, name), least)
        for name, neutral, holds, rule in _NUMBERS:
            value = getattr(self, name)
            if value != neutral and not (isinstance(value, int | float) and holds(value)):
                raise ValueError(f"{name} must be {rule}, not {value!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0)
        if self.seed is not None and not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, not {self.seed!r}")
        if self.stop_token_ids is not _NONE or self.stop_sequences is not _NONE or self.logit_bias:
            self._own_collections()

    def _own_collections(self) -> None:
        """Replace the caller's collections by copies, which nobody can change under a running request."""
        try:
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
            object.__setattr__(self, "stop_sequences", tuple(tuple(sequence) for sequence in self.stop_sequences))
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        except (TypeError, ValueError):
            raise ValueError(
                "stop_token_ids must be a list of token ids, stop_sequences a list of such lists, "
                "logit_bias a mapping of token ids to numbers"
            ) from None
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        _check_count("stop_sequences", self.stop_sequences, MAX_STOP_SEQUENCES)
        _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIASES)
        for sequence in self.stop_sequences:
            if not sequence:
                raise ValueError("a stop sequence must not be empty")
            _check_count("a stop sequence", sequence, MAX_STOP_SEQUENCE_LENGTH)
        for token, bias in self.logit_bias.items():
            if not (isinstance(bias, int | float) and math.isfinite(bias)):
                raise ValueError(f"logit_bias of token {token} must be a finite number, not {bias!r}")

    def check_model(self, vocab_size: int | None, gives_logits: bool) -> None:
        """Raise ValueError when the model has not these token ids or gives no logits for these parameters."""
        if self.stop_token_ids:
            token_array("stop_token_ids", self.stop_token_ids, vocab_size)
        for sequence in self.stop_sequences:
            token_array("stop_sequences", sequence, vocab_size)
        if self.logit_bias:
            token_array("logit_bias", list(self.logit_bias), vocab_size)
        if not gives_logits:
            for name, neutral in _NEED_LOGITS:
                if getattr(self, name) != neutral:
                    raise ValueError(f"{name} needs logits, and this model gives only tokens")


def token_array(name: str, tokens: Any, vocab_size: int | None) -> NDArray[np.int32]:
    """Token ids as ``int32[n]``; ValueError names what is not an id of the vocabulary."""
    if not len(tokens):
        return np.empty(0, np.int32)
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError):
        array = np.empty(0)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a flat list of integer token ids")
    limit = MAX_INT if vocab_size is None else vocab_size
    if np.maximum.reduce(array.astype(np.uint64)) >= limit:  # unsigned, a negative id is above the limit too
        wrong = next(token for token in array.tolist() if not 0 <= token < limit)
        raise ValueError(f"{name}: {wrong} is not a token id of this model (0 to {limit - 1})")
    return array.astype(np.int32)


def _check_integer(name: str, value: Any, least: int) -> None:
    if type(value) is not int or not least <= value <= MAX_INT:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


def _check_count(name: str, values: Any, most: int) -> None:
    if len(values) > most:
        raise ValueError(f"{name} must have at most {most} entries, not {len(values)}")
