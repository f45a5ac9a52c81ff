"""fusewise.nn.LinearAct and fusewise.nn.MLP as modules among others."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import fusewise
from fusewise.nn import MLP, LinearAct
from linear_reference import ACTIVATIONS, eager, eager_mlp
from test_module import _saved_and_loaded, outputs

MODULES = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


def make(kind, device="cpu", **arguments):
    if kind == "linear":
        return LinearAct(6, 4, activation="gelu", device=device, **arguments)
    return MLP([6, 9, 4], "gelu", "relu", device=device, **arguments)


KINDS = pytest.mark.parametrize("kind", ("linear", "mlp"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_linear_stands_for_torchs_module(device, activation, bias):
    """The same parameters from the same seed, the state dict both ways, the same numbers."""
    torch.manual_seed(3)
    ours = LinearAct(6, 4, bias, activation, device=device)
    torch.manual_seed(3)
    theirs = nn.Linear(6, 4, bias, device=device)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    x = torch.randn(2, 5, 6, device=device)
    stack = nn.Sequential(theirs, MODULES[activation]())
    torch.testing.assert_close(outputs(ours, x), outputs(stack, x))

    other = nn.Linear(6, 4, bias, device=device)
    ours.load_state_dict(other.state_dict())
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(outputs(ours, x), outputs(stack, x))


@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_mlp_stands_for_a_list_of_torchs(device, bias):
    torch.manual_seed(3)
    ours = MLP([6, 9, 8, 4], "silu", "relu", bias, device=device)
    torch.manual_seed(3)
    layers = nn.ModuleList(nn.Linear(k, n, bias, device) for k, n in ((6, 9), (9, 8), (8, 4)))
    theirs = nn.Module()
    theirs.layers = layers
    assert list(ours.state_dict()) == list(theirs.state_dict())
    names = [f"layers.{i}.{p}" for i in range(3) for p in ("weight", "bias")[: 1 + bias]]
    assert list(ours.state_dict()) == names
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    stack = nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2], nn.ReLU())
    x = torch.randn(2, 5, 6, device=device)
    torch.testing.assert_close(outputs(ours, x), outputs(stack, x))
    for layer in layers:
        layer.reset_parameters()
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(outputs(ours, x), outputs(stack, x))


def test_defaults():
    one, stack = LinearAct(3, 2), MLP([3, 5, 2])
    assert one.activation == "relu" and one.bias is not None
    assert (stack.activation, stack.final_activation) == ("relu", "identity")
    x = torch.randn(4, 3)
    torch.testing.assert_close(one(x), eager(x, one.weight, one.bias, "relu"))
    weights = [layer.weight for layer in stack.layers]
    biases = [layer.bias for layer in stack.layers]
    torch.testing.assert_close(stack(x), eager_mlp(x, weights, biases))


# --- from existing modules ---------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_from_linear_shares_the_parameters(device, activation):
    linear = nn.Linear(6, 4, device=device, dtype=torch.float64).eval()
    x = torch.randn(3, 6, device=device, dtype=torch.float64)
    for named in (activation, MODULES[activation]()):
        ours = LinearAct.from_linear(linear, named)
        assert ours.weight is linear.weight and ours.bias is linear.bias
        assert ours.activation == activation and not ours.training
        torch.testing.assert_close(ours(x), MODULES[activation]()(linear(x)))
        with torch.no_grad():
            linear.weight.mul_(2)
        torch.testing.assert_close(ours(x), MODULES[activation]()(linear(x)))
    bare = LinearAct.from_linear(nn.Linear(6, 4, bias=False))
    assert bare.bias is None and bare.activation == "relu" and bare.training


def test_from_linear_names_what_it_cannot_take():
    linear = nn.Linear(6, 4)
    with pytest.raises(
        TypeError, match=r"^linear: expected a torch.nn.Linear, got torch.nn.modules.conv.Conv2d"
    ):
        LinearAct.from_linear(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="^activation: expected ReLU, GELU, SiLU or Ident.*Tanh"):
        LinearAct.from_linear(linear, nn.Tanh())
    with pytest.raises(ValueError, match="^activation: expected 'identity'.*got 'tanh'"):
        LinearAct.from_linear(linear, "tanh")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("final", ("identity", "relu", "gelu_tanh"))
def test_from_sequential_shares_the_parameters(device, activation, final):
    modules = nn.Sequential(
        nn.Linear(6, 9),
        MODULES[activation](),
        nn.Linear(9, 8),
        MODULES[activation](),
        nn.Linear(8, 4),
        MODULES[final](),
    )
    modules = modules.to(device).eval()
    ours = MLP.from_sequential(modules)
    assert (ours.activation, ours.final_activation) == (activation, final)
    assert not ours.training
    theirs = dict(modules.named_parameters())
    assert all(a is b for a, b in zip(ours.parameters(), theirs.values(), strict=True))
    x = torch.randn(3, 6, device=device)
    torch.testing.assert_close(outputs(ours, x), outputs(modules, x))


def test_from_sequential_of_one_layer_and_without_bias(device):
    x = torch.randn(3, 6, device=device)
    for modules in (
        nn.Sequential(nn.Linear(6, 4)),
        nn.Sequential(nn.Linear(6, 4), nn.SiLU()),
        nn.Sequential(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 4, bias=False)),
        nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)),
        nn.Sequential(nn.Linear(6, 9), nn.Identity(), nn.GELU(), nn.Linear(9, 4)),
    ):
        modules.to(device)
        torch.testing.assert_close(outputs(MLP.from_sequential(modules), x), outputs(modules, x))


@pytest.mark.parametrize(
    "modules, said",
    [
        ([], "modules: expected at least one Linear"),
        (
            [nn.ReLU(), nn.Linear(2, 2)],
            r"modules\[0\]: expected a Linear before torch.nn.modules.activation.ReLU",
        ),
        (
            [nn.Linear(2, 2), nn.ReLU(), nn.SiLU()],
            r"modules\[2\]: expected a Linear before torch.nn.modules.activation.SiLU",
        ),
        (
            [nn.Linear(2, 2), nn.Dropout()],
            r"modules\[1\]: expected Dropout\(0\), got Dropout\(0.5\), which .* in training",
        ),
        (
            [nn.Linear(2, 2), nn.Dropout1d(0)],
            r"modules\[1\]: expected Linear, .* got torch.nn.modules.dropout.Dropout1d",
        ),
        ([nn.Linear(2, 3), nn.Linear(2, 2)], r"modules\[1\]: expected 3 in_features, got 2"),
        (
            [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.SiLU(), nn.Linear(2, 2)],
            "modules: expected one activation for all layers but the last, got relu, silu",
        ),
        (
            [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False)],
            "modules: expected a bias in all layers or in none",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_from_sequential_names_what_it_cannot_take(modules, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        MLP.from_sequential(nn.Sequential(*modules))


def test_from_sequential_of_something_else():
    with pytest.raises(
        TypeError,
        match=r"^modules: expected a torch.nn.Sequential .*, got torch.nn.modules.linear.Linear$",
    ):
        MLP.from_sequential(nn.Linear(2, 2))


# --- as any module -----------------------------------------------------------------------------


@KINDS
def test_meta_device_then_real_parameters(kind):
    module = make(kind, "meta", dtype=torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in module.parameters())
    y = module(torch.empty(2, 6, device="meta", dtype=torch.float64))
    assert y.is_meta and y.shape == (2, 4)
    y.sum().backward()
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    expected = make(kind, dtype=torch.float64)
    assert all(map(torch.equal, module.parameters(), expected.parameters()))


@KINDS
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies(device, kind, copied):
    module = make(kind, device)
    x = torch.randn(3, 6, device=device)
    outputs(module, x)
    other = copied(module)
    assert torch.equal(other(x), module(x))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in module.parameters())


@KINDS
def test_a_state_dict_through_a_file(kind):
    module, other = make(kind), make(kind)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    x = torch.randn(3, 6)
    assert torch.equal(module(x), other(x))


@KINDS
def test_to_other_dtypes(device, kind):
    module = make(kind, device)
    x = torch.randn(3, 6, device=device)
    expected = module(x)
    assert module.double()(x.double()).dtype == torch.float64
    torch.testing.assert_close(module(x.double()), expected.double(), atol=1e-5, rtol=1e-5)
    assert module.half()(x.half()).dtype == torch.float16
    torch.testing.assert_close(module(x.half()).float(), expected, atol=1e-2, rtol=1e-2)
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert make(kind, device)(x.half()).dtype == torch.float16  # float32 parameters beside half


@KINDS
def test_training_moves_every_parameter(device, kind):
    module = make(kind, device)
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.randn(30, 6, device=device)).square().sum().backward()
    optimizer.step()
    assert all((a != b).any() for a, b in zip(before, module.parameters(), strict=True))


@KINDS
def test_frozen_parameters(device, kind):
    module = make(kind, device).requires_grad_(False)
    x = torch.randn(3, 6, device=device, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and all(p.grad is None for p in module.parameters())


@KINDS
def test_parametrized_weights_are_used(device, kind):
    module = make(kind, device)
    part = module if kind == "linear" else module.layers[0]
    nn.utils.parametrizations.weight_norm(part)
    x = torch.randn(3, 6, device=device)
    before = module(x)
    with torch.no_grad():
        part.parametrizations.weight.original0.mul_(2)
    assert not torch.equal(module(x), before)


@pytest.mark.parametrize("wrap", ["prune", "weight_norm"])
def test_weights_that_a_hook_makes_are_made_anew(device, wrap):
    """By pruning and the older weight norm: before a call of the layer, which there is not."""
    module = make("mlp", device)
    layer = module.layers[0]
    if wrap == "prune":
        torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
        learned = layer.weight_orig
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.nn.utils.weight_norm(layer)
        learned = layer.weight_g
    x = torch.randn(3, 6, device=device)
    before = module(x)
    with torch.no_grad():
        learned.add_(1)
    assert not torch.equal(module(x), before)
    for _ in range(2):  # a tensor that was kept would have lost its graph
        module(x).sum().backward()
    assert learned.grad.any()


def test_wrong_features_of_a_stack():
    with pytest.raises(RuntimeError, match="^x: expected 8 features, got 7"):
        MLP([8, 4, 2])(torch.randn(2, 7))


@KINDS
def test_distributed_data_parallel(device, kind, tmp_path):
    """One process is enough to see that gradients arrive through DDP's hooks."""
    module = make(kind, device)
    x = torch.randn(4, 6, device=device)
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
    )
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(module)
        parallel(x).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close([p.grad for p in module.parameters()], expected)


