"""A worker's pages for those who watch it: ready when it is, and gone with it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tokenmill.shared.embedded import EmbeddedBroker

from .workplace import DEADLINE_S, Workplace, wait_for


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def fetch(address: str, page: str) -> tuple[int, str]:
    """Status and text of a page; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://{address}{page}", timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


MODEL = """
import pathlib, time
while not pathlib.Path("go").exists():
    time.sleep(0.01)
def model_next(prefixes):
    return [7] * len(prefixes)
"""


def test_a_worker_lives_while_it_loads_its_model_and_is_ready_after(workplace: Workplace) -> None:
    address = f"127.0.0.1:{free_port()}"
    (workplace.folder / "late.py").write_text(MODEL)
    worker = workplace.start_unready("late:model_next", "--metrics-port", address.partition(":")[2])
    wait_for(lambda: fetch(address, "/livez")[0] == 200)
    assert fetch(address, "/readyz") == (503, "the model is being loaded\n")
    (workplace.folder / "go").touch()
    wait_for(lambda: fetch(address, "/readyz")[0] == 200)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(DEADLINE_S) == 0
    assert fetch(address, "/metrics")[0] == 0


def test_a_worker_says_where_its_metrics_are_and_counts_what_it_does(workplace: Workplace) -> None:
    workplace.start("toy", "--metrics-port", "0")
    [worker] = workplace.broker.info().workers
    reply = workplace.client.generate("a", max_tokens=5, ignore_eos=True, timeout=DEADLINE_S)
    assert reply.usage.output_tokens == 5
    _, text = fetch(worker.status["metrics"], "/metrics")
    labels = f'{{queue="{workplace.queue}",worker="{worker.name}"}}'
    assert f"tokenmill_output_tokens_total{labels} 5.0" in text
    assert f"tokenmill_inter_token_latency_seconds_count{labels} 4.0" in text
    assert "process_resident_memory_bytes" in text


def test_a_worker_is_not_ready_while_its_broker_is_away(tmp_path: Path) -> None:
    with EmbeddedBroker() as embedded:
        workplace = Workplace(embedded.url, tmp_path)
        workplace.start("toy", "--metrics-port", "0")
        address = workplace.broker.info().workers[0].status["metrics"]
        wait_for(lambda: fetch(address, "/readyz")[0] == 200)
    wait_for(lambda: "the broker has not answered" in fetch(address, "/readyz")[1])
    assert fetch(address, "/livez")[0] == 200
    workplace.close()


def test_the_exporter_tells_of_the_queue_and_where_its_workers_are(workplace: Workplace) -> None:
    workplace.start("toy", "--metrics-port", "0")
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tokenmill.shared.cli", "-q", "exporter", "--redis", workplace.url]
    command += ["--queue", workplace.queue, "--metrics-port", address.partition(":")[2]]
    exporter = subprocess.Popen(command)
    workplace.processes.append(exporter)  # type: ignore[arg-type]
    wait_for(lambda: fetch(address, "/readyz")[0] == 200)
    assert f'tokenmill_workers{{queue="{workplace.queue}",state="running"}} 1.0' in fetch(address, "/metrics")[1]
    assert workplace.broker.info().workers[0].status["metrics"] in fetch(address, "/targets")[1]
    exporter.send_signal(signal.SIGTERM)
    assert exporter.wait(DEADLINE_S) == 0
