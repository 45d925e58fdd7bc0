"""All that the batches of one queue take: their records, their files, and the RQ queue of their jobs."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import redis
from rq import Queue, Retry
from rq.job import Dependency
from rq.serializers import JSONSerializer

from tokenmill.producer.batches.files import FileStore
from tokenmill.producer.batches.record import Batch, Records
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.connection import address_of, plain_errors
from tokenmill.shared.errors import UsageError
from tokenmill.shared.settings import Settings

JOB_TIMEOUT_S = 7 * 86_400
_RETRIES = 1000  # a chunk that begins again repeats nothing: it is given up by the batch's expiry, not by counting
_RETRY = Retry(max=_RETRIES)
_WINDOW_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_LONGEST_WINDOW_S = 7 * 86_400


@dataclass(frozen=True, slots=True)
class Office:
    """One queue's batches."""

    url: str
    queue: str
    folder: str
    max_lines: int
    max_file_bytes: int

    @classmethod
    def of(cls, url: str, settings: Settings) -> Office:
        """The one that the settings describe."""
        folder = str(Path(settings.files_dir).absolute())
        return cls(url, settings.queue, folder, settings.max_batch_lines, settings.max_file_bytes)

    @property
    def broker(self) -> Broker:
        """The queue that the lines go to."""
        return Broker(connect(self.url), self.queue)

    @property
    def files(self) -> FileStore:
        """Inputs and outputs."""
        return FileStore(Path(self.folder), max_bytes=self.max_file_bytes)

    @property
    def records(self) -> Records:
        """What is known of the batches."""
        client = self._client()
        return Records(client, Broker(client, self.queue).keys, address_of(client))

    def jobs(self) -> Queue:
        """The RQ queue of this queue's batches."""
        return Queue(f"tokenmill-batches-{self.queue}", connection=self._client(), serializer=JSONSerializer)

    def submit(
        self,
        caller: str,
        input_file_id: str,
        endpoint: str,
        *,
        window: str = "24h",
        metadata: dict[str, str] | None = None,
    ) -> Batch:
        """Begin a batch over an input file; UsageError if there is no such file."""
        self.files.path(caller, input_file_id)
        records = self.records
        now = records.now()
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            caller=caller,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + window_seconds(window),
            metadata=metadata,
        )
        records.begin(batch)
        self.enqueue("validate", f"{batch.id}-validate", batch.id)
        return batch

    def enqueue(self, work: str, job_id: str, *arguments: str | int, after: list[str] | None = None) -> None:
        """Add an RQ job of ``work.py``, to run when others have ended, whatever became of them.

        Its arguments tell neither broker nor folder, which are those of the batch worker that runs it.
        """
        with plain_errors(address_of(self._client()), self.queue):
            self.jobs().enqueue_call(
                f"tokenmill.producer.batches.work.{work}",
                args=list(arguments),
                job_id=job_id,
                retry=_RETRY,
                timeout=JOB_TIMEOUT_S,
                result_ttl=3600,
                depends_on=Dependency(jobs=list(after), allow_failure=True) if after else None,
            )

    def _client(self) -> redis.Redis:
        return connect(self.url)


def window_seconds(window: str) -> int:
    """Seconds of a completion window as ``24h``, ``30m`` or ``7d``; raises UsageError."""
    number, unit = window[:-1], _WINDOW_UNITS.get(window[-1:], 0)
    seconds = int(number) * unit if number.isdecimal() and len(number) < 9 else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise UsageError(f"completion window {window[:16]!r} is not valid: use 30m, 24h, or up to 7d")
    return seconds
