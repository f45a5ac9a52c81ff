"""`fusewise.implementation("torch")`: every operator as plain torch operators, for tools that see
nothing else; and what these tools say outside of it."""

import importlib.util
import io
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewise
from fusewise._settings import OPERATORS, settings
from fusewise.functional import linear_act, mlp, squeeze_excite
from fusewise.models import SpectralShapeAutoencoder
from fusewise.nn import SqueezeExcitation
from linear_reference import ACTIVATIONS, eager, eager_mlp
from test_parts import PART, exact, pair, step

KINDS = pytest.mark.parametrize("kind", PART)
HALF = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of the operators that run."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(str(operator))
        return operator(*args, **kwargs or {})

    def any_of_ours(self):
        return any("fusewise" in name for name in self.seen)


# --- what is forced ----------------------------------------------------------------------


def test_one_name_is_for_all_operators():
    with fusewise.implementation("torch"):
        assert {getattr(settings, operator) for operator in OPERATORS} == {"torch"}
        with fusewise.implementation():
            assert {getattr(settings, operator) for operator in OPERATORS} == {""}
        with fusewise.implementation("", squeeze_excite="portable"):
            assert settings.squeeze_excite == "portable" and settings.linear_act == "torch"
        with fusewise.implementation("portable", linear_act="torch"):
            assert settings.squeeze_excite == "portable" and settings.linear_act == "torch"
            assert settings.linear_act_backward == "torch"
        with fusewise.implementation("torch", linear_act="portable"):
            assert settings.squeeze_excite == "torch" and settings.linear_act == "portable"
            assert settings.linear_act_backward == ""
    assert {getattr(settings, operator) for operator in OPERATORS} == {""}


@pytest.mark.parametrize("named", ("squeeze_excite", "squeeze_excite_backward"))
def test_torch_is_for_both_directions(named):
    directions = ("squeeze_excite", "squeeze_excite_backward")
    with fusewise.implementation(**{named: "torch"}):
        assert [getattr(settings, each) for each in directions] == ["torch", "torch"]
        assert settings.linear_act == ""
        with fusewise.implementation(**{named: "portable"}):
            values = {each: getattr(settings, each) for each in directions}
            assert values == {**dict.fromkeys(directions, ""), named: "portable"}
        assert [getattr(settings, each) for each in directions] == ["torch", "torch"]
    with pytest.raises(
        ValueError, match="'torch' and squeeze_excite.* 'portable'.* set both to 'torch' or neither"
    ):
        other = next(each for each in directions if each != named)
        fusewise.implementation(**{named: "torch", other: "portable"})


def test_the_name_is_checked():
    with pytest.raises(
        TypeError, match="^implementation: expected a name for every operator, got 3"
    ):
        fusewise.implementation(3)
    with pytest.raises(ValueError, match="no operator is named 'name'"):
        fusewise.implementation(name="torch")


@KINDS
def test_an_unknown_name_is_told_of_torch(device, kind):
    ours, _, x = pair(kind, device)
    with (
        fusewise.implementation("magic"),
        pytest.raises(
            RuntimeError, match="there is none named 'magic'; .*; 'torch' would take it$"
        ),
    ):
        ours(x)


@KINDS
def test_explain_knows_it(device, kind):
    ours, _, x = pair(kind, device)
    with fusewise.implementation("torch"):
        records = fusewise.explain(ours, x)
    assert [(r.direction, r.chosen, r.why) for r in records] == [
        ("forward", "torch", ""),
        ("backward", "torch", ""),
    ]
    assert fusewise.explain(ours, x)[0].chosen != "torch"


# --- what is computed ----------------------------------------------------------------------


@KINDS
@DTYPES
def test_modules_compute_what_torchs_do(device, kind, dtype):
    ours, theirs, x = pair(kind, device, dtype)
    with fusewise.implementation("torch"), Calls() as calls:
        found = step(ours, x)
    assert not calls.any_of_ours()
    torch.testing.assert_close(found, step(theirs, x), **exact(device))


