"""Linear layers with activations, and stacks of them, in the tests: the inputs and the expected
results. The fp64 formula is the benchmark's."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import fusewise
from fusewise.bench.accuracy import Expected, Results
from fusewise.bench.families.linear_stack import ACTIVATIONS, Stack, undecided
from fusewise.functional import linear_act, mlp
from reference import DTYPES, assert_close, assert_right, misaligned, same_bits

__all__ = ["ACTIVATIONS", "DTYPES", "assert_close", "assert_right", "misaligned", "same_bits"]

OUTPUTS = ("y", "dx", "dw", "db")
MATH = (False, True, True)  # TF32, reduced-precision sums, autotuning


def eager(x, w, b=None, activation="relu"):
    return ACTIVATIONS[activation](F.linear(x, w, b))


def eager_mlp(x, weights, biases=None, activation="relu", final_activation="identity"):
    for i, w in enumerate(weights):
        kind = final_activation if i + 1 == len(weights) else activation
        x = eager(x, w, biases[i] if biases else None, kind)
    return x


def _stepped(t):
    """Every other column of a wider matrix: neither rows nor columns are adjacent."""
    room = t.new_empty(*t.shape[:-1], 2 * t.shape[-1] + 1)
    return room[..., 1::2].copy_(t)


# Each copies the values into another memory layout. `expanded` repeats the first row, `flat` the
# first element.
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.mT.contiguous().mT,
    "row_slice": lambda t: torch.cat([t, t], -1)[..., t.shape[-1] :],
    "row_steps": lambda t: t.repeat_interleave(2, -2)[..., ::2, :],
    "stepped": _stepped,
    "expanded": lambda t: t[..., :1, :].expand_as(t),
    "flat": lambda t: t[..., :1, :1].expand_as(t),
    "misaligned": misaligned,
}


# --- cases --------------------------------------------------------------------------------------


@dataclass
class Case:
    """The inputs of one call of linear_act, and the gradient of its output."""

    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor | None
    dy: torch.Tensor
    activation: str = "relu"
    _expected: dict = field(default=None, repr=False)

    ours = staticmethod(linear_act)
    eager = staticmethod(eager)

    @property
    def inputs(self):
        return self.x, self.w, self.b

    @property
    def names(self):
        return "x", "w", "b"

    @property
    def arguments(self):
        return *self.inputs, self.activation

    def call(self, fn, inputs):
        return fn(*inputs, self.activation)

    def stack(self, kept=()):
        biases = None if self.b is None else [self.b]
        return Stack(self.x, [self.w], biases, [self.activation], tf32(self.x))

    def reference(self):
        """For each output: the value in fp64, the scale, and where relu's sign is certain."""
        return self._named(self.stack().expected(self.dy))

    def expected(self):
        """Eager torch's results with their reference; computed once."""
        if self._expected is None:
            self.silence_kinks()
            mixed = self.x.dtype != next(t.dtype for t in self.inputs[1:])
            with torch.autocast(self.x.device.type, self.x.dtype, enabled=mixed):
                self._expected = self.results(*recorded(self, self.eager))
        return self._expected

    def silence_kinks(self):
        """Sets dy to 0 where rounding can decide the sign of z."""
        if self.activation == "relu":
            kinks = undecided(*self.inputs, tf32(self.x))
            if kinks.any():
                self.dy = self.dy.masked_fill(kinks, 0)

    def results(self, found, kept):
        """A call's outputs, with its hidden activations, and the reference for them."""
        stack = self.stack((*kept, found["y"]))
        return Results(found | stack.hidden, self._named(stack.expected(self.dy)))

    def check(self, fn=None):
        """Checks the output and all gradients of `fn` by the accuracy rule; returns them."""
        eager = self.expected()
        found, kept = recorded(self, fn)
        ours = self.results(found, kept)
        assert_right(ours, eager, computed_in=self.x.dtype)
        self.check_bits(ours, kept)
        return found

    def check_bits(self, ours, kept):
        """Checks the mask that backward reads: exact wherever rounding cannot decide the sign."""
        right, _, decided = ours.expected["y"]
        for bits in (t for t in kept if t.dtype == torch.uint8):
            places = torch.arange(8, device=bits.device)
            rows = ((bits[:, :, None] >> places) & 1).flatten(1)[:, : right.shape[-1]].bool()
            wrong = (rows.reshape(right.shape) != ~(right <= 0)) & decided
            assert not wrong.any(), f"{wrong.sum()} bits are on the wrong side of relu's kink"

    def _named(self, expected):
        return {name.rstrip("0"): right for name, right in expected.items()}

    def implementations(self, backward=True):
        """What can be forced for this call, as arguments of `fusewise.implementation`: first every
        forward that can run it, then every backward."""
        with torch.set_grad_enabled(backward):
            inputs = [None if t is None else t.detach() for t in self.inputs]
            inputs[0].requires_grad_(backward)
            explanation = fusewise.explain(self.call, self.ours, inputs)
        able = {"linear_act": None, "linear_act_backward": None}
        for record in explanation:
            operator = "linear_act" + "_backward" * (record.direction == "backward")
            known = able[operator]
            able[operator] = [n for n in record.able if known is None or n in known]
        return [{operator: n} for operator, names in able.items() for n in names or ()]

    def check_every_implementation(self, *others):
        """Checks the accuracy rule and bit-identical reruns, for the default choice and for each
        implementation that can run the call. Returns the names that were forced.

        `others` are more draws of the same sizes and layouts, checked together with this one. If
        rows and weights are alike, few rounding errors are independent, and the largest of a few,
        ours or torch's, is a matter of luck."""
        checked = set()
        for choice in ({}, *self.implementations()):
            with fusewise.implementation(**choice):
                first = check_together(self, *others)
                second = gradients(self)
            for output in first:
                assert same_bits(first[output], second[output]), f"{choice}: {output} in a rerun"
            checked.update(choice.values())
        assert checked, "no implementation could be forced"
        return checked


