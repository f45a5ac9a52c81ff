"""`fusewise.optimize`: what it swaps, that nothing else changes, and how it decides."""

import copy
import pickle
import random

import pytest
import torch
from torch import nn

import fusewise
from fusewise.nn import BatchNormAct2d, LinearAct
from fusewise.rewrite import measure
from optimize_models import (
    IMAGE,
    ROWS,
    Head,
    Interrupts,
    Stem,
    assert_swapped,
    draw,
    inject,
    names_and_types,
    shaken,
)

__all__ = ["inject"]

NORM, SUM = "BatchNorm + activation", "BatchNorm + sum"
POOL, ALONE = "BatchNorm + activation + max-pool", "BatchNorm"
EXCITE = "BatchNorm + Squeeze-and-Excitation"
STACK, LINEAR = "stack of Linear + activation", "Linear + activation"


def torchvision_blocks():
    torchvision = pytest.importorskip("torchvision")
    from torchvision.models import efficientnet, mobilenetv2, mobilenetv3, regnet, resnet

    down = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
    mb = efficientnet.MBConvConfig(2, 3, 1, 8, 8, 1)
    fused_mb = efficientnet.FusedMBConvConfig(2, 3, 1, 8, 8, 1)
    v3 = mobilenetv3.InvertedResidualConfig(8, 3, 16, 8, True, "HS", 1, 1, 1)
    return {
        "basic": (resnet.BasicBlock(8, 8), {SUM: 1}),
        "bottleneck": (resnet.Bottleneck(8, 2), {SUM: 1}),
        "strided": (resnet.BasicBlock(8, 16, 2, down), {SUM: 1, ALONE: 1}),
        "mbconv": (efficientnet.MBConv(mb, 0.0, nn.BatchNorm2d), {SUM: 1, NORM: 1, EXCITE: 1}),
        "fused mbconv": (
            efficientnet.FusedMBConv(fused_mb, 0.0, nn.BatchNorm2d),
            {SUM: 1, NORM: 1},
        ),
        "mobilenet v2": (mobilenetv2.InvertedResidual(8, 8, 1, 2), {SUM: 1, NORM: 2}),
        "mobilenet v3": (
            mobilenetv3.InvertedResidual(v3, nn.BatchNorm2d),
            {SUM: 1, NORM: 1, EXCITE: 1},
        ),
        "regnet": (
            regnet.ResBottleneckBlock(8, 8, 1, nn.BatchNorm2d, nn.ReLU, 4, 1.0, 0.25),
            {SUM: 1, NORM: 1, EXCITE: 1},
        ),
        "conv, norm, act": (
            torchvision.ops.Conv2dNormActivation(8, 8, activation_layer=nn.Hardswish),
            {NORM: 1},
        ),
    }


def timm_blocks():
    pytest.importorskip("timm")
    from timm.layers import SEModule
    from timm.models import _efficientnet_blocks as efficientnet
    from timm.models import regnet, resnet

    blocks = efficientnet
    se = blocks.SqueezeExcite
    return {
        "basic": (resnet.BasicBlock(8, 8), {SUM: 1, NORM: 1}),
        "bottleneck": (resnet.Bottleneck(8, 2), {SUM: 1, NORM: 2}),
        "basic with se": (
            resnet.BasicBlock(8, 8, attn_layer=SEModule),
            {NORM: 1, EXCITE: 1},
        ),
        "bottleneck with se": (
            resnet.Bottleneck(8, 2, attn_layer=SEModule),
            {NORM: 2, EXCITE: 1},
        ),
        "inverted": (blocks.InvertedResidual(8, 8, se_layer=se), {SUM: 1, NORM: 1, EXCITE: 1}),
        "separable": (blocks.DepthwiseSeparableConv(8, 8, se_layer=se), {SUM: 1, EXCITE: 1}),
        "edge": (blocks.EdgeResidual(8, 8, exp_ratio=2.0), {SUM: 1, NORM: 1}),
        "edge with se": (
            blocks.EdgeResidual(8, 8, exp_ratio=2.0, se_layer=se),
            {SUM: 1, EXCITE: 1},
        ),
        "regnet": (regnet.Bottleneck(8, 8, group_size=4), {NORM: 1, EXCITE: 1, ALONE: 1}),
    }


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("blocks", [torchvision_blocks, timm_blocks])
def test_convolutional_blocks(inject, blocks, training):
    for name, (block, expected) in blocks().items():
        model = shaken(Stem(block, out=16 if name == "strided" else 8)).train(training)
        assert_swapped(model, draw(IMAGE), {POOL: 1, **expected}, training)


