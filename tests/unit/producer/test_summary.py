"""The summary: counts, percentiles, occupancy, and the reason of failures."""

from __future__ import annotations

import io

from rich.console import Console

from tokenmill.producer.summary import Tally, occupancy, percentiles

from .fakes import make_error, make_reply, make_worker


def test_the_table_sums_up_the_run() -> None:
    tally = Tally()
    for number in range(1, 101):
        reply = make_reply(f"r{number}", "word", queue_ms=10.0 * number, ttft_ms=20.0 * number, e2e_ms=30.0 * number)
        tally.add(reply)
    tally.add(make_reply("last", "cut", finish_reason="length"))
    out = io.StringIO()
    workers = [make_worker("a", steps=10, row_steps=60), make_worker("b", steps=10, row_steps=80)]
    Console(file=out, width=100).print(tally.table(20.0, workers))
    text = " ".join(out.getvalue().replace("│", " ").split())
    for part in (
        "requests 101",
        "tokens 303 prompt, 403 output",
        "output rate 20 tok/s",
        "queue time p50 / p95 0.51 s / 0.95 s",
        "TTFT p50 / p95 1.01 s / 1.90 s",
        "slot occupancy 88%",
        "finish reasons 100 stop, 1 length",
    ):
        assert part in text


def test_a_run_without_failures_has_none() -> None:
    tally = Tally()
    tally.add(make_reply("a"))
    assert tally.failure is None
    assert tally.line(2.0) == "1 replies, 4 output tokens in 2.0 s (2 tok/s)"


def test_failures_are_counted_and_the_commonest_is_told() -> None:
    tally = Tally()
    for reply in (make_reply("a"), make_error("b", "odd"), make_error("c", "too long"), make_error("d", "too long")):
        tally.add(reply)
    assert tally.failure == "3 of 4 requests failed; the commonest reason (2): model_error: too long"


def test_missing_figures_are_said_to_be_missing() -> None:
    assert percentiles([]) == "?"
    assert occupancy([]) == "?"
