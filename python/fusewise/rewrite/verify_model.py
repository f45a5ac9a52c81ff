"""Whether a whole model with fused modules computes the right numbers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor, nn

from .._torch_private import tree_leaves
from ..bench import accuracy
from ..bench.accuracy import Check
from .setting import SHIFT, Setting, seed_all, without_tf32
from .trees import doubled
from .verify import HALVES, SEED, nearness, random_gradient

_RUNS = 5
_SHARE = 1 / 32  # of a whole tensor, that may be missing anyway; the errors of elements see less
_LARGE_INPUTS, _LARGE_MODEL = 1 << 20, 1 << 26  # elements
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_DROPS = ("StochasticDepth", "DropPath", "DropBlock2d")  # torchvision's and timm's


def check_model(theirs: nn.Module, ours: nn.Module, setting: Setting, gradients: bool) -> Check:
    """Compares two whole models: each output, each gradient, each buffer.

    On its way through a deep network a rounding error grows, in each tensor to another size, and
    where it decides a kink, to a much larger one. Runs on inputs with one more rounding show how
    large. A fault shows in every run, a decision in some.
    """
    groups = _expected(theirs, setting, gradients)
    for seed in range(_RUNS):
        inputs = setting.rounded_inputs(seed) if seed else setting
        eager, found = (_run_model(model, inputs, gradients) for model in (theirs, ours))
        for group, tensors in groups.items():
            if len(found[group]) != len(tensors):
                said = f"{len(found[group])} tensors, not {len(tensors)}"
                return Check(group, float("nan"), float("nan"), said)
            results = zip(tensors, found[group].values(), eager[group].values(), strict=True)
            for tensor, mine, torchs in results:
                check = tensor.add(mine, torchs)
                if math.isnan(check.error):  # another shape, or NaN in other places
                    return check
    checks = [check for tensors in groups.values() for check in _judge(tensors)]
    nearest = max(checks, key=nearness, default=Check("outputs", 0.0, 0.0, ""))
    return next((check for check in checks if not check.passed), nearest)


def _expected(model: nn.Module, setting: Setting, gradients: bool) -> dict[str, list["_Tensor"]]:
    """By groups: outputs, gradients and buffers."""
    precision = _reference_dtype(model, setting)
    terms: dict[str, float] = {}
    # Under autocast, too, running statistics are computed in float32.
    buffers_in, precise = None, True
    try:
        with without_tf32():
            reference = setting.in_precision(precision)
            right = _run_model(doubled(model, precision), reference, gradients)
            if precision == torch.float64:
                terms = _terms(right["buffers"], model, reference, gradients)
    except Exception:  # a model may insist on its dtypes, or be too large in this one
        right = _run_model(model, setting, gradients)
        buffers_in, precise = setting.computed_in, False
    groups: dict[str, list[_Tensor]] = {}
    for group, tensors in right.items():
        computed_in = buffers_in if group == "buffers" else setting.computed_in
        groups[group] = [
            _Tensor(name, value, terms.get(name, 0.0), computed_in, precise)
            for name, value in tensors.items()
        ]
    return groups


def _reference_dtype(model: nn.Module, setting: Setting) -> torch.dtype:
    """float64; for large models in half precision, float32."""
    inputs = [t for t in tree_leaves((setting.args, setting.kwargs)) if isinstance(t, Tensor)]
    large = (
        sum(t.numel() for t in inputs) > _LARGE_INPUTS
        or sum(t.numel() for t in model.parameters()) > _LARGE_MODEL
    )
    return torch.float32 if setting.computed_in in HALVES and large else torch.float64


def _terms(
    right: dict[str, Tensor], model: nn.Module, reference: Setting, gradients: bool
) -> dict[str, float]:
    """The largest sum of |terms| behind each buffer. A running mean near 0 is a sum of large terms.
    A shift of the inputs by a small share of their magnitude shows it."""
    shifted = _run_model(doubled(model), reference.shifted_inputs(), gradients)["buffers"]
    return {name: accuracy.largest(shifted[name] - right[name]) / SHIFT for name in right}


class _Tensor:
    """An output, gradient or buffer, and how far off it is in each run.

    `errors` are those of the worst element, divided by the scale: the largest value or, if that is
    larger, the sum of |terms|. `shares` are by how much all of it together is too large or too
    small, 0.1 for a tenth. In half precision rounding can hide a tenth in every element, and
    averages out in the share. `room` is for the rounding errors of a reference that is in no higher
    precision.
    """

    def __init__(
        self,
        name: str,
        right: Tensor,
        terms: float,
        computed_in: torch.dtype | None,
        precise: bool,
    ):
        self.name, self.right, self.computed_in, self.precise = name, right, computed_in, precise
        self.scale = max(accuracy.largest(right), terms) or 1.0
        self.room = 0.0
        self.errors: list[float] = []
        self.errors_allowed: list[float] = []
        self.shares: list[float] = []
        self.shares_allowed: list[float] = []

    def add(self, ours: Tensor, eager: Tensor) -> Check:
        """The results of one more run."""
        computed_in = self.computed_in or ours.dtype
        rule = {"reference": self.right, "scale": self.scale, "computed_in": computed_in}
        check = accuracy.compare(self.name, ours, eager, **rule)
        if not math.isnan(check.error):
            self.errors.append(check.error / self.scale)
            self.errors_allowed.append(check.allowed / self.scale)
            eps = torch.finfo(computed_in).eps
            if self.precise and torch.finfo(self.right.dtype).eps < eps:
                self.shares.append(_share(ours, self.right)[0])
                # By luck, torch's errors of few elements cancel. Independent ones would not.
                share, deviation = _share(eager, self.right)
                self.shares_allowed.append(2 * max(share, 2 * deviation) + _SHARE)
            else:
                self.room = 12 * eps
        return check


def _share(result: Tensor, right: Tensor) -> tuple[float, float]:
    """The error along the values, as a share of them, and the standard deviation that independent
    errors of the same size would give it. Finite elements only."""
    along = errors = values = 0.0
    for got, value in accuracy.pieces(result.reshape(-1), right.reshape(-1)):
        value = value.double()
        error = got.double() - value
        finite = error.isfinite()
        error, value = error[finite], value[finite]
        along += (error @ value).item()
        errors += (error @ error).item()
        values += (value @ value).item()
    values = values or 1.0
    return abs(along) / values, math.sqrt(errors / values / max(1, result.numel()))


def _judge(tensors: list[_Tensor]) -> list[Check]:
    """Each tensor by its own errors in all runs. In the first run, in addition, none may be further
    off than torch's worst tensor in two."""
    worst = max((most for each in tensors for most in each.errors_allowed[:2]), default=0.0)
    checks = []
    for each in tensors:
        compared = [
            (each.errors[0], worst, "the largest value"),
            (min(each.errors), median(each.errors_allowed) + each.room, "the largest value"),
        ]
        # From 1 on, all of it is rounding errors.
        if each.shares and (allowed := median(each.shares_allowed)) < 1.0:
            compared.append((min(each.shares), allowed, "the whole"))
        for error, allowed, of in compared:
            wrong = f"off by {error:.3g} of {of} where {allowed:.3g} is allowed"
            checks.append(Check(each.name, error, allowed, wrong if error > allowed else ""))
    return checks


def _run_model(model: nn.Module, setting: Setting, gradients: bool) -> dict[str, dict[str, Tensor]]:
    """The results of one step, by name. The values of the model's buffers are as before."""
    learned = {name: each for name, each in model.named_parameters() if each.requires_grad}
    seed_all(SEED)
    with same_buffers_afterwards(model), _without_dropout(model):
        outputs = setting.copied().outputs(model, gradients)
        found = {"outputs": {f"output {i}": each.detach() for i, each in enumerate(outputs)}}
        if gradients:
            drawn = [random_gradient(output).to(output) for output in outputs]
            got = torch.autograd.grad(outputs, list(learned.values()), drawn, allow_unused=True)
            found["gradients"] = {
                f"gradient of {name}": torch.zeros_like(parameter) if gradient is None else gradient
                for (name, parameter), gradient in zip(learned.items(), got, strict=True)
            }
        # A checkpoint updates them in backward, too.
        found["buffers"] = {
            f"buffer {name}": each.clone()
            for name, each in model.named_buffers()
            if each.is_floating_point()
        }
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
