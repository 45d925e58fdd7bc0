"""What every backend must do: the same logits however the work is cut, and contexts that keep to themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.worker.engine import ContinuousBatcher
from tokenmill.worker.engine.model import CachingModel, Model

from .backends import BACKENDS, SLOTS, Backend, forward

PROMPT = [5, 9, 200, 17, 17, 3, 120, 44, 90, 12, 7, 31, 31, 2, 250, 66, 8, 19, 101, 77]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture(scope="module")
def loaded(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return backend.load(tmp_path_factory.mktemp(backend.name))


@pytest.fixture
def model(loaded: Model) -> Model:
    """The backend's model with empty contexts."""
    return emptied(loaded)


def emptied(model: Model) -> Model:
    """The model, with nothing in its contexts."""
    for context in range(getattr(model, "n_contexts", SLOTS)):
        model.truncate(context, 0)
    return model


class Close:
    """Compares logits within a backend's tolerance; the best token must be the same."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance

    def __call__(self, found: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(found, expected, atol=self._tolerance)
        np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


@pytest.fixture
def close(backend: Backend) -> Close:
    return Close(backend.tolerance)


def in_pieces(model: Model, context: int, tokens: list[int], size: int, start: int = 0) -> np.ndarray:
    """Logits after the last of ``tokens``, computed from ``start`` on in steps of ``size``."""
    steps = range(start, len(tokens), size)
    return [forward(model, (context, at, tokens[at : at + size])) for at in steps][-1]


def test_it_tells_what_the_engine_asks(model: Model) -> None:
    assert isinstance(model, Model)
    assert model.vocab_size is not None
    assert model.gives_logits
    assert model.max_context == 64
    logits = forward(model, (0, 0, PROMPT), (1, 0, PROMPT[:3]), complete=[True, False])
    assert logits.shape == (1, model.vocab_size)


@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_a_prompt_in_chunks_is_the_prompt_at_once(model: Model, close: Close, size: int) -> None:
    close(in_pieces(model, 1, PROMPT, size), forward(model, (0, 0, PROMPT)))


def test_an_earlier_start_computes_anew(model: Model, close: Close) -> None:
    forward(model, (1, 0, [*PROMPT[:5], 1, 1, 1]))
    close(forward(model, (1, 5, PROMPT[5:])), forward(model, (0, 0, PROMPT)))
    close(forward(model, (1, 0, PROMPT[3:])), forward(model, (2, 0, PROMPT[3:])))


def test_a_repeated_step_gives_the_same(model: Model) -> None:
    forward(model, (0, 0, PROMPT[:8]))
    first = np.array(forward(model, (0, 8, PROMPT[8:9])))
    np.testing.assert_array_equal(forward(model, (0, 8, PROMPT[8:9])), first)


def test_a_truncated_context_goes_on_from_there(model: Model, close: Close) -> None:
    forward(model, (0, 0, [*PROMPT[:11], 1, 2, 3]))
    model.truncate(0, 11)
    close(forward(model, (0, 11, PROMPT[11:])), forward(model, (1, 0, PROMPT)))
    model.truncate(0, 0)
    close(forward(model, (0, 0, PROMPT[2:])), forward(model, (2, 0, PROMPT[2:])))


def test_truncating_to_more_than_is_held_does_nothing(model: Model, close: Close) -> None:
    forward(model, (0, 0, PROMPT[:4]))
    model.truncate(0, 60)
    model.truncate(1, 60)
    with pytest.raises(ValueError, match="starts at 5"):
        forward(model, (0, 5, [1]))
    close(forward(model, (0, 4, PROMPT[4:])), forward(model, (1, 0, PROMPT)))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_logits_do_not_depend_on_chunks_contexts_or_neighbours(
    loaded: Model, backend: Backend, data: st.DataObject
) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=12), min_size=1, max_size=SLOTS))
    contexts = data.draw(st.permutations(range(SLOTS)))[: len(prompts)]
    alone = [forward(loaded, (0, 0, prompt))[0].copy() for prompt in prompts]
    done, last = [0] * len(prompts), [np.empty(0)] * len(prompts)
    while open_rows := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        chosen = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique=True))
        ends = [data.draw(st.integers(done[i] + 1, len(prompts[i]))) for i in chosen]
        complete = [end == len(prompts[i]) for i, end in zip(chosen, ends, strict=True)]
        rows = [(contexts[i], done[i], prompts[i][done[i] : end]) for i, end in zip(chosen, ends, strict=True)]
        logits = iter(forward(loaded, *rows, complete=complete))
        for i, end, ready in zip(chosen, ends, complete, strict=True):
            done[i] = end
            if ready:
                last[i] = next(logits).copy()
    Close(backend.tolerance)(np.stack(last), np.stack(alone))


def test_a_whole_batch_decodes_as_each_row_alone(model: Model, close: Close) -> None:
    prompts = [PROMPT[i : i + 4 + 5 * i] for i in range(SLOTS)]
    alone = [in_pieces(model, i, prompt, 1) for i, prompt in enumerate(prompts)]
    rows = [(i, len(prompt) - 1, prompt[-1:]) for i, prompt in enumerate(prompts)]
    close(forward(model, *rows), np.concatenate(alone))
    close(forward(model, *rows[::-1]), np.concatenate(alone[::-1]))


def test_greedy_output_is_the_same_in_any_number_of_slots(model: Model) -> None:
    requests = [(PROMPT[i : i + 1 + i % 9], 1 + 5 * i % 12) for i in range(9)]
    outputs = []
    for capacity in range(1, SLOTS + 1):
        batcher = ContinuousBatcher(emptied(model), capacity, max_step_tokens=7)
        for prompt, n in requests:
            batcher.submit(prompt, max_tokens=n, ignore_eos=True)
        outputs.append([finished.output for finished in sorted(batcher.run(), key=lambda f: f.handle)])
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ((0, 1, [5]), "context 0 holds 0 tokens, but the row starts at 1"),
        ((0, 0, [5] * 65), "65 tokens exceeds the context of 64"),
        ((0, 0, [-1]), "token ids must be from 0"),
        ((0, 0, [100_000]), "token ids must be from 0"),
    ],
    ids=["gap", "length", "negative", "vocabulary"],
)
def test_a_row_that_cannot_be_is_refused_and_harms_nobody(
    model: Model, close: Close, row: tuple[Any, ...], line: str
) -> None:
    forward(model, (1, 0, PROMPT[:6]))
    with pytest.raises(ValueError, match=line):
        forward(model, (1, 6, PROMPT[6:8]), row)
    close(forward(model, (1, 6, PROMPT[6:])), forward(model, (2, 0, PROMPT)))
    forward(model, (0, 0, [5] * 64))


def test_a_batch_without_complete_rows_gives_no_logits(model: Model) -> None:
    logits = forward(model, (0, 0, [5, 6]), (1, 0, [7]), complete=[False, False])
    assert logits.shape == (0, model.vocab_size)


def test_logits_come_in_the_order_of_the_complete_rows(model: Model, close: Close) -> None:
    rows = [(0, 0, PROMPT[:3]), (3, 0, PROMPT[:1]), (1, 0, PROMPT[:9]), (2, 0, PROMPT[:2])]
    alone = [forward(model, row) for row in rows]
    some = forward(model, *rows, complete=[False, True, False, True])
    close(some, np.concatenate([alone[1], alone[3]]))


class TestCaching:
    """Backends whose contexts outlive requests."""

    @pytest.fixture
    def caching(self, model: Model) -> CachingModel:
        assert isinstance(model, CachingModel)
        return model

    def test_parked_contexts_compute_as_well(self, caching: CachingModel, close: Close) -> None:
        assert caching.n_contexts > SLOTS
        close(forward(caching, (caching.n_contexts - 1, 0, PROMPT)), forward(caching, (0, 0, PROMPT)))

    @pytest.mark.parametrize("length", [1, 5, 16, 19])
    def test_a_shared_beginning_is_as_good_as_computed(self, caching: CachingModel, close: Close, length: int) -> None:
        expected = forward(caching, (0, 0, PROMPT))
        shared = caching.share(0, 5, length)
        assert 0 <= shared <= length
        close(forward(caching, (5, shared, PROMPT[shared:])), expected)

    def test_who_shares_goes_on_alone(self, caching: CachingModel, close: Close) -> None:
        forward(caching, (0, 0, PROMPT))
        shared = caching.share(0, 5, 17)
        others = [*PROMPT[:shared], 99, 98, 97]
        forward(caching, (5, shared, others[shared:]))
        close(in_pieces(caching, 0, [*PROMPT, 4], 1, len(PROMPT)), forward(caching, (1, 0, [*PROMPT, 4])))
        caching.truncate(0, 0)
        close(in_pieces(caching, 5, [*others, 4], 1, len(others)), forward(caching, (2, 0, [*others, 4])))

    def test_no_more_is_shared_than_the_source_holds(self, caching: CachingModel) -> None:
        forward(caching, (0, 0, PROMPT))
        assert caching.share(0, 5, 64) <= len(PROMPT)
        assert caching.share(1, 6, 10) == 0

    def test_a_beginning_can_be_shared_on(self, caching: CachingModel, close: Close) -> None:
        expected = forward(caching, (0, 0, PROMPT))
        shared = caching.share(5, 6, caching.share(0, 5, 19))
        caching.truncate(0, 0)
        caching.truncate(5, 0)
        close(forward(caching, (6, shared, PROMPT[shared:])), expected)

    def test_shortage_follows_what_is_held(self, caching: CachingModel) -> None:
        def shortage(*ends: int) -> int:
            numbers = np.arange(len(ends), dtype=np.int32)
            return caching.shortage(numbers, np.array(ends, np.int32))

        empty = shortage()
        assert empty <= -caching.max_context  # type: ignore[operator]  # one request of full length always fits
        assert empty < shortage(20) <= shortage(20, 64) <= shortage(64, 64)
        forward(caching, (0, 0, PROMPT), (1, 0, PROMPT))
        assert shortage() == shortage(20, 20) > empty
        caching.truncate(0, 0)
        caching.truncate(1, 0)
        assert shortage() == empty
