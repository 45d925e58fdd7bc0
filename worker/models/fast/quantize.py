"""Activations as int8 in groups of 32, alone, after an RMS norm, and after a gate."""

from __future__ import annotations

import numpy as np

from tokenmill.worker.models.fast.kernel import kernel
from tokenmill.worker.models.fast.layout import GROUP
from tokenmill.worker.models.fast.vector import (
    absolute,
    exp,
    fma,
    larger,
    largest_of,
    load,
    splat,
    store_codes,
    store_f32,
    store_i32,
    sum_of,
)


@kernel
def _quantize_group(first, second, codes, facts):
    """Quantise 32 floats: codes of at most ±127, and what ``layout`` says follows them."""
    largest = max(largest_of(larger(absolute(first), absolute(second))), np.float32(1e-20))
    scale, inverse = largest / np.float32(127), splat(np.float32(127) / largest)
    total = store_codes(codes, first * inverse) + store_codes(codes + 16, second * inverse)
    store_f32(facts, scale)
    store_f32(facts + 4, scale * np.float32(total))
    store_i32(facts + 8, np.int32(-128 * total))


@kernel
def quantize(values, n, row):
    """Quantise ``n`` floats into a row of activations; both are addresses."""
    for group in range(n // GROUP):
        at = values + 4 * GROUP * group
        _quantize_group(load(at), load(at + 64), row + GROUP * group, row + n + 12 * group)


@kernel
def normalize_quantize(values, weight, n, eps, row):
    """Quantise ``n`` floats after an RMS norm with this weight."""
    squares = splat(np.float32(0))
    for i in range(n // 16):
        part = load(values + 64 * i)
        squares = fma(part, part, squares)
    mean = sum_of(squares) / np.float32(n)
    factor = splat(np.float32(1) / np.sqrt(mean + np.float32(eps)))
    for group in range(n // GROUP):
        at, by = values + 4 * GROUP * group, weight + 4 * GROUP * group
        first, second = load(at) * factor * load(by), load(at + 64) * factor * load(by + 64)
        _quantize_group(first, second, row + GROUP * group, row + n + 12 * group)


@kernel
def _gated(gate, up):
    """SiLU of the gate, times the other."""
    one = splat(np.float32(1))
    return gate * up / (one + exp(splat(np.float32(0)) - gate))


@kernel
def gate_quantize(gate_up, n, row):
    """Quantise SiLU(gate) · up, of ``n`` floats each, which lie one after the other."""
    up = gate_up + 4 * n
    for group in range(n // GROUP):
        offset = 4 * GROUP * group
        first = _gated(load(gate_up + offset), load(up + offset))
        second = _gated(load(gate_up + offset + 64), load(up + offset + 64))
        _quantize_group(first, second, row + GROUP * group, row + n + 12 * group)
