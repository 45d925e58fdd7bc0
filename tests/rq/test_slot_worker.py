"""Ordinary RQ producers, and one worker that runs their jobs in its slots."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Callback, Queue, Retry, SimpleWorker, Worker
from rq.command import send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.jobs import GENERATE
from tokenmill.worker.rq_job import payload_of

from ..e2e.workplace import DEADLINE_S, SLOW_TOY, Workplace, wait_for

ENDLESS: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}


class Place(Workplace):
    """A queue of RQ with the same name."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url, folder)
        self.redis = redis.Redis.from_url(url)
        self.jobs = Queue(self.queue, connection=self.redis, serializer=JSONSerializer)

    def begin(self, model: str = "toy", *options: str) -> Any:
        process = self.start_unready(model, "--frontend", "rq", *options)
        wait_for(lambda: process.poll() is not None or self.workers(process.pid))
        assert process.poll() is None, self.said(process)
        return process

    def workers(self, pid: int) -> list[Worker]:
        return [worker for worker in Worker.all(queue=self.jobs) if worker.pid == pid]

    def add(self, prompt: Any = "a", **options: Any) -> Job:
        fields = {"max_tokens": 5, "ignore_eos": True, **options.pop("fields", {})}
        return self.jobs.enqueue_call(GENERATE, args=[prompt], kwargs=fields, **options)

    def ended(self, job: Job, deadline_s: float = DEADLINE_S) -> Job:
        wait_for(lambda: job.get_status() in ("finished", "failed", "stopped"), deadline_s)
        job.refresh()
        return job


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker() as embedded:
        yield embedded.url


@pytest.fixture
def place(url: str, tmp_path: Path) -> Iterator[Place]:
    place = Place(url, tmp_path)
    yield place
    place.close()
    place.redis.close()


def test_a_job_has_the_reply_as_its_result(place: Place) -> None:
    place.begin()
    job = place.ended(place.add())
    reply = job.return_value()
    assert (job.get_status(), reply["finish_reason"], reply["usage"]["output_tokens"]) == ("finished", "length", 5)
    assert reply["id"] == job.id
    assert place.jobs.finished_job_registry.get_job_ids() == [job.id]
    assert len(place.jobs.started_job_registry) == 0


def test_jobs_run_at_the_same_time_in_the_slots_of_one_worker(place: Place) -> None:
    process = place.begin(SLOW_TOY, "--slots", "4")
    jobs = [place.add(fields=ENDLESS) for _ in range(6)]
    wait_for(lambda: sum(job.get_status() == "started" for job in jobs) == 4)
    [worker] = place.workers(process.pid)
    assert worker.current_execution_count == 4
    assert sum(job.get_status() == "queued" for job in jobs) == 2


def test_what_is_no_request_fails_alone_with_one_line(place: Place) -> None:
    place.begin()
    bad, other, good = place.add(fields={"max_tokens": 0}), place.jobs.enqueue_call("time.sleep", args=[0]), place.add()
    assert place.ended(good).get_status() == "finished"
    assert "max_tokens" in (place.ended(bad).latest_result().exc_string or "")
    assert "runs tokenmill.shared.jobs.generate only, not time.sleep" in (
        place.ended(other).latest_result().exc_string or ""
    )


CALLBACKS = """
def note_success(job, connection, result):
    connection.set(f"callback:{job.id}", result["finish_reason"])

def note_failure(job, connection, kind, error, traceback):
    connection.set(f"callback:{job.id}", str(error))

def note_stop(job, connection):
    connection.set(f"callback:{job.id}", "stopped")

def wait(*_):
    import time
    time.sleep(3.5)

def fail(*_):
    raise ValueError("no luck")
"""


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_token": 5}, "unknown field `max_token`"),
        ({"timeout_ms": 5}, "RQ jobs have no `timeout_ms`"),
        ({"messages": []}, "give either `prompt` or `messages`"),
    ],
)
def test_arguments_are_checked_as_strictly_as_by_other_producers(fields: dict[str, Any], problem: str) -> None:
    job = Job.create(GENERATE, args=["a"], kwargs=fields, connection=redis.Redis(), serializer=JSONSerializer)
    with pytest.raises(TokenmillError, match=problem):
        payload_of(job, "id", "json")


