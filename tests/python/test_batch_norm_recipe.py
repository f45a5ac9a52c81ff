"""The recipe of docs/batch-norm.md: torchvision's ResNet with fused BatchNorms."""

import copy

import pytest
import torch
from torch import nn

import fusewise
from batch_norm_reference import drawn_batches, kept_bytes, recipe, train
from fusewise.nn import BatchNormAct2d

torchvision = pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def fuse():
    return recipe()["fuse"]


def test_two_training_steps_give_the_same_losses(fuse):
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(num_classes=10).double()
    ours = fuse(copy.deepcopy(theirs))
    kinds = {type(module) for module in ours.modules()}
    assert BatchNormAct2d in kinds and nn.BatchNorm2d not in kinds and nn.MaxPool2d not in kinds
    assert sum(isinstance(module, BatchNormAct2d) for module in ours.modules()) == 53
    assert list(ours.state_dict()) == list(theirs.state_dict())
    batches = drawn_batches(2, (4, 3, 48, 48), dtype=torch.float64)
    assert train(ours, batches) == pytest.approx(train(theirs, batches), rel=1e-8)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-8)
    ours.eval(), theirs.eval()
    x = batches[0][0]
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))
        assert {record.operator for record in fusewise.explain(ours, x)} == {
            "batch_norm_act",
            "batch_norm_act_pool",
        }


def test_twenty_training_steps_of_a_smaller_resnet(fuse):
    """ResNet-50 itself: tests/gpu."""
    torch.manual_seed(0)
    resnet = torchvision.models.resnet
    theirs = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=10).double()
    ours = fuse(copy.deepcopy(theirs))
    batches = drawn_batches(20, (8, 3, 32, 32), dtype=torch.float64)
    losses = train(theirs, batches)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert train(ours, batches) == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_less_is_kept_for_backward(fuse, layout):
    """Both keep the input of each norm and of each convolution. Torch also keeps the stem before
    its max-pool and the places of its values, ours a bit per value of a sum."""
    theirs = torchvision.models.resnet50(num_classes=10).to(memory_format=layout)
    x = torch.randn(2, 3, 64, 64).to(memory_format=layout)
    found = []
    for model in (theirs, fuse(copy.deepcopy(theirs))):
        known = (*model.parameters(), *model.buffers())
        found.append(kept_bytes(lambda model=model: model(x), known))
    assert found[1] < 0.96 * found[0]


def test_the_fused_model_is_an_ordinary_module(fuse):
    torch.manual_seed(0)
    ours = fuse(torchvision.models.resnet50(num_classes=3)).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(ours)(x), ours(x))
    plain = torchvision.models.resnet50(num_classes=3).eval()
    plain.load_state_dict(ours.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-4)
