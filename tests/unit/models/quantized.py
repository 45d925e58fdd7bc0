"""A tiny llama in the GGUF's own quantised types, in shapes that the fast backend computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from .conftest import VOCABULARY, write

WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 6, 2, 16


def changes(kinds: dict[str, str] | str = "Q4_1", *, seed: int = 0) -> dict[str, Any]:
    """What makes the tiny model a quantised one: a type for all matrices, or by the end of their names."""
    shapes = {"token_embd": (len(VOCABULARY), WIDTH), "output": (len(VOCABULARY), WIDTH)}
    block = {
        "attn_q": (HEADS * HEAD_DIM, WIDTH),
        "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_output": (WIDTH, HEADS * HEAD_DIM),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
    }
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    rng = np.random.default_rng(seed)
    kind_of = (lambda _: kinds) if isinstance(kinds, str) else (lambda name: kinds.get(name.split(".")[-1], "Q4_1"))
    matrices = {
        f"{name}.weight": (rng.standard_normal(shape).astype("f") * 0.2, GGMLQuantizationType[kind_of(name)])
        for name, shape in shapes.items()
    }
    norms = [f"blk.{i}.{name}_norm.weight" for i in range(2) for name in ("attn", "ffn")] + ["output_norm.weight"]
    return {
        **matrices,
        **{name: 1 + 0.3 * rng.standard_normal(WIDTH).astype("f") for name in norms},
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
    }


def write_quantized(path: Path, kinds: dict[str, str] | str = "Q4_1", more: dict[str, Any] | None = None) -> Path:
    """Write the tiny quantised model."""
    return write(path, changes(kinds) | (more or {}))
