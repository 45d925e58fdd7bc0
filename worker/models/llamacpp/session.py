"""What llama.cpp calls a context: its memory for keys and values of many sequences, and the buffers to compute in."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.models.llamacpp.library import complaint, listen, llama
from tokenmill.worker.models.llamacpp.weights import Weights

TOKENS_AT_ONCE = 512  # of one call of llama.cpp; longer steps take several


class Session:
    """Memory of at least ``n_cells`` tokens, which ``n_sequences`` share as they need it.

    A cell is the keys and values of one token; sequences that begin alike share cells. Raises ``ModelLoadError``
    where llama.cpp cannot make one.
    """

    def __init__(self, weights: Weights, *, n_cells: int, n_sequences: int, threads: int) -> None:
        listen()
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_cells, n_sequences
        params.n_batch = params.n_ubatch = TOKENS_AT_ONCE
        params.n_outputs_max = min(n_sequences, TOKENS_AT_ONCE)
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True  # one pool for all sequences, instead of an equal part for each
        params.swa_full = True  # sliding windows keep everything too: else no sequence could go back or be copied
        self._pointer = llama.llama_init_from_model(weights.model, params)
        if not self._pointer:
            raise ModelLoadError(
                f"llama.cpp has no room for {n_cells} tokens of {weights.path}: {complaint()}; "
                "lower --kv-memory-mib, --max-context or --gpu-layers"
            )
        weakref.finalize(self, _free, self._pointer, weights)
        self._memory = llama.llama_get_memory(self._pointer)
        if not self._memory:
            raise ModelLoadError(f"{weights.path} is not a language model: it keeps nothing of the tokens before")
        self._vocab_size = weights.vocab_size
        self.n_cells = int(llama.llama_n_ctx(self._pointer))  # llama.cpp rounds up
        self._sequences = np.arange(n_sequences, dtype=np.int32)
        addresses = self._sequences.ctypes.data + np.arange(n_sequences) * self._sequences.itemsize
        self._addresses = addresses.astype(np.uintp)  # of each sequence's number

    def decode(
        self, tokens: NDArray[Any], positions: NDArray[Any], sequences: NDArray[Any], wanted: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Compute tokens, each at a position of a sequence; logits ``[wanted.sum(), vocab_size]`` of the wanted ones.

        Raises ``RuntimeError`` where llama.cpp fails; some of the tokens may then be in memory.
        """
        logits = np.empty((np.count_nonzero(wanted), self._vocab_size), np.float32)
        done = 0
        for first in range(0, len(tokens), TOKENS_AT_ONCE):
            part = slice(first, first + TOKENS_AT_ONCE)
            n = int(np.count_nonzero(wanted[part]))
            self._decode_part(tokens[part], positions[part], sequences[part], wanted[part], logits[done : done + n])
            done += n
        return logits

    def _decode_part(
        self,
        tokens: NDArray[Any],
        positions: NDArray[Any],
        sequences: NDArray[Any],
        wanted: NDArray[np.bool_],
        logits: NDArray[np.float32],
    ) -> None:
        arrays = {
            "token": np.ascontiguousarray(tokens, np.int32),
            "pos": np.ascontiguousarray(positions, np.int32),
            "n_seq_id": np.ones(len(tokens), np.int32),
            "seq_id": self._addresses[sequences],
            "logits": np.ascontiguousarray(wanted, np.int8),
        }
        batch = llama.llama_batch(n_tokens=len(tokens))
        for name, kind in llama.llama_batch._fields_:
            if name in arrays:
                setattr(batch, name, arrays[name].ctypes.data_as(kind))
        listen()
        if code := llama.llama_decode(self._pointer, batch):
            raise RuntimeError(f"llama.cpp could not compute a step of {len(tokens)} tokens ({code}): {complaint()}")
        if len(logits):
            ctypes.memmove(logits.ctypes.data, llama.llama_get_logits(self._pointer), logits.nbytes)

    def remove(self, sequence: int, start: int) -> bool:
        """Forget the tokens of a sequence from ``start`` on; False where this kind of memory cannot."""
        return bool(llama.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def copy(self, source: int, target: int, length: int) -> None:
        """Let the empty sequence ``target`` begin with the first ``length`` tokens of ``source``, in the same cells."""
        llama.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def size(self, sequence: int) -> int:
        """Bytes that the state of a sequence takes."""
        return int(llama.llama_state_seq_get_size(self._pointer, sequence))


def _free(pointer: int, weights: Weights) -> None:
    """Give a session back; it holds the weights till then, which must outlive it."""
    llama.llama_free(pointer)
