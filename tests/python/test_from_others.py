"""Modules of torchvision and timm that ours take over: the same numbers on the same parameters."""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from fusewise.bench.families.squeeze_excite import expected
from fusewise.nn import MLP, SqueezeExcitation
from reference import assert_close

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
from timm.layers import activations, activations_me, mlp, squeeze_excite  # noqa: E402
from timm.models import _efficientnet_blocks as efficientnet  # noqa: E402
from timm.models import senet  # noqa: E402
from torchvision.models.quantization.mobilenetv3 import QuantizableSqueezeExcitation  # noqa: E402
from torchvision.ops import SqueezeExcitation as Torchvisions  # noqa: E402

NAMES = ("y", "dx", "dw1", "db1", "dw2", "db2")


def results(module, x, dy, convolutions):
    """y and the gradients by x and by the parameters of the two convolutions, by name."""
    x = x.detach().requires_grad_()
    y = module(x)
    inputs = [x, *(t for c in convolutions for t in (c.weight, c.bias))]
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, inputs, dy)), strict=True))


def assert_same(theirs, fc1, fc2, activation, gate, side=5):
    """Ours from theirs: parameters, mode, numbers."""
    before = copy.deepcopy(theirs)
    ours = SqueezeExcitation.from_module(theirs)
    assert (ours.activation, ours.gate) == (activation, gate)
    assert ours.training == theirs.training
    assert [name for name, _ in ours.named_parameters()] == [
        f"{part}.{kind}" for part in ("fc1", "fc2") for kind in ("weight", "bias")
    ]
    mine = [ours.fc1.weight, ours.fc1.bias, ours.fc2.weight, ours.fc2.bias]
    shared = [fc1.weight, fc1.bias, fc2.weight, fc2.bias]
    assert all(a is b for a, b in zip(mine, shared, strict=True))
    for name, value in before.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value)

    like = fc1.weight
    x = torch.randn(3, fc1.in_channels, side, side, dtype=like.dtype, device=like.device)
    dy = torch.randn_like(x)
    with torch.backends.cudnn.flags(allow_tf32=False):
        right = expected(x, *shared, dy, activation, gate)
        found, eager = (results(module, x, dy, (fc1, fc2)) for module in (ours, theirs))
    for name in NAMES:
        assert_close(name, found[name], eager[name], *right[name])


def inside(model, kind):
    found = [module for module in model.modules() if type(module) is kind]
    assert found
    return found


# --- Squeeze-and-Excitation in whole models -----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name, functions",
    [
        ("mobilenet_v3_small", ("relu", "hardsigmoid")),
        ("efficientnet_b0", ("silu", "sigmoid")),
    ],
)
def test_torchvisions_models(device, name, functions, dtype):
    model = torchvision.models.get_model(name).to(device, dtype).eval()
    for module in inside(model, Torchvisions)[:4]:
        assert_same(module, module.fc1, module.fc2, *functions)


@pytest.mark.parametrize(
    "name, kind, functions",
    [
        ("mobilenetv3_small_050", efficientnet.SqueezeExcite, {("relu", "hardsigmoid")}),
        ("efficientnet_b0", efficientnet.SqueezeExcite, {("silu", "sigmoid")}),
        (
            "mobilenetv3_rw",
            efficientnet.SqueezeExcite,
            {("relu", "hardsigmoid"), ("hardswish", "hardsigmoid")},
        ),
        ("seresnet18", squeeze_excite.SEModule, {("relu", "sigmoid")}),
        ("legacy_seresnet18", senet.SEModule, {("relu", "sigmoid")}),
    ],
)
def test_timms_models(device, name, kind, functions):
    model = timm.create_model(name).to(device)
    seen = set()
    for module in inside(model, kind):
        ours = SqueezeExcitation.from_module(module)
        found = ours.activation, ours.gate
        if found not in seen:
            reduced = getattr(module, "conv_reduce", None) or module.fc1
            expanded = getattr(module, "conv_expand", None) or module.fc2
            assert_same(module, reduced, expanded, *found)
        seen.add(found)
    assert seen == functions


