"""BatchNorm + activation + Squeeze-and-Excitation in the benchmark: its baselines, its reference
and its floor."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import fusewise

from ..accuracy import Expected, accumulator, largest, scale
from . import batch_norm_act, squeeze_excite
from .batch_norm_act import INFERENCE, Norm, activate, running_statistics
from .family import BOTH, FORWARD, LAYOUTS, MODES, Case, Family, Traffic, Workload
from .squeeze_excite import avoid_kinks, steps_of, vector_terms

PARTS = "parts"  # our batch_norm_act, then our squeeze_excite
NAMES = ("weight", "bias", "w1", "b1", "w2", "b2")
"""The parameters."""
_PIXELS = (2, 3)
# Where the slope of the first activation jumps.
_KINKS = {"relu": (0,), "relu6": (0, 6), "hardswish": (-3, 3)}


def build(case: Case, device: str, buffers: int) -> Workload:
    channels, reduced = case.shape[1], case.extra["reduced"]
    activation, hidden, gate = _functions(case)
    training = case.extra.get("variant") != INFERENCE
    generator = torch.Generator(device).manual_seed(0)
    parameters = {"dtype": accumulator(case.dtype), "device": device}
    running = running_statistics(case, device)
    counter = torch.zeros((), dtype=torch.int64, device=device) if training else None

    def image(learned=True):
        value = torch.empty(case.shape, dtype=case.dtype, device=device)
        value = value.to(memory_format=case.memory_format)
        return value.normal_(0, 1, generator=generator).requires_grad_(learned)

    def parameter(*shape, mean=0.0, deviation=1.0):
        value = torch.empty(shape, **parameters).normal_(mean, deviation, generator=generator)
        return value.requires_grad_()

    def norm_options():
        return {"activation": activation, "training": training, "num_batches_tracked": counter}

    def fused(x, *weights):
        return fusewise.functional.batch_norm_excite(
            x, *running, *weights, hidden_activation=hidden, gate=gate, **norm_options()
        )

    def parts(x, weight, bias, *weights):
        a = fusewise.functional.batch_norm_act(x, *running, weight, bias, **norm_options())
        return fusewise.functional.squeeze_excite(a, *weights, hidden, gate)

    def eager(x, weight, bias, *weights):
        """As torchvision's models do it: the activation in place."""
        if training:
            counter.add_(1)
        v = F.batch_norm(x, *running, weight, bias, training)
        a = v if activation == "identity" else getattr(F, activation)(v, inplace=True)
        return squeeze_excite.eager(a, *weights, hidden, gate)

    def eager_under_autocast(x, *weights):
        with torch.autocast(device, case.dtype):
            return eager(x, *weights)

    inputs = [(image(),) for _ in range(buffers)]
    gradients = [image(learned=False) for _ in range(buffers)]
    weights = (
        parameter(channels, mean=1.0, deviation=0.5),
        parameter(channels, deviation=0.5),
        parameter(reduced, channels, 1, 1, deviation=channels**-0.5),
        parameter(reduced),
        parameter(channels, reduced, 1, 1, deviation=reduced**-0.5),
        parameter(channels),
    )
    given = None if training else running
    leave_kinks(inputs[0][0], *weights[:2], activation, given, generator)
    a = activate(Norm.of(inputs[0][0], *weights[:2], running=given).v, activation)
    avoid_kinks(a.mean(_PIXELS), *weights[2:], hidden, gate, case.dtype)
    half = case.dtype in (torch.float16, torch.bfloat16)
    functions = {
        "fusewise": fused,
        "eager": eager_under_autocast if half else eager,
        PARTS: parts,
    }
    return Workload(inputs, gradients, weights, functions)


def _functions(case: Case) -> tuple[str, str, str]:
    return tuple(case.extra[name] for name in ("activation", "hidden_activation", "gate"))


def near_kinks(x, weight, bias, activation, running=None) -> Tensor | None:
    """Where the slope of the activation jumps within the rounding of v, ours or torch's; None: it
    has no kinks."""
    if activation not in _KINKS:
        return None
    norm = Norm.of(x, weight, bias, running=running)
    eps = torch.finfo(x.dtype).eps
    # In half precision, torch's norm has more than float32's error before it is rounded, and more
    # still beside half-precision parameters.
    share = eps / (4 if weight.dtype.itemsize == 2 else 16)
    inner = max(8 * torch.finfo(accumulator(x.dtype)).eps, share)
    room = 4 * eps * norm.v.abs() + inner * norm.V
    distances = torch.stack([(norm.v - kink).abs() for kink in _KINKS[activation]])
    return distances.amin(0) <= room


@torch.no_grad()
def leave_kinks(x, weight, bias, activation, running=None, generator=None) -> None:
    """Draws the values of x near a kink again until there are none. There torch's gradient may be
    off by a whole term, and the rule would allow as much everywhere. A gradient of 0 there would
    not help: the gates pass on one of their own."""
    for _ in range(100):
        near = near_kinks(x, weight, bias, activation, running)
        if near is None or not near.any():
            return
        other = torch.empty_like(x).normal_(generator=generator)
        x.copy_(torch.where(near, other, x))


def reference(case: Case, workload: Workload) -> dict[str, Expected]:
    (x,) = workload.inputs[0]
    inference = case.extra.get("variant") == INFERENCE
    running = running_statistics(case, x.device) if inference else None
    return expected(x, *workload.weights, workload.gradients[0], *_functions(case), running)


