"""Parts of a module: weights made anew in every call, other layers in their place, hooks."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch import nn
from torch.nn.modules import module as torch_module

import fusewise
from fusewise.models import SpectralShapeAutoencoder
from fusewise.nn import MLP, LinearAct, SqueezeExcitation

# --- the same models in torch's modules alone ----------------------------------------------------


class TorchExcitation(nn.Module):
    def __init__(self, fc1, fc2):
        super().__init__()
        self.fc1, self.fc2 = fc1, fc2

    def forward(self, x):
        return x * self.fc2(F.silu(self.fc1(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


class TorchStack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers[1](F.gelu(self.layers[0](x)))


class TorchAutoencoder(nn.Module):
    def __init__(self, ours):
        super().__init__()
        for name, child in ours.named_children():
            setattr(self, name, child)
        self.global_basis = ours.global_basis

    def forward(self, x):
        slices = F.gelu(self.slice_encoder(x.unflatten(1, (3, 4))))
        basis = F.normalize(self.global_basis, dim=1)
        z = F.gelu(self.bottleneck_mlp(slices.flatten(1) @ basis.T))
        return self.slice_decoder((z @ basis).unflatten(1, (3, 5))).flatten(1)


def pair(kind, device, dtype=torch.float64):
    """A module of ours, the same in torch's modules with copies of its parameters, and an input."""
    where = {"device": device, "dtype": dtype}
    torch.manual_seed(1)
    if kind == "squeeze_excite":
        ours, x = SqueezeExcitation(6, 4, activation="silu", **where), torch.randn(2, 6, 3, 5)
        theirs = TorchExcitation(copy.deepcopy(ours.fc1), copy.deepcopy(ours.fc2))
    elif kind == "mlp":
        ours, x = MLP([6, 8, 4], "gelu", **where), torch.randn(7, 6)
        theirs = TorchStack(copy.deepcopy(ours.layers))
    elif kind == "autoencoder":
        ours, x = SpectralShapeAutoencoder(4, 3, 6, 5, **where), torch.randn(7, 12)
        theirs = TorchAutoencoder(copy.deepcopy(ours))
    else:
        ours, x = LinearAct(6, 4, activation="gelu", **where), torch.randn(7, 6)
        linear = nn.Linear(6, 4, **where)
        linear.load_state_dict(ours.state_dict())
        theirs = nn.Sequential(linear, nn.GELU())
    return ours, theirs, x.to(**where)


PART = {
    "squeeze_excite": "fc2",
    "mlp": "layers.0",
    "autoencoder": "slice_encoder.1",
    "linear_act": "0",
}
HOLDERS = pytest.mark.parametrize("kind", ("squeeze_excite", "mlp", "autoencoder"))


def parts(kind, ours, theirs):
    return ours if kind == "linear_act" else ours.get_submodule(PART[kind]), theirs.get_submodule(
        PART[kind]
    )


def step(model, x):
    """Output and gradients of a training step, which is taken."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    learned = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad.clone() for p in learned]
    with torch.no_grad():
        for parameter in learned:
            parameter -= 0.05 * parameter.grad
    return y.detach(), x.grad, *gradients


def exact(device):
    """The same operators on the same data give the same bits, but for cuDNN's atomics."""
    return {"rtol": 0, "atol": 0} if device == "cpu" else {}


def explained(model, x):
    """Why torch's operators ran, of a forward and a backward record; None where they did not."""
    records = fusewise.explain(model, x)
    whys = {record.why for record in records if record.chosen == "torch"}
    assert len(whys) <= 1 and {r.chosen == "torch" for r in records} == {bool(whys)}
    return whys.pop() if whys else None


# --- weights that are made anew ------------------------------------------------------------------


def pruned(part):
    prune.l1_unstructured(part, "weight", 0.5)


def all_pruned(part):
    prune.l1_unstructured(part, "weight", 0.5)
    prune.l1_unstructured(part, "bias", 0.5)


def older(normalise):
    def apply(part):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            normalise(part)

    return apply


def both_spectral_and_pruned(part):
    nn.utils.spectral_norm(part)
    prune.l1_unstructured(part, "bias", 0.5)


