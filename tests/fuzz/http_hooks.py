"""What schemathesis cannot guess: the model's name, and a job that there is. Loaded by it (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

_MOST_TOKENS = 16


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Let valid bodies reach the worker, and end soon: a timeout that is kept is an answer of 504."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body = {**body, "model": "toy"}
    if isinstance(body, dict) and ("prompt" in body or "messages" in body):
        body = {name: value for name, value in body.items() if name != "timeout_ms"}
        if isinstance(tokens := body.get("max_tokens"), int) and tokens > _MOST_TOKENS:
            body["max_tokens"] = _MOST_TOKENS
    return body


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Ask for a job and a model that there are, every other time."""
    for name, known in (("job_id", os.environ["FUZZ_JOB"]), ("model", "toy")):
        if path_parameters and len(str(path_parameters.get(name, ""))) % 2:
            path_parameters = {**path_parameters, name: known}
    return path_parameters