def test_callbacks_and_dependents_run(place: Place) -> None:
    (place.folder / "callbacks.py").write_text(CALLBACKS)  # found by its import path, in the worker's process
    place.begin()
    first = place.add(on_success=Callback("callbacks.note_success"))
    failing = place.add(fields={"max_tokens": 0}, on_failure=Callback("callbacks.note_failure"))
    after = place.add(depends_on=first)
    assert place.ended(after).get_status() == "finished"
    place.ended(failing)
    assert place.redis.get(f"callback:{first.id}") == b"length"
    assert b"invalid_request" in (place.redis.get(f"callback:{failing.id}") or b"")


def test_a_stop_command_stops_one_slot_only(place: Place) -> None:
    place.begin(SLOW_TOY, "--slots", "2")
    jobs = [place.add(fields=ENDLESS) for _ in range(2)]
    wait_for(lambda: all(job.get_status() == "started" for job in jobs))
    send_stop_job_command(place.redis, jobs[0].id, serializer=JSONSerializer)
    assert place.ended(jobs[0]).get_status() == "stopped"
    assert jobs[1].get_status() == "started"


@pytest.mark.parametrize("name", ["note_stop", "fail"])
def test_a_stopped_job_has_its_own_callback_and_no_retry(place: Place, name: str) -> None:
    (place.folder / "callbacks.py").write_text(CALLBACKS)
    place.begin(SLOW_TOY)
    failed, stopped = Callback("callbacks.note_failure"), Callback(f"callbacks.{name}")
    job = place.add(fields=ENDLESS, on_failure=failed, on_stopped=stopped, retry=Retry(max=3))
    wait_for(lambda: job.get_status() == "started")
    send_stop_job_command(place.redis, job.id, serializer=JSONSerializer)
    assert place.ended(job).get_status() == "stopped"
    assert place.redis.get(f"callback:{job.id}") == (b"stopped" if name == "note_stop" else None)
    assert place.ended(place.add()).get_status() == "finished"


def test_a_callback_that_fails_fails_its_job_only(place: Place) -> None:
    (place.folder / "callbacks.py").write_text(CALLBACKS)
    place.begin()
    bad, missing = place.add(on_success=Callback("callbacks.fail")), place.add(on_success=Callback("no.such"))
    assert "no luck" in (place.ended(bad).latest_result().exc_string or "")
    assert "no.such" in (place.ended(missing).latest_result().exc_string or "")
    assert place.ended(place.add()).get_status() == "finished"


def test_a_pickled_job_is_refused_with_one_line_by_a_worker_of_json(place: Place) -> None:
    place.begin()
    job = Queue(place.queue, connection=place.redis).enqueue(GENERATE, "a")
    wait_for(lambda: job.get_status() == "failed")
    problem = place.jobs.fetch_job(job.id).latest_result().exc_string  # type: ignore[union-attr]
    assert "the job is not written as json" in problem
    assert len(problem.splitlines()) == 1
    assert place.ended(place.add()).get_status() == "finished"


def test_a_worker_of_pickle_runs_jobs_of_plain_producers(place: Place) -> None:
    place.begin("toy", "--rq-serializer", "pickle")
    job = place.ended(Queue(place.queue, connection=place.redis).enqueue(GENERATE, "a", max_tokens=3, ignore_eos=True))
    assert job.return_value()["usage"]["output_tokens"] == 3


def test_a_worker_that_was_stopped_for_a_lease_gives_no_second_result(place: Place) -> None:
    zombie = place.begin(SLOW_TOY)
    job = place.add(fields={"max_tokens": 100}, retry=Retry(max=1))
    wait_for(lambda: job.get_status() == "started")
    zombie.send_signal(signal.SIGSTOP)
    place.begin("toy")
    place.ended(job)
    zombie.send_signal(signal.SIGCONT)
    wait_for(lambda: "its outcome is dropped" in place.said(zombie))
    all_succeeded_once([job], 100)


def test_a_callback_longer_than_a_lease_costs_the_other_slots_nothing(place: Place) -> None:
    (place.folder / "callbacks.py").write_text(CALLBACKS)
    place.begin(SLOW_TOY, "--slots", "2")
    place.begin(SLOW_TOY, "--slots", "2")  # would find what counts as abandoned
    other, slow = place.add(fields={"max_tokens": 150}), place.add(on_success=Callback("callbacks.wait"))
    assert [place.ended(job).get_status() for job in (slow, other)] == ["finished", "finished"]


def test_a_suspended_worker_begins_nothing(place: Place) -> None:
    suspend(place.redis)
    try:
        process = place.begin()
        job = place.add()
        [worker] = place.workers(process.pid)
        seen = worker.last_heartbeat
        wait_for(lambda: place.workers(process.pid)[0].last_heartbeat > seen)  # type: ignore[operator]
        assert job.get_status() == "queued"
    finally:
        resume(place.redis)
    assert place.ended(job).get_status() == "finished"


