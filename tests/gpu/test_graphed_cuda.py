"""fusewise.graphed on a GPU: the graphs give what the model gives.

Everything around the graphs is tested without a GPU in tests/python/test_graphed.py.
"""

import copy

import pytest
import torch
from torch import nn

import fusewise
from fusewise.nn import MLP, BatchNormAct2d, LinearAct
from gpu_helpers import allocated, needs_gpu
from reference import same_bits

pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def _same_convolutions():
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


class Images(nn.Module):
    """A small ResNet's parts: convolution, BatchNorm, a residual, pooling, a classifier."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False), BatchNormAct2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, 1, 1, bias=False), BatchNormAct2d(16)
        self.drop, self.fc = nn.Dropout(dropout), LinearAct(16, 10, activation="identity")

    def forward(self, x, *, mask=None):
        x = self.bn1(self.conv1(x))
        x = self.bn2(self.conv2(x), x)
        if mask is not None:
            x = x * mask[:, None, None, None]
        return self.fc(self.drop(x.mean((2, 3))))


def images(batch=8):
    return torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)


def linet():
    return fusewise.models.li_resnet18((3, 1, 1), num_classes=10, width=0.25)


def streams(batch=4):
    return [torch.randn(batch, c, 48, 64, device="cuda") for c in (3, 1, 1)]


CASES = {
    "images": (Images, lambda: [images()]),
    "mlp": (lambda: MLP([64, 128, 32]), lambda: [torch.randn(256, 64, device="cuda")]),
    "autoencoder": (
        fusewise.models.SpectralShapeAutoencoder,
        lambda: [torch.randn(512, 320, device="cuda")],
    ),
    "linet": (linet, streams),
}


def train(model, batches, dtype=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for x in batches:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            y = model(*x)
        optimizer.zero_grad()
        y.float().square().mean().backward()
        optimizer.step()
        found.append(y.detach())
    return found, {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_training_steps(case, dtype):
    """Outputs, parameters and running statistics after five steps, as without graphs."""
    make, draw = CASES[case]
    plain = make().cuda()
    other = copy.deepcopy(plain)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        ours = fusewise.graphed(other, *draw())
    for name, t in plain.state_dict().items():
        assert same_bits(other.state_dict()[name], t), f"{name} changed during the capture"
    batches = [draw() for _ in range(5)]
    outputs, state = train(ours, batches, dtype)
    right, right_state = train(plain, batches, dtype)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype is None else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(outputs, right, **tolerance)
    torch.testing.assert_close(state, right_state, **tolerance)


def test_garbage_is_not_collected_during_a_capture():
    """It may hold an earlier graph. Destroying one would invalidate the capture."""

    class Litters(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.kept = [fusewise.graphed(Images().cuda(), images())]

        def forward(self, x):
            if torch.cuda.is_current_stream_capturing() and self.kept:
                cycle = [self.kept.pop()]
                cycle.append(cycle)
                del cycle
                many = [[] for _ in range(100_000)]  # enough for a collection of every generation
                del many
            return self.fc(x)

    plain, x = Litters().cuda(), torch.randn(4, 3, device="cuda")
    torch.testing.assert_close(fusewise.graphed(plain, x)(x), plain(x))
    assert not plain.kept


def test_keywords():
    plain = Images().cuda()
    mask = torch.ones(8, device="cuda")
    ours = fusewise.graphed(copy.deepcopy(plain), images(), mask=mask)
    for _ in range(3):
        x, mask = images(), torch.rand(8, device="cuda")
        torch.testing.assert_close(ours(x, mask=mask), plain(x, mask=mask))
    model = linet().cuda()
    blanked = torch.zeros(3, 4, dtype=torch.bool, device="cuda")
    ours = fusewise.graphed(copy.deepcopy(model), *streams(), blanked=blanked)
    for i in range(3):
        x, blanked = streams(), torch.rand(3, 4, device="cuda") < 0.4
        x[i].masked_fill_(blanked[i][:, None, None, None], float("nan"))
        y, right = ours(*x, blanked=blanked), model(*x, blanked=blanked)
        torch.testing.assert_close(y, right)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(model.named_buffers()))


def test_gradients_of_inputs():
    plain = Images().cuda()
    ours = fusewise.graphed(copy.deepcopy(plain), images().requires_grad_())
    for _ in range(3):
        x = images().requires_grad_()
        slopes = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (ours, plain)]
        torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up(set_to_none):
    plain = Images().cuda()
    ours = fusewise.graphed(copy.deepcopy(plain), images())
    for _ in range(2):
        for _ in range(3):
            x = images()
            for m in (plain, ours):
                m(x).square().sum().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
        plain.zero_grad(set_to_none), ours.zero_grad(set_to_none)


def test_dropout_draws_anew():
    """Random numbers are as before the capture, and each replay draws others."""
    model, x = Images(dropout=0.5).cuda(), images()
    state = torch.cuda.get_rng_state()
    ours = fusewise.graphed(model, x)
    torch.testing.assert_close(torch.cuda.get_rng_state(), state)
    first = ours(x)
    assert not torch.equal(first, ours(x))
    torch.manual_seed(3)
    found = ours(x)
    torch.manual_seed(3)
    assert torch.equal(ours(x), found)


@pytest.mark.parametrize("training", [True, False])
def test_modes(training):
    plain = Images().cuda().train(training)
    other = copy.deepcopy(plain)
    ours = fusewise.graphed(other, images())
    for _ in range(2):
        for mode in (training, not training):
            ours.train(mode), plain.train(mode)
            x = images(8 if mode == training else 5)
            torch.testing.assert_close(ours(x), plain(x))
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


def test_without_gradients():
    plain = Images().cuda().eval()
    with torch.no_grad():
        ours = fusewise.graphed(plain, images())
        for _ in range(2):
            x = images()
            torch.testing.assert_close(ours(x), plain(x))
    with torch.inference_mode():
        x = images()
        torch.testing.assert_close(ours(x), plain(x))
    with pytest.raises(RuntimeError, match="needs a gradient, but was captured without"):
        ours(images())


def test_an_untuned_gemm():
    """The calls before the capture choose the algorithms; forward and backward of the graph run
    the chosen ones, bit for bit."""
    plain = LinearAct(327, 91, activation="gelu").cuda()
    x = torch.randn(1000, 327, device="cuda")
    ours = fusewise.graphed(plain, x)
    found = [ours(x)]
    found += torch.autograd.grad(found[0].square().sum(), list(plain.parameters()))
    right = [plain(x)]
    right += torch.autograd.grad(right[0].square().sum(), list(plain.parameters()))
    for one, other in zip(found, right, strict=True):
        assert same_bits(one.detach(), other.detach())


class Waits(nn.Module):
    def __init__(self, backward):
        super().__init__()
        self.scale, self.backward = nn.Parameter(torch.ones(())), backward

    def forward(self, x):
        y = x * self.scale
        if self.backward:
            y.register_hook(lambda dy: dy * dy.sum().item())
            return y
        return y if y.sum().item() > 0 else -y


@pytest.mark.parametrize("backward", [False, True])
def test_a_model_that_waits_for_the_gpu(backward):
    model, x = Waits(backward).cuda(), torch.ones(3, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    with pytest.raises(RuntimeError, match="^graphed: the model waits for the GPU, which a graph"):
        fusewise.graphed(model, x)
    assert torch.cuda.get_sync_debug_mode() == before
    # The device still works, and so does another capture.
    assert fusewise.graphed(Images().cuda(), images())(images()).isfinite().all()


def test_the_callers_tensors_stay():
    x = images()
    kept = x.clone()
    ours = fusewise.graphed(Images().cuda(), x)
    first = ours(images())
    value = first.detach().clone()
    ours(images())
    assert torch.equal(x, kept) and torch.equal(first, value)


def test_memory_comes_back():
    def work():  # without GEMMs and convolutions, whose libraries keep workspaces per stream
        ours = fusewise.graphed(BatchNormAct2d(3).cuda(), images())
        ours(images()).sum().backward()

    work()
    before = allocated()
    work()
    assert allocated() == before


def test_a_graph_has_no_work_for_the_host():
    """A replayed step launches two graphs and what autograd adds, but none of the model's ops."""
    ours = fusewise.graphed(linet().cuda(), *streams())
    x = streams()
    ours(*x).sum().backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        ours(*x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert not any("convolution" in name or "fusewise::" in name for name in names), names


def test_a_cpu_input_is_named():
    with pytest.raises(RuntimeError, match=r"expected CUDA tensors, got cpu \(inputs\[0\]\)"):
        fusewise.graphed(Images().cuda(), torch.randn(8, 3, 32, 32))
    with pytest.raises(RuntimeError, match=r"expected CUDA tensors, got cpu \(conv1.weight\)"):
        fusewise.graphed(Images(), images())
    ours = fusewise.graphed(Images().cuda(), images())
    with pytest.raises(RuntimeError, match=r"inputs\[0\]: expected device cuda:0 as captured, got"):
        ours(images().cpu())


@pytest.mark.two_gpus
def test_second_device_while_the_first_is_current():
    plain = Images().to("cuda:1")
    ours = fusewise.graphed(copy.deepcopy(plain), images().to("cuda:1"))
    x = images().to("cuda:1")
    torch.testing.assert_close(ours(x), plain(x))
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="expected all tensors on one device, got inputs"):
        fusewise.graphed(plain, images())
