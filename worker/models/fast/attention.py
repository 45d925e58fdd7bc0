"""RoPE, and causal attention over keys and values that lie in blocks of 16 tokens.

A block of one layer and head holds its keys as [head_dim][16 tokens], so that one vector has the same dimension of 16
keys, and the values as [16 tokens][head_dim], float16 both. ``tile`` handles up to four query heads that read the same
keys: those that share a key/value head, and in a prompt also those of the tokens that follow. The order of its
additions depends on a query's own context alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from tokenmill.worker.models.fast.cpu import AVX2, AVX512, instruction_set
from tokenmill.worker.models.fast.kernel import intrinsic, kernel
from tokenmill.worker.models.fast.layout import BLOCK_TOKENS, LANES
from tokenmill.worker.models.fast.vector import (
    F32,
    F32X16,
    I32,
    I32X16,
    I64,
    Emitter,
    emit_exp,
    fma,
    load,
    load_f32,
    load_i32,
    splat,
    store,
    store_f16,
    store_halves,
    store_i64,
    swap_pairs,
)

QUERY = 16  # bytes that describe a query head: the address of its floats, and the length of its context


@kernel
def _rope_head(head, head_dim, cos, sin, scale):
    """Turn the pairs of dimensions (0, 1), (2, 3), … of one head, in place."""
    for i in range(head_dim // LANES):
        offset = 64 * i
        part = load(head + offset)
        turned = fma(part, load(cos + offset), swap_pairs(part) * load(sin + offset))
        store(head + offset, turned * splat(scale))


@kernel
def _store_key(head, head_dim, keys, place):
    for i in range(head_dim):
        store_f16(keys + 2 * (BLOCK_TOKENS * i + place), load_f32(head + 4 * i))


@kernel
def _store_value(head, head_dim, values, place):
    for i in range(head_dim // LANES):
        store_halves(values + 2 * (head_dim * place + LANES * i), load(head + 64 * i))


@kernel
def rope_store(model, layer, projected, position, table):
    """For one token: turn the heads of its query and key, scale the query, put key and value into the token's block.

    ``projected`` is the address of query, key and value; ``table`` that of the context's block numbers.
    """
    head_dim, n_kv = model.head_dim, model.n_kv_heads
    offset = 4 * head_dim * position
    cos, sin = model.cos + offset, model.sin + offset
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    for head in range(model.n_heads):
        _rope_head(projected + 4 * head_dim * head, head_dim, cos, sin, scale)
    keys = projected + 4 * head_dim * model.n_heads
    values = keys + 4 * head_dim * n_kv
    piece = piece_bytes(head_dim)
    block = layer_address(model, layer) + load_i32(table + 4 * (position // BLOCK_TOKENS)) * n_kv * piece
    place = position % BLOCK_TOKENS
    for head in range(n_kv):
        key = keys + 4 * head_dim * head
        _rope_head(key, head_dim, cos, sin, np.float32(1))
        _store_key(key, head_dim, block + piece * head, place)
        _store_value(values + 4 * head_dim * head, head_dim, block + piece * head + piece // 2, place)


@kernel
def piece_bytes(head_dim):
    """Bytes of a block's keys and values of one layer and head."""
    return 2 * 2 * BLOCK_TOKENS * head_dim


@kernel
def layer_address(model, layer):
    """Where the blocks of a layer begin."""
    return model.pool + layer * model.n_blocks * model.n_kv_heads * piece_bytes(model.head_dim)


@intrinsic
def _tile(context, n, queries, longest, table, blocks, stride, head_dim, scores, score_stride, next_table, next_blocks):
    """Attention for ``n`` query heads that share a key/value head, at most ``_largest_tile``."""

    def generate(context, builder, signature, arguments):
        for size in range(1, _LARGEST_TILE[instruction_set()] + 1):
            with builder.if_then(builder.icmp_signed("==", arguments[0], I64(size))):
                _AttentionTile(Emitter(builder), size, *arguments[1:]).emit()
        return context.get_dummy_value()

    return types.void(*[types.intp] * 11), generate


_LARGEST_TILE = {AVX512: 4, AVX2: 2}  # query heads for whose sums there are registers


@intrinsic
def _largest_tile(context):
    def generate(context, builder, signature, arguments):
        return I64(_LARGEST_TILE[instruction_set()])

    return types.intp(), generate