def test_a_whole_model_computes_the_same(device):
    """Every Squeeze-and-Excitation of a trained-like model replaced in place, weights kept."""
    model = timm.create_model("mobilenetv3_small_050", num_classes=7).to(device).eval()
    theirs = copy.deepcopy(model)
    parameters = list(model.parameters())
    for block in list(model.modules()):
        for name, child in block.named_children():
            if isinstance(child, efficientnet.SqueezeExcite):
                setattr(block, name, SqueezeExcitation.from_module(child))
    assert inside(model, SqueezeExcitation)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    x = torch.randn(2, 3, 64, 64, device=device)
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        torch.testing.assert_close(model(x), theirs(x), atol=1e-4, rtol=1e-4)


def test_the_recipe_of_the_documentation_keeps_the_weights():
    page = Path(__file__).parents[2] / "docs" / "profiling.md"
    if not page.is_file():
        pytest.skip("there is no documentation here")
    (sample,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    names = {}
    exec(sample, names)
    torch.manual_seed(0)
    ours = names["net"]().eval()
    torch.manual_seed(0)
    theirs = torchvision.models.efficientnet_b0().eval()
    assert len(inside(ours, SqueezeExcitation)) == len(inside(theirs, Torchvisions))
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)
    state = theirs.state_dict()
    assert all(torch.equal(value, state.pop(name)) for name, value in ours.state_dict().items())
    assert not state


# --- Squeeze-and-Excitation, one by one ---------------------------------------------------------


@pytest.mark.parametrize(
    "act, activation",
    [
        (nn.ReLU, "relu"),
        (nn.SiLU, "silu"),
        (nn.Hardswish, "hardswish"),
        (activations.Swish, "silu"),
        (activations.HardSwish, "hardswish"),
        (activations_me.SwishMe, "silu"),
        (activations_me.HardSwishMe, "hardswish"),
    ],
)
@pytest.mark.parametrize(
    "gate_layer, gate",
    [
        (nn.Sigmoid, "sigmoid"),
        (nn.Hardsigmoid, "hardsigmoid"),
        (activations.Sigmoid, "sigmoid"),
        (activations.HardSigmoid, "hardsigmoid"),
        (activations_me.HardSigmoidMe, "hardsigmoid"),
    ],
)
def test_functions_of_torch_and_timm(device, act, activation, gate_layer, gate):
    theirs = efficientnet.SqueezeExcite(12, act_layer=act, gate_layer=gate_layer, device=device)
    assert_same(theirs, theirs.conv_reduce, theirs.conv_expand, activation, gate)
    theirs = squeeze_excite.SEModule(12, 0.5, act_layer=act, gate_layer=gate_layer, device=device)
    assert_same(theirs, theirs.fc1, theirs.fc2, activation, gate)


def test_mode_and_frozen_parameters_stay(device):
    theirs = Torchvisions(12, 3, nn.SiLU).to(device).eval()
    theirs.fc1.weight.requires_grad_(False)
    ours = SqueezeExcitation.from_module(theirs)
    assert not ours.training and not ours.fc1.weight.requires_grad and ours.fc2.weight.requires_grad
    assert SqueezeExcitation.from_module(theirs.train()).training
    assert ours.fc1.weight.device == theirs.fc1.weight.device
    without = squeeze_excite.SEModule(12, bias=False, device=device)
    assert SqueezeExcitation.from_module(without).fc1.bias is None


def test_a_subclass_that_computes_the_same():
    class Named(Torchvisions):
        pass

    class Odd(Torchvisions):
        def _scale(self, x):
            return 2 * super()._scale(x)

    assert SqueezeExcitation.from_module(Named(12, 3)).activation == "relu"
    with pytest.raises(TypeError, match="^module: expected one of torchvision.* got .*Odd$"):
        SqueezeExcitation.from_module(Odd(12, 3))


def replaced(module, **parts):
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


def own_forward(module):
    module.forward = lambda x: x
    return module


SE = squeeze_excite.SEModule


