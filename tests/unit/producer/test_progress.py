"""Progress: rates from what workers report, an honest guess of the time left, lines for logs."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from tokenmill.producer.jsonl import Size
from tokenmill.producer.progress import (
    PLAIN_INTERVAL_S,
    RATE_WINDOW_S,
    LiveDisplay,
    Meter,
    NoDisplay,
    PlainDisplay,
    Snapshot,
    display,
)

from .fakes import make_worker


@dataclass
class Done:
    """What has been answered."""

    answered: int = 0
    answered_tokens: int = 0
    answered_max_tokens: int = 0


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_rate_is_that_of_the_last_seconds(clock: Clock) -> None:
    meter = Meter(Size(10, 1000), clock=clock)
    meter.measure(Done(), [make_worker("a", output_tokens=500)])  # of other work
    for second in range(1, 11):
        clock.now += 1
        tokens = 500 + 10 * second
        snapshot = meter.measure(Done(), [make_worker("a", output_tokens=tokens), make_worker("b", output_tokens=7)])
    assert snapshot.tokens_per_s == pytest.approx(10)
    clock.now += RATE_WINDOW_S
    assert meter.measure(Done(), [make_worker("a", output_tokens=600)]).tokens_per_s == 0


def test_a_restarted_worker_takes_nothing_back(clock: Clock) -> None:
    meter = Meter(Size(10, 1000), clock=clock)
    meter.measure(Done(), [make_worker(output_tokens=0)])
    clock.now += 1
    meter.measure(Done(), [make_worker(output_tokens=100)])
    assert meter.measure(Done(), [make_worker(output_tokens=0)]).tokens_per_s == pytest.approx(100)


def test_busy_slots_are_summed_over_the_workers(clock: Clock) -> None:
    snapshot = Meter(Size(10, 100), clock=clock).measure(Done(), [make_worker("a", busy=3), make_worker("b", busy=8)])
    assert (snapshot.busy, snapshot.slots) == (11, 16)


def test_the_time_left_is_the_lower_of_two_guesses(clock: Clock) -> None:
    meter = Meter(Size(10, 1000), clock=clock)
    assert meter.measure(Done(), [make_worker(output_tokens=0)]).eta_s is None
    clock.now += 4
    # One of ten requests in 4 s: 36 s by requests. 800 of 1,000 tokens in 4 s: 1 s by tokens.
    assert meter.measure(Done(1, 100, 100), [make_worker(output_tokens=800)]).eta_s == pytest.approx(1)
    # Nine of ten requests used a tenth of their tokens: 0.44 s by requests, 50 s by tokens.
    stopped_early = Meter(Size(10, 10_000), clock=clock)
    stopped_early.measure(Done(), [make_worker(output_tokens=0)])
    clock.now += 4
    assert stopped_early.measure(Done(9, 80, 900), [make_worker(output_tokens=80)]).eta_s == pytest.approx(4 / 9)
    assert stopped_early.measure(Done(10, 80, 1000), [make_worker(output_tokens=80)]).eta_s is None


def snapshot_of(done: int) -> Snapshot:
    return Snapshot(done=done, total=4, tokens_per_s=12.3, busy=3, slots=8, eta_s=90.0 if done < 4 else None)


def test_a_plain_line_every_few_seconds_and_one_at_the_end(clock: Clock) -> None:
    out = io.StringIO()
    with PlainDisplay(Console(file=out), clock=clock) as screen:
        screen.show(snapshot_of(0))
        clock.now += PLAIN_INTERVAL_S
        screen.show(snapshot_of(1))
        screen.show(snapshot_of(2))
        screen.show(snapshot_of(4))
        clock.now += PLAIN_INTERVAL_S
        screen.show(snapshot_of(4))
    assert out.getvalue().splitlines() == [
        "1/4 done · 12 tok/s · 3/8 slots busy · 1m30s left",
        "4/4 done · 12 tok/s · 3/8 slots busy",
    ]


def test_the_live_bar_shows_the_same_figures() -> None:
    out = io.StringIO()
    with LiveDisplay(4, Console(file=out, force_terminal=True, width=100)) as screen:
        screen.show(snapshot_of(3))
    assert "3/4" in out.getvalue()
    assert "12 tok/s · 3/8 slots busy · 1m30s left" in out.getvalue()


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with display(4, quiet=True) as screen:
        assert isinstance(screen, NoDisplay)
        screen.show(snapshot_of(4))
    with display(4) as screen:
        assert isinstance(screen, PlainDisplay)  # the stderr of a test is no terminal
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(4.4, "4 s"), (61, "1m01s"), (7322, "2h02m")])
def test_times_are_short(seconds: float, text: str) -> None:
    assert Snapshot(1, 2, 0.0, 0, 0, seconds).flow.endswith(f"{text} left")
