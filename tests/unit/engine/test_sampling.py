"""Every parameter against its definition, the draws against their distribution, rows against their neighbours."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenmill.worker.engine import Batch, ContinuousBatcher, GenerationParams
from tokenmill.worker.engine.request import Request, TokenLogprobs
from tokenmill.worker.engine.sampling import _GOLDEN_GAMMA, _mix, sample, uniforms
from tokenmill.worker.engine.slots import NO_TOKEN, SlotTable

from .fakes import EOS, FakeModel, distribution, edit, uniform

LOGITS = np.array([1.9, -0.4, 3.1, 3.1, 0.0, 2.2, -2.5, 1.0, 2.9, 0.7], np.float32)
PROMPT, OUTPUT = [2, 6, 6], [3, 8, 8, 8, 1]


def table_of(*requests: dict[str, Any]) -> SlotTable:
    """A table with one running request a slot; they all have the same prompt and output."""
    table = SlotTable(len(requests), (EOS,))
    for slot, fields in enumerate(requests):
        params = GenerationParams(**fields)
        prompt, output = np.array(PROMPT, np.int32), np.array(fields.get("output", OUTPUT), np.int32)
        table.admit(slot, Request(slot, None, prompt, output, params, (params.seed or 0) % 2**64, None), slot, slot)
    return table


def sample_all(table: SlotTable, logits: NDArray[np.float32]) -> tuple[list[int], dict[int, TokenLogprobs]]:
    slots = np.arange(len(table.handle))
    tokens, logprobs = sample(logits, logits.argmax(axis=1).astype(np.int32), table, slots)
    return tokens.tolist(), logprobs


def draws(logits: NDArray[np.float32], n: int, **fields: Any) -> list[int]:
    """Tokens of n requests that differ in the seed only."""
    table = table_of(*({"seed": seed, **fields} for seed in range(n)))
    return sample_all(table, np.tile(logits, (n, 1)))[0]


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 99},
    {"temperature": 1.0, "top_p": 0.2},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 4},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1.0, "logit_bias": {4: 3.0, 2: -1.0}},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "repetition_penalty": 0.6},
    {"temperature": 1.0, "presence_penalty": 0.8},
    {"temperature": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": -0.5, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": [2, 5]},
    {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": [2], "ignore_eos": True},
    {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": [2]},
]


@pytest.mark.parametrize("fields", PARAMETERS, ids=str)
def test_draws_follow_the_distribution_that_the_parameters_define(fields: dict[str, Any]) -> None:
    n = 4000
    params = GenerationParams(**fields)
    weights = np.array(distribution(edit(LOGITS.tolist(), PROMPT, OUTPUT, params, (EOS,)), params))
    expected = n * weights / weights.sum()
    seen = np.bincount(draws(LOGITS, n, **fields), minlength=len(LOGITS))
    assert not seen[expected == 0].any()
    kept = expected > 0
    chi_square = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    # Wilson and Hilferty: the cube root is about normal; 4 standard deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 0
    assert chi_square <= limit


@pytest.mark.parametrize("fields", [fields for fields in PARAMETERS if len(fields) > 1], ids=str)
def test_without_temperature_the_edited_logits_are_searched_for_the_largest(fields: dict[str, Any]) -> None:
    params = GenerationParams(**{**fields, "temperature": 0.0})
    edited = edit(LOGITS.tolist(), PROMPT, OUTPUT, params, (EOS,))
    assert draws(LOGITS, 2, **{**fields, "temperature": 0.0}) == [edited.index(max(edited))] * 2


def test_equal_logits_at_the_border_of_top_k_and_top_p_stay_together() -> None:
    logits = np.array([1, 1, 1, 0, 5], np.float32)
    assert set(draws(logits, 300, temperature=5.0, top_k=2)) == {0, 1, 2, 4}
    assert set(draws(logits, 300, temperature=5.0, top_p=0.5)) == {0, 1, 2, 4}


def test_top_p_counts_shares_among_what_top_k_left() -> None:
    logits = np.log(np.array([0.3, 0.25, 0.2, 0.15, 0.1], np.float32))
    assert set(draws(logits, 200, temperature=1.0, top_k=2, top_p=0.54)) == {0}
    assert set(draws(logits, 200, temperature=1.0, top_k=2, top_p=0.56)) == {0, 1}
    assert set(draws(logits, 200, temperature=1.0, top_p=0.54)) == {0, 1}


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, 0.9999, 1 - 1e-16])
def test_top_p_keeps_the_smallest_sufficient_set_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    vocab_size = 20_001
    logits = (np.random.default_rng(5).normal(size=vocab_size) * spread).astype(np.float32)
    ordered = np.sort(logits.astype(np.float64))[::-1]
    shares = np.exp(ordered).cumsum() / np.exp(ordered).sum()
    n_kept = min(int((shares < top_p).sum()) + 1, vocab_size)
    tokens = np.array(draws(logits, 40, temperature=1.0, top_p=top_p))
    assert logits[tokens].min() >= ordered[n_kept - 1] - 1e-4
    cumulative = np.where(
        logits >= ordered[n_kept - 1] - (1e-7 if spread else 0), np.exp(logits, dtype=float), 0
    ).cumsum()
    targets = [uniform(seed, len(OUTPUT)) * cumulative[-1] for seed in range(40)]
    assert tokens.tolist() == np.searchsorted(cumulative, targets, side="right").tolist()


def test_a_row_gets_the_same_token_whatever_its_neighbours() -> None:
    rng = np.random.default_rng(11)
    rows = 24
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.3, 1.0, 4.0],
        "top_k": [0, 1, 50, 3000],
        "top_p": [1.0, 0.5, 0.99],
        "min_p": [0.0, 0.05],
        "repetition_penalty": [1.0, 1.3],
        "frequency_penalty": [0.0, 0.4],
        "logprobs": [None, 0, 5],
        "min_tokens": [0, 50],
    }
    requests = [
        {"seed": i, **{name: values[rng.integers(len(values))] for name, values in choices.items()}}
        for i in range(rows)
    ]
    logits = (rng.normal(size=(rows, 5003)) * 3).round(2).astype(np.float32)
    together, together_logprobs = sample_all(table_of(*requests), logits)
    for i, fields in enumerate(requests):
        alone, logprobs = sample_all(table_of(fields), logits[i : i + 1])
        assert alone == [together[i]]
        assert logprobs.get(0) == together_logprobs.get(i)


def test_the_logits_are_not_written_to() -> None:
    logits = np.tile(LOGITS, (2, 1))
    logits.flags.writeable = False
    sample_all(table_of({"logit_bias": {1: 9.0}, "repetition_penalty": 1.5}, {"temperature": 1.0, "top_k": 2}), logits)
    assert (logits == LOGITS).all()


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    fields = {"logit_bias": {6: 50.0}, "logprobs": 3}
    _, logprobs = sample_all(table_of(fields, {}, {"logprobs": 0}, {"logprobs": 99}), np.tile(LOGITS, (4, 1)))
    expected = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert logprobs.keys() == {0, 2, 3}
    assert (logprobs[0].token_id, [token for token, _ in logprobs[0].top]) == (6, [2, 3, 8])
    assert logprobs[0].logprob == pytest.approx(expected[6], abs=1e-6)
    assert [value for _, value in logprobs[0].top] == pytest.approx(expected[[2, 3, 8]], abs=1e-6)
    assert (logprobs[2].token_id, logprobs[2].top) == (2, [])
    assert sum(math.exp(value) for _, value in logprobs[3].top) == pytest.approx(1)
    assert len(logprobs[3].top) == len(LOGITS)


def test_log_probabilities_of_equal_logits_list_the_lower_token_first() -> None:
    _, logprobs = sample_all(table_of({"logprobs": 2}), np.array([[0, 1, 1, 1, 0]], np.float32))
    assert [token for token, _ in logprobs[0].top] == [1, 2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_the_coldest_temperatures_choose_the_most_likely_token(temperature: float) -> None:
    logits = np.array([0, 3, 1, 2.9], np.float32)
    assert set(draws(logits, 50, temperature=temperature, top_p=0.9, min_p=0.1)) == {1}


def test_the_hottest_temperature_knows_no_favourite() -> None:
    counts = Counter(draws(np.array([0, 30, 1, -30], np.float32), 400, temperature=1e300, top_p=0.999999))
    assert min(counts.values()) > 60


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], np.float32)
    for fields in ({}, {"top_k": 4}, {"top_p": 0.9999999}, {"min_p": 1e-12}):
        assert set(draws(logits, 100, temperature=9.0, **fields)) == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_leave_nothing_to_choose_give_no_token(temperature: float) -> None:
    everything = {"min_tokens": 50, "stop_token_ids": list(range(10)), "temperature": temperature}
    table = table_of(everything, {"logit_bias": {3: 1e300}, "temperature": temperature}, {"logprobs": 1})
    tokens, logprobs = sample_all(table, np.tile(LOGITS, (3, 1)))
    assert tokens == [NO_TOKEN, NO_TOKEN, 2]
    assert logprobs.keys() == {2}


def test_a_request_that_leaves_nothing_to_choose_fails_alone() -> None:
    batcher = ContinuousBatcher(FakeModel(gives_logits=True), capacity=3)
    batcher.submit([1], max_tokens=2, min_tokens=2, request_id=0)
    batcher.submit([1], max_tokens=2, min_tokens=2, stop_token_ids=list(range(8)), request_id=1, logprobs=1)
    batcher.submit([1], max_tokens=2, min_tokens=2, request_id=2)
    ends = {f.request_id: (f.finish_reason, f.error) for f in batcher.run()}
    why = "logit_bias, penalties and min_tokens leave no token to choose"
    assert ends == {0: ("length", None), 1: ("error", why), 2: ("length", None)}


def test_random_numbers_are_those_of_splitmix64_whatever_the_batch() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 12345]
    counters = [0, 1, 7, 1000, 3]
    got = uniforms(np.array(seeds, np.uint64), np.array(counters, np.uint64)).tolist()
    assert got == [uniform(seed, counter) for seed, counter in zip(seeds, counters, strict=True)]


def test_the_mixing_function_gives_the_published_numbers_of_splitmix64() -> None:
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * _GOLDEN_GAMMA
    assert _mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("along", ["seeds", "counters"])
def test_random_numbers_of_near_seeds_and_counters_are_even_and_unrelated(along: str) -> None:
    n = 20_000
    count, zero = np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64)
    numbers = uniforms(count, zero) if along == "seeds" else uniforms(zero, count)
    assert ((numbers >= 0) & (numbers < 1)).all()
    bins = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((bins - n / 100) ** 2 / (n / 100)).sum() < 160
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 0.03


def test_logprobs_of_a_step_belong_to_the_requests_that_asked() -> None:
    model = FakeModel(gives_logits=True)
    batcher = ContinuousBatcher(model, capacity=3)
    handles = [batcher.submit([i], max_tokens=3, logprobs=1 if i == 1 else None, ignore_eos=True) for i in range(3)]
    step = batcher.step()
    assert step.logprobs.keys() == {handles[1]}
    entry = step.logprobs[handles[1]]
    assert entry.token_id == step.tokens[step.handles.tolist().index(handles[1])] == entry.top[0][0]


def test_negative_seeds_are_seeds_too() -> None:
    def output(seed: int) -> list[int]:
        batcher = ContinuousBatcher(FakeModel(vocab_size=500, gives_logits=True), capacity=1)
        batcher.submit([1], max_tokens=8, temperature=5.0, seed=seed, ignore_eos=True)
        return batcher.run()[0].output

    assert output(-1) == output(2**64 - 1) != output(1)


class Fixed(FakeModel):
    """The same logits for every prefix."""

    def forward(self, batch: Batch) -> Any:
        return np.tile(LOGITS, (int(batch.complete.sum()), 1))


def test_tokens_of_one_request_are_drawn_with_independent_numbers() -> None:
    batcher = ContinuousBatcher(Fixed(vocab_size=10, gives_logits=True), capacity=1)
    batcher.submit([1], max_tokens=3000, temperature=1.0, seed=4, ignore_eos=True)
    output = batcher.run()[0].output
    weights = np.exp(LOGITS.astype(np.float64))
    expected = 3000 * weights / weights.sum()
    assert ((np.bincount(output, minlength=10) - expected) ** 2 / expected).sum() < 30
    pairs = Counter(pairwise(output))
    assert pairs[2, 2] == pytest.approx(3000 * (weights[2] / weights.sum()) ** 2, rel=0.25)
