"""How many tokens are generated twice when workers are killed: ``python -m tests.chaos.twice --kills 100``.

The same plan is played with checkpoints and without; nothing else happens but SIGKILL, and nothing streams.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
import tempfile
from pathlib import Path

import click

from .audit import audit
from .config import Config
from .report import report, tokens_bound, tokens_twice
from .run import run

_NEVER = 1_000_000  # tokens between two checkpoints
_SETTLE_S = 300.0  # without checkpoints nothing clears the charge of a crash: suspects are run one after another
_PER_SECOND = 40  # requests: more than the workers can serve, so that all slots run when a kill comes


@click.command()
@click.option("--kills", default=100, show_default=True, help="SIGKILLs, one a second.")
@click.option("--seed", default=1, show_default=True, help="Draws the requests and the kills.")
@click.option("--checkpoint-tokens", default=16, show_default=True, help="Output tokens between two checkpoints.")
def main(kills: int, seed: int, checkpoint_tokens: int) -> None:
    """Count tokens generated twice, with checkpoints and without; exit code 1 when they are more than the bound."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    logging.disable(logging.WARNING)  # the clients tell of every outage
    config = Config(
        seed=seed,
        duration_s=float(kills),
        requests=_PER_SECOND * kills,
        strikes={"kill": kills},
        checkpoint_tokens=checkpoint_tokens,
        streams=0.0,
        settle_s=_SETTLE_S,
    )
    ok = True
    click.echo(f"{'checkpoints':<20}{'kills':>8}{'taken back':>12}{'output tokens':>15}{'twice':>8}{'bound':>8}")
    for name, every in ((f"every {checkpoint_tokens} tokens", checkpoint_tokens), ("none", _NEVER)):
        with tempfile.TemporaryDirectory(prefix="tokenmill-chaos-") as folder:
            evidence = run(dataclasses.replace(config, checkpoint_tokens=every), Path(folder))
        verdict, twice, bound = audit(evidence), tokens_twice(evidence), tokens_bound(evidence)
        if every != _NEVER and not (verdict.ok and twice <= bound):
            click.echo("\n".join(report(evidence, verdict)), err=True)
            ok = False
        click.echo(
            f"{name:<20}{evidence.struck['kill']:>8,}{evidence.stats['reclaimed']:>12,}{evidence.generated:>15,}"
            f"{twice:>8,}{bound if every < _NEVER else '–':>8}"
        )
    sys.exit(not ok)


if __name__ == "__main__":
    main()
