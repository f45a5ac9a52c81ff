"""The recipe of docs/batch-norm.md: torchvision's ResNet with fused BatchNorms."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fusewise
from fusewise.nn import BatchNormAct2d

torchvision = pytest.importorskip("torchvision")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "batch-norm.md"


@pytest.fixture(scope="module")
def recipe():
    """What the code of the page defines."""
    (code,) = re.findall(r"## A ResNet in 20 lines.*?```python\n(.*?)```", PAGE.read_text(), re.S)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 26, "about 20 lines, and the imports"
    names = {"__name__": "recipe"}
    exec(compile(code, PAGE.name, "exec"), names)
    return names


def train(model, x, labels, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_two_training_steps_give_the_same_losses(recipe):
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(num_classes=10).double()
    ours = recipe["fuse"](copy.deepcopy(theirs))
    kinds = {type(module) for module in ours.modules()}
    assert BatchNormAct2d in kinds and nn.BatchNorm2d not in kinds and nn.MaxPool2d not in kinds
    assert sum(isinstance(module, BatchNormAct2d) for module in ours.modules()) == 53
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x, labels = torch.randn(4, 3, 48, 48, dtype=torch.float64), torch.randint(10, (4,))
    assert train(ours, x, labels) == pytest.approx(train(theirs, x, labels), rel=1e-8)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-8)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))
        assert {record.operator for record in fusewise.explain(ours, x)} == {
            "batch_norm_act",
            "batch_norm_act_pool",
        }


def test_the_fused_model_is_an_ordinary_module(recipe):
    torch.manual_seed(0)
    ours = recipe["fuse"](torchvision.models.resnet50(num_classes=3)).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(ours)(x), ours(x))
    plain = torchvision.models.resnet50(num_classes=3).eval()
    plain.load_state_dict(ours.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-4)
