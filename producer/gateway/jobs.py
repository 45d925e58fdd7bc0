"""Jobs: requests that are accepted at once, and asked about later."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tokenmill.producer.client import FINISHED, ReplyGoneError
from tokenmill.producer.gateway.callers import Caller
from tokenmill.producer.gateway.desk import ENDLESS, Desk
from tokenmill.producer.gateway.errors import ApiError
from tokenmill.producer.request import check_request
from tokenmill.shared import calls
from tokenmill.shared.errors import TokenmillError, UsageError
from tokenmill.shared.protocol import Reply, StrictRequest, TokenLogprob, Usage

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]

MOST_ITEMS = 1000  # of one job; more are a batch file
JOB_KEPT_MS = 86_400_000
_OURS = ("id", "stream", "reply_to", "idempotency_key")  # fields of a request that the gateway sets

_reply = msgspec.json.Decoder(Reply)


class ItemError(msgspec.Struct, kw_only=True):
    """Why an item failed."""

    code: str
    message: str


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One input of a job, and what became of it."""

    index: int
    status: Status
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    usage: Usage | None = None
    error: ItemError | None = None


class Counts(msgspec.Struct, kw_only=True):
    """Items by status."""

    total: int
    queued: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0


class Job(msgspec.Struct, kw_only=True):
    """A job: failed where all its items are, cancelled where someone has cancelled it, else succeeded at its end."""

    id: str
    status: Status
    created: int
    counts: Counts
    items: list[Item]


class Record(msgspec.Struct, kw_only=True):
    """What the broker keeps of a job, for a day: an id for each item, or why it has none."""

    caller: str
    created: int
    inputs: str  # a digest of them
    items: list[str | ItemError]
    cancelled: bool = False


class Jobs:
    """All jobs of one queue; a gateway that is started again finds them at the broker."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._broker = desk.client.broker

    async def begin(self, caller: Caller, inputs: Sequence[Any], key: str | None) -> str:
        """Enqueue the inputs, each the fields of a request; one that is not valid fails alone. The job's id.

        Under a known idempotency key it is the first job with that key.
        """
        job_id, digest = _job_id(caller, key), hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()
        if key is not None and (known := await self._find(job_id)) is not None:
            if known.inputs != digest:
                raise ApiError(409, "another job was begun under this idempotency key", code="idempotency_conflict")
            return job_id
        requests, problems = _requests(caller.own(f"job-{job_id}"), inputs)
        self._desk.quotas.take(caller, len(requests))
        try:
            ids = await self._desk.send(requests)
        except BaseException:
            self._desk.quotas.give_back(caller, len(requests))
            raise
        sent = iter(ids)
        items = [problems[i] if i in problems else next(sent) for i in range(len(inputs))]
        await self._keep(job_id, Record(caller=caller.name, created=int(time.time()), inputs=digest, items=items))
        self._desk.run_later(self._give_back(caller, ids))
        return job_id

    async def show(self, caller: Caller, job_id: str, wait_s: float = 0.0) -> Job:
        """The job as it is now, or as soon as all its items have ended; raises ApiError 404."""
        record = await self._record(caller, job_id)
        if wait_s > 0:
            await self._ended(record, wait_s)
        return self._job(job_id, record, await self._items(record))

    async def item(self, caller: Caller, job_id: str, index: int, wait_s: float) -> Item | None:
        """One item once it has ended; None when the time is up."""
        record = await self._record(caller, job_id)
        request_id = record.items[index]
        if isinstance(request_id, str):
            try:
                await self._desk.client.wait(request_id, wait_s)
            except ReplyGoneError:
                pass
            except TokenmillError:
                return None
        [item] = await self._items(record, [index])
        return item

    async def cancel(self, caller: Caller, job_id: str) -> Job:
        """End what has not ended; what has keeps its result."""
        record = await self._record(caller, job_id)
        ids = [item for item in record.items if isinstance(item, str)]
        states = await self._broker.all([calls.cancel(self._broker.keys, request_id) for request_id in ids])
        if any(state not in FINISHED for state in states):
            record.cancelled = True
            await self._keep(job_id, record)
        await self._ended(record, 1.0)
        return self._job(job_id, record, await self._items(record))

    async def _find(self, job_id: str) -> Record | None:
        kept = await self._broker.call(calls.job(self._broker.keys, job_id))
        return None if kept is None else msgspec.json.decode(kept, type=Record)

    async def _record(self, caller: Caller, job_id: str) -> Record:
        record = await self._find(job_id)
        if record is None or record.caller != caller.name:
            raise ApiError(404, f"no job `{job_id[:64]}`", code="no_such_job")
        return record

    async def _keep(self, job_id: str, record: Record) -> None:
        kept = calls.keep_job(self._broker.keys, job_id, msgspec.json.encode(record), JOB_KEPT_MS)
        await self._broker.call(kept)

    async def _items(self, record: Record, indices: Sequence[int] | None = None) -> list[Item]:
        """Items as they are now, in two commands each."""
        chosen = range(len(record.items)) if indices is None else indices
        ids = {i: item for i in chosen if isinstance(item := record.items[i], str)}
        keys = self._broker.keys
        states = await self._broker.all([calls.state(keys, request_id) for request_id in ids.values()])
        replies = await self._broker.all([calls.reply(keys, request_id) for request_id in ids.values()])
        found = {i: _item(i, state, reply) for i, state, reply in zip(ids, states, replies, strict=True)}
        return [found[i] if i in found else _failed(i, record.items[i]) for i in chosen]

    async def _ended(self, record: Record, wait_s: float) -> None:
        """Wait until all items have ended, or the time is up."""
        waits = [self._desk.client.wait(item, wait_s) for item in record.items if isinstance(item, str)]
        await asyncio.gather(*waits, return_exceptions=True)

    async def _give_back(self, caller: Caller, ids: Sequence[str]) -> None:
        """Let each item count against its caller until it ends."""
        task = asyncio.current_task()
        if task is not None:
            task.set_name(ENDLESS)

        async def one(request_id: str) -> None:
            try:
                await self._desk.client.wait(request_id)
            finally:
                self._desk.quotas.give_back(caller, 1)

        await asyncio.gather(*map(one, ids), return_exceptions=True)

    def _job(self, job_id: str, record: Record, items: list[Item]) -> Job:
        counts = Counter(item.status for item in items)
        return Job(
            id=job_id,
            status=_status(counts, len(items), cancelled=record.cancelled),
            created=record.created,
            counts=Counts(total=len(items), **{str(status): n for status, n in counts.items()}),
            items=items,
        )


def _job_id(caller: Caller, key: str | None) -> str:
    """A new id, or the one that belongs to an idempotency key of this caller."""
    return uuid.uuid4().hex if key is None else uuid.uuid5(uuid.NAMESPACE_OID, f"{caller.name} {key}").hex


def _requests(prefix: str, inputs: Sequence[Any]) -> tuple[list[StrictRequest], dict[int, ItemError]]:
    """The requests of the valid inputs, and what is wrong with the others."""
    requests, problems = [], {}
    for i, fields in enumerate(inputs):
        try:
            requests.append(check_request({"id": f"{prefix}.{i}", **_own_fields(fields)}))
        except UsageError as error:
            problems[i] = ItemError(code="invalid_request", message=str(error))
    return requests, problems


def _own_fields(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise UsageError("an input is an object with `prompt` or `messages`")
    if ours := [name for name in _OURS if name in fields]:
        raise UsageError(f"{ours[0]}: the gateway sets it itself")
    return fields


def _status(counts: Counter[Status], total: int, *, cancelled: bool) -> Status:
    if counts["queued"] == total:
        return "queued"
    if counts["queued"] or counts["running"]:
        return "running"
    if cancelled:
        return "cancelled"
    return "failed" if counts["failed"] == total else "succeeded"


def _item(index: int, state: str | None, body: bytes | None) -> Item:
    if body is None:
        if state in (None, "waiting", "running"):
            return Item(index=index, status="running" if state == "running" else "queued")
        error = ItemError(code="reply_gone", message="the result has expired")
        return Item(index=index, status="failed", error=error)
    reply = _reply.decode(body)
    given = {
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stop_reason,
        "token_ids": reply.token_ids,
        "logprobs": reply.logprobs,
        "usage": reply.usage,
    }
    if reply.error is not None:
        error = ItemError(code=reply.error.code, message=reply.error.message)
        return Item(index=index, status="failed", error=error, **given)  # type: ignore[arg-type]
    if reply.finish_reason == "deadline":
        late = ItemError(code="timeout", message="not finished in time")
        return Item(index=index, status="failed", error=late, **given)  # type: ignore[arg-type]
    status: Status = "cancelled" if reply.finish_reason == "cancelled" else "succeeded"
    return Item(index=index, status=status, **given)  # type: ignore[arg-type]


def _failed(index: int, error: str | ItemError) -> Item:
    return Item(index=index, status="failed", error=error if isinstance(error, ItemError) else None)
