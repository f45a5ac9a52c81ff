"""BatchNorm + activation (+ residual, or + max-pool) in the benchmark: its baselines, its reference
and its floor."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusewise

from ..._usage import UsageError
from ..accuracy import Expected, Results, accumulator, largest, scale
from .family import BOTH, FORWARD, LAYOUTS, MODES, Case, Family, Traffic, Workload

INFERENCE = "inference"  # running statistics, no gradients
MAX_POOL = "max-pool"  # a max-pool of 3x3 values with stride 2 and padding 1 follows
_EPS = 1e-5
_PIXELS = (0, 2, 3)
# Where the slope jumps. On which side of 0 relu and relu6 were, their y shows.
_KINKS = {"hardswish": (-3, 3), "relu6": (6,)}


def build(case: Case, device: str, buffers: int) -> Workload:
    channels, activation = case.shape[1], case.extra["activation"]
    adds, variant = case.extra["residual"] == "add", case.extra.get("variant")
    training, pools = variant != INFERENCE, variant == MAX_POOL
    if pools and adds:
        raise UsageError(f"{case.name}: residual: expected none with a max-pool, got add")
    generator = torch.Generator(device).manual_seed(0)
    parameters = {"dtype": accumulator(case.dtype), "device": device}
    running = running_statistics(case, device)
    counter = torch.zeros((), dtype=torch.int64, device=device) if training else None

    def image(learned=True, shape=case.shape):
        value = torch.empty(shape, dtype=case.dtype, device=device)
        value = value.to(memory_format=case.memory_format)
        return value.normal_(0, 1, generator=generator).requires_grad_(learned)

    def vector(mean):
        value = torch.empty(channels, **parameters).normal_(mean, 0.5, generator=generator)
        return value.requires_grad_()

    def fused(x, *others):
        *residual, weight, bias = others
        return fusewise.functional.batch_norm_act(
            x,
            *running,
            weight,
            bias,
            *residual,
            activation=activation,
            training=training,
            num_batches_tracked=counter,
            max_pool=pools,
        )

    def eager(x, *others):
        """As torchvision's models do it: the sum and the activation in place."""
        *residual, weight, bias = others
        if training:
            counter.add_(1)
        v = F.batch_norm(x, *running, weight, bias, training)
        for tensor in residual:
            v += tensor
        y = v if activation == "identity" else getattr(F, activation)(v, inplace=True)
        return F.max_pool2d(y, 3, 2, 1) if pools else y

    inputs = [tuple(image() for _ in range(1 + adds)) for _ in range(buffers)]
    gradients = [image(learned=False, shape=_output_shape(case)) for _ in range(buffers)]
    weights = vector(1.0), vector(0.0)
    for images, dy in zip(inputs, gradients, strict=True):
        undecided = _undecided(case, images, weights)
        if undecided is not None:
            dy.masked_fill_(undecided, 0)
    return Workload(inputs, gradients, weights, {"fusewise": fused, "eager": eager})


