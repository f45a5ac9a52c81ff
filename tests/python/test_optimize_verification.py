"""What `fusewise.optimize` calls right and wrong."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewise
from fusewise.bench.accuracy import Check
from fusewise.nn import MLP, BatchNormAct2d, SqueezeExcitation
from fusewise.rewrite import verify, verify_model
from fusewise.rewrite.candidate import Chain
from fusewise.rewrite.kinks import Kinks
from fusewise.rewrite.registry import _OWN, register
from fusewise.rewrite.setting import Setting
from optimize_models import IMAGE, Stem, draw, inject, shaken

__all__ = ["inject"]


def setting(amp=None, training=True):
    return Setting((), {}, "cpu", training, amp, amp or torch.float32)


def check(before, after, *inputs, amp=None, gradients=True) -> Check:
    return verify.check_slot(before, after, inputs, setting(amp), gradients)


def pair(activation=nn.ReLU, channels=6, max_pool=False, dtype=torch.float32):
    """A chain of torch's layers, and the fused module."""
    norm = shaken(nn.BatchNorm2d(channels)).to(dtype)
    name = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish"}[activation]
    pool = [nn.MaxPool2d(3, 2, 1)] if max_pool else []
    fused = BatchNormAct2d.from_batch_norm(norm, name, max_pool=max_pool)
    return Chain(norm, activation(inplace=True), *pool), fused


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Hardswish])
@pytest.mark.parametrize("what", ["plain", "residual", "pool", "inference"])
def test_right_ones_pass(activation, dtype, what):
    before, after = pair(activation, max_pool=what == "pool")
    if what == "inference":
        before, after = before.eval(), after.eval()
    if dtype == torch.float64:
        before, after = before.double(), after.double()
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = [torch.randn(8, 6, 20, 20).to(dtype) for _ in range(1 + (what == "residual"))]
        found = check(before, after, *inputs)
        assert found.passed, found


def test_means_that_cancel_pass():
    """A running mean near 0 is a sum of large terms."""
    before, after = pair()
    x = torch.randn(8, 6, 20, 20)
    x -= x.mean((0, 2, 3), keepdim=True)
    found = check(before, after, x)
    assert found.passed, found


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_squeeze_and_excitation_and_stacks_pass(amp):
    torchvision = pytest.importorskip("torchvision")
    theirs = shaken(torchvision.ops.SqueezeExcitation(8, 4))
    found = check(theirs, SqueezeExcitation.from_module(theirs), torch.randn(6, 8, 9, 9), amp=amp)
    assert found.passed, found
    stack = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    fused = MLP.from_sequential(stack, keep_names=True)
    assert list(fused.state_dict()) == list(stack.state_dict())
    found = check(stack, fused, torch.randn(500, 16), amp=amp)
    assert found.passed, found


def wrong(right, change):
    """The right module, but its result is changed."""
    forward = right.forward
    right.forward = lambda x: change(forward, x)
    return right


