"""BatchNorm + activation inside torch: autocast, checkpointing, export, transforms, hooks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusewise
from batch_norm_reference import ACTIVATIONS, kept_bytes, pooled
from fusewise import _ops
from fusewise.functional import batch_norm_act
from fusewise.nn import BatchNormAct2d
from test_fakes import expect_as_told


class Block(nn.Module):
    """Convolution, BatchNorm, activation; the last two ours or torch's."""

    def __init__(self, ours):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        norm = nn.BatchNorm2d(8)
        self.norm = BatchNormAct2d.from_batch_norm(norm) if ours else nn.Sequential(norm, nn.ReLU())

    def forward(self, x):
        return self.norm(self.convolution(x))

    def statistics(self):
        return [t for name, t in self.state_dict().items() if "running" in name or "num" in name]


def pair(device="cpu"):
    return Block(True).to(device), Block(False).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(device, dtype):
    """As for torch's batch_norm: half-precision data beside float32 parameters, and float32 data as
    it is."""
    ours, theirs = pair(device)
    x = torch.randn(4, 3, 6, 6, device=device)
    with torch.autocast(device, dtype):
        y, expected = ours(x), theirs(x)
        assert batch_norm_act(x, None, None, training=True).dtype == torch.float32
        assert batch_norm_act(x.double(), None, None, training=True).dtype == torch.float64
    assert y.dtype == expected.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert ours.norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(ours.statistics(), theirs.statistics(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_checkpointing_updates_the_statistics_again(device, reentrant):
    """The recomputation is another forward, for torch's layer as well."""
    ours, theirs = pair(device)
    x = torch.randn(4, 3, 6, 6, device=device, requires_grad=True)
    gradients = []
    for model in (ours, theirs):
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
        gradients.append(x.grad.clone())
        x.grad = None
    torch.testing.assert_close(*gradients)
    assert ours.norm.num_batches_tracked == theirs.norm[0].num_batches_tracked == 2
    torch.testing.assert_close(ours.statistics(), theirs.statistics())


def test_compile_with_the_cumulative_average(device):
    torch._dynamo.reset()
    ours = BatchNormAct2d(4, "silu", momentum=None, device=device)
    theirs = nn.BatchNorm2d(4, momentum=None, device=device)
    compiled = torch.compile(ours, fullgraph=True)
    for _ in range(3):
        x = torch.randn(3, 4, 5, 5, device=device, requires_grad=True)
        y, expected = compiled(x), F.silu(theirs(x))
        torch.testing.assert_close(y, expected)
        found, right = (torch.autograd.grad(t.square().sum(), x)[0] for t in (y, expected))
        torch.testing.assert_close(found, right)
    torch.testing.assert_close(list(ours.buffers()), list(theirs.buffers()))


def test_compile_with_sizes_that_change(device):
    torch._dynamo.reset()
    ours, eager = BatchNormAct2d(4, device=device), BatchNormAct2d(4, device=device)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    for n, side in ((2, 5), (3, 6), (7, 4)):
        x, residual = (torch.randn(n, 4, side, side, device=device) for _ in range(2))
        torch.testing.assert_close(compiled(x, residual), eager(x, residual))


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_export(device, training):
    """The running statistics are buffers that the exported program updates."""
    ours = BatchNormAct2d(4, device=device).train(training)
    eager = copy.deepcopy(ours)
    x = torch.randn(3, 4, 5, 5, device=device)
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(ours, (x,), dynamic_shapes=({0: batch},)).module()
    other = torch.randn(6, 4, 5, 5, device=device)
    torch.testing.assert_close(exported(other), eager(other))
    for name, value in eager.named_buffers():
        torch.testing.assert_close(dict(exported.named_buffers())[name], value)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("adds", [False, True], ids=["", "add"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_kept_for_backward(device, activation, adds, layout):
    """x and the statistics; with a residual also a bit per value, or the residual itself. Torch
    keeps what it gives the activation, or the result."""
    theirs = nn.BatchNorm2d(8, device=device)
    ours = BatchNormAct2d.from_batch_norm(theirs, activation)
    x, residual = (torch.randn(4, 8, 6, 6, device=device).to(memory_format=layout) for _ in "xr")
    x, residual = x.requires_grad_(), residual.requires_grad_() if adds else None

    def eager():
        v = theirs(x)
        if adds:
            v += residual
        inplace = {} if activation == "identity" else {"inplace": True}
        return ACTIVATIONS[activation](v, **inplace)

    known = (*theirs.parameters(), *theirs.buffers())
    found = kept_bytes(lambda: ours(x, residual), known)
    assert found <= kept_bytes(eager, known)
    more = {"silu": x.nbytes, "hardswish": x.nbytes, "identity": 0}.get(activation, x.numel() // 8)
    assert found == x.nbytes + 2 * 8 * 4 + adds * more


def test_what_is_kept_for_the_backward_of_the_stem(device):
    """x, the statistics and a byte per result."""
    theirs = nn.BatchNorm2d(8, device=device)
    ours = BatchNormAct2d.from_batch_norm(theirs, max_pool=True)
    x = torch.randn(4, 8, 6, 6, device=device, requires_grad=True)
    known = (*theirs.parameters(), *theirs.buffers())
    found = kept_bytes(lambda: ours(x), known)
    assert found == x.nbytes + 2 * 8 * 4 + x.numel() // 4
    assert found < kept_bytes(lambda: pooled(F.relu(theirs(x), inplace=True)), known)


def test_gradient_penalty(device):
    """A second backward through the statistics."""
    penalties = []
    for ours in (True, False):
        torch.manual_seed(0)
        x = torch.randn(3, 4, 3, 3, device=device, dtype=torch.float64, requires_grad=True)
        residual = torch.randn_like(x, requires_grad=True)
        weight = torch.randn(4, device=device, dtype=torch.float64, requires_grad=True)
        if ours:
            y = batch_norm_act(x, None, None, weight, None, residual, training=True)
        else:
            y = (F.batch_norm(x, None, None, weight, training=True) + residual).relu()
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        penalty = dx.norm()
        penalties.append([penalty, *torch.autograd.grad(penalty, (x, weight, residual))])
    torch.testing.assert_close(*penalties)


def test_transforms(device):
    """torch.func sees torch's own operators."""
    x, t = (torch.randn(3, 4, 3, 3, device=device, dtype=torch.float64) for _ in range(2))

    def ours(x):
        return batch_norm_act(x, None, None, activation="silu", training=True)

    def theirs(x):
        return F.silu(F.batch_norm(x, None, None, training=True))

    for fn in (lambda f: torch.func.jvp(f, (x,), (t,))[1], lambda f: torch.func.vjp(f, x)[1](t)[0]):
        torch.testing.assert_close(fn(ours), fn(theirs))
    xs = torch.stack([x, t])
    torch.testing.assert_close(torch.func.vmap(ours)(xs), torch.stack([theirs(x), theirs(t)]))


def test_frozen_and_partial_gradients(device):
    norm = BatchNormAct2d(4, device=device)
    x = torch.randn(3, 4, 3, 3, device=device)
    norm.weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.weight.grad is None and norm.bias.grad is not None
    with torch.inference_mode():
        assert not norm(x).requires_grad
    norm.requires_grad_(False)
    assert not norm(x).requires_grad
    residual = torch.randn_like(x, requires_grad=True)
    norm(x, residual).sum().backward()
    assert residual.grad is not None


def unstacked(t):
    return torch.stack([t, t], -1)[..., 0]


def contiguous(t):
    """What save_on_cpu(pin_memory=True) does to a layout."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def channels_last(t):
    return t.movedim(-3, -1).contiguous().movedim(-1, -3) if t.dim() > 3 else t


@pytest.mark.parametrize("hook", [unstacked, contiguous, channels_last])
@pytest.mark.parametrize("adjacent", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("streams", [(), (2,)], ids=["one", "two"])
@pytest.mark.parametrize("max_pool", [False, True], ids=["residual", "pool"])
def test_hooks_on_saved_tensors_may_change_strides(device, hook, adjacent, streams, max_pool):
    """Backward takes forward's decisions in the order of forward's x, a second backward too."""
    x, residual = torch.randn(2, *streams, 3, 4, 5, 6, device=device, dtype=torch.float64)
    if adjacent:
        x = channels_last(x)
    x.requires_grad_()
    if max_pool:
        residual = None

    def loss():
        y = batch_norm_act(x, None, None, residual=residual, training=True, max_pool=max_pool)
        return y.pow(3).sum()

    def differentiated(value):
        (dx,) = torch.autograd.grad(value, x, create_graph=True)
        (once,) = torch.autograd.grad(value, x, retain_graph=True)
        return once, dx, *torch.autograd.grad(dx.square().sum(), x)

    right = differentiated(loss())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, hook):
        hooked = loss()
    torch.testing.assert_close(differentiated(hooked), right)


def expanded(t):
    return t[..., :1, :1].expand(t.shape)


@pytest.mark.parametrize("layout", [contiguous, channels_last, expanded])
@pytest.mark.parametrize("adjacent", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("streams", [(), (2,)], ids=["one", "two"])
@pytest.mark.parametrize("max_pool", [False, True], ids=["residual", "pool"])
def test_backward_reads_images_of_one_layout(
    device, monkeypatch, layout, adjacent, streams, max_pool
):
    """The gradient and the residual are copied into the layout of x, which is what the fast kernels
    take. Without an activation, dresidual is still dy itself."""
    x, residual = torch.randn(2, *streams, 3, 4, 5, 6, device=device, dtype=torch.float64)
    x = (channels_last if adjacent else contiguous)(x).requires_grad_()
    residual = None if max_pool else layout(residual).detach().requires_grad_()
    operator = _ops.BATCH_NORM_ACT_POOL if max_pool else _ops.BATCH_NORM_ACT
    backward, seen = operator.backward, []

    def recorded(dy, x, *others):
        images = [t for t in others if isinstance(t, torch.Tensor) and t.shape == x.shape]
        seen.extend([x, dy, *images])
        return backward(dy, x, *others)

    monkeypatch.setattr(operator, "backward", recorded)
    for activation in ("silu", "relu", "identity"):
        options = {"activation": activation, "training": True, "max_pool": max_pool}
        y = batch_norm_act(x, None, None, residual=residual, **options)
        dy = layout(torch.randn_like(y))
        inputs = [x] if max_pool else [x, residual]
        seen.clear()
        found = torch.autograd.grad(y, inputs, dy)
        assert len(seen) == 2 + (activation == "silu" and not max_pool)
        for image in seen:
            assert (image.movedim(-3, -1) if adjacent else image).is_contiguous()
        with fusewise.implementation("torch"):
            y = batch_norm_act(x, None, None, residual=residual, **options)
        torch.testing.assert_close(found, torch.autograd.grad(y, inputs, dy))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compile_with_a_residual(device, activation):
    torch._dynamo.reset()
    inputs = [torch.randn(3, 4, 5, 5, device=device, requires_grad=True) for _ in "xr"]

    def loss(x, residual):
        options = {"activation": activation, "training": True}
        return batch_norm_act(x, None, None, residual=residual, **options).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, right = (torch.autograd.grad(fn(*inputs), inputs) for fn in (compiled, loss))
    torch.testing.assert_close(found, right)


def test_layouts_that_differ_when_compiled(device):
    x = torch.randn(3, 8, 4, 6, device=device).to(memory_format=torch.channels_last)
    x, residual = x.requires_grad_(), torch.randn(x.shape, device=device)

    def loss(x):
        options = {"activation": "silu", "training": True}
        return batch_norm_act(x, None, None, residual=residual, **options).mean((2, 3)).exp().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, right = (torch.autograd.grad(fn(x), x)[0] for fn in (compiled, loss))
    torch.testing.assert_close(found, right)
    assert found.stride() == x.stride()


def test_forced_torch_is_torchs_own(device):
    ours, theirs = pair(device)
    x = torch.randn(4, 3, 6, 6, device=device)
    with fusewise.implementation("torch"):
        torch.testing.assert_close(ours(x), theirs(x))
        traced = torch.jit.trace(ours.eval(), x, check_trace=False)
    torch.testing.assert_close(ours.statistics(), theirs.statistics())
    torch.testing.assert_close(traced(x), theirs.eval()(x))
    with pytest.raises(RuntimeError, match="torch.jit.script cannot compile"):
        torch.jit.script(ours)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("kind", ["residual", "max-pool", "without statistics"])
def test_fx_sees_torchs_operators(device, kind, training):
    theirs = nn.BatchNorm2d(6, track_running_stats=kind != "without statistics").to(device)
    theirs.train(training)
    x, residual = torch.randn(2, 3, 6, 8, 5, device=device)
    expected = F.relu(copy.deepcopy(theirs)(x) + (residual if kind == "residual" else 0))
    if kind == "max-pool":
        expected = F.max_pool2d(expected, 3, 2, 1)
    ours = BatchNormAct2d.from_batch_norm(theirs, "relu", max_pool=kind == "max-pool")
    without = {} if kind == "residual" else {"residual": None}
    with pytest.raises(TypeError, match="torch.fx cannot trace a fused operator"):
        torch.fx.symbolic_trace(ours, without)
    with fusewise.implementation("torch"):
        traced = torch.fx.symbolic_trace(ours, without)
    assert "fusewise" not in traced.code
    torch.testing.assert_close(traced(x, None if without else residual), expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("residual", [True, False])
def test_fakes(device, layout, residual):
    """What tracers are told of the results."""
    x = torch.randn(2, 5, 3, 4, device=device).to(memory_format=layout)
    weight = torch.randn(5, device=device)
    inputs = (x, None, None, weight, None, x.clone() if residual else None, None, None, None)
    options = ("relu", True, 0.1, 1e-5)
    operator = _ops.BATCH_NORM_ACT
    for save in (False, True):
        expect_as_told(operator.forward, *inputs, *options, save, "")
    _, saved = operator.forward(*inputs, *options, True, "")
    read = (x, weight, None, None, None, None, saved)
    needed = 1 | 1 << operator.index["weight"] | 1 << operator.index["group"]
    expect_as_told(operator.backward, x, *read, "relu", True, needed, "")
    expect_as_told(torch.ops.fusewise._batch_norm_statistics, x, None, False, "")
    pool = _ops.BATCH_NORM_ACT_POOL
    inputs = (x, None, None, weight, None, None, None, None)
    for save in (False, True):
        expect_as_told(pool.forward, *inputs, *options, save, "")
    y, saved = pool.forward(*inputs, *options, True, "")
    expect_as_told(pool.backward, y, x, weight, None, None, None, saved, "relu", True, 0b1001, "")


WRONG = {
    "running_var: expected running_mean's dtype float32, got float64": {
        "running_var": torch.ones(3, dtype=torch.float64)
    },
    "running_mean and running_var: expected both or none": {"running_var": None},
    "weight: expected [3], got [4]": {"weight": torch.ones(4)},
    "x: expected a floating dtype, got int64": {"x": torch.ones(2, 3, 4, 4, dtype=torch.int64)},
    "x: expected [S, N, C, H, W] or [N, C, H, W] with S, C, H and W >= 1, got [2, 3, 0, 4]": {
        "x": torch.ones(2, 3, 0, 4)
    },
    "blanked: expected dtype bool, got int64": {"blanked": torch.zeros(2, dtype=torch.int64)},
    "blanked: expected [2], got [2, 1]": {"blanked": torch.zeros(2, 1, dtype=torch.bool)},
    "num_batches_tracked: expected a scalar, got [1]": {
        "num_batches_tracked": torch.zeros(1).long()
    },
    "num_batches_tracked: expected a scalar or [2], got [3]": {
        "x": torch.zeros(2, 2, 4, 3, 3),
        "running_mean": None,
        "running_var": None,
        "num_batches_tracked": torch.zeros(3).long(),
    },
    "num_batches_tracked: expected a tensor where momentum is None, got none": {"momentum": None},
    "activation: expected 'identity', 'relu', 'relu6', 'silu' or 'hardswish', got 'gelu'": {
        "activation": "gelu"
    },
}


@pytest.mark.parametrize("max_pool", [False, True])
@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_change_nothing(message, max_pool):
    mean, var = torch.zeros(3), torch.ones(3)
    arguments = {"x": torch.randn(2, 3, 4, 4), "running_mean": mean, "running_var": var}
    with pytest.raises(RuntimeError) as raised:
        batch_norm_act(**{**arguments, **WRONG[message]}, training=True, max_pool=max_pool)
    assert str(raised.value) == message
    assert (mean == 0).all() and (var == 1).all()


def test_an_argument_of_another_kind():
    with pytest.raises(TypeError, match="^residual: expected a tensor or None, got float$"):
        batch_norm_act(torch.randn(2, 3, 4, 4, requires_grad=True), None, None, residual=1.0)


def test_a_residual_of_another_layout(device):
    x = torch.randn(2, 6, 5, 4, device=device)
    residual = torch.randn(2, 6, 4, 5, device=device).transpose(2, 3).requires_grad_()
    t = x.to(memory_format=torch.channels_last)
    y = batch_norm_act(t, None, None, residual=residual, training=True)
    expected = (F.batch_norm(x, None, None, training=True) + residual).relu()
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    found, right = (torch.autograd.grad(a, residual, dy)[0] for a in (y, expected))
    torch.testing.assert_close(found, right)
