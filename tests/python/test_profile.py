"""`fusewise profile`: its arithmetic by hand, its attribution on a model small enough to know."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

import fusewise
from fusewise import cli
from fusewise.bench.floor import Ceilings
from fusewise.profile import advice, analysis, kinds, model, record, report
from fusewise.profile.record import Piece, Work

pytestmark = pytest.mark.any_device


class Block(nn.Module):
    """A convolution, a norm, and a product that is in no module of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x)) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def forward(self, x):
        return self.head(self.block(x))


def subject(train, device="cpu"):
    net = Net().train(train).to(device)
    x = torch.randn(2, 3, 6, 6, device=device)
    return model.Subject(net, model._step(net, [x], device, train, False), torch.float32)


@pytest.mark.parametrize("train", [False, True])
def test_every_kind_of_work_finds_its_module(device, train):
    """Backward runs in no module's forward; its nodes lead back to them."""
    recording = record.record(subject(train, device), 2, device, marked=True)
    pieces, busy = recording.pieces, recording.busy
    owners = {}
    for piece in pieces:
        owners.setdefault(piece.kind, set()).add(piece.modules)
    assert owners[kinds.CONVOLUTION] == {("block.conv", "block", "")}
    assert owners[kinds.NORMALISATION] == {("block.norm", "block", "")}
    assert owners[kinds.PRODUCT] == {("head.2", "head", "")}
    assert ("block", "") in owners[kinds.ELEMENTWISE]
    assert bool(busy) == (device == "cuda")
    assert all(end > start for start, end in busy)


@pytest.mark.parametrize("train", [False, True])
def test_every_operator_finds_its_module(train):
    recording = record.record(subject(train), 2, "cpu", marked=True)
    pieces, trace = recording.pieces, recording.trace
    owners = {}
    for piece in pieces:
        owners.setdefault(piece.name, set()).add(piece.modules)
    assert owners["aten::mkldnn_convolution"] == {("block.conv", "block", "")}
    assert owners["aten::native_batch_norm"] == {("block.norm", "block", "")}
    assert ("block", "") in owners["aten::mul"]
    assert owners["aten::addmm"] == {("head.2", "head", "")}
    if train:
        assert owners["aten::convolution_backward"] == {("block.conv", "block", "")}
        assert owners["aten::native_batch_norm_backward"] == {("block.norm", "block", "")}
        assert owners["aten::mm"] == {("head.2", "head", "")}
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "module: block.conv (Conv2d)" in names
    assert "traceName" not in trace


def event(name, start=0, end=0, parent=None, kernels=(), gpu=False, annotation=False):
    """As torch's profiler has it, with what a GPU would add."""
    found = SimpleNamespace(name=name, cpu_parent=parent, is_user_annotation=annotation)
    found.device_type = DeviceType.CUDA if gpu else DeviceType.CPU
    found.time_range = SimpleNamespace(start=start, end=end)
    found.kernels = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
    found.scope, found.sequence_nr = 0, -1
    return found


def test_kernels_of_a_gpu():
    """By operator, by name, and where no operator launched them; ranges are no work."""
    mark = event("module: a (Conv2d)", annotation=True, kernels=[("module: a (Conv2d)", 30)])
    conv = event("aten::conv2d", parent=mark)
    kernels = [("nchwToNhwcKernel", 2), ("sm90_xmma_fprop", 10)]
    inner = event("aten::cudnn_convolution", parent=conv, kernels=kernels)
    events = [
        mark,
        conv,
        inner,
        event("module: a (Conv2d)", 0, 30, gpu=True, annotation=True),
        event("nchwToNhwcKernel", 0, 2, gpu=True),
        event("sm90_xmma_fprop", 2, 12, gpu=True),
        event("triton_poi_fused_add_0", 20, 25, gpu=True),
        event("Memset (Device)", 24, 26, gpu=True),
    ]
    assert record._kernels(events) == [
        Piece(2, kinds.LAYOUT, "nchwToNhwcKernel", ("a",)),
        Piece(10, kinds.CONVOLUTION, "sm90_xmma_fprop", ("a",)),
        Piece(5, kinds.COMPILED, "triton_poi_fused_add_0", ()),
        Piece(2, kinds.COPY, "Memset (Device)", ()),
    ]
    assert record._busy(events) == [(0, 12), (20, 26)]


