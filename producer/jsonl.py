"""Files of requests: one JSON object a line, checked as a whole before any of it is enqueued."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, Self

import msgspec

from tokenmill.producer.request import check_request, explain
from tokenmill.shared.errors import UsageError
from tokenmill.shared.protocol import StrictRequest

STDIO = "-"
_PROBLEMS_TOLD = 10
_SPOOL_BYTES = 16 * 1024 * 1024  # stdin beyond this goes to disk


class Size(NamedTuple):
    """How much there is to do, or was done."""

    requests: int
    max_tokens: int  # of all of them together


class RequestFile:
    """A JSONL file of requests (or ``-``, stdin), read line by line as often as needed; a context manager.

    A line without an ``id`` gets ``<prefix>-<line number>``, the same in every pass. Blank lines are skipped.
    """

    def __init__(self, path: str, *, prefix: str) -> None:
        self.name = "stdin" if path == STDIO else path
        self._prefix = prefix
        self._file = _open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def check(self) -> Size:
        """Check every line; returns the size of the work, or raises UsageError with the first problems by line."""
        problems: list[str] = []
        count = max_tokens = 0
        seen: dict[str, int] = {}
        for number, line in self._lines():
            count += 1
            try:
                request = self._parse(number, line)
                max_tokens += request.max_tokens
                if (first := seen.setdefault(request.id, number)) != number:
                    raise UsageError(f"id: `{request.id}` is already the id of line {first}")
            except UsageError as error:
                problems.append(f"{self.name}:{number}: {error}")
        if problems:
            raise UsageError(_summary(self.name, problems))
        if not count:
            raise UsageError(f'{self.name} holds no request: give one JSON object a line, such as {{"prompt": "Hi"}}')
        return Size(count, max_tokens)

    def requests(self) -> Iterator[StrictRequest]:
        """The requests in the order of their lines."""
        for number, line in self._lines():
            yield self._parse(number, line)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        return ((number, line) for number, line in enumerate(self._file, start=1) if line.strip())

    def _parse(self, number: int, line: bytes) -> StrictRequest:
        try:
            fields = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"not JSON: {explain(error)}") from None
        except RecursionError:
            raise UsageError("nested too deeply") from None
        if not isinstance(fields, dict):
            raise UsageError('a JSON object is expected, such as {"prompt": "Hi"}')
        fields.setdefault("id", f"{self._prefix}-{number}")
        return check_request(fields)


def _open(path: str) -> IO[bytes]:
    if path == STDIO:
        spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 (closed by its RequestFile)
        shutil.copyfileobj(sys.stdin.buffer, spool)
        return spool
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _summary(name: str, problems: list[str]) -> str:
    more = len(problems) - _PROBLEMS_TOLD
    told = problems[:_PROBLEMS_TOLD] + ([f"and {more} more"] if more > 0 else [])
    if len(told) == 1:
        return f"{told[0]} (nothing was enqueued)"
    return "\n  ".join([f"{len(problems)} lines of {name} are broken; nothing was enqueued", *told])