MAKERS = {
    "pruned": pruned,
    "weight and bias pruned": all_pruned,
    "older weight norm": older(nn.utils.weight_norm),
    "weight norm": nn.utils.parametrizations.weight_norm,
    "older spectral norm": nn.utils.spectral_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "older spectral norm, bias pruned": both_spectral_and_pruned,
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("kind", PART)
def test_weights_are_made_anew_in_every_step(device, kind, maker):
    """And gradients reach what they are made from; the spectral norms iterate once a step."""
    ours, theirs, x = pair(kind, device)
    for part in parts(kind, ours, theirs):
        torch.manual_seed(2)
        MAKERS[maker](part)
    for _ in range(3):
        torch.testing.assert_close(step(ours, x), step(theirs, x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    assert explained(ours, x) is None


# --- parts that compute something else -----------------------------------------------------------


class Lora(nn.Module):
    """A wrapper that has the attributes of what it wraps."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(inner.weight.new_ones(()))

    weight = property(lambda self: self.inner.weight)
    bias = property(lambda self: self.inner.bias)

    def forward(self, x):
        return self.inner(x) + self.scale * self.inner(2 * x)


def lora(model, name):
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = Lora(model.get_submodule(name))


def subclass(model, name):
    part = model.get_submodule(name)

    class Doubled(type(part)):
        def forward(self, x):
            return 2 * super().forward(x)

    part.__class__ = Doubled


def convolves_otherwise(model, name):
    part = model.get_submodule(name)

    class Doubled(type(part)):
        def _conv_forward(self, x, weight, bias):
            return 2 * super()._conv_forward(x, weight, bias)

    part.__class__ = Doubled


def forward_of_its_own(model, name):
    part = model.get_submodule(name)
    inner = part.forward
    part.forward = lambda x: 2 * inner(x)


def quantisation_aware(model, name):
    part = model.get_submodule(name)
    parent, _, last = name.rpartition(".")
    qat = nn.qat.Conv2d if isinstance(part, nn.Conv2d) else nn.qat.Linear
    part.qconfig = torch.ao.quantization.get_default_qat_qconfig()
    model.get_submodule(parent)._modules[last] = qat.from_float(part)


def forward_hook(model, name):
    model.get_submodule(name).register_forward_hook(lambda part, x, y: 2 * y)


def forward_pre_hook(model, name):
    model.get_submodule(name).register_forward_pre_hook(lambda part, x: (2 * x[0],))


def hook_beside_pruning(model, name):
    prune.l1_unstructured(model.get_submodule(name), "weight", 0.5)
    forward_pre_hook(model, name)


def backward_hook(model, name):
    model.get_submodule(name).register_full_backward_hook(lambda part, dx, dy: (2 * dx[0],))


def backward_pre_hook(model, name):
    model.get_submodule(name).register_full_backward_pre_hook(lambda part, dy: (2 * dy[0],))


FOREIGN = {
    lora: "Lora, which may compute something else",
    subclass: "Doubled, which may compute something else",
    forward_of_its_own: "overrides forward",
    forward_hook: "has hooks",
    forward_pre_hook: "has hooks",
    hook_beside_pruning: "has hooks",
    backward_hook: "has hooks",
    backward_pre_hook: "has hooks",
}


@pytest.mark.parametrize("change", FOREIGN, ids=lambda change: change.__name__)
@HOLDERS
def test_parts_that_do_more_are_called(device, kind, change):
    ours, theirs, x = pair(kind, device)
    plain = theirs(x)
    for model in (ours, theirs):
        change(model, PART[kind])
    why = explained(ours, x)
    assert why.startswith(PART[kind]) and FOREIGN[change] in why
    for _ in range(2):
        torch.testing.assert_close(step(ours, x), step(theirs, x))
    if "backward" not in change.__name__:
        assert not torch.allclose(ours(x), plain)


@pytest.mark.parametrize("kind", ("mlp", "autoencoder"))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_layers_are_called(kind):
    ours, theirs, x = pair(kind, "cpu", torch.float32)
    ours, theirs = (
        torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear})
        for model in (ours, theirs)
    )
    assert "torch.ao.nn.quantized.dynamic" in explained(ours, x)
    torch.testing.assert_close(ours(x), theirs(x))


def test_convolutions_by_another_method_are_called(device):
    ours, theirs, x = pair("squeeze_excite", device)
    for model in (ours, theirs):
        convolves_otherwise(model, "fc1")
    assert "fc1 is a" in explained(ours, x)
    torch.testing.assert_close(step(ours, x), step(theirs, x))


@HOLDERS
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_that_imitate_quantisation_are_called(kind):
    ours, theirs, x = pair(kind, "cpu", torch.float32)
    for model in (ours, theirs):
        quantisation_aware(model, PART[kind])
    assert "torch.ao.nn.qat" in explained(ours, x)
    torch.testing.assert_close(step(ours, x), step(theirs, x))


@HOLDERS
@pytest.mark.parametrize(
    "register",
    [
        torch_module.register_module_forward_hook,
        torch_module.register_module_forward_pre_hook,
        torch_module.register_module_full_backward_hook,
        torch_module.register_module_full_backward_pre_hook,
    ],
    ids=lambda register: register.__name__,
)
def test_hooks_for_all_modules_see_the_parts(device, kind, register):
    ours, _, x = pair(kind, device)
    seen = []
    handle = register(lambda part, *_: seen.append(part))
    try:
        assert "hooks are registered for all modules" in explained(ours, x)
        step(ours, x)
    finally:
        handle.remove()
    assert ours.get_submodule(PART[kind]) in seen
    assert explained(ours, x) is None


def test_a_hook_on_a_container_runs(device):
    ours, theirs, x = pair("autoencoder", device)
    for model in (ours, theirs):
        forward_hook(model, "slice_decoder")
    assert explained(ours, x).startswith("slice_decoder has hooks")
    torch.testing.assert_close(step(ours, x), step(theirs, x))


def test_another_eps_and_another_part_are_not_missed(device):
    ours, theirs, x = pair("autoencoder", device)
    for model in (ours, theirs):
        model.bottleneck_mlp[0].eps = 0.1
    assert explained(ours, x) == "bottleneck_mlp.0.eps is 0.1, the fused operator has 1e-05"
    torch.testing.assert_close(step(ours, x), step(theirs, x))
    ours, theirs, x = pair("autoencoder", device)
    for model in (ours, theirs):
        model.slice_decoder.append(nn.Tanh())
    assert explained(ours, x) == "slice_decoder has 2 parts, the fused operator needs 1"
    torch.testing.assert_close(step(ours, x), step(theirs, x))


def test_padding_is_not_missed(device):
    """Of an image as large as a padded pixel, which torch's product takes."""
    ours, theirs, _ = pair("squeeze_excite", device)
    for model in (ours, theirs):
        model.fc1.padding = (1, 1)
    x = torch.randn(2, 6, 3, 3, device=device, dtype=torch.float64)
    assert explained(ours, x) == "fc1.padding is (1, 1), the fused operator has (0, 0)"
    torch.testing.assert_close(step(ours, x), step(theirs, x))


def test_submodules_beside_the_parts_do_not_matter(device):
    for kind in ("squeeze_excite", "autoencoder"):
        ours, theirs, x = pair(kind, device)
        ours.extra = nn.Dropout()
        assert explained(ours, x) is None
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("output", ("forward", "encode", "anomaly_score"))
@pytest.mark.parametrize("frames", (False, True), ids=("rows", "frames"))
def test_every_output_of_the_autoencoder(device, output, frames):
    """Called parts that do no more than before give what the operator gives."""
    ours, _, x = pair("autoencoder", device)
    x = x.unflatten(1, (3, 4)) if frames else x
    expected = getattr(ours, output)(x)
    ours.slice_encoder[0].register_forward_hook(lambda *_: None)
    found = getattr(ours, output)(x)
    assert explained(getattr(ours, output), x).startswith("slice_encoder.0 has hooks")
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match=r"^x: expected \[N, 12\] or \[N, 3, 4\], got"):
        getattr(ours, output)(x[:, :-1])


@pytest.mark.parametrize("maker", ("pruned", "older spectral norm", "spectral norm"))
@pytest.mark.parametrize("output", ("forward", "encode", "anomaly_score"))
@pytest.mark.parametrize("forced", ("", "torch"))
def test_a_basis_that_is_made_anew(device, maker, output, forced):
    """In all methods, of which torch runs hooks before one alone."""

    def change(model):
        torch.manual_seed(2)
        if maker == "pruned":
            prune.l1_unstructured(model, "global_basis", 0.5)
        elif maker == "spectral norm":
            nn.utils.parametrizations.spectral_norm(model, "global_basis")
        else:
            nn.utils.spectral_norm(model, "global_basis")

    class Method(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return (self.model if output == "forward" else getattr(self.model, output))(x)

    class Theirs(TorchAutoencoder):
        def forward(self, x):
            slices = F.gelu(self.slice_encoder(x.unflatten(1, (3, 4))))
            basis = F.normalize(self.global_basis, dim=1)
            z = F.gelu(self.bottleneck_mlp(slices.flatten(1) @ basis.T))
            y = self.slice_decoder((z @ basis).unflatten(1, (3, 5))).flatten(1)
            return {"forward": y, "encode": z}.get(output, (y - x).square().mean(1))

    ours, _, x = pair("autoencoder", device)
    theirs = Theirs(copy.deepcopy(ours))
    change(ours)
    change(theirs)
    for _ in range(3):
        with fusewise.implementation(forced):
            found = dict(zip("yx", step(Method(ours), x)[:2], strict=True))
        expected = dict(zip("yx", step(theirs, x)[:2], strict=True))
        torch.testing.assert_close(found, expected)


def test_a_model_that_is_more_than_its_weights_is_not_saved(tmp_path):
    pytest.importorskip("safetensors")
    model = SpectralShapeAutoencoder(4, 3, 6, 5)
    model.slice_decoder.append(nn.Tanh())
    with pytest.raises(TypeError, match="but slice_decoder has 2 parts"):
        model.save_safetensors(tmp_path / "model.safetensors")


@HOLDERS
def test_half_data_beside_float32_parts_that_are_called(device, kind):
    ours, theirs, x = pair(kind, device, torch.float32)
    ours.get_submodule(PART[kind]).register_forward_hook(lambda *_: None)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype):
            expected = theirs(x.to(dtype))
        found = ours(x.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, **exact(device))


@HOLDERS
def test_a_forced_implementation_is_not_ignored(device, kind):
    ours, _, x = pair(kind, device)
    operator = "linear_act" if kind == "mlp" else kind
    ours.get_submodule(PART[kind]).register_forward_hook(lambda *_: None)
    for name in (operator, operator + "_backward"):
        with (
            fusewise.implementation(**{name: "portable"}),
            pytest.raises(RuntimeError, match=f"'portable' was forced, but .*{PART[kind]} has ho"),
        ):
            ours(x)


def test_what_is_said_names_the_part():
    module = MLP([3, 4, 2])
    module.layers[1].register_forward_hook(lambda *_: None)
    with torch.no_grad():
        text = str(fusewise.explain(module, torch.randn(5, 3)))
    assert text == (
        "linear_act forward [5, 3] float32 cpu: torch, because layers.1 has hooks, and the fused "
        "operator would not call them"
    )


# --- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PART)
def test_compiled_modules_are_one_graph(device, kind):
    """With the fused operator in it; with a hook on a part, torch's operators in its place."""
    torch._dynamo.reset()
    ours, theirs, x = pair(kind, device)
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), theirs(x))
    assert len(targets) > 0 and not any("linear" in t and "fusewise" not in t for t in targets)
    with torch.no_grad():
        compiled(x)
    assert any(f"fusewise._{kind}" in target for target in targets)


@HOLDERS
def test_compiled_modules_call_parts_with_hooks(device, kind):
    torch._dynamo.reset()
    ours, theirs, x = pair(kind, device)
    for model in (ours, theirs):
        forward_hook(model, PART[kind])
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled, x), step(theirs, x))
