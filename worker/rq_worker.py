"""An RQ worker that runs many jobs at the same time, in the slots of one batcher."""

from __future__ import annotations

import logging
import math
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import redis
from rq import Queue
from rq.callbacks import execute_stopped_callback
from rq.command import parse_payload
from rq.exceptions import DequeueTimeout, DeserializationError
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.scheduler import RQScheduler
from rq.serializers import resolve_serializer
from rq.suspension import is_suspended
from rq.timeouts import JobTimeoutException
from rq.utils import now
from rq.worker import BaseWorker

from tokenmill.shared.broker import Claim, Finish, Lost
from tokenmill.shared.connection import address_of, plain_errors
from tokenmill.shared.settings import Settings
from tokenmill.worker.engine import ModelSickError
from tokenmill.worker.leases import Leases, Pulse
from tokenmill.worker.rq_job import Ended, GenerationError, Running, payload_of
from tokenmill.worker.runner import Runner
from tokenmill.worker.signals import StopSignal

log = logging.getLogger(__name__)

LEAST_LEASE_S = 2  # RQ counts in whole seconds
IDLE_S = 1  # longest wait for a job
WORKER_TTL_S = 15  # RQ takes 5 s less for the longest silence of a connection, and a minute more for a worker's
LOCK_S = 5  # how long a worker that was killed keeps the others from maintenance, which takes milliseconds
_RETRY_S = 0.5  # while the broker is away, or RQ is suspended
EXIT_DONE, EXIT_MODEL_SICK = 0, 4


class SlotQueue(Queue):
    """A queue whose maintenance goes on soon after a worker was killed at it, not a quarter of an hour later."""

    def acquire_maintenance_lock(self) -> bool:
        """Whether this worker may maintain the queue now."""
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=LOCK_S))


