"""Squeeze-and-Excitation in the benchmark: its baselines, its reference and its floor."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

import fusewise

from ..accuracy import Expected, cut, largest, pieces, scale
from ..naive import naive_library
from .family import BOTH, LAYOUTS, Case, Family, Traffic, Workload

# Where the slope jumps.
_KINKS = {"relu": (0,), "hardswish": (-3, 3), "hardsigmoid": (-3, 3)}
_LARGE = 1 << 27  # elements; above, fp16 and bf16 data get fp32 references, to save tens of GB


def fused(x, w1, b1, w2, b2, activation="silu", gate="sigmoid"):
    return fusewise.functional.squeeze_excite(x, w1, b1, w2, b2, activation, gate)


def eager(x, w1, b1, w2, b2, activation="silu", gate="sigmoid"):
    """The operators that torchvision's SqueezeExcitation calls."""
    scale = F.adaptive_avg_pool2d(x, 1)
    scale = getattr(F, activation)(F.conv2d(scale, w1, b1))
    return x * getattr(F, gate)(F.conv2d(scale, w2, b2))


def build(case: Case, device: str, buffers: int) -> Workload:
    channels, reduced = case.shape[1], case.extra["reduced"]
    functions = _activation(case), _gate(case)
    generator = torch.Generator(device).manual_seed(0)

    def random(shape, layout=torch.contiguous_format, scale=1.0, learned=True, dtype=case.dtype):
        value = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        value.normal_(0, scale, generator=generator)
        return value.requires_grad_(learned)

    def parameter(*shape, scale=1.0):
        return random(shape, scale=scale, dtype=_weights(case))

    def ours(x, *weights):
        return fused(x, *weights, *functions)

    def theirs(x, *weights):
        return eager(x, *weights, *functions)

    def theirs_under_autocast(x, *weights):
        with torch.autocast(device, case.dtype):
            return eager(x, *weights, *functions)

    inputs = [(random(case.shape, case.memory_format),) for _ in range(buffers)]
    gradients = [random(case.shape, case.memory_format, learned=False) for _ in range(buffers)]
    weights = (
        parameter(reduced, channels, 1, 1, scale=channels**-0.5),
        parameter(reduced),
        parameter(channels, reduced, 1, 1, scale=reduced**-0.5),
        parameter(channels),
    )
    avoid_kinks(_means(inputs[0][0].detach()), *weights, *functions, case.dtype)
    return Workload(
        inputs,
        gradients,
        weights,
        functions={
            "fusewise": ours,
            "eager": theirs if _weights(case) == case.dtype else theirs_under_autocast,
            "naive": naive(case, device),
        },
        forward_only=frozenset({"naive"}),
    )


@torch.no_grad()
def avoid_kinks(pooled, w1, b1, w2, b2, activation, gate, dtype) -> None:
    """Moves the biases until no sample is near a kink, where rounding decides the slope. pooled:
    the means of the images, whose type is `dtype`, in fp64.

    There torch's gradient may be off by a whole term, and the rule would allow as much everywhere.
    """
    for bias, place, kinks in ((b1, 1, _KINKS.get(activation)), (b2, 3, _KINKS.get(gate))):
        if kinks:
            doubles = (t.double() for t in (w1, b1, w2, b2))
            z = steps_of(pooled, *doubles, activation, gate)[place]
            low, high = z.amin(0), z.amax(0)
            room = 8 * torch.finfo(dtype).eps * (1 + torch.maximum(-low, high))
            for kink in kinks:
                up, down = kink + room - low, kink - room - high
                shift = torch.where(up < -down, up, down)
                bias += torch.where((up > 0) & (down < 0), shift, 0)


def _activation(case: Case) -> str:
    return case.extra.get("activation", "silu")


def _gate(case: Case) -> str:
    return case.extra.get("gate", "sigmoid")


def _weights(case: Case) -> torch.dtype:
    """The dtype of the weights: x's, or float32 beside half x, as under autocast."""
    half = case.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and "weights" in case.extra else case.dtype


def reference(case: Case, workload: Workload) -> dict[str, Expected]:
    tensors = *workload.inputs[0], *workload.weights, workload.gradients[0]
    return expected(*tensors, _activation(case), _gate(case))


def formula(x, w1, b1, w2, b2, activation="silu", gate="sigmoid"):
    """The formula in torch's own operators, independent of fusewise, for checking it."""
    return x * _planes(steps_of(x.mean((2, 3)), w1, b1, w2, b2, activation, gate)[-1])


