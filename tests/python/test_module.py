"""fusewise.nn.SqueezeExcitation as a module among others."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fusewise.functional import squeeze_excite
from fusewise.nn import SqueezeExcitation
from reference import eager


class Torchvision(nn.Module):
    """torchvision.ops.SqueezeExcitation, member for member."""

    def __init__(self, channels, reduced, activation=nn.ReLU, scale_activation=nn.Sigmoid):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, reduced, 1)
        self.fc2 = nn.Conv2d(reduced, channels, 1)
        self.activation = activation()
        self.scale_activation = scale_activation()

    def forward(self, x):
        scale = self.activation(self.fc1(self.avgpool(x)))
        return self.scale_activation(self.fc2(scale)) * x


def outputs(module, x):
    x = x.detach().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]


@pytest.mark.parametrize(
    "activation, gate, theirs",
    [
        ("silu", "sigmoid", (nn.SiLU, nn.Sigmoid)),
        ("relu", "sigmoid", (nn.ReLU, nn.Sigmoid)),
        ("relu", "hardsigmoid", (nn.ReLU, nn.Hardsigmoid)),
        ("hardswish", "hardsigmoid", (nn.Hardswish, nn.Hardsigmoid)),
    ],
)
def test_stands_for_torchvisions_module(device, activation, gate, theirs):
    """The same parameters from the same seed, the state dict both ways, the same numbers."""
    torch.manual_seed(3)
    ours = SqueezeExcitation(12, 3, activation, gate, device=device)
    torch.manual_seed(3)
    other = Torchvision(12, 3, *theirs).to(device)
    if device != "cpu":  # another generator than the one that ours used
        other.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(other.state_dict())
    for a, b in zip(ours.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(2, 12, 5, 7, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):  # their convolutions would round to TF32
        torch.testing.assert_close(outputs(ours, x), outputs(other, x))

    again = Torchvision(12, 3, *theirs).to(device)
    again.load_state_dict(ours.state_dict())
    fresh = SqueezeExcitation(12, 3, activation, gate, device=device)
    fresh.load_state_dict(again.state_dict())
    assert torch.equal(fresh(x), ours(x))


def test_the_real_torchvision_module():
    ops = pytest.importorskip("torchvision.ops")
    theirs = ops.SqueezeExcitation(12, 3, nn.SiLU)
    ours = SqueezeExcitation(12, 3, "silu")
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 12, 5, 7)
    torch.testing.assert_close(outputs(ours, x), outputs(theirs, x))


def test_parameters_have_torchvisions_names_and_shapes():
    shapes = {
        name: tuple(p.shape) for name, p in SqueezeExcitation(12, 3, "silu").named_parameters()
    }
    assert shapes == {
        "fc1.weight": (3, 12, 1, 1),
        "fc1.bias": (3,),
        "fc2.weight": (12, 3, 1, 1),
        "fc2.bias": (12,),
    }
    without = SqueezeExcitation(12, 3, "silu", bias=False)
    assert list(without.state_dict()) == ["fc1.weight", "fc2.weight"]
    x = torch.randn(2, 12, 5, 7)
    expected = eager(x, without.fc1.weight, None, without.fc2.weight, None)
    torch.testing.assert_close(without(x), expected)


def test_meta_device_then_real_parameters():
    module = SqueezeExcitation(12, 3, "silu", device="meta", dtype=torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in module.parameters())
    assert module(torch.empty(2, 12, 5, 7, device="meta", dtype=torch.float64)).is_meta
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    expected = SqueezeExcitation(12, 3, "silu", dtype=torch.float64)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def _saved_and_loaded(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies(device, copied):
    module = SqueezeExcitation(12, 3, "relu", "hardsigmoid", device=device)
    x = torch.randn(2, 12, 5, 7, device=device)
    outputs(module, x)
    other = copied(module)
    assert torch.equal(other(x), module(x))
    with torch.no_grad():
        other.fc1.weight.zero_()
    assert module.fc1.weight.any()


def test_to_other_dtypes(device):
    module = SqueezeExcitation(12, 3, "silu", device=device)
    x = torch.randn(2, 12, 5, 7, device=device)
    expected = module(x)
    assert module.double()(x.double()).dtype == torch.float64
    torch.testing.assert_close(module(x.double()), expected.double(), atol=1e-6, rtol=1e-6)
    assert module.half()(x.half()).dtype == torch.float16
    torch.testing.assert_close(module(x.half()).float(), expected, atol=1e-2, rtol=1e-2)
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_to_channels_last(device):
    """Moves the weights' strides too; everything stays right."""
    module = SqueezeExcitation(12, 3, "silu", device=device)
    x = torch.randn(2, 12, 5, 7, device=device)
    expected = outputs(module, x)
    module.to(memory_format=torch.channels_last)
    ours = outputs(module, x.contiguous(memory_format=torch.channels_last))
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours, expected)


