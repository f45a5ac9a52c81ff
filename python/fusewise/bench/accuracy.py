"""The accuracy rule: the only comparator, used by the benchmark and by all tests.

    max|ours - ref| <= 2 max|torch - ref| + 4 eps scale

- ref is the formula in higher precision on the same rounded inputs.
- torch is eager mode in the same dtype on the same device.
- eps is that of the dtype that the tensor is computed in. That is its own dtype, except under
  autocast.
- scale is the magnitude of the numbers that an element is computed from (`scale` below).

Ours must be finite wherever ref and torch both are. Where both are the same infinity, ours must be
that infinity too. Ours must be NaN exactly where torch is. For relu the sign is also compared: ours
must be above 0 exactly where ref is, except where rounding can decide the sign.
See docs/specification.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_PIECE = 1 << 26  # elements compared at once, so that huge tensors need little extra memory


class Expected(NamedTuple):
    """One output of a reference in higher precision."""

    value: Tensor
    scale: float
    decided: Tensor | None = None
    """For relu's output: the elements that must be on the same side of 0 as the reference."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of this dtype are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale(value: float, terms: float, inside: float, dtype: torch.dtype) -> float:
    """The rule's scale.

    `value` is the largest |value|. `terms` is the largest sum of |terms| in the outermost sum, and
    `inside` that of the sums nested in it. The result is rounded to `dtype`. Sums are kept in the
    accumulator's dtype, so they count with that dtype's eps, relative to the eps of `dtype`.
    """
    share = torch.finfo(accumulator(dtype)).eps / torch.finfo(dtype).eps
    return max(value, share * terms) + share * inside


def largest(t: Tensor) -> float:
    """The largest finite |element|; 0 if there is none."""
    if not t.numel():
        return 0.0
    parts = pieces(t if t.dim() else t[None])
    return max(part.abs().nan_to_num(nan=0.0, posinf=0.0).max().item() for (part,) in parts)


@dataclass(frozen=True)
class Check:
    """The result of comparing one tensor; `str()` gives the figures."""

    tensor: str
    error: float
    """The largest error where torch and the reference are both finite."""
    allowed: float
    wrong: str
    """What breaks the rule; empty if nothing does."""

    @property
    def passed(self) -> bool:
        return not self.wrong

    def __str__(self):
        found = self.wrong or f"off by {self.error:.3g} where {self.allowed:.3g} is allowed"
        return f"{self.tensor}: {found}"


class Results(NamedTuple):
    """The outputs of a call, by name, and the expected values."""

    outputs: dict[str, Tensor]
    expected: dict[str, Expected]


def check(ours: Results, eager: Results, computed_in: torch.dtype | None = None) -> Check:
    """The first output that breaks the rule; if none does, the one closest to its bound."""
    nearest = None
    for name, output in ours.outputs.items():
        found = compare(
            name,
            output,
            eager.outputs[name],
            *ours.expected[name],
            eager_reference=eager.expected[name].value,
            computed_in=computed_in,
        )
        if not found.passed:
            return found
        if nearest is None or found.error * nearest.allowed > nearest.error * found.allowed:
            nearest = found
    return nearest


@torch.no_grad()
def compare(
    name: str,
    ours: Tensor,
    eager: Tensor,
    reference: Tensor,
    scale: float,
    decided: Tensor | None = None,
    *,
    eager_reference: Tensor | None = None,
    computed_in: torch.dtype | None = None,
) -> Check:
    """Compares one tensor by the rule. All tensors are on one device, in any layout.

    `eager_reference` is the reference for torch's own result. It differs from `reference` if torch
    decided differently than ours at relu's kink. `computed_in` is the dtype of the computation, if
    it is not the tensor's own: under autocast, torch computes the gradients of float32 parameters
    in half precision and casts them afterwards.
    """

    def broken(wrong: str, error=float("nan"), allowed=float("nan")) -> Check:
        return Check(name, error, allowed, wrong)

    if not ours.shape == eager.shape == reference.shape:
        return broken(f"shape {list(ours.shape)}, not {list(eager.shape)}")
    if ours.dtype != eager.dtype:
        return broken(f"{ours.dtype}, not {eager.dtype}")
    tensors = [ours, eager, reference, reference if eager_reference is None else eager_reference]
    tensors += [] if decided is None else [decided]
    if not ours.dim():  # a scalar loss
        tensors = [t[None] for t in tensors]

    misplaced: dict[str, list] = {}
    error = torch_error = 0.0
    for start, ours_piece, eager_piece, right, eager_right, *sides in _doubles(*tensors):
        finite = eager_piece.isfinite() & right.isfinite()
        infinite = eager_piece.isinf() & (eager_piece == right)
        faults = [
            ("NaN is not where torch has it", ours_piece.isnan() != eager_piece.isnan()),
            ("not infinite where it should be", infinite & (ours_piece != eager_piece)),
            ("not finite where it should be", finite & ~ours_piece.isfinite()),
        ]
        for side in sides:
            other = (ours_piece > 0) != (right > 0)
            faults.append(("on the wrong side of relu's kink", other & side.bool()))
        for wrong, mask in faults:
            if count := mask.sum().item():
                misplaced.setdefault(wrong, [0, _first(mask, start)])[0] += count
        error = max(error, _distance(ours_piece, right, finite).max().item())
        both = eager_piece.isfinite() & eager_right.isfinite()
        torch_error = max(torch_error, _distance(eager_piece, eager_right, both).max().item())
    for wrong, (count, first) in misplaced.items():
        return broken(f"{wrong}, {count} elements, the first at {first}")

    eps = torch.finfo(computed_in or ours.dtype).eps
    allowed = 2 * torch_error + 4 * eps * float(scale)
    if error <= allowed:
        return Check(name, error, allowed, "")
    count = sum(
        (_distance(ours_piece, right, eager_piece.isfinite() & right.isfinite()) > allowed).sum()
        for _, ours_piece, eager_piece, right in _doubles(*tensors[:3])
    )
    return broken(
        f"off by {error:.3g} where {allowed:.3g} is allowed (scale {float(scale):.3g}); "
        f"{count} of {ours.numel()} elements",
        error,
        allowed,
    )


def cut(shape: torch.Size) -> tuple[int, int]:
    """The longest dimension, and the length of the pieces that `pieces` cuts it into."""
    dim = max(range(len(shape)), key=shape.__getitem__)
    return dim, max(1, _PIECE * shape[dim] // max(1, shape.numel()))


def pieces(*tensors: Tensor):
    """Views of tensors of the same shape, all cut alike, small enough to convert to fp64."""
    dim, length = cut(tensors[0].shape)
    return zip(*(tensor.split(length, dim) for tensor in tensors), strict=True)


def _doubles(*tensors: Tensor):
    """The start index of each piece, and the pieces in fp64."""
    if not tensors[0].numel():
        return
    dim, length = cut(tensors[0].shape)
    for i, parts in enumerate(pieces(*tensors)):
        start = [0] * tensors[0].dim()
        start[dim] = i * length
        yield start, *(part.to(torch.float64) for part in parts)


def _distance(value: Tensor, right: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, value - right, 0.0).abs_()


def _first(mask: Tensor, start: list[int]) -> list[int]:
    place = torch.unravel_index(mask.flatten().byte().argmax(), mask.shape)
    return [offset + index.item() for offset, index in zip(start, place, strict=True)]
