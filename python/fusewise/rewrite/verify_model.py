"""Whether a whole model with fused modules computes the right numbers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .._torch_private import tree_leaves
from ..bench import accuracy
from ..bench.accuracy import Check
from .setting import SHIFT, Setting, seed_all, without_tf32
from .trees import doubled
from .verify import HALVES, SEED, nearness, random_gradient

_LARGE_INPUTS, _LARGE_MODEL = 1 << 20, 1 << 26  # elements
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_DROPS = ("StochasticDepth", "DropPath", "DropBlock2d")  # torchvision's and timm's


def check_model(theirs: nn.Module, ours: nn.Module, setting: Setting, gradients: bool) -> Check:
    """Compares two whole models: all outputs together, all gradients, all buffers.

    Torch's error is the larger one of two runs: on the inputs, and on inputs with one more
    rounding, because the kinks of a deep network now and then turn a rounding error into a larger
    one.
    """
    found = [
        _run_model(theirs, setting, gradients),
        _run_model(theirs, setting.rounded_inputs(), gradients),
        _run_model(ours, setting, gradients),
    ]
    precision = _reference_dtype(theirs, setting)
    terms: list[float] = []
    try:
        with without_tf32():
            reference = setting.in_precision(precision)
            right = _run_model(doubled(theirs, precision), reference, gradients)
            if precision == torch.float64:
                terms = _terms(right, theirs, reference, gradients)
    except Exception:  # a model may insist on its dtypes, or be too large in this one
        right = found[0]
    checks = [
        _together(
            group,
            right[group],
            *(run[group] for run in found),
            setting.computed_in,
            terms if group == "buffers" else [],
        )
        for group in right
    ]
    return next((check for check in checks if not check.passed), max(checks, key=nearness))


def _reference_dtype(model: nn.Module, setting: Setting) -> torch.dtype:
    """float64; for large models in half precision, float32."""
    inputs = [t for t in tree_leaves((setting.args, setting.kwargs)) if isinstance(t, Tensor)]
    large = (
        sum(t.numel() for t in inputs) > _LARGE_INPUTS
        or sum(t.numel() for t in model.parameters()) > _LARGE_MODEL
    )
    return torch.float32 if setting.computed_in in HALVES and large else torch.float64


def _terms(
    right: dict[str, list[Tensor]], model: nn.Module, reference: Setting, gradients: bool
) -> list[float]:
    """The largest sum of |terms| behind each buffer. A running mean near 0 is a sum of large terms.
    A shift of the inputs by a small share of their magnitude shows it."""
    shifted = _run_model(doubled(model), reference.shifted_inputs(), gradients)
    pairs = zip(shifted["buffers"], right["buffers"], strict=True)
    return [accuracy.largest(after - before) / SHIFT for after, before in pairs]


def _together(
    group: str,
    right: list[Tensor],
    theirs: list[Tensor],
    rounded: list[Tensor],
    ours: list[Tensor],
    computed_in: torch.dtype,
    terms: list[float],
) -> Check:
    """The rule for several tensors as one, each divided by its largest value or, if that is larger,
    by the sum of |terms| behind it. terms: these sums, if they are known."""
    if len(ours) != len(theirs):
        said = f"{len(ours)} tensors, not {len(theirs)}"
        return Check(group, float("nan"), float("nan"), said)
    error = allowed = 0.0
    runs = zip(right, theirs, rounded, ours, terms or [0.0] * len(right), strict=True)
    for reference, eager, again, tensor, inside in runs:
        scale = max(accuracy.largest(reference), inside) or 1.0
        rule = {"reference": reference, "scale": scale, "computed_in": computed_in}
        check = accuracy.compare(group, tensor, eager, **rule)
        if math.isnan(check.error):  # another shape, or NaN in other places
            return check
        noise = accuracy.compare(group, again, again, **rule)
        error = max(error, check.error / scale)
        allowed = max(allowed, check.allowed / scale, noise.allowed / scale)
    wrong = f"off by {error:.3g} of the largest value where {allowed:.3g} is allowed"
    return Check(group, error, allowed, wrong if error > allowed else "")


def _run_model(model: nn.Module, setting: Setting, gradients: bool) -> dict[str, list[Tensor]]:
    """The results of one step. The values of the model's buffers are as before."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seed_all(SEED)
    with same_buffers_afterwards(model), _without_dropout(model):
        outputs = setting.copied().outputs(model, gradients)
        found = {"outputs": [output.detach() for output in outputs]}
        if gradients:
            drawn = [random_gradient(output).to(output) for output in outputs]
            got = torch.autograd.grad(outputs, learned, drawn, allow_unused=True)
            found["gradients"] = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(learned, got, strict=True)
            ]
        # A checkpoint updates them in backward, too.
        found["buffers"] = [each.clone() for each in model.buffers() if each.is_floating_point()]
    return found


@contextmanager
def same_buffers_afterwards(model: nn.Module) -> Iterator[None]:
    """Restores the values. A compiled model needs the buffers themselves to stay."""
    kept = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Its random numbers would not be the same in higher precision."""
    kept = [
        module
        for module in model.modules()
        if (isinstance(module, _DROPOUT) or type(module).__name__ in _DROPS) and module.training
    ]
    try:
        for module in kept:
            module.training = False
        yield
    finally:
        for module in kept:
            module.training = True