@KINDS
@HALF
@pytest.mark.parametrize("x_dtype", ("half", "float32"))
def test_autocast_is_torchs(device, kind, dtype, x_dtype):
    """The bits, and the dtype, of the modules that the operators stand for."""
    ours, theirs, x = pair(kind, device, torch.float32)
    x = x.to(dtype) if x_dtype == "half" else x
    with torch.autocast(device, dtype):
        with fusewise.implementation("torch"):
            found = step(ours, x)
        expected = step(theirs, x)
    torch.testing.assert_close(found, expected, **exact(device))


@KINDS
@HALF
def test_half_modules(device, kind, dtype):
    ours, theirs, x = pair(kind, device, dtype)
    with fusewise.implementation("torch"):
        torch.testing.assert_close(ours(x), theirs(x), **exact(device))


@KINDS
@HALF
def test_float32_parameters_beside_half_data(device, kind, dtype):
    ours, theirs, x = pair(kind, device, torch.float32)
    x = x.to(dtype)
    with fusewise.implementation("torch"):
        found = ours(x)
    with torch.autocast(device, dtype):
        torch.testing.assert_close(found, theirs(x), **exact(device))


def se_arguments(device, dtype, w_dtype=None):
    def draw(*shape):
        return torch.randn(shape, device=device, dtype=w_dtype or dtype)

    return draw(2, 6, 3, 5).to(dtype), draw(4, 6), draw(4), draw(6, 4), draw(6)


@pytest.mark.parametrize("activation", ("silu", "relu"))
@pytest.mark.parametrize("gate", ("sigmoid", "hardsigmoid"))
@pytest.mark.parametrize("four", (False, True), ids=("2d", "4d"))
def test_squeeze_excite(device, activation, gate, four):
    x, w1, b1, w2, b2 = se_arguments(device, torch.float32)
    gates = {"sigmoid": torch.sigmoid, "hardsigmoid": F.hardsigmoid}
    hidden = getattr(F, activation)(F.linear(x.mean((2, 3)), w1, b1))
    expected = x * gates[gate](F.linear(hidden, w2, b2))[:, :, None, None]
    if four:
        w1, w2 = w1[:, :, None, None], w2[:, :, None, None]
    x = x.to(memory_format=torch.channels_last)
    with fusewise.implementation(squeeze_excite="torch"), Calls() as calls:
        found = squeeze_excite(x, w1, b1, w2, b2, activation, gate)
    assert not calls.any_of_ours() and found.stride() == x.stride()
    torch.testing.assert_close(found, expected)


def test_hardswish_is_known_here(device):
    x, w1, b1, w2, b2 = se_arguments(device, torch.float32)

    def call(x):
        return squeeze_excite(x, w1, b1, w2, b2, "hardswish")

    with fusewise.implementation("torch"):
        found = torch.fx.symbolic_trace(call)(x)
    gates = F.linear(F.hardswish(F.linear(x.mean((2, 3)), w1, b1)), w2, b2).sigmoid()
    torch.testing.assert_close(found, x * gates[:, :, None, None])


@HALF
def test_squeeze_excite_rounds_float32_weights_to_half_data(device, dtype):
    arguments = se_arguments(device, dtype, torch.float32)
    with fusewise.implementation("torch"):
        found = squeeze_excite(*arguments, "silu")
        expected = squeeze_excite(*(t.to(dtype) for t in arguments), "silu")
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, **exact(device))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_act_and_mlp(device, activation):
    x, w = torch.randn(2, 3, 6, device=device), torch.randn(6, 6, device=device)
    b = torch.randn(6, device=device)
    with fusewise.implementation("torch"), Calls() as calls:
        one, stack = linear_act(x, w, b, activation), mlp(x, [w, w], [b, b], activation)
    assert not calls.any_of_ours()
    assert torch.equal(one, eager(x, w, b, activation))
    assert torch.equal(stack, eager_mlp(x, [w, w], [b, b], activation))


