"""Squeeze-and-Excitation in the tests: the inputs and the expected results."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import fusewise
from fusewise.bench.accuracy import check, compare
from fusewise.bench.families.squeeze_excite import expected
from fusewise.bench.families.squeeze_excite import formula as eager
from fusewise.functional import squeeze_excite

OUTPUTS = ("y", "dx", "dw1", "db1", "dw2", "db2")
ACTIVATIONS = ("silu", "relu", "hardswish")
GATES = ("sigmoid", "hardsigmoid")
# Where the slope jumps.
KINKS = {"relu": (0,), "hardswish": (-3, 3), "hardsigmoid": (-3, 3)}

# The dtype of x, and that of the weights.
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16-fp32": (torch.float16, torch.float32),
    "bf16-fp32": (torch.bfloat16, torch.float32),
}


def _sliced(t):
    n, c, h, w = t.shape
    return t.new_empty(n, c, h + 2, 2 * w + 1)[:, :, 1 : h + 1, 1::2].copy_(t)


def misaligned(t, offset=1):
    """Dense, but shifted by some elements from the allocator's alignment."""
    return t.new_empty(t.numel() + offset)[offset:].view(t.shape).copy_(t)


def misaligned_channels_last(t, offset=1):
    return misaligned(t.permute(0, 2, 3, 1), offset).permute(0, 3, 1, 2)


# Each copies the values into another memory layout. `expanded` repeats the first pixel's value.
LAYOUTS = {
    "nchw": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "sliced": _sliced,
    "channel_slice": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "batch_inside": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "expanded": lambda t: t[:, :, :1, :1].expand_as(t),
    "misaligned": misaligned,
    "misaligned_channels_last": misaligned_channels_last,
}


@dataclass
class Case:
    """The inputs of one call, and the gradient of its output."""

    x: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    dy: torch.Tensor
    activation: str = "silu"
    gate: str = "sigmoid"
    _expected: dict = field(default=None, repr=False)

    @property
    def inputs(self):
        return self.x, self.w1, self.b1, self.w2, self.b2

    @property
    def arguments(self):
        return *self.inputs, self.activation, self.gate

    def expected(self):
        """For each output: eager torch's value and the reference; computed once."""
        if self._expected is None:
            mixed = self.x.dtype != self.w1.dtype
            with torch.autocast(self.x.device.type, self.x.dtype, enabled=mixed):
                found = gradients(eager, self)
            right = expected(*self.inputs, self.dy, self.activation, self.gate)
            self._expected = {name: (found[name], *right[name]) for name in right}
        return self._expected

    def check(self, fn=squeeze_excite):
        """Checks the output and all gradients of `fn` by the accuracy rule; returns them."""
        ours = gradients(fn, self)
        for name, right in self.expected().items():
            assert_close(name, ours[name], *right)
        return ours

    def implementations(self, backward=True):
        """What can be forced for this call, as arguments of `fusewise.implementation`: first every
        forward that can run it, then every backward."""
        with torch.set_grad_enabled(backward):
            x = self.x.detach().requires_grad_(backward)
            explanation = fusewise.explain(squeeze_excite, x, *self.arguments[1:])
        operators = ("squeeze_excite", "squeeze_excite_backward")
        return [
            {operator: name}
            for operator, record in zip(operators, explanation, strict=False)
            for name in record.able
        ]

    def check_every_implementation(self):
        """Checks the accuracy rule and bit-identical reruns, for the default choice and for each
        implementation that can run the call. Returns the names that were forced."""
        checked = set()
        for choice in ({}, *self.implementations()):
            with fusewise.implementation(**choice):
                try:
                    first = self.check()
                except RuntimeError as error:
                    # `explain` does not see dy, and a forced backward may decline dy's layout.
                    declined = "cannot run this call" in str(error)
                    if declined and "squeeze_excite_backward" in choice:
                        continue
                    raise
                second = gradients(squeeze_excite, self)
            for output in first:
                assert same_bits(first[output], second[output]), f"{choice}: {output} in a rerun"
            checked.update(choice.values())
        assert checked, "no implementation could be forced"
        return checked


