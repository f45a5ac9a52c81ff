"""`fusewise.optimize`: BatchNorm + Squeeze-and-Excitation, and the choice against its parts."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

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


def block(act=nn.SiLU, hidden=nn.SiLU, norm=nn.BatchNorm2d):
    """The middle of an MBConv: convolution, norm and activation in a container, then the gate."""
    layers = torchvision.ops.Conv2dNormActivation(
        8, 8, norm_layer=norm, activation_layer=act, inplace=None
    )
    return nn.Sequential(layers, torchvision.ops.SqueezeExcitation(8, 4, activation=hidden))


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
        model = shaken(Stem(block()))
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
    _, report = fusewise.optimize(Stem(block()), draw(IMAGE))
    assert [row.result for row in report.rows] == ["swapped", "covered", "swapped", "covered"]
    assert report.predicted_us["wall"] == pytest.approx(1000 - 2 * 60, rel=1e-3)


def test_swaps_are_taken_back(inject):
    inject(swapped=1100)
    assert set(results(Stem(block())).values()) == {"taken back"}


def test_equal_shapes_are_measured_once(inject):
    seen = inject()
    fusewise.optimize(Stem(block(), block()), draw(IMAGE))
    pairs = [["before", "after"]] * 3  # the stem, norm and activation, the excitation
    assert seen == [*pairs, ["before", "after", "parts"], ["original", "swapped"]]


# --- what is left to the parts -------------------------------------------------------------------


def hooked(model, name):
    model.get_submodule(name).register_forward_hook(lambda *_: None)
    return model


def test_an_excitation_that_is_not_fused(inject):
    _, rows = found(Stem(block(hidden=nn.Tanh)))
    said = "module.activation: expected ReLU, SiLU or Hardswish"
    assert rows[NORM].result == "swapped"
    assert rows[SE].result == "unsupported" and rows[SE].reason.startswith(said)
    assert rows[EXCITE].result == "unsupported"
    assert rows[EXCITE].reason.startswith(f"blocks.0.1: {said}")


def test_an_activation_that_is_not_fused(inject):
    """The reason is in the report once."""
    expected = {NORM: "unsupported", ALONE: "swapped", SE: "swapped"}
    assert results(Stem(block(nn.ELU))) == expected


def test_timms_other_excitations(inject):
    timm = pytest.importorskip("timm")
    effective = timm.layers.EffectiveSEModule
    model = Stem(timm.models.resnet.BasicBlock(8, 8, attn_layer=effective))
    _, rows = found(model)
    assert rows[EXCITE].reason.startswith("blocks.0.se: module: ")
    assert "has one convolution" in rows[EXCITE].reason
    assert rows[ALONE].result == "swapped"


def test_parameters_of_two_dtypes(inject):
    model = Stem(block())
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
    model = Stem(block())
    model.blocks[0][0][2] = nn.SiLU()
    _, rows = found(hooked(model, name))
    assert {pattern: row.result for pattern, row in rows.items()} == parts
    assert all("has hooks" in row.reason for row in rows.values() if row.result == "unsupported")


def test_shared_parameters(inject):
    model = Stem(block(), block())
    model.blocks[1][1].fc1 = model.blocks[0][1].fc1
    _, rows = found(model)
    assert rows[EXCITE].result == "unsupported" and "is also used as" in rows[EXCITE].reason
    assert rows[NORM].result == "swapped"


def test_norms_that_are_left_alone(inject):
    class Norm(nn.BatchNorm2d):
        pass

    assert results(Stem(block(norm=Norm))) == {SE: "swapped"}
    assert results(Stem(block(norm=nn.SyncBatchNorm)).eval()) == {SE: "swapped"}


@pytest.mark.parametrize("between", [nn.Dropout(0.1), nn.Conv2d(8, 8, 1), nn.AvgPool2d(2)])
def test_another_layer_in_front_of_the_excitation(inject, between):
    model = Stem(block())
    model.blocks[0].insert(1, between)
    assert results(model.eval()) == {NORM: "swapped", SE: "swapped"}


def test_identities_between_them_are_passed(inject):
    model = Stem(block())
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
    model = Stem(block())
    assert results(model, include="blocks")[EXCITE] == "swapped"
    assert results(model, exclude="blocks.0.1") == {NORM: "swapped"}
    assert results(model, exclude="blocks.0.0.1") == {SE: "swapped"}
    assert results(model, include="blocks.0.0") == {NORM: "swapped"}


def test_a_pattern_of_the_user_comes_before_ours(inject):
    register(torchvision.ops.SqueezeExcitation, lambda module: module)
    try:
        assert results(Stem(block())) == {NORM: "swapped", "SqueezeExcitation": "swapped"}
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
    model = Stem(block())
    compiled = model.get_submodule(name)
    compiled.compile(backend="eager")
    new, rows = found(model)
    assert {pattern: row.result for pattern, row in rows.items()} == dict.fromkeys(left, "swapped")
    assert new.get_submodule(name) is compiled


class Reads(nn.Module):
    """Calls the parts of a block by hand, and reads what is between them in some modes."""

    def __init__(self, modes):
        super().__init__()
        self.block, self.modes = block(), modes

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
    _, report = fusewise.optimize(Stem(block()), draw(IMAGE))
    assert report.lines()[0].startswith("2 of 2 candidates swapped.")  # the stem and the block
    inject(before=100, after=40, parts=40)
    _, report = fusewise.optimize(Stem(block()), draw(IMAGE))
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


# --- afterwards ----------------------------------------------------------------------------------


@pytest.fixture
def swapped(inject):
    """A model and its swapped form, in training."""
    model = shaken(Stem(block()))
    new, rows = found(model)
    assert rows[EXCITE].result == "swapped"
    return model, new


def test_copies_and_compilation(swapped):
    _, new = swapped
    new.eval()
    again = pickle.loads(pickle.dumps(new))
    compiled = torch.compile(copy.deepcopy(new), backend="eager", fullgraph=True)
    with torch.no_grad():
        for each in (again, compiled):
            torch.testing.assert_close(each(draw(IMAGE)), new(draw(IMAGE)))
    again.blocks[0][0][1].weight.data.zero_()
    assert not torch.equal(again(draw(IMAGE)), new(draw(IMAGE)))


def test_a_second_call_finds_nothing(swapped):
    _, report = fusewise.optimize(swapped[1], draw(IMAGE))
    assert not report.rows


def test_hooks_on_the_convolutions_run(swapped):
    model, new = swapped
    seen = []
    for each in (model, new):
        each.blocks[0][1].fc1.register_forward_hook(lambda *_: seen.append(1))
        each.eval()
    torch.testing.assert_close(new(draw(IMAGE)), model(draw(IMAGE)))
    assert seen == [1, 1]


def test_parameters_of_two_dtypes_afterwards(swapped):
    """The norm stays in float32, as it often does in half precision."""
    _, new = swapped
    new.eval()
    expected = new(draw(IMAGE))
    new.bfloat16()
    for norm in (new.bn1, new.blocks[0][0][1]):
        norm.float()
    torch.testing.assert_close(new(draw(IMAGE).bfloat16()).float(), expected, rtol=0.1, atol=0.1)


def test_statistics_of_several_processes(swapped):
    model, new = swapped
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fusewise.nn.convert_sync_batchnorm(new)
        assert new.blocks[0][0][1].process_group is not None
        torch.testing.assert_close(new(draw(IMAGE)), copy.deepcopy(model)(draw(IMAGE)))
    finally:
        torch.distributed.destroy_process_group()


def test_each_part_alone(swapped):
    """By hand, with another layer in the other's place, and with a hook on the norm."""
    model, new = swapped
    model.eval(), new.eval()
    (_, norm, _), gate = new.blocks[0]
    x = draw((2, 8, 5, 5))
    torch.testing.assert_close(gate(x), model.blocks[0][1](x))
    seen = []
    for each in (norm, model.blocks[0][0][2]):
        each.register_forward_hook(lambda _, __, y: seen.append(y.clone()))
    torch.testing.assert_close(new(draw(IMAGE)), model(draw(IMAGE)))
    torch.testing.assert_close(*seen)
    for each in (model, new):
        each.blocks[0][0][1] = nn.Identity()
        each.blocks[0][0][2] = nn.SiLU()
    torch.testing.assert_close(new(draw(IMAGE)), model(draw(IMAGE)))