def running_statistics(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """The running mean and variance."""
    kind = {"dtype": accumulator(case.dtype), "device": device}
    channels = case.shape[1]
    return torch.linspace(-1, 1, channels, **kind), torch.linspace(0.5, 2, channels, **kind)


def _output_shape(case: Case) -> tuple[int, ...]:
    if case.extra.get("variant") != MAX_POOL:
        return case.shape
    n, c, h, w = case.shape
    return n, c, (h + 1) // 2, (w + 1) // 2


def _undecided(case, images, weights) -> Tensor | None:
    """The outputs whose gradient depends on rounding, apart from relu's at 0; None: there are none.
    Their dy is 0."""
    x, *residual = images
    activation = case.extra["activation"]
    at_kinks = kinks(x, *weights, activation, *residual)
    if case.extra.get("variant") != MAX_POOL:
        return at_kinks
    _, v = _normalized(x, *weights)
    u = activate(v, activation)
    windows = F.pad(u, (1, 1, 1, 1), value=-torch.inf).unfold(2, 3, 2).unfold(3, 3, 2)
    first, second = windows.flatten(-2).topk(2).values.unbind(-1)
    close = first - second <= 2 * torch.finfo(case.dtype).eps * (1 + 2 * first.abs())
    if at_kinks is None:
        return close
    _, pixels = F.max_pool2d(u, 3, 2, 1, return_indices=True)
    return close | at_kinks.flatten(-2).gather(-1, pixels.flatten(-2)).view(pixels.shape)


def kinks(x, weight, bias, activation, residual=None, running=None) -> Tensor | None:
    """Where the slope jumps within torch's rounding of v; None: the activation has no kinks. There
    torch's gradient may be half of dy off, or all of it, and the rule would allow as much
    everywhere. So dy must be 0 there."""
    if activation not in _KINKS:
        return None
    norm, v = _normalized(x, weight, bias, residual, running)
    room = 2 * torch.finfo(x.dtype).eps * (norm.abs() + v.abs())
    distances = torch.stack([(v - kink).abs() for kink in _KINKS[activation]])
    return distances.amin(0) <= room


def _normalized(x, weight, bias, residual=None, running=None) -> tuple[Tensor, Tensor]:
    """The norm and v, which also has the residual; in fp64."""
    parameters = (*(running or (None, None)), weight, bias)
    parameters = (t if t is None else t.detach().double() for t in parameters)
    norm = F.batch_norm(x.detach().double(), *parameters, running is None)
    return norm, norm if residual is None else norm + residual.detach()


def reference(case: Case, workload: Workload) -> dict[str, Expected]:
    x, *residual = workload.inputs[0]
    dy, activation = workload.gradients[0], case.extra["activation"]
    added = residual[0] if residual else None
    if case.extra.get("variant") == INFERENCE:
        running = running_statistics(case, x.device)
        return expected(x, *workload.weights, dy, activation, added, running=running)
    if case.extra.get("variant") != MAX_POOL:
        return expected(x, *workload.weights, dy, activation, added)
    _, v = _normalized(x, *workload.weights)
    u = activate(v, activation).requires_grad_()
    y = F.max_pool2d(u, 3, 2, 1)
    (du,) = torch.autograd.grad(y, u, dy.double())
    found = expected(x, *workload.weights, du, activation)
    found["y"] = Expected(y.detach(), found["y"].scale)
    return found


def given(case, workload, results, saved) -> Results:
    """The gradients for the decisions that relu and relu6 took at 0, which y shows."""
    activation = case.extra["activation"]
    if activation not in ("relu", "relu6") or case.extra.get("variant") == MAX_POOL:
        return results
    y = results.outputs["y"]
    x, *residual = workload.inputs[0]
    found = expected(
        x,
        *workload.weights,
        workload.gradients[0],
        activation,
        residual=residual[0] if residual else None,
        passes=~(y <= 0) & (~(y >= 6) if activation == "relu6" else True),
    )
    return Results(results.outputs, found)


class Norm(NamedTuple):
    """BatchNorm in fp64. Upper-case names are sums of |terms|, propagated to first order."""

    inverse: Tensor
    n: Tensor
    v: Tensor
    N: Tensor
    V: Tensor
    inside: Tensor
    """The sums inside of V: what the mean's terms add to it, by channel."""

    @staticmethod
    def of(x, weight, bias, residual=None, running=None) -> "Norm":
        """`running`: mean and variance in inference."""
        x, weight, bias = (t.detach().double() for t in (x, weight, bias))
        mean, variance = x.mean(_PIXELS), x.var(_PIXELS, correction=0)
        M = x.abs().mean(_PIXELS)
        if running is not None:
            mean, variance = (t.detach().double() for t in running)
            M = torch.zeros_like(mean)
        inverse = (variance + _EPS).rsqrt()
        n = (x - _wide(mean)) * _wide(inverse)
        N = (x.abs() + _wide(mean.abs() + M)) * _wide(inverse)
        v = n * _wide(weight) + _wide(bias)
        V = N * _wide(weight.abs()) + _wide(bias.abs())
        if residual is not None:
            v, V = v + residual.detach(), V + residual.detach().double().abs()
        return Norm(inverse, n, v, N, V, weight.abs() * inverse * M)

    def gradient(self, activation: str, da: Tensor, DA: Tensor | None = None):
        """The gradient of v from that of act(v), and its sum of |terms|. DA: that of da, if da is a
        result itself."""
        v = self.v.detach().requires_grad_()
        with torch.enable_grad():
            a = activate(v, activation)
            (dv,) = torch.autograd.grad(a, v, da, retain_graph=DA is not None)
        smooth = activation in ("silu", "hardswish")
        DV = da.abs() * self.V if smooth else torch.zeros_like(dv)
        if DA is not None:
            DV += DA * torch.autograd.grad(a.sum(), v)[0].abs()
        return dv, DV


def expected(
    x,
    weight,
    bias,
    dy,
    activation,
    residual=None,
    passes=None,
    running=None,
    inside=None,
    summed_in=None,
) -> dict[str, Expected]:
    """y and all gradients, by name, with their scales; in fp64. `passes`: where relu and relu6 let
    the gradient through, if that is not where the reference does. `running`: mean and variance in
    inference. `inside`: the sums of |terms| behind dy, if it is a result itself. `summed_in`: the
    type of the parameters' gradients; None: x's."""
    dtype = x.dtype
    norm = Norm.of(x, weight, bias, residual, running)
    inverse, n, v, N, V, _ = norm
    weight, dy = (t.detach().double() for t in (weight, dy))
    count = max(1, x.numel() // x.shape[1])
    y = activate(v, activation)
    dv, DV = norm.gradient(activation, dy, inside)
    if passes is not None:
        dv = torch.where(passes, dy, 0)
    dbias, dweight = dv.sum(_PIXELS), (dv * n).sum(_PIXELS)
    gain = _wide(weight * inverse)
    own = running is None
    dx = gain * (dv - own * (_wide(dbias / count) + n * _wide(dweight / count)))

    sums, products = dv.abs().sum(_PIXELS), (dv * n).abs().sum(_PIXELS)
    others = _wide(sums / count) + n.abs() * _wide(products / count)
    nested = _wide(DV.mean(_PIXELS)) + N * _wide(products / count)
    terms = {
        "y": (V, norm.inside),
        "dx": (
            gain.abs() * (dv.abs() + own * others),
            gain.abs() * (DV + own * nested),
        ),
        "dresidual": (dv.abs(), DV),
        "dweight": (products, (DV * n.abs() + dv.abs() * N).sum(_PIXELS)),
        "dbias": (sums, DV.sum(_PIXELS)),
    }
    values = {"y": y, "dx": dx, "dresidual": dv, "dweight": dweight, "dbias": dbias}
    if residual is None:
        del values["dresidual"]
    types = dict.fromkeys(("dweight", "dbias"), summed_in or dtype)
    found = {
        name: Expected(
            value, scale(largest(value), *map(largest, terms[name]), types.get(name, dtype))
        )
        for name, value in values.items()
    }
    if activation in ("relu", "relu6"):
        clear = v.abs() > 4 * torch.finfo(accumulator(dtype)).eps * V
        found["y"] = found["y"]._replace(decided=clear)
    return found


def activate(v: Tensor, activation: str) -> Tensor:
    if activation == "identity":
        return v.clone()
    if activation == "hardswish":
        return v * F.relu6(v + 3) / 6  # on CUDA, torch's hardswish keeps its 1/6 in float32
    return getattr(F, activation)(v)


def _wide(channels: Tensor) -> Tensor:
    return channels[:, None, None]


def _sizes(case: Case) -> tuple[int, int, int]:
    """Elements of x and of y, and whether there is a residual."""
    adds = int(case.extra["residual"] == "add")
    return math.prod(case.shape), math.prod(_output_shape(case)), adds


def traffic(case: Case, mode: str) -> Traffic:
    """Forward reads x and the residual and writes y. Backward reads dy and x again and writes dx
    and, unless it is dy itself, dresidual. Each byte counts once."""
    elements, outputs, adds = _sizes(case)
    x, y = elements * case.dtype.itemsize, outputs * case.dtype.itemsize
    residual = adds * x
    weights = 4 * case.shape[1] * accumulator(case.dtype).itemsize
    if mode != BOTH:
        return Traffic(data=x + residual + y, weights=weights)
    written = 0 if case.extra["activation"] == "identity" else residual
    return Traffic(
        data=2 * (x + y) + residual + written + weights,
        weights=weights,
        again=x + weights,
    )


def operations(case: Case, mode: str) -> int:
    """Forward: mean and variance, 4, unless they are given; scale and shift, 2. Backward: two sums
    over what y's gradient reaches, 3; dx, 4. The residual adds one. Activations and comparisons
    count nothing."""
    x, y, residual = _sizes(case)
    forward = x * (2 + residual + (0 if case.extra.get("variant") == INFERENCE else 4))
    return forward + (3 * y + 4 * x if mode == BOTH else 0)


def modes(case: Case) -> tuple[str, ...]:
    return (FORWARD,) if case.extra.get("variant") == INFERENCE else MODES


FAMILY = Family(
    name="batch_norm_act",
    rank=4,
    extra={
        "activation": ("identity", "relu", "relu6", "silu", "hardswish"),
        "residual": ("none", "add"),
        "variant": (INFERENCE, MAX_POOL),
    },
    optional=("variant",),
    layouts=tuple(LAYOUTS),
    build=build,
    reference=reference,
    traffic=traffic,
    operations=operations,
    given=given,
    modes=modes,
    eager_rounds_between=True,  # the norm, before it adds the residual
    tiny=Case(
        "batch_norm_act",
        "tiny",
        (2, 8, 2, 2),
        "float32",
        extra={"activation": "relu", "residual": "none"},
    ),
    checked=tuple(
        Case(
            "batch_norm_act",
            name,
            shape,
            "float32",
            extra={"activation": activation, "residual": residual, **variant},
        )
        for name, shape, activation, residual, variant in (
            ("64x28 add relu", (4, 64, 28, 28), "relu", "add", {}),
            ("16x21 relu max-pool", (2, 16, 21, 20), "relu", "none", {"variant": MAX_POOL}),
            ("1632x12 silu", (2, 1632, 12, 12), "silu", "none", {}),
            ("odd 65x7 hardswish", (3, 65, 7, 5), "hardswish", "add", {}),
            ("3x33 relu6", (2, 3, 33, 31), "relu6", "none", {}),
            ("8x9 identity", (5, 8, 9, 9), "identity", "add", {}),
        )
    ),
)
