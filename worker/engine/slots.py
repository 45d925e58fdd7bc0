"""SlotTable: the state of all slots as NumPy arrays, and the stop checks over them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .params import GenerationParams
from .request import Request

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

NO_TOKEN: Final = -1
_FIRST_WIDTH: Final = 64

# Every per-slot array and the value that a free slot has in it.
COLUMNS: Final[dict[str, tuple[Any, Any]]] = {
    "handle": (np.int64, -1),
    "serial": (np.int64, -1),
    "context": (np.int64, -1),
    "prompt_length": (np.int64, 0),
    "length": (np.int64, 0),
    "computed": (np.int64, 0),
    "max_tokens": (np.int64, 0),
    "min_tokens": (np.int64, 0),
    "ignore_eos": (np.bool_, False),
    "has_stop_tokens": (np.bool_, False),
    "has_stop_sequences": (np.bool_, False),
    "edits_logits": (np.bool_, False),
    "temperature": (np.float64, 0.0),
    "top_k": (np.int64, 0),
    "top_p": (np.float64, 1.0),
    "min_p": (np.float64, 0.0),
    "repetition_penalty": (np.float64, 1.0),
    "presence_penalty": (np.float64, 0.0),
    "frequency_penalty": (np.float64, 0.0),
    "seed": (np.uint64, 0),
    "n_logprobs": (np.int64, -1),
}
# Padded matrices: they widen when a request needs it, and are as wide for all slots.
MATRICES: Final[dict[str, tuple[Any, Any, tuple[int, ...]]]] = {
    "tokens": (np.int32, NO_TOKEN, (_FIRST_WIDTH,)),
    "stop_tokens": (np.int32, NO_TOKEN, (1,)),
    "stop_sequences": (np.int32, NO_TOKEN, (1, 1)),
    "bias_tokens": (np.int32, NO_TOKEN, (1,)),
    "bias_values": (np.float64, 0.0, (1,)),
}


class Stop(IntEnum):
    """Why a row stops after its last token."""

    NONE = 0
    EOS = 1
    TOKEN = 2
    SEQUENCE = 3
    MAX_TOKENS = 4
    CONTEXT = 5


class SlotTable:
    """The state of ``capacity`` slots; ``admit`` writes every field of a slot, ``retire`` clears every field."""

    handle: Int64  # [B] the batcher's own request number; -1: free
    serial: Int64  # [B] grows with every admission
    context: Int64  # [B] number of the context in which the model computes the slot
    prompt_length: Int64  # [B]
    length: Int64  # [B] prompt and output tokens
    computed: Int64  # [B] tokens the model has for the slot
    max_tokens: Int64  # [B]
    min_tokens: Int64  # [B]
    ignore_eos: Bool  # [B]
    has_stop_tokens: Bool  # [B]
    has_stop_sequences: Bool  # [B]
    edits_logits: Bool  # [B] bias, a penalty or min_tokens changes the logits
    temperature: Float64  # [B]
    top_k: Int64  # [B]
    top_p: Float64  # [B]
    min_p: Float64  # [B]
    repetition_penalty: Float64  # [B]
    presence_penalty: Float64  # [B]
    frequency_penalty: Float64  # [B]
    seed: NDArray[np.uint64]  # [B]
    n_logprobs: Int64  # [B] -1: not asked for
    tokens: Int32  # [B, C] prompt and output tokens
    stop_tokens: Int32  # [B, S]
    stop_sequences: Int32  # [B, S, L] aligned to the right
    bias_tokens: Int32  # [B, K]
    bias_values: Float64  # [B, K]

    def __init__(self, capacity: int, eos_token_ids: tuple[int, ...] = (), max_context: int | None = None) -> None:
        self.eos_token_ids = np.array(eos_token_ids, np.int32)
        self.max_context = max_context
        for name, (dtype, empty) in COLUMNS.items():
            setattr(self, name, np.full(capacity, empty, dtype))
        for name, (dtype, empty, widths) in MATRICES.items():
            setattr(self, name, np.full((capacity, *widths), empty, dtype))

    def free(self) -> Int64:
        """Slots without a request."""
        return np.flatnonzero(self.handle < 0)

    def active(self) -> Int64:
        """Slots with a request."""
        return np.flatnonzero(self.handle >= 0)

    def slot_of(self, handle: int) -> int:
        """The slot of a running request."""
        return int(np.flatnonzero(self.handle == handle)[0])

    def n_output(self, slots: Int64) -> Int64:
        """Output tokens so far ``[k]``."""
        return self.length[slots] - self.prompt_length[slots]

    def output(self, slot: int) -> list[int]:
        """All output tokens of a slot."""
        tokens: list[int] = self.tokens[slot, self.prompt_length[slot] : self.length[slot]].tolist()
        return tokens

    def admit(self, slot: int, request: Request, serial: int, context: int) -> None:
        """Give a free slot and an empty context to a request; nothing of it is computed yet."""
        params = request.params
        n_prompt, n_output = len(request.prompt), len(request.output)
        self._reserve(n_prompt + n_output + 1)
        self.tokens[slot, :n_prompt] = request.prompt
        self.tokens[slot, n_prompt : n_prompt + n_output] = request.output
        self.handle[slot] = request.handle
        self.serial[slot] = serial
        self.context[slot] = context
        self.prompt_length[slot] = n_prompt
        self.length[slot] = n_prompt + n_output
        self.computed[slot] = 0
        self.max_tokens[slot] = params.max_tokens
        self.min_tokens[slot] = params.min_tokens
        self.ignore_eos[slot] = params.ignore_eos
        self._admit_stops(slot, params)
        self._admit_sampling(slot, params, request.seed)

    def _admit_stops(self, slot: int, params: GenerationParams) -> None:
        self.has_stop_tokens[slot] = bool(params.stop_token_ids)
        if params.stop_token_ids:
            self._widen("stop_tokens", len(params.stop_token_ids))
            self.stop_tokens[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self.has_stop_sequences[slot] = bool(params.stop_sequences)
        if params.stop_sequences:
            self._widen("stop_sequences", len(params.stop_sequences), max(map(len, params.stop_sequences)))
            for i, sequence in enumerate(params.stop_sequences):
                self.stop_sequences[slot, i, -len(sequence) :] = sequence

    def _admit_sampling(self, slot: int, params: GenerationParams, seed: int) -> None:
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.seed[slot] = seed
        self.n_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self.edits_logits[slot] = penalties or bool(params.logit_bias) or params.min_tokens > 0
        if params.logit_bias:
            self._widen("bias_tokens", len(params.logit_bias))
            self._widen("bias_values", len(params.logit_bias))
            self.bias_tokens[slot, : len(params.logit_bias)] = list(params.logit_bias)
            self.bias_values[slot, : len(params.logit_bias)] = list(params.logit_bias.values())

    def retire(self, slots: Int64) -> None:
        """Free the slots and clear every field of them."""
        for name, (_, empty) in COLUMNS.items():
            getattr(self, name)[slots] = empty
        for name, (_, empty, _) in MATRICES.items():
            getattr(self, name)[slots] = empty

    def append(self, slots: Int64, tokens: Int32) -> None:
        """Add one output token to each of these slots."""
        lengths = self.length[slots]
        self._reserve(int(lengths.max(initial=0)) + 1)
        self.tokens[slots, lengths] = tokens
        self.length[slots] = lengths + 1

    def stops(self, slots: Int64) -> tuple[NDArray[np.int8], Int64]:
        """Which Stop ends each row after its last output token ``[k]``, and the number of its stop sequence ``[k]``."""
        n_output, last = self.n_output(slots), self.tokens[slots, self.length[slots] - 1]
        kinds = np.zeros(len(slots), np.int8)
        # From the weakest reason to the strongest: each overwrites the ones before it.
        if self.max_context is not None:
            kinds[self.length[slots] >= self.max_context] = Stop.CONTEXT
        kinds[n_output >= self.max_tokens[slots]] = Stop.MAX_TOKENS
        may_stop = n_output >= self.min_tokens[slots]
        matched = np.zeros(len(slots), np.int64)
        rows = np.flatnonzero(self.has_stop_sequences[slots] & may_stop)
        if rows.size:
            found, matched[rows] = self._match_sequences(slots[rows])
            kinds[rows[found]] = Stop.SEQUENCE
        rows = np.flatnonzero(self.has_stop_tokens[slots] & may_stop)
        if rows.size:
            hit = (self.stop_tokens[slots[rows]] == last[rows, None]).any(axis=1)
            kinds[rows[hit]] = Stop.TOKEN
        if self.eos_token_ids.size:
            is_eos = (last[:, None] == self.eos_token_ids).any(axis=1)
            kinds[is_eos & may_stop & ~self.ignore_eos[slots]] = Stop.EOS
        return kinds, matched

    def _match_sequences(self, slots: Int64) -> tuple[Bool, Int64]:
        """Whether an output ends with one of its stop sequences ``[k]``, and the first listed that does ``[k]``."""
        sequences = self.stop_sequences[slots]
        used = sequences != NO_TOKEN
        # One request with long sequences widens the matrix for good: compare only what these rows use.
        sequences = sequences[:, : used[:, :, -1].sum(axis=1).max(), -used.sum(axis=2).max() :]
        positions = self.length[slots, None] - np.arange(sequences.shape[2], 0, -1)
        tails = self.tokens[slots[:, None], np.maximum(positions, 0)]
        tails[positions < self.prompt_length[slots, None]] = NO_TOKEN
        ends_with = ((sequences == tails[:, None, :]) | (sequences == NO_TOKEN)).all(axis=2)
        ends_with &= sequences[:, :, -1] != NO_TOKEN
        return ends_with.any(axis=1), ends_with.argmax(axis=1)

    def _reserve(self, width: int) -> None:
        """Make room for ``width`` tokens in every row of tokens."""
        have = self.tokens.shape[1]
        if width > have:
            doubled = 2 * have if self.max_context is None else min(2 * have, self.max_context)
            self._widen("tokens", max(width, doubled))

    def _widen(self, name: str, *widths: int) -> None:
        """Widen a padded matrix to at least ``widths``; stop sequences grow to the left, where they are padded."""
        matrix = getattr(self, name)
        grow = [max(0, width - have) for width, have in zip(widths, matrix.shape[1:], strict=True)]
        if any(grow):
            _, empty, _ = MATRICES[name]
            pads = [(0, 0)] + [(0, n) for n in grow]
            if name == "stop_sequences":
                pads[2] = (grow[1], 0)
            setattr(self, name, np.pad(matrix, pads, constant_values=empty))
