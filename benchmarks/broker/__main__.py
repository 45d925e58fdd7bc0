"""What the broker costs per request and per token, how fast one worker serves tiny requests, and others beside it.

Everything runs on one private broker, in rounds that measure ourselves and the others one after the other; figures are
medians over the rounds. Exit code 1 when the target rate is missed, 2 when something needed is not there.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.broker import ours, peers
from benchmarks.broker.tables import Results, machine, median, memory_table, tables
from tokenmill.shared.broker import connect
from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.errors import TokenmillError, UsageError

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "docs" / "benchmarks-broker.md"
SLOTS, MORE_SLOTS = 32, 128
LONG_TOKENS = 64
TARGET_RATE = 10_000
START_S = 10.0


def main() -> int:
    options = parse()
    try:
        if options.install_peers:
            peers.install(options.peers)
            return 0
        with server(options.server) as url:
            results = Results(SLOTS)
            loads = tokenmill_loads(options.requests)
            for number in range(options.rounds):
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
                measure_ours(url, loads, results)
                measure_peers(url, options.peers, options.jobs, results)
            memory = ours.memory(url, options.memory_requests, SLOTS)
            report = "\n\n".join([machine(url), *tables(results), memory_table(memory, options.memory_requests)])
    except (TokenmillError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return UsageError.exit_code
    print(report)
    if options.write:
        REPORT.write_text(f"# What the broker costs\n\nWritten by `make bench-broker`.\n\n{report}\n")
    return judge(results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("valkey", "redis"), default="valkey", help="redis: redis-server on PATH")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000, help="1-token requests of one measurement")
    parser.add_argument("--memory-requests", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, help="jobs for each peer; by default some seconds of work")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="folder of the peers' environments")
    parser.add_argument("--install-peers", action="store_true", help="make the peers' environments, and stop")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.relative_to(ROOT)}")
    return parser.parse_args()


def tokenmill_loads(requests: int) -> dict[str, tuple[ours.Load, int]]:
    """What one worker is given, with its number of slots."""
    few = max(4 * SLOTS, requests // 10)
    return {
        "1 token, bare push": (ours.Load(requests, bare=True), SLOTS),
        "1 token": (ours.Load(requests), SLOTS),
        f"1 token, {MORE_SLOTS} slots": (ours.Load(requests), MORE_SLOTS),
        f"{LONG_TOKENS} tokens, checkpoint every 16": (ours.Load(few, LONG_TOKENS), SLOTS),
        f"{LONG_TOKENS} tokens, each streamed": (ours.Load(few, LONG_TOKENS, streamed=True), SLOTS),
    }


def measure_ours(url: str, loads: dict[str, tuple[ours.Load, int]], results: Results) -> None:
    """One round of Tokenmill."""
    for name, (load, slots) in loads.items():
        results.served[name].append((load, ours.serve(url, load, slots)))
    for name, load in (("bare push", loads["1 token, bare push"][0]), ("enqueue script", loads["1 token"][0])):
        results.enqueue_us[name].append(ours.enqueue_us(url, load))
        results.streamed_in[name].append(ours.stream_in(url, load, SLOTS))


def measure_peers(url: str, environments: Path, jobs: int | None, results: Results) -> None:
    """One round of the others; one that cannot be measured is said once, and left out from then on."""
    for peer in peers.PEERS:
        if peer in results.missing:
            continue
        try:
            results.versions[peer] = peers.version(environments, peer)
            results.peers[peer].append(peers.measure(environments, peer, url, jobs or peer.jobs))
        except peers.PeerError as error:
            results.missing[peer] = str(error)
            print(error, file=sys.stderr)


def judge(results: Results) -> int:
    """Print whether the best of the 1-token loads is as fast as promised."""
    rates = [median(costs, "rate") for load, costs in results.costs() if load.tokens == 1]
    met = max(rates) >= TARGET_RATE
    verdict = "met" if met else "MISSED"
    print(f"\n1-token requests through one worker: {max(rates):,.0f}/s (target ≥ {TARGET_RATE:,}/s: {verdict})")
    return 0 if met else 1


@contextmanager
def server(kind: str) -> Iterator[str]:
    """URL of a private broker that keeps nothing on disk."""
    if kind == "valkey":
        with EmbeddedBroker() as embedded:
            yield embedded.url
        return
    binary = shutil.which("redis-server")
    if binary is None:
        raise UsageError("redis-server is not on PATH: install it, or leave out --server redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        wait_for(process, url)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            connect(url).ping()
            return
        except redis.ConnectionError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise UsageError("redis-server did not start") from None
            time.sleep(ours.POLL_S)


if __name__ == "__main__":
    sys.exit(main())
