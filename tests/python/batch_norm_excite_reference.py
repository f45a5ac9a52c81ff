"""BatchNorm + activation + Squeeze-and-Excitation in the tests: the inputs and the expected
results."""

from dataclasses import dataclass, field

import torch

import batch_norm_reference
import fusewise
import reference
from fusewise.bench.accuracy import Expected, Results
from fusewise.bench.families.batch_norm_act import Norm, activate
from fusewise.bench.families.batch_norm_excite import expected, near_kinks
from fusewise.functional import batch_norm_excite
from reference import DTYPES, LAYOUTS, assert_right

OPERATOR = "batch_norm_excite"
MOMENTUM = batch_norm_reference.MOMENTUM


@dataclass
class Case(batch_norm_reference.Case):
    """The inputs of one call, and the gradient of its output. There is no residual."""

    w1: torch.Tensor = None
    b1: torch.Tensor | None = None
    w2: torch.Tensor = None
    b2: torch.Tensor | None = None
    hidden_activation: str = "silu"
    gate: str = "sigmoid"
    _kept: dict = field(default_factory=dict, repr=False)

    names = ("x", "weight", "bias", "w1", "b1", "w2", "b2")

    @property
    def options(self):
        return {
            "activation": self.activation,
            "hidden_activation": self.hidden_activation,
            "gate": self.gate,
            "training": self.training,
        }

    def ours(self, mean, var, x, weight=None, bias=None, b1=None, b2=None, **matrices):
        excitation = matrices["w1"], b1, matrices["w2"], b2
        options = self.options | {"momentum": MOMENTUM}
        return batch_norm_excite(x, mean, var, weight, bias, *excitation, **options)

    def eager(self, mean, var, x, weight=None, bias=None, b1=None, b2=None, **matrices):
        a = batch_norm_reference.Case.eager(self, mean, var, x, weight, bias)
        excitation = matrices["w1"], b1, matrices["w2"], b2
        mixed = x.dtype != excitation[0].dtype
        with torch.autocast(x.device.type, x.dtype, enabled=mixed):
            return reference.eager(a, *excitation, self.hidden_activation, self.gate)

    @property
    def running(self):
        """What the norm takes, or None if that is of x."""
        if self.training or self.running_mean is None:
            return None
        return self.running_mean, self.running_var

    @property
    def affine(self):
        """Weight and bias, also where they are absent."""
        one = torch.ones(self.x.shape[1], dtype=self.w1.dtype, device=self.x.device)
        weight, bias = self.weight, self.bias
        return one if weight is None else weight, 0 * one if bias is None else bias

    def expected(self, y) -> dict[str, Expected]:
        """Does not depend on the call's decisions, because nothing is near a kink."""

        def compute():
            excitation = self.w1, self.b1, self.w2, self.b2
            functions = self.activation, self.hidden_activation, self.gate
            right = expected(self.x, *self.affine, *excitation, self.dy, *functions, self.running)
            return right | self.expected_statistics()

        return self._known("expected", compute)

    def check(self, fn=None) -> Results:
        ours = self.results(fn)
        assert_right(ours, self._known("eager", lambda: self.results(self.eager)))
        return ours

    def _known(self, name, compute):
        """What was computed before, if no field has changed since."""
        fields = [v for key, v in vars(self).items() if key != "_kept"]
        key = [(id(v), v._version) if isinstance(v, torch.Tensor) else v for v in fields]
        if self._kept.get(name, (None,))[0] != key:
            self._kept[name] = key, fields, compute()
        return self._kept[name][-1]

    def near_kinks(self):
        """The values of x where rounding may decide the slope of the first activation."""
        found = near_kinks(self.x, *self.affine, self.activation, self.running)
        return torch.zeros_like(self.x, dtype=torch.bool) if found is None else found

    def leave_hidden_kinks(self):
        """Draws rows of w1 and w2 again that rounding could take over a kink."""
        a = activate(Norm.of(self.x, *self.affine, running=self.running).v, self.activation)
        excitation = self.w1, self.b1, self.w2, self.b2
        functions = self.hidden_activation, self.gate
        reference.leave_kinks(reference.Case(a.to(self.x.dtype), *excitation, self.dy, *functions))

    def explained(self):
        """The records of forward and backward."""
        tensors = {name: getattr(self, name) for name in self.names}
        tensors["x"] = self.x.detach().requires_grad_()
        statistics = (None if t is None else t.clone() for t in self.statistics)
        return fusewise.explain(lambda x: self.ours(*statistics, **tensors), tensors["x"])

    @property
    def statistics(self):
        return self.running_mean, self.running_var

    def implementations(self):
        operators = (OPERATOR, f"{OPERATOR}_backward")
        return [
            {operator: name}
            for operator, record in zip(operators, self.explained(), strict=True)
            for name in record.able
        ]

    def check_every_implementation(self):
        """As for BatchNorm. Each implementation that is forced is the one that runs."""
        for choice in self.implementations():
            with fusewise.implementation(**choice):
                chosen = [record.chosen for record in self.explained()]
            (operator, name), *_ = choice.items()
            assert chosen[operator.endswith("_backward")] == name
        return super().check_every_implementation()


def make_case(
    shape,
    reduced,
    device="cpu",
    dtypes=DTYPES["fp32"],
    layout="nchw",
    dy_layout=None,
    activation="silu",
    hidden_activation="silu",
    gate="sigmoid",
    affine=(True, True),
    biases=(True, True),
    training=True,
    convolution=False,
    mean=0.5,
    deviation=2.0,
):
    """Random inputs that keep away from kinks and from saturated gates."""
    c, tail = shape[1], (1, 1) if convolution else ()
    x_dtype, w_dtype = dtypes

    def draw(*size, dtype=w_dtype, divisor=1.0):
        return (torch.randn(size, dtype=torch.float64, device=device) / divisor).to(dtype)

    def values():
        value = torch.randn(shape, dtype=torch.float64, device=device) * deviation + mean
        return value.to(x_dtype)

    dense = values()
    case = Case(
        x=LAYOUTS[layout](dense),
        weight=draw(c) if affine[0] else None,
        bias=draw(c) if affine[1] else None,
        residual=None,
        running_mean=draw(c),
        running_var=draw(c).abs() + 0.5,
        dy=LAYOUTS[dy_layout or layout](draw(*shape, dtype=x_dtype)),
        activation=activation,
        training=training,
        w1=draw(reduced, c, *tail, divisor=c**0.5),
        b1=draw(reduced) if biases[0] else None,
        w2=draw(c, reduced, *tail, divisor=reduced**0.5),
        b2=draw(c) if biases[1] else None,
        hidden_activation=hidden_activation,
        gate=gate,
    )
    leave_kinks(case, dense, values, LAYOUTS[layout])
    return case


def leave_kinks(case, dense, values, layout):
    """Draws values of x again while they are near a kink of the first activation, then weights for
    the others. There torch's gradient may be off by a whole term, and the rule would allow as much
    everywhere. `dense` holds the values of x, before they get their layout."""
    for _ in range(200):
        near = case.near_kinks()
        if not near.any():
            break
        dense = torch.where(near, values(), dense)
        case.x = layout(dense)
    if case.x.numel():
        case.leave_hidden_kinks()


__all__ = ["Case", "Results", "leave_kinks", "make_case"]