def test_repr():
    assert repr(LinearAct(6, 4, activation="silu")) == (
        "LinearAct(in_features=6, out_features=4, bias=True, activation='silu')"
    )
    assert repr(MLP([6, 4], "gelu")).splitlines()[:2] == [
        "MLP(",
        "  activation='gelu', final_activation='identity'",
    ]


def test_no_features(device):
    for k, n in ((0, 4), (6, 0)):
        module = LinearAct(k, n, device=device)
        assert module(torch.ones(3, k, device=device)).shape == (3, n)
        stack = MLP([k, n, 2], device=device)
        assert stack(torch.ones(3, k, device=device)).shape == (3, 2)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((-1, 3), "in_features: expected at least 0, got -1"),
        ((3, -1), "out_features: expected at least 0, got -1"),
        ((2.0, 3), "in_features: expected a whole number, got 2.0"),
        ((3, "4"), "out_features: expected a whole number, got '4'"),
        ((3, 4, True, "tanh"), "activation: expected 'identity', .* or 'silu', got 'tanh'"),
        ((3, 4, True, None), "activation: expected 'identity', .* or 'silu', got None"),
        ((3, 4, True, "relu", None, torch.int32), "dtype: expected a floating dtype"),
    ],
    ids=str,
)
def test_bad_arguments_of_linear(arguments, said):
    with pytest.raises((TypeError, ValueError), match=f"^{said}"):
        LinearAct(*arguments)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (([3],), r"sizes: expected a list of at least two, got \[3\]"),
        ((3,), "sizes: expected a list of at least two, got 3"),
        (([3, -1],), r"sizes\[1\]: expected at least 0, got -1"),
        (([3, 4.0],), r"sizes\[1\]: expected a whole number, got 4.0"),
        (([3, 4], "tanh"), "activation: expected 'identity'"),
        (([3, 4], "relu", "softmax"), "final_activation: expected 'identity'"),
        (([3, 4], "relu", "relu", True, None, torch.int32), "dtype: expected a floating dtype"),
    ],
    ids=str,
)
def test_bad_arguments_of_mlp(arguments, said):
    with pytest.raises((TypeError, ValueError), match=f"^{said}"):
        MLP(*arguments)


