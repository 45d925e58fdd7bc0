"""Memory of a worker, and what the keys and values of full contexts would take."""

from __future__ import annotations

from benchmarks.result import Result, Table
from benchmarks.samples import significant
from benchmarks.settings import TOY, Bench
from benchmarks.system import System
from benchmarks.workload import workload
from tokenmill.shared.settings import DEFAULTS
from tokenmill.worker.models.gguf_file import GgufFile
from tokenmill.worker.models.llama_weights import LlamaConfig
from tokenmill.worker.models.registry import smollm2_path

BYTES = {"numpy": 4, "fast": 2}  # of one key or value
ABOUT = (
    "Most memory that a worker has had resident: when its model is loaded, and after it has served the workload with "
    "all slots busy. Beside it, what keys and values alone would take if every slot had room for a whole context from "
    "the start."
)


def measure(bench: Bench) -> Result:
    result = Result("kv-memory", "Memory", ABOUT)
    work = workload(bench.size(96, 8))
    rows = []
    for backend in bench.backends:
        with System(backend, slots=bench.slots, threads=bench.threads) as system:
            ready = system.peak_mib()
            system.serve(work)
            peak = system.peak_mib()
        whole = _whole_mib(backend.name, bench.slots)
        rows.append([backend.name, *map(significant, (ready, peak, whole))])
        if backend.name != TOY:
            claim = f"memory that serving {bench.slots} slots added, of that for whole contexts, {backend.name} backend"
            result.judge(claim, (peak - ready) / whole * 100, "at most", 25.0, " %")
    titles = ["backend", "resident, model loaded", "highest, serving", "room for whole contexts"]
    result.tables.append(Table(f"MiB, {bench.slots} slots, contexts of {DEFAULTS.max_context:,} tokens:", titles, rows))
    return result


def _whole_mib(backend: str, slots: int) -> float:
    if backend not in BYTES:
        return float("nan")
    config = LlamaConfig.of(GgufFile(smollm2_path()))
    return 2 * config.n_layers * config.kv_width * BYTES[backend] * DEFAULTS.max_context * slots / 2**20
