"""Models that check their caller, and a slow scalar engine to compare the batcher with."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.worker.engine import Batch, FinishReason, GenerationParams, StopReason

EOS = 0


def next_token(prefix: Sequence[int], vocab_size: int) -> int:
    """A token that depends on the whole prefix."""
    return zlib.crc32(bytes(str(list(prefix)), "ascii")) % vocab_size


def logits_of(prefix: Sequence[int], vocab_size: int) -> NDArray[np.float32]:
    """Logits that depend on the whole prefix; rounded, so that ties occur."""
    return _logits(tuple(prefix), vocab_size).copy()


@lru_cache(maxsize=20_000)
def _logits(prefix: tuple[int, ...], vocab_size: int) -> NDArray[np.float32]:
    seed = zlib.crc32(bytes(str(prefix), "ascii"))
    return (np.random.default_rng(seed).normal(size=vocab_size) * 2).round(1).astype(np.float32)


class Misuse(BaseException):
    """A call that no model could serve; not an Exception, because the engine is to survive those."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Misuse(what)


@dataclass
class FakeModel:
    """Keeps each slot's tokens as a cache would, and refuses a call that its cache could not serve."""

    vocab_size: int | None = 8
    gives_logits: bool = False
    max_context: int | None = None
    eos_token_ids: tuple[int, ...] = (EOS,)
    before: Callable[[Batch], object] = lambda batch: None
    fault: Callable[[list[int]], str | None] = lambda prefix: None  # "raise", "count" or "value" for a poisoned prefix
    cache: dict[int, list[int]] = field(default_factory=dict)
    calls: list[Batch] = field(default_factory=list)

    def forward(self, batch: Batch) -> NDArray[Any]:
        self.before(batch)
        self.calls.append(batch)
        check(len(set(batch.contexts.tolist())) == len(batch) > 0, "rows of one slot")
        prefixes, first = [], 0
        for slot, start, length in zip(
            batch.contexts.tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True
        ):
            tokens = self.cache.setdefault(slot, [])
            check(0 <= start <= len(tokens), "the cache has not the tokens before the first one")
            check(length > 0, "a row without tokens")
            tokens[start:] = batch.tokens[first : first + length].tolist()
            first += length
            check(self.max_context is None or len(tokens) <= self.max_context, "more tokens than the context holds")
            prefixes.append(list(tokens))
        check(first == len(batch.tokens), "tokens of no row")
        faults = [self.fault(prefix) for prefix in prefixes]
        if "raise" in faults:
            raise RuntimeError("poisoned\nprefix")
        answers = [
            self._answer(prefix, fault)
            for prefix, fault, complete in zip(prefixes, faults, batch.complete, strict=True)
            if complete and fault != "count"
        ]
        if self.gives_logits:
            assert self.vocab_size is not None
            return np.array(answers, np.float32).reshape(-1, self.vocab_size)
        return np.array(answers, np.int64)

    def _answer(self, prefix: list[int], fault: str | None) -> Any:
        assert self.vocab_size is not None
        if self.gives_logits:
            logits = logits_of(prefix, self.vocab_size)
            if fault == "value":
                logits[len(prefix) % self.vocab_size] = np.nan
            return logits
        return self.vocab_size if fault == "value" else next_token(prefix, self.vocab_size)

    def truncate(self, slot: int, length: int) -> None:
        del self.cache.setdefault(slot, [])[length:]


class Block:
    """Memory for some tokens, which several contexts may hold."""