def test_delayed_jobs_and_retries_are_enqueued_when_they_are_due(place: Place) -> None:
    (place.folder / "callbacks.py").write_text(CALLBACKS)
    place.begin()
    later = place.jobs.enqueue_in(timedelta(seconds=1), GENERATE, "a", max_tokens=3)
    failing = place.add(on_success=Callback("callbacks.fail"), retry=Retry(max=1, interval=1))
    assert place.ended(later).get_status() == "finished"
    assert (place.ended(failing).get_status(), failing.retries_left) == ("failed", 0)


def test_a_job_without_a_timeout_runs_on(place: Place) -> None:
    place.begin()
    assert place.ended(place.add(timeout=-1)).get_status() == "finished"


def test_a_timeout_is_a_slots_own(place: Place) -> None:
    place.begin(SLOW_TOY, "--slots", "2")
    slow, quick = place.add(fields=ENDLESS, timeout=1), place.add()
    assert place.ended(quick).get_status() == "finished"
    assert place.ended(slow).get_status() == "failed"
    assert "longer than its timeout (1 s)" in (slow.latest_result().exc_string or "")


def test_a_drain_finishes_what_it_can_and_gives_the_rest_back(place: Place) -> None:
    process = place.begin(SLOW_TOY, "--slots", "2", "--drain-grace", "1")
    short, long = place.add(fields={"max_tokens": 60}), place.add(fields=ENDLESS)
    wait_for(lambda: all(job.get_status() == "started" for job in (short, long)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert (short.get_status(), long.get_status()) == ("finished", "queued")
    assert place.jobs.get_job_ids() == [long.id]
    assert len(place.jobs.started_job_registry) == 0
    assert place.workers(process.pid) == []


def test_a_broker_outage_delays_and_loses_nothing(tmp_path: Path) -> None:
    with EmbeddedBroker() as embedded:
        place = Place(embedded.url, tmp_path)
        process = place.begin(SLOW_TOY, "--slots", "2")
        job = place.add(fields={"max_tokens": 100})
        wait_for(lambda: job.get_status() == "started")
        place.redis.execute_command("CLIENT", "PAUSE", 1500, "ALL")
        place.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert place.ended(job).get_status() == "finished"
        assert process.poll() is None
        place.close()
        place.redis.close()


def all_succeeded_once(jobs: list[Job], n_tokens: int) -> None:
    for job in jobs:
        results = [result for result in job.results() if result.type == result.Type.SUCCESSFUL]
        assert len(results) == 1
        assert results[0].return_value["usage"]["output_tokens"] == n_tokens


def test_jobs_of_a_killed_worker_are_done_by_another(place: Place) -> None:
    victim = place.begin(SLOW_TOY, "--slots", "8")
    jobs = [place.add(fields={"max_tokens": 100}, retry=Retry(max=7)) for _ in range(8)]
    wait_for(lambda: all(job.get_status() == "started" for job in jobs))
    victim.kill()
    place.begin("toy", "--slots", "8")
    wait_for(lambda: len(place.jobs.finished_job_registry) == 8)
    all_succeeded_once(jobs, 100)


@pytest.mark.long
def test_every_one_of_300_jobs_has_one_result_although_workers_are_killed_seven_times(place: Place) -> None:
    """A kill between the two steps in which RQ takes a job leaves it for RQ's own minute of grace."""
    jobs = [place.add(fields={"max_tokens": 30}, retry=Retry(max=7)) for _ in range(300)]
    finished = place.jobs.finished_job_registry
    worker = place.begin("toy:delay_ms=4", "--slots", "8")
    for number in range(7):
        wait_for(lambda number=number: len(finished) >= 30 * (number + 1), 120)  # type: ignore[misc]
        worker.kill()
        worker = place.begin("toy:delay_ms=4", "--slots", "8")
    wait_for(lambda: len(finished) == 300, 180)
    all_succeeded_once(jobs, 30)


def test_another_worker_of_rq_says_who_runs_such_jobs(place: Place) -> None:
    job = place.add()
    SimpleWorker([place.jobs], connection=place.redis, serializer=JSONSerializer).work(
        burst=True, logging_level="ERROR"
    )
    assert "are run by `tokenmill worker --frontend rq`" in (place.ended(job).latest_result().exc_string or "")
