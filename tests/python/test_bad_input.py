"""What bad and unusual input gets, row by row of the table in docs/specification.md.

The rows that need a GPU (2^31 elements, grid sizes, streams, graphs, a second device) are in
tests/gpu.
"""

import math
import re
import threading

import numpy
import pytest
import torch
from torch.autograd import forward_ad

import fusewise
from fusewise.functional import squeeze_excite
from reference import (
    ACTIVATIONS,
    DTYPES,
    GATES,
    OUTPUTS,
    assert_close,
    eager,
    gradients,
    make_case,
    misaligned,
    misaligned_channels_last,
    same_bits,
    with_silu,
)


def replaced(case, **changes):
    """The positional arguments of a good call with some of them changed."""
    names = ("x", "w1", "b1", "w2", "b2", "activation", "gate")
    named = dict(zip(names, case.arguments, strict=True))
    return [*(named | changes).values()]


def assert_refused(arguments, name, *mentions):
    """Every way in refuses with an error that names the argument, and changes nothing."""
    before = [t.clone() for t in arguments if isinstance(t, torch.Tensor)]

    def with_gradient():
        t = [t.detach().requires_grad_() if _differentiable(t) else t for t in arguments]
        squeeze_excite(*t)

    def fake():
        squeeze_excite(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in arguments))

    for way in (lambda: squeeze_excite(*arguments), with_gradient, fake):
        with pytest.raises((RuntimeError, ValueError)) as error:
            way()
        message = str(error.value)
        assert re.match(rf"{name}: ", message), message
        for mention in mentions:
            assert mention in message, message
    after = [t for t in arguments if isinstance(t, torch.Tensor)]
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


