"""A bad row fails alone; a sick model blames nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenmill.worker.engine import Batch, ContinuousBatcher, GenerationParams, ModelSickError

from .fakes import FakeModel, generate

POISON = 7
FAULTS = ["raise", "count", "value"]


def poisoned(fault: str, **fields: Any) -> FakeModel:
    return FakeModel(fault=lambda prefix: fault if prefix[0] == POISON else None, **fields)


@pytest.mark.parametrize("gives_logits", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_guilty_rows_fail(fault: str, gives_logits: bool) -> None:
    model = poisoned(fault, gives_logits=gives_logits)
    batcher = ContinuousBatcher(model, capacity=16)
    prompts = [[POISON, i % 7] if i in (0, 5, 6, 11) else [i % 7, i % 5] for i in range(12)]
    for i, prompt in enumerate(prompts):
        batcher.submit(prompt, request_id=i, max_tokens=6)
    for finished in batcher.run():
        prompt = prompts[finished.request_id]
        alone = generate(model, prompt, [], GenerationParams(max_tokens=6))
        assert (finished.finish_reason, finished.output) == (alone.finish_reason, alone.output)
        assert (finished.error is not None) == (prompt[0] == POISON)
        assert "\n" not in (finished.error or "")


@pytest.mark.parametrize("n_poison", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_that_fail_with_nobody_beside_them_do_not_take_a_healthy_model_down(fault: str, n_poison: int) -> None:
    model = poisoned(fault)
    batcher = ContinuousBatcher(model, capacity=4)
    for _ in range(n_poison):
        batcher.submit([POISON, 1], output=[2])
    for _ in range(4):
        batcher.submit([1, 2], max_tokens=3)
    finished = batcher.run()
    assert [f.finish_reason for f in finished].count("error") == n_poison
    assert [f.output for f in finished if f.finish_reason == "error"] == [[2]] * n_poison


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_at_the_best_token_are_an_error(value: float) -> None:
    class Broken(FakeModel):
        def forward(self, batch: Batch) -> Any:
            logits = super().forward(batch)
            logits[batch.contexts[batch.complete] == 1] = value
            return logits

    batcher = ContinuousBatcher(Broken(gives_logits=True), capacity=3)
    for i in range(3):
        batcher.submit([i], max_tokens=2, ignore_eos=True, request_id=i)
    ends = {f.request_id: (f.finish_reason, f.error) for f in batcher.run()}
    assert ends == {0: ("length", None), 1: ("error", "the model's logits are not finite"), 2: ("length", None)}


@pytest.mark.parametrize("token", [-1, 8])
def test_a_token_outside_the_vocabulary_is_an_error(token: int) -> None:
    class Broken(FakeModel):
        def forward(self, batch: Batch) -> Any:
            return np.where(batch.contexts == 1, token, 3)

    batcher = ContinuousBatcher(Broken(), capacity=2)
    batcher.submit([1], max_tokens=1, request_id=0)
    batcher.submit([1], max_tokens=1, request_id=1)
    ends = {f.request_id: f.error for f in batcher.run()}
    assert ends == {0: None, 1: "the model answered a token id outside its vocabulary"}


def test_logits_masked_by_the_model_are_no_fault() -> None:
    class Masked(FakeModel):
        def forward(self, batch: Batch) -> Any:
            logits = super().forward(batch)
            logits[:, :6] = -np.inf
            return logits

    batcher = ContinuousBatcher(Masked(gives_logits=True), capacity=2)
    batcher.submit([1], max_tokens=4)
    batcher.submit([1], max_tokens=40, temperature=50.0, top_p=0.99)
    assert {token for f in batcher.run() for token in f.output} == {6, 7}


class Patient(FakeModel):
    """A model that can fall ill: it fails on everything, and forgets what it knew."""

    sick = False

    def forward(self, batch: Batch) -> Any:
        if self.sick:
            self.cache.clear()
            raise RuntimeError("out of order")
        return super().forward(batch)


def test_a_sick_model_blames_nobody_and_loses_nothing() -> None:
    model = Patient(vocab_size=50)
    batcher = ContinuousBatcher(model, capacity=2)
    seen: list[Any] = []
    handles = [batcher.submit([i], max_tokens=6, request_id=i, callback=seen.append) for i in range(4)]
    batcher.step()
    batcher.cancel(handles[3])
    model.sick = True
    for _ in range(2):
        with pytest.raises(ModelSickError, match="fails on every request, and on a single token: RuntimeError: out of"):
            batcher.step()
        assert (batcher.running(), batcher.waiting()) == (handles[:2], [handles[2]])
        assert not seen
    assert not batcher.idle
    model.sick = False
    step = batcher.step()
    assert [f.finish_reason for f in step.finished] == ["cancelled"]
    assert seen == step.finished


def test_after_a_failed_health_check_the_emptied_slot_is_computed_anew() -> None:
    class Faulty(FakeModel):
        failing = False

        def forward(self, batch: Batch) -> Any:
            answer = super().forward(batch)
            if self.failing:
                raise RuntimeError("out of order")
            return answer

    model = Faulty(vocab_size=50)
    batcher = ContinuousBatcher(model, capacity=2)
    for i in range(2):
        batcher.submit([i, 2, 3], max_tokens=6, request_id=i)
    batcher.step()
    batcher.step()
    model.failing = True
    with pytest.raises(ModelSickError):
        batcher.step()
    model.failing = False
    for finished in batcher.run():
        assert (
            finished.output == generate(model, [finished.request_id, 2, 3], [], GenerationParams(max_tokens=6)).output
        )


def test_a_model_that_cannot_even_empty_a_slot_is_sick() -> None:
    class Stuck(FakeModel):
        def truncate(self, slot: int, length: int) -> None:
            raise OSError("device lost")

    batcher = ContinuousBatcher(Stuck(fault=lambda prefix: "raise"), capacity=1)
    handle = batcher.submit([1])
    with pytest.raises(ModelSickError, match="OSError: device lost"):
        batcher.step()
    assert batcher.running() == [handle]


def test_a_failure_that_passes_costs_nobody_anything() -> None:
    class Hiccup(FakeModel):
        def forward(self, batch: Batch) -> Any:
            answer = super().forward(batch)
            if len(self.calls) == 2:
                raise MemoryError("try fewer rows")
            return answer

    model = Hiccup(vocab_size=50)
    batcher = ContinuousBatcher(model, capacity=5)
    for i in range(5):
        batcher.submit([i], max_tokens=4, request_id=i)
    for finished in batcher.run():
        assert finished.output == generate(model, [finished.request_id], [], GenerationParams(max_tokens=4)).output


def test_a_prefill_chunk_that_succeeds_shows_that_the_model_is_well() -> None:
    model = poisoned("raise")
    batcher = ContinuousBatcher(model, capacity=2, max_step_tokens=4)
    batcher.submit([POISON])
    long = batcher.submit([1] * 9, max_tokens=1)
    step = batcher.step()
    assert [f.finish_reason for f in step.finished] == ["error"]
    assert [len(batch.tokens) for batch in model.calls] == [4, 1, 3], "both rows, each alone, and no health check"
    assert batcher.running() == [long]


def test_an_interrupt_during_the_model_call_leaves_a_step_that_can_be_repeated() -> None:
    interrupts = [True]

    def interrupt(batch: Batch) -> None:
        if interrupts:
            interrupts.clear()
            raise KeyboardInterrupt

    model = FakeModel(before=interrupt)
    batcher = ContinuousBatcher(model, capacity=1)
    batcher.submit([1, 2], max_tokens=5)
    with pytest.raises(KeyboardInterrupt):
        batcher.step()
    [finished] = batcher.run()
    assert finished.output == generate(model, [1, 2], [], GenerationParams(max_tokens=5)).output


@pytest.mark.parametrize(
    "answer",
    [
        np.zeros((2, 7), np.float32),
        np.zeros((3, 8), np.float32),
        np.zeros((2, 8), np.int64),
        np.zeros(2),
        np.zeros((2, 8), np.complex64),
        None,
    ],
)
def test_logits_of_the_wrong_shape_or_kind_are_a_failure_of_the_model(answer: Any) -> None:
    class Wrong(FakeModel):
        def forward(self, batch: Batch) -> Any:
            return answer

    batcher = ContinuousBatcher(Wrong(gives_logits=True), capacity=2)
    batcher.submit([1])
    batcher.submit([2])
    with pytest.raises(ModelSickError):
        batcher.step()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_logits_of_any_float_kind_are_taken_and_not_written_to(dtype: Any) -> None:
    class ReadOnly(FakeModel):
        def forward(self, batch: Batch) -> Any:
            logits = super().forward(batch).astype(dtype)
            logits.flags.writeable = False
            return logits

    fields: dict[str, Any] = {"max_tokens": 5, "repetition_penalty": 1.5, "temperature": 0.7, "seed": 3, "logprobs": 2}
    outputs = []
    for model in (FakeModel(gives_logits=True), ReadOnly(gives_logits=True)):
        batcher = ContinuousBatcher(model, capacity=1)
        batcher.submit([1], **fields)
        outputs.append(batcher.run()[0].output)
    assert outputs[0] == outputs[1] or dtype is np.float16