class _AttentionTile:
    """Writes a tile: scores of all keys, their softmax, then the mix of all values, which replaces the query.

    Queries are described at ``queries``, ``QUERY`` bytes each; the longest of their contexts is ``longest``. Block k of
    the context lies at ``blocks + table[k] * stride``. ``next_table`` and ``next_blocks`` tell what will be read
    after this: it is fetched ahead, for the processor foresees nothing past the end of a 2 or 4 KB piece.
    """

    def __init__(
        self,
        emit: Emitter,
        n: int,
        queries: ir.Value,
        longest: ir.Value,
        table: ir.Value,
        blocks: ir.Value,
        stride: ir.Value,
        head_dim: ir.Value,
        scores: ir.Value,
        score_stride: ir.Value,
        next_table: ir.Value,
        next_blocks: ir.Value,
    ) -> None:
        b = emit.builder
        self.emit_with, self.n = emit, n
        self.longest, self.stride, self.head_dim = longest, stride, head_dim
        self.here, self.next = (table, blocks), (next_table, next_blocks)
        self.heads = [emit.load(queries, I64, QUERY * q) for q in range(n)]
        lengths = [emit.load(queries, I64, QUERY * q + 8) for q in range(n)]
        self.lengths = [emit.splat(b.trunc(length, I32)) for length in lengths]
        self.scores = [b.add(scores, b.mul(score_stride, I64(q))) for q in range(n)]
        self.n_blocks = b.lshr(b.add(longest, I64(BLOCK_TOKENS - 1)), I64(4))
        self.largest, self.sums = emit.variables(F32X16, n), emit.variables(F32X16, n)
        for q in range(n):
            b.store(emit.constant(-1e30), self.largest[q])
            b.store(emit.constant(0.0), self.sums[q])

    def emit(self) -> None:
        self._score()
        self._softmax()
        # Four vectors of sums for each query head fill the registers of AVX-512; AVX2 has half as many, half as wide.
        wide = I64(4 if instruction_set() == AVX512 else 1)
        b = self.emit_with.builder
        n_vectors = b.lshr(self.head_dim, I64(4))
        if instruction_set() == AVX512:
            self._mix(4, I64(0), b.udiv(n_vectors, wide))
            self._mix(1, b.and_(n_vectors, I64(-4)), b.and_(n_vectors, I64(3)))
        else:
            self._mix(1, I64(0), n_vectors)

    def _block(self, number: ir.Value, table: ir.Value, blocks: ir.Value) -> ir.Value:
        b = self.emit_with.builder
        place = self.emit_with.load(b.add(table, b.shl(number, I64(2))), I32)
        return b.add(blocks, b.mul(b.zext(place, I64), self.stride))

    def _score(self) -> None:
        """Query · key of 16 keys at a time; two sums for each, for the latency of an addition."""
        emit, b = self.emit_with, self.emit_with.builder
        products = emit.variables(F32X16, 2, self.n)
        with emit.loop(self.n_blocks) as number:
            keys = self._block(number, *self.here)
            values = b.add(keys, b.shl(self.head_dim, I64(5)))
            for variable in (*products[0], *products[1]):
                b.store(emit.constant(0.0), variable)
            with emit.loop(b.lshr(self.head_dim, I64(2))) as quarter:
                line = b.shl(quarter, I64(7))
                emit.prefetch(b.add(values, line))
                emit.prefetch(emit.address(b.add(values, line), 64))
                for i in range(4):
                    key = emit.load_half(b.add(keys, line), offset=32 * i)
                    for q, head in enumerate(self.heads):
                        query = emit.splat(emit.load(b.add(head, b.shl(quarter, I64(4))), F32, 4 * i))
                        emit.add_fma(query, key, products[i % 2][q])
            first = emit.splat(b.trunc(b.shl(number, I64(4)), I32))
            token = b.add(first, ir.Constant(I32X16, list(range(LANES))))
            for q in range(self.n):
                score = b.fadd(b.load(products[0][q]), b.load(products[1][q]))
                score = b.select(b.icmp_signed("<", token, self.lengths[q]), score, emit.constant(-1e30))
                before = b.load(self.largest[q])
                b.store(b.select(b.fcmp_ordered(">", score, before), score, before), self.largest[q])
                emit.store(score, b.add(self.scores[q], b.shl(number, I64(6))))

    def _softmax(self) -> None:
        """Numerators in place of the scores; exactly 0 for what lies after a query."""
        emit, b = self.emit_with, self.emit_with.builder
        for q in range(self.n):
            largest = emit.splat(
                emit.call("llvm.vector.reduce.fmax.v16f32", F32, [b.load(self.largest[q])], ("nnan", "nsz"))
            )
            with emit.loop(self.n_blocks) as number:
                place = b.add(self.scores[q], b.shl(number, I64(6)))
                weight = emit_exp(emit, b.fsub(emit.load(place, F32X16), largest))
                emit.store(weight, place)
                b.store(b.fadd(weight, b.load(self.sums[q])), self.sums[q])

    def _mix(self, width: int, first_vector: ir.Value, n_passes: ir.Value) -> None:
        """Weights · values, for ``width`` vectors of dimensions in each pass over the tokens."""
        emit, b = self.emit_with, self.emit_with.builder
        mixed = emit.variables(F32X16, self.n, width)
        with emit.loop(n_passes) as turn:
            for row in mixed:
                for variable in row:
                    b.store(emit.constant(0.0), variable)
            dimension = b.shl(b.add(first_vector, b.mul(turn, I64(width))), I64(5))  # in bytes of float16
            with emit.loop(self.n_blocks) as number:
                self._mix_block(number, dimension, mixed)
            for q, row in enumerate(mixed):
                total = emit.call("llvm.vector.reduce.fadd.v16f32", F32, (F32(0.0), b.load(self.sums[q])), ("reassoc",))
                factor = emit.splat(b.fdiv(F32(1.0), total))
                place = b.add(self.heads[q], b.shl(dimension, I64(1)))
                for v, variable in enumerate(row):
                    emit.store(b.fmul(b.load(variable), factor), place, 64 * v)

    def _mix_block(self, number: ir.Value, dimension: ir.Value, mixed: Any) -> None:
        emit, b = self.emit_with, self.emit_with.builder
        keys_bytes = b.shl(self.head_dim, I64(5))
        values = b.add(b.add(self._block(number, *self.here), keys_bytes), dimension)
        ahead = self._block(number, *self.next)
        token_bytes = b.shl(self.head_dim, I64(1))
        left = b.sub(self.longest, b.shl(number, I64(4)))
        n_tokens = b.select(b.icmp_signed("<", left, I64(BLOCK_TOKENS)), left, I64(BLOCK_TOKENS))
        with emit.loop(n_tokens) as token:
            offset = b.mul(token, token_bytes)
            emit.prefetch(b.add(ahead, offset))
            emit.prefetch(emit.address(b.add(ahead, offset), 64))
            value = [emit.load_half(b.add(values, offset), offset=32 * v) for v in range(len(mixed[0]))]
            at = b.shl(b.add(b.shl(number, I64(4)), token), I64(2))
            for q, row in enumerate(mixed):
                weight = emit.splat(emit.load(b.add(self.scores[q], at), F32))
                for v, variable in enumerate(row):
                    emit.add_fma(weight, value[v], variable)


