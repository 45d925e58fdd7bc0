"""One RQ job in one slot, from its arguments to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from rq import Queue
from rq.exceptions import DeserializationError
from rq.executions import Execution
from rq.job import Job

from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.jobs import GENERATE, fields_of
from tokenmill.shared.protocol import StrictRequest

_OTHER_SERIALIZER = "enqueue with Queue(…, serializer=…) of the worker's --rq-serializer"
_RQ_HAS = {"id", "stream", "priority", "timeout_ms", "reply_to", "idempotency_key"}


class GenerationError(Exception):
    """A job that could not be generated: what its traceback shows."""


@dataclass(slots=True)
class Running:
    """One job in one slot."""

    job: Job
    queue: Queue
    execution: Execution
    overdue_at: float


@dataclass(slots=True)
class Ended:
    """A job of which RQ has to be told: its reply, or why it failed."""

    running: Running
    reply: dict[str, Any] | None
    error: BaseException | None = None
    stopped: bool = False


def payload_of(job: Job, request_id: str, written: str) -> bytes:
    """The job as a request; raises TokenmillError for what is none."""
    try:
        function = job.func_name
    except DeserializationError:
        raise TokenmillError(f"the job is not written as {written}: {_OTHER_SERIALIZER}") from None
    if function != GENERATE:
        raise TokenmillError(f"this worker runs {GENERATE} only, not {function}: use another queue for that")
    try:
        fields = fields_of(*job.args, **job.kwargs)
    except TypeError as error:
        raise TokenmillError(f"the job's arguments make no request: {error}") from None
    if refused := sorted(_RQ_HAS & fields.keys()):
        raise TokenmillError(f"RQ jobs have no `{refused[0]}`: RQ has its own ids, queues and timeouts")
    try:
        request = msgspec.convert({**fields, "id": request_id}, StrictRequest)
    except msgspec.ValidationError as error:
        raise TokenmillError(f"invalid_request: {error}") from None
    return msgspec.json.encode(request)