def test_training_moves_every_parameter(device):
    module = SqueezeExcitation(12, 3, "silu", device=device)
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.randn(2, 12, 5, 7, device=device)).square().sum().backward()
    optimizer.step()
    assert all((a != b).any() for a, b in zip(before, module.parameters(), strict=True))


def test_frozen_parameters(device):
    module = SqueezeExcitation(12, 3, "silu", device=device).requires_grad_(False)
    x = torch.randn(2, 12, 5, 7, device=device, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and all(p.grad is None for p in module.parameters())


def test_parametrized_weights_are_used(device):
    module = SqueezeExcitation(12, 3, "silu", device=device)
    nn.utils.parametrizations.weight_norm(module.fc1)
    x = torch.randn(2, 12, 5, 7, device=device)
    before = module(x)
    with torch.no_grad():
        module.fc1.parametrizations.weight.original0.mul_(2)
    assert not torch.equal(module(x), before)


def test_repr():
    assert repr(SqueezeExcitation(12, 3, "relu")).splitlines()[:3] == [
        "SqueezeExcitation(",
        "  activation='relu', gate='sigmoid'",
        "  (fc1): Conv2d(12, 3, kernel_size=(1, 1), stride=(1, 1))",
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 3, "silu"), "channels: expected at least 1, got 0"),
        ((12, 0, "silu"), "reduced: expected at least 1, got 0"),
        ((12, -3, "silu"), "reduced: expected at least 1, got -3"),
        ((12, 3, "gelu"), "activation: expected 'silu', 'relu' or 'hardswish', got 'gelu'"),
        ((12, 3, "silu", "tanh"), "gate: expected 'sigmoid' or 'hardsigmoid', got 'tanh'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SqueezeExcitation(*arguments)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"reduced": 2.0}, "reduced: expected a whole number, got 2.0"),
        ({"channels": "8"}, "channels: expected a whole number, got '8'"),
        ({"dtype": torch.int32}, "dtype: expected a floating dtype, got torch.int32"),
    ],
)
def test_arguments_of_another_type_are_named(arguments, said):
    with pytest.raises((TypeError, ValueError), match=f"^{said}"):
        SqueezeExcitation(**{"channels": 8, "reduced": 2, "activation": "silu"} | arguments)


def test_the_activation_has_no_default():
    """The parameters of a relu network load where silu was meant: whoever builds one has to say."""
    said = "^activation: expected 'silu', 'relu' or 'hardswish', got nothing; .* torchvision's"
    with pytest.raises(TypeError, match=said):
        SqueezeExcitation(8, 2)
    with pytest.raises(TypeError, match=said):
        SqueezeExcitation(8, 2, gate="hardsigmoid")
    inputs = torch.ones(1, 4, 2, 2), torch.ones(2, 4), None, torch.ones(4, 2), None
    for call in (squeeze_excite, torch.compile(squeeze_excite, fullgraph=True, backend="eager")):
        with pytest.raises((TypeError, torch._dynamo.exc.Unsupported), match=said[1:]):
            call(*inputs)


def test_a_wrong_number_of_channels_is_xs(device):
    module = SqueezeExcitation(8, 2, "silu", device=device)
    with pytest.raises(RuntimeError, match="^x: expected 8 channels, got 9$"):
        module(torch.ones(2, 9, 3, 3, device=device))
    with pytest.raises(RuntimeError, match=r"^x: expected \[N, C, H, W\]"):
        module(torch.ones(9, 3, 3, device=device))
