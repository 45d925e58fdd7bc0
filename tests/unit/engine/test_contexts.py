"""Contexts outlive their requests: what is shared, what is waited for, what goes when memory is short."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.worker.engine import Batch, ContinuousBatcher, Finished, GenerationParams, ModelSickError, Step

from .fakes import CachingFakeModel, generate

SYSTEM = [1 + i * i % 97 for i in range(300)]
VOCAB = 100


def batcher_of(model: CachingFakeModel, capacity: int, **fields: Any) -> ContinuousBatcher:
    return ContinuousBatcher(model, capacity, **fields)


def model_of(**fields: Any) -> CachingFakeModel:
    return CachingFakeModel(**{"vocab_size": VOCAB, "eos_token_ids": (), "n_contexts": 8, **fields})


def starts(model: CachingFakeModel) -> list[list[int]]:
    return [batch.starts.tolist() for batch in model.calls]


def n_computed(model: CachingFakeModel) -> int:
    return sum(len(batch.tokens) for batch in model.calls)


def check_outputs(finished: list[Finished], model: CachingFakeModel, prompts: list[list[int]], **fields: Any) -> None:
    assert len(finished) == len(prompts)
    for end in finished:
        assert end.output == generate(model, prompts[end.request_id], [], GenerationParams(**fields)).output


def test_requests_admitted_together_compute_a_shared_beginning_once() -> None:
    model = model_of(n_contexts=64)
    batcher = batcher_of(model, 64, max_step_tokens=128)
    prompts = [[*SYSTEM, i, i] for i in range(64)]
    for i, prompt in enumerate(prompts):
        batcher.submit(prompt, request_id=i, max_tokens=2)
    assert [batcher.step().n_rows for _ in range(2)] == [1, 1]
    check_outputs(batcher.run(), model, prompts, max_tokens=2)
    assert batcher.n_reused == 63 * 300
    assert n_computed(model) == 300 + 64 * 2 + 64


def test_a_request_begins_with_what_an_earlier_one_left_but_always_computes_its_last_token() -> None:
    model = model_of()
    batcher = batcher_of(model, 1)
    prompt = SYSTEM[:24]
    for _ in range(2):
        batcher.submit(prompt, max_tokens=1)
        batcher.run()
    assert starts(model) == [[0], [20]]  # 23 tokens may be shared, and blocks have 4
    assert batcher.n_reused == 20
    batcher.submit(SYSTEM[:9] + SYSTEM[30:40], max_tokens=1)
    batcher.run()
    assert starts(model)[-1] == [8]


def test_a_conversation_goes_on_from_its_last_answer() -> None:
    model = model_of(block=1)
    batcher = batcher_of(model, 1)
    batcher.submit(SYSTEM[:10], max_tokens=5)
    [first] = batcher.run()
    batcher.submit(SYSTEM[:10] + first.output + [7, 7], max_tokens=5)
    batcher.run()
    assert batcher.n_reused == 14, "all but the last output token was computed"


def test_requests_that_share_little_do_not_wait_for_each_other() -> None:
    model = model_of()
    batcher = batcher_of(model, 2)
    for last in (50, 51):
        batcher.submit([*SYSTEM[:15], last, last], max_tokens=1)
    assert batcher.step().n_rows == 2


def test_the_one_who_waits_shares_what_there_is_when_the_other_ends_early() -> None:
    model = model_of()
    batcher = batcher_of(model, 3, max_step_tokens=40)
    first = batcher.submit(SYSTEM, max_tokens=1, request_id=0)
    batcher.submit([*SYSTEM[:200], 5], max_tokens=1, request_id=1)
    batcher.submit([*SYSTEM[:100], 6], max_tokens=1, request_id=2)
    batcher.step()
    batcher.cancel(first)
    ends = batcher.run()
    assert [end.finish_reason for end in ends] == ["cancelled", "length", "length"]
    assert starts(model)[1] == [40], "the second goes on from there, and the third waits for the second"
    assert batcher.n_reused == 40 + 100


def test_what_a_failed_request_left_is_not_shared() -> None:
    bad = [*SYSTEM[:60], 99]
    model = model_of(fault=lambda prefix: "raise" if prefix == bad else None)
    batcher = batcher_of(model, 2, max_step_tokens=40)
    batcher.submit(bad, max_tokens=1)
    batcher.submit([9, 8, 7], max_tokens=9)
    assert [end.finish_reason for end in batcher.run()] == ["error", "length"]
    batcher.submit([*SYSTEM[:60], 5], max_tokens=1)
    batcher.run()
    assert batcher.n_reused == 0


def test_the_context_that_was_not_used_for_longest_is_emptied_first() -> None:
    model = model_of(n_contexts=3)
    batcher = batcher_of(model, 1)
    a, b, c = ([i] * 20 for i in (1, 2, 3))
    for prompt in (a, b, a, c):  # `c` takes the context of `b`, because the first `a` was used by the second
        batcher.submit(prompt, max_tokens=1)
        batcher.run()
    reused = batcher.n_reused
    for prompt, more in ((a, 16), (b, 0)):
        batcher.submit(prompt, max_tokens=1)
        batcher.run()
        assert batcher.n_reused - reused == more
        reused = batcher.n_reused


def test_memory_for_running_requests_is_taken_from_parked_ones() -> None:
    model = model_of(n_blocks=20)
    batcher = batcher_of(model, 1)
    for i in (1, 2, 3):
        batcher.submit([i] * 30, max_tokens=1)
        batcher.run()
    batcher.submit([4] * 76, max_tokens=1)
    batcher.run()
    assert batcher.n_preempted == 0
    batcher.submit([4] * 76, max_tokens=1)
    assert batcher.step().n_rows == 1


def test_a_preempted_request_goes_on_first_and_nobody_can_tell_from_its_reply() -> None:
    model = model_of(n_blocks=16, max_context=60)
    batcher = batcher_of(model, 3)
    prompts = [[1, 2], [3, 4, 5], [6, 7], [8, 9]]
    seen: list[Finished] = []
    handles = [
        batcher.submit(prompt, request_id=i, callback=seen.append, max_tokens=50) for i, prompt in enumerate(prompts)
    ]
    tokens: dict[int, list[int]] = {}
    until_preempted(batcher, tokens)
    assert batcher.running() == handles[:2]
    assert batcher.waiting() == handles[2:]
    while batcher.n_running == 2:
        record(batcher.step(), tokens)
    assert batcher.running() == handles[:1], "nothing is admitted as long as memory is short"
    while not batcher.idle:
        record(batcher.step(), tokens)
    check_outputs(seen, model, prompts, max_tokens=50)
    assert [end.request_id for end in seen] == [0, 1, 2, 3]
    assert [tokens[end.handle] for end in seen] == [end.output for end in seen]


def record(step: Step, tokens: dict[int, list[int]]) -> None:
    for handle, token in zip(step.handles.tolist(), step.tokens.tolist(), strict=True):
        tokens.setdefault(handle, []).append(token)


def until_preempted(batcher: ContinuousBatcher, tokens: dict[int, list[int]] | None = None) -> None:
    while not batcher.n_preempted:
        assert not batcher.idle, "nobody was preempted"
        record(batcher.step(), {} if tokens is None else tokens)


def test_a_preempted_request_can_be_cancelled_and_keeps_its_output() -> None:
    model = model_of(n_blocks=16, max_context=60)
    batcher = batcher_of(model, 2)
    batcher.submit([1, 2], max_tokens=50)
    young = batcher.submit([3, 4], max_tokens=50)
    until_preempted(batcher)
    n_blocks = model.n_used()
    batcher.cancel(young)
    [end] = batcher.step().finished
    assert (end.finish_reason, end.output) == ("cancelled", generate(model, [3, 4], [], GenerationParams()).output[:31])
    assert model.n_used() <= n_blocks


def test_a_preempted_request_shares_its_own_context_if_that_is_still_parked() -> None:
    model = model_of(n_blocks=12, max_context=90, block=8)
    batcher = batcher_of(model, 2)
    batcher.submit([1], max_tokens=48)  # ends in the step in which the other needs one block more than there are
    batcher.submit([3, 4], max_tokens=70)
    until_preempted(batcher)
    batcher.run()
    assert batcher.n_reused == 48


def test_a_request_is_not_admitted_where_it_would_be_preempted_at_once() -> None:
    model = model_of(n_blocks=30, max_context=120)
    batcher = batcher_of(model, 2)
    batcher.submit([1] * 60, max_tokens=9)
    batcher.submit([2] * 40, max_tokens=9)
    batcher.step()
    assert (batcher.n_running, batcher.n_waiting) == (1, 1)
    batcher.run()
    assert batcher.n_preempted == 0


def test_parked_contexts_stay_where_even_all_of_them_would_not_do() -> None:
    model = model_of(n_blocks=30, max_context=120)
    batcher = batcher_of(model, 2)
    batcher.submit([1] * 20, max_tokens=1)
    batcher.run()
    batcher.submit([2] * 60, max_tokens=9)
    batcher.submit([3] * 70, max_tokens=1)
    batcher.step()
    assert batcher.n_waiting == 1
    assert [1] * 20 in model.cache.values()


def test_sampled_requests_get_the_same_tokens_with_little_memory_as_with_much() -> None:
    outputs = []
    for n_blocks in (16, 1000):
        model = model_of(n_blocks=n_blocks, gives_logits=True, max_context=60)
        batcher = batcher_of(model, 4)
        for i in range(5):
            fields: dict[str, Any] = {"temperature": 2.0, "seed": i, "frequency_penalty": 0.5, "logprobs": 1}
            batcher.submit([i, 2], request_id=i, max_tokens=45, **fields)
        outputs.append({end.request_id: end.output for end in batcher.run()})
        assert (batcher.n_preempted > 0) == (n_blocks == 16)
    assert outputs[0] == outputs[1]


def test_a_model_with_fewer_contexts_than_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has 8 contexts, fewer than the capacity of 9"):
        batcher_of(model_of(), 9)


def test_requests_that_wait_for_a_sick_model_get_the_right_tokens_when_it_is_well() -> None:
    sick = [True]

    def fall_ill(batch: Batch) -> None:
        if sick and len(model.calls) > 2:
            raise RuntimeError("out of order")

    model = model_of(before=fall_ill)
    batcher = batcher_of(model, 4, max_step_tokens=40)
    prompts = [[*SYSTEM[:100], i] for i in range(4)]
    for i, prompt in enumerate(prompts):
        batcher.submit(prompt, request_id=i, max_tokens=4)
    with pytest.raises(ModelSickError):
        batcher.run()
    sick.clear()
    check_outputs(batcher.run(), model, prompts, max_tokens=4)


def test_a_new_batcher_finds_nothing_of_what_an_earlier_one_left() -> None:
    model = model_of(n_blocks=30, max_context=120)
    for _ in range(2):
        batcher = batcher_of(model, 2)
        batcher.submit([1] * 20, max_tokens=3)
        batcher.submit([1] * 20, max_tokens=3)
        batcher.run()
        assert batcher.n_reused < 20
