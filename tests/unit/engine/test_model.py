"""A plain function as a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenmill.worker.engine import Batch, CallableModel, ContinuousBatcher, Model

from .fakes import FakeModel


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_a_function_gets_whole_prefixes_of_the_complete_rows_only() -> None:
    seen: list[list[list[int]]] = []

    def model_next(prefixes: list[list[int]]) -> list[int]:
        seen.append(prefixes)
        return [9] * len(prefixes)

    batcher = ContinuousBatcher(model_next, capacity=2, max_step_tokens=3)
    batcher.submit([1], max_tokens=3)
    batcher.submit([2, 3, 4, 5], max_tokens=1)
    batcher.run()
    assert seen == [[[1]], [[1, 9], [2, 3, 4, 5]], [[1, 9, 9]]]


def test_a_function_may_change_the_prefixes_it_gets() -> None:
    def greedy(prefixes: list[list[int]]) -> list[int]:
        answer = [len(prefix) for prefix in prefixes]
        for prefix in prefixes:
            prefix.clear()
        return answer

    batcher = ContinuousBatcher(greedy, capacity=1)
    batcher.submit([1, 1], max_tokens=3)
    assert batcher.run()[0].output == [2, 3, 4]


@pytest.mark.parametrize("answer", [[None], ["a"], [1.5], [-1], [2**31], [], [1, 2], None, 5])
def test_an_answer_that_is_no_token_fails_the_step_with_a_clear_line(answer: Any) -> None:
    def model_next(prefixes: list[list[int]]) -> Any:
        return answer if prefixes[0][0] == 7 else [3] * len(prefixes)

    batcher = ContinuousBatcher(model_next, capacity=1)
    batcher.submit([7])
    [finished] = batcher.run()
    assert finished.finish_reason == "error"
    assert "the model answered" in (finished.error or "")


def test_any_array_of_integers_will_do() -> None:
    batcher = ContinuousBatcher(lambda prefixes: np.array([4] * len(prefixes), np.uint16), capacity=1)
    batcher.submit(np.array([1, 2], np.uint8), max_tokens=2)  # type: ignore[arg-type]
    assert batcher.run()[0].output == [4, 4]


def test_a_row_that_starts_earlier_replaces_what_the_slot_held() -> None:
    seen: list[list[int]] = []

    def model_next(prefixes: list[list[int]]) -> list[int]:
        seen.extend(prefixes)
        return [0] * len(prefixes)

    model = CallableModel(model_next)
    for start, tokens in [(0, [1, 2, 3]), (3, [4]), (1, [5])]:
        model.forward(Batch(ints(0), ints(start), ints(len(tokens)), ints(*tokens), np.array([True])))
    model.truncate(0, 1)
    model.forward(Batch(ints(0), ints(1), ints(1), ints(6), np.array([True])))
    assert seen == [[1, 2, 3], [1, 2, 3, 4], [1, 5], [1, 6]]


def test_models_are_told_from_functions_and_from_anything_else() -> None:
    assert isinstance(FakeModel(), Model)
    assert isinstance(CallableModel(lambda prefixes: [0]), Model)
    with pytest.raises(TypeError, match="a model is a function of prefixes or an object with the Model protocol"):
        ContinuousBatcher("smollm2", capacity=1)  # type: ignore[arg-type]


def test_rows_of_a_batch_bring_their_own_tokens() -> None:
    batch = Batch(ints(4, 2, 7), ints(0, 5, 1), ints(2, 1, 3), ints(1, 2, 3, 4, 5, 6), np.array([True, False, True]))
    part = batch.rows(np.array([2, 0]))
    assert (part.contexts.tolist(), part.starts.tolist(), part.lengths.tolist()) == ([7, 4], [1, 0], [3, 2])
    assert (part.tokens.tolist(), part.complete.tolist()) == ([4, 5, 6, 1, 2], [True, True])