def test_a_tracer_sees_the_parts(swapped):
    model, new = swapped

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            leaves = BatchNormAct2d, SqueezeExcitation
            return isinstance(module, leaves) or super().is_leaf_module(module, name)

    new.eval()
    graph = torch.fx.GraphModule(new, Tracer().trace(new))
    torch.testing.assert_close(graph(draw(IMAGE)), model.eval()(draw(IMAGE)))


class Checkpointed(nn.Module):
    """A block of which some layers are under a checkpoint."""

    def __init__(self, layers, reentrant):
        super().__init__()
        self.layers, self.reentrant, self.run = layers, reentrant, True

    def forward(self, x):
        return (
            checkpoint(self.layers, x, use_reentrant=self.reentrant) if self.run else self.layers(x)
        )


def stepped(model):
    """Gradients and buffers of a step."""
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    model(draw(IMAGE)).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | dict(model.named_buffers())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(swapped, reentrant):
    """Around the block the statistics are updated twice, as torch does it; around the excitation
    alone once."""
    model, new = (copy.deepcopy(each) for each in swapped)
    for each in (model, new):
        each.blocks[0] = Checkpointed(each.blocks[0], reentrant)
    found, expected = stepped(new), stepped(model)
    assert expected["blocks.0.layers.0.1.num_batches_tracked"] == 2
    torch.testing.assert_close(found, expected)

    model, new = (copy.deepcopy(each) for each in swapped)
    for each in (model, new):
        each.blocks[0][1] = Checkpointed(each.blocks[0][1], reentrant)
    if reentrant:
        said = "expected gradients for both layers or for none; put the block that holds both"
        with pytest.raises(RuntimeError, match=said):
            stepped(new)
        return
    expected = stepped(model)
    assert expected["blocks.0.0.1.num_batches_tracked"] == 1
    torch.testing.assert_close(stepped(new), expected)


