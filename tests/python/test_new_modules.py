"""What modules are made with: sizes that are numbers, and a basis that is drawn."""

import pytest
import torch

from fusewise.models import SpectralShapeAutoencoder
from fusewise.nn import MLP, LinearAct, SqueezeExcitation


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: LinearAct(value, 3),
        lambda value: LinearAct(3, value),
        lambda value: MLP([3, value]),
        lambda value: SqueezeExcitation(value, 2, activation="silu"),
        lambda value: SqueezeExcitation(8, value, activation="silu"),
        lambda value: SpectralShapeAutoencoder(frames=value),
    ],
)
def test_true_and_false_are_no_sizes(make, value):
    with pytest.raises(TypeError, match=f": expected a whole number, got {value}"):
        make(value)


def test_the_basis_is_drawn_from_a_normal_distribution():
    """10 240 values: their mean and deviation are off by 1 % or so."""
    module = SpectralShapeAutoencoder()
    before = module.global_basis.detach().clone()
    module.reset_parameters()
    for basis in (before, module.global_basis.detach()):
        assert abs(basis.mean()) < 0.05 and abs(basis.std() - 1) < 0.05
    assert not torch.equal(before, module.global_basis)
