"""A GGUF file: metadata by key and tensors as float32."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.models.digest import file_digest

Float32 = NDArray[np.float32]
T = TypeVar("T")


class _Reader(GGUFReader):
    """The library's reader, which takes arrays apart in one go, and a plain array instead of a memmap.

    Opening is 8 times faster: the library makes six calls of NumPy for each of the 150,000 items of a vocabulary.
    """

    @property  # type: ignore[override]
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, start = GGUFValueType(item_type[0]), orig_offs + 12
        parts: list[Any] = [item_type, count]
        if (scalar := self.gguf_scalar_to_np.get(kind)) is not None:
            parts.append(values := self._get(start, scalar, int(count[0])))
            end = start + values.nbytes
        elif kind == GGUFValueType.STRING:
            end = self._take_strings(start, int(count[0]), parts)
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, parts, list(range(2, len(parts))), [GGUFValueType.ARRAY, kind]

    def _take_strings(self, start: int, count: int, parts: list[Any]) -> int:
        """Append views of strings, each after its length in 8 bytes; returns where they end."""
        view, length_at = self._data.data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            end = start + 8 + length_at(view, start)[0]
            parts.append(view[start + 8 : end])
            start = end
        return start


class GgufFile:
    """An open GGUF file. Raises ``ModelLoadError`` where it is missing, unreadable or lacks what is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelLoadError(f"no such model file: {path}")
        try:
            self._reader = _Reader(path)
        except Exception as error:  # the reader raises whatever the broken bytes lead it to
            raise ModelLoadError(f"{path} is not a readable GGUF file ({type(error).__name__}: {error})") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def fingerprint(self) -> str:
        """A digest of the file."""
        return file_digest(self._reader.data)

    def get(self, key: str, default: T) -> Any | T:
        """Metadata under ``key`` (numbers, strings or lists of them), or the default."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """Metadata under ``key``."""
        if (value := self.get(key, None)) is None:
            raise ModelLoadError(f"{self.path} has no metadata {key}")
        return value

    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: end of sequence, of turn, of message."""
        keys = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
        found = (self.get(key, None) for key in keys)
        return tuple(dict.fromkeys(int(token_id) for token_id in found if token_id is not None))

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    @property
    def tensor_names(self) -> Iterable[str]:
        return self._tensors.keys()

    def tensor_type(self, name: str) -> str:
        """How one tensor is encoded: ``F32``, ``Q4_1``, …"""
        return str(self._find(name).tensor_type.name)

    def blocks(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """The bytes of one tensor of ``shape`` (output rows first), [rows, bytes of a row]: a window on the file."""
        tensor = self._find(name, shape)
        encoded: NDArray[np.uint8] = tensor.data.reshape(shape[0], -1)
        return encoded

    def _find(self, name: str, shape: tuple[int, ...] | None = None) -> ReaderTensor:
        if (tensor := self._tensors.get(name)) is None:
            raise ModelLoadError(f"{self.path} has no tensor {name}")
        found = tuple(int(n) for n in reversed(tensor.shape))
        if shape is not None and found != shape:
            raise ModelLoadError(f"{self.path}: tensor {name} has shape {found}, expected {shape}")
        return tensor

    def tensor(self, name: str, shape: tuple[int, ...], out: Float32 | None = None) -> Float32:
        """One tensor as float32 of ``shape`` (output rows first), written into ``out`` if given."""
        tensor = self._find(name, shape)
        try:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelLoadError(f"{self.path}: tensor {name} is of type {kind}, which cannot be read") from error
        # Always a copy: a float32 tensor is a window on the file, which kills the process if the file is replaced.
        out = np.empty(shape, np.float32) if out is None else out
        out[...] = values
        return out
