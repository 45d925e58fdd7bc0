"""From a GGUF file to a model and a tokenizer in llama.cpp."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenmill.worker.models.llamacpp.library import llama
from tokenmill.worker.models.llamacpp.model import LlamaCppModel
from tokenmill.worker.models.llamacpp.tokenizer import LlamaCppTokenizer
from tokenmill.worker.models.llamacpp.weights import Weights

_log = logging.getLogger(__name__)


def load_llamacpp(path: Path, *, gpu_layers: int, **resources: int) -> tuple[LlamaCppModel, LlamaCppTokenizer, str]:
    """The model, its tokenizer, and a digest of the file; ``ModelLoadError`` where one of them cannot be."""
    weights = Weights(path, gpu_layers=gpu_layers)
    where = "with its GPU layers" if llama.llama_supports_gpu_offload() and gpu_layers else "on the processor"
    _log.info("computing with llama.cpp %s", where)
    return LlamaCppModel(weights, **resources), LlamaCppTokenizer(weights), weights.fingerprint()
