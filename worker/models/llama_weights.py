"""Shape and weights of a llama-family model, read from a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.models.gguf_file import Float32, GgufFile
from tokenmill.worker.models.matrix import Matrix


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a llama-family model."""

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int
    context_length: int  # tokens it was trained on
    rms_eps: float

    @classmethod
    def of(cls, file: GgufFile) -> LlamaConfig:
        """Read the shape from the metadata; architectures other than ``llama`` are refused by name."""
        if (architecture := file.require("general.architecture")) != "llama":
            raise ModelLoadError(f"{file.path} is a model of architecture {architecture!r}; only 'llama' is supported")
        width, n_heads = file.require("llama.embedding_length"), file.require("llama.attention.head_count")
        return cls(
            n_layers=file.require("llama.block_count"),
            width=width,
            n_heads=n_heads,
            n_kv_heads=file.get("llama.attention.head_count_kv", n_heads),
            head_dim=file.get("llama.attention.key_length", width // n_heads),
            ffn_width=file.require("llama.feed_forward_length"),
            vocab_size=len(file.require("tokenizer.ggml.tokens")),
            context_length=file.require("llama.context_length"),
            rms_eps=file.require("llama.attention.layer_norm_rms_epsilon"),
        )

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block; matrices are [out, in] and what is multiplied together lies together.

    What scales the input or output of a product is multiplied into its matrix: the weights of the RMS norm before it,
    and 1/√head_dim into that of the queries.
    """

    qkv: Matrix  # [q_width + 2 kv_width, width]
    attention_out: Matrix  # [width, q_width]
    gate_up: Matrix  # [2 ffn_width, width]
    down: Matrix  # [width, ffn_width]


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights as float32; ``head`` is ``embedding`` itself where the file ties them."""

    embedding: Float32  # [vocab_size, width]
    layers: list[Layer]
    output_norm: Float32  # [width, 1]
    head: Matrix  # [vocab_size, width]
    rope_frequencies: NDArray[np.float64]  # [rotated dims / 2] radians per position

    @classmethod
    def of(cls, file: GgufFile, config: LlamaConfig) -> LlamaWeights:
        """Dequantise every tensor of the file."""
        reader = TensorReader(file)
        embedding = reader.read("token_embd.weight", config.vocab_size, config.width)
        tied = "output.weight" not in file
        weights = cls(
            embedding=embedding,
            layers=[_layer(reader, config, f"blk.{i}") for i in range(config.n_layers)],
            output_norm=reader.column("output_norm.weight", config.width),
            head=Matrix(embedding if tied else reader.read("output.weight", config.vocab_size, config.width)),
            rope_frequencies=rope_frequencies(reader, config),
        )
        reader.check_all_seen()
        return weights


class TensorReader:
    """Reads tensors of a file and remembers which."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.seen: set[str] = set()

    def read(self, name: str, *shape: int, out: Float32 | None = None) -> Float32:
        self.seen.add(name)
        return self.file.tensor(name, shape, out)

    def column(self, name: str, length: int) -> Float32:
        return self.read(name, length)[:, None]

    def stacked(self, names: list[str], heights: list[int], width: int) -> Float32:
        """Several matrices below one another, each written straight to its place."""
        matrix = np.empty((sum(heights), width), np.float32)
        ends = np.cumsum(heights)
        for name, height, end in zip(names, heights, ends, strict=True):
            self.read(name, height, width, out=matrix[end - height : end])
        return matrix

    def check_all_seen(self) -> None:
        """A tensor that a backend would ignore is an error."""
        if left := sorted(set(self.file.tensor_names) - self.seen):
            raise ModelLoadError(f"{self.file.path} is a llama variant with tensors that are not supported: {left[0]}")


def _layer(reader: TensorReader, config: LlamaConfig, name: str) -> Layer:
    width, ffn, q, kv = config.width, config.ffn_width, config.q_width, config.kv_width
    qkv = reader.stacked([f"{name}.attn_{x}.weight" for x in "qkv"], [q, kv, kv], width)
    qkv *= reader.read(f"{name}.attn_norm.weight", width)
    qkv[:q] *= np.float32(config.head_dim**-0.5)
    gate_up = reader.stacked([f"{name}.ffn_gate.weight", f"{name}.ffn_up.weight"], [ffn, ffn], width)
    gate_up *= reader.read(f"{name}.ffn_norm.weight", width)
    return Layer(
        qkv=Matrix(qkv),
        attention_out=Matrix(reader.read(f"{name}.attn_output.weight", width, q)),
        gate_up=Matrix(gate_up),
        down=Matrix(reader.read(f"{name}.ffn_down.weight", width, ffn)),
    )


def rope_frequencies(reader: TensorReader, config: LlamaConfig) -> NDArray[np.float64]:
    """How far each pair of dimensions turns from one position to the next, in radians; [turned dimensions / 2]."""
    file = reader.file
    n_dims = file.get("llama.rope.dimension_count", config.head_dim)
    frequencies: NDArray[np.float64] = file.get("llama.rope.freq_base", 10_000.0) ** -(np.arange(0, n_dims, 2) / n_dims)
    if "rope_freqs.weight" in file:  # Llama 3.1 stretches the slow ones
        frequencies = frequencies / reader.read("rope_freqs.weight", n_dims // 2)
    scaling = file.get("llama.rope.scaling.type", "none")
    if scaling == "linear":
        frequencies = frequencies / file.require("llama.rope.scaling.factor")
    elif scaling != "none":
        raise ModelLoadError(f"{file.path} scales RoPE by {scaling!r}; only 'linear' is supported")
    return frequencies
