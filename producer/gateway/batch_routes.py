"""``/v1/batches``: whole files of requests, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Literal

import msgspec
from litestar import get, post
from litestar.params import Parameter
from msgspec import Meta

from tokenmill.producer.batches.office import Office
from tokenmill.producer.batches.record import Batch, BatchError, Counts
from tokenmill.producer.gateway.desk import Call
from tokenmill.producer.gateway.errors import ApiError, BadRequest
from tokenmill.producer.gateway.specification import ERRORS

_PAGE = 20


class BatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is asked of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}[mhd]$")] = "24h"
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """What is wrong with the input, or with all of its lines."""

    data: list[BatchError]
    object: str = "list"


class BatchView(msgspec.Struct, kw_only=True):
    """A batch, as OpenAI's API describes it; times in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    request_counts: Counts
    object: str = "batch"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None


class Page(msgspec.Struct, kw_only=True):
    """Some of a caller's batches, the newest first."""

    data: list[BatchView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


Limit = Annotated[int, Parameter(ge=1, le=100, description="Batches on a page.")]


@post("/v1/batches", status_code=200, responses=ERRORS, tags=["OpenAI"])
async def create_batch(request: Call, office: Office, data: BatchBody) -> BatchView:
    """Begin a batch over a file that was uploaded."""
    caller = request.user.name
    if await asyncio.to_thread(office.files.find, caller, data.input_file_id) is None:
        raise BadRequest(f"no file `{data.input_file_id[:64]}`", param="input_file_id")
    begin = partial(office.submit, window=data.completion_window, metadata=data.metadata)
    return _view(await asyncio.to_thread(begin, caller, data.input_file_id, data.endpoint))


@get("/v1/batches", responses=ERRORS, tags=["OpenAI"])
async def list_batches(request: Call, office: Office, limit: Limit = _PAGE, after: str | None = None) -> Page:
    """List the caller's batches."""
    found = await asyncio.to_thread(office.records.list, request.user.name, limit + 1, after)
    views = [_view(batch) for batch in found[:limit]]
    ends = (views[0].id, views[-1].id) if views else (None, None)
    return Page(data=views, has_more=len(found) > limit, first_id=ends[0], last_id=ends[1])


@get("/v1/batches/{batch_id:str}", responses=ERRORS, tags=["OpenAI"])
async def show_batch(request: Call, office: Office, batch_id: str) -> BatchView:
    """Show how far a batch is."""
    return _view(await _find(request, office, batch_id))


@post("/v1/batches/{batch_id:str}/cancel", status_code=200, responses=ERRORS, tags=["OpenAI"])
async def cancel_batch(request: Call, office: Office, batch_id: str) -> BatchView:
    """Begin no more lines; what is answered is kept."""
    batch = await _find(request, office, batch_id)
    if batch.ended:
        raise ApiError(409, f"the batch has ended already ({batch.status})", code="batch_ended")
    await asyncio.to_thread(office.records.reach, batch_id, "cancelling_at")
    return _view(await _find(request, office, batch_id))


async def _find(request: Call, office: Office, batch_id: str) -> Batch:
    batch = await asyncio.to_thread(office.records.find, batch_id)
    if batch is None or batch.caller != request.user.name:
        raise ApiError(404, f"no batch `{batch_id[:64]}`", code="no_such_batch")
    return batch


def _view(batch: Batch) -> BatchView:
    view = BatchView(
        id=batch.id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        request_counts=batch.counts,
        errors=BatchErrors(data=batch.errors) if batch.errors else None,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        metadata=batch.metadata,
    )
    return msgspec.structs.replace(view, **batch.moments)
