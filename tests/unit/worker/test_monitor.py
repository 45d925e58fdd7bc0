"""What probes of a worker are told, and what its metrics say."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import generate_latest

from tokenmill.shared.protocol import Cell, WorkerStatus
from tokenmill.shared.settings import DEFAULTS
from tokenmill.worker.monitor import Monitor

from .test_runner import claim, run, runner

SETTINGS = dataclasses.replace(DEFAULTS, queue="q", stall_timeout_s=60.0, lease_ms=10_000)


def watching(subject: Any, *, step_age_s: float = 0.0, silence_s: float = 0.0) -> Monitor:
    monitor = Monitor(SETTINGS, "w1")
    leases: Any = SimpleNamespace(silence_s=silence_s)
    pulse: Any = SimpleNamespace(age_s=step_age_s)
    monitor.watch(subject, pulse, leases, model="scripted")
    return monitor


def test_while_the_model_loads_the_worker_lives_but_is_not_ready() -> None:
    monitor = Monitor(SETTINGS, "w1")
    assert (monitor.stalled(), monitor.unready()) == (None, "the model is being loaded")


def test_a_worker_at_work_is_ready() -> None:
    monitor = watching(runner({}), step_age_s=29, silence_s=9)
    assert (monitor.stalled(), monitor.unready()) == (None, None)


def test_a_step_of_more_than_half_the_stall_timeout_is_no_life() -> None:
    monitor = watching(runner({}), step_age_s=31)
    assert "running for 31 s" in (monitor.stalled() or "")
    assert monitor.unready() == monitor.stalled()


def test_a_broker_silent_for_a_lease_is_told_by_readiness_alone() -> None:
    monitor = watching(runner({}), silence_s=11)
    assert (monitor.stalled(), monitor.unready()) == (None, "the broker has not answered for 11 s")


def test_a_draining_worker_is_not_ready() -> None:
    subject = runner({})
    subject.draining = True
    assert "draining" in (watching(subject).unready() or "")


def test_the_status_is_what_info_reads() -> None:
    subject = runner({"a": "hi"})
    subject.admit(claim("1", prompt="a"))
    run(subject)
    status = msgspec.json.decode(watching(subject).status(subject, "scripted"), type=WorkerStatus)
    assert (status.requests, status.output_tokens, status.slots, status.busy) == (1, 3, 4, 0)


def test_the_metrics_tell_of_requests_tokens_and_times() -> None:
    clock = SimpleNamespace(now=0.0)

    def tick() -> float:
        clock.now += 0.25
        return float(clock.now)

    subject = runner({"a": "hi", "b": "yes"}, clock=tick)
    subject.admit(claim("1", prompt="a"))
    subject.admit(claim("2", prompt="b", max_tokens=2))
    subject.admit(claim("3", prompt="b", max_tokens=0))
    run(subject)
    lines = generate_latest(watching(subject)._registry).decode()
    labels = '{queue="q",worker="w1"}'
    for line in (
        f"tokenmill_slots{labels} 4.0",
        f"tokenmill_output_tokens_total{labels} 5.0",
        f"tokenmill_prompt_tokens_total{labels} 2.0",
        'tokenmill_requests_total{finish_reason="stop",queue="q",worker="w1"} 1.0',
        'tokenmill_requests_total{finish_reason="length",queue="q",worker="w1"} 1.0',
        'tokenmill_requests_total{finish_reason="error",queue="q",worker="w1"} 1.0',
        f"tokenmill_step_rows_sum{labels} 5.0",
        f"tokenmill_queue_time_seconds_count{labels} 2.0",
        f"tokenmill_time_to_first_token_seconds_count{labels} 2.0",
        f"tokenmill_inter_token_latency_seconds_count{labels} 3.0",
        f"tokenmill_e2e_latency_seconds_count{labels} 3.0",
        f"tokenmill_request_output_tokens_sum{labels} 5.0",
        'tokenmill_worker_info{model="scripted",queue="q",worker="w1"} 1.0',
    ):
        assert line in lines, line


def test_the_status_shows_what_runs_in_each_slot_and_how_fast_tokens_come() -> None:
    clock = SimpleNamespace(now=100.0)
    subject = runner({"a": "hello", "b": "world"}, slots=3, clock=lambda: clock.now)
    monitor = Monitor(SETTINGS, "w1", clock=lambda: clock.now)
    for name in "ab":
        subject.admit(claim(name, prompt=name))
    subject.step()
    subject.end("a", 1, "cancelled")
    for _ in range(2):
        subject.step()
    clock.now += 2.0
    status = msgspec.json.decode(monitor.status(subject, "scripted"), type=WorkerStatus)
    assert status.cells == [None, Cell(age_ms=2012, output_tokens=3), None]  # it had waited 12 ms when it was claimed
    assert status.output_tokens_per_s == 2.0
    clock.now += 1.0
    assert msgspec.json.decode(monitor.status(subject, "scripted"))["output_tokens_per_s"] == 0.0