class Detached(torch.autograd.Function):
    """Right forward, wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.01


def first_row_changed(norm, x):
    y = norm(x)
    return torch.cat([y[:1] * 1.001, y[1:]])


def forgets_statistics(norm, x):
    running_mean = norm.__self__.running_mean
    kept = running_mean.clone()
    y = norm(x)
    with torch.no_grad():
        running_mean.copy_(kept)
    return y


def a_missing_value(norm, x):
    y = norm(x)
    mask = torch.zeros_like(y, dtype=torch.bool)
    mask[0, 0, 0, 0] = True
    return y.masked_fill(mask, float("nan"))


@pytest.mark.parametrize(
    "change, said",
    [
        (first_row_changed, "y: off by"),
        (lambda norm, x: Detached.apply(norm(x)), "d(x|weight|bias): off by"),
        (lambda norm, x: norm(x.detach()), "dx: off by"),
        (lambda norm, x: norm(x).detach(), "d(x|weight|bias): off by"),
        (forgets_statistics, "buffer running_mean: off by"),
        (a_missing_value, "y: NaN is not where"),
        (lambda norm, x: norm(x)[:, :, 1:], "y: shapes"),
        (lambda norm, x: norm(x).double(), "y: torch.float64, not torch.float32"),
        (lambda norm, x: F.relu6(norm(x) * 4) / 4, "y: off by"),
        (lambda norm, x: F.leaky_relu(norm(x) - 1e-4, 0.0), "y: off by"),
    ],
)
def test_wrong_ones_are_found(change, said):
    before, after = pair()
    found = check(before, wrong(after, change), 2 * torch.randn(8, 6, 20, 20))
    assert not found.passed
    assert re.match(said, str(found)), found


def test_wrong_gradients_are_found_in_half_precision():
    before, after = pair()
    x = torch.randn(8, 6, 20, 20).bfloat16()
    assert check(before, after, x).passed
    found = check(before, wrong(after, lambda norm, x: norm(x.detach())), x)
    assert str(found).startswith("dx: off by")


def test_the_module_is_as_it_was_after_a_check():
    before, after = pair()
    kept = copy.deepcopy(before.state_dict())
    versions = [buffer._version for buffer in before.buffers()]
    check(before, after, torch.randn(4, 6, 5, 5))
    assert all(torch.equal(kept[name], value) for name, value in before.state_dict().items())
    assert versions == [buffer._version for buffer in before.buffers()]
    assert all(parameter.grad is None for parameter in before.parameters())


@pytest.mark.parametrize(
    "function, values, near",
    [
        (F.relu, [-1.0, 0.0, 1e-9, 1.0], [0, 1, 1, 0]),
        (F.relu6, [-1.0, 1e-9, 6.0, 7.0], [0, 1, 1, 0]),
        (F.hardswish, [-3.0, 0.0, 3.0, 4.0], [1, 0, 1, 0]),
        (nn.ReLU(inplace=True), [-1.0, 0.0, 2.0, 1.0], [0, 1, 0, 0]),
        (torch.relu, [-1.0, 0.0, 2.0, 1.0], [0, 1, 0, 0]),
        (F.silu, [-1.0, 0.0, 2.0, 1.0], [0, 0, 0, 0]),
    ],
)
def test_kinks(function, values, near):
    x = torch.tensor(values, dtype=torch.float64)
    with Kinks(torch.float32) as kinks:
        y = function(x.clone())
    assert kinks.at(y).int().tolist() == near


def test_kinks_in_hidden_units_reach_their_rows():
    x = torch.tensor([[1.0, 2.0], [0.0, 3.0], [4.0, 5.0]], dtype=torch.float64)
    with Kinks(torch.float32) as kinks:
        hidden = F.relu(x)
        y = hidden @ torch.ones(2, 4, dtype=torch.float64)
    assert kinks.at(y).any(1).tolist() == [False, True, False]
    assert kinks.at(y).all(1).tolist() == [False, True, False]


def test_ties_of_a_pooling():
    x = torch.arange(36.0, dtype=torch.float64).view(1, 1, 6, 6)
    x[0, 0, 5, 5] = x[0, 0, 5, 4]
    with Kinks(torch.float32) as kinks:
        y = nn.MaxPool2d(3, 2, 1)(x)
    found = kinks.at(y)
    assert found.sum() == 1 and found[0, 0, 2, 2]
    with Kinks(torch.float32) as kinks:
        y = F.max_pool2d(x, 3, 2, 1, 1, True)
    assert not kinks.at(y).any()


# --- in the whole ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight[:, None, None]


@pytest.fixture
def registered():
    """Registers conversions of Block for one test."""
    yield lambda convert: register(Block, convert)
    _OWN.clear()


def like(block, function):
    made = Block()
    made.weight = block.weight
    made.forward = function.__get__(made)
    return made


def test_a_wrong_candidate_is_not_swapped(inject, registered):
    registered(lambda block: like(block, lambda self, x: x * self.weight[:, None, None] * 1.001))
    new, report = fusewise.optimize(Stem(Block()), draw(IMAGE))
    rows = {row.name: row for row in report.rows}
    assert rows["bn1"].result == "swapped"
    assert rows["blocks.0"].result == "WRONG" and "y: off by" in rows["blocks.0"].reason
    assert rows["blocks.0"].error > rows["blocks.0"].allowed > 0
    assert "forward" not in new.blocks[0].__dict__


def test_wrong_in_the_other_mode_only(inject, registered):
    def forward(self, x):
        return x * self.weight[:, None, None] * (1.0 if self.training else 1.1)

    registered(lambda block: like(block, forward))
    _, report = fusewise.optimize(Stem(Block()), draw(IMAGE), training=True)
    assert {row.name: row.result for row in report.rows}["blocks.0"] == "WRONG"
    _, report = fusewise.optimize(Stem(Block()), draw(IMAGE), training=True, verify=False)
    assert {row.name: row.result for row in report.rows}["blocks.0"] == "swapped"


@pytest.mark.parametrize("seed", range(20))
def test_running_means_near_0(seed):
    """They are sums of much larger terms. Nevertheless a wrong value is found."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.SiLU())
    ours = nn.Sequential(model[0], BatchNormAct2d.from_batch_norm(copy.deepcopy(model[1]), "silu"))
    given = Setting.make(model, torch.randn(8, 3, 32, 32), True, False)
    assert verify_model.check_model(model, ours, given, gradients=True).passed
    ours[1].momentum = 0.101
    found = verify_model.check_model(model, ours, given, gradients=True)
    assert not found.passed and found.tensor == "buffers"