def test_explain_sees_through_a_model(device):
    model = nn.Sequential(LinearAct(6, 9, device=device), MLP([9, 8, 4], device=device))
    records = fusewise.explain(model, torch.randn(3, 6, device=device))
    assert [r.operator for r in records] == ["linear_act"] * 6


def hooked(kind):
    linear = torch.nn.Linear(4, 3)
    if kind == "hook":
        linear.register_forward_hook(lambda *_: None)
    elif kind == "pruned":
        torch.nn.utils.prune.l1_unstructured(linear, "weight", 0.5)
    elif kind == "spectral norm":
        linear = torch.nn.utils.spectral_norm(linear)
    else:
        linear = torch.nn.utils.parametrizations.weight_norm(linear)
    return linear


@pytest.mark.parametrize("kind", ["hook", "pruned", "spectral norm", "parametrised"])
def test_layers_that_do_more_than_their_product_are_refused(kind):
    """The fused layer would compute something else, silently."""
    linear = hooked(kind)
    with pytest.raises((TypeError, ValueError), match="^linear: "):
        fusewise.nn.LinearAct.from_linear(linear)
    with pytest.raises((TypeError, ValueError), match=r"^modules\[1\]: "):
        fusewise.nn.MLP.from_sequential(torch.nn.Sequential(torch.nn.Linear(2, 4), linear))


