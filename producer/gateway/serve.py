"""Runs the gateway under uvicorn."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path

from tokenmill.producer.aio import AsyncClient
from tokenmill.producer.batches.office import Office
from tokenmill.producer.gateway.app import make_app
from tokenmill.producer.gateway.callers import Callers
from tokenmill.producer.gateway.desk import Desk
from tokenmill.producer.gateway.quotas import Quotas
from tokenmill.shared.errors import UsageError
from tokenmill.shared.settings import Settings

log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DRAIN_S = 30
_FORM_BYTES = 1 << 16  # of an upload, around its file


def serve(url: str, settings: Settings, *, keys: str | None, keys_file: Path | None) -> None:
    """Serve one queue until SIGTERM or Ctrl-C, which let running calls end for half a minute."""
    import uvicorn

    callers = Callers.parse(_text(keys, keys_file))
    if not len(callers) and settings.host not in _LOOPBACK:
        raise UsageError(
            f"without API keys the gateway listens on loopback only, not on {settings.host}: give --api-keys"
        )

    def make_desk() -> Desk:
        quotas = Quotas(calls_per_minute=settings.rate_limit, max_pending=settings.max_pending, clock=time.monotonic)
        client = AsyncClient(url, settings.queue)
        return Desk(client, callers, quotas, timeout_s=settings.request_timeout_s)

    uploads = settings.max_file_bytes + _FORM_BYTES
    office = Office.of(url, settings)
    app = make_app(make_desk, office, max_body_bytes=settings.max_body_bytes, max_upload_bytes=uploads)
    log.info(
        "gateway of queue %s on http://%s:%d, %d API keys", settings.queue, settings.host, settings.port, len(callers)
    )
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # uvicorn raises them again when it has stopped: to stop is no failure
        signal.signal(number, lambda *_: None)
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def _text(keys: str | None, keys_file: Path | None) -> str:
    if keys and keys_file:
        raise UsageError("give --api-keys or --api-keys-file, not both")
    if keys_file is None:
        return keys or ""
    try:
        return keys_file.read_text()
    except OSError as error:
        raise UsageError(f"the API keys in {keys_file} cannot be read: {error.strerror}") from None
