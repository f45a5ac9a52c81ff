"""Stacks of linear layers with activations in fp64: the reference of linear_act and mlp.

Used by the benchmark and by the tests. Independent of fusewise's own code.

ReLU's slope jumps at 0. Where rounding can decide the sign of z (`Layer.undecided`), both slopes
are correct, and the gradients of these elements are not compared. In a single layer their dy is set
to 0 for the checked call, for torch and for the reference alike. Everywhere else the sign of z is
checked.

The gradient of a hidden layer cannot be set from outside. There the reference follows the call's
own decisions: every layer starts from the activations that the call saved for backward, and these
activations are checked like outputs.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..accuracy import Expected, accumulator, largest, scale

ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
_TF32_EPS = 2.0**-10


class Layer:
    """One layer of the stack, in fp64. `dtype` is the dtype that the checked call computes in."""

    def __init__(self, x, w, b, kind: str, dtype: torch.dtype, tf32: bool):
        self.x, self.w, self.b, self.kind = x, w, b, kind
        self.z = F.linear(x, w, b)
        self.terms = F.linear(x.abs(), w.abs(), None if b is None else b.abs())
        self.y = ACTIVATIONS[kind](self.z)
        self.open = ~(self.z <= 0)  # NaN lets the gradient through, as in torch
        self.undecided = None
        if kind == "relu":
            eps = _TF32_EPS if tf32 else torch.finfo(accumulator(dtype)).eps
            info = torch.finfo(dtype)
            room = 4 * eps * self.terms + info.smallest_normal * info.eps  # the latter rounds to 0
            self.undecided = (self.z.abs() <= room) & (self.terms > 0)

    def backward(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        """dz, and the sum of |terms| behind it."""
        if self.kind == "relu":  # relu selects, so a closed unit does not even pass NaN
            dz = torch.where(self.open, dy, 0.0)
            return dz, dz.abs()
        slope, terms = _slope(self.kind, self.z)
        return dy * slope, dy.abs() * terms


class Stack:
    """The layers of a call.

    `kept` holds the tensors that the call saved for backward, and its output. If relu's activations
    are among them, they replace the exact ones.
    """

    @torch.no_grad()
    def __init__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        kinds: Sequence[str],
        tf32: bool = False,
        kept: Sequence[Tensor] = (),
    ):
        self.dtype, self.shape = x.dtype, x.shape
        # Parameters of another dtype are rounded to x's dtype before they are used.
        parameters = [
            [t.detach().to(x.dtype).double() for t in each or ()] for each in (weights, biases)
        ]
        given = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1]).double()
        self.layers: list[Layer] = []
        self.hidden: dict[str, Tensor] = {}
        """The call's own activations that were found in `kept`, by name."""
        for i, kind in enumerate(kinds):
            b = parameters[1][i] if parameters[1] else None
            layer = Layer(given, parameters[0][i], b, kind, x.dtype, tf32)
            self.layers.append(layer)
            given = layer.y
            found = _nearest(kept, layer.y, x.dtype) if kind == "relu" else None
            if found is not None:
                given = found.double()
                layer.open = ~(given <= 0)
                if i + 1 < len(kinds):
                    self.hidden[f"h{i}"] = found
            elif layer.undecided is not None:
                layer.open &= ~layer.undecided

    @torch.no_grad()
    def expected(self, dy: Tensor) -> dict[str, Expected]:
        """y, dx, then dw and db of every layer (db only with biases), in the order of the inputs;
        then the hidden activations that were found."""
        layers, last = self.layers, self.layers[-1]
        shape = (*self.shape[:-1], len(last.w))
        forward = {f"h{i}": self._forward(layers[i]) for i in range(len(layers) - 1)}
        y = self._forward(last)
        decided = None if y.decided is None else y.decided.reshape(shape)
        found = {"y": Expected(y.value.reshape(shape), y.scale, decided)}
        gradient = dy.detach().double().reshape(last.z.shape)
        for i in reversed(range(len(layers))):
            layer = layers[i]
            dz, terms = layer.backward(gradient)
            found[f"dw{i}"] = self._sum(dz.T @ layer.x, terms.T @ layer.x.abs())
            if layer.b is not None:
                found[f"db{i}"] = self._sum(dz.sum(0), terms.sum(0))
            gradient, terms = dz @ layer.w, terms @ layer.w.abs()
        dx = self._sum(gradient, terms)
        found["dx"] = Expected(dx.value.reshape(self.shape), dx.scale)
        names = ["y", "dx", *(f"d{kind}{i}" for kind in "wb" for i in range(len(layers)))]
        ordered = {name: found[name] for name in names if name in found}
        return ordered | {name: forward[name] for name in self.hidden}

    def _forward(self, layer: Layer) -> Expected:
        decided = None if layer.undecided is None else ~layer.undecided
        return self._sum(layer.y, layer.terms)._replace(decided=decided)

    def _sum(self, value: Tensor, terms: Tensor) -> Expected:
        return Expected(value, scale(largest(value), largest(terms), 0.0, self.dtype))


def undecided(x, w, b, tf32: bool = False) -> Tensor:
    """Where rounding can decide on which side of 0 an element of x wᵀ + b lies."""
    found = Stack(x, [w], None if b is None else [b], ["relu"], tf32).layers[0].undecided
    return found.reshape(*x.shape[:-1], len(w))


def _nearest(kept: Sequence[Tensor], y: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The tensor nearest to y among those that could be relu's input or output, as an output."""
    alike = [t for t in kept if t.dtype == dtype and t.shape[-1:] == y.shape[-1:]]
    outputs = [t.detach().reshape(y.shape).relu() for t in alike if t.numel() == y.numel()]
    return min(outputs, key=lambda t: largest(t.double() - y), default=None)


def _slope(kind: str, z: Tensor) -> tuple[Tensor, Tensor]:
    """act'(z), and the sum of |terms| behind it."""
    if kind == "identity":
        return torch.ones_like(z), torch.ones_like(z)
    if kind == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s)), s * (1 + z.abs() * (1 - s))
    if kind == "gelu":
        cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return cdf + z * density, cdf + z.abs() * density
    beta = math.sqrt(2 / math.pi)
    u = beta * (z + 0.044715 * z**3)
    # sech(u)^2 instead of 1 - tanh(u)^2, whose cancellation would show next to a float64 call.
    rest = 0.5 * z / torch.cosh(u).square() * beta * (1 + 3 * 0.044715 * z * z)
    return torch.sigmoid(2 * u) + rest, 0.5 * (1 + torch.tanh(u).abs()) + rest.abs()
