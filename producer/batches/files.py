"""Files that callers have sent, and those that batches have made: a folder for each caller."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tokenmill.shared.errors import UsageError

_ID = re.compile(r"file-[0-9a-f]{32}")


class FileTooLargeError(UsageError):
    """More bytes than a file may have."""


class File(msgspec.Struct, kw_only=True):
    """A file, as OpenAI's API describes it."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class FileStore:
    """A folder that gateway and batch workers share. Ids of one caller open nothing of another's."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def add(self, caller: str, filename: str, purpose: str, chunks: Iterable[bytes]) -> File:
        """Keep what comes in pieces; raises FileTooLargeError, and keeps nothing then."""
        file_id = f"file-{uuid.uuid4().hex}"
        path = self._path(caller, file_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        size = 0
        partial = path.with_suffix(".part")
        try:
            with partial.open("wb") as out:
                for chunk in chunks:
                    size += len(chunk)
                    if size > self._max_bytes:
                        raise FileTooLargeError(f"the file has more than {self._max_bytes:,} bytes")
                    out.write(chunk)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return self._describe(partial, path, file_id, filename, purpose, size)

    def adopt(self, caller: str, source: Path, file_id: str, filename: str, purpose: str) -> File:
        """Make a file of what lies at ``source``, which moves; again, it is the same file."""
        path = self._path(caller, file_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.exists():
            return self._describe(source, path, file_id, filename, purpose, source.stat().st_size)
        found = self.find(caller, file_id)
        if found is None:
            raise UsageError(f"{source} is not there")
        return found

    def find(self, caller: str, file_id: str) -> File | None:
        """What is known of a file of this caller."""
        if not _ID.fullmatch(file_id):
            return None
        try:
            return msgspec.json.decode(self._path(caller, file_id).with_suffix(".json").read_bytes(), type=File)
        except FileNotFoundError:
            return None

    def list(self, caller: str) -> list[File]:
        """All files of a caller, the newest first."""
        found = (self.find(caller, path.stem) for path in (self.folder / caller).glob("file-*.json"))
        return sorted((file for file in found if file is not None), key=lambda file: (-file.created_at, file.id))

    def path(self, caller: str, file_id: str) -> Path:
        """Where the content of a file lies; raises UsageError if there is none."""
        if self.find(caller, file_id) is None:
            raise UsageError(f"no file `{file_id[:64]}`")
        return self._path(caller, file_id)

    def content(self, caller: str, file_id: str, piece: int = 1 << 16) -> Iterator[bytes]:
        """The content in pieces."""
        with self.path(caller, file_id).open("rb") as file:
            while chunk := file.read(piece):
                yield chunk

    def remove(self, caller: str, file_id: str) -> bool:
        """Forget a file; False if there was none."""
        if self.find(caller, file_id) is None:
            return False
        path = self._path(caller, file_id)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return True

    def workshop(self, batch_id: str) -> Path:
        """The folder in which the parts of a batch are made."""
        path = self.folder / "batches" / batch_id
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _path(self, caller: str, file_id: str) -> Path:
        return self.folder / caller / f"{file_id}.jsonl"

    def _describe(self, source: Path, path: Path, file_id: str, filename: str, purpose: str, size: int) -> File:
        file = File(id=file_id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose)
        source.replace(path)
        description = path.with_suffix(f".{os.getpid()}.tmp")
        description.write_bytes(msgspec.json.encode(file))
        description.replace(path.with_suffix(".json"))  # last: what has a description is whole
        return file