def test_bad_input_gets_the_operators_error(device):
    x, w1, b1, w2, b2 = se_arguments(device, torch.float32)
    with fusewise.implementation("torch"):
        for call, said in (
            (lambda: linear_act(w1, w2), "w: expected .N, 6., got"),
            (lambda: mlp(w1, [w2]), "layer 0: w: expected .N, 6., got"),
            (lambda: squeeze_excite(x, w2, b1, w2, b2, "silu"), "w1: expected .R, 6. or .R, 6, 1"),
            (lambda: squeeze_excite(x[0], w1, b1, w2, b2, "silu"), "x: expected .N, C, H, W., got"),
            (lambda: SqueezeExcitation(6, 4, "silu", device=device)(x[0]), "x: expected .N, C, H"),
            (lambda: linear_act(None, w2), "x: expected a tensor, got None"),
        ):
            with pytest.raises((RuntimeError, TypeError), match=f"^{said}"):
                call()


def test_under_a_transform(device):
    w = torch.randn(4, 6, device=device)
    x = torch.randn(5, 3, 6, device=device)
    with fusewise.implementation("torch"):
        found = torch.func.vmap(lambda x: linear_act(x, w))(x)
    torch.testing.assert_close(found, linear_act(x, w))


def test_a_transform_is_explained(device):
    w = torch.randn(4, 6, device=device)
    call = torch.func.vmap(lambda x: linear_act(x, w))
    (record,) = fusewise.explain(call, torch.randn(5, 3, 6, device=device))
    assert record.chosen == "torch" and record.why.startswith("torch.func transforms")


@KINDS
def test_compiled(device, kind):
    torch._dynamo.reset()
    ours, theirs, x = pair(kind, device)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled(x)
    with fusewise.implementation("torch"), Calls() as calls:
        found = step(compiled, x)
    assert not calls.any_of_ours()
    torch.testing.assert_close(found, step(theirs, x))


# --- FX ----------------------------------------------------------------------


