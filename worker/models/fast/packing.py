"""Matrices of a GGUF file, packed for the kernels without changing a code."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.models.fast.layout import GROUP, MATRIX, PANEL, group_bytes, padded
from tokenmill.worker.models.gguf_file import GgufFile

# The file's blocks of 32 weights. Nibbles: low ones are weights 0 to 15, high ones 16 to 31.
_HALF, _NIBBLES, _FIFTH = ("d", "<f2"), ("codes", np.uint8, 16), ("fifth", "<u4")
_BLOCKS = {
    "Q4_0": np.dtype([_HALF, _NIBBLES]),  # d · (code - 8)
    "Q4_1": np.dtype([_HALF, ("m", "<f2"), _NIBBLES]),  # d · code + m
    "Q5_0": np.dtype([_HALF, _FIFTH, _NIBBLES]),  # d · (code - 16); bit i of ``fifth`` is bit 4 of code i
    "Q5_1": np.dtype([_HALF, ("m", "<f2"), _FIFTH, _NIBBLES]),  # d · code + m
    "Q8_0": np.dtype([_HALF, ("codes", np.int8, 32)]),  # d · code
}


class Packed(NamedTuple):
    """A packed matrix: the record that kernels take, and the bytes that it points to."""

    record: NDArray[Any]  # MATRIX, no dimensions
    panels: NDArray[np.uint8]  # [panels, groups, bytes of a group]


def unsuited_tensor(file: GgufFile, name: str) -> str | None:
    """Why a matrix cannot be packed, or None where it can."""
    kind = file.tensor_type(name)
    return None if kind in _BLOCKS else f"tensor {name} is of type {kind}; the kernels compute {', '.join(_BLOCKS)}"


def pack(file: GgufFile, names: list[str], heights: list[int], width: int, arena: Arena) -> Packed:
    """Pack matrices [height, width] of the file below one another, in memory of the arena.

    They get 4 bits where all have, and 8 otherwise, which holds every type exactly.
    """
    kinds = [file.tensor_type(name) for name in names]
    bits = 4 if all(kind in ("Q4_0", "Q4_1") for kind in kinds) else 8
    n_groups, n_outputs = width // GROUP, sum(heights)
    n_panels = padded(n_outputs, PANEL) // PANEL
    words = np.zeros((n_panels * PANEL, n_groups, bits), np.uint32)
    halves = np.zeros((2, n_panels * PANEL, n_groups), np.float16)
    first = 0
    for name, kind, height in zip(names, kinds, heights, strict=True):
        part = slice(first, first + height)
        blocks = file.blocks(name, (height, width)).view(_BLOCKS[kind]).reshape(height, n_groups)
        words[part] = (_nibbles(blocks) if bits == 4 else _bytes(kind, blocks)).view(np.uint32)
        halves[0, part], halves[1, part] = blocks["d"], _offsets(kind, blocks, bits)
        first += height
    return pack_arrays(words, halves, bits, arena)


def pack_arrays(words: NDArray[np.uint32], halves: NDArray[np.float16], bits: int, arena: Arena) -> Packed:
    """Pack codes, [48 · panels, groups, bits] words, and scales and offsets, [2, 48 · panels, groups]."""
    n_outputs, n_groups, _ = words.shape
    n_panels = n_outputs // PANEL
    panels = arena.zeros((n_panels, n_groups, group_bytes(bits)))
    n_codes = PANEL * GROUP * bits // 8
    lines = panels[:, :, :n_codes].view(np.uint32).reshape(n_panels, n_groups, bits, PANEL)
    lines[...] = words.reshape(n_panels, PANEL, n_groups, bits).transpose(0, 2, 3, 1)
    half_lines = panels[:, :, n_codes:].view(np.float16).reshape(n_panels, n_groups, 2, PANEL)
    half_lines[...] = halves.reshape(2, n_panels, PANEL, n_groups).transpose(1, 3, 0, 2)
    record = np.array((panels.ctypes.data, n_groups * GROUP, n_panels, bits), MATRIX)
    return Packed(record, panels)


def _nibbles(blocks: NDArray[Any]) -> NDArray[np.uint8]:
    """Byte i of a block holds codes i and 16 + i, which is how the kernels want them, four to a word."""
    return np.ascontiguousarray(blocks["codes"])


def _bytes(kind: str, blocks: NDArray[Any]) -> NDArray[np.int8]:
    """Codes as int8, [outputs, groups, 32]."""
    codes = np.ascontiguousarray(blocks["codes"])
    if kind == "Q8_0":
        return codes
    unsigned = np.concatenate([codes & 15, codes >> 4], axis=-1)
    if kind in ("Q5_0", "Q5_1"):
        fifth = blocks["fifth"][..., None] >> np.arange(GROUP, dtype=np.uint32) & 1
        unsigned |= (fifth << 4).astype(np.uint8)
    return (unsigned.astype(np.int8) - np.int8(_ZERO.get(kind, 0))).astype(np.int8)


_ZERO = {"Q4_0": 8, "Q5_0": 16}  # the code that stands for 0


def _offsets(kind: str, blocks: NDArray[Any], bits: int) -> NDArray[np.float16] | np.float16:
    """What is added to every weight of a block, [outputs, groups]; float16 holds a scale times 8 exactly."""
    if kind in ("Q4_1", "Q5_1"):
        offsets: NDArray[np.float16] = blocks["m"]
        return offsets
    return blocks["d"] * np.float16(-8) if kind == "Q4_0" and bits == 4 else np.float16(0)


def unpacked(matrix: Packed) -> NDArray[np.float32]:
    """All weights of a packed matrix, [48 · panels, n_in]: what kernels are tested against."""
    panels, bits = matrix.panels, int(matrix.record["bits"])
    n_panels, n_groups, _ = panels.shape
    n_codes = PANEL * GROUP * bits // 8
    lines = panels[:, :, :n_codes].reshape(n_panels, n_groups, bits, PANEL, 4)
    by_output = lines.transpose(0, 3, 1, 2, 4).reshape(n_panels * PANEL, n_groups, 4 * bits)
    codes = np.concatenate([by_output & 15, by_output >> 4], -1) if bits == 4 else by_output.view(np.int8)
    halves = panels[:, :, n_codes:].copy().view(np.float16).reshape(n_panels, n_groups, 2, PANEL).astype(np.float32)
    d, m = halves.transpose(2, 0, 3, 1).reshape(2, n_panels * PANEL, n_groups, 1)
    return (d * codes + m).reshape(n_panels * PANEL, n_groups * GROUP)


class Arena:
    """Memory for packed matrices, which are never freed one by one, in a few large arrays.

    NumPy asks for huge pages for those. Reading through a matrix once a step, as a single request does, is 1.3 times
    faster with them than with small pages, where every 4 KB cost a look into the tables.
    """

    def __init__(self) -> None:
        self._left: NDArray[np.uint8] = np.empty(0, np.uint8)

    def zeros(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Zeros that begin with a cache line."""
        n_bytes = int(np.prod(shape))
        if n_bytes > len(self._left):
            self._left = aligned((max(n_bytes, _ARENA_BYTES),), np.uint8)
        array, self._left = self._left[:n_bytes], self._left[padded(n_bytes, 64) :]
        return array.reshape(shape)


_ARENA_BYTES = 64 << 20


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that begin with a cache line."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array: NDArray[Any] = memory[start : start + n_bytes].view(dtype).reshape(shape)
    return array