def test_hooks_are_gone_afterwards():
    it = subject(True)
    record.record(it, 1, "cpu", marked=True)
    record.count_work(it)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in it.model.modules())
    assert all(parameter.grad is None for parameter in it.model.parameters())


def test_work_is_counted_as_by_hand():
    # x has 2 x 3 x 6 x 6 = 216 elements, conv's output 2 x 8 x 4 x 4 = 256, its weight 216.
    forward = record.count_work(subject(False))
    assert forward["block.conv"] == Work(1, 4 * (216 + 256 + 216), 2 * 256 * 27)
    assert forward["head.2"] == Work(1, 4 * (16 + 8 + 32 + 4), 2 * 8 * 8)
    assert forward["block.norm"] == Work(1, 4 * (256 + 256 + 16), 0)
    assert forward[""].operations == 2 * 256 * 27 + 2 * 8 * 8
    both = record.count_work(subject(True))
    # x needs no gradient: nothing is written for it, and one product of three is not there.
    assert both["block.conv"] == Work(1, 4 * (2 * 688 + 216), 2 * 2 * 256 * 27)
    assert both["head.2"] == Work(1, 4 * (2 * 60 + 16 + 36), 3 * 2 * 8 * 8)


@pytest.mark.parametrize(
    "operators, kernel, kind",
    [
        (["aten::mkldnn_convolution", "aten::conv2d"], "", kinds.CONVOLUTION),
        (["aten::sum", "aten::convolution_backward"], "", kinds.CONVOLUTION),
        (["aten::copy_", "aten::clone", "aten::contiguous", "aten::conv2d"], "", kinds.LAYOUT),
        (["aten::copy_", "aten::_to_copy", "aten::to"], "", kinds.COPY),
        (["aten::addmm", "aten::linear"], "", kinds.PRODUCT),
        (["aten::native_layer_norm"], "", kinds.NORMALISATION),
        (["aten::mean", "aten::adaptive_avg_pool2d"], "", kinds.POOLING),
        (["aten::mean"], "", kinds.REDUCTION),
        (["aten::silu_"], "", kinds.ELEMENTWISE),
        (["aten::hardswish_backward", "HardswishBackward0"], "", kinds.ELEMENTWISE),
        (["fusewise::_squeeze_excite"], "", kinds.FUSEWISE),
        (["aten::empty"], "", kinds.OTHER),
        (
            ["aten::cudnn_convolution", "aten::conv2d"],
            "void cudnn::ops::nchwToNhwcKernel<__half, __half, float>",
            kinds.LAYOUT,
        ),
        (["aten::cudnn_convolution"], "sm90_xmma_fprop_implicit_gemm_f16f16", kinds.CONVOLUTION),
        (["aten::copy_"], "Memcpy DtoD (Device -> Device)", kinds.COPY),
        ([], "sm90_xmma_gemm_f16f16_f16f32", kinds.PRODUCT),
        ([], "triton_poi_fused_add_relu_0", kinds.COMPILED),
        (["## Call CompiledFxGraph abc ##"], "triton_red_fused_0", kinds.COMPILED),
    ],
)
def test_kinds_of_work(operators, kernel, kind):
    assert kinds.kind_of(operators, kernel) == kind


def test_a_conversion_on_a_cpu_is_named_by_who_wanted_it():
    conv = event("aten::conv2d")
    contiguous = event("aten::contiguous", parent=conv)
    copy = event("aten::copy_", parent=event("aten::clone", parent=contiguous))
    events = [conv, contiguous, copy]
    for us, each in enumerate(events, 1):
        each.self_cpu_time_total = us
    found = analysis.conversions(record._operators(events), steps=1)
    assert found == {"aten::contiguous in aten::conv2d": (1.0, 5.0)}


