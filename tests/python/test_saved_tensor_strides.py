"""Backward reads saved tensors with whatever strides a hook brings them back."""

import pytest
import torch

from fusewise.functional import batch_norm_excite, linear_act, mlp, squeeze_excite
from fusewise.models._autoencoder import autoencoder


def transposed(t):
    dims = tuple(reversed(range(t.dim())))
    return t.permute(dims).contiguous().permute(dims)


def sliced(t):
    """Every second element of each dimension, and not the first."""
    room = t.new_empty([2 * size + 1 for size in t.shape])
    return room[(slice(1, None, 2),) * t.dim()].copy_(t)


def expanded(t):
    """With stride 0 wherever that changes no value."""
    whole = t
    for dim in range(t.dim()):
        first = t.narrow(dim, 0, 1)
        if torch.equal(first.expand_as(t), t):
            t = first
    return t.expand_as(whole)


LAYOUTS = {f.__name__: f for f in (transposed, sliced, expanded)}

# Each takes a source of tensors by shape, and gives a function and its inputs.
CALLS = {
    "squeeze_excite": lambda new: (
        lambda *t: squeeze_excite(*t, activation="silu"),
        [new(3, 6, 5, 4), new(2, 6), new(2), new(6, 2), new(6)],
    ),
    "batch_norm_excite": lambda new: (
        lambda x, *t: batch_norm_excite(x, None, None, *t, training=True),
        [new(3, 6, 5, 4), new(6), new(6), new(2, 6), new(2), new(6, 2), new(6)],
    ),
    "linear_act relu": lambda new: (
        lambda *t: linear_act(*t, "relu"),
        [new(7, 5), new(11, 5), new(11)],
    ),
    "linear_act gelu": lambda new: (
        lambda *t: linear_act(*t, "gelu"),
        [new(2, 7, 5), new(11, 5), new(11)],
    ),
    "mlp relu": lambda new: (
        lambda x, *t: mlp(x, t[:3], t[3:], "relu", "relu"),
        [new(7, 5), new(11, 5), new(6, 11), new(3, 6), new(11), new(6), new(3)],
    ),
    "mlp silu": lambda new: (
        lambda x, *t: mlp(x, t[:3], t[3:], "silu", "gelu"),
        [new(7, 5), new(11, 5), new(6, 11), new(3, 6), new(11), new(6), new(3)],
    ),
    "mlp identity": lambda new: (
        lambda x, *t: mlp(x, t[:2], None, "identity", "identity"),
        [new(2, 7, 5), new(11, 5), new(6, 11)],
    ),
    "autoencoder": lambda new: (
        autoencoder,
        [
            *(new(7, 18), new(6), new(6), new(5, 6), new(5), new(4, 15)),
            *(new(4), new(4), new(4, 4), new(4), new(6, 5), new(6)),
        ],
    ),
}


def gradients(function, inputs, unpack):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
        y = function(*inputs)
    torch.manual_seed(1)
    return torch.autograd.grad(y, inputs, torch.randn_like(y))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_any_strides(device, call, layout):
    def new(*shape):
        if layout == "expanded":  # rows that are all alike, so that a stride of 0 is right
            t = torch.rand(shape[-1:], device=device, dtype=torch.float64).expand(shape).clone()
        else:
            t = torch.randn(shape, device=device, dtype=torch.float64)
        return t.requires_grad_()

    function, inputs = CALLS[call](new)
    seen = []

    def unpack(t):
        seen.append(LAYOUTS[layout](t))
        return seen[-1]

    expected = gradients(function, inputs, lambda t: t)
    found = gradients(function, inputs, unpack)
    assert any(not t.is_contiguous() for t in seen)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, i=i: f"{i}: {m}")
