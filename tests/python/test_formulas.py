"""The operators in torch's own terms, which run under torch.func, forward-mode AD and double
backward: the same values and first gradients as the operators', in float64."""

import pytest
import torch

import autoencoder_reference
import linear_reference
import reference
from fusewise.functional import linear_act, mlp, squeeze_excite
from fusewise.models._autoencoder import autoencoder

DOUBLE = reference.DTYPES["fp64"]


def expect_the_same(fn, inputs, dy):
    """Value by jvp, gradients by a graph of the backward, against the operator's own."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = fn(*inputs)
    expected = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    found = torch.autograd.grad(y, inputs, dy, create_graph=True)
    tangents = tuple(torch.ones_like(t) for t in inputs)
    plain = tuple(t.detach() for t in inputs)
    value, slope = torch.func.jvp(fn, plain, tangents)
    torch.testing.assert_close(value, y.detach())
    for i, (ours, right) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(ours.detach(), right, msg=lambda text, i=i: f"{i}: {text}")
    sums = sum((gradient * t).sum() for gradient, t in zip(expected, tangents, strict=True))
    torch.testing.assert_close((slope * dy).sum(), sums)


@pytest.mark.parametrize("activation", linear_reference.ACTIVATIONS)
def test_linear_act(device, activation):
    case = linear_reference.make_case((7,), 5, 6, device, DOUBLE)
    expect_the_same(lambda *t: linear_act(*t, activation), case.inputs, case.dy)


@pytest.mark.parametrize("activation, final", [("relu", "gelu_tanh"), ("silu", "identity")])
def test_mlp(device, activation, final):
    case = linear_reference.make_mlp_case((7,), [5, 6, 4], device, DOUBLE, activation, final)
    expect_the_same(lambda *t: case.call(mlp, t), case.inputs, case.dy)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("gate", reference.GATES)
def test_squeeze_excite(device, activation, gate):
    case = reference.make_case((2, 5, 3, 4), 3, device, DOUBLE)
    expect_the_same(lambda *t: squeeze_excite(*t, activation, gate), case.inputs, case.dy)


@pytest.mark.parametrize("output", autoencoder_reference.OUTPUTS)
def test_autoencoder(device, output):
    sizes = autoencoder_reference.SMALL
    case = autoencoder_reference.make_case(4, sizes, device, DOUBLE, output=output)
    inputs = [t for i, t in enumerate(case.inputs) if output != "latent" or i < 10]

    def fn(*tensors):
        return autoencoder(*tensors, *case.inputs[len(tensors) :], output=output)

    expect_the_same(fn, inputs, case.gradient)
