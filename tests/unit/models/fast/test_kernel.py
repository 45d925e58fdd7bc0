"""Compiled kernels are kept until the code of any kernel changes, wherever there is a folder for them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from numba.core import caching, config

from tokenmill.worker.models.fast import kernel
from tokenmill.worker.models.fast.kernel import cached_kernel


def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where numba keeps what it compiles in this test."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def loads() -> int:
    """Call the kernel as a new process would; how often it was loaded instead of compiled."""
    dispatcher: Any = cached_kernel(double)
    assert dispatcher(21) == 42
    return sum(dispatcher.stats.cache_hits.values())


def test_a_second_process_loads_what_the_first_compiled(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert loads() == 0
    assert loads() == 1
    assert [message for message in caplog.messages if message.startswith("compiling the kernels")] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_change_of_any_kernel_compiles_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads()
    monkeypatch.setattr(kernel, "_digest", lambda: "changed")
    assert loads() == 0
    assert loads() == 1


def test_without_a_folder_kernels_are_compiled_at_every_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert loads() == 0
    assert "set NUMBA_CACHE_DIR to a folder that can" in caplog.text