@KINDS
def test_fx_sees_torchs_operators(device, kind):
    ours, theirs, x = pair(kind, device)
    with fusewise.implementation("torch"):
        traced = torch.fx.symbolic_trace(ours)
    assert "fusewise" not in traced.code
    if kind != "linear_act":  # quantisers look for calls of layers
        called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
        assert PART[kind] in called
    torch.testing.assert_close(step(traced, x), step(theirs, x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fx_quantisation_finds_the_layers():
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    ours, theirs, x = pair("mlp", "cpu", torch.float32)
    mapping = torch.ao.quantization.get_default_qconfig_mapping()
    outputs = []
    with fusewise.implementation("torch"):
        for model in (ours.eval(), theirs.eval()):
            prepared = quantize_fx.prepare_fx(model, mapping, (x,))
            prepared(x)
            quantised = quantize_fx.convert_fx(prepared)
            assert "Quantized" in str(quantised)
            outputs.append(quantised(x))
    torch.testing.assert_close(*outputs)


class Functions(nn.Module):
    """The functions, with parameters of a module."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        w, b = self.w, self.b
        x = squeeze_excite(x, w, b, w, None, "relu", "hardsigmoid").mean((2, 3))
        return mlp(linear_act(x, w, b, "gelu"), [w, w], [b, b])


def test_fx_of_functions():
    model, x = Functions(), torch.randn(2, 6, 3, 5)
    with fusewise.implementation("torch"):
        traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), model(x))


@KINDS
@pytest.mark.parametrize("gradient", (True, False), ids=("grad", "no_grad"))
def test_fx_outside_names_the_way_out(device, kind, gradient):
    ours, _, _ = pair(kind, device)
    with (
        torch.set_grad_enabled(gradient),
        pytest.raises(TypeError, match=r'torch.fx cannot .* `with fusewise.implementation\("torch'),
    ):
        torch.fx.symbolic_trace(ours)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: linear_act(x, torch.ones(2, 2)),
        lambda x: mlp(x, [torch.ones(2, 2)]),
        lambda x: squeeze_excite(x, x, x, x, x, "silu"),
    ],
    ids=("linear_act", "mlp", "squeeze_excite"),
)
def test_fx_of_functions_outside(call):
    with pytest.raises(TypeError, match=r"torch.fx cannot trace a fused operator"):
        torch.fx.symbolic_trace(call)


def test_feature_extraction(device):
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), SqueezeExcitation(6, 4, activation="silu"), nn.ReLU()
    ).to(device)
    x = torch.randn(2, 3, 5, 5, device=device)
    with pytest.raises(TypeError, match=r'fusewise.implementation\("torch"\)'):
        extraction.create_feature_extractor(model, ["1.fc1", "2"])
    with fusewise.implementation("torch"):
        extractor = extraction.create_feature_extractor(model, ["1.fc1", "2"])
    found = extractor(x)
    pooled = model[0](x).mean((2, 3), keepdim=True)
    torch.testing.assert_close(found["1.fc1"], model[1].fc1(pooled))
    torch.testing.assert_close(found["2"], model(x))


def test_make_fx_keeps_the_operator(device):
    """It traces with tensors, which the fused operators take."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = torch.randn(3, 6, device=device), torch.randn(4, 6, device=device)
    assert "fusewise" in make_fx(lambda x, w: linear_act(x, w))(x, w).code


# --- TorchScript's tracer and ONNX ------------------------------------------------------------


@KINDS
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_traces_hold_torchs_operators(device, kind):
    """What ONNX's older exporter starts from. Sizes of the input are not frozen."""
    ours, theirs, x = pair(kind, device)
    with fusewise.implementation("torch"):
        traced = torch.jit.trace(ours, (x,))
    graph = str(traced.inlined_graph)
    assert "fusewise::" not in graph and "PythonOp" not in graph and "aten::" in graph
    more = torch.cat([x, x])
    torch.testing.assert_close(traced(more), theirs(more))


def exported(model, x, **options):
    buffer = io.BytesIO()
    torch.onnx.export(model, (x,), buffer, **options)
    return buffer.getvalue()


@KINDS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("newer", (False, True), ids=("dynamo=False", "dynamo=True"))
def test_onnx_export(kind, newer):
    for package in ("onnx", "onnxscript")[: 1 + newer]:
        pytest.importorskip(package, reason=f"this exporter needs the package {package}")
    ours, _, x = pair(kind, "cpu", torch.float32)
    with fusewise.implementation("torch"):
        assert exported(ours.eval(), x, dynamo=newer)


@KINDS
@pytest.mark.filterwarnings("ignore")
def test_onnx_graph(kind):
    """The older exporter's graph, which needs no package."""
    utils = pytest.importorskip("torch.onnx._internal.torchscript_exporter.utils")
    ours, _, x = pair(kind, "cpu", torch.float32)
    ours.eval()
    with (
        fusewise.implementation("torch"),
        utils.exporter_context(ours, torch.onnx.TrainingMode.EVAL, False),
    ):
        graph, *_ = utils._model_to_graph(ours, (x,))
    kinds = {node.kind() for node in graph.nodes()}
    assert kinds & {"onnx::Gemm", "onnx::MatMul", "onnx::Conv"}
    assert {kind.split("::")[0] for kind in kinds} <= {"onnx", "prim"}
    assert "prim::PythonOp" not in kinds


@KINDS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gradient", (True, False), ids=("grad", "no_grad"))
def test_onnx_export_outside_names_the_way_out(kind, gradient):
    ours, _, x = pair(kind, "cpu", torch.float32)
    with (
        torch.set_grad_enabled(gradient),
        pytest.raises(RuntimeError, match=r'ONNX has no .* `with fusewise.implementation\("torch'),
    ):
        exported(ours.eval(), x, dynamo=False)


@KINDS
def test_the_newer_onnx_exporter_outside(kind, monkeypatch):
    """It starts with torch.export, which is as far as it comes without the package onnxscript."""
    ours, _, x = pair(kind, "cpu", torch.float32)
    if importlib.util.find_spec("onnxscript"):
        with pytest.raises(Exception, match="ONNX has no such operator"):
            exported(ours, x, dynamo=True)
    torch.export.export(ours, (x,))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(RuntimeError, match="ONNX has no such operator; use `with"):
        torch.export.export(ours, (x,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scores_and_latents_export_too():
    model, x = SpectralShapeAutoencoder(4, 3, 6, 5), torch.randn(7, 12)
    for method in ("encode", "anomaly_score"):
        with fusewise.implementation("torch"):
            traced = torch.jit.trace_module(model, {method: x})
        assert not re.search("fusewise::|PythonOp", str(getattr(traced, method).graph))
        torch.testing.assert_close(getattr(traced, method)(x), getattr(model, method)(x))
