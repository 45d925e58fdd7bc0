"""Where things lie in memory: packed weights, quantised activations, and the records by which kernels find them.

A weight matrix is cut into panels of 48 outputs. A panel holds, group after group of 32 inputs, what one pass of a
kernel reads, in the order in which it reads it:

    4 bits: 4 x 48 words; word j of an output has inputs 4j … 4j+3 in its low and 16+4j … 19+4j in its high nibbles
    8 bits: 8 x 48 words; word j of an output has inputs 4j … 4j+3 as int8
    then    48 float16 scales d and 48 float16 offsets m:  weight = d · code + m

48, because three vectors of 16 sums for each of four tokens, with the weights beside them, fill the 32 registers of
AVX-512, and because it divides the widths of most models; the last panel of others is filled up with zeros. 32,
because that is the group of the file's formats: the codes are the file's own, and nothing is rounded again.

The activations of one token are a row: int8 codes, then for each group of 32 three words: the scale, the
sum of the codes times the scale (what an offset m is multiplied with), and the sum times -128 (to make up for
unsigned weights).
"""

from __future__ import annotations

import numpy as np

PANEL, GROUP, LANES = 48, 32, 16
PANEL_DM_BYTES = 2 * PANEL * 2
BLOCK_TOKENS = 16
"""Tokens of a block of keys and values: one vector of them."""

MATRIX = np.dtype([("address", np.int64), ("n_in", np.int64), ("n_panels", np.int64), ("bits", np.int64)], align=True)
LAYER = np.dtype(
    [
        ("attention_norm", np.int64),
        ("qkv", MATRIX),
        ("attention_out", MATRIX),
        ("ffn_norm", np.int64),
        ("gate_up", MATRIX),
        ("down", MATRIX),
    ],
    align=True,
)
MODEL = np.dtype(
    [
        *((name, np.int64) for name in ("width", "n_heads", "n_kv_heads", "head_dim", "ffn_width")),
        *((name, np.int64) for name in ("output_norm", "cos", "sin", "pool", "n_blocks")),
        ("embedding", MATRIX),
        ("head", MATRIX),
        ("rms_eps", np.float32),
    ],
    align=True,
)
STEP = np.dtype(
    [
        *((name, np.int64) for name in ("n_tokens", "n_prompt_tokens", "n_chunks", "n_last")),
        # Addresses of int32 arrays. For each token: its id and its position. The tokens of rows that bring several.
        # For each chunk, a few tokens of one row: its first token, its length, and whether it is a row of one token.
        # The tokens that logits are wanted for.
        *((name, np.int64) for name in ("ids", "positions", "prompt_tokens")),
        *((name, np.int64) for name in ("chunk_starts", "chunk_lengths", "chunk_is_row", "last")),
        # Addresses of int64 arrays: for each token and each chunk, the address of its context's block numbers (int32)
        *((name, np.int64) for name in ("token_tables", "chunk_tables")),
        # Rows of tokens, so many bytes apart: the residual stream; what a matrix made of it; the same quantised; logits
        *((name, np.int64) for name in ("hidden", "projected", "activations", "logits")),
        *((name, np.int64) for name in ("hidden_stride", "projected_stride", "activations_stride", "logits_stride")),
        # Room for the scores of one thread's queries
        *((name, np.int64) for name in ("scratch", "scratch_bytes", "score_stride")),
    ],
    align=True,
)


def padded(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def group_bytes(bits: int) -> int:
    """Bytes of one group of a panel."""
    return PANEL * GROUP * bits // 8 + PANEL_DM_BYTES


def activation_bytes(n_in: int) -> int:
    """Bytes of one row of activations."""
    return padded(n_in + 3 * 4 * (n_in // GROUP), 64)
