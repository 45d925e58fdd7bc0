"""One step of a llama-family model: its phases, in the order in which every thread goes through them."""

from __future__ import annotations

from typing import Any

from tokenmill.worker.models.fast.attention import attend, rope_store
from tokenmill.worker.models.fast.gemm import multiply, weights_of
from tokenmill.worker.models.fast.kernel import cached_kernel, kernel
from tokenmill.worker.models.fast.quantize import gate_quantize, normalize_quantize, quantize
from tokenmill.worker.models.fast.team import current_step, portion, take
from tokenmill.worker.models.fast.vector import load_i32, load_i64

PHASES_PER_LAYER, OTHER_PHASES = 9, 3


@kernel
def _embed(model, step, team, turn, phase):
    """The rows of the embedding, dequantised."""
    size = portion(team, step.n_tokens)
    n_tasks = -(-step.n_tokens // max(size, 1))
    task = take(team, turn, phase, -1, n_tasks)
    while task >= 0:
        for token in range(task * size, min(task * size + size, step.n_tokens)):
            row = step.hidden + token * step.hidden_stride
            weights_of(model.embedding, load_i32(step.ids + 4 * token), row)
        task = take(team, turn, phase, task, n_tasks)


@kernel
def _normalize(model, step, team, turn, phase, weight):
    """RMS norm of the residual stream, quantised."""
    size = portion(team, step.n_tokens)
    n_tasks = -(-step.n_tokens // max(size, 1))
    task = take(team, turn, phase, -1, n_tasks)
    while task >= 0:
        for token in range(task * size, min(task * size + size, step.n_tokens)):
            row = step.activations + token * step.activations_stride
            values = step.hidden + token * step.hidden_stride
            normalize_quantize(values, weight, model.width, model.rms_eps, row)
        task = take(team, turn, phase, task, n_tasks)


@kernel
def _multiply(matrix, step, team, turn, phase, out, out_stride, n_tokens, add):
    """A matrix times the activations of all tokens."""
    size = portion(team, matrix.n_panels)
    n_tasks = -(-matrix.n_panels // size)
    task = take(team, turn, phase, -1, n_tasks)
    while task >= 0:
        first, last = task * size, min(task * size + size, matrix.n_panels)
        multiply(matrix, first, last, step.activations, step.activations_stride, n_tokens, out, out_stride, add)
        task = take(team, turn, phase, task, n_tasks)


@kernel
def _rope_store(model, step, team, turn, phase, layer):
    """Positions into queries and keys; keys and values into their blocks."""
    size = portion(team, step.n_tokens)
    n_tasks = -(-step.n_tokens // max(size, 1))
    task = take(team, turn, phase, -1, n_tasks)
    while task >= 0:
        for token in range(task * size, min(task * size + size, step.n_tokens)):
            row = step.projected + token * step.projected_stride
            position, table = load_i32(step.positions + 4 * token), load_i64(step.token_tables + 8 * token)
            rope_store(model, layer, row, position, table)
        task = take(team, turn, phase, task, n_tasks)


@kernel
def _attend(model, step, team, turn, phase, layer, scratch):
    """Attention, chunk by chunk, quantised."""
    size = portion(team, step.n_chunks)
    n_tasks = -(-step.n_chunks // max(size, 1))
    task = take(team, turn, phase, -1, n_tasks)
    while task >= 0:
        for chunk in range(task * size, min(task * size + size, step.n_chunks)):
            first, n_tokens = load_i32(step.chunk_starts + 4 * chunk), load_i32(step.chunk_lengths + 4 * chunk)
            table = load_i64(step.chunk_tables + 8 * chunk)
            following = load_i64(step.chunk_tables + 8 * min(chunk + 1, step.n_chunks - 1))
            rows, stride = step.projected + first * step.projected_stride, step.projected_stride
            position = load_i32(step.positions + 4 * first)
            attend(model, layer, rows, stride, n_tokens, position, table, scratch, step.score_stride, following)
            for token in range(first, first + n_tokens):
                row = step.activations + token * step.activations_stride
                quantize(step.projected + token * stride, model.n_heads * model.head_dim, row)
        task = take(team, turn, phase, task, n_tasks)


@kernel
def _gate(model, step, team, turn, phase):
    """The gate of the feed-forward block, quantised."""
    size = portion(team, step.n_tokens)
    n_tasks = -(-step.n_tokens // max(size, 1))
    task = take(team, turn, phase, -1, n_tasks)
    while task >= 0:
        for token in range(task * size, min(task * size + size, step.n_tokens)):
            row = step.activations + token * step.activations_stride
            gate_quantize(step.projected + token * step.projected_stride, model.ffn_width, row)
        task = take(team, turn, phase, task, n_tasks)


@kernel
def _normalize_last(model, step, team, turn, phase):
    """The output norm of the tokens that logits are wanted for."""
    size = portion(team, step.n_last)
    n_tasks = -(-step.n_last // max(size, 1))
    task = take(team, turn, phase, -1, n_tasks)
    while task >= 0:
        for i in range(task * size, min(task * size + size, step.n_last)):
            values = step.hidden + load_i32(step.last + 4 * i) * step.hidden_stride
            row = step.activations + i * step.activations_stride
            normalize_quantize(values, model.output_norm, model.width, model.rms_eps, row)
        task = take(team, turn, phase, task, n_tasks)


def _forward(team: int, thread: int, models: Any, layers: Any, steps: Any) -> None:
    """A thread's part of the open step; the records are those of ``layout``, one of model and step each."""
    turn = current_step(team)
    model, step = models[0], steps[0]
    n = step.n_tokens
    scratch = step.scratch + thread * step.scratch_bytes
    projected, wide = step.projected, step.projected_stride
    hidden, narrow = step.hidden, step.hidden_stride
    _embed(model, step, team, turn, 0)
    phase = 1
    for i in range(len(layers)):
        layer = layers[i]
        _normalize(model, step, team, turn, phase, layer.attention_norm)
        _multiply(layer.qkv, step, team, turn, phase + 1, projected, wide, n, 0)
        _rope_store(model, step, team, turn, phase + 2, i)
        _attend(model, step, team, turn, phase + 3, i, scratch)
        _multiply(layer.attention_out, step, team, turn, phase + 4, hidden, narrow, n, 1)
        _normalize(model, step, team, turn, phase + 5, layer.ffn_norm)
        _multiply(layer.gate_up, step, team, turn, phase + 6, projected, wide, n, 0)
        _gate(model, step, team, turn, phase + 7)
        _multiply(layer.down, step, team, turn, phase + 8, hidden, narrow, n, 1)
        phase += 9
    if step.n_last > 0:
        _normalize_last(model, step, team, turn, phase)
        _multiply(model.head, step, team, turn, phase + 1, step.logits, step.logits_stride, step.n_last, 0)


forward = cached_kernel(_forward)
