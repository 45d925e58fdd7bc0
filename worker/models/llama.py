"""Llama-family GGUF files, and which of the backends computes them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.engine.model import Model
from tokenmill.worker.models.gguf_file import GgufFile
from tokenmill.worker.models.llama_weights import LlamaConfig

_log = logging.getLogger(__name__)


def load_llama(file: GgufFile, backend: str, **resources: int) -> tuple[Model, str]:
    """The model and the kind of backend that computes it: ``fast`` or ``numpy``.

    ``backend`` names one, or is ``auto``: the fast one where numba, processor and file allow it; the log says why not.
    Raises ``ModelLoadError`` where the fast one is asked for and cannot be.
    """
    config = LlamaConfig.of(file)
    load: dict[str, Callable[[], Model]] = {
        "fast": lambda: _fast(file, config, **resources),
        "numpy": lambda: _numpy(file, config, **resources),
    }
    if backend == "auto":
        obstacle = _obstacle(file, config)
        backend = "numpy" if obstacle else "fast"
        if obstacle:
            _log.info("computing with NumPy: %s", obstacle)
    elif backend == "fast" and (obstacle := _obstacle(file, config)):
        raise ModelLoadError(f"the fast backend cannot compute {file.path}: {obstacle}; leave out --backend fast")
    return load[backend](), backend


def _obstacle(file: GgufFile, config: LlamaConfig) -> str | None:
    """Why the fast backend cannot compute a file, or None where it can."""
    if importlib.util.find_spec("numba") is None:
        return "the kernels need numba (pip install 'tokenmill[fast]')"
    from tokenmill.worker.models.fast import cpu, weights

    if cpu.instruction_set() is None:
        return "there are kernels for Linux on x86-64 with AVX2 or AVX-512 VNNI only"
    return weights.unsuited(file, config)


def _fast(file: GgufFile, config: LlamaConfig, **resources: int) -> Model:
    from tokenmill.worker.models.fast import cpu
    from tokenmill.worker.models.fast.model import FastLlamaModel
    from tokenmill.worker.models.fast.weights import FastWeights

    _log.info("computing with kernels for %s", cpu.instruction_set())
    return FastLlamaModel(config, FastWeights(file, config), file.end_token_ids(), **resources)


def _numpy(file: GgufFile, config: LlamaConfig, **resources: int) -> Model:
    from tokenmill.worker.models.llama_numpy import NumpyLlamaModel
    from tokenmill.worker.models.llama_weights import LlamaWeights

    return NumpyLlamaModel(config, LlamaWeights.of(file, config), file.end_token_ids(), **resources)
