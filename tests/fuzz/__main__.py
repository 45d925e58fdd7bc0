"""``python -m tests.fuzz --count 20000 --seed 1``: fuzz two workers on a private broker, and sum it up."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .place import fuzz


def main() -> int:
    """Run once; 1 if anything was lost, wrong or blamed on us."""
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("--count", type=int, default=20_000, help="hostile payloads")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = fuzz(given.count, given.seed, Path(folder))
    print(f"seed {given.seed}: {outcome.hostile:,} hostile payloads in {outcome.seconds:.0f} s")
    for ending, count in outcome.endings.most_common():
        print(f"  {ending:22} {count:7,}")
    problems = [*map(repr, outcome.unaccounted), *outcome.wrong, *outcome.blamed_us]
    for problem in problems[:20]:
        print(f"  PROBLEM {problem[:500]}")
    print(
        f"  {len(outcome.unaccounted)} unaccounted, {len(outcome.wrong)} good ones wrong, "
        f"{len(outcome.blamed_us)} called a bug of ours"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
