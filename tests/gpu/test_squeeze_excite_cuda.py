"""Squeeze-and-Excitation where only a GPU can show it.

The matrix of dtypes, layouts and functions is in tests/python and runs on the GPU too.
"""

import pytest
import torch

import fusewise
from fusewise import _ops
from fusewise.bench.cases import select
from fusewise.bench.families.squeeze_excite import expected
from fusewise.functional import squeeze_excite
from gpu_helpers import (
    HOPPER,
    allocated,
    check_all_but_general_decline,
    check_graph,
    check_memory_is_flat,
    check_out_of_memory_in_backward,
    check_reduce_overhead,
    fails_with_out_of_memory,
    late_on_side_stream,
    needs_gpu,
    peak,
    train_under_autocast,
)
from reference import (
    DTYPES,
    LAYOUTS,
    OUTPUTS,
    Case,
    assert_close,
    eager,
    gradients,
    make_case,
    same_bits,
    with_silu,
)

pytestmark = needs_gpu


def test_the_cuda_library_is_loaded():
    assert not _ops.CUDA_MISSING
    assert {"cuda", "architectures"} <= set(_ops.build_info())


# --- every implementation -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "block", select("squeeze_excite", "cuda", "quick", "b4-*"), ids=lambda block: block.name
)
def test_efficientnet_b4(block):
    """Batch 32, fp16, channels_last, forward and backward, each implementation in turn."""
    reduced = block.extra["reduced"]
    case = make_case(block.shape, reduced, "cuda", DTYPES["fp16"], "channels_last")
    checked = case.check_every_implementation()
    assert "general" in checked
    assert len(checked) > 2 or not HOPPER, "nothing but the general implementation takes this"


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "fp16-fp32"])
def test_fast_implementations_in_every_dtype(layout, dtypes):
    for shape, reduced in (((32, 64, 28, 28), 16), ((7, 320, 14, 14), 20), ((200, 32, 7, 7), 8)):
        case = make_case(shape, reduced, "cuda", DTYPES[dtypes], layout)
        assert "general" in case.check_every_implementation()


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16-fp32"])
@pytest.mark.parametrize("activation, gate", [("hardswish", "hardsigmoid"), ("relu", "sigmoid")])
def test_fast_implementations_with_other_functions(layout, dtypes, activation, gate):
    case = make_case(
        (300, 64, 4, 6), 4, "cuda", DTYPES[dtypes], layout, activation=activation, gate=gate
    )
    case.b1 *= 3  # so that every piece of hardswish is met
    checked = case.check_every_implementation()
    assert {"general", "two_pass"} <= checked
    assert "cluster" in checked or not HOPPER
    assert ("batched" in checked) == (layout == "channels_last" and dtypes != "fp32")


def test_a_declined_implementation_says_why():
    """The fast ones take no float64."""
    case = make_case((2, 16, 4, 4), 4, "cuda", DTYPES["fp64"])
    check_all_but_general_decline("squeeze_excite", squeeze_excite, *case.arguments)


def test_cpu_and_cuda_agree():
    for dtypes in ("fp64", "fp32"):
        case = make_case((3, 65, 9, 7), 11, "cuda", DTYPES[dtypes])
        cpu = Case(*(t.cpu() for t in (*case.inputs, case.dy)), case.activation, case.gate)
        ours, theirs = gradients(squeeze_excite, case), gradients(squeeze_excite, cpu)
        for name in OUTPUTS:
            torch.testing.assert_close(ours[name].cpu(), theirs[name])


# --- mixed devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "w1", "b1", "w2", "b2"])
@pytest.mark.parametrize("other", ["cpu", "cuda"])
def test_mixed_devices(name, other):
    case = make_case((2, 6, 4, 5), 3, "cuda" if other == "cpu" else "cpu")
    setattr(case, name, getattr(case, name).to(other))
    with pytest.raises(
        RuntimeError, match=r"^(x|w1|b1|w2|b2): expected a tensor on \w+.*got one on"
    ):
        squeeze_excite(*case.arguments)


# --- > 2^31 elements, > 65535 in any grid dimension ---------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("shape", [(70000, 856, 6, 6), (1, 3, 27000, 27000)], ids=str)
def test_more_than_2_to_the_31_elements(shape, layout):
    n, c, h, w = shape
    assert n * c * h * w > 2**31
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GiB of GPU memory")
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format

    def image():
        made = torch.empty(shape, dtype=torch.float16, device="cuda", memory_format=memory_format)
        return made.normal_()

    small = make_case((1, c, 1, 1), 8, "cuda", DTYPES["fp16"])
    x, dy = image(), image()
    right = expected(x, *small.inputs[1:], dy)

    def check(names, outputs):
        """Eager torch takes too much memory here; the reference, rounded, stands for it."""
        for name, ours in zip(names, outputs, strict=True):
            assert_close(name, ours, right[name].value.to(ours.dtype), *right[name])

    for name in ("", "general"):
        y, saved = torch.ops.fusewise._squeeze_excite(
            x, *small.inputs[1:], "silu", "sigmoid", True, name
        )
        assert y.stride() == x.stride()
        check(OUTPUTS[:1], [y])
        del y  # 4 GiB
        found = torch.ops.fusewise._squeeze_excite_backward(
            dy, x, small.w1, small.w2, saved, "silu", "sigmoid", 0b11111, name
        )
        check(OUTPUTS[1:], found)
        del found


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


