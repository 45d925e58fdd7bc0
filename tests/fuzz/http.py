"""Calls that schemathesis makes up from our own OpenAPI document, against a gateway with a toy worker.

``python -m tests.fuzz.http --examples N --seed S`` fails on any answer of 500 or above, and on any answer that the
document does not declare.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.e2e.workplace import Workplace
from tests.gateway.conftest import Gateway
from tokenmill.shared.embedded import EmbeddedBroker

ROOT = Path(__file__).parents[2]
KEY = "fuzz-0123456789abcdef"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


def fuzz(examples: int, seed: int) -> tuple[int, str]:
    """How many calls were made, and what schemathesis said; raises AssertionError if it found anything."""
    with EmbeddedBroker() as embedded, TemporaryDirectory() as folder:
        workplace = Workplace(embedded.url, Path(folder))
        workplace.start("toy", "--slots", "8")
        gateway = Gateway(workplace, "--api-keys", f"fuzz:{KEY}", "--max-pending", "0")
        headers = {"Authorization": f"Bearer {KEY}"}
        job = httpx.post(f"{gateway.url}/jobs", json={"prompt": "a", "max_tokens": 3}, headers=headers).json()
        command = [Path(sys.executable).parent / "st", "run", f"{gateway.url}/docs/openapi.json"]
        command += ["--checks", ",".join(CHECKS), "--max-examples", str(examples), "--seed", str(seed)]
        command += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-color"]
        command += ["--header", f"Authorization: {headers['Authorization']}"]
        found = {"SCHEMATHESIS_HOOKS": "tests.fuzz.http_hooks", "PYTHONPATH": str(ROOT), "FUZZ_JOB": job["id"]}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, **found})
        gateway.close()
        workplace.close()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    made = re.search(r"(\d[\d,]*) (?:test cases )?generated", done.stdout)
    return int(made[1].replace(",", "")) if made else 0, done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300, help="calls for each operation, at most")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    made, said = fuzz(given.examples, given.seed)
    print(said[-1500:])
    print(f"{made:,} calls: no answer of 500 or above, and none that is not declared")


if __name__ == "__main__":
    main()
