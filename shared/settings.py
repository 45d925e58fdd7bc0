"""Every default in one table; the options of the command line are made from it (``options.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

ENV_PREFIX = "TOKENMILL_"


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The defaults; a name ends in its unit (``_s`` seconds, ``_ms`` milliseconds, ``_bytes``, ``_tokens``)."""

    # where
    redis: str | None = _setting(None, "Redis or Valkey: redis://HOST:PORT/DB.")
    queue: str = _setting("default", "Name of the queue.")
    # a worker
    model: str = _setting("smollm2", "Model: smollm2, gguf:PATH, llamacpp:PATH, toy, or module:attr.")
    backend: str = _setting("auto", "What computes GGUF models: fast (kernels), numpy, or auto: fast where it can.")
    gpu_layers: int = _setting(-1, "Layers of a llamacpp: model that GPUs compute, if there are any; -1 for all.")
    slots: int = _setting(8, "Requests that one worker runs at the same time.")
    threads: int = _setting(1, "Processor threads of one worker; more workers use more processors better.")
    workers: int = _setting(2, "Worker processes to start.")
    max_context: int = _setting(2048, "Tokens that one slot can hold, prompt and output together.")
    kv_memory_mib: int = _setting(2048, "MiB of memory for the keys and values of all contexts.")
    max_step_tokens: int | None = _setting(
        None, "Tokens computed in one step at most; without it, as many as slow running requests down twofold."
    )
    max_wait_ms: int = _setting(0, "Milliseconds that new requests wait for a fuller batch; 0 starts them at once.")
    checkpoint_tokens: int = _setting(16, "Output tokens between two checkpoints of a request.")
    block_s: float = _setting(0.25, "Seconds that an idle worker waits on the queue before it looks around.")
    stall_timeout_s: float = _setting(60.0, "Seconds after which a step that does not end counts as hung.")
    drain_grace_s: float = _setting(20.0, "Seconds to finish running requests after SIGTERM.")
    frontend: str = _setting("native", "Where requests come from: native, or rq: jobs of the RQ queue of that name.")
    rq_serializer: str = _setting(
        "json", "How RQ jobs are written: json, or pickle, which runs code of whoever may enqueue."
    )
    # who watches a process
    metrics_host: str = _setting("127.0.0.1", "Address that /metrics, /livez and /readyz listen on.")
    metrics_port: int | None = _setting(None, "Port of /metrics, /livez and /readyz; 0 takes a free one.")
    # the gateway
    host: str = _setting("127.0.0.1", "Address that the gateway listens on.")
    port: int = _setting(8080, "Port that the gateway listens on.")
    rate_limit: int = _setting(0, "Calls a minute that one API key may make; 0 is no limit.")
    max_pending: int = _setting(1000, "Requests of one API key that may wait or run at the same time; 0 is no limit.")
    max_body_bytes: int = _setting(2 * 1024 * 1024, "Largest body of a call.")
    request_timeout_s: float = _setting(600.0, "Seconds that a call may wait for its whole answer.")
    # batches
    files_dir: str = _setting(
        "tokenmill-files", "Folder of the files of batches, which gateways and batch workers share."
    )
    max_batch_lines: int = _setting(50_000, "Lines of one batch at most.")
    max_file_bytes: int = _setting(200 * 1024 * 1024, "Largest file that may be uploaded.")
    # the broker
    lease_ms: int = _setting(10_000, "Milliseconds that a worker owns a request without renewing it.")
    reply_ttl_ms: int = _setting(3_600_000, "Milliseconds that a reply is kept.")
    idempotency_ttl_ms: int = _setting(86_400_000, "Milliseconds that an idempotency key, and its reply, are kept.")
    max_payload_bytes: int = _setting(256 * 1024, "Largest request, as JSON.")


DEFAULTS = Settings()


def flag(name: str) -> str:
    """Option of a setting: ``max_context`` → ``--max-context``; seconds are the unit when none is said."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def envvar(name: str) -> str:
    """Environment name of a setting: ``max_context`` → ``TOKENMILL_MAX_CONTEXT``, ``block_s`` → ``TOKENMILL_BLOCK``."""
    return ENV_PREFIX + name.removesuffix("_s").upper()


def help_text(name: str) -> str:
    """What a setting means, in one line."""
    return next(str(f.metadata["help"]) for f in fields(Settings) if f.name == name)
