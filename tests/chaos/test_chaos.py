"""A slice of the chaos run that fits into a suite, and the control: the same against workers that lose requests."""

from __future__ import annotations

from pathlib import Path

from .audit import audit
from .config import Config
from .plan import draw_plan, usual_strikes
from .report import report
from .run import run


def test_nothing_is_lost_nothing_is_answered_twice_and_nothing_is_left_behind(tmp_path: Path) -> None:
    strikes = usual_strikes(60)  # as many as in a minute, in a quarter of it
    evidence = run(Config(seed=3, duration_s=15.0, requests=300, strikes=strikes), tmp_path)
    verdict = audit(evidence)
    assert verdict.ok, "\n".join(report(evidence, verdict))
    assert evidence.struck == strikes
    assert evidence.stats["reclaimed"] > 0


def test_a_plain_blpop_worker_loses_requests(tmp_path: Path) -> None:
    strikes = {"kill": 4, "swallow": 2}
    config = Config(seed=3, duration_s=3.0, requests=60, strikes=strikes, delay_ms=5.0, streams=0.0, control=True)
    assert audit(run(config, tmp_path)).count("lost") > 0


def test_the_plan_is_drawn_from_the_seed_alone() -> None:
    first, again, other = (draw_plan(Config(seed=s, requests=50, strikes=usual_strikes(60))) for s in (5, 5, 6))
    assert [request.payload() for request in first.requests] == [request.payload() for request in again.requests]
    assert first.strikes == again.strikes
    assert first.strikes != other.strikes
