"""The README does what it says: its blocks run, its tables name every field, its files are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tokenmill.shared.protocol import Reply, Request

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

# The README's shell blocks speak to a Redis on the default port through redis-cli; here both are stand-ins.
REDIS_CLI = """#!{python}
import os, sys, redis
client = redis.Redis.from_url(os.environ["TOKENMILL_REDIS"], socket_timeout=None, decode_responses=True)
print(client.execute_command(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, real_model: str) -> dict[str, str]:
    """A broker with one worker on the real model, and the commands of the README on the path."""
    bin_folder = tmp_path_factory.mktemp("bin")
    redis_cli = bin_folder / "redis-cli"
    redis_cli.write_text(REDIS_CLI.format(python=sys.executable))
    redis_cli.chmod(0o755)
    path = f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TOKENMILL_REDIS": real_model}


def shell(commands: str, env: dict[str, str], cwd: Path = ROOT) -> str:
    done = subprocess.run(
        ["/bin/sh", "-e", "-c", commands], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def block(language: str, word: str) -> str:
    [found] = [text for kind, text in BLOCKS if kind == language and word in text]
    return found


def test_the_shell_example_answers_paris_over_the_bare_protocol(environment: dict[str, str]) -> None:
    pushed, reply = shell(block("sh", "redis-cli"), environment).splitlines()
    assert int(pushed) >= 1
    assert "Paris" in msgspec.json.decode(reply, type=Reply).text


def test_the_reply_shown_is_the_beginning_of_the_real_one(environment: dict[str, str]) -> None:
    shown = block("json", "Paris").split(", …")[0]
    assert shell(block("sh", "redis-cli").splitlines()[1], environment).startswith(shown)


def test_the_commands_shown_work(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    output = shell(block("sh", "tokenmill enqueue"), environment, cwd=tmp_path)
    assert "Paris" in output
    assert "queue default" in output
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(answers) == len((ROOT / "examples/prompts.jsonl").read_text().splitlines())


def test_the_worker_command_shown_has_the_options_it_shows() -> None:
    options = re.findall(r"--[a-z-]+", block("sh", "tokenmill worker"))
    help_text = subprocess.run(
        [sys.executable, "-m", "tokenmill.shared.cli", "worker", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert options
    assert all(option in help_text for option in options)


def test_the_python_example_answers_paris(environment: dict[str, str]) -> None:
    code = block("python", "Client(").replace("redis://127.0.0.1:6379/0", environment["TOKENMILL_REDIS"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris")
    assert done.stdout.endswith("length 4\nlength 4\n")


def test_the_engine_example_runs() -> None:
    code = block("python", "ContinuousBatcher")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "[13, 14]" in done.stdout


@pytest.mark.parametrize("target", re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
def test_the_make_targets_shown_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("struct", [Request, Reply])
def test_the_tables_name_every_field(struct: type[msgspec.Struct]) -> None:
    named = set(re.findall(r"`(\w+)`", README))
    assert set(struct.__struct_fields__) - {"id", "finish_reason"} <= named


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)", README))
def test_the_files_linked_exist(path: str) -> None:
    assert (ROOT / path).exists()