def test_conversions_are_named_without_their_template_arguments():
    name = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float>(cudnn::ops::params_t<float>)"
    pieces = [Piece(2.0, kinds.LAYOUT, name, ()), Piece(3.0, kinds.LAYOUT, name, ())]
    pieces.append(Piece(9.0, kinds.COPY, "aten::copy_", ()))
    found = analysis.conversions(pieces, steps=2)
    assert found == {"cudnn::ops::nchwToNhwcKernel": (1.0, 5.0)}


def test_amdahl():
    assert analysis.amdahl(0.5, 2) == pytest.approx(4 / 3)
    assert analysis.amdahl(0.1, float("inf")) == pytest.approx(1 / 0.9)
    assert analysis.amdahl(0.0, 5) == 1
    assert analysis.amdahl(1.0, float("inf")) == float("inf")


def test_gaps():
    assert analysis.gaps([(0, 10), (12, 20), (26, 30)], 2) == analysis.Gaps(1.0, 4.0, 6)
    assert analysis.gaps([], 1) is None


def profile(device="cuda", wall=100.0, channels_last=False, amp=False, **times):
    """As if it had been measured: µs by kind of work, and a Squeeze-and-Excitation."""
    work = sum(times.values())
    layers = [nn.Conv2d(8, 2, 1), nn.SiLU(), nn.Conv2d(2, 8, 1), nn.Sigmoid()]
    excitation = type("SqueezeExcitation", (nn.Sequential,), {})(*layers)
    found = [analysis.ModuleKind("SqueezeExcitation", 3, work / 5, 0.2, work / 20, excitation)]
    return analysis.Profile(
        command="", environment={}, model="m", device=device, train=True, amp=amp,
        channels_last=channels_last, ceilings=Ceilings(1.0, {}), dtype="float32", wall_us=wall,
        wall_spread=(wall, wall), work_us=work, launches=7, kinds=times,
        conversions={"nchwToNhwcKernel": (2.0, 1.0)}, modules=found, outside_us=0.0, gaps=None,
        trace={},
    )  # fmt: skip


def test_advice_is_ranked_by_what_it_may_bring():
    found = advice.advise(profile(**{kinds.CONVOLUTION: 30.0, kinds.ELEMENTWISE: 10.0}))
    assert [item.what.split("(")[0].split()[0] for item in found] == [
        "a",
        "torch.compile",
        "fusewise.nn.SqueezeExcitation",
    ]
    graph, compiled, operator = found
    assert "CUDA graph" in graph.what and "idles 60%" in graph.why
    assert graph.bound == pytest.approx(2.5)
    # A quarter and a fifth of the work, which is 40 % of the step.
    assert compiled.bound == pytest.approx(1 / (1 - 0.1))
    assert operator.bound == pytest.approx(analysis.amdahl(0.08, 4))
    assert all("it also saves idle time" in item.why for item in (compiled, operator))
    busy = advice.advise(profile(wall=41.0, **{kinds.CONVOLUTION: 30.0, kinds.ELEMENTWISE: 10.0}))
    assert not any("it also saves idle time" in item.why for item in busy)


def test_bounds_say_of_what_they_are():
    it = profile(**{kinds.CONVOLUTION: 30e3, kinds.ELEMENTWISE: 10e3}, wall=100e3)
    _, classes, *_ = report._tables(it)
    assert "the whole: 40 ms of work" in classes.title
    assert classes.rows[0][-1] == "1.25x"  # a fifth of the work, and free
    assert report._advice(it).header[-1] == "whole step, at most"


def test_idle_is_called_by_its_name():
    times = {kinds.CONVOLUTION: 70.0}
    assert "30% is idle: LAUNCH-BOUND" in report._lines(profile(**times))[1]
    assert "10% is idle: not launch-bound" in report._lines(profile(wall=77.8, **times))[1]
    assert "30% is idle: Python" in report._lines(profile(device="cpu", **times))[1]


