"""Each family of kernels against plain NumPy."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from tokenmill.worker.models.fast import attention, gemm, quantize
from tokenmill.worker.models.fast.cpu import instruction_set
from tokenmill.worker.models.fast.layout import BLOCK_TOKENS, GROUP, MODEL, PANEL
from tokenmill.worker.models.fast.model import rotation_table
from tokenmill.worker.models.fast.packing import Arena, Packed, pack_arrays, unpacked

from . import references
from .references import activation_rows, fields, quantized, zeros

if instruction_set() is None:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)


@numba.njit
def quantize_row(values, n, row):
    quantize.quantize(values, n, row)


@numba.njit
def normalize_row(values, weight, n, eps, row):
    quantize.normalize_quantize(values, weight, n, eps, row)


@numba.njit
def gate_row(values, n, row):
    quantize.gate_quantize(values, n, row)


@numba.njit
def multiply(matrices, activations, stride, n_tokens, out, out_stride, add):
    matrix = matrices[0]
    gemm.multiply(0, matrix.n_panels, matrix, activations, stride, n_tokens, out, out_stride, add)


@numba.njit
def weights_of(matrices, output, out):
    gemm.weights_of(matrices[0], output, out)


@numba.njit
def rope_store(models, layer, row, position, table):
    attention.rope_store(models[0], layer, row, position, table)


@numba.njit
def attend(models, layer, rows, stride, n_tokens, position, table, scratch, score_stride):
    attention.attend(models[0], layer, rows, stride, n_tokens, position, table, scratch, score_stride, table)


class TestQuantize:
    """Activations in groups of 32."""

    WIDTH = 96

    def check(self, row: np.ndarray, expected: np.ndarray) -> None:
        codes, scales, sums, corrections = fields(row, self.WIDTH)
        expected_codes, expected_scales = quantized(expected)
        np.testing.assert_allclose(scales, expected_scales, rtol=1e-5)
        assert np.abs(codes.astype(int) - expected_codes).max() <= 1  # another order of additions may tip a tie
        np.testing.assert_allclose(sums, codes.astype(int).sum(1) * scales, rtol=1e-6)
        np.testing.assert_array_equal(corrections, -128 * codes.astype(int).sum(1))

    def test_a_row(self) -> None:
        values, row = zeros(self.WIDTH), activation_rows(1, self.WIDTH)[0]
        values[:] = np.random.default_rng(0).standard_normal(self.WIDTH) * 30
        quantize_row(values.ctypes.data, self.WIDTH, row.ctypes.data)
        np.testing.assert_array_equal(fields(row, self.WIDTH)[0], quantized(values)[0])
        self.check(row, values)

    def test_zeros(self) -> None:
        row = activation_rows(1, self.WIDTH)[0]
        quantize_row(zeros(self.WIDTH).ctypes.data, self.WIDTH, row.ctypes.data)
        codes, _, sums, corrections = fields(row, self.WIDTH)
        assert not codes.any()
        assert not sums.any()
        assert not corrections.any()

    def test_after_a_norm(self) -> None:
        rng, row = np.random.default_rng(1), activation_rows(1, self.WIDTH)[0]
        values, weight = zeros(2, self.WIDTH)
        values[:], weight[:] = rng.standard_normal(self.WIDTH) * 30, rng.standard_normal(self.WIDTH)
        normalize_row(values.ctypes.data, weight.ctypes.data, self.WIDTH, np.float32(1e-5), row.ctypes.data)
        self.check(row, (values / np.sqrt((values**2).mean() + 1e-5) * weight).astype("f"))

    def test_after_a_gate(self) -> None:
        values, row = zeros(2, self.WIDTH), activation_rows(1, self.WIDTH)[0]
        values[:] = np.random.default_rng(2).standard_normal((2, self.WIDTH)) * 8
        values[0, :4] = -100, 100, -88.5, 0  # far into both ends of exp
        gate_row(values.ctypes.data, self.WIDTH, row.ctypes.data)
        gate, up = values.astype(float)
        self.check(row, (gate / (1 + np.exp(-gate)) * up).astype("f"))


def packed(bits: int, n_in: int = 96, n_panels: int = 2) -> Packed:
    """A matrix of random codes of all values, scales and offsets."""
    rng = np.random.default_rng(bits)
    shape = (n_panels * PANEL, n_in // GROUP)
    codes = rng.integers(0, 256, (*shape, 4 * bits)).astype(np.uint8)
    halves = rng.standard_normal((2, *shape)).astype(np.float16)
    return pack_arrays(codes.view(np.uint32), halves, bits, Arena())


@pytest.mark.parametrize("bits", [4, 8])
class TestGemm:
    """Packed weights and quantised activations."""

    N_IN, N_OUT = 96, 2 * PANEL

    def activations(self, n: int) -> np.ndarray:
        rows, values = activation_rows(n, self.N_IN), zeros(n, self.N_IN)
        values[:] = np.random.default_rng(5).standard_normal(values.shape)
        values[0, :GROUP] = np.where(np.arange(GROUP) % 2, 1, -1)  # codes of ±127 everywhere
        values[-1, :GROUP] = 1
        for row, value in zip(rows, values, strict=True):
            quantize_row(value.ctypes.data, self.N_IN, row.ctypes.data)
        return rows

    def product(self, matrix: Packed, rows: np.ndarray, out: np.ndarray, *, add: bool = False) -> np.ndarray:
        addresses = rows.ctypes.data, rows.strides[0], len(rows), out.ctypes.data, out.strides[0]
        multiply(matrix.record.reshape(1), *addresses, int(add))
        return out

    def test_products_are_those_of_the_weights(self, bits: int) -> None:
        matrix, rows = packed(bits), self.activations(7)
        codes, scales = zip(*(fields(row, self.N_IN)[:2] for row in rows), strict=True)
        inputs = (np.stack(codes) * np.stack(scales)[..., None]).reshape(7, self.N_IN).astype(float)
        expected = inputs @ unpacked(matrix).T
        out = self.product(matrix, rows, zeros(7, self.N_OUT))
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-4 * np.abs(expected).max())

    def test_a_token_gets_the_same_bits_in_any_company(self, bits: int) -> None:
        matrix, rows = packed(bits), self.activations(11)
        alone = np.concatenate([self.product(matrix, row[None], zeros(1, self.N_OUT)) for row in rows])
        for n in range(2, 12):
            np.testing.assert_array_equal(self.product(matrix, rows[:n], zeros(n, self.N_OUT)), alone[:n])

    def test_the_product_can_be_added(self, bits: int) -> None:
        matrix, rows = packed(bits), self.activations(3)
        before = zeros(3, self.N_OUT)
        before[:] = np.random.default_rng(6).standard_normal(before.shape)
        expected = before + self.product(matrix, rows, zeros(3, self.N_OUT))
        np.testing.assert_array_equal(self.product(matrix, rows, before, add=True), expected)

    def test_single_rows_of_weights(self, bits: int) -> None:
        matrix, out = packed(bits), zeros(self.N_IN)
        for output in (0, 1, PANEL - 1, PANEL, self.N_OUT - 1):
            weights_of(matrix.record.reshape(1), output, out.ctypes.data)
            np.testing.assert_allclose(out, unpacked(matrix)[output], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80)])
class TestAttention:
    """RoPE and attention over blocks of a context, which lie in any order."""

    N_LAYERS, N_BLOCKS, N_TOKENS = 2, 6, 52

    @pytest.fixture(autouse=True)
    def memory(self, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        self.shape = n_heads, n_kv_heads, head_dim
        self.pool = zeros(self.N_LAYERS, self.N_BLOCKS, n_kv_heads, 2, BLOCK_TOKENS * head_dim, dtype="f2")
        self.frequencies = 100.0 ** -(np.arange(head_dim // 4) / (head_dim // 4))  # half of each head is turned
        self.rotation = rotation_table(self.frequencies, head_dim, self.N_TOKENS)
        self.table = np.array([4, 0, 5, 2], np.int32)
        self.rows = zeros(self.N_TOKENS, (n_heads + 2 * n_kv_heads) * head_dim)
        self.rows[:] = np.random.default_rng(0).standard_normal(self.rows.shape)
        self.scratch = zeros(64 + 4 * 64)
        record = np.zeros(1, MODEL)
        record["n_heads"], record["n_kv_heads"], record["head_dim"] = self.shape
        record["pool"], record["n_blocks"] = self.pool.ctypes.data, self.N_BLOCKS
        record["cos"], record["sin"] = (half.ctypes.data for half in self.rotation)
        self.model = record

    def fill(self) -> np.ndarray:
        """Store every token; returns queries, keys and values before that, [tokens, all heads, head_dim]."""
        before = self.rows.reshape(self.N_TOKENS, -1, self.shape[2]).copy()
        for position, row in enumerate(self.rows):
            rope_store(self.model, 1, row.ctypes.data, position, self.table.ctypes.data)
        return before

    def attend(self, first: int, n: int) -> np.ndarray:
        rows = self.rows[first : first + n].copy()
        place = rows.ctypes.data, rows.strides[0], n, first
        attend(self.model, 1, *place, self.table.ctypes.data, self.scratch.ctypes.data, 256)
        return rows[:, : self.shape[0] * self.shape[2]].reshape(n, *self.shape[::2])

    def test_keys_and_values_lie_where_attention_finds_them(self) -> None:
        n_heads, n_kv_heads, head_dim = self.shape
        before = self.fill()
        keys = before[:, n_heads : n_heads + n_kv_heads]
        for position in (0, 15, 16, 51):
            block = self.pool[1, self.table[position // 16], :, :].astype("f")
            stored = block[:, 0].reshape(n_kv_heads, head_dim, 16)[:, :, position % 16]
            expected = references.rotated(keys[position], position, self.frequencies)
            np.testing.assert_allclose(stored, expected, atol=4e-3)
            stored = block[:, 1].reshape(n_kv_heads, 16, head_dim)[:, position % 16]
            np.testing.assert_allclose(stored, before[position, n_heads + n_kv_heads :], atol=4e-3)
        assert not self.pool[0].any()
        assert not self.pool[1, [1, 3]].any()

    def test_each_token_attends_to_those_before(self) -> None:
        n_heads, n_kv_heads, head_dim = self.shape
        before = self.fill()
        turned = np.stack([references.rotated(x, i, self.frequencies) for i, x in enumerate(before)])
        keys = turned[:, n_heads : n_heads + n_kv_heads].swapaxes(0, 1).astype(np.float16)
        values = before[:, n_heads + n_kv_heads :].swapaxes(0, 1).astype(np.float16)
        for position in (0, 1, 15, 16, 17, 51):
            queries = turned[position, :n_heads] / np.sqrt(head_dim)
            expected = references.attention(queries, keys, values, position + 1)
            np.testing.assert_allclose(self.attend(position, 1)[0], expected, atol=2e-3)

    def test_a_token_gets_the_same_bits_in_any_chunk(self) -> None:
        self.fill()
        alone = np.concatenate([self.attend(position, 1) for position in range(self.N_TOKENS)])
        for first, n in ((0, 8), (13, 7), (15, 2), (30, 22), (0, 52)):
            np.testing.assert_array_equal(self.attend(first, n), alone[first : first + n])

    def test_what_lies_after_a_token_does_not_matter(self) -> None:
        self.fill()
        clean = self.attend(20, 1)
        self.pool[1, self.table[1], :, 0].reshape(-1, self.shape[2], 16)[:, :, 5:] = np.nan
        self.pool[1, self.table[1], :, 1].reshape(-1, 16, self.shape[2])[:, 5:] = np.nan
        self.pool[1, self.table[2:]] = np.nan
        np.testing.assert_array_equal(self.attend(20, 1), clean)
