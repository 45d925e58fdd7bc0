"""Whatever the neighbours, the slots and the order: the batcher gives what the scalar engine gives alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.worker.engine import Batch, ContinuousBatcher, Finished, GenerationParams
from tokenmill.worker.engine.contexts import CachingContexts
from tokenmill.worker.engine.schedule import StepLimit
from tokenmill.worker.engine.slots import COLUMNS, MATRICES

from .fakes import CachingFakeModel, FakeModel, check, generate

VOCAB = 8
POISON = VOCAB - 1
COMMON = [token % (VOCAB - 1) for token in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3)]
tokens = st.integers(0, VOCAB - 2)
property_test = settings(max_examples=150, deadline=None, derandomize=True)


@dataclass
class Job:
    """One request of a random run."""

    prompt: list[int]
    params: GenerationParams
    output: list[int]
    arrival: int
    priority: int
    cancel_at: int | None
    fault: str | None
    fault_at: int  # the fault shows from this prefix length on


@st.composite
def stop_fields(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.integers(1, 12))
    return {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.one_of(st.just(0), st.integers(0, max_tokens))),
        "stop_token_ids": draw(st.lists(tokens, max_size=2)),
        "stop_sequences": draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3)),
        "ignore_eos": draw(st.booleans()),
        "include_stop": draw(st.booleans()),
    }


@st.composite
def sampling_fields(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 5, VOCAB, 100])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.05, 0.51, 0.93])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.11, 0.6])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 0.7, 1.9])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, -1.3, 0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, -0.4, 1.1])),
        "logit_bias": draw(st.dictionaries(tokens, st.sampled_from([-30.0, -1.7, 0.8, 2.2]), max_size=3)),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "logprobs": draw(st.sampled_from([None, None, 0, 3])),
    }


@st.composite
def jobs(draw: st.DrawFn, sampled: bool) -> Job:
    fault = draw(st.sampled_from([None, None, None, "raise", "count", "value"]))
    prompt = draw(st.lists(tokens, min_size=1, max_size=7))
    return Job(
        prompt=[POISON, *prompt] if fault else prompt,
        params=GenerationParams(**draw(stop_fields()), **(draw(sampling_fields()) if sampled else {})),
        output=draw(st.one_of(st.just([]), st.lists(tokens, max_size=5))),
        arrival=draw(st.integers(0, 8)),
        priority=draw(st.integers(0, 3)),
        cancel_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 12))),
        fault=fault,
        fault_at=draw(st.integers(2, 14)),
    )


@st.composite
def runs(draw: st.DrawFn, sampled: bool) -> dict[str, Any]:
    capacity = draw(st.one_of(st.integers(1, 4), st.integers(1, 64)))
    return {
        "todo": draw(st.lists(jobs(sampled), min_size=1, max_size=14)),
        "capacity": capacity,
        "chunk": draw(st.one_of(st.none(), st.integers(capacity + 1, capacity + 6))),
        "ordered": draw(st.booleans()),
        "max_context": draw(st.sampled_from([None, 9, 14])),
        "gives_logits": sampled,
    }


@st.composite
def long_jobs(draw: st.DrawFn) -> Job:
    """A request that begins as others do, and grows by more than what is left for it at its admission."""
    job = draw(jobs(sampled=True))
    common = COMMON[: draw(st.sampled_from([0, 9, 25, 25]))]
    job.prompt = job.prompt[:1] + common + job.prompt[1:] if job.fault else common + job.prompt
    job.cancel_at = draw(st.sampled_from([None, None, None, 3, 20, 40]))
    stops: dict[str, Any] = {"max_tokens": 40, "min_tokens": 0, "stop_token_ids": (), "stop_sequences": ()}
    job.params = replace(job.params, ignore_eos=draw(st.sampled_from([True, True, False])), **stops)
    return job


@st.composite
def caching_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Requests that begin alike, and memory for little more than the longest of them."""
    capacity = draw(st.integers(2, 5))
    block = draw(st.integers(1, 7))
    max_context = draw(st.sampled_from([33, 60, 75]))
    return {
        "todo": draw(st.lists(long_jobs(), min_size=3, max_size=8)),
        "capacity": capacity,
        "chunk": draw(st.one_of(st.none(), st.just("auto"), st.integers(capacity + 1, capacity + 20))),
        "ordered": draw(st.booleans()),
        "max_context": max_context,
        "gives_logits": True,
        "memory": {
            "n_contexts": capacity + draw(st.integers(0, 5)),
            "block": block,
            "n_blocks": -(-(max_context + draw(st.sampled_from([0, 5, 20, 50, 80, 120, 1000]))) // block),
            "copies": draw(st.booleans()),
        },
    }


class Run:
    """A batcher and its jobs; checks in every step what must always hold."""

    def __init__(
        self,
        todo: list[Job],
        capacity: int,
        chunk: StepLimit,
        ordered: bool,
        max_context: int | None,
        gives_logits: bool,
        memory: dict[str, Any] | None = None,
    ) -> None:
        self.todo, self.capacity, self.chunk, self.memory = todo, capacity, chunk, memory
        fields: Any = (VOCAB, gives_logits, max_context)
        functions: Any = {"before": self.check_call, "fault": self.fault_of}
        self.model = (
            FakeModel(*fields, **functions) if memory is None else CachingFakeModel(*fields, **functions, **memory)
        )
        self.batcher = ContinuousBatcher(
            self.model,
            capacity,
            max_step_tokens=chunk,
            admission_key=(lambda request: todo[request.request_id].priority) if ordered else None,
        )
        self.handles: dict[int, int] = {}  # number of the job → handle
        self.received: dict[int, list[int]] = {}  # by number
        self.finished: dict[int, Finished] = {}  # by number

    def fault_of(self, prefix: list[int]) -> str | None:
        for job in self.todo:
            if job.fault and prefix[: len(job.prompt)] == job.prompt and len(prefix) >= job.fault_at:
                return job.fault
        return None

    def check_call(self, batch: Batch) -> None:
        waits = self.memory is None and self.batcher.n_waiting and self.batcher.free_slots
        check(not waits, "a slot is free while a request waits")
        check(len(batch) <= self.batcher.n_running <= self.capacity, "more rows than running requests")
        check(not isinstance(self.chunk, int) or len(batch.tokens) <= self.chunk, "more tokens than max_step_tokens")

    def to_the_end(self) -> None:
        for now in range(1000):
            for number, job in enumerate(self.todo):
                if job.arrival == now and (self.model.max_context is None or len(job.prompt) < self.model.max_context):
                    self.submit(number, job)
                if job.cancel_at == now and number in self.handles:
                    assert self.batcher.cancel(self.handles[number]) == (number not in self.finished)
            self.step()
            if now >= 8 and self.batcher.idle:
                return
        raise AssertionError("the run does not end")

    def oldest(self) -> tuple[int, int] | None:
        """The handle of the oldest running request and the number of its tokens that are computed."""
        table = self.batcher._table
        slots = table.active()
        if not slots.size:
            return None
        slot = slots[table.serial[slots].argmin()]
        return int(table.handle[slot]), int(table.computed[slot])

    def submit(self, number: int, job: Job) -> None:
        self.handles[number] = self.batcher.submit(
            job.prompt, output=job.output, request_id=number, callback=self.record, params=job.params
        )
        self.received[number] = list(job.output)

    def record(self, finished: Finished) -> None:
        number = finished.request_id
        check(number not in self.finished, "finished twice")
        self.finished[number] = finished

    def step(self) -> None:
        numbers = {handle: number for number, handle in self.handles.items()}
        before = len(self.finished)
        oldest = self.oldest()
        step = self.batcher.step()
        assert oldest is None or self.oldest() != oldest, "the oldest request gets on in every step"
        assert len(set(step.handles.tolist())) == len(step.handles)
        assert len(step.finished) == len(self.finished) - before
        for handle, token in zip(step.handles.tolist(), step.tokens.tolist(), strict=True):
            self.received[numbers[handle]].append(token)
        asked = {h for h in step.handles.tolist() if self.todo[numbers[h]].params.logprobs is not None}
        assert step.logprobs.keys() == asked


def check_results(run: Run) -> None:
    assert run.finished.keys() == run.handles.keys(), "every request finishes exactly once"
    for number, finished in run.finished.items():
        job = run.todo[number]
        alone = generate(run.model, job.prompt, job.output, job.params)
        received = run.received[number]
        assert finished.handle == run.handles[number]
        assert finished.n_generated == len(received)
        if finished.finish_reason == "cancelled":
            assert job.cancel_at is not None
            assert received == finished.output == alone.generated[: len(received)]
        else:
            assert received == alone.generated
            assert (finished.output, finished.finish_reason) == (alone.output, alone.finish_reason)
            assert finished.stop_reason == alone.stop_reason
            assert (finished.error is not None) == (finished.finish_reason == "error")


def check_clean(batcher: ContinuousBatcher) -> None:
    """Nothing is left of any request."""
    for name, (_, empty) in COLUMNS.items():
        assert (getattr(batcher._table, name) == empty).all(), name
    for name, (_, empty, _) in MATRICES.items():
        assert (getattr(batcher._table, name) == empty).all(), name
    left = (batcher._running, batcher._cancels, batcher._finished, batcher._waiting._requests)
    assert not any(left)
    assert batcher.idle
    assert (batcher.n_running, batcher.n_waiting, batcher.free_slots) == (0, 0, batcher._capacity)


def check_parked(run: Run) -> None:
    """Every context is either parked, with the tokens that the model has there, or empty."""
    contexts, model = run.batcher._contexts, run.model
    assert isinstance(contexts, CachingContexts)
    assert isinstance(model, CachingFakeModel)
    parked = np.flatnonzero(contexts._lengths).tolist()
    assert sorted(parked + contexts._empty) == list(range(model.n_contexts))
    for context in parked:
        assert contexts._tokens[context, : contexts._lengths[context]].tolist() == model.cache[context]
    assert not any(model.blocks.get(context) for context in contexts._empty)
    assert run.batcher.n_reused == model.n_shared


@property_test
@given(runs(sampled=False))
def test_stops_faults_and_cancels_in_any_batch_end_as_they_do_alone(fields: dict[str, Any]) -> None:
    run = Run(**fields)
    run.to_the_end()
    check_results(run)
    check_clean(run.batcher)


@property_test
@given(runs(sampled=True))
def test_sampled_requests_in_any_batch_get_the_tokens_they_get_alone(fields: dict[str, Any]) -> None:
    run = Run(**fields)
    run.to_the_end()
    check_results(run)
    check_clean(run.batcher)


@property_test
@given(caching_runs())
def test_sharing_eviction_and_preemption_change_no_output(fields: dict[str, Any]) -> None:
    run = Run(**fields)
    run.to_the_end()
    check_results(run)
    check_clean(run.batcher)
    check_parked(run)


@property_test
@given(stop_fields(), sampling_fields(), st.lists(tokens, min_size=1, max_size=4), st.data())
def test_a_request_resumed_from_any_of_its_prefixes_goes_on_as_if_never_interrupted(
    stops: dict[str, Any], sampling: dict[str, Any], prompt: list[int], data: st.DataObject
) -> None:
    params = GenerationParams(**stops, **sampling)
    whole = ContinuousBatcher(FakeModel(VOCAB, gives_logits=True), capacity=1)
    whole.submit(prompt, params=params, request_id="whole")
    generated, done = [], []
    while not whole.idle:
        step = whole.step()
        generated += step.tokens.tolist()
        done += step.finished
    resumed = ContinuousBatcher(FakeModel(VOCAB, gives_logits=True), capacity=2)
    cut = data.draw(st.integers(0, len(generated)))
    resumed.submit(prompt, output=generated[:cut], params=params)
    [finished] = resumed.run()
    assert finished.output == done[0].output
    assert finished.n_generated == done[0].n_generated == len(generated)
    assert (finished.finish_reason, finished.stop_reason) == (done[0].finish_reason, done[0].stop_reason)
