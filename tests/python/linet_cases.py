"""LINet in the tests: pairs of a model and its reference, batches, and what a step gives."""

import contextlib

import torch

import fusewise
import linet_reference
from fusewise.bench.accuracy import largest

CLASSES = 7


def build(name="li_resnet18", channels=(3, 1, 1), dtype=torch.float64, momentum=0.1):
    """Our model, small."""
    model = getattr(fusewise.models, name)(channels, num_classes=CLASSES, width=0.125).to(dtype)
    for module in model.modules():
        if isinstance(module, fusewise.nn.LIBatchNorm2d):
            module.momentum = momentum
    return model


def pair(
    name="li_resnet18",
    channels=(3, 1, 1),
    dtype=torch.float64,
    momentum=0.1,
    device="cpu",
    seed=0,
):
    """Our model and the reference with the same weights, all norms away from 1 and 0.

    Seeds what follows too: training amplifies rounding, by how much depends on the batches.
    """
    torch.manual_seed(seed)
    make = getattr(linet_reference, name)
    reference = make(channels, CLASSES, 0.125, momentum).to(device, dtype)
    with torch.no_grad():
        for key, t in reference.state_dict().items():
            if t.dim() == 1 and t.is_floating_point() and key != "fc.bias":
                positive = "weight" in key or key.endswith("var")
                t.uniform_(0.5, 1.5) if positive else t.normal_(std=0.3)
    ours = build(name, channels, dtype, momentum).to(device)
    ours.load_state_dict(reference.state_dict())
    return ours, reference


def images(channels=(3, 1, 1), batch=4, size=(33, 36), dtype=torch.float64, device="cpu"):
    draw = [torch.randn(batch, c, *size, dtype=torch.float64) for c in channels]
    return [x.to(device, dtype) for x in draw]


def statistics(model):
    """Running statistics and counters, by their names in the state dict."""
    parameters = dict(model.named_parameters())
    return {name: t for name, t in model.state_dict().items() if name not in parameters}


def step(model, x, dy, blanked=None):
    """The output, and the gradients of the images and of all parameters, by name.

    A parameter of ours has a gradient even if it was not used; a missing one of the reference is 0.
    """
    x = [image.detach().requires_grad_() for image in x]
    model.zero_grad()
    y = model(*x, blanked=blanked)
    y.backward(dy)
    found = {"y": y.detach()} | {f"dx{i}": image.grad for i, image in enumerate(x)}
    for name, p in model.named_parameters():
        if p.grad is None and isinstance(model, linet_reference.LINet):
            p.grad = torch.zeros_like(p)
        assert p.grad is not None, f"{name} has no gradient"
        found[name] = p.grad.clone()
    return found


def train(model, batches):
    """What each of some training steps gives; the state after the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = {}
    for i, batch in enumerate(batches):
        results = step(model, *batch)
        found |= {f"step {i}: {name}": t for name, t in results.items()}
        optimizer.step()
    return found | {f"after: {name}": t for name, t in model.state_dict().items()}


def assert_equal(ours, reference, rtol=1e-9):
    """Every tensor to `rtol` of its largest value."""
    assert ours.keys() == reference.keys()
    for name, right in reference.items():
        atol = rtol * largest(right) + 1e-3 * rtol
        report = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(ours[name], right, rtol=0, atol=atol, msg=report)


class _Near(Exception):
    pass


@contextlib.contextmanager
def _stops_at_kinks(model, margin):
    """In a `with` block, the reference raises _Near where a ReLU or a max-pool decides by less."""

    def relu(_, inputs):
        (x,) = inputs
        if ((x.abs() < margin) & (x != 0)).any():  # exact zeros are blanked
            raise _Near

    def pool(_, inputs):
        x = torch.nn.functional.pad(inputs[0], (1, 1, 1, 1))
        first, second = x.unfold(2, 3, 2).unfold(3, 3, 2).flatten(-2).topk(2).values.unbind(-1)
        if ((first - second < margin) & (first > 0)).any():
            raise _Near

    hooks = [
        module.register_forward_pre_hook(pool if isinstance(module, torch.nn.MaxPool2d) else relu)
        for module in model.modules()
        if isinstance(module, torch.nn.MaxPool2d | torch.nn.ReLU)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def images_away_from_kinks(reference, draw, margin):
    """Images at which rounding up to `margin` decides nothing in the reference."""
    before = {name: t.clone() for name, t in reference.state_dict().items()}
    for _ in range(100):
        x, blanked = draw()
        with torch.no_grad(), contextlib.suppress(_Near), _stops_at_kinks(reference, margin):
            reference(*x, blanked=blanked)
            reference.load_state_dict(before)
            return x, blanked
        reference.load_state_dict(before)
    raise AssertionError("all images are near a kink")
