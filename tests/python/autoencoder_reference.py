"""The autoencoder in the tests: the inputs and the expected results."""

from dataclasses import dataclass, field

import torch

import fusewise
from fusewise.bench.families.autoencoder import OUTPUTS, WEIGHTS, eager, expected, random_weights
from fusewise.models._autoencoder import autoencoder
from reference import DTYPES, assert_close, misaligned, same_bits

__all__ = ["DTYPES", "LAYOUTS", "OUTPUTS", "WEIGHTS", "autoencoder", "eager", "make_case"]

NAMES = ("x", *WEIGHTS)
DEFAULT = {"n_mels": 64, "frames": 5, "latent": 32, "slice_latent": 64}
SMALL = {"n_mels": 6, "frames": 3, "latent": 4, "slice_latent": 5}

# Each copies a tensor [N, F M] into another memory layout. `expanded` repeats the first row.
LAYOUTS = {
    "rows": lambda t, frames: t.contiguous(),
    "frames": lambda t, frames: t.unflatten(1, (frames, -1)).contiguous(),
    "spectrogram": lambda t, frames: (
        t.unflatten(1, (frames, -1)).transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "columns": lambda t, frames: t.T.contiguous().T,
    "sliced": lambda t, frames: (
        t.new_empty(t.shape[0], 2 * t.shape[1] + 3)[:, 3 : 3 + t.shape[1]].copy_(t)
    ),
    "every_second": lambda t, frames: (
        t.new_empty(2 * t.shape[0], 2 * t.shape[1])[::2, ::2].copy_(t)
    ),
    "expanded": lambda t, frames: t[:1].expand_as(t),
    "misaligned": lambda t, frames: misaligned(t),
}


@dataclass
class Case:
    """The inputs of one call, and the gradient of its output."""

    x: torch.Tensor
    weights: list
    gradient: torch.Tensor
    output: str = "reconstruction"
    _expected: dict = field(default=None, repr=False)

    @property
    def inputs(self):
        return self.x, *self.weights

    @property
    def mixed(self):
        """Whether x is in half precision and the weights in float32, as under autocast."""
        return self.x.dtype != self.weights[0].dtype

    def expected(self):
        """For each output: eager torch's value and the reference; computed once."""
        if self._expected is None:
            with torch.autocast(self.x.device.type, self.x.dtype, enabled=self.mixed):
                found = gradients(eager, self)
            right = expected(*self.inputs, self.gradient, output=self.output)
            # Under autocast some of torch's results have other dtypes than ours. Only the values
            # count.
            dtypes = dict(zip(found, self.dtypes(), strict=True))
            self._expected = {n: (found[n].to(dtypes[n]), *right[n]) for n in right}
        return self._expected

    def dtypes(self):
        wide = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        output = wide if self.output == "score" else self.x.dtype
        return output, self.x.dtype, *(w.dtype for w in self.weights)

    def check(self, fn=autoencoder):
        """Checks the output and all gradients of `fn` by the accuracy rule; returns them."""
        ours = gradients(fn, self)
        for name, value in ours.items():
            self.check_one(name, value)
        return ours

    def check_one(self, name, value):
        assert_close(name, value, *self.expected()[name], computed_in=self.computed_in)

    @property
    def computed_in(self):
        return self.x.dtype if self.mixed else None

    def implementations(self):
        """What can be forced for this call, as arguments of `fusewise.implementation`."""
        x = self.x.detach().requires_grad_()
        explanation = fusewise.explain(autoencoder, x, *self.weights, output=self.output)
        forward, backward = (record.able for record in explanation)
        # The gradient's address is not known before backward. The last entry takes any alignment.
        if self.gradient.is_cuda and self.gradient.data_ptr() % 16 != 0:
            backward = backward[-1:]
        return [
            *({"autoencoder": name} for name in forward),
            *({"autoencoder_backward": name} for name in backward),
        ]

    def check_every_implementation(self, *others):
        """Checks the accuracy rule and bit-identical reruns, for the default choice and for each
        implementation that can be forced. Returns their names.

        `others` are more draws of the same sizes, checked together with this one. The largest of a
        few rounding errors, ours or torch's, is a matter of luck."""
        checked = set()
        for choice in ({}, *self.implementations()):
            with fusewise.implementation(**choice):
                first = check_together(self, *others)
                second = gradients(autoencoder, self)
            for name in first:
                assert same_bits(first[name], second[name]), f"{choice}: {name} in a rerun"
            checked.update(choice.values())
        assert checked, "no implementation could be forced"
        return checked


def check_together(case, *others, fn=autoencoder):
    """Checks several calls as if they were one; returns the results of the first."""
    if not others:
        return case.check(fn)
    cases = (case, *others)
    ours = [gradients(fn, each) for each in cases]
    for name in ours[0]:
        eager_values, right, scales, _ = zip(*(c.expected()[name] for c in cases), strict=True)
        values = [torch.stack(t) for t in ([found[name] for found in ours], eager_values, right)]
        assert_close(name, *values, max(scales), computed_in=case.computed_in)
    return ours[0]


def make_case(
    rows,
    sizes=DEFAULT,
    device="cpu",
    dtypes=DTYPES["fp32"],
    layout="rows",
    gradient_layout=None,
    output="reconstruction",
):
    x_dtype, w_dtype = dtypes

    def draw(shape, scale=1.0, dtype=w_dtype):
        return (torch.randn(shape, dtype=torch.float64, device=device) * scale).to(dtype)

    frames = sizes["frames"]
    weights = random_weights(*sizes.values(), draw)
    width = frames * sizes["n_mels"]
    x = LAYOUTS[layout](draw((rows, width), dtype=x_dtype), frames)
    wide = torch.float64 if x_dtype == torch.float64 else torch.float32
    if output == "reconstruction":
        gradient = LAYOUTS[gradient_layout or layout](draw((rows, width), dtype=x_dtype), frames)
        gradient = gradient if gradient.shape == x.shape else gradient.reshape(x.shape)
    elif output == "latent":
        gradient = draw((rows, sizes["latent"]), dtype=x_dtype)
    else:
        gradient = draw((rows,), dtype=wide)
    return Case(x, weights, gradient, output)


def gradients(fn, case):
    """The output and the gradient of every input, by name."""
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    result = fn(*inputs, output=case.output)
    found = torch.autograd.grad(
        result, inputs, case.gradient.to(result.dtype), materialize_grads=True
    )
    named = dict(zip((f"d{name}" for name in NAMES), found, strict=True))
    return {case.output: result.detach(), **named}