def test_a_running_mean_near_0_excuses_no_other_buffer():
    """Its rounding is large beside its value, not beside the terms of its sum."""
    right = [torch.tensor([1e-6]), torch.tensor([1.0])]
    for wrong, passes in ((0.0, True), (1e-4, False)):
        ours = [right[0], right[1] + wrong]
        found = verify_model._together(
            "buffers", right, right, right, ours, torch.float32, terms=[1.0, 0.0]
        )
        assert found.passed == passes, found


def test_swaps_are_taken_back_if_the_whole_is_wrong(inject, registered):
    """Each call alone is right; the module counts its calls."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x * self.weight[:, None, None] * (1.0 if self.calls < 2 else 1.1)

    registered(lambda block: like(block, forward))

    class TwiceTheBlock(Stem):
        def forward(self, x):
            return super().forward(x) + self.blocks(x[:, :1].expand(-1, 8, -1, -1)).mean()

    new, report = fusewise.optimize(TwiceTheBlock(Block()), draw(IMAGE))
    assert {row.result for row in report.rows} == {"taken back"}
    assert "the whole model is WRONG, outputs: off by" in report.conclusion
    assert "outputs: off by" in report.whole["swapped"]["wrong"]
    assert report.returned == "original"
    assert type(new.bn1) is nn.BatchNorm2d


@pytest.mark.parametrize("amp", [False, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_whole_models(inject, amp, training):
    """Dropout and kinks do not make a right model wrong."""
    resnet = pytest.importorskip("torchvision").models.resnet
    model = Stem(*(resnet.BasicBlock(8, 8) for _ in range(4)), nn.Dropout(0.3))
    _, report = fusewise.optimize(model, draw((8, 3, 24, 24)), training=training, amp=amp)
    assert {row.result for row in report.rows} == {"swapped"}, report


def test_a_model_that_insists_on_its_dtype(inject):
    class Insists(Stem):
        def forward(self, x):
            return super().forward(x.float())

    _, report = fusewise.optimize(Insists(nn.Identity()), draw(IMAGE))
    assert report.swapped
