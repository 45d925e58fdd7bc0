"""A queue with a toy worker, and batch workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.producer.batches.office import Office
from tokenmill.producer.batches.record import Batch
from tokenmill.shared.embedded import EmbeddedBroker

from ..e2e.workplace import Workplace, wait_for

URL = "/v1/completions"
DEADLINE_S = 90.0


class Bureau:
    """An office of its own, and the processes that a test starts for it."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace = workplace
        folder = workplace.folder / "files"
        self.office = Office(workplace.url, workplace.queue, str(folder), 50_000, 1 << 28)
        self.environment = {"TOKENMILL_REDIS": workplace.url, "TOKENMILL_QUEUE": workplace.queue}
        self.environment["TOKENMILL_FILES_DIR"] = str(folder)

    def start(self) -> subprocess.Popen[str]:
        """A batch worker."""
        return self._popen("batch-worker")

    def run(self, *arguments: str) -> str:
        """Output of a command that works."""
        process = self._popen(*arguments, stdout=subprocess.PIPE)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, self.workplace.said(process)
        return out

    def submit(self, lines: list[dict[str, Any]], **options: Any) -> str:
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        kept = self.office.files.add("anyone", "in.jsonl", "batch", [content])
        return self.office.submit("anyone", kept.id, URL, **options).id

    def find(self, batch_id: str) -> Batch:
        batch = self.office.records.find(batch_id)
        assert batch is not None
        return batch

    def ended(self, batch_id: str) -> Batch:
        wait_for(lambda: self.find(batch_id).ended, DEADLINE_S)
        return self.find(batch_id)

    def lines(self, batch: Batch, kind: str) -> list[dict[str, Any]]:
        file_id = batch.output_file_id if kind == "output" else batch.error_file_id
        if file_id is None:
            return []
        return [json.loads(raw) for raw in self.office.files.path(batch.caller, file_id).read_bytes().splitlines()]

    def _popen(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tokenmill.shared.cli", *arguments]
        with (self.workplace.folder / f"stderr-{len(self.workplace.processes)}").open("w") as stderr:
            environment = {**os.environ, **self.environment}
            process = subprocess.Popen(
                command, env=environment, stderr=stderr, text=True, start_new_session=True, **options
            )
        self.workplace.processes.append(process)
        return process


def line(number: int, **body: Any) -> dict[str, Any]:
    asked = {
        "model": "toy",
        "prompt": [number % 200 + 3],
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        **body,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": asked}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker() as embedded:
        yield embedded.url


@pytest.fixture
def bureau(url: str, tmp_path: Path) -> Iterator[Bureau]:
    workplace = Workplace(url, tmp_path)
    yield Bureau(workplace)
    workplace.close()
