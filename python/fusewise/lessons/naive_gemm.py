"""A loop per output against the vendor's matrix product."""

import ctypes

import torch

from .._usage import UsageError
from ..bench.accuracy import compare
from ..bench.naive import naive_library
from .lesson import Finding, Lesson, Samples, interval, ratio, sample, table

_NAIVE, _VENDOR = "a loop per output", "the vendor's product"
_SIZES = {"cpu": 384, "cuda": 2048}


def measure(device: str) -> Samples:
    size = _SIZES[device]
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    product = torch.empty_like(left)

    def vendor():
        return torch.mm(left, right, out=product)

    naive = naive_product(left, right)
    reference = left.double() @ right.double()
    scale = (left.double().abs() @ right.double().abs()).max().item()
    check = compare("C", naive(), vendor(), reference, scale)
    if not check.passed:
        raise RuntimeError(f"the naive product is wrong: {check}")
    return sample({_NAIVE: naive, _VENDOR: vendor}, device)


def naive_product(left: torch.Tensor, right: torch.Tensor):
    """A call of the kernel in benchmarks/naive on two dense matrices."""
    device = left.device.type
    if naive_library(device) is None:
        raise UsageError("naive-gemm: its kernel is not built; run `make build`")
    launch = getattr(naive_library(device), f"fusewise_naive_gemm_{device}")
    launch.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 3
    if device == "cuda":
        launch.argtypes += [ctypes.c_void_p]
    sizes = (left.shape[0], right.shape[1], left.shape[1])
    product = left.new_empty(sizes[:2])

    def run() -> torch.Tensor:
        pointers = (tensor.data_ptr() for tensor in (left, right, product))
        stream = (torch.cuda.current_stream().cuda_stream,) if device == "cuda" else ()
        if launch(*pointers, *sizes, *stream) and device == "cuda":
            raise RuntimeError("the naive product could not be launched")
        return product

    return run


def conclude(samples: Samples, device: str) -> Finding:
    size = _SIZES[device]
    title = f"C = A B, {size} x {size}, float32"
    shown = table(title, samples, "TFLOP/s", 2 * size**3 / 1e6)
    found = ratio(samples, _NAIVE, _VENDOR)
    if found.verdict != "faster":
        return Finding(
            shown, ["The vendor's product is not faster here; that is a surprise."], False
        )
    said = (
        f"Both give the right answer; the loop takes {interval(found)} as long. It reads every "
        "value again for each output. Blocking for registers and caches, and on a GPU the matrix "
        "units, are what the vendor's library is made of: let it do the products."
    )
    return Finding(shown, [said], True)


LESSON = Lesson("a loop per output against the vendor's matrix product", measure, conclude)
