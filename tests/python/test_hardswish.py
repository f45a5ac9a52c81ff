"""hardswish, which Squeeze-and-Excitation takes and linear layers do not."""

import pytest
import torch

import fusewise
from fusewise.functional import linear_act, squeeze_excite
from reference import DTYPES, GATES, LAYOUTS, make_case


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accuracy_by_dtype_and_layout(device, dtypes, layout):
    case = make_case((3, 24, 9, 10), 6, device, DTYPES[dtypes], layout, activation="hardswish")
    case.b1 *= 3  # so that all three pieces of the function are met
    case.check_every_implementation()


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("gate", GATES)
def test_the_gradient_at_the_kinks_is_torchs(device, dtypes, gate):
    """0 at -3 and 1 at 3; the sides next to them are -0.5 and 1.5."""
    points = [-4.0, -3.0, -2.984375, 0.0, 2.984375, 3.0, 4.0]  # exact in every dtype
    case = make_case(
        (2, 6, 4, 5), len(points), device, DTYPES[dtypes], activation="hardswish", gate=gate
    )
    case.w1.zero_()
    case.b1.copy_(torch.tensor(points))
    found = case.check_every_implementation()
    assert found
    db1 = case.check()["db1"]
    assert (db1[:2] == 0).all() and (db1[2:] != 0).all()


def test_under_transforms_it_is_torchs(device):
    case = make_case((2, 5, 3, 2), 3, device, DTYPES["fp64"], activation="hardswish")

    def slope(fn):
        return torch.func.jacfwd(lambda b1: fn(case.x, case.w1, b1, *case.arguments[3:]))(case.b1)

    def eager(x, w1, b1, w2, b2, activation, gate):
        z = torch.nn.functional.linear(x.mean((2, 3)), w1, b1)
        hidden = z * (z + 3).clamp(0, 6) / 6
        return x * torch.nn.functional.linear(hidden, w2, b2).sigmoid()[:, :, None, None]

    torch.testing.assert_close(slope(squeeze_excite), slope(eager))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(device, backend):
    torch._dynamo.reset()
    case = make_case((2, 6, 4, 5), 3, device, activation="hardswish")
    case.check(torch.compile(squeeze_excite, fullgraph=True, backend=backend))


def test_linear_layers_do_not_have_it(device):
    said = "activation: expected 'identity', 'relu', 'gelu', 'gelu_tanh' or 'silu', got 'hardswish'"
    x, w = torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)
    with pytest.raises(RuntimeError, match=said):
        linear_act(x, w, None, "hardswish")
    with pytest.raises(RuntimeError, match=said):
        linear_act(x.to("meta"), w.to("meta"), None, "hardswish")
    with pytest.raises(ValueError, match=said):
        fusewise.nn.LinearAct(3, 4, activation="hardswish")
    with pytest.raises(ValueError, match=said):
        fusewise.nn.MLP([3, 4, 2], activation="hardswish")