def test_one_of_them_without_gradients(swapped):
    _, new = swapped
    conv, norm, _ = new.blocks[0][0]
    with torch.no_grad():
        given = norm(conv(draw((2, 8, 5, 5))))
    with pytest.raises(RuntimeError, match="expected gradients for both layers or for none"):
        new.blocks[0][1](given)


def test_fully_shard_afterwards(swapped):
    """Around both layers it works. Around the norm's container, the norm's parameters are sharded
    again when the excitation reads them."""
    model, new = swapped
    expected = model.eval()(draw(IMAGE))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        whole, part = copy.deepcopy(new), copy.deepcopy(new)
        fully_shard(whole.blocks[0], mesh=mesh)
        torch.testing.assert_close(whole.eval()(draw(IMAGE)), expected)
        for each in (part.blocks[0][0], part):
            fully_shard(each, mesh=mesh)
        with pytest.raises(RuntimeError, match="got a DTensor; apply fully_shard to the block"):
            part(draw(IMAGE))
    finally:
        torch.distributed.destroy_process_group()


def test_an_exception_in_the_middle_of_the_swaps_undoes_them(inject, monkeypatch):
    from fusewise.rewrite.candidate import Edits

    model = shaken(Stem(block()))
    before, replace = names_and_types(model), Edits.replace
    for at in range(20):
        left = [at]

        def interrupted(edits, name, module, left=left):
            if edits.root.model is model:
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
            replace(edits, name, module)

        monkeypatch.setattr(Edits, "replace", interrupted)
        try:
            _, report = fusewise.optimize(model, draw(IMAGE), verify=False, inplace=True)
        except KeyboardInterrupt:
            assert names_and_types(model) == before
        else:
            break
    assert at == 6  # the stem's three layers, the block's three
    assert report.restore() is model and names_and_types(model) == before
