"""BatchNorm + activation (+ residual), training, in the benchmark: its baselines, its reference and
its floor."""

import torch
import torch.nn.functional as F
from torch import Tensor

import fusewise

from ..accuracy import Expected, Results, accumulator, largest, scale
from .family import BOTH, LAYOUTS, Case, Family, Traffic, Workload

_EPS = 1e-5
_PIXELS = (0, 2, 3)


def build(case: Case, device: str, buffers: int) -> Workload:
    channels, activation = case.shape[1], case.extra["activation"]
    adds = case.extra["residual"] == "add"
    generator = torch.Generator(device).manual_seed(0)
    parameters = {"dtype": accumulator(case.dtype), "device": device}
    running = torch.zeros(channels, **parameters), torch.ones(channels, **parameters)
    counter = torch.zeros((), dtype=torch.int64, device=device)

    def image(learned=True):
        value = torch.empty(case.shape, dtype=case.dtype, device=device)
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
            training=True,
            num_batches_tracked=counter,
        )

    def eager(x, *others):
        """As torchvision's models do it: the sum and the activation in place."""
        *residual, weight, bias = others
        counter.add_(1)
        v = F.batch_norm(x, *running, weight, bias, True)
        for tensor in residual:
            v += tensor
        return v if activation == "identity" else getattr(F, activation)(v, inplace=True)

    return Workload(
        inputs=[tuple(image() for _ in range(1 + adds)) for _ in range(buffers)],
        gradients=[image(learned=False) for _ in range(buffers)],
        weights=(vector(1.0), vector(0.0)),
        functions={"fusewise": fused, "eager": eager},
    )


def reference(case: Case, workload: Workload) -> dict[str, Expected]:
    x, *residual = workload.inputs[0]
    arguments = (x, *workload.weights, workload.gradients[0], case.extra["activation"])
    return expected(*arguments, residual=residual[0] if residual else None)


def given(case, workload, results, saved) -> Results:
    """The gradients for the decisions that relu and relu6 took, which y shows."""
    activation = case.extra["activation"]
    if activation not in ("relu", "relu6"):
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


def expected(
    x, weight, bias, dy, activation, residual=None, passes=None, running=None
) -> dict[str, Expected]:
    """y and all gradients, by name, with their scales; in fp64. `passes`: where relu and relu6 let
    the gradient through, if that is not where the reference does. `running`: mean and variance in
    inference."""
    dtype = x.dtype
    x, weight, bias, dy = (t.detach().double() for t in (x, weight, bias, dy))
    added = 0 if residual is None else residual.detach().double()
    count = max(1, x.numel() // x.shape[1])
    mean, variance = x.mean(_PIXELS), x.var(_PIXELS, correction=0)
    if running is not None:
        mean, variance = (t.detach().double() for t in running)
    inverse = (variance + _EPS).rsqrt()
    n = (x - _wide(mean)) * _wide(inverse)
    v = (n * _wide(weight) + _wide(bias) + added).requires_grad_()
    y = _activate(v, activation)
    (dv,) = torch.autograd.grad(y, v, dy)
    y, v = y.detach(), v.detach()
    if passes is not None:
        dv = torch.where(passes, dy, 0)
    dbias, dweight = dv.sum(_PIXELS), (dv * n).sum(_PIXELS)
    gain = _wide(weight * inverse)
    own = running is None
    dx = gain * (dv - own * (_wide(dbias / count) + n * _wide(dweight / count)))

    # Upper-case names are sums of |terms|, propagated to first order.
    M = x.abs().mean(_PIXELS) if own else torch.zeros_like(mean)
    N = (x.abs() + _wide(mean.abs() + M)) * _wide(inverse)
    V = N * _wide(weight.abs()) + _wide(bias.abs()) + (added.abs() if residual is not None else 0)
    smooth = activation in ("silu", "hardswish")
    DV = dy.abs() * V if smooth else torch.zeros_like(dv)
    sums, products = dv.abs().sum(_PIXELS), (dv * n).abs().sum(_PIXELS)
    others = _wide(sums / count) + n.abs() * _wide(products / count)
    nested = _wide(DV.mean(_PIXELS)) + N * _wide(products / count)
    terms = {
        "y": (V, _wide(weight.abs() * inverse * M)),
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
    found = {
        name: Expected(value, scale(largest(value), *map(largest, terms[name]), dtype))
        for name, value in values.items()
    }
    if activation in ("relu", "relu6"):
        clear = v.abs() > 4 * torch.finfo(accumulator(dtype)).eps * V
        found["y"] = found["y"]._replace(decided=clear)
    return found


def _activate(v: Tensor, activation: str) -> Tensor:
    if activation == "identity":
        return v.clone()
    if activation == "hardswish":
        return v * F.relu6(v + 3) / 6  # on CUDA, torch's hardswish keeps its 1/6 in float32
    return getattr(F, activation)(v)


def _wide(channels: Tensor) -> Tensor:
    return channels[:, None, None]


def _images(case: Case) -> tuple[int, int]:
    """Bytes of an image tensor, and whether there is a residual."""
    elements = 1
    for size in case.shape:
        elements *= size
    return elements * case.dtype.itemsize, int(case.extra["residual"] == "add")


def traffic(case: Case, mode: str) -> Traffic:
    """Forward reads x and the residual and writes y. Backward reads dy and x again and writes dx
    and, unless it is dy itself, dresidual. Each byte counts once."""
    image, residual = _images(case)
    weights = 4 * case.shape[1] * accumulator(case.dtype).itemsize
    if mode != BOTH:
        return Traffic(data=(2 + residual) * image, weights=weights)
    writes_residual = residual and case.extra["activation"] != "identity"
    return Traffic(
        data=(4 + residual + writes_residual) * image + weights,
        weights=weights,
        again=image + weights,
    )


def operations(case: Case, mode: str) -> int:
    """Forward: mean and variance, 4; scale and shift, 2. Backward: two sums, 3; dx, 4. The residual
    adds one. Activations count nothing."""
    image, residual = _images(case)
    elements = image // case.dtype.itemsize
    return elements * (6 + residual + (7 if mode == BOTH else 0))


FAMILY = Family(
    name="batch_norm_act",
    rank=4,
    extra={
        "activation": ("identity", "relu", "relu6", "silu", "hardswish"),
        "residual": ("none", "add"),
    },
    layouts=tuple(LAYOUTS),
    build=build,
    reference=reference,
    traffic=traffic,
    operations=operations,
    given=given,
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
            extra={"activation": activation, "residual": residual},
        )
        for name, shape, activation, residual in (
            ("64x28 add relu", (4, 64, 28, 28), "relu", "add"),
            ("1632x12 silu", (2, 1632, 12, 12), "silu", "none"),
            ("odd 65x7 hardswish", (3, 65, 7, 5), "hardswish", "add"),
            ("3x33 relu6", (2, 3, 33, 31), "relu6", "none"),
            ("8x9 identity", (5, 8, 9, 9), "identity", "add"),
        )
    ),
)
