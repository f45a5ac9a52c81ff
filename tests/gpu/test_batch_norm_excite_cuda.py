"""BatchNorm + activation + Squeeze-and-Excitation where only a GPU can show it.

The matrix of dtypes, layouts and functions is in tests/python and runs on the GPU too.
"""

import pytest
import torch
from torch import nn

import fusewise
from batch_norm_excite_reference import make_case
from fusewise.bench.cases import select
from fusewise.bench.families.squeeze_excite import eager as torchs_excitation
from fusewise.functional import batch_norm_excite
from gpu_helpers import (
    allocated,
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

OPERATOR = "batch_norm_excite"
LAYOUT = pytest.mark.parametrize("layout", ["nchw", "channels_last"])


def functions(case):
    return {name: case.extra[name] for name in ("activation", "hidden_activation", "gate")}


# --- every implementation -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "chain", select(OPERATOR, "cuda", "quick", "b4-*"), ids=lambda chain: chain.name
)
def test_efficientnet_b4(chain):
    """A smaller batch, fp16, channels_last, forward and backward, each implementation in turn."""
    case = make_case(
        (8, *chain.shape[1:]),
        chain.extra["reduced"],
        "cuda",
        DTYPES["fp16-fp32"],
        "channels_last",
        **functions(chain),
    )
    assert "general" in case.check_every_implementation()


@pytest.mark.parametrize(
    "chain",
    [
        chain
        for chain in select(OPERATOR, "cuda", "full", "*")
        if chain.name.startswith(("mobilenet", "regnet", "se-resnet"))
    ],
    ids=lambda chain: chain.name,
)
def test_other_models(chain):
    """MobileNetV3, RegNetY and SE-ResNet, in training and in inference."""
    for training in (True, False):
        case = make_case(
            (16, *chain.shape[1:]),
            chain.extra["reduced"],
            "cuda",
            DTYPES["bf16-fp32"],
            "channels_last",
            training=training,
            **functions(chain),
        )
        assert "general" in case.check_every_implementation()


@LAYOUT
@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16-fp32"])
@pytest.mark.parametrize(
    "names",
    [
        ("silu", "silu", "sigmoid"),
        ("relu", "relu", "sigmoid"),
        ("hardswish", "relu", "hardsigmoid"),
        ("identity", "hardswish", "sigmoid"),
        ("relu6", "silu", "hardsigmoid"),
    ],
    ids="-".join,
)
def test_every_implementation(layout, dtypes, names):
    keywords = dict(zip(("activation", "hidden_activation", "gate"), names, strict=True))
    for i, (shape, reduced) in enumerate(
        (
            ((32, 64, 28, 28), 16),
            ((7, 320, 14, 14), 20),
            ((200, 32, 7, 7), 8),
            ((2, 24, 56, 56), 24),
            ((32, 36, 14, 14), 9),
            ((3, 65, 33, 31), 16),
            ((64, 1512, 7, 7), 144),
        )
    ):
        case = make_case(
            shape, reduced, "cuda", DTYPES[dtypes], layout, training=i % 3 < 2, **keywords
        )
        assert "general" in case.check_every_implementation()


def test_cpu_and_cuda_agree():
    for training in (True, False):
        case = make_case((3, 65, 9, 7), 11, "cuda", DTYPES["fp64"], training=training)
        found = case.results().outputs
        for name in (*case.names, "running_mean", "running_var", "dy"):
            setattr(case, name, getattr(case, name).cpu())
        for name, value in case.results().outputs.items():
            torch.testing.assert_close(found[name].cpu(), value)


# --- mixed devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["running_mean", "weight", "w1", "b1", "w2", "b2"])
def test_mixed_devices(name):
    case = make_case((2, 6, 4, 5), 3, "cuda")
    setattr(case, name, getattr(case, name).cpu())
    tensors = {each: getattr(case, each) for each in case.names}
    with pytest.raises(RuntimeError, match=r"^\w+: expected a tensor on cuda.*got one on cpu"):
        case.ours(*case.statistics, **tensors)


# --- > 2^31 elements, > 65535 in any grid dimension ---------------------------------------------


