"""What RQ producers enqueue: ``queue.enqueue("tokenmill.shared.jobs.generate", "Once upon a time", max_tokens=50)``."""

from __future__ import annotations

from typing import Any

from tokenmill.shared.errors import TokenmillError

GENERATE = "tokenmill.shared.jobs.generate"


def generate(prompt: str | list[int] | None = None, **fields: Any) -> dict[str, Any]:
    """Generate text; the job's result is the reply as a dict. ``fields`` are those of a request, as ``messages``.

    It stands for the work that a Tokenmill worker does in one of its slots, so calling it raises TokenmillError.
    """
    raise TokenmillError(f"jobs of {GENERATE} are run by `tokenmill worker --frontend rq`, not by other RQ workers")


def fields_of(prompt: str | list[int] | None = None, **fields: Any) -> dict[str, Any]:
    """The request that the arguments of a job make."""
    return fields if prompt is None else {"prompt": prompt, **fields}
