"""Which instructions the kernels may use."""

from __future__ import annotations

import functools
import platform
import sys

import llvmlite.binding
from numba.core import config

AVX512, AVX2 = "AVX-512 VNNI", "AVX2"
_NEEDS = {AVX512: ("avx512f", "avx512bw", "avx512vnni"), AVX2: ("avx2", "fma", "f16c")}


@functools.cache
def instruction_set() -> str | None:
    """The best one that this processor has and numba may use, or None where there are no kernels for it.

    numba's own variables NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, by which it compiles for another processor, count.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":  # waiting threads sleep in a Linux call
        return None
    present = _features()
    return next((name for name, needed in _NEEDS.items() if present.issuperset(needed)), None)


def _features() -> frozenset[str]:
    chosen: str | None = vars(config)["CPU_FEATURES"]
    if chosen is not None:
        return frozenset(item[1:] for item in chosen.split(",") if item.startswith("+"))
    if vars(config)["CPU_NAME"] == "generic":
        return frozenset()
    return frozenset(name for name, present in llvmlite.binding.get_host_cpu_features().items() if present)