@pytest.mark.parametrize(
    "module, kind, said",
    [
        (
            lambda: squeeze_excite.EffectiveSEModule(8),
            TypeError,
            r"module: timm\.layers\.squeeze_excite\.EffectiveSEModule has one convolution \(fc\)",
        ),
        (
            lambda: squeeze_excite.SqueezeExciteCl(8),
            TypeError,
            r"module: timm\.layers\.squeeze_excite\.SqueezeExciteCl has the channels in the last",
        ),
        (
            lambda: SE(8, add_maxpool=True),
            ValueError,
            "module.add_maxpool: expected False, got True; the fused operator pools by the mean",
        ),
        (
            lambda: replaced(Torchvisions(8, 2), avgpool=nn.AdaptiveMaxPool2d(1)),
            ValueError,
            r"module.avgpool: expected AdaptiveAvgPool2d\(1\), got .*AdaptiveMaxPool2d",
        ),
        (
            lambda: replaced(Torchvisions(8, 2), avgpool=nn.AdaptiveAvgPool2d(2)),
            ValueError,
            r"module.avgpool: .*, got AdaptiveAvgPool2d\(output_size=2\)",
        ),
        (
            lambda: SE(8, norm_layer=nn.BatchNorm2d),
            ValueError,
            "module.bn: expected Identity, got torch.nn.modules.batchnorm.BatchNorm2d",
        ),
        (
            lambda: SE(8, act_layer=nn.Tanh),
            ValueError,
            "module.act: expected ReLU, SiLU or Hardswish, got torch.nn.modules.activation.Tanh",
        ),
        (
            lambda: SE(8, gate_layer=nn.Tanh),
            ValueError,
            "module.gate: expected Sigmoid or Hardsigmoid, got torch.nn.modules.activation.Tanh",
        ),
        (
            lambda: replaced(SE(8), fc1=nn.Conv2d(8, 8, 3, padding=1)),
            ValueError,
            "module.fc1: expected kernel 1x1, .*got Conv2d",
        ),
        (
            lambda: replaced(SE(8), fc2=nn.Conv2d(8, 16, 1)),
            ValueError,
            "module.fc2: expected 8 channels to 8, got 8 to 16",
        ),
        (
            lambda: replaced(SE(8), fc1=nn.Linear(8, 8)),
            TypeError,
            "module.fc1: expected a torch.nn.Conv2d, got torch.nn.modules.linear.Linear",
        ),
        (
            lambda: QuantizableSqueezeExcitation(8, 2),
            TypeError,
            "module: expected one of .*got torchvision.models.quant.*QuantizableSqueezeExcitation",
        ),
        (
            lambda: SqueezeExcitation(8, 2, "relu"),
            TypeError,
            "module: expected one of .*got fusewise.nn.squeeze_excitation.SqueezeExcitation",
        ),
        (lambda: nn.ReLU(), TypeError, "module: .*got torch.nn.modules.activation.ReLU"),
    ],
    ids=lambda value: value[:45] if isinstance(value, str) else "",
)
def test_what_ours_does_not_compute_is_refused_by_name(module, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        SqueezeExcitation.from_module(module())


@pytest.mark.parametrize(
    "odd, name",
    [
        (hooked, "module"),
        (own_forward, "module"),
        (lambda m: hooked(m.fc1) and m, "module.fc1"),
        (lambda m: hooked(m.act) and m, "module.act"),
        (lambda m: hooked(m.gate) and m, "module.gate"),
        (lambda m: own_forward(m.fc2) and m, "module.fc2"),
        (lambda m: nn.utils.prune.l1_unstructured(m.fc1, "weight", 0.5) and m, "module.fc1"),
        (lambda m: nn.utils.spectral_norm(m.fc2) and m, "module.fc2"),
        (lambda m: nn.utils.parametrizations.weight_norm(m.fc2) and m, "module.fc2"),
    ],
)
def test_hooks_and_parametrisations_are_refused(odd, name):
    with pytest.raises(ValueError, match=f"^{name}: (has hooks or paramet|overrides forward)"):
        SqueezeExcitation.from_module(odd(squeeze_excite.SEModule(8)))


# --- stacks of linear layers --------------------------------------------------------------------


def assert_same_stack(theirs, activation, device, dtype):
    theirs = theirs.to(device, dtype)
    ours = MLP.from_sequential(theirs)
    assert (ours.activation, ours.final_activation) == (activation, "identity")
    assert ours.training == theirs.training
    mine, shared = list(ours.parameters()), list(theirs.parameters())
    assert all(a is b for a, b in zip(mine, shared, strict=True))
    x = torch.randn(3, 5, shared[0].shape[1], device=device, dtype=dtype, requires_grad=True)
    found, right = ([y := module(x), *torch.autograd.grad(y.square().sum(), (x, *shared))]
                    for module in (ours, theirs))  # fmt: skip
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "make, activation",
    [
        (lambda: mlp.Mlp(12, 20), "gelu"),
        (lambda: mlp.Mlp(12, 20, 8, act_layer=nn.ReLU).eval(), "relu"),
        (lambda: mlp.Mlp(12, 20, act_layer=partial(nn.GELU, approximate="tanh")), "gelu_tanh"),
        (lambda: mlp.Mlp(12, 20, act_layer=activations.GELU), "gelu"),
        (lambda: mlp.Mlp(12, 20, act_layer=activations.GELUTanh), "gelu_tanh"),
        (lambda: mlp.Mlp(12, 20, act_layer=activations.Swish), "silu"),
        (lambda: mlp.Mlp(12, 20, act_layer=nn.SiLU, bias=False), "silu"),
        (lambda: torchvision.ops.MLP(12, [20, 16, 8]), "relu"),
        (lambda: torchvision.models.vision_transformer.MLPBlock(12, 20, 0.0).eval(), "gelu"),
        (lambda: nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Dropout(0), nn.Linear(20, 8)),
         "relu"),
    ],
)  # fmt: skip
def test_stacks_of_torchvision_and_timm(device, make, activation, dtype):
    assert_same_stack(make(), activation, device, dtype)