class SlotWorker(BaseWorker):
    """Takes ``tokenmill.shared.jobs.generate`` from one RQ queue, as many at a time as there are slots.

    One thread does in turn a step of the batcher and RQ's bookkeeping; that of the leases gives the signs of life. What
    RQ promises of a job holds for each slot: results, retries, callbacks, timeouts, stop commands. A job without a sign
    of life for a lease counts as abandoned; RQ's own grace is more than a minute.
    """

    queue_class = SlotQueue

    def __init__(
        self,
        client: redis.Redis,
        runner: Runner,
        settings: Settings,
        *,
        name: str,
        stop: StopSignal,
        pulse: Pulse,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        serializer = resolve_serializer(settings.rq_serializer)
        queue = SlotQueue(settings.queue, connection=client, serializer=serializer)
        self._lease_s = max(LEAST_LEASE_S, math.ceil(settings.lease_ms / 1000))
        interval = max(1, self._lease_s // 2)
        super().__init__(
            [queue],
            name=name,
            connection=client,
            serializer=serializer,
            maintenance_interval=interval,
            worker_ttl=WORKER_TTL_S,
        )
        self._runner = runner
        self._settings = settings
        self._stop = stop
        self._pulse = pulse
        self._clock = clock
        self._jobs: dict[str, Running] = {}  # by the request's id
        self._ended: deque[Ended] = deque()
        self._to_stop: deque[str] = deque()  # executions; filled by the thread that hears commands
        self._scheduler = RQScheduler([queue], client, logging_level="WARNING", serializer=serializer, name=name)
        self._suspended = False
        self._away_since: float | None = None
        self._retry_at = 0.0
        self._leases = Leases(
            self,
            name,
            owned=lambda: dict.fromkeys(list(self._jobs), 1),
            status=lambda: b"",
            pulse=pulse,
            lease_ms=self._lease_s * 1000,
            reply_ttl_ms=settings.reply_ttl_ms,
            stall_timeout_s=settings.stall_timeout_s,
        )

    @property
    def silence_s(self) -> float:
        """Seconds since the broker answered a sign of life."""
        return self._leases.silence_s

    def run(self) -> int:
        """Work until told to stop; returns the exit code."""
        self.bootstrap("WARNING")
        self._leases.start()
        log.info("worker %s is ready: RQ queue %s, %d slots", self.name, self.queues[0].name, self._runner.slots)
        try:
            while not self._stop.requested:
                self._turn()
            self._drain()
        except ModelSickError as error:
            log.error("the model fails on every job (%s): giving %d of them back", error, len(self._jobs))
            return EXIT_MODEL_SICK
        finally:
            self._leases.stop()
            self._give_back()
            self._scheduler.release_locks()
            self.teardown()
        return EXIT_DONE

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """How long a job counts as running after a sign of life."""
        return self._lease_s

    def handle_payload(self, message: Any) -> None:
        """Hear a command; called by RQ's thread."""
        command = parse_payload(message)
        if command["command"] == "stop-job":
            self._to_stop.extend(e.id for e in list(self.executions.values()) if e.job_id == command.get("job_id"))
        elif command["command"] == "stop-execution":
            self._to_stop.append(command["execution_id"])
        else:
            super().handle_payload(message)

    def renew(self, worker: str, held: Sequence[tuple[str, int]], *, lease_ms: int, status: bytes) -> list[Lost]:
        """Give a sign of life of the worker and its jobs, and enqueue what is due; called by the leases' thread."""
        with plain_errors(address_of(self.connection), self.queues[0].name):
            self._suspended = bool(is_suspended(self.connection, self))
            for running in [*list(self._jobs.values()), *(ended.running for ended in list(self._ended))]:
                self.maintain_heartbeats(running.job, running.execution)
            self._scheduler.acquire_locks()  # one worker of the queue has them
            self._scheduler.enqueue_scheduled_jobs()
        return []  # a job that was lost is noticed when it ends

    def reclaim(self, *, limit: int, lease_ms: int, reply_ttl_ms: int) -> int:
        """Nothing: RQ's maintenance calls callbacks, whose timeouts want the main thread (``_talk``)."""
        return 0

    def _turn(self) -> None:
        if self._clock() >= self._retry_at:
            self._talk()
        elif not len(self._runner):
            time.sleep(_RETRY_S)
        self._end_some()
        with self._pulse:
            output = self._runner.step()
        for finish in output.replies:
            self._finish(finish)

    def _talk(self) -> None:
        """Do RQ's bookkeeping; while the broker is away, try again from time to time."""
        try:
            self._claim()
            self._tell()
            if self.should_run_maintenance_tasks:
                self.run_maintenance_tasks()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            self._retry_at = self._clock() + _RETRY_S
            if self._away_since is None:
                self._away_since = self._clock()
                log.warning("no broker: %s; jobs in slots go on", error)
            return
        if self._away_since is not None:
            log.warning("the broker is back after %.1f s", self._clock() - self._away_since)
            self._away_since = None

    def _claim(self) -> None:
        """Fill the free slots; an idle worker waits a little for a job."""
        if self._suspended:
            self._retry_at = self._clock() + (0.0 if self._jobs or self._ended else _RETRY_S)
            return
        while not self._runner.draining and len(self._jobs) + len(self._ended) < self._runner.slots:
            idle = not self._jobs and not self._ended
            try:
                taken = Queue.dequeue_any(
                    self.queues,
                    IDLE_S if idle else None,
                    connection=self.connection,
                    job_class=self.job_class,
                    serializer=self.serializer,
                    death_penalty_class=self.death_penalty_class,
                )
            except DequeueTimeout:
                return
            if taken is None:
                return
            self._begin(*taken)

    def _begin(self, job: Job, queue: Queue) -> None:
        job.redis_server_version = self.get_redis_server_version()
        execution = self.prepare_execution(job)
        with suppress(DeserializationError):  # of what it shows as the process's title, after all else is done
            self.prepare_job_execution(job, remove_from_intermediate_queue=True)
        job.started_at = now()
        running = Running(job, queue, execution, self._overdue_at(job))
        request_id = uuid.uuid4().hex
        try:
            payload = payload_of(job, request_id, self._settings.rq_serializer)
        except Exception as error:
            self._ended.append(Ended(running, None, error))
            return
        waited_ms = round((job.started_at - (job.enqueued_at or job.started_at)).total_seconds() * 1000)
        self._jobs[request_id] = running
        rejected = self._runner.admit(Claim(request_id, 1, payload, 1, waited_ms, waited_ms, [], ""))
        if rejected is not None:
            self._finish(rejected)

    def _overdue_at(self, job: Job) -> float:
        timeout_s = job.timeout or Queue.DEFAULT_TIMEOUT
        return math.inf if timeout_s < 0 else self._clock() + timeout_s

    def _finish(self, finish: Finish) -> None:
        """A reply has come out of a slot."""
        if (running := self._jobs.pop(finish.id, None)) is None:
            return
        reply: dict[str, Any] = msgspec.json.decode(finish.body)
        reply["id"] = running.job.id
        error = reply.get("error")
        problem = GenerationError(f"{error['code']}: {error['message']}") if error else None
        self._ended.append(Ended(running, reply, problem))

    def _end_some(self) -> None:
        """Stop what a command wants stopped, and what has taken too long."""
        stopped = {self._to_stop.popleft() for _ in range(len(self._to_stop))}
        for request_id, running in list(self._jobs.items()):
            if running.execution.id in stopped:
                self._end(request_id, None, stopped=True)
            elif self._clock() >= running.overdue_at:
                self._end(
                    request_id, JobTimeoutException(f"the job took longer than its timeout ({running.job.timeout} s)")
                )

    def _end(self, request_id: str, error: BaseException | None, *, stopped: bool = False) -> None:
        running = self._jobs.pop(request_id)
        self._runner.end(request_id, 1, "cancelled")
        self._ended.append(Ended(running, None, error, stopped))

    def _tell(self) -> None:
        """Tell RQ what has ended; what cannot be told now is told later."""
        while self._ended:
            ended = self._ended[0]
            if self._owns(ended.running.execution):
                self._settle(ended)
            else:
                self.executions.pop(ended.running.execution.id, None)
                log.warning("job %s counts as abandoned by now: its outcome is dropped", ended.running.job.id)
            self._ended.popleft()

    def _owns(self, execution: Execution) -> bool:
        """Whether a job is still this worker's: one that was silent for a lease has been retried or failed."""
        started = self.queues[0].started_job_registry
        return self.connection.zscore(started.key, execution.composite_key) is not None

    def _settle(self, ended: Ended) -> None:
        job, queue, execution = ended.running.job, ended.running.queue, ended.running.execution
        if ended.stopped:
            self._settle_stopped(job, queue, execution)
        elif ended.error is not None:
            self._finalize_failure(job, queue, execution, (type(ended.error), ended.error, None))
        else:
            try:
                self._finalize_success(job, queue, execution, ended.reply)
            except Exception:  # of its callback, which is not ours; the broker's own come again
                self.connection.ping()
                self._finalize_failure(job, queue, execution, sys.exc_info())

    def _settle_stopped(self, job: Job, queue: Queue, execution: Execution) -> None:
        """As RQ's own workers do it: the stopped callback is called, and there is no retry."""
        self._stopped_job_id = job.id
        job.ended_at = now()
        try:
            execute_stopped_callback(job, self.death_penalty_class)
        except Exception:
            self.connection.ping()
            log.exception("the stopped callback of job %s failed", job.id)
        self.handle_job_failure(job, queue, exc_string="Job stopped by user.", execution=execution)

    def _drain(self) -> None:
        """Take no more jobs, and finish what ends within the grace period."""
        self._runner.draining = True
        deadline = self._clock() + self._settings.drain_grace_s
        log.info("draining: %d jobs run, up to %.0f s", len(self._jobs), self._settings.drain_grace_s)
        while (self._jobs or self._ended) and not self._stop.urgent and self._clock() < deadline:
            self._turn()

    def _give_back(self) -> None:
        """What still runs goes back to the head of its queue."""
        try:
            self._tell()
            for running in self._jobs.values():
                with self.connection.pipeline() as pipeline:
                    self.cleanup_execution(running.job, pipeline=pipeline, execution=running.execution)
                    running.job.set_status(JobStatus.QUEUED, pipeline=pipeline)
                    pipeline.lpush(running.queue.key, running.job.id)
                    pipeline.execute()
        except redis.RedisError as error:
            log.warning("no broker: %s; what still ran counts as abandoned in %d s", error, self._lease_s)
        else:
            log.info("stopped; %d jobs given back", len(self._jobs))
        self._jobs.clear()
