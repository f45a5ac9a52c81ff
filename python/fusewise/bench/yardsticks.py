"""Copies and GEMMs that are timed throughout a run. The fastest ones give the machine's ceilings.

A rate is the best over several sizes, libraries and moments, not the median. With the median, a
call at a quieter moment could be faster than its floor.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fusewise
from fusewise._ops import CUDA_MISSING, build_info
from fusewise._ops._architectures import why_unsupported

from .families.family import Case
from .floor import BYTES, Ceilings, cache_bytes, float32_for_all
from .measure import GraphTimer, LoopTimer
from .naive import naive_library

_FIRST_ROUNDS = 3
_LEAST_COPY = {"cpu": 1 << 26, "cuda": 1 << 30}
_PRODUCT_SIZES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}
_LONG_US = 2000  # launch overhead is negligible in a call this long


@dataclass
class Yardstick:
    amount: int
    """Bytes or operations per call."""
    timer: Callable[[], float]
    best: float = 0.0
    """The highest rate so far, in `amount` per second."""

    def sample(self) -> None:
        self.best = max(self.best, self.amount / (self.timer() * 1e-6))


class Yardsticks:
    """All yardsticks of a device: for memory and for each dtype. float32 is always included."""

    def __init__(self, device: str, dtypes: set[str]):
        self._found = {BYTES: _copies(device)}
        for dtype in sorted(dtypes | {"float32"}):
            self._found[dtype] = _products(device, dtype)
        for _ in range(_FIRST_ROUNDS):
            for yardsticks in self._found.values():
                for yardstick in yardsticks:
                    yardstick.sample()

    def sample(self) -> None:
        """Measures the best of each kind again. Cheap enough to do every few seconds."""
        for yardsticks in self._found.values():
            max(yardsticks, key=lambda yardstick: yardstick.best).sample()

    def ceilings(self) -> Ceilings:
        rates = {
            key: max(yardstick.best for yardstick in yardsticks)
            for key, yardsticks in self._found.items()
        }
        return Ceilings(rates.pop(BYTES), float32_for_all(rates))


def measure_ceilings(device: str, dtypes: set[str]) -> Ceilings:
    """The ceilings as measured now."""
    return Yardsticks(device, dtypes).ceilings()


def _copies(device: str) -> list[Yardstick]:
    """Copies of two sizes. Source and target together exceed the cache, also for the smaller size.

    On an H200 the driver's own copy reached 2.7 TB/s and a kernel 4.0. On a CPU a plain store first
    reads the cache line that it overwrites. Our kernels use non-temporal stores, and so does one of
    these copies.
    """
    size = max(_LEAST_COPY[device], cache_bytes(device)) // 256 * 64  # elements, whole cache lines
    source = torch.ones(size, device=device)
    target = torch.empty_like(source)
    ways = [_copy, _negate]
    if device == "cpu" and naive_library(device):
        ways.append(_streaming_copy())
    parts = [(target[:count], source[:count]) for count in (size, size * 3 // 4)]
    return [
        Yardstick(2 * part[0].nbytes, _timer(lambda _, way=way, part=part: way(*part), device))
        for way in ways
        for part in parts
    ]


def _copy(target, source):
    return target.copy_(source)


def _negate(target, source):
    return torch.neg(source, out=target)


def _streaming_copy():
    """A copy with non-temporal stores, on as many threads as torch uses."""
    copy = naive_library("cpu").fusewise_streaming_copy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)

    def run(target, source):
        lines = (tensor.view(-1, 16).chunk(threads) for tensor in (target, source))
        slices = zip(*lines, strict=True)  # each slice starts at a cache line
        for done in [pool.submit(copy, t.data_ptr(), s.data_ptr(), t.nbytes) for t, s in slices]:
            done.result()
        return target

    return run


def _products(device: str, dtype: str) -> list[Yardstick]:
    """GEMMs of square matrices, by torch and by ours; the dtype decides on TF32.

    At least two sizes, and larger ones as long as a call is short.
    """
    case = Case("", "", (), dtype)
    kind = {"dtype": case.dtype, "device": device}
    found: list[Yardstick] = []
    with case.precision():
        for size in _PRODUCT_SIZES[device]:
            matrices = [torch.ones(size, size, **kind) for _ in range(3)]
            ways = [_torch_product, _torch_linear, *([_ours] if _ours_runs(device) else [])]
            for way in ways:
                timer = _timer(lambda _, way=way, matrices=matrices: way(*matrices), device)
                found.append(Yardstick(2 * size**3, timer))
                found[-1].sample()
            if len(found) > len(ways) and found[-1].amount / found[-1].best * 1e6 > _LONG_US:
                break
    return found


def _torch_product(left, right, product):
    return torch.mm(left, right, out=product)


def _torch_linear(left, right, _):
    return F.linear(left, right)


def _ours(left, right, _):
    return fusewise.functional.linear_act(left, right, None, "identity")


def _ours_runs(device: str) -> bool:
    """False on a GPU that our kernels were not built for; a model may still be profiled there."""
    if device == "cpu":
        return True
    if CUDA_MISSING:
        return False
    return not why_unsupported(torch.cuda.get_device_capability(), build_info()["architectures"])


def _timer(call, device: str):
    return GraphTimer(call, 1) if device == "cuda" else LoopTimer(call, 1, device)
