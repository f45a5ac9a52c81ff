"""A short training with the swaps of `fusewise.optimize` has the losses of one without them."""

import copy

import pytest
import torch
from torch import nn

import fusewise
from optimize_models import inject

__all__ = ["inject"]

STEPS, CLASSES = 8, 4


def losses(model, x, labels):
    """Of each step, with a copy of the model."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(3)  # for dropout
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


def rounded(model, seed):
    """A copy, each of whose parameters is off by one rounding error."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1
        with torch.no_grad():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs.to(parameter))
    return model


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit"])
def test_losses_stay_within_what_rounding_changes(inject, few_threads, device, name):
    torchvision = pytest.importorskip("torchvision")
    if name == "vit":
        model = torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=CLASSES)
        nn.init.normal_(model.heads.head.weight, std=0.02)  # torchvision's is 0
    else:
        model = getattr(torchvision.models, name)(num_classes=CLASSES)
    model = model.to(device).train()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8, 3, 64, 64, generator=generator).to(device)
    labels = torch.arange(8, device=device) % CLASSES

    optimized, report = fusewise.optimize(model, x, training=True)
    assert report.swapped and report.returned == "swapped"
    theirs, ours = losses(model, x, labels), losses(optimized, x, labels)
    others = torch.stack([losses(rounded(model, seed), x, labels) for seed in range(3)])
    noise = (others - theirs).abs().amax(0).cummax(0).values
    learned = theirs[0] - theirs[-1]
    print(theirs, ours-theirs, noise)
    assert learned > 0.5 and noise[-1] < 0.1 * learned
    assert ((ours - theirs).abs() <= 4 * noise + 1e-6).all()