@kernel
def attend(model, layer, projected, stride, n_tokens, position, table, scratch, score_stride, next_table):
    """Replace the queries of consecutive tokens of one context by what they attend to.

    ``projected`` is the address of the first token's row, ``stride`` bytes before the next one's; ``position`` its
    place in the context. ``scratch`` has four rows of scores, and room for the description of four queries before them.
    """
    head_dim, n_kv = model.head_dim, model.n_kv_heads
    shared = model.n_heads // n_kv
    piece = piece_bytes(head_dim)
    first_block = layer_address(model, layer)
    scores = scratch + 4 * QUERY
    for head in range(n_kv):
        blocks = first_block + piece * head
        last = head == n_kv - 1
        done, n_queries = 0, n_tokens * shared
        while done < n_queries:
            n = min(n_queries - done, _largest_tile())
            longest = 0
            for i in range(n):
                token, query = divmod(done + i, shared)
                address = projected + stride * token + 4 * head_dim * (head * shared + query)
                longest = position + token + 1
                store_i64(scratch + QUERY * i, address)
                store_i64(scratch + QUERY * i + 8, longest)
            if last:
                next_blocks, following = first_block, next_table
            else:
                next_blocks, following = blocks + piece, table
            _tile(
                n, scratch, longest, table, blocks, n_kv * piece, head_dim, scores, score_stride, following, next_blocks
            )
            done += n
