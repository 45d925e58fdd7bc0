"""The gateway keeps what its OpenAPI document says."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
import pytest

from ..fuzz.http import fuzz
from .conftest import Gateway


def test_calls_that_are_made_up_from_the_document_get_no_answer_that_it_does_not_declare() -> None:
    if shutil.which("st", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("schemathesis is not installed")
    made, _ = fuzz(examples=5, seed=1)
    assert made > 500


def test_the_document_and_its_page_need_no_key(gateway: Gateway) -> None:
    document = httpx.get(f"{gateway.url}/docs/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    assert httpx.get(f"{gateway.url}/docs").status_code == 200
    assert httpx.get(f"{gateway.url}/livez").text == "ok\n"