def expected(
    x, weight, bias, w1, b1, w2, b2, dy, activation, hidden_activation, gate, running=None
) -> dict[str, Expected]:
    """y and the gradients of all inputs that are not None, by name, with their scales; in fp64.
    Neither weight nor bias may be None. `running`: mean and variance in inference."""
    pixels = x.shape[2] * x.shape[3]
    norm = Norm.of(x, weight, bias, running=running)
    a, dy = activate(norm.v, activation), dy.detach().double()
    slope, _ = norm.gradient(activation, torch.ones_like(a))
    slope = slope.abs()
    weights = {
        name: t.detach().double().requires_grad_()
        for name, t in zip(NAMES[2:], (w1, b1, w2, b2), strict=True)
        if t is not None
    }
    pooled, dgates = a.mean(_PIXELS).requires_grad_(), (dy * a).sum(_PIXELS)
    with torch.enable_grad():
        own = map(weights.get, NAMES[2:])
        steps = steps_of(pooled, *own, hidden_activation, gate)
    inner = torch.autograd.grad(steps[-1], steps[:-1], dgates, retain_graph=True)
    found = torch.autograd.grad(steps[-1], list(weights.values()), dgates, retain_graph=True)
    gates, dpooled = (_planes(t.detach()) for t in (steps[-1], inner[0] / pixels))
    y, da = a * gates, dy * gates + dpooled

    # Upper-case names are sums of |terms|, propagated to first order.
    A, inside = slope * norm.V, slope * norm.inside[:, None, None]
    P = (a.abs() + A + inside).mean(_PIXELS)
    DG = (dy.abs() * (a.abs() + A + inside)).sum(_PIXELS)
    terms, (g, G), (dp, DP) = vector_terms(P, DG, weights, steps, (*inner, dgates))
    g, G, dp, DP = (_planes(t) for t in (g, G, dp / pixels, DP / pixels))
    DA = dy.abs() * (g + G) + dp + DP
    right = {"y": _expected(y, map(largest, (A * g, inside * g + a.abs() * G)), x.dtype)}
    for name, value in zip(weights, found, strict=True):
        # float32 beside half data: the sums are kept in the type of the result.
        right[f"d{name}"] = _expected(value, terms[f"d{name}"], w1.dtype)
    others = {"running": running, "inside": DA, "summed_in": w1.dtype}
    own = batch_norm_act.expected(x, weight, bias, da, activation, **others)
    right |= {name: own[name] for name in ("dx", "dweight", "dbias")}
    names = ("y", "dx", *(f"d{name}" for name in NAMES))
    return {name: right[name] for name in names if name in right}


def _expected(value: Tensor, terms, dtype: torch.dtype) -> Expected:
    return Expected(value, scale(largest(value), *terms, dtype))


def _planes(matrix: Tensor) -> Tensor:
    """[N, C] as [N, C, 1, 1]."""
    return matrix[:, :, None, None]


def traffic(case: Case, mode: str) -> Traffic:
    """Forward reads x and writes y. Backward reads dy and x again and writes dx. Each byte counts
    once: the gates need all pixels, but these need not leave the chip."""
    channels, reduced = case.shape[1], case.extra["reduced"]
    image = math.prod(case.shape) * case.dtype.itemsize
    weights = (4 * channels + 2 * channels * reduced + channels + reduced) * accumulator(
        case.dtype
    ).itemsize
    if mode != BOTH:
        return Traffic(data=2 * image, weights=weights)
    return Traffic(data=4 * image + weights, weights=weights, again=image + weights)


def operations(case: Case, mode: str) -> int:
    """Forward: mean and variance, 4, unless they are given; scale and shift, 2; the sum for the
    mean and the scaling; two GEMMs. Backward: the sum of dy * a and dy * g + dp, 2 each; the two
    sums of BatchNorm, 3; dx, 4; four GEMMs. Activations count nothing."""
    n, channels = case.shape[:2]
    image, product = math.prod(case.shape), 2 * n * channels * case.extra["reduced"]
    forward = image * (4 if case.extra.get("variant") == INFERENCE else 8) + 2 * product
    return forward + (11 * image + 4 * product if mode == BOTH else 0)


def modes(case: Case) -> tuple[str, ...]:
    return (FORWARD,) if case.extra.get("variant") == INFERENCE else MODES


def _extra(reduced: int, *functions: str) -> dict[str, int | str]:
    names = ("activation", "hidden_activation", "gate")
    return {"reduced": reduced, **dict(zip(names, functions, strict=True))}


FAMILY = Family(
    name="batch_norm_excite",
    rank=4,
    extra={
        "reduced": None,
        "activation": ("identity", "relu", "relu6", "silu", "hardswish"),
        "hidden_activation": ("silu", "relu", "hardswish"),
        "gate": ("sigmoid", "hardsigmoid"),
        "variant": (INFERENCE,),
    },
    optional=("variant",),
    layouts=tuple(LAYOUTS),
    build=build,
    reference=reference,
    traffic=traffic,
    operations=operations,
    modes=modes,
    baselines=(PARTS,),
    tiny=Case(
        "batch_norm_excite",
        "tiny",
        (2, 8, 2, 2),
        "float32",
        extra=_extra(2, "silu", "silu", "sigmoid"),
    ),
    checked=tuple(
        Case("batch_norm_excite", name, shape, "float32", extra=_extra(reduced, *functions))
        for name, shape, reduced, functions in (
            ("64x28 silu", (4, 64, 28, 28), 4, ("silu", "silu", "sigmoid")),
            ("1632x12 silu", (2, 1632, 12, 12), 68, ("silu", "silu", "sigmoid")),
            ("odd 65x7 hardswish", (3, 65, 7, 5), 9, ("hardswish", "relu", "hardsigmoid")),
            ("256x7 relu", (4, 256, 7, 7), 64, ("relu", "relu", "sigmoid")),
            ("8x9 identity", (5, 8, 9, 9), 6, ("identity", "relu", "sigmoid")),
        )
    ),
)
