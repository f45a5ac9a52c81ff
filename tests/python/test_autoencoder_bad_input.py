"""The autoencoder: what bad and unusual input gets."""

import math
import re
import threading

import numpy
import pytest
import torch

from autoencoder_reference import (
    DTYPES,
    NAMES,
    OUTPUTS,
    SMALL,
    WEIGHTS,
    autoencoder,
    gradients,
    make_case,
)
from reference import same_bits

forward_op = torch.ops.fusewise._autoencoder.default
backward_op = torch.ops.fusewise._autoencoder_backward.default
EVERYTHING = (1 << 12) - 1
# --- bad input ---------------------------------------------------------------------------------


@pytest.fixture
def case(device):
    return make_case(5, SMALL, device)


def replaced(case, **changes):
    named = dict(zip(NAMES, case.inputs, strict=True))
    return [*(named | changes).values()]


def assert_refused(arguments, name, *mentions, output="reconstruction"):
    """Every way in refuses with an error that names the argument, and changes nothing."""
    before = [t.clone() for t in arguments]

    def learned(t):
        return t.detach().requires_grad_() if t.is_floating_point() else t

    ways = (
        lambda: autoencoder(*arguments, output=output),
        lambda: autoencoder(*map(learned, arguments), output=output),
        lambda: autoencoder(*(t.to("meta") for t in arguments), output=output),
        lambda: torch.func.vmap(lambda _: autoencoder(*arguments, output=output))(torch.ones(2)),
    )
    for way in ways:
        with pytest.raises((RuntimeError, ValueError)) as error:
            way()
        message = str(error.value)
        assert re.match(rf"{name}: ", message), message
        for mention in mentions:
            assert mention in message, message
    assert all(same_bits(a, b) for a, b in zip(before, arguments, strict=True))


@pytest.mark.parametrize("shape", [(), (18,), (1, 5, 3, 6)], ids=str)
def test_wrong_rank_of_x(case, device, shape):
    x = torch.ones(shape, device=device)
    assert_refused(replaced(case, x=x), "x", "[N, 18] or [N, 3, 6]", f"got {list(shape)}")


@pytest.mark.parametrize("width", [17, 19, 6, 0])
def test_rows_that_do_not_fit(case, device, width):
    x = torch.ones(5, width, device=device)
    assert_refused(replaced(case, x=x), "x", "expected [N, 18] or [N, 3, 6]", f"got [5, {width}]")


@pytest.mark.parametrize("shape", [(5, 6, 3), (5, 3, 7), (5, 2, 6)], ids=str)
def test_frames_that_do_not_fit(case, device, shape):
    x = torch.ones(shape, device=device)
    assert_refused(replaced(case, x=x), "x", "expected [N, 18] or [N, 3, 6]", f"got {list(shape)}")


@pytest.mark.parametrize("name", WEIGHTS)
def test_wrong_shape_of_a_weight(case, name):
    weight = dict(zip(NAMES, case.inputs, strict=True))[name]
    # The encoder's and the basis's rows say what the sizes are: others are then refused.
    culprit = {"encoder_weight": "(norm_weight|encoder_bias|basis)"}.get(name, name)
    culprit = {"basis": "(basis|mid_norm_weight)"}.get(name, culprit)
    longer = torch.cat([weight, weight[:1]])
    assert_refused(replaced(case, **{name: longer}), culprit, "expected [", "got [")
    assert_refused(replaced(case, **{name: weight[None]}), name, "expected [", "got [")
    assert_refused(replaced(case, **{name: weight[:0]}), name, "expected [", "got [")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_integer_or_complex_dtype(case, name, dtype):
    wrong = dict(zip(NAMES, case.inputs, strict=True))[name].to(dtype)
    expected = "(norm_weight|encoder_weight)" if name == "encoder_weight" else name
    assert_refused(replaced(case, **{name: wrong}), expected, "expected")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_two_dtypes(device, name):
    case = make_case(5, SMALL, device, DTYPES["fp16-fp32"])
    wrong = dict(zip(NAMES, case.inputs, strict=True))[name].half()
    # The first of them says what the others should have.
    expected = "norm_bias" if name == "norm_weight" else name
    assert_refused(replaced(case, **{name: wrong}), expected, "norm_weight's dtype")


