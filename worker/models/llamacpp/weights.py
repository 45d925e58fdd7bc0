"""The weights and the vocabulary of a GGUF file, loaded by llama.cpp."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.models.digest import file_digest
from tokenmill.worker.models.llamacpp.library import complaint, listen, llama


class Weights:
    """A loaded model file; ``gpu_layers`` of it are computed by GPUs, if llama.cpp was built for them (-1: all).

    Raises ``ModelLoadError`` for a file that is missing, not a GGUF, or no language model that llama.cpp can decode.
    """

    def __init__(self, path: Path, *, gpu_layers: int) -> None:
        _check_magic(path)
        listen()
        self.path = path
        params = llama.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        self.model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise ModelLoadError(f"llama.cpp cannot load {path}: {complaint()}")
        weakref.finalize(self, llama.llama_model_free, self.model)
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.vocab_size = int(llama.llama_vocab_n_tokens(self.vocab))
        self.trained_context = int(llama.llama_model_n_ctx_train(self.model))  # tokens
        if llama.llama_model_has_encoder(self.model) or not llama.llama_model_has_decoder(self.model):
            raise ModelLoadError(f"{path} is not a decoder-only language model, as text generation here needs")
        if llama.llama_model_is_diffusion(self.model):
            raise ModelLoadError(f"{path} is a diffusion model; only models that write token by token are supported")

    def fingerprint(self) -> str:
        """A digest of the file."""
        return file_digest(np.memmap(self.path, np.uint8, mode="r"))

    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as llama.cpp knows them: by the file's metadata, and by their usual names."""
        ends = llama.llama_vocab_is_eog
        return tuple(token_id for token_id in range(self.vocab_size) if ends(self.vocab, token_id))


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"cannot read the model file {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file")
