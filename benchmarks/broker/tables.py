"""The results of the broker benchmark as Markdown tables."""

from __future__ import annotations

import platform
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from benchmarks.broker.meters import Cost
from benchmarks.broker.ours import PAYLOAD_BYTES, REPLY_BYTES, WINDOW, Load
from benchmarks.broker.peers import Peer, PeerCost
from benchmarks.machine import load as machine_load
from benchmarks.machine import processor
from benchmarks.report import table
from tokenmill.shared.broker import connect

OURS = "1 token"  # the load that the peers are compared with


@dataclass
class Results:
    """What was measured, a value for each round."""

    slots: int
    served: dict[str, list[tuple[Load, Cost]]] = field(default_factory=lambda: defaultdict(list))
    enqueue_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    streamed_in: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    peers: dict[Peer, list[PeerCost]] = field(default_factory=lambda: defaultdict(list))
    versions: dict[Peer, str] = field(default_factory=dict)
    missing: dict[Peer, str] = field(default_factory=dict)

    def costs(self) -> Iterator[tuple[Load, list[Cost]]]:
        """Every load, and what it cost."""
        for name in self.served:
            yield self.served[name][0][0], self.of(name)

    def of(self, name: str) -> list[Cost]:
        """What a load cost."""
        return [cost for _, cost in self.served[name]]


def tables(results: Results) -> list[str]:
    """All but the memory."""
    return [_cost_table(results), _rate_table(results), _peer_table(results)]


def _cost_table(results: Results) -> str:
    rows = []
    for name, (load, costs) in zip(results.served, results.costs(), strict=True):
        inside = [f"{median(costs, figure):.2f}" for figure in ("round_trips", "commands")]
        per_token = f"{median(costs, 'broker_us') / load.tokens:.2f}"
        rows.append(
            [
                name,
                *inside,
                *(_us(costs, who) for who in ("script_us", "broker_us")),
                per_token,
                _us(costs, "worker_us"),
            ]
        )
    for name, values in results.enqueue_us.items():
        rows.append([f"to enqueue: {name}", "", "", "", f"{statistics.median(values):.1f}", "", ""])
    titles = ["load", "round trips", "commands", "µs in scripts", "µs of broker", "… per token", "µs of worker"]
    return (
        f"Per request, one worker with {results.slots} slots unless said otherwise. Commands are those that scripts "
        "run. Time in scripts is by the broker's clock, which other load on the machine stretches; that of broker and "
        "worker is processor time:\n\n" + table(titles, rows)
    )


def _rate_table(results: Results) -> str:
    rows = [[name, *_spread([cost.rate for cost in results.of(name)])] for name in results.served]
    rows += [[f"1 token, streamed in: {name}", *_spread(rates)] for name, rates in results.streamed_in.items()]
    return (
        "Requests per second through one worker process with the toy model, from a full queue. Streamed in: another "
        f"process pushes them in pipelines and reads every reply, at most {WINDOW:,} outstanding:\n\n"
        + table(["load", "median", "lowest", "highest"], rows)
    )


def _peer_table(results: Results) -> str:
    mine = results.of(OURS)
    rows = [
        [
            f"tokenmill, {OURS}",
            f"{results.slots} slots",
            _rate(mine),
            "",
            _us(mine, "worker_us"),
            _us(mine, "broker_us"),
        ]
    ]
    for peer, costs in results.peers.items():
        ratios = [ours.rate / theirs.rate for ours, theirs in zip(mine, costs, strict=False)]
        times = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        name = f"{peer.name} {results.versions[peer]}"
        rows.append([name, peer.setting, _rate(costs), times, _us(costs, "worker_us"), _us(costs, "broker_us")])
    text = (
        "No-op jobs through one worker process of other queues on the same broker, with results kept. Ours computes a "
        "token for each; its rounds alternate with theirs, and the ratio is that of a round:\n\n"
        + table(["queue", "set to", "per second", "times slower than ours", "µs of worker", "µs of broker"], rows)
    )
    return "\n\n".join([text, *results.missing.values()])


def memory_table(memory: dict[str, float], requests: int) -> str:
    """Bytes per request by state."""
    rows = [[state, f"{size:,.0f}"] for state, size in memory.items()]
    sizes = f"requests of {PAYLOAD_BYTES} bytes with replies of {REPLY_BYTES}"
    return f"Bytes of broker memory per request, over {requests:,} {sizes}:\n\n" + table(["state", "bytes"], rows)


def median(costs: Sequence[Cost] | Sequence[PeerCost], figure: str) -> float:
    """Of one figure over the rounds."""
    return statistics.median(float(getattr(cost, figure)) for cost in costs)


def _us(costs: Sequence[Cost] | Sequence[PeerCost], figure: str) -> str:
    return f"{median(costs, figure):.1f}"


def _rate(costs: Sequence[Cost] | Sequence[PeerCost]) -> str:
    return f"{median(costs, 'rate'):,.0f}"


def _spread(rates: Sequence[float]) -> list[str]:
    return [f"{rate:,.0f}" for rate in (statistics.median(rates), min(rates), max(rates))]


def machine(url: str) -> str:
    """What decides the figures."""
    python = f"Python {platform.python_version()}, redis-py {redis.__version__}"
    return f"{processor()}, load {machine_load():.1f}; {_server(url)}; {python}."


def _server(url: str) -> str:
    info: dict[str, Any] = connect(url).info("server")
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info['redis_version']}"
