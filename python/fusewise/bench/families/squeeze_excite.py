"""Squeeze-and-Excitation: what is compared, with what, and what it costs at least."""

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fusewise

from ..accuracy import Expected
from ..cases import Case
from .family import BOTH, Family, Workload

_LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_LARGE = 1 << 27  # elements; above, half data is checked in fp32, as fp64 would take tens of GB


def eager(x, w1, b1, w2, b2):
    """The operators that torchvision's SqueezeExcitation calls."""
    scale = F.adaptive_avg_pool2d(x, 1)
    scale = F.silu(F.conv2d(scale, w1, b1))
    return x * torch.sigmoid(F.conv2d(scale, w2, b2))


def build(case: Case, device: str, buffers: int) -> Workload:
    channels, reduced = case.shape[1], case.extra["reduced"]
    layout = _LAYOUTS[case.extra["layout"]]
    generator = torch.Generator(device).manual_seed(0)

    def random(shape, layout=torch.contiguous_format, scale=1.0, learned=True):
        value = torch.empty(shape, dtype=case.dtype, device=device, memory_format=layout)
        value.normal_(0, scale, generator=generator)
        return value.requires_grad_(learned)

    return Workload(
        inputs=[(random(case.shape, layout),) for _ in range(buffers)],
        gradients=[random(case.shape, layout, learned=False) for _ in range(buffers)],
        weights=(
            random((reduced, channels, 1, 1), scale=channels**-0.5),
            random((reduced,)),
            random((channels, reduced, 1, 1), scale=reduced**-0.5),
            random((channels,)),
        ),
        functions={
            "fusewise": fusewise.functional.squeeze_excite,
            "eager": eager,
            "naive": naive(case, device),
        },
        forward_only=frozenset({"naive"}),
    )


def reference(case: Case, workload: Workload) -> list[Expected]:
    half = case.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half and workload.inputs[0][0].numel() > _LARGE else torch.float64
    tensors = (*workload.inputs[0], *workload.weights, workload.gradients[0])
    x, w1, b1, w2, b2, dy = (tensor.detach().to(dtype) for tensor in tensors)
    w1, w2 = w1.flatten(1), w2.flatten(1)
    pixels = x.shape[2] * x.shape[3]

    pooled = x.mean((2, 3))
    z = F.linear(pooled, w1, b1)
    hidden = F.silu(z)
    gate = torch.sigmoid(F.linear(hidden, w2, b2))
    y = x * _planes(gate)

    dz2 = (dy * x).sum((2, 3)) * gate * (1 - gate)
    slope = torch.sigmoid(z)
    slope += hidden * (1 - slope)
    dz = (dz2 @ w2) * slope
    dx = dy * _planes(gate)
    dx_terms = (dx.abs() + _planes(dz.abs() @ w1.abs() / pixels)).max().item()
    dx += _planes(dz @ w1 / pixels)

    # Sums inside a sum are kept in the accumulator's precision, so they count with its eps.
    accumulator = torch.float64 if case.dtype == torch.float64 else torch.float32
    inner = torch.finfo(accumulator).eps / torch.finfo(case.dtype).eps
    pooled_terms = x.abs().mean((2, 3))
    dz2_terms = (dy * x).abs_().sum((2, 3)) * gate * (1 - gate)
    dz_terms = (dz2_terms @ w2.abs()) * slope.abs()

    def scale(terms: Tensor, inner_terms: Tensor) -> float:
        return terms.max().item() + inner * inner_terms.max().item()

    y_scale = max(y.max().item(), -y.min().item())
    dx_scale = dx_terms + inner * (dz_terms @ w1.abs() / pixels).max().item()
    dw1_inner = dz_terms.T @ pooled.abs() + dz.abs().T @ pooled_terms
    dw2_inner = dz2_terms.T @ hidden.abs()
    return [
        Expected(y, y_scale),
        Expected(dx, dx_scale),
        Expected(_planes(dz.T @ pooled), scale(dz.abs().T @ pooled.abs(), dw1_inner)),
        Expected(dz.sum(0), scale(dz.abs().sum(0), dz_terms.sum(0))),
        Expected(_planes(dz2.T @ hidden), scale(dz2.abs().T @ hidden.abs(), dw2_inner)),
        Expected(dz2.sum(0), scale(dz2.abs().sum(0), dz2_terms.sum(0))),
    ]


def _planes(matrix: Tensor) -> Tensor:
    """As an image of one pixel, or as the weight of a 1x1 convolution."""
    return matrix[:, :, None, None]


def bytes_moved(case: Case, mode: str) -> int:
    """Forward reads x and writes y; backward reads x and dy and writes dx. Weights once each."""
    n, channels, height, width = case.shape
    reduced = case.extra["reduced"]
    plane = n * channels * height * width
    weights = 2 * channels * reduced + channels + reduced
    elements = 5 * plane + 3 * weights if mode == BOTH else 2 * plane + weights
    return elements * case.dtype.itemsize


@cache
def _naive_library() -> ctypes.CDLL | None:
    path = Path(fusewise.__file__).parent / "_lib" / "libfusewise_naive.so"
    return ctypes.CDLL(str(path)) if path.is_file() else None


def naive(case: Case, device: str):
    """A common first attempt, one thread a channel (benchmarks/naive), or why it is not there."""
    if device != "cuda":
        return "GPU only"
    if case.dtype not in (torch.float32, torch.float16):
        return f"not written for {case.dtype_name}"
    if _naive_library() is None:
        return "not built"
    launch = _naive_library().fusewise_naive_squeeze_excite_forward
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int] * 3
    launch.argtypes += [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]

    def run(x, w1, b1, w2, b2):
        y = torch.empty_like(x)
        n, channels, height, width = x.shape
        error = launch(
            *(tensor.data_ptr() for tensor in (x, w1, b1, w2, b2, y)),
            *(n, channels, w1.shape[0], height * width),
            case.extra["layout"] == "channels_last",
            x.dtype == torch.float16,
            torch.cuda.current_stream().cuda_stream,
        )
        if error:
            raise RuntimeError(f"the naive kernel failed with CUDA error {error}")
        return y

    return run


FAMILY = Family(
    name="squeeze_excite",
    outputs=("y", "dx", "dw1", "db1", "dw2", "db2"),
    build=build,
    reference=reference,
    bytes_moved=bytes_moved,
)
