"""A tiny llama of random weights, written as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from tokenmill.worker.models.gguf_file import GgufFile
from tokenmill.worker.models.tokenizer import GgufTokenizer

WIDTH, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 2, 4, 2, 8
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROL = ["<|end|>", "<|user|>", "<|assistant|>"]
VOCABULARY = [*CONTROL, "<tool>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]

WriteGguf = Callable[..., Path]


def metadata() -> dict[str, Any]:
    types = [TokenType.CONTROL] * len(CONTROL) + [TokenType.USER_DEFINED]
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": 4,  # half of each head is not rotated
        "llama.rope.freq_base": 500.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": [*map(int, types)] + [int(TokenType.NORMAL)] * (len(VOCABULARY) - len(types)),
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    block = {
        "attn_norm": (WIDTH,),
        "attn_q": (q, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, q),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
    }
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in block.items()}
    shapes |= {"token_embd.weight": (len(VOCABULARY), WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {"output.weight": (len(VOCABULARY), WIDTH), "rope_freqs.weight": (2,)}
    return {
        name: (rng.standard_normal(shape) * 0.5 + 1 * (len(shape) == 1)).astype("f") for name, shape in shapes.items()
    }


def write(path: Path, changes: dict[str, Any] | None = None, *, architecture: str = "llama") -> Path:
    """Write the tiny model with changes: metadata and tensors by name, as they are or with a type; None removes one."""
    writer = GGUFWriter(path, architecture)
    for key, value in (metadata() | tensors() | (changes or {})).items():
        match value:
            case np.ndarray():
                writer.add_tensor(key, value)
            case (np.ndarray() as array, GGMLQuantizationType() as kind):
                writer.add_tensor(key, quantize(array, kind), raw_dtype=kind)
            case list():
                writer.add_array(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """``write`` to a file of the test's own."""
    return partial(write, tmp_path / "tiny.gguf")


@pytest.fixture(scope="session")
def session_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> GgufTokenizer:
    """The tokenizer of the tiny model."""
    return GgufTokenizer(GgufFile(write(tmp_path_factory.mktemp("tokenizer") / "tiny.gguf")))
