"""Copies and matrix products that are timed throughout a run; the fastest of them are its ceilings.

A rate is the best of several sizes, libraries and moments. A median would be the machine's usual
speed, and a call at a quieter moment would be faster than its floor.
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
_LONG_US = 2000  # a call that takes so long hides what it costs to start it


@dataclass
class Yardstick:
    amount: int
    """Bytes or operations of a call."""
    timer: Callable[[], float]
    best: float = 0.0
    """Of `amount`, in a second."""

    def sample(self) -> None:
        self.best = max(self.best, self.amount / (self.timer() * 1e-6))


class Yardsticks:
    """All of a device, for memory and for each dtype. float32's are always there."""

    def __init__(self, device: str, dtypes: set[str]):
        self._found = {BYTES: _copies(device)}
        for dtype in sorted(dtypes | {"float32"}):
            self._found[dtype] = _products(device, dtype)
        for _ in range(_FIRST_ROUNDS):
            for yardsticks in self._found.values():
                for yardstick in yardsticks:
                    yardstick.sample()

    def sample(self) -> None:
        """The best of each kind once more: cheap enough to be done after every case."""
        for yardsticks in self._found.values():
            max(yardsticks, key=lambda yardstick: yardstick.best).sample()

    def ceilings(self) -> Ceilings:
        rates = {
            key: max(yardstick.best for yardstick in yardsticks)
            for key, yardsticks in self._found.items()
        }
        return Ceilings(rates.pop(BYTES), float32_for_all(rates))


def measure_ceilings(device: str, dtypes: set[str]) -> Ceilings:
    """Those of this moment."""
    return Yardsticks(device, dtypes).ceilings()


def _copies(device: str) -> list[Yardstick]:
    """Of two sizes; source and target are together larger than the cache, in the smaller one too.

    On an H200 the driver's own copy reached 2.7 TB/s and a kernel 4.0. On a CPU a plain store reads
    the line that it overwrites; ours writes past the cache, and so does one of these.
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
    """With non-temporal stores, by as many threads as torch has."""
    copy = naive_library("cpu").fusewise_streaming_copy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)

    def run(target, source):
        lines = (tensor.view(-1, 16).chunk(threads) for tensor in (target, source))
        slices = zip(*lines, strict=True)  # each starts a cache line
        for done in [pool.submit(copy, t.data_ptr(), s.data_ptr(), t.nbytes) for t, s in slices]:
            done.result()
        return target

    return run


def _products(device: str, dtype: str) -> list[Yardstick]:
    """Of square matrices, by torch and by ours; TF32 as the dtype says. At least two sizes, and
    larger ones while a call is short."""
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
    """A model may be profiled on a GPU for which there are no kernels of ours."""
    if device == "cpu":
        return True
    if CUDA_MISSING:
        return False
    return not why_unsupported(torch.cuda.get_device_capability(), build_info()["architectures"])


def _timer(call, device: str):
    return GraphTimer(call, 1) if device == "cuda" else LoopTimer(call, 1, device)
