"""BatchNorm + activation in the tests: the inputs and the expected results."""

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

import fusewise
from fusewise.bench.accuracy import Expected, Results, accumulator, largest
from fusewise.bench.families.batch_norm_act import expected, kinks
from fusewise.functional import batch_norm_act
from fusewise.functional.batch_norm import pooled_pixels
from reference import DTYPES, LAYOUTS, assert_right, same_bits

ACTIVATIONS = {
    "identity": lambda v: v,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}
MOMENTUM = 0.3


def recipe():
    """What the code of docs/batch-norm.md that fuses a ResNet defines."""
    page = Path(__file__).resolve().parents[2] / "docs" / "batch-norm.md"
    (code,) = re.findall(r"## A ResNet in 20 lines.*?```python\n(.*?)```", page.read_text(), re.S)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 26, "about 20 lines, and the imports"
    names = {"__name__": "recipe"}
    exec(compile(code, page.name, "exec"), names)
    return names


def train(model, batches, autocast=None):
    """The losses of a training step per batch of images and labels, under autocast to a dtype."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    losses = []
    for x, labels in batches:
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def drawn_batches(steps, size, device="cpu", dtype=torch.float32):
    """Images and labels. Four batches in turn, so that there is something to learn."""
    batches = []
    for _ in range(4):
        x = torch.randn(size, dtype=dtype, device=device).to(memory_format=torch.channels_last)
        batches.append((x, torch.randint(10, size[:1], device=device)))
    return [batches[i % 4] for i in range(steps)]


def kept_bytes(fn, apart=()):
    """The memory that autograd keeps for the backward of a call, without that of the tensors
    `apart`, which live anyway."""
    found, apart = {}, {t.untyped_storage().data_ptr() for t in apart}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage  # alive, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = fn()
    del y
    return sum(storage.nbytes() for place, storage in found.items() if place not in apart)


def pooled(y):
    """Torch's max-pool as at the start of a ResNet, of images with or without streams."""
    result = F.max_pool2d(y.flatten(0, -4), 3, 2, 1)
    return result.reshape(*y.shape[:-2], *result.shape[-2:])


