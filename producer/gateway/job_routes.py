"""``/jobs``: answer 202 at once, and let callers ask, wait, follow or cancel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import Response, delete, get, post
from litestar.params import Parameter
from litestar.response import ServerSentEvent, ServerSentEventMessage
from msgspec import Meta

from tokenmill.producer.gateway.callers import Caller
from tokenmill.producer.gateway.desk import Call, Desk
from tokenmill.producer.gateway.errors import BadRequest
from tokenmill.producer.gateway.generation import IdempotencyKey
from tokenmill.producer.gateway.jobs import MOST_ITEMS, Job, Jobs
from tokenmill.producer.gateway.specification import ERRORS

_LONGEST_WAIT_S = 60
_KEEP_ALIVE_S = 15.0

Input = dict[str, Any]
Inputs = Input | Annotated[list[Input], Meta(min_length=1, max_length=MOST_ITEMS)]
"""The fields of a request, or of several: `prompt` or `messages`, and any sampling field."""
Wait = Annotated[float, Parameter(ge=0, le=_LONGEST_WAIT_S, description="Seconds to wait for the end of the job.")]
LastEvent = Annotated[str | None, Parameter(header="Last-Event-ID", description="Go on after this event.")]


@post("/jobs", status_code=202, responses=ERRORS, tags=["Jobs"])
async def begin_job(request: Call, jobs: Jobs, data: Inputs, idempotency_key: IdempotencyKey = None) -> Response[Job]:
    """Accept one input or a list; an input that is not valid fails alone."""
    inputs = data if isinstance(data, list) else [data]
    job_id = await jobs.begin(request.user, inputs, idempotency_key)
    return Response(await jobs.show(request.user, job_id), headers={"Location": f"/jobs/{job_id}"})


@get("/jobs/{job_id:str}", responses=ERRORS, tags=["Jobs"])
async def show_job(request: Call, desk: Desk, jobs: Jobs, job_id: str, wait: Wait = 0) -> Job:
    """Show a job with the results that there are; with `wait`, as soon as it has ended."""
    return await desk.while_there(request, jobs.show(request.user, job_id, wait))


@get("/jobs/{job_id:str}/events", responses=ERRORS, tags=["Jobs"])
async def follow_job(request: Call, jobs: Jobs, job_id: str, last_event_id: LastEvent = None) -> ServerSentEvent:
    """Follow a job: an event `item` for each input, in their order, then `end` with the job's counts.

    Events are numbered by the input, so that a reader that comes back with `Last-Event-ID` misses none and gets none
    twice.
    """
    job = await jobs.show(request.user, job_id)
    first = _after(last_event_id)
    return ServerSentEvent(_events(jobs, request.user, job, first))


@delete("/jobs/{job_id:str}", status_code=200, responses=ERRORS, tags=["Jobs"])
async def cancel_job(request: Call, jobs: Jobs, job_id: str) -> Job:
    """End what has not ended; what has keeps its result."""
    return await jobs.cancel(request.user, job_id)


async def _events(jobs: Jobs, caller: Caller, job: Job, first: int) -> AsyncIterator[ServerSentEventMessage]:
    for index in range(first, job.counts.total):
        while (item := await jobs.item(caller, job.id, index, _KEEP_ALIVE_S)) is None:
            yield ServerSentEventMessage(comment="still waiting")
        yield ServerSentEventMessage(event="item", id=str(index), data=_json(item))
    job = await jobs.show(caller, job.id)
    ending = {"status": job.status, "counts": job.counts}
    yield ServerSentEventMessage(event="end", id=str(job.counts.total), data=_json(ending))


def _json(data: Any) -> str:
    return msgspec.json.encode(data).decode()


def _after(last_event_id: str | None) -> int:
    if last_event_id is None:
        return 0
    if not last_event_id.isdecimal() or len(last_event_id) > 9:
        raise BadRequest("Last-Event-ID is not one of ours: leave it out to begin anew", param="Last-Event-ID")
    return int(last_event_id) + 1
