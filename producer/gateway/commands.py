"""The gateway's verb of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from tokenmill.shared.errors import BrokerUnreachableError, UsageError
from tokenmill.shared.options import extra_option, option
from tokenmill.shared.settings import DEFAULTS


@click.command(short_help="Serve a queue over HTTP.")
@option("redis")
@option("queue")
@option("host")
@option("port", type=click.IntRange(1, 65535))
@extra_option("api_keys", metavar="NAME:KEY,…", help="Who may call; without keys it listens on loopback only.")
@extra_option(
    "api_keys_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The same from a file of NAME:KEY lines.",
)
@option("rate_limit", type=click.IntRange(min=0))
@option("max_pending", type=click.IntRange(min=0))
@option("max_body_bytes")
@option("files_dir")
@option("max_file_bytes")
@option("request_timeout_s", type=click.FloatRange(min=0, min_open=True))
def serve(redis: str | None, api_keys: str | None, api_keys_file: Path | None, **given: Any) -> None:
    """Serve a queue over HTTP: OpenAI's completions, chats, files and batches, and jobs that are answered at once.

    Documentation is at /docs. Thousands of callers share two connections to the broker.
    """
    if redis is None:
        raise BrokerUnreachableError("no broker is named: give --redis redis://HOST:PORT/0 or set TOKENMILL_REDIS")
    try:
        from tokenmill.producer.gateway.serve import serve as run
    except ModuleNotFoundError as error:
        raise UsageError(f"the gateway needs {error.name}: install tokenmill[http]") from error
    run(redis, dataclasses.replace(DEFAULTS, **given), keys=api_keys, keys_file=api_keys_file)
