"""How kernels are compiled, and kept on disk until their code or the processor changes."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import extending
from numba.core.caching import FunctionCache

_log = logging.getLogger(__name__)

_njit: Callable[..., Any] = numba.njit
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}  # which raises nothing where zero divides

kernel: Callable[..., Any] = _njit(**_OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Make a function callable from other kernels, but not from Python: wrappers take a fifth of the time to compile."""

intrinsic: Callable[..., Any] = extending.intrinsic
"""Make a function that writes LLVM instructions callable from kernels."""


@functools.cache
def _digest() -> str:
    """A digest of the code of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Cache(FunctionCache):
    """numba's cache of one function, which notices changes of that function's file only; this one, of all files."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return *super()._index_key(signature, codegen), _digest()

    def load_overload(self, signature: Any, target: Any) -> Any:
        loaded = super().load_overload(signature, target)
        if loaded is None:
            _log.info("compiling the kernels for this processor, once: takes some seconds")
        return loaded


def cached_kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that is called from outside, or load what an earlier process has compiled.

    It lies beside the code or, where that cannot be written, in the user's cache folder, or where NUMBA_CACHE_DIR says.
    """
    dispatcher = _njit(**_OPTIONS)(function)
    try:
        dispatcher._cache = _Cache(function)
    except RuntimeError:  # numba finds no folder that it may write
        _log.warning(
            "no folder for compiled kernels can be written: they are compiled at every start; "
            "set NUMBA_CACHE_DIR to a folder that can"
        )
    return dispatcher