@dataclass
class Case:
    """The inputs of one call, and the gradient of its output."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    running_mean: torch.Tensor
    running_var: torch.Tensor
    dy: torch.Tensor
    activation: str = "relu"
    training: bool = True

    names = ("x", "weight", "bias", "residual")
    """The tensors that get gradients."""

    @property
    def inputs(self):
        return self.x, self.running_mean, self.weight, self.bias, self.residual

    def results(self, fn=None) -> Results:
        """The outputs of a call and what they should be, given its decisions."""
        tensors = {name: getattr(self, name) for name in self.names}
        own = self._of(fn)
        tensors = {n: own(t).requires_grad_() for n, t in tensors.items() if t is not None}
        mean, var = self.running_mean.clone(), self.running_var.clone()
        y = (fn or self.ours)(mean, var, **tensors)
        found = torch.autograd.grad(y, list(tensors.values()), own(self.dy))
        outputs = {"y": y.detach(), "running_mean": mean, "running_var": var}
        outputs |= {f"d{name}": t for name, t in zip(tensors, found, strict=True)}
        right = self.expected(outputs["y"])
        return Results(outputs, {name: right[name] for name in outputs})

    def kinks(self):
        """Where the slope jumps within torch's rounding of v; dy must be 0 there."""
        running = None if self.training else (self.running_mean, self.running_var)
        inputs = (self.x, self.weight, self.bias)
        found = kinks(*inputs, self.activation, self.residual, running)
        return torch.zeros_like(self.x, dtype=torch.bool) if found is None else found

    def _of(self, fn):
        """What a function gets of a tensor: torch a copy, because cuDNN needs aligned images."""
        return lambda t: t.detach().clone() if fn == self.eager else t.detach()

    def ours(self, mean, var, x, weight=None, bias=None, residual=None, **others):
        options = {"activation": self.activation, "training": self.training, "momentum": MOMENTUM}
        return batch_norm_act(x, mean, var, weight, bias, residual, **options, **others)

    def eager(self, mean, var, x, weight=None, bias=None, residual=None):
        if x.is_cuda and weight is None and bias is not None:
            weight = torch.ones_like(bias)  # torch's backward fails without it
        v = F.batch_norm(x, mean, var, weight, bias, self.training, MOMENTUM)
        return ACTIVATIONS[self.activation](v if residual is None else v + residual)

    def expected(self, y) -> dict[str, Expected]:
        x, channels = self.x, self.x.shape[1]
        one = torch.ones(channels, device=x.device)
        weight = one if self.weight is None else self.weight
        bias = 0 * one if self.bias is None else self.bias
        passes = None
        if self.activation in ("relu", "relu6"):
            passes = ~(y <= 0) & (~(y >= 6) if self.activation == "relu6" else True)
        running = None if self.training else (self.running_mean, self.running_var)
        right = expected(x, weight, bias, self.dy, self.activation, self.residual, passes, running)
        return right | self.expected_statistics()

    def expected_statistics(self):
        x = self.x.double()
        old = self.running_mean.double(), self.running_var.double()
        new = x.mean((0, 2, 3)), x.var((0, 2, 3))
        factor = MOMENTUM if self.training and x.numel() > x.shape[1] else 0
        inside = largest(x) * torch.finfo(accumulator(x.dtype)).eps
        inside /= torch.finfo(self.running_mean.dtype).eps
        found = {}
        for name, before, now in zip(("running_mean", "running_var"), old, new, strict=True):
            value = (1 - factor) * before + (factor * now if factor else 0)
            found[name] = Expected(value, largest(before) + factor * largest(now) + inside)
        return found

    def check(self, fn=None) -> Results:
        """Checks the output, all gradients and the running statistics by the accuracy rule."""
        ours = self.results(fn)
        assert_right(ours, self.results(self.eager))
        return ours

    def implementations(self, max_pool=False):
        """What can be forced for this call: first every forward that can run it, then every
        backward."""
        operator = "batch_norm_act_pool" if max_pool else "batch_norm_act"
        x = self.x.detach().requires_grad_()
        mean, var = self.running_mean.clone(), self.running_var.clone()
        options = {"activation": self.activation, "training": self.training, "max_pool": max_pool}
        residual = None if max_pool else self.residual
        records = fusewise.explain(
            lambda x: batch_norm_act(x, mean, var, self.weight, self.bias, residual, **options), x
        )
        return [
            {name: entry}
            for name, record in zip((operator, f"{operator}_backward"), records, strict=True)
            for entry in record.able
        ]

    def check_every_implementation(self):
        """Checks the accuracy rule and bit-identical reruns, for the default choice and for each
        implementation that can run the call. Returns the names that were forced."""
        checked = set()
        for choice in ({}, *self.implementations()):
            with fusewise.implementation(**choice), declines_dy(choice):
                first = self.check()
                second = self.results()
                for name, output in first.outputs.items():
                    assert same_bits(output, second.outputs[name]), f"{choice}: {name} in a rerun"
                checked.update(choice.values())
        assert checked, "no implementation could be forced"
        return checked

    def check_every_pool(self):
        """The same for the call with a max-pool, which takes exactly the values that the call
        without it gives. Without a residual."""
        checked = set()
        eager = self.pool_results(self.eager)
        for choice in ({}, *self.implementations(max_pool=True)):
            with fusewise.implementation(**choice), declines_dy(choice):
                first, second = (self.pool_results(self.ours, max_pool=True) for _ in range(2))
                for name, output in first.outputs.items():
                    assert same_bits(output, second.outputs[name]), f"{choice}: {name} in a rerun"
                assert_right(first, eager)
                checked.update(choice.values())
        assert checked, "no implementation could be forced"
        return checked

    def pool_results(self, fn, **fused) -> Results:
        """The gradients of the max-pool of a call, given its decisions. `fused`: the option that
        puts the max-pool into the call."""
        names = ("x", "weight", "bias")
        tensors = {name: getattr(self, name) for name in names}
        own = self._of(fn)
        tensors = {n: own(t).requires_grad_() for n, t in tensors.items() if t is not None}

        def call(**options):
            return fn(self.running_mean.clone(), self.running_var.clone(), **tensors, **options)

        u = call().detach()
        if fused:
            y = call(**fused)
            pixels = pooled_pixels(y.grad_fn.saved_tensors[-1], self.x)
        else:
            y, pixels = F.max_pool2d(call(), 3, 2, 1, return_indices=True)
        assert_near(y, pooled(u), 2)
        at_kinks = self.kinks().flatten(-2).gather(-1, pixels.flatten(-2)).view(pixels.shape)
        dy = self.dy[..., ::2, ::2].masked_fill(at_kinks, 0)
        found = torch.autograd.grad(y, list(tensors.values()), dy)
        outputs = {f"d{name}": t for name, t in zip(tensors, found, strict=True)}
        du = torch.zeros(u.shape, dtype=torch.float64, device=u.device).flatten(-2)
        du = du.scatter_add(-1, pixels.flatten(-2), dy.double().flatten(-2)).view(u.shape)
        # Torch rounds the sum of the gradients of a pixel's windows to x's dtype. Ours do not.
        if not fused:
            du = du.to(u.dtype)
        right = replace(self, dy=du, residual=None).expected(u)
        return Results(outputs, {name: right[name] for name in outputs})


@contextlib.contextmanager
def declines_dy(choice):
    """`explain` does not see dy, and a forced backward may decline dy's layout."""
    try:
        yield
    except RuntimeError as error:
        backward = any(name.endswith("_backward") for name in choice)
        if not backward or "cannot run this call" not in str(error):
            raise


def assert_near(found, right, factor):
    """Within some epsilons of the largest value."""
    if not right.numel():
        return
    bound = factor * torch.finfo(right.dtype).eps * (1 + largest(right.double()))
    torch.testing.assert_close(found, right, rtol=0, atol=bound, equal_nan=True)


def make_case(
    shape,
    device="cpu",
    dtypes=DTYPES["fp32"],
    layout="nchw",
    dy_layout=None,
    activation="relu",
    residual=True,
    affine=(True, True),
    training=True,
    mean=0.5,
    deviation=2.0,
):
    c = shape[1]
    x_dtype, w_dtype = dtypes

    def draw(*size, dtype=w_dtype):
        return torch.randn(size, dtype=torch.float64, device=device).to(dtype)

    def image(layout, offset=0.0, factor=1.0):
        value = torch.randn(shape, dtype=torch.float64, device=device) * factor + offset
        return LAYOUTS[layout](value.to(x_dtype))

    case = Case(
        x=image(layout, mean, deviation),
        weight=draw(c) if affine[0] else None,
        bias=draw(c) if affine[1] else None,
        residual=image(layout) if residual else None,
        running_mean=draw(c),
        running_var=draw(c).abs() + 0.5,
        dy=image(dy_layout or layout),
        activation=activation,
        training=training,
    )
    case.dy = LAYOUTS[dy_layout or layout](case.dy.masked_fill(case.kinks(), 0))
    return case