@LAYOUT
def test_more_than_2_to_the_31_elements(layout):
    """Samples that repeat have the statistics and results of the first few, and so have their
    gradients, but for those of weights, which add up."""
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GiB of GPU memory")
    few, times = 64, 1200
    case = make_case((few, 64, 21, 21), 8, "cuda", DTYPES["fp16-fp32"], layout)
    parameters = {name: getattr(case, name) for name in case.names[1:]}

    def step(x, dy):
        x, w2 = x.detach().requires_grad_(), case.w2.detach().requires_grad_()
        y = case.ours(None, None, x, **(parameters | {"w2": w2}))
        return y.detach(), *torch.autograd.grad(y, (x, w2), dy)

    y_few, dx_few, dw_few = step(case.x, case.dy)
    memory = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x, dy = (t.repeat(times, 1, 1, 1).contiguous(memory_format=memory) for t in (case.x, case.dy))
    assert x.numel() > 2**31
    y, dx, dw = step(x, dy)
    torch.testing.assert_close(dw / times, dw_few, rtol=5e-3, atol=5e-2)
    for part in (0, times // 2, times - 1):
        samples = slice(part * few, (part + 1) * few)
        torch.testing.assert_close(y[samples], y_few, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(dx[samples], dx_few, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    "shape, reduced",
    [
        ((70000, 4, 2, 2), 3),
        ((2, 70000, 2, 2), 4),
        ((1, 2, 70000, 3), 2),
        ((1, 2, 3, 70000), 2),
        ((2, 8, 2, 2), 70000),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["nchw", "channels_last", "sliced"])
def test_more_than_65535_of_anything(shape, reduced, layout):
    make_case(shape, reduced, "cuda", DTYPES["fp16"], layout).check_every_implementation()


# --- streams, graphs, synchronisation -----------------------------------------------------------


@pytest.fixture(params=["nchw", "channels_last"])
def case(request):
    return make_case((16, 64, 14, 14), 16, "cuda", DTYPES["fp16-fp32"], request.param)


def test_side_stream(case):
    names = (*case.names, "running_mean", "running_var", "dy")
    full = {name: getattr(case, name) for name in names}
    for choice in case.implementations():
        empty = {name: torch.zeros_like(t) for name, t in full.items()}
        with fusewise.implementation(**choice):
            expected = case.results().outputs
            for name, t in empty.items():
                setattr(case, name, t)
            inputs = [list(tensors.values()) for tensors in (empty, full)]
            found = late_on_side_stream(*inputs, lambda: own_results(case))
            for name, t in full.items():
                setattr(case, name, t)
        for name, value in found.items():
            assert same_bits(value, expected[name]), f"{choice}: {name}"


def own_results(case):
    """The outputs of a call, without the reference."""
    tensors = {name: getattr(case, name).detach().requires_grad_() for name in case.names}
    mean, var = (t.clone() for t in case.statistics)
    y = case.ours(mean, var, **tensors)
    found = torch.autograd.grad(y, list(tensors.values()), case.dy)
    outputs = {"y": y.detach(), "running_mean": mean, "running_var": var}
    return outputs | {f"d{name}": t for name, t in zip(tensors, found, strict=True)}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_cuda_graph_with_running_statistics(case, momentum):
    """Each replay updates the statistics and the counter, as a call does."""
    for choice in case.implementations():
        norms = [nn.BatchNorm2d(64, momentum=momentum, device="cuda") for _ in range(2)]
        x = case.x.detach().clone().requires_grad_()

        def step(norm, x=x):
            y = batch_norm_excite(
                x,
                norm.running_mean,
                norm.running_var,
                norm.weight,
                norm.bias,
                case.w1,
                case.b1,
                case.w2,
                case.b2,
                training=True,
                momentum=norm.momentum,
                num_batches_tracked=norm.num_batches_tracked,
            )
            return [y, *torch.autograd.grad(y.float().square().sum(), [x, norm.weight])]

        with fusewise.implementation(**choice):
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


def test_cuda_graph_of_all_gradients(case):
    for choice in case.implementations():
        tensors = {name: getattr(case, name).detach().clone() for name in case.names}
        inputs, dy = [t.requires_grad_() for t in tensors.values()], case.dy.clone()

        def step(tensors=tensors, inputs=inputs, dy=dy):
            y = case.ours(None, None, **tensors)
            return [y, *torch.autograd.grad(y, inputs, dy)]

        with fusewise.implementation(**choice):
            check_graph(step, (*inputs, dy))


def test_nothing_waits_for_the_gpu(case):
    tensors = {name: getattr(case, name).detach().requires_grad_() for name in case.names}
    x, others = tensors["x"], [tensors[name] for name in case.names[1:]]
    counter = torch.tensor(0, device="cuda")

    def step():
        for momentum in (0.1, None):
            options = {"momentum": momentum, "num_batches_tracked": counter}
            y = batch_norm_excite(x, *case.statistics, *others, training=True, **options)
            torch.autograd.grad(y.sum(), [x, *others])

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.two_gpus
def test_second_device_while_the_first_is_current():
    case = make_case((4, 32, 14, 14), 8, "cuda:1", DTYPES["fp16"])
    assert torch.cuda.current_device() == 0
    case.check_every_implementation()
    assert torch.cuda.current_device() == 0


# --- memory -------------------------------------------------------------------------------------


def test_out_of_memory_forward():
    """An expanded x costs nothing, its result 2^45 bytes."""
    x = torch.zeros(1, 1, 1, 1, device="cuda", dtype=torch.float16).expand(1, 1, 2**22, 2**22)
    small = make_case((2, 1, 2, 2), 1, "cuda", DTYPES["fp16"])
    parameters = {name: getattr(small, name) for name in small.names[1:]}
    before = allocated()
    for learned in (False, True):
        parameters["w1"].requires_grad_(learned)
        assert fails_with_out_of_memory(lambda: small.ours(*small.statistics, x, **parameters))
    assert allocated() == before


@LAYOUT
def test_the_activated_tensor_is_not_kept(layout):
    """A step never needs more than two images and far less than a third: y and the activated tensor
    forward, y and dx backward. Torch's allocator alone may round up by one or two megabytes; an
    image has 12."""
    case = make_case((32, 64, 56, 56), 16, "cuda", DTYPES["fp16-fp32"], layout)
    tensors = {name: getattr(case, name).detach().requires_grad_() for name in case.names}

    def step():
        y = case.ours(*case.statistics, **tensors)
        torch.autograd.grad(y, list(tensors.values()), case.dy)

    for choice in ({}, *case.implementations()):
        with fusewise.implementation(**choice):
            assert peak(step) <= 2 * case.x.nbytes + case.x.nbytes // 4, choice


def test_memory_is_flat_over_many_calls(case):
    check_memory_is_flat(lambda: own_results(case))


# --- whole models -------------------------------------------------------------------------------


class Block(nn.Module):
    """Convolution, norm, SiLU and excitation, as in EfficientNet."""

    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.fc1, self.fc2 = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.fused = fused

    def forward(self, x):
        x, norm = self.convolution(x), self.norm
        excitation = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        if not self.fused:
            return torchs_excitation(nn.functional.silu(norm(x)), *excitation)
        statistics = norm.running_mean, norm.running_var, norm.weight, norm.bias
        counter = norm.num_batches_tracked
        return batch_norm_excite(
            x, *statistics, *excitation, training=True, num_batches_tracked=counter
        )


def test_training_step_under_autocast():
    losses = []
    for fused in (True, False):
        model = Block(fused).cuda().to(memory_format=torch.channels_last)
        torch.manual_seed(1)
        x = torch.randn(8, 3, 24, 24, device="cuda").to(memory_format=torch.channels_last)
        y, loss = train_under_autocast(model, x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert model.fc1.weight.grad.dtype == torch.float32
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_compile_with_cuda_graphs():
    check_reduce_overhead(
        Block(True).cuda(),
        lambda: LAYOUTS["channels_last"](torch.randn(8, 3, 14, 14, device="cuda")),
    )
