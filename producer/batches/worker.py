"""The process that runs the RQ jobs of batches."""

from __future__ import annotations

from typing import Any

from rq import Worker
from rq.job import Job
from rq.serializers import JSONSerializer

from tokenmill.producer.batches import work
from tokenmill.producer.batches.office import Office

MONITORING_S = 2  # between two signs of life of a running job
LEASE_S = 10  # without one, after which a job counts as abandoned
MAINTENANCE_S = 5  # between two looks for abandoned jobs


class BatchWorker(Worker):
    """An RQ worker whose abandoned jobs are found within seconds, not minutes: they repeat nothing that is done."""

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """How long a job counts as running after a sign of life."""
        return LEASE_S


def run_worker(office: Office, *, burst: bool = False) -> None:
    """Work until SIGTERM or Ctrl-C, which let the chunk that runs come to its end; a second one does not."""
    work.work_for(office)
    options: dict[str, Any] = {"maintenance_interval": MAINTENANCE_S, "job_monitoring_interval": MONITORING_S}
    jobs = office.jobs()
    worker = BatchWorker([jobs], connection=jobs.connection, serializer=JSONSerializer, **options)
    worker.work(burst=burst, logging_level="WARNING")
