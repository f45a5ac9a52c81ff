"""Tools that replace every torch.nn.Linear they find leave LinearAct whole."""

import copy

import pytest
import torch
from torch import nn

from fusewise.nn import LinearAct


class LoRA(nn.Module):
    """A low-rank update beside a frozen layer, as the usual libraries put it there."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        y = nn.functional.linear(x, self.base.weight, self.base.bias)
        return y + x @ self.down.T @ self.up.T


def with_lora(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child))
    return model


def quantized(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def test_it_is_no_linear():
    assert not isinstance(LinearAct(3, 2), nn.Linear)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tool", [with_lora, quantized])
def test_the_activation_survives(tool):
    model = nn.Sequential(LinearAct(6, 8, activation="relu"), nn.Linear(8, 8), nn.ReLU()).eval()
    first = copy.deepcopy(model[0])
    changed = tool(model)
    assert type(changed[0]) is LinearAct and type(changed[1]) is not nn.Linear
    x = torch.randn(5, 6)
    assert torch.equal(changed[0](x), first(x)) and (changed[0](x) >= 0).all()
    assert (first(x) == 0).any() and changed(x).shape == (5, 8)