@dataclass
class CachingFakeModel(FakeModel):
    """Keeps contexts in blocks of a bounded memory, and refuses what would exceed it or was not there to share."""

    n_contexts: int = 8
    block: int = 4  # tokens
    n_blocks: int = 10**6
    copies: bool = False  # share takes memory of its own
    blocks: dict[int, list[Block]] = field(default_factory=dict)
    n_shared: int = 0  # tokens, over all calls

    def forward(self, batch: Batch) -> NDArray[Any]:
        for context, start, length in zip(
            batch.contexts.tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True
        ):
            self.check_number(context)
            held = self.blocks.setdefault(context, [])
            for i in range(start // self.block, -(-(start + length) // self.block)):
                held[i : i + 1] = [Block()]  # what others hold too is not written to
        self.check_memory()
        return super().forward(batch)

    def truncate(self, slot: int, length: int) -> None:
        self.check_number(slot)
        super().truncate(slot, length)
        del self.blocks.setdefault(slot, [])[-(-length // self.block) :]

    def share(self, source: int, target: int, length: int) -> int:
        self.check_number(source)
        self.check_number(target)
        check(0 < length <= len(self.cache[source]), "the source has not so many tokens")
        check(not self.cache.get(target) and not self.blocks.get(target), "the target is not empty")
        shared = length if self.copies else length // self.block * self.block
        n = -(-shared // self.block)
        self.cache[target] = self.cache[source][:shared]
        self.blocks[target] = [Block() for _ in range(n)] if self.copies else self.blocks[source][:n]
        self.n_shared += shared
        self.check_memory()
        return shared

    def shortage(self, contexts: NDArray[np.int32], ends: NDArray[np.int32]) -> int:
        check(len(set(contexts.tolist())) == len(contexts) > 0, "asked twice for one context")
        growth = 0
        for context, end in zip(contexts.tolist(), ends.tolist(), strict=True):
            self.check_number(context)
            check(self.max_context is None or end <= self.max_context, "asked for more than a context holds")
            growth += max(0, -(-end // self.block) - len(self.blocks.get(context, [])))
        return (self.n_used() + growth - self.n_blocks) * self.block

    def n_used(self) -> int:
        return len({id(block) for held in self.blocks.values() for block in held})

    def check_memory(self) -> None:
        check(self.n_used() <= self.n_blocks, "more memory than there is")

    def check_number(self, context: int) -> None:
        check(0 <= context < self.n_contexts, "no such context")


@dataclass
class Outcome:
    """What a request comes to when it is generated alone."""

    generated: list[int]
    output: list[int]
    finish_reason: FinishReason
    stop_reason: StopReason


def generate(model: FakeModel, prompt: list[int], output: list[int], params: GenerationParams) -> Outcome:
    """The whole engine for one request, one token at a time, in plain Python."""
    generated = list(output)
    while (ending := _ending(model, prompt, generated, params)) is None:
        prefix = prompt + generated
        if model.fault(prefix):
            return Outcome(generated, generated, "error", None)
        assert model.vocab_size is not None
        if model.gives_logits:
            logits = [float(x) for x in logits_of(prefix, model.vocab_size)]
            generated.append(choose(logits, prompt, generated, params, model.eos_token_ids))
        else:
            generated.append(next_token(prefix, model.vocab_size))
    finish_reason, stop_reason, n_stop = ending
    kept = generated if params.include_stop or not n_stop else generated[:-n_stop]
    return Outcome(generated, kept, finish_reason, stop_reason)


def _ending(
    model: FakeModel, prompt: list[int], generated: list[int], params: GenerationParams
) -> tuple[FinishReason, StopReason, int] | None:
    if not generated:
        return None
    if len(generated) >= params.min_tokens:
        if generated[-1] in model.eos_token_ids and not params.ignore_eos:
            return "stop", generated[-1], 1
        if generated[-1] in params.stop_token_ids:
            return "stop", generated[-1], 1
        for sequence in map(list, params.stop_sequences):
            if generated[-len(sequence) :] == sequence:
                return "stop", sequence, len(sequence)
    if len(generated) >= params.max_tokens:
        return "length", None, 0
    if model.max_context is not None and len(prompt) + len(generated) >= model.max_context:
        return "length", "context", 0
    return None


def choose(
    logits: list[float], prompt: list[int], generated: list[int], params: GenerationParams, eos_token_ids: Sequence[int]
) -> int:
    """One token by the definition of every parameter, each applied on its own."""
    edited = edit(logits, prompt, generated, params, eos_token_ids)
    if params.temperature == 0:
        return edited.index(max(edited))
    weights = distribution(edited, params)
    target = uniform(params.seed or 0, len(generated)) * sum(weights)
    passed = 0.0
    for token, weight in enumerate(weights):
        passed += weight
        if passed > target:
            return token
    raise AssertionError("the target lies beyond the distribution")


def edit(
    logits: list[float], prompt: list[int], generated: list[int], params: GenerationParams, eos_token_ids: Sequence[int]
) -> list[float]:
    """Bias, repetition penalty, presence and frequency penalties, min_tokens; in float32, as logits are."""
    edited = [np.float32(x) for x in logits]
    for token in range(len(edited)):
        edited[token] += np.float32(params.logit_bias.get(token, 0.0))
        if token in prompt or token in generated:
            penalty = np.float32(params.repetition_penalty)
            edited[token] = edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
        if token in generated:
            edited[token] -= np.float32(params.presence_penalty + params.frequency_penalty * generated.count(token))
        if len(generated) < params.min_tokens and (
            token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
        ):
            edited[token] = np.float32(-np.inf)
    return [float(x) for x in edited]


def distribution(logits: list[float], params: GenerationParams) -> list[float]:
    """Probabilities (not normalised) after temperature, top-k, top-p and min-p."""
    best = max(logits)
    weights = [math.exp((x - best) / params.temperature) for x in logits]
    if params.top_k:
        least = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [w if w >= least else 0.0 for w in weights]
    if params.top_p < 1:
        share, least = 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            share, least = share + weight / sum(weights), weight
            if share >= params.top_p:
                break
        weights = [w if w >= least else 0.0 for w in weights]
    return [w if w >= params.min_p * (1 - 1e-9) else 0.0 for w in weights]


def uniform(seed: int, counter: int) -> float:
    """SplitMix64 on Python integers: output ``counter`` of a generator whose state is the mixed seed."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    state = mix((seed + gamma) & mask)
    for _ in range(counter + 1):
        state = (state + gamma) & mask
    return (mix(state) >> 11) / 2**53
