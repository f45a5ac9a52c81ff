"""BatchNorm + activation by the accuracy rule: dtypes, layouts, difficult statistics, NaN."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fusewise
from batch_norm_reference import ACTIVATIONS, make_case
from fusewise.bench.accuracy import check
from fusewise.functional import batch_norm_act
from reference import DTYPES, LAYOUTS


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_rule_sees_wrong_results(activation, dtypes):
    case = make_case((4, 16, 9, 8), "cpu", DTYPES[dtypes], activation=activation)
    plain = replace(case, residual=None)
    for ours, eager in (
        (case.results(), case.results(case.eager)),
        (plain.pool_results(plain.ours, max_pool=True), plain.pool_results(plain.eager)),
    ):
        assert check(ours, eager).passed
        for name, right in ours.outputs.items():
            one = right.clone().flatten()
            one[one.abs().argmax()] *= 1.1
            for wrong in (torch.zeros_like(right), right * 1.1, one.view(right.shape)):
                spoiled = ours._replace(outputs={**ours.outputs, name: wrong})
                assert not check(spoiled, eager).passed, name


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(device, layout, dtypes, training):
    for i, activation in enumerate(ACTIVATIONS):
        case = make_case(
            (3, 9, 5, 4),
            device,
            DTYPES[dtypes],
            layout,
            dy_layout=list(LAYOUTS)[(i + len(layout)) % len(LAYOUTS)],
            activation=activation,
            residual=i % 2 == 0,
            affine=(i != 1, i != 2),
            training=training,
        )
        case.check_every_implementation()
        if case.residual is None:
            case.check_every_pool()


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 1), (1, 65, 1, 2), (2, 3, 33, 31), (70, 8, 3, 3), (3, 70, 7, 7)]
)
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_odd_sizes(device, layout, shape):
    make_case(shape, device, layout=layout).check_every_implementation()


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_statistics_do_not_cancel(device, layout):
    """The sum of squares minus the square of the mean would leave nothing of these variances."""
    cases = (
        (torch.float32, torch.float32, 1e4, 1e-2),
        (torch.float16, torch.float32, 1000.0, 1.0),
        (torch.float16, torch.float16, 1000.0, 1.0),
        (torch.float64, torch.float64, 1e8, 1e-2),
    )
    for *dtypes, mean, deviation in cases:
        case = make_case(
            (4, 16, 24, 20), device, dtypes, layout, mean=mean, deviation=deviation, residual=False
        )
        found = case.check()
        variance = case.x.double().var((0, 2, 3))
        y = batch_norm_act(case.x, None, None, activation="identity", training=True).double()
        assert (y.var((0, 2, 3)) - variance / (variance + 1e-5)).abs().max() < 2e-2
        assert found.outputs["y"].isfinite().all()


@pytest.mark.parametrize("border", ["first pixels", "first row of all", "all sides"])
@pytest.mark.parametrize("shape", [(64, 16, 7, 8), (4, 16, 56, 56)])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_statistics_of_images_with_a_border(device, layout, shape, border):
    """Unusual values in some places must not spoil the variance of the others."""
    x = torch.randn(shape, device=device) + 100
    if border == "first pixels":
        x[0, :, 0, :4] = 0
    else:
        x[:, :, 0] = 0
    if border == "all sides":
        x[:, :, -1] = 0
        x[:, :, :, 0] = 0
        x[:, :, :, -1] = 0
    x = LAYOUTS[layout](x)
    right = x.double().var((0, 2, 3))
    (record,) = fusewise.explain(lambda: batch_norm_act(x, None, None, training=True))
    for name in record.able:
        mean, var = torch.zeros(16, device=device), torch.ones(16, device=device)
        with fusewise.implementation(batch_norm_act=name):
            batch_norm_act(x, mean, var, training=True, momentum=1.0)
        torch.testing.assert_close(var.double(), right, rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_sums_that_would_overflow(device, layout, dtype):
    x = torch.full((4, 16, 8, 8), 3e38, device=device, dtype=torch.bfloat16)
    x = LAYOUTS[layout](x.to(dtype))
    for max_pool in (False, True):
        mean, var = torch.zeros(16, device=device), torch.ones(16, device=device)
        y = batch_norm_act(x, mean, var, training=True, momentum=1.0, max_pool=max_pool)
        assert (y == 0).all() and (var == 0).all()
        torch.testing.assert_close(mean, x[0, :, 0, 0].float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("activation", ["relu", "relu6"])
def test_decisions_are_those_of_the_stored_result(device, activation, residual, dtype):
    """The gradient is 0 where y was rounded to 0 or 6, and only there."""
    v = torch.tensor([5.97, 5.983, 5.9845, 5.99, 5.9979, 5.9981, 6.0, 1e-9, 2e-8, 4e-8, 1e-7])
    v = v.repeat(8, 1).t().flatten().to(device)  # so many channels that every kernel takes them
    one = torch.ones(2, len(v), 4, 4, device=device, dtype=dtype)
    for x in (one, one.to(memory_format=torch.channels_last)):
        x = x.detach().requires_grad_()
        zero, var = torch.zeros_like(v), torch.ones_like(v)
        other = torch.zeros_like(x) if residual else None
        y = batch_norm_act(x, zero, var, v, residual=other, activation=activation, eps=0.0)
        (dx,) = torch.autograd.grad(y.sum(), x)
        passes = (y > 0) & (y < 6) if activation == "relu6" else y > 0
        assert (dx != 0).equal(passes & (v.to(dtype)[:, None, None] != 0))


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_a_channel_of_constants(device, layout):
    x = torch.randn(3, 5, 4, 4, device=device)
    x[:, 2] = 7.25
    x = x.contiguous(memory_format=LAYOUTS_OF[layout]).requires_grad_()
    weight, bias = (torch.randn(5, device=device) for _ in range(2))
    y = batch_norm_act(x, None, None, weight, bias, activation="identity", training=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(y[:, 2], bias[2].expand(3, 4, 4))
    assert y.isfinite().all() and dx.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_a_bad_value_stays_in_its_channel(device, layout, value):
    x = torch.randn(3, 16, 4, 4, device=device)
    x[1, 5, 2, 2] = value
    x = x.contiguous(memory_format=LAYOUTS_OF[layout])
    for activation, training in (("relu", True), ("silu", False), ("hardswish", True)):
        found, expected = [], []
        mean, var = torch.zeros(16, device=device), torch.ones(16, device=device)
        for results, statistics, fn in (
            (found, (mean.clone(), var.clone()), "ours"),
            (expected, (mean.clone(), var.clone()), "torch"),
        ):
            t = x.clone(memory_format=torch.preserve_format).requires_grad_()
            if fn == "ours":
                y = batch_norm_act(t, *statistics, activation=activation, training=training)
            else:
                y = ACTIVATIONS[activation](F.batch_norm(t, *statistics, training=training))
            (dx,) = torch.autograd.grad(y.sum() + y.square().sum(), t)
            results += [y, dx, *statistics]
        others = [c for c in range(16) if c != 5]
        for one, other in zip(found, expected, strict=True):
            dim = one.dim() // 4
            assert one.select(dim, 5).isfinite().equal(other.select(dim, 5).isfinite())
            ours, theirs = (t.index_select(dim, t.new_tensor(others).long()) for t in (one, other))
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


LAYOUTS_OF = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
