"""Linear layer + activation in the benchmark: its baselines, its reference and its floor."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

import fusewise
from fusewise._torch_private import addmm_with_activation

from ..accuracy import Expected
from ..naive import naive_library
from .family import BOTH, Case, Family, Traffic, Workload
from .linear_stack import ACTIVATIONS, Stack, undecided

_MOST_NAIVE = 1 << 34  # multiplications; above this, one call takes a second

# The GEMMs alone. They compute a different function, so they are timed but not checked.
PRODUCTS = "products"


def build(case: Case, device: str, buffers: int) -> Workload:
    rows, inputs, outputs = case.shape
    activation = case.extra["activation"]
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape, scale=1.0, learned=True):
        value = torch.empty(shape, dtype=case.dtype, device=device)
        return value.normal_(0, scale, generator=generator).requires_grad_(learned)

    def eager(x, w, b):
        return ACTIVATIONS[activation](F.linear(x, w, b))

    def in_place(x, w, b):
        """A library GEMM and an in-place relu: the first improvement over a naive kernel."""
        return F.linear(x, w, b).relu_()

    def fused_forward(x, w, b):
        return addmm_with_activation(b, x, w.t(), use_gelu=activation == "gelu_tanh")

    fused = activation in ("relu", "gelu_tanh") and device == "cuda"
    workload = Workload(
        inputs=[(random(rows, inputs),) for _ in range(buffers)],
        gradients=[random(rows, outputs, learned=False) for _ in range(buffers)],
        weights=(random(outputs, inputs, scale=inputs**-0.5), random(outputs)),
        functions={
            "fusewise": lambda x, w, b: fusewise.functional.linear_act(x, w, b, activation),
            "eager": eager,
            "naive": naive(case, device),
            "addmm_activation": fused_forward if fused else "not for this activation",
            "in-place": in_place if activation == "relu" else "not for this activation",
            PRODUCTS: lambda x, w, _: fusewise.functional.linear_act(x, w, None, "identity"),
        },
        forward_only=frozenset({"naive", "addmm_activation"}),
        unchecked=frozenset({PRODUCTS}),
    )
    if activation == "relu":  # only the first buffer is checked
        kinks = undecided(*workload.inputs[0], *workload.weights, case.tf32)
        workload.gradients[0].masked_fill_(kinks, 0)
    return workload


def reference(case: Case, workload: Workload) -> dict[str, Expected]:
    (x,), (w, b) = workload.inputs[0], workload.weights
    stack = Stack(x, [w], [b], [case.extra["activation"]], case.tf32)
    found = stack.expected(workload.gradients[0])
    return {name.rstrip("0"): right for name, right in found.items()}


def traffic(case: Case, mode: str) -> Traffic:
    """Forward reads x and w and writes y. Backward reads dy and again x and w, and writes dx and
    dw. Biases are too small to count."""
    rows, inputs, outputs = case.shape
    x, w, y = (n * case.dtype.itemsize for n in (rows * inputs, outputs * inputs, rows * outputs))
    if mode == BOTH:
        return Traffic(data=2 * x + 2 * y + w, weights=w, again=x + w)
    return Traffic(data=x + y, weights=w)


def operations(case: Case, mode: str) -> int:
    """Those of the GEMMs: one in forward, two more in backward."""
    rows, inputs, outputs = case.shape
    return 2 * rows * inputs * outputs * (3 if mode == BOTH else 1)


def naive(case: Case, device: str):
    """A typical first attempt, one thread per output (benchmarks/naive), or why it is missing."""
    if device != "cuda":
        return "GPU only"
    if case.dtype_name != "float32" or case.extra["activation"] != "relu":
        return "only relu in float32"
    rows, inputs, outputs = case.shape
    if rows * inputs * outputs > _MOST_NAIVE:
        return "would take too long"
    return "not built" if naive_library(device) is None else naive_linear_relu


def naive_linear_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The kernel of benchmarks/naive for x's device; takes contiguous float32 tensors."""
    device = x.device.type
    launch = getattr(naive_library(device), f"fusewise_naive_linear_relu_{device}")
    launch.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 3
    stream = ()
    if device == "cuda":
        launch.argtypes += [ctypes.c_void_p]
        stream = (torch.cuda.current_stream().cuda_stream,)
    y = x.new_empty(x.shape[0], w.shape[0])
    pointers = (tensor.data_ptr() for tensor in (x, w, b, y))
    error = launch(*pointers, *y.shape, x.shape[1], *stream)
    if device == "cuda" and error:
        raise RuntimeError(f"the naive kernel failed with CUDA error {error}")
    return y


FAMILY = Family(
    name="linear_act",
    rank=3,
    extra={"activation": tuple(ACTIVATIONS)},
    build=build,
    reference=reference,
    traffic=traffic,
    operations=operations,
    baselines=("addmm_activation", "in-place", PRODUCTS),
    tiny=Case("linear_act", "tiny", (2, 8, 8), "float32", extra={"activation": "relu"}),
    checked=tuple(
        Case(
            "linear_act", f"{activation} {name}", shape, "float32", extra={"activation": activation}
        )
        for activation in ACTIVATIONS
        for name, shape in (("256x128x192", (256, 128, 192)), ("odd 33x65x31", (33, 65, 31)))
    ),
)
