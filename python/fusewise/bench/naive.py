"""The naive kernels of benchmarks/naive. They are baselines; the library itself never uses them."""

import ctypes
from functools import cache
from pathlib import Path

import fusewise

_FILES = {"cpu": "libfusewise_naive_cpu.so", "cuda": "libfusewise_naive.so"}


@cache
def naive_library(device: str) -> ctypes.CDLL | None:
    """None if it was not built."""
    path = Path(fusewise.__file__).parent / "_lib" / _FILES[device]
    return ctypes.CDLL(str(path)) if path.is_file() else None