def _differentiable(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


@pytest.fixture
def case(device):
    return make_case((2, 6, 4, 5), 3, device)


# --- wrong rank, size mismatch between arguments, mixed devices, integer or complex dtype -------


@pytest.mark.parametrize("shape", [(), (6,), (2, 6), (6, 4, 5), (1, 2, 6, 4, 5)], ids=str)
def test_wrong_rank_of_x(case, device, shape):
    x = torch.ones(shape, device=device)
    assert_refused(replaced(case, x=x), "x", "expected [N, C, H, W]", str(list(shape)))


@pytest.mark.parametrize(
    "name, shape",
    [
        ("w1", (6,)),
        ("w1", ()),
        ("w1", (3, 6, 1)),
        ("w1", (3, 6, 3, 3)),
        ("w1", (3, 6, 1, 1, 1)),
        ("w2", (6,)),
        ("w2", (6, 3, 1, 2)),
        ("b1", (3, 1)),
        ("b1", ()),
        ("b2", (1, 6)),
    ],
    ids=str,
)
def test_wrong_rank_of_a_parameter(case, device, name, shape):
    wrong = torch.ones(shape, device=device)
    assert_refused(replaced(case, **{name: wrong}), name, "expected [", f"got {list(shape)}")


@pytest.mark.parametrize(
    "name, shape",
    [
        ("w1", (3, 5)),
        ("w1", (3, 7)),
        ("w1", (6, 3)),
        ("w1", (0, 6)),
        ("w2", (6, 4)),
        ("w2", (5, 3)),
        ("w2", (3, 6)),
        ("b1", (6,)),
        ("b1", (1,)),
        ("b2", (3,)),
        ("b2", (0,)),
    ],
    ids=str,
)
def test_size_mismatch(case, device, name, shape):
    wrong = torch.ones(shape, device=device)
    assert_refused(replaced(case, **{name: wrong}), name, "expected [", f"got {list(shape)}")


def test_gradient_of_the_wrong_size(case):
    """Autograd refuses most; the operator itself must hold too."""
    saved = torch.ops.fusewise._squeeze_excite(*case.arguments, True, "")[1]
    backward = torch.ops.fusewise._squeeze_excite_backward
    rest = (case.x, case.w1, case.w2, saved, "silu", "sigmoid", 0b11111, "")
    with pytest.raises(RuntimeError, match="^dy: expected"):
        backward(case.dy[:, :, :3], *rest)
    with pytest.raises(RuntimeError, match="^dy: expected"):
        backward(case.dy.double(), *rest)
    with pytest.raises(RuntimeError, match="^saved: expected"):
        backward(case.dy, *rest[:3], saved[:-1], *rest[4:])


@pytest.mark.parametrize("name", ["x", "w1", "b1", "w2", "b2"])
def test_mixed_devices(case, name):
    wrong = dict(zip(("x", "w1", "b1", "w2", "b2"), case.inputs, strict=True))[name].to("meta")
    with pytest.raises(
        RuntimeError, match=r"^(x|w1|b1|w2|b2): expected a tensor on \w+.*got one on"
    ):
        squeeze_excite(*replaced(case, **{name: wrong}))


@pytest.mark.parametrize("name", ["x", "w1", "b1", "w2", "b2"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_integer_or_complex_dtype(case, name, dtype):
    tensor = dict(zip(("x", "w1", "b1", "w2", "b2"), case.inputs, strict=True))[name].to(dtype)
    assert_refused(replaced(case, **{name: tensor}), name, "expected")


@pytest.mark.parametrize(
    "x, weights, refused",
    [
        (torch.float32, torch.float64, True),
        (torch.float32, torch.float16, True),
        (torch.float64, torch.float32, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float64, True),
        (torch.float16, torch.float32, False),
    ],
    ids=str,
)
def test_weights_of_another_dtype(device, x, weights, refused):
    case = make_case((2, 6, 4, 5), 3, device, (x, weights))
    if refused:
        assert_refused(list(case.arguments), "w1", "expected")
    else:
        assert squeeze_excite(*case.arguments).dtype == x


@pytest.mark.parametrize("name", ["b1", "w2", "b2"])
def test_weights_of_two_dtypes(device, name):
    case = make_case((2, 6, 4, 5), 3, device, DTYPES["fp16-fp32"])
    wrong = getattr(case, name).half()
    assert_refused(replaced(case, **{name: wrong}), name, "w1's dtype")


@pytest.mark.parametrize("name, value", [("activation", "gelu"), ("gate", "tanh"), ("gate", "")])
def test_unknown_function(case, name, value):
    assert_refused(replaced(case, **{name: value}), name, f"got '{value}'")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"x": numpy.zeros((2, 6, 4, 5), "float32")}, "x: expected a tensor, got numpy.ndarray"),
        ({"x": [1.0]}, "x: expected a tensor, got list"),
        ({"x": None}, "x: expected a tensor, got None"),
        ({"w1": None}, "w1: expected a tensor, got None"),
        ({"b1": 0.0}, "b1: expected a tensor or None, got float"),
        ({"w2": 3}, "w2: expected a tensor, got int"),
        ({"activation": 1}, "activation: expected 'silu', 'relu' or 'hardswish', got 1"),
        ({"gate": None}, "gate: expected 'sigmoid' or 'hardsigmoid', got None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_are_no_tensors_and_no_texts(case, change, said):
    arguments = replaced(case, **change)

    def with_gradient():
        squeeze_excite(
            *(t.clone().requires_grad_() if _differentiable(t) else t for t in arguments)
        )

    def without():
        with torch.no_grad():
            squeeze_excite(*arguments)

    def transformed():
        torch.func.vmap(lambda _: squeeze_excite(*arguments))(torch.ones(2))

    for way in (with_gradient, without, transformed):
        with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
            way()


def _sparse(t):
    return t.to_sparse()


def _nested(t):
    return torch.nested.nested_tensor(list(t))


def _quantized(t):
    return torch.quantize_per_tensor(t, 0.1, 0, torch.quint8)


@pytest.mark.parametrize("kind", [_sparse, _nested, _quantized])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_another_kind(kind):
    case = make_case((2, 6, 4, 5), 3)
    with pytest.raises(RuntimeError, match="^x: expected a (dense tensor|floating dtype), got"):
        squeeze_excite(*replaced(case, x=kind(case.x)))


# --- N = 0 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("dtypes", ["fp32", "fp16-fp32"])
def test_empty_batch(device, layout, dtypes):
    case = make_case((0, 6, 4, 5), 3, device, DTYPES[dtypes], layout)
    found = gradients(squeeze_excite, case)
    assert found["y"].shape == found["dx"].shape == (0, 6, 4, 5)
    assert found["y"].stride() == found["dx"].stride() == torch.empty_like(case.x).stride()
    for name, like in zip(OUTPUTS[2:], case.inputs[1:], strict=True):
        assert torch.equal(found[name], torch.zeros_like(like))


# --- H * W = 0, C = 0 ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 6, 0, 5), (2, 6, 4, 0), (0, 6, 0, 0)], ids=str)
def test_no_pixels(case, device, shape):
    x = torch.ones(shape, device=device)
    assert_refused(replaced(case, x=x), "x", "with C, H and W >= 1", str(list(shape)))


def test_no_channels(case, device):
    x, w1, w2 = (torch.ones(s, device=device) for s in ((2, 0, 4, 5), (3, 0), (0, 3)))
    arguments = replaced(case, x=x, w1=w1, w2=w2, b2=w1[0])
    assert_refused(arguments, "x", "with C, H and W >= 1", "[2, 0, 4, 5]")


# --- odd channel counts, odd spatial sizes, HW = 1 ----------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 17, 65, 127])
@pytest.mark.parametrize("side", [(1, 1), (1, 7), (13, 1), (3, 5), (17, 31)], ids=str)
def test_odd_sizes(device, channels, side):
    for layout in ("nchw", "channels_last"):
        make_case((2, channels, *side), 5, device, DTYPES["fp16"], layout).check()


# --- expanded, sliced, transposed, misaligned; non-contiguous incoming gradients ----------------
# Every pair of layouts of x and dy: test_squeeze_excite.py, test_gradient_in_another_layout.


@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("channels_last", [False, True])
def test_misaligned_base_pointers(device, offset, channels_last):
    """x, dy and the weights start anywhere between two vectors."""
    case = make_case((2, 16, 4, 4), 8, device, DTYPES["fp16"])

    def moved(t):
        return (misaligned_channels_last if channels_last and t.dim() == 4 else misaligned)(
            t, offset
        )

    case.x, case.w1, case.b1, case.w2, case.b2 = (moved(t) for t in case.inputs)
    case.dy = moved(case.dy)
    case.check_every_implementation()


def test_gradient_of_a_sum_is_expanded(case):
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    with_silu(*inputs).sum().backward()
    case.dy = torch.ones_like(case.dy)
    expected = gradients(squeeze_excite, case)
    for tensor, name in zip(inputs, OUTPUTS[1:], strict=True):
        torch.testing.assert_close(tensor.grad, expected[name])


@pytest.mark.parametrize("dtypes", ["fp32", "fp16"])
def test_overlapping_batch_of_windows(device, dtypes):
    """Strides that visit an element more than once, as unfold makes them."""
    case = make_case((4, 6, 4, 5), 3, device, DTYPES[dtypes])
    line = torch.randn(64, device=device, dtype=case.x.dtype)
    case.x = line.as_strided((4, 6, 4, 5), (3, 1, 5, 1))
    case.check_every_implementation()


# --- NaN or inf in the data ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["x", "w1", "b1", "w2", "b2", "dy"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", GATES)
def test_nan_and_inf_propagate_as_in_torch(device, value, name, activation, gate):
    case = make_case((3, 6, 4, 5), 3, device, activation=activation, gate=gate)
    tensor = getattr(case, name)
    tensor[(1,) * tensor.dim()] = value
    case.check_every_implementation()


def test_sums_do_not_overflow_half(device):
    """The sum of the pixels does not fit fp16, their mean does. Eager torch gives NaN here."""
    case = make_case((2, 6, 4, 5), 3, device, DTYPES["fp16"])
    case.x = case.x.clamp(-1, 1) * 1e4 + 4e4
    right = {name: reference for name, (_, reference, *_) in case.expected().items()}
    for choice in case.implementations():
        with fusewise.implementation(**choice):
            ours = gradients(squeeze_excite, case)
        for name in OUTPUTS:
            rounded = right[name].to(torch.float16)
            assert_close(name, ours[name], rounded, right[name], right[name].abs().max())


# --- out of memory ------------------------------------------------------------------------------


def test_out_of_memory_is_torchs_own_error():
    """An expanded x costs nothing, its result 2^50 bytes. On a GPU: tests/gpu."""
    x = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**24, 2**24)
    w, b = torch.ones(1, 1), torch.ones(1)
    for gradient in (False, True):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            squeeze_excite(x, w.requires_grad_(gradient), b, w, b, "silu")


# --- several threads; fork ----------------------------------------------------------------------


def test_several_threads(device):
    """On a GPU each has a stream of its own."""
    cases = [make_case((8, 32 + 8 * i, 14, 14), 8, device, DTYPES["fp16"]) for i in range(4)]
    expected = [gradients(squeeze_excite, case) for case in cases]
    if device == "cuda":
        torch.cuda.synchronize()
    wrong = []

    def work(case, right):
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            for _ in range(20):
                found = gradients(squeeze_excite, case)
                if device == "cuda":
                    torch.cuda.current_stream().synchronize()
                wrong.extend(name for name in OUTPUTS if not same_bits(found[name], right[name]))

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(cases, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fork(run_python, device):
    """A process that imported fusewise forks; child and parent both compute.

    Nothing computes before the fork: torch's own CPU threads do not survive it, nor does CUDA.
    """
    run_python(
        f"""
        import os, signal
        from reference import make_case
        child = os.fork()
        signal.alarm(120)
        make_case((2, 40, 33, 35), 8, {device!r}).check()
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


# --- activation checkpointing, saved_tensors_hooks: test_squeeze_excite.py ----------------------
# --- inference_mode, no_grad, frozen parameters, needs_input_grad: test_squeeze_excite.py -------


# --- torch.func transforms, vmap, forward-mode AD -----------------------------------------------


@pytest.fixture
def double(device):
    return make_case((2, 5, 3, 2), 3, device, DTYPES["fp64"])


def test_func_grad_and_vjp(double):
    def loss(fn, *inputs):
        return fn(*inputs).square().sum()

    everything = tuple(range(1, 6))
    ours = torch.func.grad(loss, everything)(with_silu, *double.inputs)
    torch.testing.assert_close(ours, torch.func.grad(loss, everything)(eager, *double.inputs))

    results = []
    for fn in (with_silu, eager):
        y, pull = torch.func.vjp(fn, *double.inputs)
        results.append((y, pull(double.dy)))
    torch.testing.assert_close(*results)


def test_func_jvp(double):
    tangents = tuple(torch.randn_like(t) for t in double.inputs)
    ours = torch.func.jvp(with_silu, double.inputs, tangents)
    torch.testing.assert_close(ours, torch.func.jvp(eager, double.inputs, tangents))


def test_forward_mode_ad(double):
    tangent = torch.randn_like(double.x)
    results = []
    for fn in (with_silu, eager):
        with forward_ad.dual_level():
            y = fn(forward_ad.make_dual(double.x, tangent), *double.inputs[1:])
            results.append(forward_ad.unpack_dual(y).tangent)
    torch.testing.assert_close(*results)


def test_func_vmap(double):
    x = torch.randn(3, *double.x.shape, dtype=torch.float64, device=double.x.device)
    w1 = torch.randn(3, *double.w1.shape, dtype=torch.float64, device=double.x.device)

    def run(fn):
        return torch.func.vmap(lambda x, w1: fn(x, w1, *double.inputs[2:]))(x, w1)

    torch.testing.assert_close(run(with_silu), run(eager))


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_func_jacobians(double, transform):
    def of_b1(fn):
        x, w1, b1, w2, b2 = double.inputs
        return transform(lambda b1: fn(x, w1, b1, w2, b2))(b1)

    torch.testing.assert_close(of_b1(with_silu), of_b1(eager))


def test_batched_gradients(double):
    """Backward itself under vmap, as autograd.functional.jacobian(vectorize=True) runs it."""
    x = double.x.requires_grad_()
    dy = torch.randn(4, *x.shape, dtype=x.dtype, device=x.device)
    results = [
        torch.autograd.grad(fn(*double.inputs), x, dy, is_grads_batched=True)[0]
        for fn in (with_silu, eager)
    ]
    torch.testing.assert_close(*results)


def test_transforms_name_bad_arguments_too(double):
    wrong = replaced(double, w1=double.w1[:, 1:])
    with pytest.raises(
        RuntimeError, match=r"^w1: expected \[R, 5\] or \[R, 5, 1, 1\], got \[3, 4\]"
    ):
        torch.func.grad(lambda x: squeeze_excite(x, *wrong[1:]).sum())(double.x)
    with pytest.raises(RuntimeError, match=r"^x: expected \[N, C, H, W\]"):
        torch.func.vmap(lambda x: with_silu(x, *double.inputs[1:]))(double.x)


# --- double backward ----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", GATES)
def test_double_backward_is_right(double, activation, gate):
    inputs = [t.requires_grad_() for t in double.inputs]
    assert torch.autograd.gradgradcheck(lambda *t: squeeze_excite(*t, activation, gate), inputs)


def gradient_penalty(fn, case):
    """What WGAN-GP and R1 do: the gradient by x is part of the loss. dy needs no gradient here."""
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    y = fn(*inputs)
    (slope,) = torch.autograd.grad(y.sum(), inputs[0], create_graph=True)
    loss = (slope.flatten(1).norm(dim=1) - 1).square().mean() + y.mean()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("dtypes", ["fp32", "fp64"])
def test_gradient_penalty_is_right(device, dtypes):
    case = make_case((2, 6, 4, 5), 3, device, DTYPES[dtypes])
    torch.testing.assert_close(gradient_penalty(with_silu, case), gradient_penalty(eager, case))


def test_gradient_penalty_through_a_hypernetwork(double):
    """A weight made from x: its gradient and x's own must not be counted twice."""

    def wrapped(fn):
        return lambda x, w1, *rest: fn(x, w1 * x.mean(), *rest)

    ours, right = (gradient_penalty(wrapped(fn), double) for fn in (with_silu, eager))
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradient_penalty_under_compile_is_an_error(device, backend):
    torch._dynamo.reset()
    case = make_case((2, 6, 4, 5), 3, device)
    compiled = torch.compile(with_silu, fullgraph=True, backend=backend)
    with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
        gradient_penalty(compiled, case)


def test_func_transform_inside_compile(double):
    torch._dynamo.reset()

    def slope(fn):
        return lambda *inputs: torch.func.grad(lambda x: fn(x, *inputs[1:]).square().sum())(
            inputs[0]
        )

    compiled = torch.compile(slope(with_silu), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*double.inputs), slope(eager)(*double.inputs))


# --- deepcopy, pickle, torch.save, .to(), .half(): test_module.py -------------------------------
