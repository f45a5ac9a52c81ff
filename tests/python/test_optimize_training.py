"""A short training with the swaps of `fusewise.optimize` has the losses of one without them."""

import copy

import pytest
import torch
from torch import nn

import fusewise
from fusewise.nn import MLP, BatchNormAct2d
from optimize_models import inject

__all__ = ["inject"]

STEPS, CLASSES, SIZE = 6, 4, 32

FUSED = {"resnet18": BatchNormAct2d, "mobilenet_v3_small": BatchNormAct2d, "vit": MLP}


@pytest.fixture(autouse=True)
def _exact_convolutions():
    """TF32, and sums in another order each time, would be more noise than a wrong gradient."""
    cudnn = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.deterministic
    cudnn.conv.fp32_precision, cudnn.deterministic = "ieee", True
    yield
    cudnn.conv.fp32_precision, cudnn.deterministic = before


class Wrong(torch.autograd.Function):
    """Its gradient is off by 5 %."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 1.05 * gradient


def losses(model, x, labels):
    """Of each step, with a copy of the model."""
    model = model.train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(3)  # for dropout
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    optimizer.zero_grad()
    model.load_state_dict(before)
    return torch.tensor(found, dtype=torch.float64)


def rounded(model, seed):
    """A copy, each of whose parameters is off by one rounding error."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1
        with torch.no_grad():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs.to(parameter))
    return model


def made(name):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    if name == "vit":
        model = torchvision.models.VisionTransformer(SIZE, 8, 2, 2, 32, 64, num_classes=CLASSES)
        nn.init.normal_(model.heads.head.weight, std=0.1)  # torchvision's is 0
        return model
    return torchvision.models.get_model(name, num_classes=CLASSES)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("resnet18", torch.float32),
        ("mobilenet_v3_small", torch.float32),
        ("mobilenet_v3_small", torch.float64),
        ("vit", torch.float32),
        ("vit", torch.float64),
    ],
    ids=str,
)
def test_losses_stay_within_what_rounding_changes(inject, few_threads, device, name, dtype):
    """And leave that range if one gradient is wrong by 5 %."""
    model = made(name).to(device, dtype)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8, 3, SIZE, SIZE, generator=generator, dtype=torch.float64).to(device, dtype)
    labels = torch.arange(8, device=device) % CLASSES

    optimized, report = fusewise.optimize(model, x, training=True)
    assert report.swapped and report.returned == "swapped"
    theirs, ours = losses(model, x, labels), losses(optimized, x, labels)
    others = torch.stack([losses(rounded(model, seed), x, labels) for seed in range(3)])
    noise = (others - theirs).abs().amax(0).cummax(0).values
    allowed = 4 * noise + 8 * torch.finfo(dtype).eps * theirs.abs()
    learned = theirs[0] - theirs.min()
    fused = [each for each in optimized.modules() if type(each) is FUSED[name]]
    hook = fused[len(fused) // 2].register_forward_pre_hook(
        lambda _, inputs: (Wrong.apply(inputs[0]), *inputs[1:])
    )
    wrong = losses(optimized, x, labels)
    hook.remove()
    assert learned > 0.1
    assert ((ours - theirs).abs() <= allowed).all()
    assert ((wrong - theirs).abs() > allowed).any()
