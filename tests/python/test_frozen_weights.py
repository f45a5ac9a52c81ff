"""Frozen weights of linear_act and x in every layout: dx alone, right, and laid out as x."""

import pytest
import torch

from fusewise.functional import linear_act
from linear_reference import LAYOUTS, make_case
from reference import assert_close


@pytest.mark.parametrize("layout", [*LAYOUTS, "leading"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "identity"])
def test_the_gradient_of_x_beside_a_frozen_weight(device, layout, activation):
    case = make_case((4, 6), 5, 9, device, activation=activation)
    if layout == "leading":  # the batch inside: leading dimensions that cannot be walked as one
        case.x = case.x.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        case.x = LAYOUTS[layout](case.x)
    eager = case.expected()
    x = case.x.detach().requires_grad_()
    y = linear_act(x, case.w, case.b, activation)
    (dx,) = torch.autograd.grad(y, x, case.dy)
    assert_close("dx", dx, eager.outputs["dx"], *eager.expected["dx"])
    assert dx.stride() == torch.empty_like(case.x).stride()
