"""`fusewise.optimize`: BatchNorm + Squeeze-and-Excitation, and the choice against its parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewise
from fusewise.bench.accuracy import Check
from fusewise.nn import BatchNormAct2d, SqueezeExcitation
from fusewise.rewrite import measure, register, verify_model
from fusewise.rewrite.measure import Times
from fusewise.rewrite.norm_excite import ExcitationAfterNorm, NormBeforeExcitation
from fusewise.rewrite.registry import _OWN
from fusewise.rewrite.setting import Setting
from fusewise.rewrite.verify import check_slot
from optimize_models import (
    IMAGE,
    Stem,
    assert_swapped,
    draw,
    gated_block,
    inject,
    names_and_types,
    shaken,
)

__all__ = ["inject"]

torchvision = pytest.importorskip("torchvision")
pytestmark = pytest.mark.usefixtures("few_threads")

NORM, SUM, ALONE = "BatchNorm + activation", "BatchNorm + sum", "BatchNorm"
POOL, SE = "BatchNorm + activation + max-pool", "Squeeze-and-Excitation"
EXCITE = "BatchNorm + Squeeze-and-Excitation"


def found(model, **options):
    """The model, and the rows of what is behind the stem, by pattern."""
    before = names_and_types(model)
    new, report = fusewise.optimize(model, draw(IMAGE), **options)
    assert names_and_types(model) == before
    return new, {row.pattern: row for row in report.rows if row.name.startswith("blocks")}


def results(model, **options):
    return {pattern: row.result for pattern, row in found(model, **options)[1].items()}


# --- whole models -------------------------------------------------------------------------------


def of_torchvision(name):
    return torchvision.models.get_model(name, num_classes=4)


def of_timm(name):
    timm = pytest.importorskip("timm")
    if name != "seresnet":
        return timm.create_model(name, num_classes=4)
    sizes = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32), "num_classes": 4}
    bottleneck = timm.models.resnet.Bottleneck
    return timm.models.resnet.ResNet(bottleneck, block_args={"attn_layer": "se"}, **sizes)


@pytest.mark.parametrize(
    "make, name, expected",
    [
        (of_torchvision, "efficientnet_b0", {NORM: 17, SUM: 9, ALONE: 7, EXCITE: 16}),
        (of_torchvision, "mobilenet_v3_small", {NORM: 14, SUM: 6, ALONE: 5, EXCITE: 9}),
        (of_torchvision, "regnet_y_400mf", {NORM: 17, SUM: 16, ALONE: 4, EXCITE: 16}),
        (of_timm, "test_efficientnet", {NORM: 7, ALONE: 4, EXCITE: 2}),
        (of_timm, "mobilenetv3_small_050", {NORM: 14, SUM: 7, ALONE: 4, EXCITE: 9}),
        (of_timm, "regnety_002", {NORM: 14, ALONE: 17, EXCITE: 13}),
        (of_timm, "seresnet", {POOL: 1, NORM: 8, ALONE: 4, EXCITE: 4}),
    ],
)
def test_models(inject, monkeypatch, make, name, expected):
    """`assert_swapped` compares the whole models, in float64. `check_model` would in float32, where
    rounding decides some kinks of a deep network on so small images."""
    monkeypatch.setattr(verify_model, "check_model", lambda *_, **__: Check("", 0.0, 0.0, ""))
    torch.manual_seed(0)
    # The gradient of torch's hardsigmoid has float32's 1/6 in float64, too.
    hard = "mobilenet" in name
    dtype, tolerance = (torch.float32, 1e-5) if hard else (torch.float64, 1e-7)
    model, x = make(name).to(dtype), draw((2, 3, 64, 64), dtype=dtype)
    for module in model.modules():
        if isinstance(module, (nn.Dropout, torchvision.ops.StochasticDepth)):
            module.p = 0.0
    assert_swapped(model, x, expected, training=True, tolerance=tolerance)
    new, report = fusewise.optimize(model.eval(), x)
    assert sum(row.pattern == EXCITE for row in report.swapped) == expected[EXCITE]
    torch.testing.assert_close(new(x), model(x), rtol=1e-4, atol=1e-4)


# --- decisions, from injected times -------------------------------------------------------------


def pattern_of(after):
    kinds = {type(module) for module in after.modules()}
    if ExcitationAfterNorm in kinds:
        return EXCITE
    return SE if SqueezeExcitation in kinds else NORM


@pytest.fixture
def decide(inject, monkeypatch):
    """Sets the times of the parts, 100 µs before, and of the chain, 200 µs before. Returns the
    results and the contenders of the chain."""

    def run(norm, se, parts, chain):
        after, contenders = {NORM: norm, SE: se, EXCITE: chain}, {}

        def sample_slot(modules, inputs, setting):
            pattern = pattern_of(modules["after"])
            if pattern == EXCITE:
                contenders.update(modules)
            for module in modules.values():
                module(*inputs)
            us = {"before": 200 if pattern == EXCITE else 100, "parts": parts}
            us["after"] = after[pattern]
            return {
                name: Times({"wall": [us[name] + 0.01 * i for i in range(15)]}) for name in modules
            }

        monkeypatch.setattr(measure, "sample_slot", sample_slot)
        model = shaken(Stem(gated_block()))
        model.bn1 = nn.Identity()
        new, rows = found(model)
        return new, rows, contenders

    return run


@pytest.mark.parametrize(
    "norm, se, parts, chain, expected",
    [
        (50, 50, 100, 90, ["covered", "covered", "swapped"]),
        (50, 50, 100, 99, ["swapped", "swapped", "parts as fast"]),
        (50, 50, 100, 100, ["swapped", "swapped", "parts as fast"]),
        (50, 50, 100, 110, ["swapped", "swapped", "parts as fast"]),
        (50, 110, 150, 140, ["covered", "not faster", "swapped"]),
        (110, 50, 150, 160, ["not faster", "swapped", "parts as fast"]),
        (110, 110, None, 190, ["not faster", "not faster", "swapped"]),
        (110, 110, None, 199, ["not faster", "not faster", "not faster"]),
        (50, 50, 199, 198.5, ["swapped", "swapped", "not faster"]),
    ],
)
def test_the_faster_of_chain_and_parts_is_chosen(decide, norm, se, parts, chain, expected):
    new, rows, contenders = decide(norm, se, parts, chain)
    assert [rows[each].result for each in (NORM, SE, EXCITE)] == expected
    assert rows[EXCITE].us["wall"] == pytest.approx([200, chain], rel=1e-2)
    assert ("parts" in contenders) == (parts is not None)
    if parts:
        first, *_, last = contenders["parts"].layers
        assert isinstance(first, BatchNormAct2d) == (norm == 50)
        assert isinstance(last, SqueezeExcitation) == (se == 50)
    (_, bn, _), gate = new.blocks[0]
    if expected[2] == "swapped":
        assert (type(bn), type(gate)) == (NormBeforeExcitation, ExcitationAfterNorm)
    else:
        assert (type(bn) is BatchNormAct2d) == (expected[0] == "swapped")
        assert (type(gate) is SqueezeExcitation) == (expected[1] == "swapped")


def test_the_reason_names_the_parts(decide):
    _, rows, _ = decide(50, 50, 100, 110)
    assert rows[EXCITE].reason.startswith(
        "its parts, swapped separately, are as fast: wall time 0.91 ["
    )
    assert rows[NORM].reason == rows[SE].reason == ""


def test_the_prediction_counts_what_is_swapped(inject):
    inject(before=100, after=40, parts=70)
    _, report = fusewise.optimize(Stem(gated_block()), draw(IMAGE))
    assert [row.result for row in report.rows] == ["swapped", "covered", "swapped", "covered"]
    assert report.predicted_us["wall"] == pytest.approx(1000 - 2 * 60, rel=1e-3)


def test_swaps_are_taken_back(inject):
    inject(swapped=1100)
    assert set(results(Stem(gated_block())).values()) == {"taken back"}


def test_equal_shapes_are_measured_once(inject):
    seen = inject()
    fusewise.optimize(Stem(gated_block(), gated_block()), draw(IMAGE))
    pairs = [["before", "after"]] * 3  # the stem, norm and activation, the excitation
    assert seen == [*pairs, ["before", "after", "parts"], ["original", "swapped"]]


# --- what is left to the parts -------------------------------------------------------------------


def hooked(model, name):
    model.get_submodule(name).register_forward_hook(lambda *_: None)
    return model


def test_an_excitation_that_is_not_fused(inject):
    _, rows = found(Stem(gated_block(hidden=nn.Tanh)))
    said = "module.activation: expected ReLU, SiLU or Hardswish"
    assert rows[NORM].result == "swapped"
    assert rows[SE].result == "unsupported" and rows[SE].reason.startswith(said)
    assert rows[EXCITE].result == "unsupported"
    assert rows[EXCITE].reason.startswith(f"blocks.0.1: {said}")


def test_an_activation_that_is_not_fused(inject):
    """The reason is in the report once."""
    expected = {NORM: "unsupported", ALONE: "swapped", SE: "swapped"}
    assert results(Stem(gated_block(nn.ELU))) == expected


def test_timms_other_excitations(inject):
    timm = pytest.importorskip("timm")
    effective = timm.layers.EffectiveSEModule
    model = Stem(timm.models.resnet.BasicBlock(8, 8, attn_layer=effective))
    _, rows = found(model)
    assert rows[EXCITE].reason.startswith("blocks.0.se: module: ")
    assert "has one convolution" in rows[EXCITE].reason
    assert rows[ALONE].result == "swapped"


def test_parameters_of_two_dtypes(inject):
    model = Stem(gated_block())
    model.blocks[0][1].bfloat16()
    _, rows = found(model, amp=torch.bfloat16)
    said = "expected parameters of one dtype, got torch.bfloat16 and torch.float32"
    assert (rows[EXCITE].result, rows[EXCITE].reason) == ("unsupported", said)
    assert rows[NORM].result == rows[SE].result == "swapped"


@pytest.mark.parametrize(
    "name, parts",
    [
        ("blocks.0.0", {NORM: "swapped", SE: "swapped", EXCITE: "unsupported"}),
        ("blocks.0.0.1", {NORM: "unsupported", SE: "swapped"}),
        ("blocks.0.0.2", {NORM: "unsupported", ALONE: "swapped", SE: "swapped"}),
        ("blocks.0.1", {NORM: "swapped", SE: "unsupported", EXCITE: "unsupported"}),
        ("blocks.0.1.fc1", {NORM: "swapped", SE: "unsupported", EXCITE: "unsupported"}),
    ],
)
def test_hooks(inject, name, parts):
    model = Stem(gated_block())
    model.blocks[0][0][2] = nn.SiLU()
    _, rows = found(hooked(model, name))
    assert {pattern: row.result for pattern, row in rows.items()} == parts
    assert all("has hooks" in row.reason for row in rows.values() if row.result == "unsupported")


def test_shared_parameters(inject):
    model = Stem(gated_block(), gated_block())
    model.blocks[1][1].fc1 = model.blocks[0][1].fc1
    _, rows = found(model)
    assert rows[EXCITE].result == "unsupported" and "is also used as" in rows[EXCITE].reason
    assert rows[NORM].result == "swapped"


def test_norms_that_are_left_alone(inject):
    class Norm(nn.BatchNorm2d):
        pass

    assert results(Stem(gated_block(norm=Norm))) == {SE: "swapped"}
    assert results(Stem(gated_block(norm=nn.SyncBatchNorm)).eval()) == {SE: "swapped"}


@pytest.mark.parametrize("between", [nn.Dropout(0.1), nn.Conv2d(8, 8, 1), nn.AvgPool2d(2)])
def test_another_layer_in_front_of_the_excitation(inject, between):
    model = Stem(gated_block())
    model.blocks[0].insert(1, between)
    assert results(model.eval()) == {NORM: "swapped", SE: "swapped"}


def test_identities_between_them_are_passed(inject):
    model = Stem(gated_block())
    model.blocks[0].insert(1, nn.Identity())
    assert results(model) == {NORM: "covered", SE: "covered", EXCITE: "swapped"}
    _, rows = found(hooked(model, "blocks.0.1"))
    assert rows[EXCITE].result == "unsupported" and "has hooks" in rows[EXCITE].reason


class Calls(nn.Module):
    """A norm and an excitation, called by a function."""

    def __init__(self, function):
        super().__init__()
        self.bn, self.act = nn.BatchNorm2d(8), nn.ReLU()
        self.se = torchvision.ops.SqueezeExcitation(8, 4)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def reads_twice(self, x):
    y = self.bn(x)
    return self.se(y) + y


def excites_twice(self, x):
    return self.se(self.se(self.act(self.bn(x))))


def activates_twice(self, x):
    return self.act(self.se(self.act(self.bn(x))))


def depends_on_the_mode(self, x):
    y = self.bn(x)
    return self.se(self.act(y) if self.training else y)


def branches(self, x):
    return self.se(self.bn(x if x.sum() > 0 else -x))


@pytest.mark.parametrize(
    "function", [reads_twice, excites_twice, activates_twice, depends_on_the_mode, branches]
)
def test_forwards_without_the_chain(inject, function):
    _, rows = found(Stem(Calls(function)), training=True)
    assert EXCITE not in rows or "cannot be traced" in rows[EXCITE].reason
    assert rows[SE].result == "swapped" and {NORM, ALONE} & rows.keys()


def test_the_reason_of_a_forward_that_cannot_be_traced(inject):
    block = Calls(branches)
    del block.act
    _, rows = found(Stem(block))
    assert rows[EXCITE].reason.startswith("its forward cannot be traced: TraceError")
    assert rows[ALONE].result == rows[SE].result == "swapped"


def test_include_and_exclude(inject):
    model = Stem(gated_block())
    assert results(model, include="blocks")[EXCITE] == "swapped"
    assert results(model, exclude="blocks.0.1") == {NORM: "swapped"}
    assert results(model, exclude="blocks.0.0.1") == {SE: "swapped"}
    assert results(model, include="blocks.0.0") == {NORM: "swapped"}


def test_a_pattern_of_the_user_comes_before_ours(inject):
    register(torchvision.ops.SqueezeExcitation, lambda module: module)
    try:
        assert results(Stem(gated_block())) == {NORM: "swapped", "SqueezeExcitation": "swapped"}
    finally:
        _OWN.clear()


@pytest.mark.parametrize(
    "name, left",
    [
        ("blocks.0.0", {SE}),
        ("blocks.0.0.1", {SE}),
        ("blocks.0.0.2", {ALONE, SE}),
        ("blocks.0.1", {NORM}),
    ],
)
def test_compiled_parts_are_left_alone(inject, name, left):
    model = Stem(gated_block())
    compiled = model.get_submodule(name)
    compiled.compile(backend="eager")
    new, rows = found(model)
    assert {pattern: row.result for pattern, row in rows.items()} == dict.fromkeys(left, "swapped")
    assert new.get_submodule(name) is compiled


class Reads(nn.Module):
    """Calls the parts of a block by hand, and reads what is between them in some modes."""

    def __init__(self, modes):
        super().__init__()
        self.block, self.modes = gated_block(), modes

    def forward(self, x):
        y = self.block[0](x)
        z = self.block[1](y)
        return z + y if self.training in self.modes else z


@pytest.mark.parametrize("modes", [(True, False), (True,), (False,)])
@pytest.mark.parametrize("training", [True, False])
def test_the_parts_are_swapped_where_the_model_is_wrong_with_the_chain(inject, modes, training):
    """Also if it is in the other mode only."""
    model = Stem(Reads(modes)).train(training)
    new, rows = found(model)
    assert rows[NORM].result == rows[SE].result == "swapped"
    assert rows[EXCITE].result == "taken back"
    assert rows[EXCITE].reason.startswith("the whole model was WRONG: TypeError: ")
    for mode in (True, False):
        torch.testing.assert_close(new.train(mode)(draw(IMAGE)), model.train(mode)(draw(IMAGE)))


def test_the_count_of_swaps(inject):
    """A chain counts in place of its parts."""
    _, report = fusewise.optimize(Stem(gated_block()), draw(IMAGE))
    assert report.lines()[0].startswith("2 of 2 candidates swapped.")  # the stem and the block
    inject(before=100, after=40, parts=40)
    _, report = fusewise.optimize(Stem(gated_block()), draw(IMAGE))
    assert report.lines()[0].startswith("3 of 3 candidates swapped.")


@pytest.mark.parametrize("at", [0.0, 1.0])
def test_at_a_kink_the_gradient_is_not_compared(at):
    """Rounding decides there, and the gates give the value a gradient of its own."""

    class Gated(nn.Module):
        def forward(self, x):
            a = self.act(x)
            return a * a.mean((2, 3), keepdim=True).sigmoid()

        def act(self, x):
            return F.relu(x)

    class Other(Gated):
        def act(self, x):
            return torch.where(x == at, 2 * at - x if at else x, F.relu(x))

    x = draw((2, 8, 6, 6))
    x[1, 2, 3, 4] = at
    setting = Setting.make(nn.BatchNorm2d(8), x, True, False)
    found = check_slot(Gated(), Other(), (x,), setting, gradients=True)
    assert found.passed == (at == 0), found