def steps_of(pooled, w1, b1, w2, b2, activation, gate):
    """All values from the means of x to the gates, both included."""
    z = F.linear(pooled, w1.flatten(1), b1)
    if activation == "hardswish" and z.dtype == torch.float64:
        hidden = z * F.relu6(z + 3) / 6  # on CUDA, torch's hardswish keeps its 1/6 in float32
    else:
        hidden = getattr(F, activation)(z)
    z2 = F.linear(hidden, w2.flatten(1), b2)
    if gate == "hardsigmoid" and z2.dtype == torch.float64:
        gates = F.relu6(z2 + 3) / 6  # torch's hardsigmoid keeps its 1/6 in float32
    else:
        gates = getattr(F, gate)(z2)
    return pooled, z, hidden, z2, gates


def expected(x, w1, b1, w2, b2, dy, activation="silu", gate="sigmoid") -> dict[str, Expected]:
    """y and the gradients of all inputs that are not None, by name, with their scales; in fp64.

    The images only interact with the rest through [N, C] tensors: the means of x, the gates, and
    their gradients. So autograd runs on these alone, and the images are processed in pieces. For
    large half-precision data, y and dx are rounded to fp32.
    """
    x, dy = x.detach(), dy.detach()
    weights = {
        name: t.detach().double().requires_grad_()
        for name, t in {"w1": w1, "b1": b1, "w2": w2, "b2": b2}.items()
        if t is not None
    }
    pixels = x.shape[2] * x.shape[3]
    pooled = _means(x).requires_grad_()
    dgates = _pixel_sums(torch.mul, dy, x)
    with torch.enable_grad():
        steps = steps_of(pooled, *map(weights.get, ("w1", "b1", "w2", "b2")), activation, gate)
    inner = torch.autograd.grad(steps[-1], steps[:-1], dgates, retain_graph=True)
    found = torch.autograd.grad(steps[-1], list(weights.values()), dgates, retain_graph=True)
    terms = _terms(x, dy, weights, steps, (*inner, dgates))

    half = x.dtype in (torch.float16, torch.bfloat16)
    kept = torch.float32 if half and x.numel() > _LARGE else torch.float64
    y, dx = (torch.empty_like(x, dtype=kept) for _ in range(2))
    gates, dpooled = steps[-1].detach(), inner[0] / pixels
    images = pieces(y, dx, x, dy, *(_planes(t).expand_as(x) for t in (gates, dpooled)))
    for y_piece, dx_piece, x_piece, dy_piece, gate_piece, dpooled_piece in images:
        y_piece.copy_(x_piece.double() * gate_piece)
        dx_piece.copy_(dy_piece.double() * gate_piece + dpooled_piece)
    values = {"y": y, "dx": dx, **{f"d{n}": t for n, t in zip(weights, found, strict=True)}}
    return {
        name: Expected(value, scale(largest(value), *terms[name], x.dtype))
        for name, value in values.items()
    }


def _terms(x, dy, weights, steps, gradients) -> dict[str, tuple[float, float]]:
    """The largest sum of |terms| behind an element of each output.

    A pair per output: for its outermost sum, and for the sums inside that (pooling, both GEMMs, the
    sum over pixels in backward).
    """
    pixels = x.shape[2] * x.shape[3]
    P = _pixel_sums(torch.abs, x) / pixels
    DG = _pixel_sums(lambda dy, x: (dy * x).abs(), dy, x)
    found, (g, G), (dp, DP) = vector_terms(P, DG, weights, steps, gradients)
    for name, image, pairs in (
        ("y", x, ((g, torch.zeros_like(g)), (G, torch.zeros_like(G)))),
        ("dx", dy, ((g, dp / pixels), (G, DP / pixels))),
    ):
        found[name] = tuple(_largest_image(image, *pair) for pair in pairs)
    return found


def vector_terms(P, DG, weights, steps, gradients):
    """What `_terms` gives for the weights' gradients, and the outermost and the inner sums of
    |terms| behind the gates and behind the gradient of the means. P and DG are the sums behind the
    means and behind the gradient of the gates. Upper-case names are sums of |terms|, propagated to
    first order."""
    act_slope, gate_slope = (
        torch.autograd.grad(after.sum(), before, retain_graph=True)[0].abs()
        for before, after in (steps[1:3], steps[3:])
    )
    p, _, h, _, g = (t.detach().abs() for t in steps)
    _, dz, dh, dz2, dg = (t.abs() for t in gradients)
    w1, w2 = (weights[name].detach().abs().flatten(1) for name in ("w1", "w2"))
    b1, b2 = (weights[n].detach().abs() if n in weights else None for n in ("b1", "b2"))

    Z = F.linear(P, w1, b1)
    H = act_slope * Z
    Z2 = F.linear(H, w2, b2)
    G = gate_slope * Z2
    DZ2 = gate_slope * (DG + dg * Z2)
    DZ = act_slope * (DZ2 @ w2) + dh * Z

    # NaN and infinite samples do not count: a closed unit keeps them out of finite results.
    p, h, dz, dz2, P, H, DZ, DZ2 = map(_finite, (p, h, dz, dz2, P, H, DZ, DZ2))
    terms = {
        "dw1": (dz.T @ p, DZ.T @ p + dz.T @ P),
        "db1": (dz.sum(0), DZ.sum(0)),
        "dw2": (dz2.T @ h, DZ2.T @ h + dz2.T @ H),
        "db2": (dz2.sum(0), DZ2.sum(0)),
    }
    found = {name: tuple(map(largest, pair)) for name, pair in terms.items()}
    return found, (g, G), (dz @ w1, DZ @ w1)


