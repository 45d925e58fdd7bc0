"""The verbs of batches on the command line."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from tokenmill.shared.errors import BrokerUnreachableError, TokenmillError, UsageError
from tokenmill.shared.options import extra_option, option
from tokenmill.shared.settings import DEFAULTS

CALLER = "anyone"  # who the gateway takes everybody for that has no key


@click.group()
def batch() -> None:
    """Answer files of requests in the background, as OpenAI's Batch API does.

    Lines are {"custom_id", "method": "POST", "url", "body"}. They run at low priority, by `tokenmill batch-worker`.
    """


def _place(command: Any) -> Any:
    for decorate in (option("files_dir"), option("queue"), option("redis")):
        command = decorate(command)
    return command


@batch.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="IN.jsonl")
@_place
@option("max_batch_lines")
@option("max_file_bytes")
@extra_option("endpoint", help="/v1/chat/completions or /v1/completions; that of the first line by default.")
@extra_option("window", default="24h", help="How long it may take: 30m, 24h, 7d.")
@extra_option("caller", default=CALLER, help="Whose batch it is: the name of an API key.")
def submit(source: Path, endpoint: str | None, window: str, caller: str, **given: Any) -> None:
    """Begin a batch over a file and print its id."""
    office = _office(given)
    with source.open("rb") as file:
        kept = office.files.add(caller, source.name, "batch", iter(lambda: file.read(1 << 16), b""))
    click.echo(office.submit(caller, kept.id, endpoint or _first_url(source), window=window).id)


@batch.command("list")
@_place
@extra_option("caller", default=CALLER, help="Whose batches: the name of an API key.")
@extra_option("limit", default=20, help="How many, the newest first.")
def list_batches(caller: str, limit: int, **given: Any) -> None:
    """List batches, the newest first."""
    for found in _office(given).records.list(caller, limit):
        counts = found.counts
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.created_at))
        done = counts.completed + counts.failed
        click.echo(
            f"{found.id}  {made}  {found.status:11}  {done:,} of {counts.total:,} lines, {counts.failed:,} failed"
        )


@batch.command()
@click.argument("batch_id", metavar="ID")
@_place
@extra_option("json", is_flag=True, help="Print all that is known as JSON.")
@extra_option("wait", is_flag=True, help="Wait until it has ended; exit code 1 unless it is completed.")
def status(batch_id: str, json: bool, wait: bool, **given: Any) -> int:
    """Say how far a batch is."""
    records = _office(given).records
    found = records.find(batch_id)
    while found is not None and wait and not found.ended:
        time.sleep(0.5)
        found = records.find(batch_id)
    if found is None:
        raise UsageError(f"no batch `{batch_id[:64]}`: see `tokenmill batch list`")
    if json:
        click.echo(msgspec.json.encode(found))
    else:
        click.echo(
            f"{found.status}: {found.counts.completed:,} completed, {found.counts.failed:,} failed, "
            f"of {found.counts.total:,} lines"
        )
        for error in found.errors:
            click.echo(f"{f'line {error.line}: ' if error.line else ''}{error.message}")
    return 1 if wait and found.status != "completed" else 0


@batch.command()
@click.argument("batch_id", metavar="ID")
@_place
def cancel(batch_id: str, **given: Any) -> None:
    """Begin no more lines of a batch; what is answered is kept."""
    records = _office(given).records
    found = records.find(batch_id)
    if found is None:
        raise UsageError(f"no batch `{batch_id[:64]}`: see `tokenmill batch list`")
    if found.ended:
        raise TokenmillError(f"the batch has ended already ({found.status})")
    records.reach(batch_id, "cancelling_at")


@batch.command()
@click.argument("batch_id", metavar="ID")
@_place
@extra_option("output", short="-o", default="-", metavar="OUT.jsonl", help="File of the answers; - is stdout.")
@extra_option("errors", metavar="ERRORS.jsonl", help="File of the lines that failed.")
def download(batch_id: str, output: str, errors: str | None, **given: Any) -> None:
    """Write the answers of a batch that has ended."""
    office = _office(given)
    found = office.records.find(batch_id)
    if found is None or not found.ended:
        raise UsageError(f"batch `{batch_id[:64]}` is unknown or has not ended: see `tokenmill batch status`")
    for file_id, target in ((found.output_file_id, output), (found.error_file_id, errors)):
        if target is None:
            continue
        with sys.stdout.buffer if target == "-" else Path(target).open("wb") as out:
            if file_id is not None:
                with office.files.path(found.caller, file_id).open("rb") as file:
                    shutil.copyfileobj(file, out)


@click.command("batch-worker", short_help="Run the batches of a queue.")
@_place
@option("max_batch_lines")
@option("max_file_bytes")
def batch_worker(**given: Any) -> None:
    """Run the batches of a queue: feed their lines to its workers and gather the answers.

    Several may run, also on several machines that share the folder of files. Killed ones lose nothing.
    """
    from tokenmill.producer.batches.worker import run_worker

    run_worker(_office(given))


def _office(given: dict[str, Any]) -> Any:
    from tokenmill.producer.batches.office import Office

    url = given.pop("redis")
    if url is None:
        raise BrokerUnreachableError("no broker is named: give --redis redis://HOST:PORT/0 or set TOKENMILL_REDIS")
    office = Office.of(url, dataclasses.replace(DEFAULTS, **given))
    office.broker.check()
    return office


def _first_url(source: Path) -> str:
    from tokenmill.producer.batches.line import BadLineError, parse_line

    with source.open("rb") as file:
        try:
            return parse_line(file.readline()).url
        except BadLineError as error:
            raise UsageError(f"{source}, line 1: {error}") from None
