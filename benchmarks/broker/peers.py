"""Other queues on the same broker: no-op jobs through one worker process, each library in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from benchmarks.broker.meters import broker_cpu_s, fresh

PROGRAMS = Path(__file__).parents[1] / "peers"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A queue to compare with."""

    program: str
    name: str
    setting: str  # how its worker is set
    packages: tuple[str, ...]
    jobs: int  # some seconds of work


PEERS = (
    Peer("rq", "RQ SimpleWorker", "one job after another in its own process", ("rq", "hiredis"), 2_000),
    Peer("arq", "arq", "100 jobs at a time, a look every 10 ms (default 500)", ("arq", "hiredis"), 3_000),
    Peer("saq", "SAQ", "32 jobs at a time", ("saq[redis]", "typing_extensions", "hiredis"), 5_000),
    Peer("taskiq", "taskiq", "list broker, 100 jobs at a time", ("taskiq", "taskiq-redis", "hiredis"), 4_000),
    Peer("celery", "Celery", "solo pool, 100 jobs prefetched, no events", ("celery[redis]", "hiredis"), 2_000),
)


@dataclass(frozen=True, slots=True)
class PeerCost:
    """What jobs took; all but the rate per job."""

    rate: float  # jobs per second
    worker_us: float  # processor time of the worker
    broker_us: float  # processor time of the broker


class PeerError(Exception):
    """A peer could not be measured; one line that says why."""


def install(environments: Path) -> None:
    """Make one environment for each peer: most of them pin another redis-py than ours."""
    for peer in PEERS:
        print(f"installing {' '.join(peer.packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", environments / peer.program], check=True)
        pip = [_python(environments, peer), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *peer.packages], check=True)


def version(environments: Path, peer: Peer) -> str:
    """Version of the library, and of its redis-py; PeerError where it is not installed."""
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    command = [_python(environments, peer), "-c", ask, peer.program, "redis"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise PeerError(f"{peer.name} is not installed: run make peers") from None
    own, client = done.stdout.split()
    return f"{own}, redis-py {client}"


def measure(environments: Path, peer: Peer, url: str, jobs: int) -> PeerCost:
    """One worker on a full queue; PeerError says why there is no figure."""
    client = fresh(url)
    program = [_python(environments, peer), str(PROGRAMS / f"{peer.program}_noop.py"), url]
    filled = subprocess.run([*program, "enqueue", str(jobs)], capture_output=True, text=True, timeout=TIMEOUT_S)
    if filled.returncode:
        raise PeerError(f"{peer.name} could not enqueue: {_last_line(filled.stderr)}")
    before = broker_cpu_s(client)
    worker = subprocess.Popen(
        [*program, "work", str(jobs)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    overdue = threading.Timer(TIMEOUT_S, worker.kill)
    overdue.start()
    try:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        after = broker_cpu_s(client)
    finally:
        overdue.cancel()
        worker.kill()
        worker.communicate()
    if not line:
        raise PeerError(f"{peer.name}: its worker ended, or took longer than {TIMEOUT_S:.0f} s")
    took = json.loads(line)
    return PeerCost(
        rate=took["jobs"] / took["seconds"],
        worker_us=took["worker_cpu_s"] / took["jobs"] * 1e6,
        broker_us=(after - before) / jobs * 1e6,
    )


def _python(environments: Path, peer: Peer) -> str:
    return str(environments / peer.program / "bin" / "python")


def _last_line(output: str) -> str:
    return output.strip().splitlines()[-1][:200] if output.strip() else "it said nothing"