def test_advice_on_layouts():
    times = {kinds.CONVOLUTION: 80.0, kinds.LAYOUT: 20.0}
    first = advice.advise(profile(**times))[0]
    assert first.what.startswith("--channels-last") and first.bound == pytest.approx(1.25)
    first = advice.advise(profile(channels_last=True, **times))[0]
    assert first.what.startswith("find the module") and "nchwToNhwcKernel" in first.why


def test_nothing_is_said_where_nothing_is_worth_a_try():
    it = profile(**{kinds.CONVOLUTION: 99.0})
    it.modules.clear()
    (only,) = advice.advise(it)
    assert only.what == "nothing: already at the floor"


def test_operators_for_modules_of_others():
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    timm = pytest.importorskip("timm", reason="timm is not installed")
    theirs = torchvision.ops.SqueezeExcitation
    for module in (
        theirs(8, 2, nn.SiLU),
        theirs(8, 2, nn.ReLU, nn.Hardsigmoid),
        timm.layers.SEModule(16),
        timm.models._efficientnet_blocks.SqueezeExcite(16, act_layer=nn.Hardswish),
    ):
        assert advice.operator_for(module) == "fusewise.nn.SqueezeExcitation.from_module"
        fusewise.nn.SqueezeExcitation.from_module(module)  # what was advised can be done
    for module in (
        fusewise.nn.SqueezeExcitation(8, 2, "relu"),
        theirs(8, 2, activation=nn.Tanh),
        timm.layers.SEModule(16, add_maxpool=True),
        nn.ReLU(),
    ):
        assert advice.operator_for(module) == ""


def test_operators_for_a_class_that_nobody_knows():
    layers = [nn.Conv2d(8, 2, 1), nn.Hardswish(), nn.Conv2d(2, 8, 1), nn.Hardsigmoid()]
    module = type("SEModule", (nn.Sequential,), {})(*layers)
    said = 'fusewise.nn.SqueezeExcitation(..., "hardswish", "hardsigmoid")'
    assert advice.operator_for(module) == said
    module[1] = nn.Tanh()
    assert advice.operator_for(module) == ""


