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
from optimize_models import IMAGE, ROWS, Stem, draw, inject, shaken

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
    assert not found.passed and found.tensor.startswith("buffer 1.running_")


AMPS = (False, torch.bfloat16, torch.float16)


def norm_behind_norm():
    """What the first norm's bias adds, the second subtracts. So the true value of the second one's
    running mean is 0, and so are the gradients of the biases of convolution and first norm. Torch
    gets rounding errors, infinitely large beside the values."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False)
    norms = [nn.BatchNorm2d(8) for _ in range(3)]
    for norm in norms:
        norm.running_var.fill_(2.0)  # that an update is more than its rounding
    model = nn.Sequential(first, *norms[:2], nn.SiLU(), second, norms[2], nn.SiLU())
    return model, torch.randn(2, 3, 20, 20)


def a_tenth_too_much(gradient):
    return gradient * 1.1


def one_wrong_element(gradient):
    wrong = gradient.clone()
    wrong.view(-1)[gradient.abs().argmin()] += gradient.abs().max()
    return wrong


def with_fault(model, name, fault):
    """A copy in which the gradient of one parameter is wrong."""
    made = copy.deepcopy(model)
    made.get_parameter(name).register_hook(fault)
    return made


def check_whole(model, ours, x, amp=False, training=True) -> Check:
    given = Setting.make(model, x, training, amp)
    return verify_model.check_model(model, ours, given, gradients=training)


@pytest.mark.parametrize("amp", AMPS, ids=str)
@pytest.mark.parametrize("fault", [a_tenth_too_much, one_wrong_element, torch.zeros_like])
def test_a_wrong_gradient_beside_tensors_of_0(fault, amp):
    """Nothing but the whole model is wrong, and torch's error where the value is 0 excuses none."""
    model, x = norm_behind_norm()
    assert check_whole(model, copy.deepcopy(model), x, amp).passed
    for name in ("0.weight", "2.weight", "2.bias", "4.weight", "5.weight", "5.bias"):
        found = check_whole(model, with_fault(model, name, fault), x, amp)
        assert not found.passed and found.tensor == f"gradient of {name}", found


@pytest.mark.parametrize("amp", AMPS, ids=str)
@pytest.mark.parametrize("name", ["1.running_mean", "1.running_var", "2.running_var"])
def test_a_wrong_statistic_beside_tensors_of_0(name, amp):
    model, x = norm_behind_norm()
    ours = copy.deepcopy(model)
    place, _, key = name.rpartition(".")
    before = model.get_buffer(name).clone()

    def a_tenth_of_the_update_more(norm, *_):
        # Not through autograd: torch's backward expects its own statistics.
        getattr(norm, key).data.lerp_(before, -0.1)

    ours.get_submodule(place).register_forward_hook(a_tenth_of_the_update_more)
    found = check_whole(model, ours, x, amp)
    assert not found.passed and found.tensor == f"buffer {name}", found


def test_a_factor_in_half_precision():
    """In a deep network rounding hides a quarter in each element, and averages out in their sum."""
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model, x = torchvision.models.mobilenet_v3_small(), torch.randn(2, 3, 64, 64)
    name = "features.12.0.weight"
    ours = with_fault(model, name, lambda gradient: gradient * 1.25)
    found = check_whole(model, ours, x, torch.bfloat16)
    assert not found.passed and found.tensor == f"gradient of {name}", found
    assert "of the whole" in found.wrong


@pytest.mark.parametrize(
    "wrong, found", [([1], False), ([1, 2, 3, 4], False), ([0], True), ([0, 1, 2, 3, 4], True)]
)
def test_what_is_wrong_in_some_runs_only(wrong, found):
    """A kink decided by rounding is. The first run must not be off by more than torch anywhere."""
    model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4))
    runs = iter(range(5))

    def fault(gradient):
        return gradient * (1.1 if next(runs) in wrong else 1.0)

    check = check_whole(model, with_fault(model, "2.weight", fault), draw(ROWS))
    assert check.passed != found, check


def test_nan_in_any_run_is_wrong():
    model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4))
    runs = iter(range(5))

    def fault(gradient):
        return gradient * (float("nan") if next(runs) == 3 else 1.0)

    check = check_whole(model, with_fault(model, "2.weight", fault), draw(ROWS))
    assert str(check).startswith("gradient of 2.weight: NaN is not where")


def several_layers():
    def block(*channels):
        return nn.Conv2d(*channels, 3, bias=False), nn.BatchNorm2d(channels[1]), nn.SiLU()

    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 32))


def perceptrons():
    """A stem of patches and stacks as a vision transformer has them."""
    stacks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
    return nn.Sequential(nn.Conv2d(3, 32, 8, 8), nn.Flatten(2), nn.Linear(64, 32), *stacks)


def mobilenet():
    return pytest.importorskip("torchvision").models.mobilenet_v3_small()


@pytest.mark.parametrize("amp", [False, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make, training, seeds",
    [
        (several_layers, True, 2),
        (several_layers, False, 2),
        (perceptrons, True, 2),
        (mobilenet, True, 1),
    ],
)
def test_right_models_pass(inject, make, training, seeds, amp):
    for seed in range(seeds):
        torch.manual_seed(seed)
        model, x = make().train(training), torch.randn(2, 3, 64, 64)
        new, _ = fusewise.optimize(model, x, amp=amp, verify=False)
        found = check_whole(model, new, x, amp, training)
        assert found.passed, found


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
    assert "the whole model is WRONG, output 0: off by" in report.conclusion
    assert "output 0: off by" in report.whole["swapped"]["wrong"]
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