def make_case(
    shape,
    reduced,
    device="cpu",
    dtypes=DTYPES["fp32"],
    layout="nchw",
    dy_layout=None,
    activation="silu",
    gate="sigmoid",
    bias=(True, True),
    convolution=False,
):
    """Random inputs that keep the gates away from saturation."""
    c, tail = shape[1], (1, 1) if convolution else ()
    x_dtype, w_dtype = dtypes

    def draw(*size, dtype=w_dtype, divisor=1.0):
        return (torch.randn(size, dtype=torch.float64, device=device) / divisor).to(dtype)

    case = Case(
        x=LAYOUTS[layout](draw(*shape, dtype=x_dtype) + 0.5),
        w1=draw(reduced, c, *tail, divisor=c**0.5),
        b1=draw(reduced) if bias[0] else None,
        w2=draw(c, reduced, *tail, divisor=reduced**0.5),
        b2=draw(c) if bias[1] else None,
        dy=LAYOUTS[dy_layout or layout](draw(*shape, dtype=x_dtype)),
        activation=activation,
        gate=gate,
    )
    if not case.x.is_meta:
        leave_kinks(case)
    return case


def units(case):
    """What goes into the activation, [N, R], and into the gate, [N, C], in float64."""
    w1, b1, w2, b2 = (
        None if t is None else t.double().flatten(1) if t.dim() > 1 else t.double()
        for t in case.inputs[1:]
    )
    z = F.linear(case.x.double().mean((2, 3)), w1, b1)
    return z, F.linear(getattr(F, case.activation)(z), w2, b2)


def near_kinks(z, function, dtype):
    """Where rounding may decide on which side of a kink of the function a unit is."""
    near = torch.zeros_like(z, dtype=torch.bool)
    for kink in KINKS.get(function, ()):
        near |= (z - kink).abs() < 4 * torch.finfo(dtype).eps * (1 + abs(kink))
    return near


def leave_kinks(case):
    """Draws the weights of a unit again while one of its samples is near a kink.

    There torch's gradient may be off by a whole term, and the rule would allow as much everywhere.
    With hundreds of samples of few pixels, some unit may stay there.
    """
    for i, (w, function) in enumerate(((case.w1, case.activation), (case.w2, case.gate))):
        deviation = w.shape[1] ** -0.5
        for _ in range(200):
            near = near_kinks(units(case)[i], function, case.x.dtype).any(0)
            if not near.any():
                break
            w[near] = torch.randn_like(w[near]) * deviation


def with_silu(*inputs):
    """The operator, for tests in which the activation does not matter."""
    return squeeze_excite(*inputs, "silu")


def gradients(fn, case):
    """y and the gradients of all inputs that are not None, by name."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in case.inputs]
    y = fn(*inputs, case.activation, case.gate)
    present = {
        f"d{n}": t
        for n, t in zip(("x", "w1", "b1", "w2", "b2"), inputs, strict=True)
        if t is not None
    }
    found = torch.autograd.grad(y, list(present.values()), case.dy)
    return {"y": y.detach(), **dict(zip(present, found, strict=True))}


def assert_close(name, ours, eager, reference, scale, decided=None, *, computed_in=None):
    """Raises AssertionError, with the figures, if the accuracy rule is broken."""
    found = compare(name, ours, eager, reference, scale, decided, computed_in=computed_in)
    assert found.passed, found


def assert_right(ours, eager, computed_in=None):
    """The same for all results of a call."""
    found = check(ours, eager, computed_in)
    assert found.passed, found


def same_bits(a, b):
    """Equal; a NaN equals a NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(nan=0.125), b.nan_to_num(nan=0.125))
