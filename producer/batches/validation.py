"""The look at a whole input before anything of it is begun."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenmill.producer.batches.line import BadLineError, parse_line
from tokenmill.producer.batches.record import BatchError, Chunk
from tokenmill.producer.gateway.openai import DIALECTS

MOST_ERRORS = 20  # told of one input
CHUNK_LINES = 500
LONGEST_LINE = 1 << 20


class Checked:
    """What a look at an input found: its chunks, or what is wrong with it."""

    def __init__(self) -> None:
        self.total = 0
        self.chunks: list[Chunk] = []
        self.errors: list[BatchError] = []


def check(path: Path, endpoint: str, *, max_lines: int) -> Checked:
    """Read every line; memory is a few bytes for each. Bodies are not judged here: a bad one fails alone."""
    found = Checked()
    if endpoint not in DIALECTS:
        found.errors.append(BatchError(code="invalid_endpoint", message=f"endpoint is none of {', '.join(DIALECTS)}"))
        return found
    names: set[bytes] = set()
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file):
            problem = _problem(raw, endpoint, names)
            if problem is not None and len(found.errors) < MOST_ERRORS:
                code, message = problem
                found.errors.append(BatchError(code=code, message=message, line=number + 1))
            if number % CHUNK_LINES == 0:
                found.chunks.append(Chunk(offset=offset, first=number, lines=0))
            found.chunks[-1].lines += 1
            found.total += 1
            offset += len(raw)
    if not found.total:
        found.errors.append(BatchError(code="empty_file", message="the input has no lines"))
    if found.total > max_lines:
        message = f"the input has {found.total:,} lines; a batch has at most {max_lines:,}"
        found.errors.insert(0, BatchError(code="too_many_lines", message=message))
    return found


def _problem(raw: bytes, endpoint: str, names: set[bytes]) -> tuple[str, str] | None:
    """Code and message of what makes a line no part of a batch."""
    if len(raw) > LONGEST_LINE:
        return "line_too_long", f"a line has at most {LONGEST_LINE:,} bytes"
    try:
        line = parse_line(raw)
    except BadLineError as error:
        return "invalid_line", str(error)
    if line.url != endpoint:
        return "mismatched_url", f"url is `{line.url}`; the batch is for `{endpoint}`"
    digest = hashlib.blake2b(line.custom_id.encode(), digest_size=12).digest()
    if digest in names:
        return "duplicate_custom_id", f"custom_id `{line.custom_id[:64]}` is that of an earlier line"
    names.add(digest)
    return None
