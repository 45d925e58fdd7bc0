"""Run the measurements, print what they find, and write it into ``docs/benchmarks.md``.

Without names all of them run. Exit code 1 when a target is missed, 2 when something that all of them need is not there;
a peer that is not installed is only said.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import msgspec

from benchmarks import machine, plots, report
from benchmarks.result import Result, failed
from benchmarks.settings import PEERS, QUESTIONS, ROOT, Bench, backends
from tokenmill.shared.errors import TokenmillError, UsageError

NAMES = (
    "whole-system",
    "decode",
    "batching",
    "slot-counts",
    "sharing",
    "overhead",
    "first-token",
    "chunked-prefill",
    "prefix-reuse",
    "kv-memory",
)
PAGE = ROOT / "docs" / "benchmarks.md"
KEPT = ROOT / "out" / "benchmarks.json"  # the last result of each measurement: one can be repeated alone


def main() -> int:
    options = parse()
    bench = Bench(
        backends=backends(options.backends.split(","), options.model),
        rounds=options.rounds or (1 if options.quick else 3),
        quick=options.quick,
        peers=options.peers,
        questions=options.questions,
        slots=8 if options.quick else options.slots,
        threads=options.threads,
    )
    results = []
    try:
        for name in options.names or NAMES:
            print(f"{name} …", file=sys.stderr, flush=True)
            results.append(run(name, bench))
            print(report.text(results[-1]), end="\n\n", flush=True)
            if options.write:
                write(results)
    except TokenmillError as error:
        print(error, file=sys.stderr)
        return UsageError.exit_code
    return 1 if failed(results) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--backends", default="fast,numpy", help="which to measure, the main one first")
    parser.add_argument("--model", default="smollm2", help="toy: only to see that everything works")
    parser.add_argument("--rounds", type=int, help="repetitions of what is compared; 3")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: figures mean nothing")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="JSON Lines file of {'turns': [TEXT, …]}")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder of the peers' environments")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and its plots")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown measurement {', '.join(sorted(unknown))}: use {', '.join(NAMES)}")
    return options


def run(name: str, bench: Bench) -> Result:
    """One measurement, with its date."""
    measure: Callable[[Bench], Result] = import_module(f"benchmarks.measure.{name.replace('-', '_')}").measure
    start = time.perf_counter()
    result = measure(bench)
    took = time.perf_counter() - start
    result.measured = f"{time.strftime('%Y-%m-%d %H:%M')}, {took:.0f} s, load {machine.load():.1f} at the end"
    return result


def write(results: list[Result]) -> None:
    """The page from these results, and for the other measurements from the last that were written."""
    kept = msgspec.json.decode(KEPT.read_bytes(), type=dict[str, Result]) if KEPT.is_file() else {}
    kept |= {result.name: result for result in results}
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
    ordered = [kept[name] for name in NAMES if name in kept]
    for result in ordered:
        for plot in result.plots:
            plots.draw(plot, PAGE.parent / "plots")
    PAGE.write_text(report.page(ordered, machine.describe()))


if __name__ == "__main__":
    sys.exit(main())
