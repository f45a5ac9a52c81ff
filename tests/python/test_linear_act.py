"""Linear + activation: right numbers on every way, its operators, and forcing them."""

import itertools
import math
import threading

import pytest
import torch

import fusewise
from fusewise.bench.accuracy import Results
from fusewise.functional import linear_act
from linear_reference import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    MATH,
    OUTPUTS,
    assert_right,
    eager,
    gradients,
    make_case,
    misaligned,
    same_bits,
)
from probes import Calls, resident_bytes

pytestmark = pytest.mark.usefixtures("few_threads")

forward_op = torch.ops.fusewise._linear_act.default
backward_op = torch.ops.fusewise._linear_act_backward.default
explain_op = torch.ops.fusewise._linear_act_explain.default


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_accuracy_by_dtype_and_activation(device, dtypes, activation, bias):
    case = make_case((19,), 40, 24, device, DTYPES[dtypes], activation, bias)
    case.check_every_implementation()


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accuracy_by_layout_of_x(device, dtypes, layout):
    for leading in ((9,), (3, 5)):
        case = make_case(leading, 24, 16, device, DTYPES[dtypes], "gelu", layout=layout)
        case.check_every_implementation()


@pytest.mark.parametrize("dtypes", ("fp32", "fp64", "bf16"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accuracy_by_layout_of_w(device, dtypes, layout):
    case = make_case((9,), 24, 16, device, DTYPES[dtypes], "silu", w_layout=layout)
    case.b = torch.stack([case.b, case.b], 1)[:, 0]
    case.check_every_implementation()


@pytest.mark.parametrize("activation", ("identity", "relu", "gelu_tanh"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accuracy_by_layout_of_the_gradient(device, activation, layout):
    for leading, dtypes in itertools.product(((9,), (2, 3)), ("fp32", "fp16")):
        case = make_case(leading, 24, 17, device, DTYPES[dtypes], activation, dy_layout=layout)
        case.check_every_implementation()


def test_bias_gradients_of_rows_that_are_all_alike(device):
    """As of the gradient of a sum: every addition to a sum of equal terms rounds to the same side,
    and in a single long sum these errors add up."""
    for rows in (100, 197, 1000, 3000, 10000, 20000):
        case = make_case((rows,), 5, 8, device, activation="identity", dy_layout="flat")
        case.check_every_implementation()


@pytest.mark.parametrize("dtypes", ("fp32", "fp64"))
def test_slopes_of_gelu_tanh_far_from_zero(device, dtypes):
    """There tanh is almost 1, and what is left of 1 - tanh^2 counts."""
    for z in torch.linspace(-8, 8, 161).tolist():
        case = make_case((4,), 1, 1, device, DTYPES[dtypes], "gelu_tanh", bias=False)
        case.x, case.w = torch.full_like(case.x, z), torch.ones_like(case.w)
        case.check()


@pytest.mark.parametrize("dtypes", ("fp32", "fp16"))
@pytest.mark.parametrize("sizes", list(itertools.product((1, 3, 65, 129), repeat=2)), ids=str)
def test_odd_sizes(device, dtypes, sizes):
    for m in (1, 3, 65, 129):
        for activation in ("relu", "gelu"):
            case = make_case((m,), *sizes, device, DTYPES[dtypes], activation)
            if m == 65:
                case.check_every_implementation()
            else:
                case.check()


@pytest.mark.parametrize(
    "leading", [(), (1,), (4,), (2, 3), (1, 5), (5, 1), (2, 1, 3), (1, 2, 1, 2, 2, 1)], ids=str
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_leading_shape(device, leading, activation):
    case = make_case(leading, 12, 7, device, activation=activation)
    case.check_every_implementation()
    assert linear_act(*case.arguments).shape == (*leading, 7)


def test_leading_dimensions_in_any_order(device):
    """Leading strides that cannot be walked as one: a copy, as in torch, and the right answer."""
    for dtypes in ("fp32", "bf16"):
        case = make_case((2, 3, 4), 12, 7, device, DTYPES[dtypes], "relu")
        case.x = case.x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
        case.dy = case.dy.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        case.check_every_implementation()
        case.x = case.x[:, :1].expand(2, 3, 4, 12)
        case._expected = None
        case.check_every_implementation()


def test_windows_that_overlap(device):
    line = torch.randn(40, device=device)
    case = make_case((6,), 12, 7, device)
    case.x = line.as_strided((6, 12), (3, 1))
    case.check_every_implementation()
    case.x, case._expected = line.as_strided((6, 12), (1, 3)), None
    case.check_every_implementation()


@pytest.mark.parametrize("offset", range(1, 9))
def test_misaligned_base_pointers(device, offset):
    """x, w, b and dy start anywhere between two vectors, and so do the rows of odd lengths."""
    for k, n in ((16, 24), (17, 9)):
        case = make_case((6,), k, n, device, DTYPES["fp16"], "gelu")
        case.x, case.w, case.b = (misaligned(t, offset) for t in case.inputs)
        case.dy = misaligned(case.dy, offset)
        case.check_every_implementation()


def test_the_gradient_of_a_sum_is_expanded(device):
    for activation in ACTIVATIONS:
        case = make_case((2, 5), 12, 7, device, activation=activation)
        inputs = [t.detach().requires_grad_() for t in case.inputs]
        linear_act(*inputs, activation).sum().backward()
        case.dy = torch.ones_like(case.dy)
        eager = case.expected()
        found = {f"d{n}": t.grad for n, t in zip(case.names, inputs, strict=True)}
        assert_right(Results(found, eager.expected), eager)


def test_large_enough_for_every_path(device):
    """Several blocks of rows and panels of columns, with rests everywhere, on several threads."""
    torch.set_num_threads(2)
    for dtypes, activation in (("fp32", "gelu"), ("fp32", "relu"), ("bf16", "silu")):
        make_case((333,), 150, 517, device, DTYPES[dtypes], activation).check_every_implementation()


@pytest.mark.parametrize("dtypes", DTYPES)
def test_exact_zeros_before_relu(device, dtypes):
    """Where z is 0 (of either sign) no gradient comes through, as in torch."""
    case = make_case((8,), 4, 24, device, DTYPES[dtypes])
    case.x = case.x.clone().fill_(1)
    case.w = case.w.clone().zero_()
    case.b = (torch.arange(24, device=device) % 3 - 1).to(case.b.dtype)
    case.b[3] = -0.0
    found = case.check_every_implementation() and gradients(case)
    alive = case.b > 0
    assert torch.equal(found["y"] > 0, alive.expand_as(found["y"]))
    assert (found["db"] != 0)[alive].all() and not found["db"][~alive].any()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the switch for oneDNN
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf), ids=str)
@pytest.mark.parametrize("name", ("x", "w", "b", "dy"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf_propagate_as_in_torch(device, value, name, activation):
    for dtypes in ("fp32", "fp64", "bf16", "fp16"):
        case = make_case((5,), 12, 19, device, DTYPES[dtypes], activation)
        tensor = getattr(case, name)
        tensor[(1,) * tensor.dim()] = value
        with torch.backends.mkldnn.flags(enabled=False):  # its gelu makes NaN of inf, torch's not
            case.expected()
        case.check_every_implementation()


def test_values_at_the_ends_of_the_range(device):
    """Where exp and tanh run into their limits, nothing turns into NaN that is none in torch."""
    ends = torch.tensor([0.0, 1e-30, 1e-6, 1, 5, 10, 20, 60, 88, 89, 100, 1e4, 1e10, 1e30])
    z = torch.cat([ends, -ends]).to(device)
    for activation in ACTIVATIONS:
        case = make_case((len(z),), 1, 1, device, activation=activation, bias=False)
        case.x, case.w = z[:, None].clone(), torch.ones(1, 1, device=device)
        case.check_every_implementation()


@pytest.mark.parametrize(
    "leading, k, n",
    [((0,), 5, 4), ((2, 0, 3), 5, 4), ((3,), 0, 4), ((3,), 5, 0), ((0,), 0, 4), ((), 0, 3)],
    ids=str,
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nothing_to_do_as_in_torch(device, leading, k, n, activation):
    for dtypes, bias in itertools.product(("fp32", "fp16"), (True, False)):
        case = make_case(leading, k, n, device, DTYPES[dtypes], activation, bias)
        case.check_every_implementation()
        found = gradients(case)
        assert found["y"].shape == (*leading, n)
        if 0 in leading:
            assert all(not found[name].any() for name in found)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(device, activation):
    for layout, bias in itertools.product(("contiguous", "transposed", "stepped"), (True, False)):
        case = make_case((4,), 5, 3, device, DTYPES["fp64"], activation, bias, layout)
        inputs = [t.requires_grad_() for t in case.inputs if t is not None]
        for choice in case.implementations():
            with fusewise.implementation(**choice):
                assert torch.autograd.gradcheck(
                    lambda x, w, b=None: linear_act(x, w, b, activation), inputs, fast_mode=True
                )


def test_cpu_results_do_not_depend_on_the_number_of_threads():
    """Of what is ours: bits, activations and the sums of the bias; the products are torch's."""
    found = {}
    z, dy = torch.randn(700, 300), torch.randn(700, 300)
    w = torch.eye(300)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y, kept = forward_op(z, w, None, "relu", *MATH, True, "")
        (db,) = backward_op(dy, z, w, kept, "relu", *MATH, 0b100, "")
        found[threads] = y, kept, db
    for one, two, three in zip(*found.values(), strict=True):
        assert same_bits(one, two) and same_bits(one, three)


def test_another_process_gets_the_same_bits(device, run_python, tmp_path):
    program = f"""
        import hashlib, torch
        from linear_reference import gradients, make_case
        torch.manual_seed(0)
        case = make_case((70,), 130, 65, "{device}", activation="gelu")
        found = [t.cpu().numpy().tobytes() for t in gradients(case).values()]
        print(hashlib.sha256(b"".join(found)).hexdigest())
    """
    cache = str(tmp_path)
    assert len({run_python(program, XDG_CACHE_HOME=cache) for _ in range(2)}) == 1


def test_several_threads(device):
    """On a GPU each has a stream of its own."""
    cases = [make_case((64,), 96, 40 + 8 * i, device, activation="silu") for i in range(4)]
    expected = [gradients(case) for case in cases]
    if device == "cuda":
        torch.cuda.synchronize()
    wrong = []

    def work(case, right):
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            for _ in range(20):
                found = gradients(case)
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
    """A process that imported fusewise forks; child and parent both compute."""
    run_python(
        f"""
        import os, signal
        from linear_reference import make_case
        child = os.fork()
        signal.alarm(120)
        make_case((100,), 65, 129, {device!r}, activation="gelu").check()
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


# --- the operators themselves ------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leading", ((6,), (2, 3)), ids=str)
def test_strides_of_results(device, layout, leading):
    """y is contiguous, dx as torch.empty_like(x), dw as torch.empty_like(w); traced and run."""
    case = make_case(leading, 8, 5, device, layout=layout, w_layout=layout)

    def both():
        y, kept = forward_op(*case.arguments, *MATH, True, "")
        return y, kept, *backward_op(case.dy, case.x, case.w, kept, "relu", *MATH, 0b111, "")

    real = both()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = both()
    for ours, traced in zip(real, fake, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (
            traced.shape,
            traced.stride(),
            traced.dtype,
        )
    y, kept, dx, dw, db = real
    assert y.shape == (*leading, 5) and y.is_contiguous()
    assert kept.shape == (6, 1) and kept.dtype == torch.uint8
    assert dx.stride() == torch.empty_like(case.x).stride()
    assert dw.stride() == torch.empty_like(case.w).stride()
    assert db.shape == (5,)


def test_what_forward_keeps(device):
    """relu: bit j % 8 of byte j / 8 is set where z was above zero or NaN. The others: z."""
    case = make_case((3, 5), 12, 19, device)
    case.x[0, 1, 2] = math.nan
    z = eager(case.x, case.w, case.b, "identity")
    y, kept = forward_op(*case.inputs, "relu", *MATH, True, "")
    bits = (kept[:, :, None] >> torch.arange(8, device=device)) & 1
    assert torch.equal(bits.reshape(15, 24)[:, :19].bool(), ~(z <= 0).reshape(15, 19))
    for activation in ("gelu", "gelu_tanh", "silu"):
        y, kept = forward_op(*case.inputs, activation, *MATH, True, "")
        torch.testing.assert_close(kept, z.flatten(0, -2), equal_nan=True)
        assert kept.data_ptr() != y.data_ptr()
        assert len(forward_op(*case.inputs, activation, *MATH, False, "")) == 1
    assert forward_op(*case.inputs, "identity", *MATH, True, "")[1].shape == (0,)


@pytest.mark.parametrize("dtypes", ("fp32", "fp64", "bf16"))
@pytest.mark.parametrize("activation", ("identity", "relu", "gelu"))
def test_opcheck_forward(device, dtypes, activation):
    for bias, save in itertools.product((True, False), repeat=2):
        case = make_case((2, 3), 6, 5, device, DTYPES[dtypes], activation, bias)
        torch.library.opcheck(forward_op, (*case.arguments, *MATH, save, ""))


@pytest.mark.parametrize("needed", [0b111, 0b001, 0b100])
def test_opcheck_backward(device, needed):
    for activation, layout in (("relu", "transposed"), ("silu", "contiguous")):
        case = make_case((2, 3), 6, 5, device, activation=activation, layout=layout)
        kept = forward_op(*case.arguments, *MATH, True, "")[1]
        arguments = (case.dy, case.x, case.w, kept, activation, *MATH, needed, "")
        torch.library.opcheck(backward_op, arguments)


def test_opcheck_explain(device):
    case = make_case((2, 3), 6, 5, device)
    for backward in (False, True):
        arguments = (*case.arguments, *MATH, True, backward, "")
        torch.library.opcheck(explain_op, arguments, test_utils="test_schema")


def test_meta_tensors_get_shapes_and_strides():
    case = make_case((2, 3), 6, 5, "meta", DTYPES["fp16-fp32"], layout="transposed")
    inputs = [t.requires_grad_() for t in case.inputs]
    y = linear_act(*inputs)
    y.sum().backward()
    assert y.device.type == "meta" and y.dtype == torch.float16 and y.shape == (2, 3, 5)
    assert inputs[0].grad.stride() == torch.empty_like(case.x).stride()
    assert [t.grad.dtype for t in inputs] == [torch.float16, torch.float32, torch.float32]


# --- forcing and asking ------------------------------------------------------------------------


def test_a_forced_implementation_is_used(device):
    case = make_case((8,), 16, 12, device)

    def chosen(direction):
        with torch.enable_grad():
            x = case.x.detach().requires_grad_()
            records = fusewise.explain(linear_act, x, *case.arguments[1:])
        return {f"linear_act{'_backward' * (r.direction == 'backward')}": r for r in records}[
            direction
        ].chosen

    for choice in case.implementations():
        ((operator, name),) = choice.items()
        with fusewise.implementation(**choice):
            assert chosen(operator) == name
            with Calls() as calls:
                gradients(case)
        told = dict(zip(("linear_act", "linear_act_backward"), calls.seen, strict=True))
        assert told[operator][1][-1] == name
    for operator in ("linear_act", "linear_act_backward"):
        with (
            fusewise.implementation(**{operator: "magic"}),
            pytest.raises(RuntimeError, match="none named 'magic'"),
        ):
            gradients(case)


def test_nothing_can_be_forced_under_a_transform(device):
    case = make_case((8,), 16, 12, device)
    call = torch.func.vmap(lambda x: linear_act(x, *case.arguments[1:]))
    name = case.implementations()[0]["linear_act"]
    with (
        fusewise.implementation(linear_act=name),
        pytest.raises(RuntimeError, match=f"implementation: '{name}' was forced"),
    ):
        call(case.x)


def test_host_memory_is_flat_over_many_calls():
    """A few lost bytes a call are megabytes here, and gigabytes in a long training."""
    case = make_case((2,), 8, 4)
    learned = [tensor.detach().requires_grad_() for tensor in case.inputs]

    def work(calls):
        for _ in range(calls):
            linear_act(*case.inputs)
        for _ in range(calls // 10):
            torch.autograd.grad(linear_act(*learned).sum(), learned)

    work(2000)
    before = resident_bytes()
    work(20_000)
    assert resident_bytes() - before < 2**20
