"""LINet where only a GPU can show it. Numbers and dtypes are in tests/python, for the GPU too."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import fusewise
from fusewise._ops import build_info
from fusewise.bench.accuracy import compare, largest, scale
from fusewise.functional import li_conv
from gpu_helpers import (
    check_graph,
    check_memory_is_flat,
    late_on_side_stream,
    needs_gpu,
    train_under_autocast,
)
from reference import same_bits

pytestmark = needs_gpu

CHANNELS = (3, 1, 1)


def small(**options):
    return fusewise.models.li_resnet18(CHANNELS, 7, width=0.25, device="cuda", **options)


def images(batch=4, dtype=torch.float32):
    return [torch.randn(batch, c, 64, 80, device="cuda", dtype=dtype) for c in CHANNELS]


def step(model, x, blanked=None):
    y = model(*x, blanked=blanked)
    return [y, *torch.autograd.grad(y.float().square().mean(), list(model.parameters()))]


def test_a_forced_implementation_is_the_one_that_runs():
    model, x = small(), images()
    for record in fusewise.explain(model, *x):
        if record.operator == "li_conv":
            assert record.chosen == "accumulate" and record.able == ["accumulate"]
    with (
        fusewise.implementation(li_conv="avx512"),
        pytest.raises(RuntimeError, match="there is none named 'avx512'"),
    ):
        model(*x)


def test_cpu_and_cuda_agree():
    model = small(dtype=torch.float64)
    x = images(dtype=torch.float64)
    blanked = torch.rand(3, 4, device="cuda") < 0.3
    right = step(copy.deepcopy(model).cpu(), [t.cpu() for t in x], blanked.cpu())
    for found, expected in zip(step(model, x, blanked), right, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("training", [True, False])
def test_cuda_graph(training):
    """Statistics stay out of it: momentum 0 leaves them as they were."""
    model, x = small().train(training), images()
    for module in model.modules():
        if isinstance(module, fusewise.nn.LIBatchNorm2d):
            module.momentum = 0.0
    with torch.backends.cudnn.flags(deterministic=True):
        check_graph(lambda: step(model, x), x)


def test_graphed():
    model, x = small(), images()
    again = copy.deepcopy(model)
    blanked = torch.zeros(3, 4, dtype=torch.bool, device="cuda")
    with torch.backends.cudnn.flags(deterministic=True):
        fast = fusewise.graphed(again, *x, blanked=blanked)
        for seed in range(3):
            torch.manual_seed(seed)
            x, blanked = images(), torch.rand(3, 4, device="cuda") < 0.3
            for found, right in zip(step(fast, x, blanked), step(model, x, blanked), strict=True):
                assert same_bits(found, right)
    for name, t in model.state_dict().items():
        assert same_bits(again.state_dict()[name], t), name


def convolution_in_float64(tensors, stride):
    """A convolution, and its gradients for dy."""
    x, weight, dy = (t.detach().requires_grad_() for t in tensors)
    y = F.conv2d(x, weight, None, stride, weight.shape[-1] // 2)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def has_cudnn():
    return build_info().get("convolutions") == "cuDNN"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("sizes", "kernel", "stride"),
    [
        ((4, 64, 26, 34, 64), 3, 1),
        ((4, 64, 27, 33, 128), 3, 2),
        ((4, 64, 27, 33, 128), 1, 2),
        ((2, 3, 57, 61, 64), 7, 2),
        ((2, 1, 57, 61, 64), 7, 2),
        ((3, 5, 9, 7, 11), 3, 2),
        ((16, 512, 13, 17, 512), 3, 1),
    ],
    ids=str,
)
def test_convolutions(sizes, kernel, stride, dtype):
    """By cuDNN, where the build has it: as near to float64 as torch's, the same bits every time,
    and torch is not called."""
    n, c, h, w, k = sizes
    torch.manual_seed(0)
    shapes = (n, c, h, w), (k, c, kernel, kernel)
    x, weight = (
        torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
        for shape in shapes
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    mix = torch.zeros(k, k, device="cuda", dtype=dtype)  # no integration
    backends = torch.backends.cudnn
    before = backends.conv.fp32_precision
    backends.conv.fp32_precision = "ieee"

    def ours():
        y = li_conv([x], [weight], [mix], stride=stride, padding=kernel // 2)[0]
        dy = torch.randn(y.shape, generator=torch.manual_seed(1)).to(y)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)], dy

    try:
        found, dy = ours()
        again, _ = ours()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ours()
        eager = F.conv2d(x, weight, None, stride, kernel // 2)
        eager = [eager.detach(), *torch.autograd.grad(eager, (x, weight), dy)]
    finally:
        backends.conv.fp32_precision = before
    right, terms = (
        convolution_in_float64([change(t) for t in (x, weight, dy)], stride)
        for change in (torch.Tensor.double, lambda t: t.double().abs())
    )
    for name, *three, sums in zip(("y", "dx", "dw"), found, eager, right, terms, strict=True):
        allowed = scale(largest(three[-1]), largest(sums), 0, dtype)
        report = compare(name, *three, allowed, computed_in=dtype)
        assert report.passed, str(report)
    assert all(same_bits(one, other) for one, other in zip(found, again, strict=True))
    if has_cudnn():
        names = {event.key for event in profile.key_averages()}
        assert not any("aten::convolution" in n or "aten::_convolution" in n for n in names), names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [(7, 2, 3), (3, 1, 1), (3, 3, 0), (5, 2, 1)], ids=str)
@pytest.mark.parametrize("size", [(16, 24), (13, 17), (57, 61)], ids=str)
def test_few_channels(size, kernel, dtype):
    """Of images that need no gradient. A NaN only reaches the pixels that see it."""
    kernel, stride, padding = kernel
    torch.manual_seed(0)
    channels, k = (3, 1, 2, 7), 64
    x = [
        torch.randn(2, c, *size, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
        for c in channels
    ]
    weights = [
        torch.randn(k, c, kernel, kernel, device="cuda", dtype=dtype)
        .to(memory_format=torch.channels_last)
        .requires_grad_()
        for c in channels
    ]
    mix = [torch.zeros(k, k, device="cuda", dtype=dtype) for _ in channels]
    y = li_conv(x, weights, mix, stride=stride, padding=padding)
    dy = torch.randn(y.shape, generator=torch.manual_seed(1)).to(y)
    found = torch.autograd.grad(y, weights, dy, retain_graph=True)
    assert all(map(same_bits, found, torch.autograd.grad(y, weights, dy)))
    for i, (image, weight) in enumerate(zip(x, weights, strict=True)):
        results = {}
        for name, change in (
            ("eager", lambda t: t),
            ("right", torch.Tensor.double),
            ("terms", lambda t: t.double().abs()),
        ):
            w = change(weight.detach()).requires_grad_()
            u = F.conv2d(change(image), w, None, stride, padding)
            results[name] = [u.detach(), *torch.autograd.grad(u, w, change(dy[i]))]
        for name, ours, *others, terms in zip(
            ("u", "dw"), (y[i].detach(), found[i]), *results.values(), strict=True
        ):
            allowed = scale(largest(others[1]), largest(terms), 0, dtype)
            report = compare(f"{name} {i}", ours, *others, allowed, computed_in=dtype)
            assert report.passed, str(report)
    image = torch.zeros_like(x[0])
    image[1, 1, 8, 10] = float("nan")
    with torch.no_grad():
        one = torch.ones_like(weights[0])
        found = li_conv([image, *x[1:]], [one, *weights[1:]], mix, stride=stride, padding=padding)
        right = F.conv2d(image.double(), one.double(), None, stride, padding)
    assert torch.equal(found[0].isnan(), right.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [(64, 64), (64, 128), (128, 192), (256, 512)], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 13, 11), (5, 52, 37)], ids=str)
def test_one_pass_integrates_as_gemms_do(size, channels, stride, dtype):
    """In float32 sums, rounded once: at least as near to float64 as the GEMMs."""
    n, h, w = size
    c, k = channels
    torch.manual_seed(0)
    x = torch.randn(n, h, w, 4 * c, device="cuda", dtype=dtype).reshape(n, h, w, 4, c)
    x = x.permute(3, 0, 4, 1, 2).contiguous()
    x = x.movedim(2, -1).contiguous().movedim(-1, 2)  # each stream channels-last
    weights = [torch.randn(k, c, 1, 1, device="cuda", dtype=dtype) / 8 for _ in range(3)]
    mix = [torch.randn(k, k, device="cuda", dtype=dtype) for _ in range(3)]
    previous = torch.randn(k, c, device="cuda", dtype=dtype)
    results = {}
    for name in ("one_pass", "accumulate"):
        with fusewise.implementation(li_conv=name):
            results[name] = li_conv(x, weights, mix, previous, stride=stride)
            again = li_conv(x, weights, mix, previous, stride=stride)
        assert same_bits(results[name], again)
    u = results["one_pass"][:3]
    assert same_bits(u, results["accumulate"][:3])
    right = F.conv2d(x[3].double(), previous.double()[..., None, None], stride=stride)
    terms = F.conv2d(x[3].double().abs(), previous.double().abs()[..., None, None], stride=stride)
    for each, m in zip(u.double(), mix, strict=True):
        right = right + F.conv2d(each, m.double()[..., None, None])
        terms = terms + F.conv2d(each.abs(), m.double().abs()[..., None, None])
    allowed = scale(largest(right), largest(terms), 0, dtype)
    found = (results[name][3] for name in ("one_pass", "accumulate"))
    report = compare("y", *found, right, allowed, computed_in=dtype)
    assert report.passed, str(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [(64, 64), (64, 128), (128, 192), (256, 512)], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 13, 11), (5, 104, 74)], ids=str)
def test_one_pass_gradients_of_the_integration(size, channels, stride, dtype):
    """Of three streams, one of which does not need it, and of the integrated stream before."""
    n, h, w = size
    c, k = channels
    torch.manual_seed(0)
    x = torch.randn(4, n, h, w, c, device="cuda", dtype=dtype).movedim(-1, 2)
    weights = [torch.randn(k, c, 1, 1, device="cuda", dtype=dtype) / 8 for _ in range(3)]
    mix = [torch.randn(k, k, device="cuda", dtype=dtype) for _ in range(3)]
    previous = torch.randn(k, c, device="cuda", dtype=dtype)
    learned = [t.requires_grad_() for t in (mix[0], mix[2], previous)]
    results = {}
    for name in ("one_pass", "accumulate"):
        with fusewise.implementation(li_conv_backward=name):
            y = li_conv(x, weights, mix, previous, stride=stride)
            dy = torch.randn(y.shape, generator=torch.manual_seed(1)).to(y)
            results[name] = torch.autograd.grad(y, learned, dy, retain_graph=True)
            again = torch.autograd.grad(y, learned, dy)
        assert all(map(same_bits, results[name], again))
    images = [y[0], y[2], x[3][..., ::stride, ::stride]]
    for image, *both in zip(images, *results.values(), strict=True):
        right, terms = (
            torch.einsum("ndhw,nkhw->dk", change(dy[3]), change(image.detach()))
            for change in (torch.Tensor.double, lambda t: t.double().abs())
        )
        allowed = scale(largest(right), largest(terms), 0, dtype)
        report = compare("gradient", *both, right, allowed, computed_in=dtype)
        assert report.passed, str(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("streams", [1, 3, 5])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 13, 11), (5, 104, 74)], ids=str)
def test_one_pass_gradients_of_the_streams(size, streams, channels, dtype):
    """Before their convolutions. These are by the identity, so x has the same gradients."""
    n, h, w = size
    torch.manual_seed(0)
    shape = (streams + 1, n, h, w, channels)
    x = torch.randn(shape, device="cuda", dtype=dtype).movedim(-1, 2).requires_grad_()
    dy = torch.randn(shape, device="cuda", dtype=dtype).movedim(-1, 2)
    same = torch.eye(channels, device="cuda", dtype=dtype)[..., None, None]
    mix = [torch.randn(channels, channels, device="cuda", dtype=dtype) for _ in range(streams)]
    previous = torch.zeros(channels, channels, device="cuda", dtype=dtype)
    results = {}
    for name in ("one_pass_all", "accumulate"):
        with fusewise.implementation(li_conv_backward=name):
            y = li_conv(x, [same] * streams, mix, previous)
            (results[name],) = torch.autograd.grad(y, x, dy, retain_graph=True)
            (again,) = torch.autograd.grad(y, x, dy)
        assert same_bits(results[name], again)
    for stream, m in enumerate(mix):
        right, terms = (
            change(dy[stream]) + torch.einsum("ndhw,dk->nkhw", change(dy[-1]), change(m))
            for change in (torch.Tensor.double, lambda t: t.double().abs())
        )
        found = (results[name][stream] for name in results)
        allowed = scale(largest(right), largest(terms), 0, dtype)
        report = compare(f"stream {stream}", *found, right, allowed, computed_in=dtype)
        assert report.passed, str(report)


def test_one_pass_where_only_the_integrated_stream_has_a_gradient():
    torch.manual_seed(0)
    block = fusewise.nn.LIBasicBlock(64, 64, 3, device="cuda")
    x = torch.randn(4, 3, 17, 19, 64, device="cuda", dtype=torch.float16).movedim(-1, 2)
    results = {}
    for name in ("one_pass_all", "accumulate"):
        leaf = x.detach().requires_grad_()
        with fusewise.implementation(li_conv_backward=name):
            y = block(leaf, integrated_only=True)
            results[name] = torch.autograd.grad(y, leaf, torch.ones_like(y))[0].double()
    one, other = results.values()
    assert (one - other).norm() < 2e-3 * other.norm()


def test_a_block_that_one_pass_cannot_run_changes_nothing():
    block = fusewise.nn.LIBottleneck(64, 48, 3, device="cuda")  # the shortcut could
    x = torch.randn(4, 3, 9, 9, 64, device="cuda", dtype=torch.float16).movedim(-1, 2)
    before = {name: t.clone() for name, t in block.state_dict().items()}
    with fusewise.implementation(li_conv="one_pass"), pytest.raises(RuntimeError, match="one_pass"):
        block(x)
    assert all(same_bits(t, before[name]) for name, t in block.state_dict().items())


def test_one_pass_declines_and_yields():
    def record(c, k, dtype=torch.float16):
        x = [torch.randn(2, c, 8, 8, device="cuda", dtype=dtype)]
        weights, mix = torch.randn(k, c, 3, 3).to(x[0]), torch.randn(k, k).to(x[0])
        (found,) = fusewise.explain(li_conv, x, [weights], [mix], padding=1)
        return found

    assert record(3, 64).chosen == "one_pass"
    for given in ((3, 96), (64, 64, torch.float32), (64, 256)):
        assert record(*given).chosen == "accumulate"
    assert "one_pass" in record(64, 256).able


def test_cudnn_can_be_switched_off():
    code = (
        "import fusewise, torch; from fusewise._ops import build_info; "
        "assert build_info()['convolutions'] == 'torch'; "
        "model = fusewise.models.li_resnet18((3, 1), 7, width=0.25, device='cuda'); "
        "x = [torch.randn(2, c, 64, 64, device='cuda') for c in (3, 1)]; "
        "model(*x).sum().backward()"
    )
    environment = os.environ | {"FUSEWISE_CUDNN": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_side_stream():
    full = torch.randn(4, 2, 64, 20, 20, device="cuda")
    weights = [torch.randn(64, 64, 3, 3, device="cuda") for _ in range(3)]
    mix = [torch.randn(64, 64, device="cuda") for _ in range(3)]
    previous = torch.randn(64, 64, device="cuda")

    def call(x):
        x = x.detach().requires_grad_()
        y = li_conv(x, weights, mix, previous, stride=2, padding=1)
        return y, *torch.autograd.grad(y, x, torch.ones_like(y))

    with torch.backends.cudnn.flags(deterministic=True):
        right = call(full)
        empty = torch.zeros_like(full)
        for found, expected in zip(
            late_on_side_stream([empty], [full], lambda: call(empty)), right, strict=True
        ):
            assert same_bits(found, expected)


def test_nothing_waits_for_the_gpu():
    model, x = small(), images()
    blanked = torch.rand(3, 4, device="cuda") < 0.3
    step(model, x, blanked)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, x, blanked)
        model.forward_stream(1, x[1])
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("stride", [1, 2])
def test_tf32_follows_the_setting_of_convolutions(stride):
    """In the streams and in the integration. Exact float32 is near the float64 result; TF32 is
    not."""
    x = torch.randn(2, 4, 256, 20, 20, device="cuda")
    weights = [torch.randn(256, 256, 3, 3, device="cuda")]
    mix, previous = [torch.randn(256, 256, device="cuda")], torch.randn(256, 256, device="cuda")
    tensors = (x, weights, mix, previous)
    double = [t.double() if isinstance(t, torch.Tensor) else [t[0].double()] for t in tensors]
    right = li_conv(*double, stride=stride, padding=1)
    backends = torch.backends
    before = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    try:
        for gemm in ("ieee", "tf32"):
            for conv in ("ieee", "tf32"):
                backends.cuda.matmul.fp32_precision = gemm
                backends.cudnn.conv.fp32_precision = conv
                error = (li_conv(*tensors, stride=stride, padding=1) - right).abs()
                for i in range(2):  # the stream, and the integrated one
                    off = (error[i].max() / right[i].abs().max()).item()
                    assert (off < 1e-5) == (conv == "ieee"), (gemm, conv, i, off)
    finally:
        backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = before


def test_training_step_under_autocast():
    class Views(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = small()

        def forward(self, x):
            return self.model(x, x[:, :1], F.avg_pool2d(x[:, 1:2], 3, 1, 1))

    x = torch.randn(8, 3, 64, 64, device="cuda")
    y, loss = train_under_autocast(Views(), x, rate=0.01)
    assert y.isfinite().all() and loss < 0.5


def test_memory_is_flat_over_many_calls():
    model, x = small(), images()
    check_memory_is_flat(lambda: step(model, x), calls=50)


@pytest.mark.two_gpus
def test_second_device_while_the_first_is_current():
    model, x = small().to("cuda:1"), [t.to("cuda:1") for t in images()]
    assert all(t.device.index == 1 for t in step(model, x))
