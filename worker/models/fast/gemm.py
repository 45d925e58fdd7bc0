"""Matrix products of int8 activations with packed weights of 4 or 8 bits.

``tile`` computes a few tokens by a few vectors of outputs in registers. Sums over a group of 32 inputs are exact
integers; over groups, floats are added in the same order whatever the tile, so that a token's result never depends on
how many tokens it is computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from tokenmill.worker.models.fast.cpu import AVX512, instruction_set
from tokenmill.worker.models.fast.kernel import intrinsic, kernel
from tokenmill.worker.models.fast.layout import GROUP, PANEL, PANEL_DM_BYTES
from tokenmill.worker.models.fast.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Emitter,
    load_f16,
    load_i8,
    load_u8,
    store_f32,
)


class _Tile(NamedTuple):
    """What a tile is generated for."""

    tokens: int
    bits: int
    lanes: int
    vectors: int  # of outputs; those of AVX2 are fewer and shorter, for 16 registers

    @property
    def outputs(self) -> int:
        return self.lanes * self.vectors


@intrinsic
def _tile(context, n_tokens, bits, activations, stride, n_in, panel, output, out, out_stride, add):
    """Some tokens (4, 2 or 1), times the outputs of a panel from ``output`` on, ``_tile_outputs`` of them."""

    def generate(context, builder, signature, arguments):
        given_tokens, given_bits, *others = arguments
        for shape in _shapes():
            right_size = builder.icmp_signed("==", given_tokens, I64(shape.tokens))
            right_bits = builder.icmp_signed("==", given_bits, I64(shape.bits))
            with builder.if_then(builder.and_(right_size, right_bits)):
                _emit_tile(Emitter(builder), shape, *others)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 10), generate


def _shapes() -> list[_Tile]:
    """The tiles that fit into the registers: 12 sums with AVX-512, 4 with AVX2."""
    if instruction_set() == AVX512:
        return [_Tile(tokens, bits, lanes=16, vectors=3) for bits in (4, 8) for tokens in (4, 2, 1)]
    return [_Tile(tokens, bits, lanes=8, vectors=2) for bits in (4, 8) for tokens in (2, 1)]


def _emit_tile(
    emit: Emitter,
    tile: _Tile,
    activations: ir.Value,
    stride: ir.Value,
    n_in: ir.Value,
    panel: ir.Value,
    output: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
    add: ir.Value,
) -> None:
    b = emit.builder
    floats = ir.VectorType(F32, tile.lanes)
    sums = emit.variables(floats, tile.tokens, tile.vectors)
    for row in sums:
        for variable in row:
            b.store(emit.constant(0.0, F32, tile.lanes), variable)
    rows = [b.add(activations, b.mul(stride, I64(token))) for token in range(tile.tokens)]
    n_groups = b.lshr(n_in, I64(5))
    codes_bytes = PANEL * GROUP * tile.bits // 8
    with emit.loop(n_groups) as group:
        block = b.add(panel, b.mul(group, I64(codes_bytes + PANEL_DM_BYTES)))
        words = b.add(block, b.shl(output, I64(2)))  # the tile's first output in a line of 48 words
        halves = b.add(block, b.shl(output, I64(1)))  # and in a line of 48 float16
        codes = [b.add(row, b.shl(group, I64(5))) for row in rows]
        facts = [b.add(b.add(row, n_in), b.mul(group, I64(12))) for row in rows]
        dots = _emit_dots(emit, tile, words, codes, facts)
        scales = [emit.load_half(halves, tile.lanes, offset) for offset in _offsets(tile, codes_bytes, 2)]
        offset_line = codes_bytes + 2 * PANEL
        offsets = [emit.load_half(halves, tile.lanes, offset) for offset in _offsets(tile, offset_line, 2)]
        for token in range(tile.tokens):
            scale = emit.splat(emit.load(facts[token], F32), tile.lanes)
            scaled_sum = emit.splat(emit.load(facts[token], F32, 4), tile.lanes)
            for v in range(tile.vectors):
                emit.add_fma(offsets[v], scaled_sum, sums[token][v])
                emit.add_fma(b.sitofp(dots[token][v], floats), b.fmul(scale, scales[v]), sums[token][v])
    places = [b.add(out, b.mul(out_stride, I64(token))) for token in range(tile.tokens)]
    with b.if_else(b.icmp_signed("!=", add, I64(0))) as (then, otherwise):
        for branch, adds in ((then, True), (otherwise, False)):
            with branch:
                for row, place in zip(sums, places, strict=True):
                    for v, variable in enumerate(row):
                        value, offset = b.load(variable), 4 * tile.lanes * v
                        emit.store(b.fadd(value, emit.load(place, floats, offset)) if adds else value, place, offset)


def _offsets(tile: _Tile, start: int, item: int) -> list[int]:
    """Offsets of the tile's vectors in one line of 48 items of so many bytes."""
    return [start + item * tile.lanes * v for v in range(tile.vectors)]