def test_linear_layers(inject):
    torchvision = pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")
    block = torchvision.models.vision_transformer.MLPBlock
    for model, expected in (
        (Head(nn.SiLU()), {LINEAR: 1}),
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), {STACK: 1}),
        (nn.Sequential(block(6, 8, 0.0), nn.Flatten()), {STACK: 1}),
        (nn.Sequential(timm.layers.Mlp(6, 8), nn.Flatten()), {STACK: 1}),
        (nn.Sequential(torchvision.ops.MLP(6, [8, 8, 4]), nn.Flatten()), {STACK: 1}),
    ):
        assert_swapped(shaken(model), draw(ROWS), expected, True)


def test_dropout_in_a_stack_leaves_the_layers_before_it(inject):
    torchvision = pytest.importorskip("torchvision")
    model = nn.Sequential(torchvision.models.vision_transformer.MLPBlock(6, 8, 0.1)).eval()
    new, report = fusewise.optimize(model, draw(ROWS))
    results = {row.pattern: row.result for row in report.rows}
    assert results == {STACK: "unsupported", LINEAR: "swapped"}
    assert type(new[0][0]) is LinearAct and type(new[0][2]) is nn.Dropout


def test_stochastic_depth_is_fused_in_inference_only(inject):
    efficientnet = pytest.importorskip("torchvision").models.efficientnet
    config = efficientnet.MBConvConfig(2, 3, 1, 8, 8, 1)
    model = shaken(Stem(efficientnet.MBConv(config, 0.5, nn.BatchNorm2d)))
    _, report = fusewise.optimize(model, draw(IMAGE), training=True)
    (row,) = [row for row in report.rows if row.pattern == SUM]
    assert row.result == "unsupported" and "stochastic depth" in row.reason
    assert [row.result for row in report.rows if row.pattern == ALONE] == ["swapped"]
    new, report = fusewise.optimize(model, draw(IMAGE), training=False)
    assert {row.result for row in report.rows} == {"swapped", "covered"}
    outputs = []
    for each in (new, model):
        torch.manual_seed(3)
        outputs.append(copy.deepcopy(each).train()(draw(IMAGE)))
    torch.testing.assert_close(*outputs)


def test_stochastic_depth_in_front_of_an_activation(inject):
    """timm's ResNet: the activation behind the sum cannot be in the norm then."""
    resnet = pytest.importorskip("timm").models.resnet
    drop_path = pytest.importorskip("timm").layers.DropPath
    for p, result in ((0.5, "unsupported"), (0.0, "swapped")):
        model = Stem(resnet.BasicBlock(8, 8, drop_path=drop_path(p)))
        _, report = fusewise.optimize(model, draw(IMAGE), training=False)
        assert [row.result for row in report.rows if row.pattern == SUM] == [result]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("amp", [False, torch.bfloat16], ids=str)
def test_layout_dtype_and_frozen_parameters_stay(inject, layout, amp):
    model = shaken(Stem(nn.Identity())).to(memory_format=layout)
    model.bn1.weight.requires_grad_(False)
    x = draw(IMAGE, memory_format=layout)
    new, report = fusewise.optimize(model, x, amp=amp)
    assert [row.result for row in report.rows] == ["swapped"]
    assert report.setting["amp"] == ("bfloat16" if amp else False)
    assert type(new.bn1) is BatchNormAct2d
    for mine, theirs in zip(new.parameters(), model.parameters(), strict=True):
        assert mine is theirs
    assert not new.bn1.weight.requires_grad
    assert new.conv1.weight.is_contiguous(memory_format=layout)


def test_autocast_is_taken_from_the_call(inject):
    with torch.autocast("cpu", torch.bfloat16):
        _, report = fusewise.optimize(Stem(nn.Identity()), draw(IMAGE))
    assert report.setting["amp"] == "bfloat16"


def test_the_result_can_be_pickled(inject):
    resnet = pytest.importorskip("torchvision").models.resnet
    timm = pytest.importorskip("timm")
    model = Stem(resnet.BasicBlock(8, 8), timm.models.resnet.BasicBlock(8, 8)).eval()
    new, report = fusewise.optimize(model, draw(IMAGE))
    assert len(report.swapped) == 4
    with torch.no_grad():
        torch.testing.assert_close(pickle.loads(pickle.dumps(new))(draw(IMAGE)), new(draw(IMAGE)))


def test_a_second_call_finds_nothing(inject):
    new, _ = fusewise.optimize(Stem(nn.Identity()), draw(IMAGE))
    again, report = fusewise.optimize(new, draw(IMAGE))
    assert not report.rows and "nothing" in report.conclusion
    assert names_and_types(again) == names_and_types(new)


