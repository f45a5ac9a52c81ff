"""Linear + activation: what is compared, with what, and what it costs at least."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

import fusewise

from ..accuracy import Expected
from ..naive import naive_library
from .family import BOTH, Case, Family, Workload

ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
_MOST_NAIVE = 1 << 34  # multiplications; beyond, one call takes a second

# What stands for the products alone is another function: it is timed, not checked.
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
        """A library's product and relu in place: what a first repair of a naive one comes to."""
        return F.linear(x, w, b).relu_()

    def fused_forward(x, w, b):
        return torch._addmm_activation(b, x, w.t(), use_gelu=activation == "gelu_tanh")

    fused = activation in ("relu", "gelu_tanh") and device == "cuda"
    return Workload(
        inputs=[(random(rows, inputs),) for _ in range(buffers)],
        gradients=[random(rows, outputs, learned=False) for _ in range(buffers)],
        weights=(random(outputs, inputs, scale=inputs**-0.5), random(outputs)),
        functions={
            "fusewise": lambda x, w, b: fusewise.functional.linear_act(x, w, b, activation),
            "eager": eager,
            "naive": naive(case, device),
            "addmm_activation": fused_forward if fused else "not for this",
            "in-place": in_place if activation == "relu" else "not for this",
            PRODUCTS: lambda x, w, _: fusewise.functional.linear_act(x, w, None, "identity"),
        },
        forward_only=frozenset({"naive", "addmm_activation"}),
        unchecked=frozenset({PRODUCTS}),
    )


def reference(case: Case, workload: Workload) -> dict[str, Expected]:
    return expected(
        *workload.inputs[0],
        *workload.weights,
        workload.gradients[0],
        case.extra["activation"],
        case.tf32,
    )


@torch.no_grad()
def expected(x, w, b, dy, activation: str, tf32: bool = False) -> dict[str, Expected]:
    """y and the gradient of every input that is there, by name, with their scales; in fp64."""
    rounding = Rounding(x.dtype, tf32)
    layer = Layer(x.double(), w.double(), None if b is None else b.double(), activation, rounding)
    found = {"y": (layer.y, layer.y_error), **layer.backward(dy.double(), None)}
    return {name: Expected(value, rounding.scale(error)) for name, (value, error) in found.items()}


class Rounding:
    """How much one rounding of a result, and one of a term of a sum, may change it."""

    def __init__(self, dtype: torch.dtype, tf32: bool):
        self.result = torch.finfo(dtype).eps
        halves = (torch.float16, torch.bfloat16)
        self.term = 2.0**-10 if tf32 else torch.finfo(torch.float32).eps if dtype in halves else 0
        self.term = self.term or self.result

    def scale(self, error: Tensor) -> float:
        """In the accuracy rule's terms: that allows four eps of it."""
        return error.max().item() / self.result if error.numel() else 0.0


class Layer:
    """One layer in fp64, and with each result a bound of what rounding does to it, to first order.

    relu's slope jumps at 0. Where z is so near to it that rounding decides the side, both slopes
    are right, and the bound has the whole difference.
    """

    def __init__(self, x, w, b, activation, rounding: Rounding, x_error=None):
        self.x, self.w, self.b, self.rounding = x, w, b, rounding
        self.x_error = torch.zeros_like(x) if x_error is None else x_error
        terms = F.linear(x.abs(), w.abs(), None if b is None else b.abs())
        z_error = rounding.term * terms + F.linear(self.x_error, w.abs())
        with torch.enable_grad():
            z = F.linear(x, w, b).requires_grad_()
            y = ACTIVATIONS[activation](z)
            (slope,) = torch.autograd.grad(y.sum(), z, create_graph=activation != "identity")
            if activation == "relu":
                # Of halves, the sum may be rounded before the bias is added.
                before = z if b is None else z - b
                room = 4 * z_error + 2 * rounding.result * before.abs()
                slope_error = (z.abs() <= room).double()
            elif activation == "identity":
                slope_error = torch.zeros_like(z)
            else:
                (curve,) = torch.autograd.grad(slope.sum(), z)
                slope_error = curve.abs() * (z_error + rounding.result * z.abs())
        self.y, self.slope, self.slope_error = y.detach(), slope.detach(), slope_error.detach()
        self.y_error = self.slope.abs() * (z_error + rounding.result * z.detach().abs())
        self.y_error += rounding.result * self.y.abs()

    def backward(self, dy, dy_error) -> dict[str, tuple[Tensor, Tensor]]:
        dz = dy * self.slope
        error = dy.abs() * self.slope_error + self.rounding.result * dz.abs()
        if dy_error is not None:
            error += dy_error * self.slope.abs()
        # Of the products below, whose terms are rounded once more.
        terms = error + self.rounding.term * dz.abs()
        found = {
            "dx": (dz @ self.w, terms @ self.w.abs()),
            "dw": (dz.T @ self.x, terms.T @ self.x.abs() + dz.abs().T @ self.x_error),
        }
        if self.b is not None:
            found["db"] = (dz.sum(0), terms.sum(0))
        for name, (value, bound) in found.items():
            found[name] = (value, bound + self.rounding.result * value.abs())
        return found


def bytes_moved(case: Case, mode: str) -> int:
    """Forward reads x and w and writes y; backward reads dy, x and w and writes dx and dw."""
    rows, inputs, outputs = case.shape
    x, w, y = rows * inputs, outputs * inputs, rows * outputs
    elements = 3 * x + 3 * w + 2 * y if mode == BOTH else x + w + y
    return elements * case.dtype.itemsize


def operations(case: Case, mode: str) -> int:
    """Of the products: one forward, two more backward."""
    rows, inputs, outputs = case.shape
    return 2 * rows * inputs * outputs * (3 if mode == BOTH else 1)


def naive(case: Case, device: str):
    """A common first attempt, one thread an output (benchmarks/naive), or why it is not there."""
    if device != "cuda":
        return "GPU only"
    if case.dtype_name != "float32" or case.extra["activation"] != "relu":
        return "relu in float32 alone"
    rows, inputs, outputs = case.shape
    if rows * inputs * outputs > _MOST_NAIVE:
        return "too slow to wait for"
    return "not built" if naive_library(device) is None else naive_linear_relu


def naive_linear_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The kernel of benchmarks/naive for x's device, on dense float32."""
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
    bytes_moved=bytes_moved,
    operations=operations,
    baselines=("addmm_activation", "in-place", PRODUCTS),
    checked=tuple(
        Case(
            "linear_act", f"{activation} {name}", shape, "float32", extra={"activation": activation}
        )
        for activation in ACTIVATIONS
        for name, shape in (("256x128x192", (256, 128, 192)), ("odd 33x65x31", (33, 65, 31)))
    ),
)
