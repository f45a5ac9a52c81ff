"""BatchNorm + activation + max-pool, the stem of a ResNet, against torch's own layers."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewise
from batch_norm_reference import ACTIVATIONS, make_case, pooled
from fusewise.functional import batch_norm_act
from fusewise.nn import BatchNormAct2d
from reference import DTYPES
from test_batch_norm_act import LAYOUTS, new, running

SIZES = [(2, 4, 8, 8), (1, 3, 7, 5), (2, 1, 1, 6), (3, 5, 9, 1), (2, 65, 3, 4), (1, 2, 1, 2)]


def implementations(x=None):
    x = torch.zeros(2, 3, 4, 4) if x is None else x.detach()
    with torch.no_grad():
        (record,) = fusewise.explain(lambda t: batch_norm_act(t, None, None, max_pool=True), x)
    return [entry.name for entry in record.candidates if entry.able]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, layout):
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64).contiguous(memory_format=LAYOUTS[layout])
    inputs = [x.requires_grad_(), new(3), new(3)]
    mean, var = running(3)
    for training in (True, False):

        def ours(x, weight, bias, training=training):
            statistics = (mean.clone(), var.clone(), weight, bias)
            options = {"activation": activation, "training": training, "max_pool": True}
            return batch_norm_act(x, *statistics, **options)

        v = F.batch_norm(x, mean.clone(), var.clone(), *inputs[1:], training)
        torch.testing.assert_close(ours(*inputs), pooled(ACTIVATIONS[activation](v)))
        assert torch.autograd.gradcheck(ours, inputs)
        assert torch.autograd.gradgradcheck(ours, inputs)


@pytest.mark.parametrize("layout", [*LAYOUTS, "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_sizes_types_and_implementations(dtype, layout):
    """Exactly torch's max-pool of our own BatchNorm, forward and backward, because both compare
    rounded values."""
    for shape, name in itertools.product(SIZES, implementations()):
        torch.manual_seed(0)
        n, c, h, w = shape
        if layout == "sliced":
            x = torch.randn(n, c + 1, h, w + 2, dtype=dtype)[:, 1:, :, 1:-1]
        else:
            x = torch.randn(shape, dtype=dtype).contiguous(memory_format=LAYOUTS[layout])
        x.requires_grad_()
        weight, bias = (torch.randn(c, dtype=dtype).requires_grad_() for _ in range(2))
        forced = {"batch_norm_act_pool": name, "batch_norm_act_pool_backward": name}
        plain = {"batch_norm_act": name, "batch_norm_act_backward": name}
        with fusewise.implementation(**forced, **plain):
            y = batch_norm_act(x, None, None, weight, bias, training=True, max_pool=True)
            u = batch_norm_act(x, None, None, weight, bias, training=True)
            expected = pooled(u)
            assert torch.equal(y, expected), (shape, name)
            assert layout == "sliced" or y.is_contiguous(memory_format=LAYOUTS[layout])
            # Whole numbers, so that the sum of the gradients of a pixel's windows is exact.
            dy = torch.randint(-8, 9, y.shape).to(dtype)
            found = torch.autograd.grad(y, (x, weight, bias), dy)
            right = torch.autograd.grad(u, (x, weight, bias), torch.autograd.grad(expected, u, dy))
        torch.testing.assert_close(found[0], right[0], rtol=0, atol=0)
        torch.testing.assert_close(found[1:], right[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ties_nan_and_infinities_as_torch(layout):
    """The first of equal values, the last NaN. The gradients show which one was taken."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (2, 4, 9, 8)).float().contiguous(memory_format=LAYOUTS[layout])
    x[0, 0, 2, 1:4] = torch.nan
    x[0, 0, 3, 2] = torch.nan
    x[1, 1] = -torch.inf
    x[1, 2, 3:5, 3:5] = torch.inf
    mean, var = torch.zeros(4), torch.ones(4) - 1e-5
    for activation in ("identity", "relu"):
        t = x.clone().requires_grad_()
        y = batch_norm_act(t, mean, var, activation=activation, max_pool=True)
        u = x.clone().requires_grad_()
        expected = pooled(ACTIVATIONS[activation](F.batch_norm(u, mean, var)))
        assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))
        dy = torch.randn_like(y)
        (found,), (right,) = (torch.autograd.grad(a, b, dy) for a, b in ((y, t), (expected, u)))
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_borders_of_strips(device, layout, dtype):
    """Ties, NaN and -inf at the borders of images and of the strips of eight windows that a GPU's
    threads take, beside a blanked sample."""
    for h, w in [(1, 1), (2, 7), (15, 2), (16, 3), (17, 4), (18, 5), (34, 6)]:
        torch.manual_seed(h)
        x = torch.randint(-2, 3, (3, 16, h, w)).float()
        x[torch.rand(x.shape) < 0.02] = torch.nan
        x[:, 3:6][torch.rand(3, 3, h, w) < 0.8] = -torch.inf
        x[1] = torch.nan
        blanked = torch.tensor([False, True, False])
        for activation in ("identity", "relu", "relu6"):
            u = ACTIVATIONS[activation](4 * x).requires_grad_()  # relu6 has ties at 6, too
            expected = pooled(u)
            dy = torch.randint(-8, 9, expected.shape).float()
            (du,) = torch.autograd.grad(expected, u, dy)
            # NaN passes.
            closed = (u <= 0) & (activation != "identity") | (u >= 6) & (activation == "relu6")
            expected, right = expected.detach().clone(), (4 * du).masked_fill(closed, 0)
            expected[1] = right[1] = 0
            t = x.to(device, dtype).contiguous(memory_format=LAYOUTS[layout]).requires_grad_()
            mean, var, weight = torch.zeros(16), torch.ones(16) - 1e-5, torch.full((16,), 4.0)
            statistics = [p.to(device, dtype) for p in (mean, var, weight)]
            for name in implementations(t):
                forced = {"batch_norm_act_pool": name, "batch_norm_act_pool_backward": name}
                with fusewise.implementation(**forced):
                    y = batch_norm_act(
                        t,
                        *statistics,
                        activation=activation,
                        max_pool=True,
                        blanked=blanked.to(device),
                    )
                    (found,) = torch.autograd.grad(y, t, dy.to(device, dtype))
                case = f"{name}, {activation}, {h} x {w}"
                for one, other in ((y, expected), (found, right)):
                    torch.testing.assert_close(
                        one.detach().float().cpu(),
                        other,
                        rtol=1e-5 if dtype == torch.float32 else 1e-2,
                        atol=0,
                        equal_nan=True,
                        msg=lambda text, case=case: f"{case}: {text}",
                    )


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_strips_by_the_accuracy_rule(device, activation, dtypes):
    for shape in [(3, 16, 17, 5), (1, 8, 34, 33), (2, 24, 15, 1)]:
        make_case(
            shape, device, DTYPES[dtypes], "channels_last", activation=activation, residual=False
        ).check_every_pool()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_windows_are_added_in_float32(device, dtype, layout):
    """Four windows take the pixel in the middle. Their sum has more digits than x's dtype."""
    x = torch.zeros(1, 8, 3, 3, device=device, dtype=dtype)
    x[:, :, 1, 1] = 1
    x = x.contiguous(memory_format=LAYOUTS[layout])
    mean, var, weight, bias = (torch.full((8,), v, device=device) for v in (0.0, 1.0, 1.0, 0.0))
    bias.requires_grad_()
    y = batch_norm_act(x, mean, var, weight, bias, max_pool=True)
    small = 2.0**-12
    dy = torch.tensor([[1, small], [small, small]], device=device, dtype=dtype).expand_as(y)
    (found,) = torch.autograd.grad(y, bias, dy)
    assert (found == 1 + 3 * small).all()