def test_an_optimizer_made_before_keeps_working(inject):
    model = Stem(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    new, _ = fusewise.optimize(model, draw(IMAGE))
    before = new.bn1.weight.detach().clone()
    new(draw(IMAGE)).sum().backward()
    optimizer.step()
    assert not torch.equal(new.bn1.weight, before)


def test_inplace_and_restore(inject):
    resnet = pytest.importorskip("torchvision").models.resnet
    model = shaken(Stem(resnet.BasicBlock(8, 8)))
    before = names_and_types(model)
    same, report = fusewise.optimize(model, draw(IMAGE), inplace=True)
    assert same is model and type(model.bn1) is BatchNormAct2d
    assert isinstance(model.blocks[0], resnet.BasicBlock)
    model.eval().double()
    y = model(draw(IMAGE).double())
    assert report.restore() is model
    assert names_and_types(model) == before
    assert not any(module.training for module in model.modules())
    torch.testing.assert_close(model(draw(IMAGE).double()), y)


def test_restore_brings_the_new_buffers_and_modes(inject):
    model = shaken(Stem(nn.Identity()))
    new, report = fusewise.optimize(model, draw(IMAGE))
    new.double().eval()
    assert report.restore() is model
    assert model.bn1.running_mean.dtype == torch.float64 and not model.training
    assert type(model.bn1) is nn.BatchNorm2d


# --- decisions, from injected times -------------------------------------------------------------


def results(**times):
    _, report = fusewise.optimize(Stem(nn.Identity()), draw(IMAGE), **times.pop("options", {}))
    return [row.result for row in report.rows], report


@pytest.mark.parametrize(
    "after, min_gain, result",
    [
        (50, 1.02, "swapped"),
        (99, 1.02, "not faster"),
        (99, 1.005, "swapped"),
        (70, 1.5, "not faster"),
        (110, 0.5, "not faster"),
    ],
)
def test_min_gain(inject, after, min_gain, result):
    inject(after=after)
    found, report = results(options={"min_gain": min_gain})
    assert found == [result]
    (row,) = report.rows
    assert row.ratio["wall"]["ratio"] == pytest.approx(100 / after, rel=1e-2)
    assert row.us["wall"] == pytest.approx([100, after], rel=1e-2)


def test_swaps_are_taken_back_if_the_whole_is_not_faster(inject):
    inject(swapped=1001)
    model = Stem(nn.Identity())
    new, report = fusewise.optimize(model, draw(IMAGE))
    assert [row.result for row in report.rows] == ["taken back"]
    assert report.returned == "original" and "taken back" in report.conclusion
    assert names_and_types(new) == names_and_types(model)


def test_amdahls_prediction_is_beside_the_measured_whole(inject):
    inject(after=40, swapped=950)
    _, report = results()
    assert report.predicted_us["wall"] == pytest.approx(1000 - 60, rel=1e-3)
    assert report.whole["swapped"]["wall"]["median"] == pytest.approx(950, rel=1e-3)
    assert "predicted by Amdahl's law from the candidates: 0.94 ms" in " ".join(report.lines())
    # On a busy machine the parts can seem to take longer than the whole.
    inject(before=5000, after=2500, swapped=950)
    _, report = results()
    assert report.predicted_us["wall"] == pytest.approx(500, rel=1e-3)


def test_equal_shapes_are_measured_once(inject):
    resnet = pytest.importorskip("torchvision").models.resnet
    seen = inject()
    model = Stem(*(resnet.BasicBlock(8, 8) for _ in range(3)))
    _, report = fusewise.optimize(model, draw(IMAGE))
    assert len(report.swapped) == 4
    # The stem, and per block a norm without and one with a sum.
    assert seen == [["before", "after"]] * 3 + [["original", "swapped"]]


def test_calls_are_counted(inject):
    class Twice(Stem):
        def forward(self, x):
            return super().forward(x) + super().forward(x)

    # The chain is only seen if its layers are called once; the block inside is one module.
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = Stem(nn.Identity())

        def forward(self, x):
            return self.stem(x) + self.stem(x)

    _, report = fusewise.optimize(Inner(), draw(IMAGE))
    assert [row.calls for row in report.rows] == [2]
    assert report.predicted_us["wall"] == pytest.approx(1000 - 2 * 50, rel=1e-3)
    _, report = fusewise.optimize(Twice(), draw(IMAGE))
    assert [(row.pattern, row.calls) for row in report.rows] == [(ALONE, 2)]


def test_include_and_exclude(inject):
    resnet = pytest.importorskip("torchvision").models.resnet

    def swapped(**options):
        model = Stem(resnet.BasicBlock(8, 8), resnet.BasicBlock(8, 8))
        _, report = fusewise.optimize(model, draw(IMAGE), **options)
        return [row.name for row in report.swapped]

    assert swapped() == ["bn1", "blocks.0", "blocks.1"]
    assert swapped(include="blocks") == ["blocks.0", "blocks.1"]
    assert swapped(include=["bn1", "blocks.1"]) == ["bn1", "blocks.1"]
    assert swapped(exclude="blocks.*") == ["bn1"]
    assert swapped(exclude=resnet.BasicBlock) == ["bn1"]
    assert swapped(include=resnet.BasicBlock, exclude="blocks.0") == ["blocks.1"]


# --- nothing else changes -----------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws from every generator."""

    def forward(self, x):
        import numpy

        return x + random.random() + float(numpy.random.rand()) + torch.rand(())


def everything(model):
    """What must be as before, whatever happens."""
    import numpy

    return {
        "modules": [
            (name, type(module), module.training, len(module._forward_hooks))
            for name, module in model.named_modules()
        ],
        "tensors": [
            (name, id(tensor), tensor._version, tensor.detach().clone().tolist(), tensor.grad)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ],
        "random": (
            torch.get_rng_state().tolist(),
            random.getstate(),
            numpy.random.get_state()[1].tolist(),
        ),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    }


@pytest.mark.parametrize("options", [{}, {"verify": False}], ids=str)
def test_buffers_gradients_and_random_numbers_are_as_before(inject, options):
    model = shaken(Stem(Noisy(), nn.Dropout(0.5)))
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    handle = model.fc.weight.register_hook(lambda _: pytest.fail("the model's own parameter"))
    before = everything(model)
    _, report = fusewise.optimize(model, draw(IMAGE), **options)
    assert everything(model) == before
    assert report.swapped
    handle.remove()


@pytest.mark.parametrize("inplace", [False, True], ids=["new tree", "inplace"])
def test_an_exception_at_any_step_leaves_the_model_as_it_was(inject, inplace):
    from fusewise.rewrite.options import Options
    from fusewise.rewrite.run import run

    model = shaken(Stem(nn.Dropout(0.5)))
    before = everything(model)
    for error in (KeyboardInterrupt(), torch.OutOfMemoryError("no memory")):
        for at in range(100):
            steps = Interrupts(at, error)
            try:
                _, report = run(model, draw(IMAGE), Options(inplace=inplace), steps)
            except type(error) as raised:
                assert raised is error
            else:
                break
            assert everything(model) == before
        assert at > 8
        report.restore()
        assert everything(model) == before


def test_an_exception_in_the_middle_of_the_swaps_undoes_them(inject, monkeypatch):
    from fusewise.rewrite.candidate import Edits

    resnet = pytest.importorskip("torchvision").models.resnet
    model = shaken(Stem(resnet.BasicBlock(8, 8)))
    before = everything(model)
    replace = Edits.replace
    for at in range(20):
        done = []

        def interrupted(edits, name, module, done=done, at=at):
            if edits.root.model is model:
                done.append(name)
                if len(done) > at:
                    raise KeyboardInterrupt
            replace(edits, name, module)

        monkeypatch.setattr(Edits, "replace", interrupted)
        try:
            fusewise.optimize(model, draw(IMAGE), inplace=True)
        except KeyboardInterrupt:
            assert everything(model) == before
        else:
            break
    assert at == 5  # the stem's three layers, the block's two norms


def test_an_error_in_the_model_during_measuring(inject, monkeypatch):
    model = shaken(Stem(nn.Identity()))
    before = everything(model)

    def no_memory(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(measure, "sample_models", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fusewise.optimize(model, draw(IMAGE), inplace=True)
    assert everything(model) == before


def test_a_model_that_writes_to_its_input(inject):
    class Writes(Stem):
        def forward(self, x):
            return super().forward(x.mul_(0.5))

    x = draw(IMAGE)
    _, report = fusewise.optimize(Writes(nn.Identity()), x)
    assert report.swapped
    assert torch.equal(x, draw(IMAGE))


def test_hooks_stay(inject):
    """Also those that are methods of other objects."""

    class Log:
        def __init__(self):
            self.seen = []

        def note(self, module, args, output):
            self.seen.append(output.shape)

        def __deepcopy__(self, _):
            raise TypeError("has an open file")

    log = Log()
    model = Stem(nn.Identity())
    model.fc.register_forward_hook(log.note)
    new, report = fusewise.optimize(model, draw(IMAGE))
    assert report.swapped
    log.seen.clear()
    new(draw(IMAGE))
    assert log.seen == [torch.Size([4, 4])]


def test_under_inference_mode_and_no_grad(inject):
    model = Stem(nn.Identity())
    with torch.inference_mode():
        new, report = fusewise.optimize(model, torch.randn(IMAGE), training=True)
    assert report.swapped
    new(draw(IMAGE)).sum().backward()
    with torch.no_grad():
        _, report = fusewise.optimize(model, draw(IMAGE))
    assert report.swapped
