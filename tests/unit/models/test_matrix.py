"""Products in strips and by several threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.worker.models import matrix
from tokenmill.worker.models.matrix import Matrix
from tokenmill.worker.models.threads import Threads

ALONE, PAIR, THREE = Threads(1), Threads(2), Threads(3)


@settings(max_examples=60, deadline=None)
@given(
    height=st.sampled_from([1, 7, 31, 96, 331, 480, 1000]),
    width=st.sampled_from([1, 64, 576, 3000]),
    n=st.sampled_from([1, 2, 17, 64, 65, 130]),
    threads=st.sampled_from([ALONE, PAIR, THREE]),
    strips=st.booleans(),
)
def test_the_product_is_the_product(height: int, width: int, n: int, threads: Threads, strips: bool) -> None:
    rng = np.random.default_rng(0)
    weights, x = (rng.standard_normal(shape, np.float32) for shape in ((height, width), (width, n)))
    out = np.full((height, n), np.nan, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "strips_pay", lambda: strips)
        Matrix(weights).times(x, out, threads)
    np.testing.assert_allclose(out, weights @ x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("height", "width", "n", "rows"),
    [
        (3072, 576, 64, 24),
        (576, 1536, 64, 6),
        (576, 1536, 2, 24),
        (4096, 4096, 16, 8),  # nothing divides into six
        (4096, 4096, 64, 4096),  # strips would be too flat
        (64, 32, 64, 64),  # is small as it is
        (331, 8192, 64, 331),  # is prime
    ],
)
def test_strips_divide_the_height(height: int, width: int, n: int, rows: int) -> None:
    assert matrix._strip(height, width, n) == rows


def test_threads_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    THREE.run([lambda: barrier.wait(30) and None] * 3)


def test_an_error_in_a_thread_reaches_the_caller_when_all_have_ended() -> None:
    done = []
    with pytest.raises(ZeroDivisionError):
        PAIR.run([lambda: done.append(1), lambda: 1 / 0, lambda: done.append(2)])
    assert sorted(done) == [1, 2]
    PAIR.run([lambda: done.append(3)])


def test_threads_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    threads = Threads(4)
    threads.run([lambda: None] * 4)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 3
    del threads
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()
