"""How near is right: the one comparator of all tests (docs/specification.md).

    max|ours - ref| <= 2 max|torch - ref| + 4 eps scale

ref is the formula in fp64 on the same rounded inputs, torch is eager in the same dtype on the same
device, eps is that of the compared tensor, and scale the largest sum of |terms| behind an element.
Ours is finite wherever ref and torch both are, infinite as they are where both are the same
infinity, and NaN exactly where torch is.
"""

import torch


def assert_close(name, ours, eager, reference, scale):
    """Raises AssertionError, with the figures, where the rule is broken."""
    assert ours.shape == eager.shape, f"{name}: shape {list(ours.shape)}, not {list(eager.shape)}"
    assert ours.dtype == eager.dtype, f"{name}: {ours.dtype}, not {eager.dtype}"
    eps = torch.finfo(ours.dtype).eps
    ours, eager, reference = (t.detach().to(torch.float64) for t in (ours, eager, reference))

    nan = ours.isnan() != eager.isnan()
    assert not nan.any(), f"{name}: NaN is not where torch has it, {_places(nan)}"
    infinite = eager.isinf() & (eager == reference) & (ours != eager)
    assert not infinite.any(), f"{name}: not infinite where it should be, {_places(infinite)}"
    comparable = eager.isfinite() & reference.isfinite()
    lost = comparable & ~ours.isfinite()
    assert not lost.any(), f"{name}: not finite where it should be, {_places(lost)}"
    if not comparable.any():
        return
    reference = reference[comparable]
    error = (ours[comparable] - reference).abs()
    allowed = 2 * (eager[comparable] - reference).abs().max().item() + 4 * eps * float(scale)
    worst = error.max().item()
    assert worst <= allowed, (
        f"{name}: off by {worst:.3g} where {allowed:.3g} is allowed (scale {float(scale):.3g}); "
        f"{(error > allowed).sum().item()} of {error.numel()} elements"
    )


def _places(mask):
    first = [index.item() for index in mask.nonzero()[0]]
    return f"{mask.sum().item()} elements, the first at {first}"