def test_the_stack_of_a_vision_transformer(device):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    assert_same_stack(inside(model, mlp.Mlp)[0], "gelu", device, torch.float32)


def mlp_with(**parts):
    return replaced(mlp.Mlp(8, 4), **parts)


@pytest.mark.parametrize(
    "module, kind, said",
    [
        (
            lambda: mlp.Mlp(8, 4, drop=0.1).eval(),
            ValueError,
            r"modules.drop1: expected Dropout\(0\), got Dropout\(0.1\), which .* set p to 0",
        ),
        (
            lambda: torchvision.models.vision_transformer.MLPBlock(8, 4, 0.25),
            ValueError,
            r"modules\[2\]: expected Dropout\(0\), got Dropout\(0.25\)",
        ),
        (
            lambda: mlp.Mlp(8, 4, norm_layer=nn.LayerNorm),
            ValueError,
            "modules.norm: expected Linear, .* got torch.nn.modules.normalization.LayerNorm",
        ),
        (
            lambda: mlp.Mlp(8, 4, use_conv=True),
            ValueError,
            "modules.fc1: expected Linear, .* got torch.nn.modules.conv.Conv2d",
        ),
        (
            lambda: torchvision.ops.MLP(8, [4, 4], nn.LayerNorm),
            ValueError,
            r"modules\[1\]: .* got torch.nn.modules.normalization.LayerNorm",
        ),
        (
            lambda: mlp.Mlp(8, 4, act_layer=nn.Tanh),
            ValueError,
            "modules.act: .* got torch.nn.modules.activation.Tanh",
        ),
        (
            lambda: mlp.Mlp(8, 4, bias=(True, False)),
            ValueError,
            "modules: expected a bias in all layers or in none",
        ),
        (
            lambda: mlp.GluMlp(8, 4),
            TypeError,
            "modules: expected a torch.nn.Sequential or .* got timm.layers.mlp.GluMlp",
        ),
        (lambda: hooked(mlp.Mlp(8, 4)), ValueError, "modules: has hooks"),
        (lambda: mlp_with(drop1=hooked(nn.Dropout(0))), ValueError, "modules.drop1: has hooks"),
        (lambda: own_forward(mlp.Mlp(8, 4)), ValueError, "modules: overrides forward"),
        (
            lambda: mlp_with(fc1=nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))),
            ValueError,
            "modules.fc1: has hooks or parametrisations",
        ),
    ],
    ids=lambda value: value[:45] if isinstance(value, str) else "",
)
def test_stacks_that_compute_something_else_are_refused_by_name(module, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        MLP.from_sequential(module())
