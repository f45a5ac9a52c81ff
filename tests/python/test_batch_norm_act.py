"""BatchNorm + activation (+ residual) against torch's own layers."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import fusewise
from batch_norm_reference import ACTIVATIONS
from fusewise.functional import batch_norm_act
from fusewise.nn import BatchNormAct2d

LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}


def new(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def running(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype) + 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, residual, training, layout):
    """First and second order, and the values against torch's batch_norm."""
    x = torch.randn(3, 4, 3, 2, dtype=torch.float64).contiguous(memory_format=LAYOUTS[layout])
    inputs = [x.requires_grad_(), new(4), new(4), *[new(3, 4, 3, 2)] * residual]
    mean, var = running(4)

    def ours(x, weight, bias, *residual):
        return batch_norm_act(
            x,
            mean.clone(),
            var.clone(),
            weight,
            bias,
            *residual,
            activation=activation,
            training=training,
        )

    x, weight, bias, *others = inputs
    v = F.batch_norm(x, mean.clone(), var.clone(), weight, bias, training) + sum(others)
    torch.testing.assert_close(ours(*inputs), ACTIVATIONS[activation](v))
    assert torch.autograd.gradcheck(ours, inputs)
    assert torch.autograd.gradgradcheck(ours, inputs)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0])
def test_statistics_of_five_steps(momentum):
    ours, theirs = BatchNormAct2d(5, momentum=momentum), torch.nn.BatchNorm2d(5, momentum=momentum)
    for step in range(5):
        x = torch.randn(4, 5, 3, 3) * (step + 1) + step
        torch.testing.assert_close(ours(x), theirs(x).relu())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    assert ours.num_batches_tracked == 5
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x).relu())


def test_streams_are_norms_of_their_own():
    x, residual = new(3, 2, 4, 3, 3), new(3, 2, 4, 3, 3)
    weight, bias = new(3, 4), new(3, 4)
    means, variances = running(3, 4)
    expected_mean, expected_var = means.clone(), variances.clone()
    y = batch_norm_act(x, means, variances, weight, bias, residual, training=True)
    for s in range(3):
        v = F.batch_norm(x[s], expected_mean[s], expected_var[s], weight[s], bias[s], True)
        torch.testing.assert_close(y[s], (v + residual[s]).relu())
    torch.testing.assert_close(means, expected_mean)
    torch.testing.assert_close(variances, expected_var)


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("activation", ["relu", "silu", "identity"])
def test_blanked_samples_do_not_matter(activation, residual):
    x = new(2, 4, 3, 2, 2)
    others = [new(2, 4, 3, 2, 2)] * residual
    blanked = torch.tensor([[False, True, False, True], [True, True, True, True]])
    with torch.no_grad():
        x[blanked] = torch.nan
        for t in others:
            t[blanked] = torch.nan
    mean, var = running(2, 3)
    before = mean.clone(), var.clone()
    options = {"activation": activation, "training": True}
    y = batch_norm_act(x, mean, var, None, None, *others, blanked=blanked, **options)
    found = torch.autograd.grad(y.sum() + y.square().sum(), [x, *others])
    expected_mean, expected_var = before[0].clone(), before[1].clone()
    kept = [t[0, ~blanked[0]].detach().requires_grad_() for t in (x, *others)]
    v = F.batch_norm(kept[0], expected_mean[0], expected_var[0], training=True) + sum(kept[1:])
    expected = ACTIVATIONS[activation](v)
    gradients = torch.autograd.grad(expected.sum() + expected.square().sum(), kept)
    torch.testing.assert_close(y[0, ~blanked[0]], expected)
    torch.testing.assert_close(mean, expected_mean)  # the second stream keeps its own
    torch.testing.assert_close(var, expected_var)
    for all_of, some in zip(found, gradients, strict=True):
        torch.testing.assert_close(all_of[0, ~blanked[0]], some)
        assert (all_of[blanked] == 0).all()
    assert (y[blanked] == 0).all()


@pytest.mark.parametrize("implementation", ["", "torch"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("momentum", [None, 0.1])
def test_each_stream_counts_its_updates(device, momentum, layout, size, implementation):
    """A stream with fewer than two values in a call keeps its statistics and its counter."""
    streams = [torch.nn.BatchNorm2d(8, momentum=momentum, device=device) for _ in range(3)]
    mean, var = torch.zeros(3, 8, device=device), torch.ones(3, 8, device=device)
    counters, calls = torch.zeros(3, dtype=torch.int64, device=device), torch.tensor(0).to(device)
    absent = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 0]], device=device).bool()
    steps = [absent[[0, 1, 2]], absent[[0, 2, 1]], None, absent[[2, 0, 3]]]
    for step, blanked in enumerate(steps):
        x = torch.randn(3, 3, 8, size, size, device=device) * (step + 1) + step
        if layout == "channels_last":
            x = x.movedim(2, -1).contiguous().movedim(-1, 2)
        for s, norm in enumerate(streams):
            present = x[s] if blanked is None else x[s, ~blanked[s]]
            if present.numel() > 8:
                norm(present)
        options = {"training": True, "momentum": momentum, "blanked": blanked}
        with fusewise.implementation(implementation):
            batch_norm_act(x, mean, var, num_batches_tracked=counters, **options)
            means = mean.clone(), var.clone()
            batch_norm_act(x, *means, num_batches_tracked=calls, max_pool=True, **options)
    assert counters.tolist() == [norm.num_batches_tracked.item() for norm in streams]
    assert calls == len(steps)
    torch.testing.assert_close(mean, torch.stack([norm.running_mean for norm in streams]))
    torch.testing.assert_close(var, torch.stack([norm.running_var for norm in streams]))