class OwnGelu(nn.GELU):
    def forward(self, x):
        return 2 * x


class OwnSequential(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def hook(module, register):
    getattr(module, register)(lambda *_: None)
    return module


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_pre_hook"])
def test_nothing_else_is_dropped(register):
    linear = nn.Linear(4, 3)
    for odd in (OwnGelu(), hook(nn.ReLU(), register)):
        with pytest.raises(ValueError, match="^activation: "):
            LinearAct.from_linear(linear, odd)
        with pytest.raises(ValueError, match=r"^modules\[1\]: "):
            MLP.from_sequential(nn.Sequential(linear, odd))
    for odd in (OwnSequential(linear), hook(nn.Sequential(linear), register)):
        with pytest.raises((TypeError, ValueError), match="^modules: "):
            MLP.from_sequential(odd)
    with pytest.raises(ValueError, match="^linear: has hooks"):
        LinearAct.from_linear(hook(linear, register))


def test_an_activation_is_not_dropped():
    with pytest.raises(
        TypeError, match="^linear: expected a torch.nn.Linear, got fusewise.nn.linear_act"
    ):
        fusewise.nn.LinearAct.from_linear(fusewise.nn.LinearAct(2, 3, activation="gelu"), "relu")


def test_the_order_of_arguments_cannot_be_mistaken():
    """`LinearAct(8, 4, "gelu")` would be a layer with relu, as a text counts as true."""
    with pytest.raises(TypeError, match="^bias: expected True or False, got 'gelu'"):
        fusewise.nn.LinearAct(8, 4, "gelu")
    with pytest.raises(RuntimeError, match="^x: expected 8 features, got 5"):
        fusewise.nn.LinearAct(8, 4)(torch.randn(2, 5))
