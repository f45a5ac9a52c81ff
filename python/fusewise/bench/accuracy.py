"""How near is right: the rule of docs/specification.md, "Accuracy"."""

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 26  # elements compared at once, so that huge tensors need little memory


@dataclass(frozen=True)
class Expected:
    """One output of a reference in higher precision."""

    value: Tensor
    scale: float
    """The largest sum of |terms| behind an element."""


@dataclass(frozen=True)
class Check:
    passed: bool
    tensor: str
    """The output that comes nearest to its bound, or breaks it."""
    error: float
    allowed: float

    def __str__(self):
        return f"{self.tensor} is off by {self.error:.3g}, allowed {self.allowed:.3g}"


def check(names, outputs, torch_outputs, expected: list[Expected]) -> Check:
    """Compares every output by max|ours - ref| ≤ 2 · max|torch - ref| + 4 · ε · scale."""
    worst = None
    for name, ours, theirs, right in zip(names, outputs, torch_outputs, expected, strict=False):
        allowed = 2 * largest_error(theirs, right.value)
        allowed += 4 * torch.finfo(ours.dtype).eps * right.scale
        error = largest_error(ours, right.value)
        found = Check(error <= allowed, name, error, allowed)  # a NaN error never passes
        if not found.passed:
            return found
        if worst is None or error * worst.allowed > worst.error * allowed:
            worst = found
    return worst


def largest_error(value: Tensor, reference: Tensor) -> float:
    """max|value - reference|, NaN where either has one; both dense, in any layout."""
    if value.shape != reference.shape:
        return float("nan")
    rows = max(1, _CHUNK * value.shape[0] // max(1, value.numel()))
    pieces = zip(value.split(rows), reference.split(rows), strict=True)
    return max(
        ((ours.to(right.dtype) - right).abs().max() for ours, right in pieces),
        key=lambda error: float("inf") if error.isnan() else error.item(),
    ).item()
