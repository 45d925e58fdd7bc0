"""One step of a llama-family model: its phases, in the order in which every thread goes through them."""

from __future__ import annotations

from typing import Any

from tokenmill.worker.models.fast.attention import attend, rope_store
from tokenmill.worker.models.fast.gemm import multiply, weights_of
from tokenmill.worker.models.fast.kernel import cached_kernel, kernel
from tokenmill.worker.models.fast.quantize import gate_quantize, normalize_quantize, quantize
from tokenmill.worker.models.fast.team import current_step, phase
from tokenmill.worker.models.fast.vector import load_i32, load_i64

PHASES_PER_LAYER, OTHER_PHASES = 9, 3

_multiply = phase(multiply)


@phase
@kernel
def _embed(first, last, model, step):
    """Rows of the embedding, dequantised."""
    for token in range(first, last):
        weights_of(model.embedding, load_i32(step.ids + 4 * token), step.hidden + token * step.hidden_stride)


@phase
@kernel
def _normalize(first, last, model, step, weight):
    """RMS norm of the residual stream, quantised."""
    for token in range(first, last):
        values = step.hidden + token * step.hidden_stride
        row = step.activations + token * step.activations_stride
        normalize_quantize(values, weight, model.width, model.rms_eps, row)


@phase
@kernel
def _normalize_last(first, last, model, step):
    """The output norm of the tokens that logits are wanted for."""
    for i in range(first, last):
        values = step.hidden + load_i32(step.last + 4 * i) * step.hidden_stride
        row = step.activations + i * step.activations_stride
        normalize_quantize(values, model.output_norm, model.width, model.rms_eps, row)


@phase
@kernel
def _rope_store(first, last, model, step, layer):
    """Positions into queries and keys, keys and values into their blocks, for tokens of prompts."""
    for i in range(first, last):
        _rope_store_token(load_i32(step.prompt_tokens + 4 * i), model, step, layer)


@kernel
def _rope_store_token(token, model, step, layer):
    row = step.projected + token * step.projected_stride
    rope_store(model, layer, row, load_i32(step.positions + 4 * token), load_i64(step.token_tables + 8 * token))


@phase
@kernel
def _attend(first, last, model, step, layer, scratch):
    """Attention of some chunks, quantised."""
    stride = step.projected_stride
    for chunk in range(first, last):
        token, n_tokens = load_i32(step.chunk_starts + 4 * chunk), load_i32(step.chunk_lengths + 4 * chunk)
        if load_i32(step.chunk_is_row + 4 * chunk) != 0:  # nobody else needs its keys in this step
            _rope_store_token(token, model, step, layer)
        table = load_i64(step.chunk_tables + 8 * chunk)
        following = load_i64(step.chunk_tables + 8 * min(chunk + 1, step.n_chunks - 1))
        position, rows = load_i32(step.positions + 4 * token), step.projected + token * stride
        attend(model, layer, rows, stride, n_tokens, position, table, scratch, step.score_stride, following)
        for i in range(token, token + n_tokens):
            row = step.activations + i * step.activations_stride
            quantize(step.projected + i * stride, model.n_heads * model.head_dim, row)


@phase
@kernel
def _gate(first, last, model, step):
    """The gate of the feed-forward block, quantised."""
    for token in range(first, last):
        row = step.activations + token * step.activations_stride
        gate_quantize(step.projected + token * step.projected_stride, model.ffn_width, row)


@cached_kernel
def forward(team: int, thread: int, models: Any, layers: Any, steps: Any) -> None:
    """A thread's part of the open step; the records are those of ``layout``, one of model and step each."""
    turn = current_step(team)
    model, step = models[0], steps[0]
    n = step.n_tokens
    scratch = step.scratch + thread * step.scratch_bytes
    projected, wide = step.projected, step.projected_stride
    rows, stride = step.activations, step.activations_stride
    hidden, narrow = step.hidden, step.hidden_stride
    _embed(team, turn, 0, n, n, model, step)
    at = 1
    for i in range(len(layers)):
        layer = layers[i]
        qkv, out, gate_up, down = layer.qkv, layer.attention_out, layer.gate_up, layer.down
        _normalize(team, turn, at, n, n, model, step, layer.attention_norm)
        _multiply(team, turn, at + 1, qkv.n_panels, n, qkv, rows, stride, n, projected, wide, 0)
        _rope_store(team, turn, at + 2, step.n_prompt_tokens, n, model, step, i)
        _attend(team, turn, at + 3, step.n_chunks, n, model, step, i, scratch)
        _multiply(team, turn, at + 4, out.n_panels, n, out, rows, stride, n, hidden, narrow, 1)
        _normalize(team, turn, at + 5, n, n, model, step, layer.ffn_norm)
        _multiply(team, turn, at + 6, gate_up.n_panels, n, gate_up, rows, stride, n, projected, wide, 0)
        _gate(team, turn, at + 7, n, n, model, step)
        _multiply(team, turn, at + 8, down.n_panels, n, down, rows, stride, n, hidden, narrow, 1)
        at += PHASES_PER_LAYER
    n, head = step.n_last, model.head
    if n > 0:
        _normalize_last(team, turn, at, n, n, model, step)
        _multiply(team, turn, at + 1, head.n_panels, n, head, rows, stride, n, step.logits, step.logits_stride, 0)
