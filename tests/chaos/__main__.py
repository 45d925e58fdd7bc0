"""Command line of the chaos harness: ``python -m tests.chaos --duration 120 --seed 1``."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from .audit import audit
from .config import Config
from .disturbances import DISTURBANCES
from .plan import usual_strikes
from .report import report
from .run import run


def _counts(_ctx: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    counts = {}
    for item in given:
        name, _, count = item.partition("=")
        if name not in DISTURBANCES or not count.isdigit():
            raise click.BadParameter(f"{item!r}: use NAME=COUNT with a name of {', '.join(DISTURBANCES)}")
        counts[name] = int(count)
    return counts


@click.command()
@click.option("--duration", "duration_s", default=120.0, show_default=True, help="Seconds to spread the requests over.")
@click.option("--seed", default=1, show_default=True, help="Draws the requests and the disturbances.")
@click.option("--requests", type=int, help="How many requests; 16 a second where nothing is said.")
@click.option(
    "--count", "counts", multiple=True, callback=_counts, help="NAME=COUNT of a disturbance; the others by rate."
)
@click.option("--only", multiple=True, type=click.Choice(list(DISTURBANCES)), help="No other disturbances than these.")
@click.option("--workers", default=4, show_default=True, help="Worker processes.")
@click.option("--slots", default=8, show_default=True, help="Slots of each.")
@click.option("--lease-ms", default=1000, show_default=True, help="Lease of a request.")
@click.option("--checkpoint-tokens", default=16, show_default=True, help="Output tokens between two checkpoints.")
@click.option("--streams", default=0.12, show_default=True, help="Share of the requests that stream.")
@click.option("--fsync", type=click.Choice(["always", "everysec"]), default="always", show_default=True)
@click.option("--server", type=click.Path(exists=True, path_type=Path), help="A redis-server or valkey-server binary.")
@click.option("--control", is_flag=True, help="Plain BLPOP workers, which have to fail.")
def main(requests: int | None, counts: dict[str, int], only: tuple[str, ...], **fields: Any) -> None:
    """Send requests to workers and break everything meanwhile; exit code 1 when a promise was broken."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    logging.disable(logging.WARNING)  # the clients tell of every outage
    strikes = usual_strikes(fields["duration_s"], counts)
    if only:
        strikes = {name: count for name, count in strikes.items() if name in only}
    if fields["control"]:
        fields["streams"] = 0.0
    config = Config(requests=requests or round(16 * fields["duration_s"]), strikes=strikes, **fields)
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-chaos-"))
    evidence = run(config, folder)
    verdict = audit(evidence)
    click.echo("\n".join(report(evidence, verdict)))
    if verdict.ok:
        shutil.rmtree(folder)
    else:
        click.echo(f"logs of broker and workers: {folder}")
    sys.exit(0 if verdict.ok else 1)


if __name__ == "__main__":
    main()