def _largest_image(image: Tensor, factor: Tensor, summand: Tensor) -> float:
    """The largest |image| * factor + summand; factor and summand are [N, C]."""
    parts = pieces(image, *(_planes(t).expand_as(image) for t in (factor, summand)))
    return max(largest(image.double().abs() * factor + summand) for image, factor, summand in parts)


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _means(x: Tensor) -> Tensor:
    return _pixel_sums(lambda x: x, x) / (x.shape[2] * x.shape[3])


def _pixel_sums(product, *images: Tensor) -> Tensor:
    """The sum over H and W of `product(*images)`, [N, C] in fp64."""
    dim, _ = cut(images[0].shape)
    sums = [product(*(t.double() for t in part)).sum((2, 3)) for part in pieces(*images)]
    return torch.cat(sums, dim) if dim < 2 else sum(sums)


def _planes(matrix: Tensor) -> Tensor:
    """[N, C] as [N, C, 1, 1]."""
    return matrix[:, :, None, None]


def traffic(case: Case, mode: str) -> Traffic:
    """Forward reads x and writes y. Backward reads dy and again x, and writes dx."""
    n, channels, height, width = case.shape
    reduced = case.extra["reduced"]
    plane = n * channels * height * width * case.dtype.itemsize
    weights = (2 * channels * reduced + channels + reduced) * _weights(case).itemsize
    if mode == BOTH:
        return Traffic(data=4 * plane + weights, weights=weights, again=plane + weights)
    return Traffic(data=2 * plane, weights=weights)


def operations(case: Case, mode: str) -> int:
    """Forward: the sum of x, two GEMMs, the scaling. Backward: the sum of dy * x, four GEMMs, and
    dy * g + dp. Activations and biases are too few to count."""
    n, channels, height, width = case.shape
    plane = n * channels * height * width
    product = 2 * n * channels * case.extra["reduced"]
    return 6 * plane + 6 * product if mode == BOTH else 2 * plane + 2 * product


def naive(case: Case, device: str):
    """A typical first attempt, one thread per channel (benchmarks/naive), or why it is missing."""
    if device != "cuda":
        return "GPU only"
    if case.dtype not in (torch.float32, torch.float16):
        return f"not written for {case.dtype_name}"
    if (_activation(case), _gate(case), _weights(case)) != ("silu", "sigmoid", case.dtype):
        return "written for silu, sigmoid and weights of x's dtype"
    if naive_library(device) is None:
        return "not built"
    launch = naive_library(device).fusewise_naive_squeeze_excite_forward
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int] * 3
    launch.argtypes += [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]

    def run(x, w1, b1, w2, b2):
        y = torch.empty_like(x)
        n, channels, height, width = x.shape
        error = launch(
            *(tensor.data_ptr() for tensor in (x, w1, b1, w2, b2, y)),
            *(n, channels, w1.shape[0], height * width),
            case.layout == "channels_last",
            x.dtype == torch.float16,
            torch.cuda.current_stream().cuda_stream,
        )
        if error:
            raise RuntimeError(f"the naive kernel failed with CUDA error {error}")
        return y

    return run


FAMILY = Family(
    name="squeeze_excite",
    rank=4,
    extra={
        "reduced": None,
        "activation": ("silu", "relu", "hardswish"),
        "gate": ("sigmoid", "hardsigmoid"),
        "weights": ("float32",),
    },
    optional=("activation", "gate", "weights"),
    layouts=tuple(LAYOUTS),
    build=build,
    reference=reference,
    traffic=traffic,
    operations=operations,
    tiny=Case("squeeze_excite", "tiny", (1, 8, 2, 2), "float32", extra={"reduced": 2}),
    checked=tuple(
        Case("squeeze_excite", name, shape, "float32", extra={"reduced": reduced})
        for name, shape, reduced in (
            ("64x28", (4, 64, 28, 28), 4),
            ("1632x12", (2, 1632, 12, 12), 68),
            ("odd 65x7", (3, 65, 7, 5), 9),
            ("one pixel", (16, 512, 1, 1), 32),
        )
    ),
)