class Feed(nn.Module):
    """Linear layers whose activations are called in another order than they are made in."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.stack = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
        self.dropping = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5))
        self.hard = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        x = self.down(self.act(self.up(self.act(x))))
        return self.hard(self.dropping(self.stack(x)))


@pytest.mark.parametrize("train", [False, True])
def test_activations_behind_linear_layers(train):
    net = Feed().train(train)
    step = model._step(net, [torch.randn(3, 4)], "cpu", train, False)
    it = model.Subject(net, step, torch.float32)
    behind = record.behind_linears(it)
    assert ("up", "act", 0.5) in behind and ("hard.0", "hard.1", 1.0) in behind
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())

    # 20 µs in act, half of it behind a linear layer; 30, 5 and 5 in the others, 40 elsewhere.
    times = {"act": 20.0, "stack.1": 30.0, "dropping.1": 5.0, "hard.1": 5.0, "up": 40.0}
    pieces = [
        Piece(us, kinds.OTHER, "op", (name, name.rpartition(".")[0])) for name, us in times.items()
    ]
    found = analysis.fusable(net, pieces, behind)
    linear, stack = "fusewise.nn.LinearAct.from_linear", "fusewise.nn.MLP.from_sequential"
    assert [(each.operator, each.name, each.calls) for each in found] == [
        (stack, "Sequential", 1),
        (linear, "Linear and SiLU", 1),
        (linear, "Linear and GELU", 1),
    ]
    assert [each.share for each in found] == pytest.approx([0.3, 0.1, 0.05])
    fusewise.nn.MLP.from_sequential(net.stack)  # what was advised can be done
    fusewise.nn.LinearAct.from_linear(net.up, net.act)


def test_advice_on_linear_layers():
    it = profile(wall=100.0, **{kinds.PRODUCT: 60.0, kinds.ELEMENTWISE: 40.0})
    it.fusable.append(analysis.Fusable("fusewise.nn.MLP.from_sequential", "Mlp", 12, 0.2))
    (found,) = (item for item in advice.advise(it) if "MLP" in item.what)
    assert found.what == "fusewise.nn.MLP.from_sequential for Mlp"
    assert found.bound == pytest.approx(1.25)
    assert found.why.startswith("12 activations after linear layers take 20% of the work")


def test_a_profile_advises_a_stack(tmp_path, monkeypatch, capsys):
    pytest.importorskip("timm", reason="timm is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_with_a_stack.py").write_text(
        "from timm.layers import Mlp\nfrom torch import nn\n"
        "net = nn.Sequential(Mlp(8, 2048, 8), Mlp(8, 2048, 8))\n"
    )
    command = ["profile", "model_with_a_stack:net", "--input", "512,8", "--device", "cpu"]
    assert cli.main([*command, "--out", "out"]) == 0
    assert "fusewise.nn.MLP.from_sequential for Mlp" in capsys.readouterr().out


def test_a_class_inside_itself_counts_once():
    inner = nn.Module()
    outer = type("Unit", (nn.Module,), {})()
    outer.inner = type(outer)()
    whole = nn.Module()
    whole.unit = outer
    whole.other = inner
    pieces = [Piece(6.0, kinds.OTHER, "a", ("unit.inner", "unit", "")), Piece(4.0, "", "b", ("",))]
    work = {"unit": Work(1, 100, 0), "unit.inner": Work(1, 100, 0), "": Work(1, 100, 0)}
    ceilings = Ceilings(1e6, {"float32": 1.0})
    (found,) = analysis.module_kinds(whole, pieces, work, ceilings, "float32")
    assert (found.name, found.calls, found.us, found.share) == ("Unit", 2, 6.0, 0.6)
    assert found.floor_us == pytest.approx(100.0)


COMPILED = """
import torch
net = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), backend="eager")
"""


@pytest.mark.parametrize(
    "text, said",
    [
        (COMPILED, "a compiled model hides them"),
        ("import torch\nnet = torch.nn.Linear(4, 4)", "| Linear | 1 |"),
    ],
)
def test_models_without_visible_parts(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.chdir(tmp_path)
    module = f"model_in_{tmp_path.name}"  # another for each test: imports are kept
    (tmp_path / f"{module}.py").write_text(text)
    command = ["profile", f"{module}:net", "--input", "3,4", "--device", "cpu", "--out", "out"]
    assert cli.main(command) == 0
    assert said in capsys.readouterr().out


MINE = """
import torch
class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)
        self.scale = torch.nn.Linear(4, 4)
    def forward(self, tokens, scale):
        return {"out": self.scale(self.table(tokens)) * scale}
"""


def test_a_users_own_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model_of_a_user.py").write_text(MINE)
    command = ["profile", "own_model_of_a_user:Tokens", "--input", "2,5:int64", "--input", "2,5,4"]
    assert cli.main([*command, "--device", "cpu", "--train", "--amp", "--out", "out"]) == 0
    shown = capsys.readouterr().out
    for heading in ("## Kinds of work", "## Kinds of modules", "## What to try first"):
        assert heading in shown
    assert "| Linear | 1 |" in shown
    page = (tmp_path / "out" / "report.html").read_text()
    assert "whole, if free" in page and str(tmp_path) not in page
    with gzip.open(tmp_path / "out" / "trace.json.gz", "rt") as file:
        text = file.read()
    assert json.loads(text)["traceEvents"] and str(tmp_path) not in text


@pytest.mark.parametrize("name", ["torchvision:squeezenet1_0", "timm:test_resnet"])
def test_models_by_name(name):
    pytest.importorskip(name.partition(":")[0], reason="not installed")
    assert isinstance(model.load(name), nn.Module)
