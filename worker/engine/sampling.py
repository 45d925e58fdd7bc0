"""Logits to tokens, vectorised over rows; every row's result depends on that row alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .request import TokenLogprobs
from .slots import NO_TOKEN, Bool, Float64, Int32, Int64, SlotTable

Float32 = NDArray[np.float32]
UInt64 = NDArray[np.uint64]

_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_BLOCK: Final = 2**18  # logits worked on at a time
_GROUP: Final = 64
_LOWEST: Final = np.finfo(np.float32).min
_COLDEST: Final = 1e-6  # lower temperatures would divide by zero in float32, and choose the same


def sample(logits: Float32, best: Int32, table: SlotTable, slots: Int64) -> tuple[Int32, dict[int, TokenLogprobs]]:
    """The next token of each slot ``[k]`` from its logits ``[k, V]``, of which ``best[k]`` are the arg-maxima.

    A token is NO_TOKEN where the request's parameters leave nothing to choose. Log-probabilities come by slot, for
    requests that asked. The logits are not written to.
    """
    tokens = best.copy()
    # Overflow is no surprise here: a huge bias makes an infinite logit, and `_choose` refuses to choose it.
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in _blocks(table.edits_logits[slots] | (table.temperature[slots] > 0), logits.shape[1]):
            tokens[rows] = _choose(logits[rows], table, slots[rows])
    logprobs: dict[int, TokenLogprobs] = {}
    for rows in _blocks((table.n_logprobs[slots] >= 0) & (tokens != NO_TOKEN), logits.shape[1]):
        logprobs |= _logprobs(logits[rows], tokens[rows], slots[rows], table.n_logprobs[slots[rows]])
    return tokens, logprobs


def _blocks(wanted: Bool, vocab_size: int) -> Iterator[Int64]:
    """The wanted rows, as many at a time as stay in the processor's cache."""
    rows = np.flatnonzero(wanted)
    size = max(1, _BLOCK // vocab_size)
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def uniforms(seeds: UInt64, counters: UInt64) -> Float64:
    """One number in [0, 1) for each (seed, counter).

    SplitMix64 (Steele, Lea and Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): the seed is mixed
    to the state of a generator, whose output number ``counter`` is read directly, the state being a mere counter.
    """
    states = _mix(seeds + _GOLDEN_GAMMA) + (counters + np.uint64(1)) * _GOLDEN_GAMMA
    return (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: UInt64) -> UInt64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _choose(logits: Float32, table: SlotTable, slots: Int64) -> Int32:
    """The next tokens ``[k]``; writes into the logits."""
    _edit(logits, table, slots)
    tokens: Int32 = logits.argmax(axis=1).astype(np.int32)
    tops = logits[np.arange(len(slots)), tokens]
    tokens[~np.isfinite(tops)] = NO_TOKEN
    rows = np.flatnonzero((table.temperature[slots] > 0) & (tokens != NO_TOKEN))
    if rows.size:
        tokens[rows] = _draw(logits[rows], tops[rows], table, slots[rows])
    return tokens


def _edit(logits: Float32, table: SlotTable, slots: Int64) -> None:
    """Apply logit bias, penalties and min_tokens in place, to the rows that ask for them."""
    if not table.edits_logits[slots].any():
        return
    rows, columns = np.nonzero(table.bias_tokens[slots] != NO_TOKEN)
    logits[rows, table.bias_tokens[slots[rows], columns]] += table.bias_values[slots[rows], columns].astype(np.float32)
    _penalise_repetition(logits, table, slots)
    _penalise_presence(logits, table, slots)
    rows = np.flatnonzero(table.n_output(slots) < table.min_tokens[slots])
    if rows.size:
        eos_rows = rows[~table.ignore_eos[slots[rows]]]
        logits[eos_rows[:, None], table.eos_token_ids] = -np.inf
        at, columns = np.nonzero(table.stop_tokens[slots[rows]] != NO_TOKEN)
        logits[rows[at], table.stop_tokens[slots[rows[at]], columns]] = -np.inf


def _penalise_repetition(logits: Float32, table: SlotTable, slots: Int64) -> None:
    """Divide positive and multiply negative logits of tokens in prompt or output (Keskar et al.: CTRL, 2019)."""
    rows = np.flatnonzero(table.repetition_penalty[slots] != 1)
    if rows.size:
        at, tokens, _ = _token_counts(table, slots[rows], np.zeros(len(rows), np.int64), logits.shape[1])
        penalty = table.repetition_penalty[slots[rows[at]]].astype(np.float32)
        values = logits[rows[at], tokens]
        logits[rows[at], tokens] = np.where(values > 0, values / penalty, values * penalty)


def _penalise_presence(logits: Float32, table: SlotTable, slots: Int64) -> None:
    """Lower the logits of output tokens, once each and once per occurrence (as the OpenAI API defines it)."""
    rows = np.flatnonzero((table.presence_penalty[slots] != 0) | (table.frequency_penalty[slots] != 0))
    if rows.size:
        at, tokens, counts = _token_counts(table, slots[rows], table.prompt_length[slots[rows]], logits.shape[1])
        of = slots[rows[at]]
        lowered = table.presence_penalty[of] + table.frequency_penalty[of] * counts
        logits[rows[at], tokens] -= lowered.astype(np.float32)


def _token_counts(table: SlotTable, slots: Int64, first: Int64, vocab_size: int) -> tuple[Int64, Int64, Int64]:
    """Distinct (row, token, occurrences) among each slot's tokens from position ``first`` on."""
    lengths = table.length[slots]
    positions = np.arange(lengths.max())
    inside = (positions >= first[:, None]) & (positions < lengths[:, None])
    rows, columns = np.nonzero(inside)
    keys, counts = np.unique(rows * vocab_size + table.tokens[slots[rows], columns], return_counts=True)
    return keys // vocab_size, keys % vocab_size, counts


def _draw(logits: Float32, tops: Float32, table: SlotTable, slots: Int64) -> Int32:
    """Draw one token per row from its tempered, truncated distribution.

    The inverse of the cumulative distribution in vocabulary order, so that neither ties nor sorting matter.
    """
    temperature = np.maximum(table.temperature[slots], _COLDEST)
    floor = _floors(logits, tops, temperature, table, slots)
    ids = np.broadcast_to(np.arange(logits.shape[1], dtype=np.int32), logits.shape)
    if (floor > _LOWEST).any():
        logits, ids = _compact(logits, logits >= floor[:, None])
    cumulative = _weights(logits, tops, temperature).cumsum(axis=1)
    total = cumulative[:, -1]
    target = uniforms(table.seed[slots], table.n_output(slots).astype(np.uint64)) * total
    target = np.minimum(target, np.nextafter(total, 0))  # the product may round up to the total
    drawn: Int32 = ids[np.arange(len(slots)), (cumulative <= target[:, None]).sum(axis=1)]
    return drawn


def _floors(logits: Float32, tops: Float32, temperature: Float64, table: SlotTable, slots: Int64) -> Float32:
    """The smallest logit that top-k, then top-p, then min-p keep in each row ``[k]``; equal logits stay together."""
    floor = np.full(len(slots), _LOWEST, np.float32)
    top_k, top_p, min_p = table.top_k[slots], table.top_p[slots], table.min_p[slots]
    rows = np.flatnonzero((top_k > 0) & (top_k < logits.shape[1]))
    if rows.size:
        floor[rows] = _kth_largest(logits[rows], top_k[rows])
    rows = np.flatnonzero(top_p < 1)
    if rows.size:
        floor[rows] = _nucleus(logits[rows], tops[rows], temperature[rows], top_p[rows], floor[rows])
    rows = np.flatnonzero(min_p > 0)
    if rows.size:
        least = tops[rows] + temperature[rows] * np.log(min_p[rows])
        floor[rows] = np.maximum(floor[rows], least.astype(np.float32))
    return floor


def _kth_largest(logits: Float32, k: Int64) -> Float32:
    """The k-th largest value of each row; 1 ≤ k ≤ V."""
    most = int(k.max())
    n_groups = logits.shape[1] // _GROUP
    if most <= n_groups:
        # The k largest maxima of disjoint groups are k logits: the k-th largest logit is no smaller than the k-th of
        # them, and few logits are at or above that. Much faster than to partition all.
        maxima = logits[:, : n_groups * _GROUP].reshape(len(k), _GROUP, n_groups).max(axis=1)
        bound = np.partition(maxima, -most, axis=1)[:, -most]
        logits, _ = _compact(logits, logits >= bound[:, None])
    largest = np.partition(logits, -most, axis=1)[:, -most:]
    largest.sort(axis=1)
    kth: Float32 = largest[np.arange(len(k)), most - k]
    return kth


def _nucleus(logits: Float32, tops: Float32, temperature: Float64, top_p: Float64, floor: Float32) -> Float32:
    """The smallest logit of the smallest set of most likely tokens with a share ≥ top_p of those at or above floor."""
    weights = np.exp((logits - tops[:, None]) / temperature[:, None].astype(np.float32))
    weights *= logits >= floor[:, None]
    totals = weights.astype(np.float64).sum(axis=1)
    # Tokens that even all together have less than 1 - top_p are outside: the rest is few, and only that is sorted.
    negligible = 0.5 * (1 - top_p) * totals / logits.shape[1]
    values, _ = _compact(logits, weights >= negligible[:, None])
    values = -np.sort(-values, axis=1)
    cumulative = _weights(values, tops, temperature).cumsum(axis=1)
    # Rounding may keep the sum below the share wanted: then all are taken.
    wanted = np.minimum(top_p * totals, cumulative[:, -1])
    least: Float32 = values[np.arange(len(values)), (cumulative < wanted[:, None]).sum(axis=1)]
    return least


def _weights(values: Float32, tops: Float32, temperature: Float64) -> Float64:
    """Unnormalised probabilities; the most likely token has 1."""
    return np.exp((values.astype(np.float64) - tops[:, None]) / temperature[:, None])


def _compact(logits: Float32, keep: Bool) -> tuple[Float32, Int32]:
    """The kept logits of each row ``[k, n]`` in vocabulary order, padded with -inf, and their tokens."""
    kept = np.flatnonzero(keep)  # much faster than nonzero in two dimensions
    rows, tokens = np.divmod(kept, logits.shape[1])
    counts = np.bincount(rows, minlength=len(keep))
    columns = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    values = np.full((len(keep), counts.max()), -np.inf, np.float32)
    ids = np.full(values.shape, NO_TOKEN, np.int32)
    values[rows, columns] = logits[rows, tokens]
    ids[rows, columns] = tokens
    return values, ids


def _logprobs(logits: Float32, tokens: Int32, slots: Int64, n_top: Int64) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the chosen and of the most likely tokens, by slot."""
    tops = logits.max(axis=1)
    normaliser = tops + np.log(np.exp((logits - tops[:, None]).astype(np.float64)).sum(axis=1))
    chosen = logits[np.arange(len(slots)), tokens] - normaliser
    n_top = np.minimum(n_top, logits.shape[1])
    values, ids = _compact(logits, logits >= _kth_largest(logits, np.maximum(n_top, 1))[:, None])
    order = np.argsort(-values, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    values = np.take_along_axis(values, order, axis=1) - normaliser[:, None]
    return {
        slot: TokenLogprobs(token, logprob, list(zip(ids[i, :n].tolist(), values[i, :n].tolist(), strict=True)))
        for i, (slot, token, logprob, n) in enumerate(
            zip(slots.tolist(), tokens.tolist(), chosen.tolist(), n_top.tolist(), strict=True)
        )
    }
