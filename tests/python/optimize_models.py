"""Small models with everything that `fusewise.optimize` finds, and times that tests decide."""

import copy

import pytest
import torch
from torch import nn

import fusewise
from fusewise.bench import environment
from fusewise.rewrite import measure
from fusewise.rewrite.measure import Times


class Sizes(dict):
    """µs by contender."""

    def __init__(self, **changed):
        super().__init__(before=100, after=50, parts=70, original=1000, swapped=700)
        self.update(changed)


@pytest.fixture
def inject(monkeypatch):
    """Sets the times that are "measured": `inject(after=99)`. Every call still runs once."""

    def set_times(**changed):
        sizes = Sizes(**changed)
        calls_seen = []

        def sample(calls, buffers, device, effort):
            for call in calls.values():
                call(0)
            calls_seen.append(list(calls))
            return {
                name: Times({measure.WALL: [sizes[name] + 0.01 * i for i in range(15)]})
                for name in calls
            }

        monkeypatch.setattr(measure, "sample", sample)
        monkeypatch.setattr(environment, "load", lambda: 0.0)  # it would wait
        return calls_seen

    set_times()
    return set_times


class Stem(nn.Module):
    """Convolution, norm, activation, pooling and a classifier around some blocks."""

    def __init__(self, *blocks, channels=8, out=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(out, 4)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.blocks(x).mean((2, 3)))


def gated_block(act=nn.SiLU, hidden=nn.SiLU, norm=nn.BatchNorm2d):
    """The middle of an MBConv: convolution, norm and activation in a container, then the gate."""
    ops = pytest.importorskip("torchvision").ops
    layers = ops.Conv2dNormActivation(8, 8, norm_layer=norm, activation_layer=act, inplace=None)
    return nn.Sequential(layers, ops.SqueezeExcitation(8, 4, activation=hidden))


class Head(nn.Module):
    """A linear layer and an activation that follow each other in a forward."""

    def __init__(self, act):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 10), act, nn.Linear(10, 4)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


IMAGE, ROWS = (4, 3, 14, 14), (5, 6)


def shaken(model, seed=0):
    """With parameters and running statistics as after some training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator).to(tensor)
                tensor.add_(0.2 * noise if "running" not in name else 0.1 * noise)
    return model


def draw(shape, **kind):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(**kind)


def names_and_types(model):
    return [(name, type(module)) for name, module in model.named_modules()]


def step(model, x, training):
    """The outputs, gradients and buffers of one step, by name."""
    model.train(training)
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in model.named_parameters():
        found[f"d{name}"], parameter.grad = parameter.grad, None
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_swapped(model, x, expected, training, tolerance=1e-7, **options):
    """`expected` is swapped, by pattern, and computes the same under the same names."""
    before, parameters = copy.deepcopy(model), list(model.parameters())
    new, report = fusewise.optimize(model, x, training=training, **options)
    found = {}
    for row in report.rows:
        assert row.result in ("swapped", "covered", "unsupported"), row
        if row.result == "swapped":
            found[row.pattern] = found.get(row.pattern, 0) + 1
    assert found == expected
    assert names_and_types(model) == names_and_types(before)
    assert report.restore() is model

    mine, theirs = new.state_dict(), before.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert all(a is b for a, b in zip(new.parameters(), parameters, strict=True))
    pairs = zip(new.buffers(), model.buffers(), strict=True)
    assert all(a is b for a, b in pairs)
    assert [m.training for m in new.modules()] == [model.training] * len(list(new.modules()))
    new.load_state_dict(theirs), before.load_state_dict(mine)

    ours = copy.deepcopy(new).double()
    before = before.double()
    for mode in (True, False, True):
        left, right = (step(each, x.double(), mode) for each in (ours, before))
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(
                left[name],
                right[name],
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    return new, report


class Interrupts:
    """Raises at the n-th step that it is told about."""

    def __init__(self, at, error):
        self.left, self.error = at, error

    def start(self, *_):
        if self.left == 0:
            raise self.error
        self.left -= 1

    now = start

    def advance(self):
        self.start()