def test_compile_updates_the_statistics():
    for backend, training in itertools.product(("aot_eager", "inductor"), (True, False)):
        torch._dynamo.reset()
        ours, theirs = BatchNormAct2d(4).train(training), torch.nn.BatchNorm2d(4).train(training)
        compiled = torch.compile(ours, fullgraph=True, backend=backend)
        for _ in range(2):
            x, residual = torch.randn(3, 4, 5, 5, requires_grad=True), torch.randn(3, 4, 5, 5)
            y, expected = compiled(x, residual), (theirs(x) + residual).relu()
            torch.testing.assert_close(y, expected)
            found, right = (torch.autograd.grad(t.square().sum(), x)[0] for t in (y, expected))
            torch.testing.assert_close(found, right)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value)


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
def test_opcheck(residual):
    mean, var = running(4, dtype=torch.float32)
    arguments = (
        new(2, 4, 3, 3, dtype=torch.float32).detach(),
        mean,
        var,
        torch.randn(4),
        torch.randn(4),
        torch.randn(2, 4, 3, 3) if residual else None,
        torch.tensor(3),
        None,
        None,
        "relu",
        True,
        0.1,
        1e-5,
        True,
        "",
    )
    operator = torch.ops.fusewise._batch_norm_act.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_gradient_of_an_identitys_residual_is_not_copied():
    x, residual = new(2, 3, 4, 4), new(2, 3, 4, 4)
    y = batch_norm_act(x, None, None, None, None, residual, activation="identity", training=True)
    dy = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, residual, dy)
    assert found.data_ptr() == dy.data_ptr()


def test_modules_share_parameters():
    norm = torch.nn.BatchNorm2d(3, eps=1e-3, momentum=None).eval()
    ours = BatchNormAct2d.from_batch_norm(norm, "silu")
    assert ours.weight is norm.weight and ours.running_var is norm.running_var
    assert not ours.training and ours.momentum is None and ours.eps == 1e-3
    back = ours.to_batch_norm()
    assert type(back) is torch.nn.BatchNorm2d and back.bias is norm.bias and back.eps == 1e-3
    assert ours.state_dict().keys() == norm.state_dict().keys()
    BatchNormAct2d(3).load_state_dict(norm.state_dict())
    old = {k: v for k, v in norm.state_dict().items() if k != "num_batches_tracked"}
    BatchNormAct2d(3).load_state_dict(old)
    with pytest.raises(TypeError, match=r"^norm: expected torch.nn.BatchNorm2d, got .*BatchNorm1d"):
        BatchNormAct2d.from_batch_norm(torch.nn.BatchNorm1d(3))


def test_without_parameters_or_statistics():
    ours = BatchNormAct2d(3, affine=False, track_running_stats=False).eval()
    theirs = torch.nn.BatchNorm2d(3, affine=False, track_running_stats=False).eval()
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(ours(x), theirs(x).relu())
    assert not ours.state_dict()


def test_no_samples():
    norm = BatchNormAct2d(3)
    before = norm.running_var.clone()
    x = torch.empty(0, 3, 4, 4, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == x.shape and (norm.weight.grad == 0).all()
    assert torch.equal(norm.running_var, before) and norm.num_batches_tracked == 1


MISTAKES = {
    "x: expected [S, N, C, H, W] or [N, C, H, W], got [2, 3]": lambda: batch_norm_act(
        torch.zeros(2, 3), None, None
    ),
    "running_mean: expected [3], got [4]": lambda: call(mean=torch.zeros(4)),
    "residual: expected x's shape [2, 3, 4, 4], got [2, 3, 4, 5]": lambda: call(
        residual=torch.zeros(2, 3, 4, 5)
    ),
    "residual: expected x's dtype float32, got float64": lambda: call(
        residual=torch.zeros(2, 3, 4, 4, dtype=torch.float64)
    ),
    "blanked: expected dtype bool, got float32": lambda: call(blanked=torch.zeros(2)),
    "blanked: expected [2], got [3]": lambda: call(blanked=torch.zeros(3, dtype=torch.bool)),
    "num_batches_tracked: expected dtype int64, got int32": lambda: call(
        num_batches_tracked=torch.zeros((), dtype=torch.int32)
    ),
    "running_mean: expected x's dtype float32, got float16": lambda: call(
        mean=torch.zeros(3, dtype=torch.float16)
    ),
}


def call(mean=None, residual=None, **options):
    mean = torch.zeros(3) if mean is None else mean
    x = torch.zeros(2, 3, 4, 4)
    return batch_norm_act(x, mean, torch.ones(3), None, None, residual, training=True, **options)


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message):
    with pytest.raises(RuntimeError) as raised:
        MISTAKES[message]()
    assert str(raised.value) == message


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_that_overlap(training):
    both = torch.ones(5)
    for mean, var in ((both[:3], both[:3]), (both[:3], both[2:])):
        with pytest.raises(RuntimeError, match="^running_mean: .* overlaps running_var$"):
            batch_norm_act(torch.randn(2, 3, 4, 4), mean, var, training=training)
    assert torch.equal(both, torch.ones(5))


@pytest.mark.parametrize("training", [True, False])
def test_the_module_blames_x_for_its_channels(training):
    with pytest.raises(RuntimeError, match="^x: expected 3 channels, got 5$"):
        BatchNormAct2d(3).train(training)(torch.zeros(2, 5, 4, 4))


def test_one_value_per_channel():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        batch_norm_act(torch.zeros(1, 3, 1, 1), None, None, training=True)
    batch_norm_act(torch.zeros(1, 3, 1, 1), torch.zeros(3), torch.ones(3))


def test_explain():
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    records = fusewise.explain(BatchNormAct2d(3), x)
    assert [record.operator for record in records] == ["batch_norm_act"] * 2