def _emit_dots(
    emit: Emitter, tile: _Tile, words: ir.Value, codes: Sequence[ir.Value], facts: Sequence[ir.Value]
) -> list[list[ir.Value]]:
    """Integer products over one group: [tokens][vectors] of int32."""
    b, word = emit.builder, ir.VectorType(I32, tile.lanes)
    dot = _Vnni(emit, tile, facts) if tile.lanes == 16 else _MultiplyAdd(emit, tile)
    for j in range(GROUP * tile.bits // 32):
        raw = [emit.load(words, word, offset) for offset in _offsets(tile, 4 * PANEL * j, 4)]
        if tile.bits == 4:
            low = emit.constant(0x0F0F0F0F, I32, tile.lanes)
            shift = emit.constant(4, I32, tile.lanes)
            halves = ([b.and_(x, low) for x in raw], [b.and_(b.lshr(x, shift), low) for x in raw])
            parts = [(4 * j, halves[0]), (16 + 4 * j, halves[1])]
        else:
            parts = [(4 * j, raw)]
        for first_input, weights in parts:
            for token in range(tile.tokens):
                inputs = emit.splat(emit.load(codes[token], I32, first_input), tile.lanes)
                dot.add(token, weights, inputs)
    return dot.results()


class _Vnni:
    """AVX-512: one instruction multiplies 64 unsigned by 64 signed bytes and adds fours of them to 16 sums."""

    def __init__(self, emit: Emitter, tile: _Tile, facts: Sequence[ir.Value]) -> None:
        self._emit, self._tile = emit, tile
        zero = emit.constant(0, I32)
        # 8-bit weights are signed: 128 is added to make them unsigned, and these are what that adds to the sums.
        starts = [zero if tile.bits == 4 else emit.splat(emit.load(fact, I32, 8)) for fact in facts]
        self._sums = [[start] * tile.vectors for start in starts]

    def add(self, token: int, weights: Sequence[ir.Value], inputs: ir.Value) -> None:
        for v, w in enumerate(weights):
            if self._tile.bits == 8:
                w = self._emit.builder.xor(w, self._emit.constant(-0x7F7F7F80, I32))
            arguments = (self._sums[token][v], w, inputs)
            self._sums[token][v] = self._emit.call("llvm.x86.avx512.vpdpbusd.512", w.type, arguments)

    def results(self) -> list[list[ir.Value]]:
        return self._sums


class _MultiplyAdd:
    """AVX2: products of unsigned and signed bytes are added in pairs to int16, which must not overflow.

    4 bits: all 8 pairs of a group stay within 8 · 2 · 15 · 127 = 30,480. 8 bits: the weight's sign moves to the
    activation; a pair stays within 2 · 128 · 127 = 32,512, and goes on to int32 at once.
    """

    def __init__(self, emit: Emitter, tile: _Tile) -> None:
        self._emit, self._tile = emit, tile
        self._shorts, self._bytes = ir.VectorType(I16, 16), ir.VectorType(I8, 32)
        self._sums: list[list[ir.Value | None]] = [[None] * tile.vectors for _ in range(tile.tokens)]

    def add(self, token: int, weights: Sequence[ir.Value], inputs: ir.Value) -> None:
        b, emit = self._emit.builder, self._emit
        inputs = b.bitcast(inputs, self._bytes)
        for v, w in enumerate(weights):
            w = b.bitcast(w, self._bytes)
            if self._tile.bits == 8:
                signed = emit.call("llvm.x86.avx2.psign.b", self._bytes, (inputs, w))
                w = emit.call("llvm.abs.v32i8", self._bytes, (w, ir.Constant(ir.IntType(1), 0)))
                pairs = self._widened(emit.call("llvm.x86.avx2.pmadd.ub.sw", self._shorts, (w, signed)))
            else:
                pairs = emit.call("llvm.x86.avx2.pmadd.ub.sw", self._shorts, (w, inputs))
            before = self._sums[token][v]
            self._sums[token][v] = pairs if before is None else b.add(before, pairs)

    def _widened(self, shorts: ir.Value) -> ir.Value:
        ones = self._emit.constant(1, I16, 16)
        return self._emit.call("llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), (shorts, ones))

    def results(self) -> list[list[ir.Value]]:
        return [[self._widened(x) if self._tile.bits == 4 else x for x in row] for row in self._sums]


@intrinsic
def _tile_outputs(context):
    """Outputs of every tile."""

    def generate(context, builder, signature, arguments):
        return I64(_shapes()[0].outputs)

    return types.intp(), generate


@intrinsic
def _tile_tokens(context):
    """Tokens of the largest tile."""

    def generate(context, builder, signature, arguments):
        return I64(_shapes()[0].tokens)

    return types.intp(), generate


@kernel
def multiply(first_panel, last_panel, matrix, activations, stride, n_tokens, out, out_stride, add):
    """out[token] = (out[token] if ``add`` else 0) + matrix · activations[token], for some panels of the matrix.

    ``out`` is float32; it and ``activations`` are addresses of rows that lie so many bytes apart.
    """
    n_in = matrix.n_in
    panel_bytes = n_in // GROUP * (PANEL * GROUP * matrix.bits // 8 + PANEL_DM_BYTES)
    for number in range(first_panel, last_panel):
        panel = matrix.address + number * panel_bytes
        for output in range(0, PANEL, _tile_outputs()):
            column = out + 4 * (number * PANEL + output)
            token = 0
            while token < n_tokens:
                n = min(n_tokens - token, _tile_tokens())
                n = 2 if n == 3 else n
                rows, place = activations + token * stride, column + token * out_stride
                _tile(n, matrix.bits, rows, stride, n_in, panel, output, place, out_stride, add)
                token += n


@kernel
def weights_of(matrix, output, out):
    """The weights of one output as floats, ``n_in`` of them from address ``out`` on."""
    codes_bytes = PANEL * GROUP * matrix.bits // 8
    group_bytes = codes_bytes + PANEL_DM_BYTES
    number, place = divmod(output, PANEL)
    panel = matrix.address + number * (matrix.n_in // GROUP * group_bytes)
    for group in range(matrix.n_in // GROUP):
        block = panel + group * group_bytes
        scale = load_f16(block + codes_bytes + 2 * place)
        offset = load_f16(block + codes_bytes + 2 * PANEL + 2 * place)
        for i in range(GROUP):
            at = out + 4 * (GROUP * group + i)
            if matrix.bits == 8:
                code = np.float32(load_i8(block + 4 * (PANEL * (i // 4) + place) + i % 4))
            else:
                both = load_u8(block + 4 * (PANEL * (i % 16 // 4) + place) + i % 4)
                code = np.float32(both >> 4 if i >= 16 else both & 15)
            store_f32(at, scale * code + offset)