@dataclass
class MlpCase(Case):
    """The same for mlp; w and b are lists."""

    final_activation: str = "identity"

    ours = staticmethod(mlp)
    eager = staticmethod(eager_mlp)

    @property
    def inputs(self):
        return self.x, *self.w, *(self.b or ())

    @property
    def names(self):
        biases = (f"b{i}" for i in range(len(self.b or ())))
        return "x", *(f"w{i}" for i in range(len(self.w))), *biases

    @property
    def arguments(self):
        return self.x, self.w, self.b, self.activation, self.final_activation

    def call(self, fn, inputs):
        layers = len(self.w)
        x, weights, biases = inputs[0], list(inputs[1 : 1 + layers]), list(inputs[1 + layers :])
        return fn(x, weights, biases or None, self.activation, self.final_activation)

    def stack(self, kept=()):
        kinds = [self.activation] * (len(self.w) - 1) + [self.final_activation]
        return Stack(self.x, self.w, self.b, kinds, tf32(self.x), kept)

    def silence_kinks(self):
        """Not needed: a stack's reference follows each call's own decisions at relu's kink."""

    def _named(self, expected):
        return expected


def check_together(case, *others, fn=None):
    """Checks several calls as if they were one; returns the results of the first."""
    if not others:
        return case.check(fn)
    cases = (case, *others)
    eager = _stacked([each.expected() for each in cases])
    calls = [recorded(each, fn) for each in cases]
    ours = [each.results(*call) for each, call in zip(cases, calls, strict=True)]
    assert_right(_stacked(ours), eager, computed_in=case.x.dtype)
    for each, results, (_, kept) in zip(cases, ours, calls, strict=True):
        each.check_bits(results, kept)
    return calls[0][0]


def _stacked(results):
    """The results of several calls stacked into one."""
    expected = {}
    for name in results[0].expected:
        values, scales, decided = zip(*(each.expected[name] for each in results), strict=True)
        sides = None if decided[0] is None else torch.stack(decided)
        expected[name] = Expected(torch.stack(values), max(scales), sides)
    outputs = {name: torch.stack([r.outputs[name] for r in results]) for name in results[0].outputs}
    return Results(outputs, expected)


def tf32(x):
    return x.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _drawing(device):
    def draw(*size, dtype, divisor=1.0):
        return (torch.randn(size, dtype=torch.float64, device=device) / divisor).to(dtype)

    return draw


def make_case(
    leading,
    k,
    n,
    device="cpu",
    dtypes=DTYPES["fp32"],
    activation="relu",
    bias=True,
    layout="contiguous",
    w_layout="contiguous",
    dy_layout="contiguous",
):
    """Random inputs of linear_act; z is roughly normally distributed."""
    x_dtype, w_dtype = dtypes
    draw = _drawing(device)
    return Case(
        x=LAYOUTS[layout](draw(*leading, k, dtype=x_dtype)),
        w=LAYOUTS[w_layout](draw(n, k, dtype=w_dtype, divisor=max(k, 1) ** 0.5)),
        b=draw(n, dtype=w_dtype) if bias else None,
        dy=LAYOUTS[dy_layout](draw(*leading, n, dtype=x_dtype)),
        activation=activation,
    )


def make_mlp_case(
    leading,
    sizes,
    device="cpu",
    dtypes=DTYPES["fp32"],
    activation="relu",
    final_activation="identity",
    bias=True,
    layout="contiguous",
    dy_layout="contiguous",
):
    x_dtype, w_dtype = dtypes
    draw = _drawing(device)
    pairs = list(zip(sizes, sizes[1:], strict=False))
    return MlpCase(
        x=LAYOUTS[layout](draw(*leading, sizes[0], dtype=x_dtype)),
        w=[draw(n, k, dtype=w_dtype, divisor=max(k, 1) ** 0.5) for k, n in pairs],
        b=[draw(n, dtype=w_dtype) for _, n in pairs] if bias else None,
        dy=LAYOUTS[dy_layout](draw(*leading, sizes[-1], dtype=x_dtype)),
        activation=activation,
        final_activation=final_activation,
    )


def gradients(case, fn=None):
    """y and the gradients of all inputs that are not None, by name."""
    return recorded(case, fn)[0]


def recorded(case, fn=None, unpack=lambda t: t):
    """The same, and all tensors that the call saved. Backward receives them through `unpack`."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in case.inputs]
    kept = []

    def keep(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, unpack):
        y = case.call(fn or case.ours, inputs)
    present = {f"d{n}": t for n, t in zip(case.names, inputs, strict=True) if t is not None}
    found = torch.autograd.grad(y, list(present.values()), case.dy)
    return {"y": y.detach(), **dict(zip(present, found, strict=True))}, kept


def gradient_penalty(case, fn):
    """A gradient penalty as in WGAN-GP and R1: the loss contains the gradient of x."""
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    y = case.call(fn, inputs)
    (slope,) = torch.autograd.grad(y.sum(), inputs[0], create_graph=True)
    loss = (slope.flatten(1).norm(dim=1) - 1).square().mean() + y.mean()
    return torch.autograd.grad(loss, inputs)
