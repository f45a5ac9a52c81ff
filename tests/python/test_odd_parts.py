"""Parts of the right class that are set up in another way than the fused operator has it."""

import pytest
import torch
from torch import nn

import fusewise
from fusewise.nn import MLP, SqueezeExcitation

ops = pytest.importorskip("torchvision.ops")


def reason(module, *inputs):
    (record, *_) = fusewise.explain(module, *inputs)
    assert record.chosen == "torch"
    return record.why


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_layer_without_a_bias_among_others(missing):
    mlp = MLP([8, 16, 16, 4])
    mlp.layers[missing].bias = None
    x = torch.randn(3, 8)
    plain = nn.Sequential(mlp.layers[0], nn.ReLU(), mlp.layers[1], nn.ReLU(), mlp.layers[2])
    torch.testing.assert_close(mlp(x), plain(x))
    assert reason(mlp, x).startswith(f"layers.{missing} has no bias")


def test_a_grouped_convolution():
    module = SqueezeExcitation(16, 4, "relu")
    module.fc1 = nn.Conv2d(16, 4, 1, groups=4)
    x = torch.randn(2, 16, 5, 5)
    hidden = module.fc1(x.mean((2, 3), keepdim=True)).relu()
    torch.testing.assert_close(module(x), x * module.fc2(hidden).sigmoid())
    assert reason(module, x).startswith("fc1.groups is 4")


def test_from_module_refuses_an_instance_that_scales_in_its_own_way():
    module = ops.SqueezeExcitation(16, 4)
    module._scale = lambda x: torch.full_like(x[:, :, :1, :1], 3.0)
    with pytest.raises((TypeError, ValueError)):
        SqueezeExcitation.from_module(module)


def test_bias_is_true_or_false():
    with pytest.raises(TypeError, match="^bias: expected True or False, got 'no'"):
        SqueezeExcitation(16, 4, "relu", bias="no")
