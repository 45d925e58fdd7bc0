"""Packing keeps every weight of a file exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tokenmill.worker.models.fast.layout import PANEL
from tokenmill.worker.models.fast.packing import Arena, pack, unpacked, unsuited_tensor
from tokenmill.worker.models.gguf_file import GgufFile

from ..conftest import write

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def file_of(path: Path, matrices: dict[str, tuple[np.ndarray, str]]) -> GgufFile:
    """A file with these matrices beside those of the tiny model."""
    return GgufFile(
        write(path, {name: (array, GGMLQuantizationType[kind]) for name, (array, kind) in matrices.items()})
    )


def values(array: np.ndarray, kind: str) -> np.ndarray:
    """What the library says that a matrix holds after quantisation."""
    number = GGMLQuantizationType[kind]
    return dequantize(quantize(array, number), number)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_packed_without_loss(tmp_path: Path, kind: str) -> None:
    array = np.random.default_rng(0).standard_normal((PANEL, 96)).astype("f")
    packed = pack(file_of(tmp_path / "x.gguf", {"x": (array, kind)}), ["x"], [PANEL], 96, Arena())
    assert packed.record["bits"] == (4 if kind in ("Q4_0", "Q4_1") else 8)
    np.testing.assert_allclose(unpacked(packed), values(array, kind), rtol=1e-6, atol=1e-6)


def test_matrices_of_several_types_lie_below_one_another(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {kind: rng.standard_normal((20, 64)).astype("f") for kind in TYPES}
    file = file_of(tmp_path / "x.gguf", {kind: (array, kind) for kind, array in arrays.items()})
    weights = unpacked(pack(file, TYPES, [20] * len(TYPES), 64, Arena()))
    expected = np.concatenate([values(array, kind) for kind, array in arrays.items()])
    np.testing.assert_allclose(weights[:100], expected, rtol=1e-6, atol=1e-6)
    assert weights.shape == (3 * PANEL, 64)
    assert not weights[100:].any()


def test_a_type_without_kernel_is_named(tmp_path: Path) -> None:
    file = file_of(tmp_path / "x.gguf", {"x": (np.zeros((1, 32), "f"), "F16"), "y": (np.zeros((1, 32), "f"), "Q8_0")})
    assert unsuited_tensor(file, "x") == "tensor x is of type F16; the kernels compute Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"
    assert unsuited_tensor(file, "y") is None
