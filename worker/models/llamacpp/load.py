"""From a GGUF file to a model and a tokenizer in llama.cpp."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenmill.worker.models.llamacpp.library import llama
from tokenmill.worker.models.llamacpp.model import LlamaCppModel
from tokenmill.worker.models.llamacpp.tokenizer import LlamaCppTokenizer
from tokenmill.worker.models.llamacpp.weights import Weights

_log = logging.getLogger(__name__)


def load_llamacpp(
    path: Path, *, gpu_layers: int, **resources: int
) -> tuple[LlamaCppModel, LlamaCppTokenizer | None, str]:
    """The model, its tokenizer if the file has one, and a digest of the file; ``ModelLoadError`` if it cannot be."""
    weights = Weights(path, gpu_layers=gpu_layers)
    where = "with its GPU layers" if llama.llama_supports_gpu_offload() and gpu_layers else "on the processor"
    _log.info("computing with llama.cpp %s", where)
    has_vocabulary = llama.llama_vocab_type(weights.vocab) != llama.LLAMA_VOCAB_TYPE_NONE
    tokenizer = LlamaCppTokenizer(weights) if has_vocabulary else None
    return LlamaCppModel(weights, **resources), tokenizer, weights.fingerprint()
