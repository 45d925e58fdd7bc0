"""Run the measurements, print what they find, and write it into ``docs/benchmarks.md``.

Without names all of them run. Exit code 1 when a target is missed, 2 when something that all of them need is not there;
a peer that is not installed is only said.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import msgspec

from benchmarks import machine, plots, report
from benchmarks.result import Result, failed
from benchmarks.settings import PEERS, QUESTIONS, ROOT, TRACES, Bench, backends
from tokenmill.shared.errors import TokenmillError, UsageError

NAMES = (  # the most important first: those for which no time is left are left out
    "whole-system",
    "decode",
    "first-token",
    "overhead",
    "sharing",
    "chunked-prefill",
    "prefix-reuse",
    "slot-counts",
    "quality",
    "kv-memory",
    "fill-policy",
    "padding",
    "batching",
    "gateway",
    "rq",
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
        traces=options.traces,
        slots=8 if options.quick else options.slots,
        threads=options.threads,
    )
    results: list[Result] = []
    started = time.monotonic()
    for name in options.names or NAMES:
        print(f"{name} …", file=sys.stderr, flush=True)
        if time.monotonic() - started > options.minutes * 60:
            print(f"left out: {options.minutes:g} minutes are over (see --minutes)", file=sys.stderr)
            continue
        results.append(run(name, bench))
        print(report.text(results[-1]), end="\n\n", flush=True)
        if options.write:
            write(results)
    if any(result.broken for result in results):
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
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces azure2023_*.csv")
    parser.add_argument("--minutes", type=float, default=15, help="after which no further measurement begins; 15")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder of the peers' environments")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and its plots")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("figures of --quick mean nothing: leave out --write")
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown measurement {', '.join(sorted(unknown))}: use {', '.join(NAMES)}")
    return options


def run(name: str, bench: Bench) -> Result:
    """One measurement, with its date; what ends with an error is a result that says so."""
    measure: Callable[[Bench], Result] = import_module(f"benchmarks.measure.{name.replace('-', '_')}").measure
    start = time.perf_counter()
    try:
        result = measure(bench)
    except Exception as error:  # the others must not be lost with it
        if not isinstance(error, TokenmillError):
            logging.exception("%s failed", name)
        result = Result(name, name.replace("-", " ").capitalize(), f"Not measured: {error}", broken=True)
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
    for plot in (plot for result in ordered for plot in result.plots):
        try:
            plots.draw(plot, PAGE.parent / "plots")
        except UsageError as error:
            print(error, file=sys.stderr)
    missing = [name for name in NAMES if name not in kept]
    PAGE.write_text(report.page(ordered, machine.describe(), missing))


if __name__ == "__main__":
    sys.exit(main())