def test_streams_and_blanked_samples():
    x = new(2, 4, 3, 5, 6)
    blanked = torch.tensor([[False, True, False, False], [True, True, True, True]])
    with torch.no_grad():
        x[blanked] = torch.nan
    mean, var = running(2, 3)
    before = mean.clone(), var.clone()
    options = {"training": True, "max_pool": True}
    y = batch_norm_act(x, mean, var, blanked=blanked, **options)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    kept = x[0, ~blanked[0]].detach().requires_grad_()
    expected = pooled(F.batch_norm(kept, before[0][0], before[1][0], training=True).relu())
    (right,) = torch.autograd.grad(expected.square().sum(), kept)
    torch.testing.assert_close(y[0, ~blanked[0]], expected)
    torch.testing.assert_close(found[0, ~blanked[0]], right)
    assert (y[blanked] == 0).all() and (found[blanked] == 0).all()
    torch.testing.assert_close((mean, var), before)  # those of the first stream were updated


def test_module_and_its_state():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ours = BatchNormAct2d.from_batch_norm(nn.BatchNorm2d(8), "relu", max_pool=True)
    assert "max_pool=True" in repr(ours)
    for _ in range(3):
        x = torch.randn(2, 8, 9, 9)
        torch.testing.assert_close(ours(x), stem(x))
    for name, value in stem[0].state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    ours.eval(), stem.eval()
    torch.testing.assert_close(ours(x), stem(x))
    with pytest.raises(ValueError, match="^residual: expected None with max_pool"):
        ours(x, x)
    with pytest.raises(TypeError, match="^max_pool: expected True or False"):
        BatchNormAct2d(3, max_pool=2)


