"""The weights of a GGUF file as the kernels take them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.models.fast.layout import GROUP, LANES, LAYER
from tokenmill.worker.models.fast.packing import Arena, Packed, aligned, pack, unsuited_tensor
from tokenmill.worker.models.gguf_file import Float32, GgufFile
from tokenmill.worker.models.llama_weights import LlamaConfig, TensorReader, rope_frequencies


class FastWeights:
    """Packed matrices, norms, and RoPE frequencies; ``head`` is ``embedding`` itself where the file ties them."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        c = config
        self._reader, self._config = TensorReader(file), config
        self._arena = Arena()
        self._kept: list[NDArray[Any]] = []  # what ``layers`` points to
        self.embedding = self._pack(["token_embd"], [c.vocab_size], c.width)
        tied = "output.weight" not in file
        self.head = self.embedding if tied else self._pack(["output"], [c.vocab_size], c.width)
        self.layers = np.zeros(c.n_layers, LAYER)
        for i, layer in enumerate(self.layers):
            self._fill(layer, f"blk.{i}")
        self.output_norm = self._norm("output_norm")
        self.rope_frequencies = rope_frequencies(self._reader, config)
        self._reader.check_all_seen()

    def _fill(self, layer: Any, name: str) -> None:
        c = self._config
        layer["attention_norm"], layer["ffn_norm"] = (self._norm(f"{name}.{x}_norm") for x in ("attn", "ffn"))
        qkv, gate_up = ([f"{name}.attn_{x}" for x in "qkv"], [f"{name}.ffn_gate", f"{name}.ffn_up"])
        layer["qkv"] = self._pack(qkv, [c.q_width, c.kv_width, c.kv_width], c.width).record
        layer["attention_out"] = self._pack([f"{name}.attn_output"], [c.width], c.q_width).record
        layer["gate_up"] = self._pack(gate_up, [c.ffn_width, c.ffn_width], c.width).record
        layer["down"] = self._pack([f"{name}.ffn_down"], [c.width], c.ffn_width).record

    def _pack(self, names: list[str], heights: list[int], width: int) -> Packed:
        files_names = [f"{name}.weight" for name in names]
        self._reader.seen.update(files_names)
        packed = pack(self._reader.file, files_names, heights, width, self._arena)
        self._kept.append(packed.panels)
        return packed

    def _norm(self, name: str) -> int:
        """The address of a vector of floats."""
        values: Float32 = aligned((self._config.width,), np.float32)
        self._reader.read(f"{name}.weight", self._config.width, out=values)
        self._kept.append(values)
        return values.ctypes.data


def unsuited(file: GgufFile, config: LlamaConfig) -> str | None:
    """Why the kernels cannot compute this file, or None where they can."""
    widths = {"width": config.width, "query width": config.q_width, "feed-forward width": config.ffn_width}
    for name, width in widths.items():
        if width % GROUP:
            return f"its {name} of {width} is no multiple of {GROUP}"
    if config.head_dim % LANES:
        return f"its heads of {config.head_dim} dimensions are no multiple of {LANES}"
    if config.n_heads % config.n_kv_heads:
        return f"its {config.n_heads} query heads cannot share {config.n_kv_heads} key/value heads evenly"
    matrices = (name for name in file.tensor_names if not name.endswith("_norm.weight") and name != "rope_freqs.weight")
    return next((reason for name in matrices if (reason := unsuited_tensor(file, name))), None)