# --- streams, graphs, threads, devices ----------------------------------------------------------


@pytest.fixture(params=["nchw", "channels_last"])
def case(request):
    return make_case((16, 64, 28, 28), 16, "cuda", DTYPES["fp16"], request.param)


def test_side_stream(case):
    for choice in case.implementations():
        with fusewise.implementation(**choice):
            expected = gradients(squeeze_excite, case)
            late = Case(*(torch.zeros_like(t) for t in (*case.inputs, case.dy)))
            empty, full = (*late.inputs, late.dy), (*case.inputs, case.dy)
            found = late_on_side_stream(
                empty, full, lambda late=late: gradients(squeeze_excite, late)
            )
        for output in OUTPUTS:
            assert same_bits(found[output], expected[output]), f"{choice}: {output}"


def test_cuda_graph(case):
    for choice in case.implementations():
        inputs = [t.detach().clone().requires_grad_() for t in case.inputs]
        dy = case.dy.clone()

        def step(inputs=inputs, dy=dy):
            y = with_silu(*inputs)
            return [y, *torch.autograd.grad(y, inputs, dy)]

        with fusewise.implementation(**choice):
            check_graph(step, (*inputs, dy))


@pytest.mark.two_gpus
def test_second_device_while_the_first_is_current():
    case = make_case((4, 32, 14, 14), 8, "cuda:1", DTYPES["fp16"])
    assert torch.cuda.current_device() == 0
    case.check_every_implementation()
    assert torch.cuda.current_device() == 0
    case.w1 = case.w1.to("cuda:0")
    with pytest.raises(RuntimeError, match="^w1: expected a tensor on cuda:1, got one on cuda:0"):
        squeeze_excite(*case.arguments)


# --- memory -------------------------------------------------------------------------------------


def test_out_of_memory_forward():
    """An expanded x costs nothing, its result 2^45 bytes."""
    x = torch.zeros(1, 1, 1, 1, device="cuda", dtype=torch.float16).expand(1, 1, 2**22, 2**22)
    small = make_case((1, 1, 1, 1), 1, "cuda", DTYPES["fp16"])
    before = allocated()
    for learned in (False, True):
        small.w1.requires_grad_(learned)
        assert fails_with_out_of_memory(lambda: with_silu(x, *small.inputs[1:]))
    assert allocated() == before
    assert squeeze_excite(*small.arguments).isfinite().all()


def test_out_of_memory_backward():
    case = make_case((16, 64, 256, 256), 8, "cuda", DTYPES["fp16"])
    dx = gradients(squeeze_excite, case)["dx"]
    check_out_of_memory_in_backward(
        with_silu,
        case.inputs,
        case.dy,
        room=32 * 2**20,  # dx alone is 128 MiB
        dx=dx,
    )


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("shape, reduced", [((32, 192, 95, 95), 8), ((32, 1632, 12, 12), 68)])
def test_peak_memory_is_not_above_eagers(layout, shape, reduced):
    case = make_case(shape, reduced, "cuda", DTYPES["fp16"], layout)

    def training(fn):
        return peak(lambda: gradients(fn, case))

    @torch.no_grad()
    def inference(fn):
        return peak(lambda: fn(*case.arguments))

    for choice in ({}, *case.implementations()):
        with fusewise.implementation(**choice):
            assert training(squeeze_excite) <= training(eager)
    # Eager keeps little beside y, and clusters nothing; two passes have their partial sums, and
    # batches the vectors of all samples.
    clusters = fusewise.explain(squeeze_excite, *case.arguments)[0].chosen == "cluster"
    allowed = 0 if clusters else case.x.nbytes // 50
    assert inference(squeeze_excite) <= inference(eager) + allowed


def test_memory_is_flat_over_many_calls(case):
    check_memory_is_flat(lambda: gradients(squeeze_excite, case))


# --- whole models -------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Convolution, normalisation, activation, Squeeze-and-Excitation, as in EfficientNet."""

    def __init__(self, excite):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(32)
        self.excite = excite

    def forward(self, x):
        return self.excite(torch.nn.functional.silu(self.norm(self.convolution(x))))


class EagerExcitation(fusewise.nn.SqueezeExcitation):
    def forward(self, x):
        return eager(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)


def test_training_step_under_autocast():
    losses = []
    for kind in (fusewise.nn.SqueezeExcitation, EagerExcitation):
        torch.manual_seed(0)
        model = Block(kind(32, 8, "silu")).cuda().to(memory_format=torch.channels_last)
        x = torch.randn(8, 3, 24, 24, device="cuda").to(memory_format=torch.channels_last)
        y, loss = train_under_autocast(model, x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert model.excite.fc1.weight.grad.dtype == torch.float32
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_compile_with_cuda_graphs():
    module = fusewise.nn.SqueezeExcitation(32, 8, "silu", device="cuda")
    check_reduce_overhead(
        module, lambda: LAYOUTS["channels_last"](torch.randn(8, 32, 14, 14, device="cuda"))
    )