@pytest.mark.parametrize(
    "x, weights",
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_weights_of_another_dtype(device, x, weights):
    case = make_case(5, SMALL, device, (x, weights))
    assert_refused(list(case.inputs), "norm_weight", "x's dtype")


@pytest.mark.parametrize("name", NAMES)
def test_mixed_devices(case, name):
    wrong = dict(zip(NAMES, case.inputs, strict=True))[name].to("meta")
    with pytest.raises(RuntimeError, match=r"^\w+: expected a tensor on \w+.*got one on"):
        autoencoder(*replaced(case, **{name: wrong}))


@pytest.mark.parametrize("value, got", [(numpy.zeros((5, 18), "float32"), "numpy.ndarray")])
@pytest.mark.parametrize("name", ["x", "basis"])
def test_arguments_that_are_no_tensors(case, name, value, got):
    for wrong, kind in ((value, got), (None, "None"), ([1.0], "list")):
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got {kind}"):
            autoencoder(*replaced(case, **{name: wrong}))


def test_an_unknown_output(case):
    assert_refused(list(case.inputs), "output", "got 'loss'", output="loss")


def test_gradient_of_the_wrong_size(case):
    kept = forward_op(*case.inputs, "reconstruction", False, True, "")[1]
    options = ("reconstruction", False, EVERYTHING, "")
    rest = (*case.inputs, kept, *options)
    with pytest.raises(RuntimeError, match="^dy: expected"):
        backward_op(case.gradient[:, 1:], *rest)
    with pytest.raises(RuntimeError, match="^dy: expected"):
        backward_op(case.gradient.double(), *rest)
    with pytest.raises(RuntimeError, match="^saved: expected the 20 float32 values .* got 16"):
        backward_op(case.gradient, *case.inputs, kept[1:], *options)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtypes", ["fp32", "fp16-fp32"])
def test_no_rows(device, output, dtypes):
    case = make_case(0, SMALL, device, DTYPES[dtypes], output=output)
    found = gradients(autoencoder, case)
    assert (
        found[output].shape == {"reconstruction": (0, 18), "latent": (0, 4), "score": (0,)}[output]
    )
    assert found["dx"].shape == (0, 18)
    for name, weight in zip(WEIGHTS, case.weights, strict=True):
        assert torch.equal(found[f"d{name}"], torch.zeros_like(weight))


@pytest.mark.parametrize("offset", range(1, 8))
def test_misaligned_base_pointers(device, offset):
    case = make_case(5, SMALL, device, DTYPES["fp16"])

    def moved(t):
        return t.new_empty(t.numel() + offset)[offset:].view(t.shape).copy_(t)

    case.x, case.gradient = moved(case.x), moved(case.gradient)
    case.weights = [moved(t) for t in case.weights]
    case.check_every_implementation()


def test_weights_in_any_layout(device):
    case = make_case(5, SMALL, device)
    dense = case.check()
    case.weights = [
        t.T.contiguous().T if t.dim() == 2 else torch.stack([t, t], 1)[:, 0] for t in case.weights
    ]
    for name, value in case.check().items():
        assert torch.equal(value, dense[name])


def test_gradient_of_a_sum_is_expanded(case):
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    autoencoder(*inputs).sum().backward()
    case.gradient = torch.ones_like(case.gradient)
    right = gradients(autoencoder, case)
    for tensor, name in zip(inputs, NAMES, strict=True):
        torch.testing.assert_close(tensor.grad, right[f"d{name}"])


def test_overlapping_windows(device):
    """As a long signal is cut: every row starts a frame later than the one before."""
    case = make_case(5, SMALL, device)
    case.x = torch.randn(100, device=device).as_strided((5, 18), (6, 1))
    case.check_every_implementation()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    "name, dtypes",
    [
        *((name, "fp64") for name in (*NAMES, "gradient")),
        # Of an infinite activation, which only infinite weights give, torch's GELU makes NaN in
        # float32 on a CPU, and there alone.
        ("x", "fp32"),
        ("basis", "fp32"),
        ("decoder_weight", "fp32"),
        ("decoder_bias", "fp32"),
        ("gradient", "fp32"),
    ],
)
def test_nan_and_inf_propagate_as_in_torch(value, output, name, dtypes):
    case = make_case(40, SMALL, dtypes=DTYPES[dtypes], output=output)
    tensor = dict(zip(NAMES, case.inputs, strict=True)).get(name, case.gradient)
    tensor[(1,) * tensor.dim()] = value
    case.check_every_implementation()


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_poisoned_row_stays_alone(device, output):
    case = make_case(40, SMALL, device, output=output)
    clean = autoencoder(*case.inputs, output=output)
    case.x[7, 3] = math.nan
    poisoned = autoencoder(*case.inputs, output=output)
    others = torch.arange(40, device=device) != 7
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[7].isnan().all()


@pytest.mark.parametrize("dtypes", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_zero_row_in_the_basis(device, dtypes, output):
    case = make_case(9, SMALL, device, DTYPES[dtypes], output=output)
    case.weights[WEIGHTS.index("basis")][1] = 0
    for name, value in case.check_every_implementation() and gradients(autoencoder, case).items():
        assert value.isfinite().all(), name


def test_a_short_row_in_the_basis(device):
    """Shorter than 1e-12: divided by that, and no gradient through its length."""
    case = make_case(9, SMALL, device, DTYPES["fp64"])
    case.weights[WEIGHTS.index("basis")][1] *= 1e-14
    case.check_every_implementation()


def test_out_of_memory_is_torchs_own_error():
    case = make_case(1, SMALL)
    x = case.x.expand(2**46, 18)
    for weights in (case.weights, [t.requires_grad_() for t in case.weights]):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            autoencoder(x, *weights)


def test_several_threads(device):
    cases = [make_case(30 + 8 * i, device=device) for i in range(4)]
    right = [gradients(autoencoder, case) for case in cases]
    if device == "cuda":
        torch.cuda.synchronize()
    wrong = []

    def work(case, right):
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            for _ in range(20):
                found = gradients(autoencoder, case)
                if device == "cuda":
                    torch.cuda.current_stream().synchronize()
                wrong.extend(name for name in right if not same_bits(found[name], right[name]))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, right, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fork(run_python, device):
    run_python(
        f"""
        import os, signal
        from autoencoder_reference import make_case
        child = os.fork()
        signal.alarm(120)
        make_case(100, device={device!r}).check()
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )
