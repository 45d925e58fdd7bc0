"""The RQ jobs of batches: look at the input, answer its chunks, put the answers together. Each may begin again."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from tokenmill.producer.batches.line import Outcome, Task
from tokenmill.producer.batches.office import Office
from tokenmill.producer.batches.part import Part, outcomes
from tokenmill.producer.batches.record import Batch, BatchError, Moment
from tokenmill.producer.batches.validation import check
from tokenmill.producer.feed import Feed
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.protocol import Reply, StrictRequest

_POLL_S = 0.25
_LOOK_S = 1.0  # between two looks whether the batch goes on
_MOST_PROBLEMS = 1000  # different ones that are counted
_ABANDONED = {
    "batch_cancelled": "the batch was cancelled before this line was answered",
    "batch_expired": "the batch expired before this line was answered",
}


class _Here:
    """Whose batches this process works for; a forked process inherits it."""

    office: Office | None = None


def work_for(office: Office) -> None:
    """Let the jobs of this process, and of those that it forks, work for this office."""
    _Here.office = office


def validate(batch_id: str) -> None:
    """Look at the input; enqueue its chunks and what ends the batch, or let it fail."""
    office, batch = _open(batch_id)
    if batch is None or batch.ended:
        return
    found = check(office.files.path(batch.caller, batch.input_file_id), batch.endpoint, max_lines=office.max_lines)
    if found.errors:
        office.records.reach(batch_id, "failed_at", errors=msgspec.json.encode(found.errors))
        return
    chunks = msgspec.json.encode(found.chunks)
    office.records.reach(batch_id, "in_progress_at", chunks=chunks, total=str(found.total))
    names = [f"{batch_id}-{number}" for number in range(len(found.chunks))]
    for number, name in enumerate(names):
        office.enqueue("answer", name, batch_id, number)
    office.enqueue("finish", f"{batch_id}-finish", batch_id, after=names)


def answer(batch_id: str, number: int) -> None:
    """Answer the lines of one chunk that have no answer yet."""
    office, batch = _open(batch_id)
    if batch is None or batch.ended:
        return
    alive = _parent_check()
    with Part(_part(office, batch, number), alive=alive) as part:
        _Chunk(office, batch, number, part).run(alive)


def finish(batch_id: str) -> None:
    """Put the answers of all chunks together: those that are, and the errors."""
    office, batch = _open(batch_id)
    if batch is None or batch.ended:
        return
    office.records.reach(batch_id, "finalizing_at")
    stop = office.records.stop_code(batch)
    paths, counts, problems = _gather(office, batch, stop or "batch_expired")
    ended: dict[str, bytes | str] = {
        kind: _adopt(office, batch, path, kind) for kind, path in paths.items() if counts[kind]
    }
    moment: Moment = "completed_at"
    if stop is not None:
        moment = "cancelled_at" if stop == "batch_cancelled" else "expired_at"
    elif not counts["output"]:
        moment = "failed_at"
        message, n = problems.most_common(1)[0]
        said = f"every line failed, {n:,} of {counts['error']:,} with: {message}"
        ended["errors"] = msgspec.json.encode([BatchError(code="all_lines_failed", message=said)])
    office.records.reach(batch_id, moment, **ended)


class _Chunk:
    """The lines of a chunk on their way through the queue."""

    def __init__(self, office: Office, batch: Batch, number: int, part: Part) -> None:
        self._office, self._batch, self._number, self._part = office, batch, number, part
        self._order: deque[Task] = deque()  # read, without an outcome
        self._replies: list[Reply] = []  # of the first of them
        self._stop: str | None = None  # why nothing more is begun

    def run(self, alive: Callable[[], None]) -> None:
        """Feed what is left until all is answered; once the batch is to stop, only until what runs has ended."""
        feed, looked = Feed(self._office.broker, self._requests()), -math.inf
        while not feed.done:
            alive()
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                self._note()
                if self._stop is None and (stop := self._office.records.stop_code(self._batch)) is not None:
                    self._stop = stop
                    feed.cancel()
            self._take(feed.poll(_POLL_S))
        self._take([])
        self._note()

    def _requests(self) -> Iterator[StrictRequest]:
        for task in _tasks(self._office, self._batch, self._number, self._part.lines):
            if self._stop is not None:
                return
            self._order.append(task)
            yield from task.requests

    def _take(self, replies: list[Reply]) -> None:
        """Write the outcomes of the lines that are complete, in their order."""
        self._replies += replies
        ready = []
        while self._order and len(self._replies) >= (n := len(self._order[0].requests)):
            ready.append(self._outcome(self._order.popleft(), self._replies[:n]))
            del self._replies[:n]
        self._part.append(ready)

    def _outcome(self, task: Task, replies: list[Reply]) -> Outcome:
        if self._stop is not None and any(reply.finish_reason == "cancelled" for reply in replies):
            return task.abandoned(self._stop, _ABANDONED[self._stop])
        return task.outcome(replies)

    def _note(self) -> None:
        self._office.records.note(self._batch.id, self._number, self._part.completed, self._part.failed)


def _parent_check() -> Callable[[], None]:
    """A check that raises when the batch worker that forked this process has gone: another will begin the job again."""
    parent = os.getppid()

    def check_parent() -> None:
        if os.getppid() != parent:
            raise TokenmillError("the batch worker has gone: its job goes on elsewhere")

    return check_parent


def _open(batch_id: str) -> tuple[Office, Batch | None]:
    if _Here.office is None:
        raise TokenmillError("jobs of batches are run by `tokenmill batch-worker`, not by other RQ workers")
    return _Here.office, _Here.office.records.find(batch_id)


def _part(office: Office, batch: Batch, number: int) -> Path:
    return office.files.workshop(batch.id) / f"part-{number:05}.jsonl"


def _tasks(office: Office, batch: Batch, number: int, skip: int) -> Iterator[Task]:
    """The lines of a chunk after the first ``skip``."""
    chunk = batch.chunks[number]
    with office.files.path(batch.caller, batch.input_file_id).open("rb") as file:
        file.seek(chunk.offset)
        for i, raw in enumerate(islice(file, chunk.lines)):
            if i >= skip:
                yield Task(raw, f"{batch.id}.{chunk.first + i}")


def _gather(office: Office, batch: Batch, stop: str) -> tuple[dict[str, Path], Counter[str], Counter[str]]:
    """Write output and errors; how many lines each has, and what the errors say."""
    folder = office.files.workshop(batch.id)
    paths = {kind: folder / f"{kind}.jsonl" for kind in ("output", "error")}
    counts, problems = Counter[str](), Counter[str]()
    with paths["output"].open("wb") as output, paths["error"].open("wb") as errors:
        for number in range(len(batch.chunks)):
            before = counts.copy()
            for raw, outcome in _all_outcomes(office, batch, number, stop):
                (errors if outcome.failed else output).write(raw)
                counts["error" if outcome.failed else "output"] += 1
                if outcome.failed and len(problems) < _MOST_PROBLEMS:
                    problems[outcome.problem] += 1
            done = counts - before
            office.records.note(batch.id, number, done["output"], done["error"])
    return paths, counts, problems


def _all_outcomes(office: Office, batch: Batch, number: int, stop: str) -> Iterator[tuple[bytes, Outcome]]:
    """Those of a part, then those of the lines that will have no answer."""
    n = 0
    for raw, outcome in outcomes(_part(office, batch, number)):
        n += 1
        yield raw, outcome
    for task in _tasks(office, batch, number, n):
        outcome = task.abandoned(stop, _ABANDONED[stop])
        yield msgspec.json.encode(outcome) + b"\n", outcome


def _adopt(office: Office, batch: Batch, path: Path, kind: str) -> str:
    file_id = f"file-{uuid.uuid5(uuid.NAMESPACE_OID, f'{batch.id} {kind}').hex}"
    return office.files.adopt(batch.caller, path, file_id, f"{batch.id}_{kind}.jsonl", "batch_output").id
