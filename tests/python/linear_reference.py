"""Linear + activation, and stacks of it, as the tests know them: the inputs, the same formula in
fp64, and how large the sums behind every result are. Neither uses what is tested."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import fusewise
from fusewise.functional import linear_act, mlp
from reference import DTYPES, assert_close, misaligned, same_bits

ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


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


# Each makes a tensor with the same values (`expanded`: those of its first row; `flat`: those of its
# first element) laid out anew.
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


# --- the formula in fp64 ------------------------------------------------------------------------


def _slope(kind, z):
    """act'(z), and the sum of |terms| behind it."""
    if kind == "identity":
        return torch.ones_like(z), torch.ones_like(z)
    if kind == "relu":  # NaN lets the gradient through, as torch's
        open_ = torch.where(z <= 0, 0.0, 1.0)
        return open_, open_
    if kind == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s)), s * (1 + z.abs() * (1 - s))
    if kind == "gelu":
        cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return cdf + z * density, cdf + z.abs() * density
    beta = math.sqrt(2 / math.pi)
    t = torch.tanh(beta * (z + 0.044715 * z**3))
    rest = 0.5 * z * (1 - t * t) * beta * (1 + 3 * 0.044715 * z * z)
    return 0.5 * (1 + t) + rest, 0.5 * (1 + t.abs()) + rest.abs()


def _either_side(z, total, bias, dtype, hidden):
    """Where rounding decides on which side of 0 z comes out, and both slopes of relu are right.

    Sums round in float32 at least, but of half data the sum may be rounded before the bias is
    added, and the input of a hidden layer was.
    """
    eps = torch.finfo(dtype).eps
    if dtype in (torch.float32, torch.float64):
        return z.abs() <= 4 * eps * total
    before = z if bias is None else z - bias.double()
    room = 4 * torch.finfo(torch.float32).eps * total + 2 * eps * before.abs()
    return z.abs() <= room + (eps * total if hidden else 0)


def _largest(t):
    """Of what is finite; 0 where nothing is."""
    finite = t[t.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


@torch.no_grad()
def stack_expected(x, weights, biases, dy, kinds):
    """y, dx, and of every layer dw and db (None without biases): the value and its scale."""
    wide = [w.double() for w in weights]
    shape = x.shape
    inputs, sums = [x.double().reshape(x.shape[:-1].numel(), shape[-1])], []
    for i, (w, kind) in enumerate(zip(wide, kinds, strict=True)):
        z = inputs[-1] @ w.T
        total = inputs[-1].abs() @ w.abs().T
        if biases:
            z, total = z + biases[i].double(), total + biases[i].double().abs()
        sums.append((z, total))
        inputs.append(ACTIVATIONS[kind](z))
    found = {"y": (inputs[-1].reshape(*shape[:-1], len(wide[-1])), _largest(sums[-1][1]))}

    gradient = dy.double().reshape(inputs[-1].shape)
    scale = gradient.abs()
    slopes = []
    for i in reversed(range(len(wide))):
        slope, slope_scale = _slope(kinds[i], sums[i][0])
        if kinds[i] == "relu":  # it selects: what is closed lets not even NaN through
            kink = _either_side(*sums[i], biases and biases[i], x.dtype, hidden=i > 0)
            either = torch.where(kink, gradient.abs() / (4 * torch.finfo(x.dtype).eps), 0.0)
            gradient = torch.where(slope == 0, 0.0, gradient)
            scale = torch.where(slope == 0, 0.0, scale) + either
        elif kinds[i] != "identity":
            gradient, scale = gradient * slope, scale * slope_scale
        slopes.append((f"dw{i}", gradient.T @ inputs[i], scale.T @ inputs[i].abs()))
        slopes.append((f"db{i}", gradient.sum(0), scale.sum(0)) if biases else None)
        gradient, scale = gradient @ wide[i], scale @ wide[i].abs()
    found["dx"] = gradient.reshape(shape), _largest(scale)
    for each in slopes:
        if each:
            found[each[0]] = each[1], _largest(each[2])
    return found


# --- cases --------------------------------------------------------------------------------------


@dataclass
class Case:
    """The inputs of one call of linear_act, and the gradient that comes back to it."""

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

    def reference(self):
        biases = None if self.b is None else [self.b]
        found = stack_expected(self.x, [self.w], biases, self.dy, [self.activation])
        return {name.rstrip("0"): right for name, right in found.items()}

    def expected(self):
        """By output: eager torch's, the fp64 reference, and the scale; computed once."""
        if self._expected is None:
            right = self.reference()
            mixed = self.x.dtype != next(t.dtype for t in self.inputs[1:])
            with torch.autocast(self.x.device.type, self.x.dtype, enabled=mixed):
                found = gradients(self, self.eager)
            self._expected = {name: (found[name], *right[name]) for name in found}
        return self._expected

    def check(self, fn=None):
        """Forward and all gradients of `fn` against the rule; returns them."""
        ours = gradients(self, fn)
        for name, (found, reference, scale) in self.expected().items():
            assert_close(name, ours[name], found, reference, scale, computed_in=self.x.dtype)
        return ours

    def implementations(self, backward=True):
        """What can be forced for this call, as arguments of `fusewise.implementation`: one after
        another every forward that takes it, then every backward."""
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

    def check_every_implementation(self):
        """The rule, and bit-identical reruns, for the default choice and for each implementation
        that takes the call; returns the names that were forced."""
        checked = set()
        for choice in ({}, *self.implementations()):
            with fusewise.implementation(**choice):
                first = self.check()
                second = gradients(self)
            for output in first:
                assert same_bits(first[output], second[output]), f"{choice}: {output} in a rerun"
            checked.update(choice.values())
        assert checked, "no implementation could be forced"
        return checked


@dataclass
class MlpCase(Case):
    """The same for mlp: w and b are lists."""

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

    def reference(self):
        kinds = [self.activation] * (len(self.w) - 1) + [self.final_activation]
        return stack_expected(self.x, self.w, self.b, self.dy, kinds)


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
    """Random inputs of linear_act; z is about a normal distribution."""
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
    """y and the gradient of every input that is there, by name."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in case.inputs]
    y = case.call(fn or case.ours, inputs)
    present = {f"d{n}": t for n, t in zip(case.names, inputs, strict=True) if t is not None}
    found = torch.autograd.grad(y, list(present.values()), case.dy)
    return {"y": y.detach(), **dict(zip(present, found, strict=True))}