def test_compile_and_export():
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    for memory_format in LAYOUTS.values():
        torch._dynamo.reset()
        t = x.detach().contiguous(memory_format=memory_format).requires_grad_()
        ours, eager = BatchNormAct2d(4, max_pool=True), BatchNormAct2d(4, max_pool=True)
        y, expected = torch.compile(ours, fullgraph=True)(t), eager(t)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected)
        found, right = (torch.autograd.grad(a.square().sum(), t)[0] for a in (y, expected))
        torch.testing.assert_close(found, right)
        torch.testing.assert_close(ours.running_var, eager.running_var)
    exported = torch.export.export(eager.eval(), (x.detach(),)).module()
    torch.testing.assert_close(exported(x), eager(x))


def test_opcheck():
    mean, var = running(4, dtype=torch.float32)
    for layout in LAYOUTS.values():
        x = torch.randn(2, 4, 5, 6).contiguous(memory_format=layout)
        arguments = (x, mean, var, torch.randn(4), None, torch.tensor(3), None, None)
        torch.library.opcheck(
            torch.ops.fusewise._batch_norm_act_pool.default,
            (*arguments, "relu", True, 0.1, 1e-5, True, ""),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_no_samples():
    norm = BatchNormAct2d(3, max_pool=True)
    x = torch.empty(0, 3, 5, 4, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.shape == (0, 3, 3, 2) and x.grad.shape == x.shape
    assert (norm.weight.grad == 0).all() and norm.num_batches_tracked == 1


def test_kept_for_backward_is_a_byte_per_output():
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.nbytes) or t, lambda t: t
    ):
        BatchNormAct2d(8, max_pool=True)(x)
    assert sum(sizes) <= x.nbytes + x.numel() // 4 + 4 * 8 * 4


def test_results_do_not_depend_on_threads():
    x = torch.randn(3, 24, 33, 31).requires_grad_()
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for layout in LAYOUTS.values():
                t = x.detach().contiguous(memory_format=layout).requires_grad_()
                y = batch_norm_act(t, None, None, training=True, max_pool=True)
                found.append((y, *torch.autograd.grad(y.square().sum(), t)))
        finally:
            torch.set_num_threads(before)
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_torch_runs_it_too():
    x = torch.randn(2, 3, 6, 5)
    norm = BatchNormAct2d(3, "silu", max_pool=True)
    with fusewise.implementation("torch"):
        torch.testing.assert_close(
            norm(x), pooled(F.silu(F.batch_norm(x, None, None, training=True)))
        )
