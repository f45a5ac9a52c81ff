"""BatchNorm + activation where only a GPU can show it.

The matrix of dtypes, layouts and activations is in tests/python and runs on the GPU too.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewise
from batch_norm_reference import (
    ACTIVATIONS,
    drawn_batches,
    make_case,
    pooled,
    recipe,
    train,
)
from fusewise.bench.cases import select
from fusewise.functional import batch_norm_act
from fusewise.nn import BatchNormAct2d
from gpu_helpers import (
    allocated,
    check_all_but_general_decline,
    check_graph,
    check_memory_is_flat,
    check_reduce_overhead,
    fails_with_out_of_memory,
    late_on_side_stream,
    needs_gpu,
    peak,
    train_under_autocast,
)
from reference import DTYPES, LAYOUTS, same_bits

pytestmark = needs_gpu


# --- every implementation -----------------------------------------------------------------------


def layers():
    found = {}
    for case in select("batch_norm_act", "cuda", "quick", "*"):
        found.setdefault((case.shape[1:], str(case.extra)), case)
    return list(found.values())


@pytest.mark.parametrize("layer", layers(), ids=lambda layer: layer.name)
def test_layers_of_the_benchmark(layer):
    """A smaller batch, fp16, channels_last, forward and backward, each implementation in turn."""
    shape = (8, *layer.shape[1:])
    case = make_case(
        shape,
        "cuda",
        DTYPES["fp16-fp32"],
        "channels_last",
        activation=layer.extra["activation"],
        residual=layer.extra["residual"] == "add",
    )
    checked = case.check_every_implementation()
    assert {"general", "two_pass"} <= checked


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16-fp32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fast_implementations(layout, dtypes, activation):
    for shape in ((32, 64, 16, 16), (7, 320, 8, 6), (200, 32, 4, 4), (2, 24, 56, 56)):
        for residual in (True, False):
            case = make_case(
                shape, "cuda", DTYPES[dtypes], layout, activation=activation, residual=residual
            )
            checked = case.check_every_implementation()
            assert {"general", "two_pass"} <= checked
            assert ("resident" in checked) == (layout == "channels_last")
            assert ("planes" in checked) == (layout == "nchw")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16-fp32"])
@pytest.mark.parametrize("size", [33, 14, 7])
def test_planes_that_are_not_a_multiple_of_16_bytes(size, dtypes, activation):
    case = make_case((32, 65, size, size), "cuda", DTYPES[dtypes], "nchw", activation=activation)
    assert {"planes", "general"} <= case.check_every_implementation()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16-fp32"])
def test_channels_that_do_not_fill_16_bytes(dtypes, activation):
    for shape in ((32, 36, 28, 28), (8, 65, 33, 31), (16, 3, 32, 32), (8, 2001, 4, 4)):
        case = make_case(
            shape, "cuda", DTYPES[dtypes], "channels_last", activation=activation, residual=False
        )
        assert {"resident", "general"} <= case.check_every_implementation()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16-fp32"])
def test_small_images_with_any_number_of_channels(dtypes, activation):
    for shape in ((1, 512, 7, 7), (2, 65, 9, 8), (7, 3, 11, 13)):
        case = make_case(
            shape, "cuda", DTYPES[dtypes], "channels_last", activation=activation, residual=False
        )
        assert {"columns", "general"} <= case.check_every_implementation()


NAMES = ["columns", "resident", "planes", "two_pass", "general"]


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_implementation_is_the_one_that_runs(name):
    layout = "nchw" if name == "planes" else "channels_last"
    shape = (2, 64, 7, 7) if name == "columns" else (16, 64, 14, 14)
    case = make_case(shape, "cuda", DTYPES["fp16"], layout)
    with fusewise.implementation(batch_norm_act=name, batch_norm_act_backward=name):
        x = case.x.detach().requires_grad_()
        records = fusewise.explain(
            lambda x: case.ours(case.running_mean, case.running_var, x, case.weight, case.bias), x
        )
        assert [record.chosen for record in records] == [name, name]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            case.results()
    kernels = {event.key for event in profile.key_averages()}
    expected = {
        "columns": ("forward_kernel", "backward_kernel"),
        "resident": ("forward_kernel", "backward_kernel"),
        "planes": ("forward_kernel", "backward_kernel"),
        "two_pass": ("gradient_sums_kernel", "normalize_kernel"),
        "general": ("gradient_sums_kernel", "normalize_kernel"),
    }[name]
    for kernel in expected:
        assert any(kernel in key for key in kernels), f"{kernel} did not run: {kernels}"


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_counts_the_updates_of_each_stream(name):
    channels = 15 if name == "columns" else 16
    x = torch.randn(3, 40, 4, 4, channels, device="cuda").movedim(-1, 2)
    if name == "planes":
        x = x.contiguous()
    mean, var = (torch.full((3, channels), value, device="cuda") for value in (0.0, 1.0))
    counters = torch.tensor([5, 6, 7], device="cuda")
    blanked = torch.zeros(3, 40, dtype=torch.bool, device="cuda")
    blanked[0, :39] = True
    blanked[1] = True
    with fusewise.implementation(batch_norm_act=name):
        options = {"num_batches_tracked": counters, "momentum": None, "blanked": blanked}
        batch_norm_act(x, mean, var, training=True, **options)
    assert counters.tolist() == [6, 6, 8]
    for s, present in ((0, x[0, 39:]), (2, x[2])):
        factor = 1 / counters[s].item()
        torch.testing.assert_close(mean[s], factor * present.mean((0, 2, 3)))
    assert (mean[1] == 0).all() and (var[1] == 1).all()


@pytest.mark.parametrize("layout", ["nchw", "channels_last", "sliced"])
@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16-fp32", "fp64"])
def test_max_pool(layout, dtypes):
    for shape in ((8, 64, 57, 56), (3, 65, 7, 5), (200, 8, 4, 4), (2, 512, 9, 9), (1, 3, 300, 3)):
        for activation in ACTIVATIONS:
            case = make_case(
                shape, "cuda", DTYPES[dtypes], layout, activation=activation, residual=False
            )
            checked = case.check_every_pool()
            assert "general" in checked
            fast = layout == "channels_last" and dtypes != "fp64" and shape[1] % 8 == 0
            assert "channels_last" in checked or not fast


def test_ties_nan_and_infinities_in_the_max_pool():
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (2, 16, 9, 8), device="cuda").float()
    x[0, 0, 2, 1:4] = torch.nan
    x[0, 0, 3, 2] = torch.nan
    x[1, 1] = -torch.inf
    mean, var = torch.zeros(16, device="cuda"), torch.ones(16, device="cuda") - 1e-5
    for layout in ("nchw", "channels_last"):
        for activation in ("identity", "relu"):
            # Torch's channels-last kernel loses the gradient of a window that is -inf throughout.
            t, u = (LAYOUTS[of](x).requires_grad_() for of in (layout, "nchw"))
            y = batch_norm_act(t, mean, var, activation=activation, max_pool=True)
            expected = pooled(ACTIVATIONS[activation](F.batch_norm(u, mean, var)))
            assert same_bits(y, expected)
            dy = torch.randn_like(y)
            pairs = ((y, t), (expected, u))
            found, right = (torch.autograd.grad(a, b, dy)[0] for a, b in pairs)
            torch.testing.assert_close(found, right)


def test_a_declined_implementation_says_why():
    """The fast ones take no float64."""
    x = torch.randn(2, 16, 4, 4, device="cuda", dtype=torch.float64)

    def call(x):
        return batch_norm_act(x, None, None, training=True)

    with torch.no_grad():
        check_all_but_general_decline("batch_norm_act", call, x)


@pytest.mark.parametrize("max_pool", [False, True])
def test_cpu_and_cuda_agree(max_pool):
    x = torch.randn(3, 65, 9, 7, dtype=torch.float64)
    found = []
    for device in ("cpu", "cuda"):
        t = x.to(device).requires_grad_()
        mean, var = torch.zeros(65, device=device).double(), torch.ones(65, device=device).double()
        y = batch_norm_act(t, mean, var, training=True, max_pool=max_pool)
        (dx,) = torch.autograd.grad(y.square().sum(), t)
        found.append([value.cpu() for value in (y, dx, mean, var)])
    torch.testing.assert_close(*found)


def test_streams_and_blanked_samples():
    x = torch.randn(3, 4, 16, 6, 5, device="cuda", dtype=torch.float64)
    blanked = torch.rand(3, 4, device="cuda") < 0.4
    blanked[1] = True
    x[blanked] = torch.nan
    found = []
    for device in ("cpu", "cuda"):
        t = x.to(device).requires_grad_()
        mean, var = torch.zeros(3, 16).to(t), torch.ones(3, 16).to(t)
        options = {"training": True, "blanked": blanked.to(device)}
        y = batch_norm_act(t, mean, var, activation="silu", **options)
        (dx,) = torch.autograd.grad(y.square().sum(), t)
        found.append([value.cpu() for value in (y, dx, mean, var)])
    torch.testing.assert_close(*found)
    assert all(value.isfinite().all() for value in found[1])


# --- mixed devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weight", "residual", "running_mean", "num_batches_tracked"])
def test_mixed_devices(name):
    arguments = {
        "x": torch.randn(2, 3, 4, 4, device="cuda"),
        "running_mean": torch.zeros(3, device="cuda"),
        "running_var": torch.ones(3, device="cuda"),
        "weight": torch.ones(3, device="cuda"),
        "residual": torch.randn(2, 3, 4, 4, device="cuda"),
        "num_batches_tracked": torch.tensor(0, device="cuda"),
    }
    arguments[name] = arguments[name].cpu()
    with pytest.raises(RuntimeError, match=rf"^{name}: expected a tensor on cuda.*got one on cpu"):
        batch_norm_act(**arguments, training=True)


# --- > 2^31 elements, > 65535 in any grid dimension ---------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("max_pool", [False, True])
def test_more_than_2_to_the_31_elements(layout, max_pool):
    """Samples that repeat have the statistics, results and gradients of the first few."""
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GiB of GPU memory")
    few, times = 64, 1200
    small = LAYOUTS[layout](torch.randn(few, 64, 21, 21, device="cuda", dtype=torch.float16))
    dy_few = torch.randn_like(pooled(small) if max_pool else small)
    options = {"training": True, "max_pool": max_pool}

    def step(x, dy):
        x = x.detach().requires_grad_()
        y = batch_norm_act(x, None, None, **options)
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    y_few, dx_few = step(small, dy_few)
    memory = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x = small.repeat(times, 1, 1, 1).contiguous(memory_format=memory)
    assert x.numel() > 2**31
    y, dx = step(x, dy_few.repeat(times, 1, 1, 1).contiguous(memory_format=memory))
    for part in (0, times // 2, times - 1):
        samples = slice(part * few, (part + 1) * few)
        torch.testing.assert_close(y[samples], y_few, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(dx[samples], dx_few, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    "shape",
    [(70000, 4, 2, 2), (2, 70000, 2, 2), (1, 2, 70000, 3), (1, 2, 3, 70000)],
    ids=str,
)
@pytest.mark.parametrize("layout", ["nchw", "channels_last", "sliced"])
def test_more_than_65535_of_anything(shape, layout):
    make_case(shape, "cuda", DTYPES["fp16"], layout).check_every_implementation()
    make_case(shape, "cuda", DTYPES["fp16"], layout, residual=False).check_every_pool()


# --- streams, graphs, synchronisation -----------------------------------------------------------


@pytest.fixture(params=["nchw", "channels_last"])
def case(request):
    return make_case((16, 64, 14, 14), "cuda", DTYPES["fp16"], request.param)


def test_side_stream(case):
    for choice in case.implementations():
        with fusewise.implementation(**choice):
            expected = case.results().outputs
            late = make_case((16, 64, 14, 14), "cuda", DTYPES["fp16"])
            names = ("x", "weight", "bias", "residual", "running_mean", "running_var", "dy")
            full = [getattr(case, name) for name in names]
            empty = [torch.zeros_like(t) for t in full]
            for name, t in zip(names, empty, strict=True):
                setattr(late, name, t)
            found = late_on_side_stream(empty, full, lambda late=late: late.results().outputs)
        for name, value in expected.items():
            assert same_bits(found[name], value), f"{choice}: {name}"


@pytest.mark.parametrize("max_pool", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_cuda_graph_with_running_statistics(case, momentum, max_pool):
    """Each replay updates the statistics and the counter, as a call does."""
    for choice in case.implementations(max_pool):
        norms = [
            BatchNormAct2d(64, momentum=momentum, max_pool=max_pool, device="cuda")
            for _ in range(2)
        ]
        x = case.x.detach().clone().requires_grad_()
        residual = [] if max_pool else [case.residual]

        def step(norm, x=x, residual=residual):
            y = norm(x, *residual)
            return [y, *torch.autograd.grad(y.float().square().sum(), [x, norm.weight])]

        with fusewise.implementation(**choice), contextlib.suppress(Declined), declined():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step(norms[0])
            torch.cuda.current_stream().wait_stream(stream)
            step(norms[1])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step(norms[0])
            for seed in range(3):
                torch.manual_seed(seed)
                with torch.no_grad():
                    x.normal_()
                graph.replay()
                for ours, right in zip(captured, step(norms[1]), strict=True):
                    assert same_bits(ours.detach(), right.detach())
            assert norms[0].num_batches_tracked == norms[1].num_batches_tracked == 4
            for one, other in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
                assert same_bits(one, other)


class Declined(Exception):
    """An implementation that cannot run the call."""


@contextlib.contextmanager
def declined():
    try:
        yield
    except RuntimeError as error:
        if "cannot run this call" not in str(error):
            raise
        raise Declined from None


def test_cuda_graph_of_the_function(case):
    inputs = [t.detach().clone() for t in (case.x, case.residual, case.weight, case.bias)]
    x, residual, weight, bias = (t.requires_grad_() for t in inputs)
    dy = case.dy.clone()

    def step():
        y = batch_norm_act(x, None, None, weight, bias, residual, training=True)
        return [y, *torch.autograd.grad(y, (x, residual, weight, bias), dy)]

    check_graph(step, (x, residual, weight, bias, dy))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_cumulative_average_where_blocks_do_not_meet(layout):
    """The first of many blocks counts the call; all of them need the count."""
    x = torch.randn(8, 2048, 7, 7, device="cuda", dtype=torch.float16).to(memory_format=layout)
    for _ in range(10):
        ours = BatchNormAct2d(2048, momentum=None, device="cuda")
        theirs = nn.BatchNorm2d(2048, momentum=None, device="cuda")
        for _ in range(3):
            ours(x), theirs(x.float())
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var)


@pytest.mark.parametrize("max_pool", [False, True])
def test_nothing_waits_for_the_gpu(case, max_pool):
    norm = BatchNormAct2d(64, momentum=None, max_pool=max_pool, device="cuda")
    blanked = torch.zeros(16, dtype=torch.bool, device="cuda")
    x = case.x.detach().requires_grad_()

    def step():
        y = norm(x)
        z = batch_norm_act(x, None, None, training=True, blanked=blanked, max_pool=max_pool)
        torch.autograd.grad(y.sum() + z.sum(), x)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.two_gpus
def test_second_device_while_the_first_is_current():
    case = make_case((4, 32, 14, 14), "cuda:1", DTYPES["fp16"])
    assert torch.cuda.current_device() == 0
    case.check_every_implementation()
    assert torch.cuda.current_device() == 0


# --- memory -------------------------------------------------------------------------------------


def test_out_of_memory_forward():
    """An expanded x costs nothing, its result 2^45 bytes."""
    x = torch.zeros(1, 1, 1, 1, device="cuda", dtype=torch.float16).expand(1, 1, 2**22, 2**22)
    mean, var = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    before = allocated()
    assert fails_with_out_of_memory(lambda: batch_norm_act(x, mean, var))
    assert allocated() == before


@pytest.mark.parametrize("activation", ["identity", "relu", "silu"])
def test_scratch_memory_is_small(activation):
    """Beyond its results and relu's bits a step needs far less than an image. Torch's allocator
    alone may round up by one or two megabytes; an image has 12."""
    case = make_case(
        (32, 64, 56, 56), "cuda", DTYPES["fp16-fp32"], "channels_last", activation=activation
    )
    results = 3 - (activation == "identity")  # y, dx, dresidual
    bits = case.x.numel() // 8 if activation == "relu" else 0
    inputs = [t.detach().requires_grad_() for t in (case.x, case.weight, case.bias, case.residual)]

    def step():
        y = case.ours(case.running_mean, case.running_var, *inputs)
        torch.autograd.grad(y, inputs, case.dy)

    for choice in ({}, *case.implementations()):
        with fusewise.implementation(**choice):
            assert peak(step) <= results * case.x.nbytes + bits + case.x.nbytes // 4, choice


def test_peak_memory_of_a_resnet():
    torchvision = pytest.importorskip("torchvision")
    x = torch.randn(16, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    peaks = []
    for fuse in (lambda model: model, recipe()["fuse"]):
        model = fuse(torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last))

        def step(model=model):
            model.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = model(x).float().square().mean()
            loss.backward()

        peaks.append(peak(step))
        del model, step
    assert peaks[1] <= 0.95 * peaks[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None], ids=str)
def test_twenty_training_steps_of_resnet_50(dtype):
    """The losses are torch's within noise: as near as those of a model of torch whose weights
    differ in the last bit."""
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(num_classes=10).cuda()
    theirs = theirs.to(memory_format=torch.channels_last)
    near = copy.deepcopy(theirs)
    with torch.no_grad():
        for weight in near.parameters():
            weight.mul_(1 + torch.finfo(weight.dtype).eps)
    ours = recipe()["fuse"](copy.deepcopy(theirs))
    batches = drawn_batches(1, (32, 3, 64, 64), "cuda") * 20  # one, so that it is soon learnt
    right, close, found = (
        torch.tensor(train(model, batches, dtype)) for model in (theirs, near, ours)
    )
    assert right[-5:].mean() < 0.9 * right[:5].mean()
    noise = (close - right).abs().mean()
    assert (found - right).abs().mean() <= 3 * noise + 0.02 * right.mean()


def test_memory_is_flat_over_many_calls(case):
    check_memory_is_flat(case.results)


# --- whole models -------------------------------------------------------------------------------


def test_training_step_under_autocast():
    losses = []
    for ours in (True, False):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(32)
        after = [BatchNormAct2d.from_batch_norm(norm)] if ours else [norm, nn.ReLU()]
        model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), *after).cuda()
        model = model.to(memory_format=torch.channels_last)
        x = torch.randn(8, 3, 24, 24, device="cuda").to(memory_format=torch.channels_last)
        y, loss = train_under_autocast(model, x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_compile_with_cuda_graphs():
    module = BatchNormAct2d(32, device="cuda")
    check_reduce_overhead(
        module, lambda: LAYOUTS["channels_last"](torch.randn(8, 32, 14, 14, device="cuda"))
    )
