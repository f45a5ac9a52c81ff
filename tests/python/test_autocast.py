"""Autocast around backward alone, and with weights in the other half type."""

import pytest
import torch
import torch.nn.functional as F

import autoencoder_reference
import linear_reference
import reference
from fusewise.functional import linear_act, mlp
from fusewise.models._autoencoder import autoencoder
from linear_reference import make_case, make_mlp_case

HALF = {"cpu": torch.bfloat16, "cuda": torch.float16}


def gradients(fn, inputs, dy, inside):
    """Of fn on `inputs`; forward without autocast, backward `inside` of it or not."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = fn(*leaves)
    with torch.autocast(y.device.type, HALF[y.device.type], enabled=inside):
        return torch.autograd.grad(y, leaves, dy)


def calls(device):
    """Every operator: a function of tensors, these, and a gradient for its result."""
    case = make_case((6,), 16, 24, device)
    yield "linear_act", lambda *t: linear_act(*t, "gelu"), case.inputs, case.dy
    case = make_mlp_case((6,), [16, 24, 8], device)
    yield "mlp", lambda *t: case.call(mlp, t), case.inputs, case.dy
    images = reference.make_case((2, 8, 5, 5), 4, device)
    yield (
        "squeeze_excite",
        lambda *t: reference.squeeze_excite(*t, activation="silu"),
        images.inputs,
        images.dy,
    )
    rows = autoencoder_reference.make_case(6, autoencoder_reference.SMALL, device)
    yield "autoencoder", autoencoder, rows.inputs, rows.gradient


def test_backward_inside_of_autocast_rounds_nothing_more(device):
    """Torch's own linear rounds its gradients there, which is why torch advises against it; what
    ours hands to torch's GEMMs is not rounded once more."""
    for name, fn, inputs, dy in calls(device):
        outside = gradients(fn, inputs, dy, False)
        inside = gradients(fn, inputs, dy, True)
        for i, (found, expected) in enumerate(zip(inside, outside, strict=True)):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), (name, i)


OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


def rounded(tensors, dtype):
    return [t.to(dtype) for t in tensors]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_weights_in_the_other_half_type(device, activation):
    """As F.linear: everything is cast to autocast's type, gradients come back in each tensor's."""
    half = HALF[device]
    case = make_case((6,), 16, 24, device, activation=activation)
    inputs = (case.x, *rounded((case.w, case.b), OTHER[half]))

    def run(fn):
        leaves = [t.detach().requires_grad_() for t in inputs]
        with torch.autocast(device, half):
            y = fn(*leaves)
        assert y.dtype == half
        return y, *torch.autograd.grad(y, leaves, case.dy.to(half))

    ours = run(lambda *t: linear_act(*t, activation))
    plain = [t.to(half).detach().requires_grad_() for t in inputs]
    y = linear_act(*plain, activation)
    expected = (y, *torch.autograd.grad(y, plain, case.dy.to(half)))
    eager = run(lambda *t: linear_reference.eager(*t, activation))
    for found, right, theirs in zip(ours, expected, eager, strict=True):
        assert found.dtype == theirs.dtype
        assert torch.equal(found, right.to(found.dtype))


def test_stacks_of_weights_in_the_other_half_type(device):
    half = HALF[device]
    case = make_mlp_case((6,), [16, 24, 8], device)
    parameters = rounded(case.inputs[1:], OTHER[half])
    with torch.autocast(device, half):
        found = case.call(mlp, [case.x, *parameters])
    expected = case.call(mlp, [case.x.to(half), *rounded(parameters, half)])
    assert found.dtype == half and torch.equal(found, expected)


@pytest.mark.parametrize("output", autoencoder_reference.OUTPUTS)
def test_an_autoencoder_in_the_other_half_type(device, output):
    half = HALF[device]
    case = autoencoder_reference.make_case(6, autoencoder_reference.SMALL, device)
    weights = rounded(case.weights, OTHER[half])
    with torch.autocast(device, half):
        found = autoencoder(case.x, *weights, output=output)
    expected = autoencoder(case.x.to(half), *rounded(weights, half), output=output)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_torch_itself_casts_the_other_half_type(device):
    """What the tests above take for granted."""
    half = HALF[device]
    x, w = torch.randn(2, 8, device=device), torch.randn(3, 8, device=device, dtype=OTHER[half])
    with torch.autocast(device, half):
        assert torch.equal(F.linear(x, w), F.linear(x.to(half), w.to(half)))
