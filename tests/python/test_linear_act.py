"""Linear + activation: right numbers on every way, and at home in torch."""

import itertools
import math
import os
import pathlib
import threading
import types

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fusewise
from fusewise.bench.accuracy import Results
from fusewise.functional import linear_act
from fusewise.functional._products import product_math
from linear_reference import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    assert_right,
    eager,
    gradients,
    make_case,
    misaligned,
    same_bits,
)
from test_squeeze_excite import Calls, resident_bytes

forward_op = torch.ops.fusewise._linear_act.default
backward_op = torch.ops.fusewise._linear_act_backward.default
explain_op = torch.ops.fusewise._linear_act_explain.default

MATH = (False, True, True)  # TF32, sums of halves in half, algorithms measured
OUTPUTS = ("y", "dx", "dw", "db")


@pytest.fixture(autouse=True)
def few_threads():
    """Small matrices: where cores are busy, threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    for activation in ACTIVATIONS:
        save = activation == "identity"
        assert forward_op(*case.inputs, activation, *MATH, save, "")[1].shape == (0,)


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


# --- gradients only where they are wanted ------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3)), ids=str)
def test_only_the_wanted_gradients_are_computed(device, activation, wanted):
    case = make_case((2, 3), 6, 5, device, activation=activation)
    full = gradients(case)
    inputs = [t.detach().requires_grad_(need) for t, need in zip(case.inputs, wanted, strict=True)]
    with Calls() as calls:
        y = linear_act(*inputs, activation)
        if any(wanted):
            y.backward(case.dy)
    forward, *backward = calls.seen
    assert forward[0] is forward_op and forward[1][7] == any(wanted)  # save
    assert y.requires_grad == any(wanted)
    for tensor, name, need in zip(inputs, OUTPUTS[1:], wanted, strict=True):
        assert (tensor.grad is not None) == need
        if need:
            torch.testing.assert_close(tensor.grad, full[name])
    if any(wanted):
        ((op, arguments, results),) = backward
        needed = sum(need << i for i, need in enumerate(wanted))
        assert op is backward_op and arguments[8] == needed
        assert len(results) == sum(wanted)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_nothing_is_saved_without_gradients(device, mode):
    for activation in ACTIVATIONS:
        case = make_case((4,), 6, 5, device, activation=activation)
        inputs = [t.requires_grad_() for t in case.inputs]
        expected = linear_act(*inputs, activation).detach()
        with mode(), Calls() as calls:
            y = linear_act(*inputs, activation)
        ((op, arguments, (_, saved)),) = calls.seen
        assert op is forward_op and arguments[7] is False and saved.numel() == 0
        assert not y.requires_grad
        torch.testing.assert_close(y, expected)


def kept_by(case, wanted=(True, True, True)):
    """What save_for_backward is given: the inputs by name, and the bytes of everything else."""
    inputs = [
        None if t is None else t.detach().requires_grad_(need)
        for t, need in zip(case.inputs, wanted, strict=True)
    ]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear_act(*inputs, case.activation)
    known = {t.data_ptr(): n for t, n in zip(inputs, case.names, strict=True) if t is not None}
    own = [t for t in kept if t.data_ptr() not in known]
    assert all(t.data_ptr() != y.data_ptr() for t in own), "y itself is kept"
    y.backward(case.dy)
    return {known[t.data_ptr()] for t in kept if t.data_ptr() in known}, sum(t.nbytes for t in own)


@pytest.mark.parametrize("dtypes", ("fp32", "bf16"))
def test_what_is_kept_for_backward(device, dtypes):
    """x, w, and with relu one bit an element; z where backward cannot do without; nothing else."""
    m, n, size = 24, 40, DTYPES[dtypes][0].itemsize

    def kept(activation, wanted=(True, True, True)):
        return kept_by(make_case((m,), 16, n, device, DTYPES[dtypes], activation), wanted)

    names, own = kept("relu")
    assert {"x", "w"} <= names and own == m * n // 8
    assert kept("identity")[1] == 0
    for activation in ("gelu", "gelu_tanh", "silu"):
        assert kept(activation)[1] == m * n * size
    assert "x" not in kept("relu", (True, False, True))[0]
    assert "x" not in kept("relu", (False, False, True))[0]


def test_a_frozen_weight_costs_no_copy_of_x(device):
    """x is not kept, and nothing of its size takes its place."""
    if device != "cuda":
        pytest.skip("torch counts the bytes of GPUs alone")
    case = make_case((4096,), 2048, 8, device, activation="identity", bias=False)
    x = case.x.detach().requires_grad_()
    y = linear_act(x, case.w, None, "identity")
    dx = torch.autograd.grad(y, x, case.dy, retain_graph=True)[0]
    torch.cuda.synchronize()
    del dx
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(y, x, case.dy)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 1.5 * x.nbytes


def test_double_backward_with_a_frozen_weight_says_what_is_missing(device):
    case = make_case((4,), 6, 5, device)
    x = case.x.detach().requires_grad_()
    y = linear_act(x, case.w, case.b)
    with pytest.raises(RuntimeError, match="^linear_act: a second backward, .*, needs x"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_backward_reads_what_the_hooks_give_back(device):
    """Nothing large travels outside save_for_backward: tensors moved away and back still work."""
    for activation in ACTIVATIONS:
        case = make_case((4,), 6, 5, device, activation=activation)
        inputs = [t.detach().requires_grad_() for t in case.inputs]
        with torch.autograd.graph.save_on_cpu():
            y = linear_act(*inputs, activation)
        y.backward(case.dy)
        expected = gradients(case)
        for tensor, name in zip(inputs, OUTPUTS[1:], strict=True):
            assert torch.equal(tensor.grad, expected[name])


@pytest.mark.parametrize("reentrant", (False, True), ids=("new", "reentrant"))
def test_checkpointing(device, reentrant):
    case = make_case((4,), 6, 5, device, activation="gelu")
    plain = gradients(case)
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    y = checkpoint(linear_act, *inputs, "gelu", use_reentrant=reentrant)
    y.backward(case.dy)
    again = {"y": y, **{n: t.grad for n, t in zip(OUTPUTS[1:], inputs, strict=True)}}
    for name in OUTPUTS:
        assert torch.equal(plain[name], again[name]), name


def test_a_change_in_place_before_backward_is_noticed(device):
    case = make_case((4,), 6, 5, device)
    w = case.w.detach().requires_grad_()
    x = case.x.clone()
    y = linear_act(x, w, case.b)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_y_may_be_changed_in_place(device):
    """relu keeps bits, so unlike torch's its result is free, and it is no view."""
    for leading in ((), (4,), (2, 3)):
        case = make_case(leading, 6, 5, device)
        expected = gradients(case)["dw"]
        w = case.w.detach().requires_grad_()
        y = linear_act(case.x, w, case.b)
        y.mul_(2)
        (found,) = torch.autograd.grad(y, w, case.dy / 2)
        torch.testing.assert_close(found, expected)


# --- double backward, torch.func, forward mode -------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_double_backward_is_right(device, activation):
    case = make_case((3,), 4, 2, device, DTYPES["fp64"], activation)
    inputs = [t.requires_grad_() for t in case.inputs]
    assert torch.autograd.gradgradcheck(
        lambda *t: linear_act(*t, activation), inputs, fast_mode=True
    )


def gradient_penalty(case, fn):
    """What WGAN-GP and R1 do: the gradient by x is part of the loss."""
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    y = case.call(fn, inputs)
    (slope,) = torch.autograd.grad(y.sum(), inputs[0], create_graph=True)
    loss = (slope.flatten(1).norm(dim=1) - 1).square().mean() + y.mean()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_penalty_is_right(device, activation):
    case = make_case((5,), 6, 4, device, DTYPES["fp64"], activation)
    torch.testing.assert_close(gradient_penalty(case, linear_act), gradient_penalty(case, eager))


def test_gradient_penalty_under_compile_is_an_error(device):
    torch._dynamo.reset()
    case = make_case((5,), 6, 4, device)
    compiled = torch.compile(linear_act, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
        gradient_penalty(case, compiled)


def test_one_tensor_as_input_and_weight(device):
    """Each use has its own gradient, and they add up: once, and through a second derivative."""
    case = make_case((6,), 6, 6, device, DTYPES["fp64"])
    results = []
    for fn in (eager, linear_act):
        t = case.x.detach().requires_grad_()
        y = fn(t, t, case.b, "silu")
        (first,) = torch.autograd.grad(y.square().sum(), t, create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), t)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_func_grad_and_vjp(device, activation):
    case = make_case((4,), 5, 3, device, DTYPES["fp64"], activation)

    def loss(fn, *inputs):
        return fn(*inputs, activation).square().sum()

    everything = (1, 2, 3)
    ours = torch.func.grad(loss, everything)(linear_act, *case.inputs)
    torch.testing.assert_close(ours, torch.func.grad(loss, everything)(eager, *case.inputs))
    results = []
    for fn in (linear_act, eager):
        y, pull = torch.func.vjp(lambda *t, fn=fn: fn(*t, activation), *case.inputs)
        results.append((y, pull(case.dy)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_func_jvp_and_forward_mode(device, activation):
    case = make_case((4,), 5, 3, device, DTYPES["fp64"], activation)
    tangents = tuple(torch.randn_like(t) for t in case.inputs)

    def of(fn):
        return torch.func.jvp(lambda *t: fn(*t, activation), case.inputs, tangents)

    torch.testing.assert_close(of(linear_act), of(eager))
    results = []
    for fn in (linear_act, eager):
        with forward_ad.dual_level():
            y = fn(forward_ad.make_dual(case.x, tangents[0]), *case.arguments[1:])
            results.append(forward_ad.unpack_dual(y).tangent)
    torch.testing.assert_close(*results)


def test_func_vmap(device):
    case = make_case((4,), 5, 3, device, DTYPES["fp64"], "gelu")
    x = torch.randn(3, *case.x.shape, dtype=torch.float64, device=device)
    w = torch.randn(3, *case.w.shape, dtype=torch.float64, device=device)

    def run(fn):
        return torch.func.vmap(lambda x, w: fn(x, w, case.b, "gelu"))(x, w)

    torch.testing.assert_close(run(linear_act), run(eager))


def test_per_sample_gradients(device):
    """What differential privacy does: vmap over grad."""
    case = make_case((4,), 5, 3, device, DTYPES["fp64"], "gelu")

    def run(fn):
        def loss(w, row):
            return fn(row, w, case.b, "gelu").square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(case.w, case.x)

    torch.testing.assert_close(run(linear_act), run(eager))


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_func_jacobians(device, transform):
    case = make_case((2,), 5, 3, device, DTYPES["fp64"], "silu")

    def of_b(fn):
        return transform(lambda b: fn(case.x, case.w, b, "silu"))(case.b)

    torch.testing.assert_close(of_b(linear_act), of_b(eager))


def test_batched_gradients(device):
    """Backward itself under vmap, as autograd.functional.jacobian(vectorize=True) runs it."""
    case = make_case((4,), 5, 3, device, DTYPES["fp64"], "gelu_tanh")
    inputs = [t.requires_grad_() for t in case.inputs]
    dy = torch.randn(4, *case.dy.shape, dtype=torch.float64, device=device)
    results = [
        torch.autograd.grad(fn(*inputs, "gelu_tanh"), inputs, dy, is_grads_batched=True)
        for fn in (linear_act, eager)
    ]
    torch.testing.assert_close(*results)


# --- autocast and what torch is set to ---------------------------------------------------------


def autocast_dtypes(device):
    return (torch.bfloat16,) if device == "cpu" else (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autocast_rounds_as_torch_does(device, activation):
    for dtype in autocast_dtypes(device):
        case = make_case((9,), 24, 16, device, DTYPES["fp32"], activation)
        with torch.autocast(device, dtype):
            ours, theirs = gradients(dy_of(case, dtype)), gradients(dy_of(case, dtype), eager)
        right = dy_of(rounded(case, dtype), dtype).reference()
        assert_right(Results(ours, right), Results(theirs, right), computed_in=dtype)
        assert ours["y"].dtype == dtype and ours["dw"].dtype == torch.float32


def dy_of(case, dtype):
    return type(case)(*case.inputs, case.dy.to(dtype), case.activation)


def rounded(case, dtype):
    """The same numbers as the product sees them."""
    return type(case)(*(t.to(dtype) for t in case.inputs), case.dy, case.activation)


def test_autocast_leaves_float64_alone_and_takes_half(device):
    for dtypes in ("fp64", "bf16", "bf16-fp32"):
        case = make_case((9,), 24, 16, device, DTYPES[dtypes], "relu")
        plain = gradients(case)
        with torch.autocast(device, torch.bfloat16):
            cast = gradients(case)
        for name in OUTPUTS:
            assert plain[name].dtype == cast[name].dtype and torch.equal(plain[name], cast[name])


def test_autocast_under_a_transform_too(device):
    case = make_case((9,), 24, 16, device, DTYPES["fp32"], "relu")
    with torch.autocast(device, torch.bfloat16):
        y = torch.func.vmap(lambda x: linear_act(x, *case.arguments[1:]))(case.x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, linear_act(*case.arguments), atol=0.02, rtol=0.02)


def test_backward_outside_autocast_is_the_same(device):
    """As in every training loop: forward inside the block, backward behind it."""
    case = make_case((9,), 24, 16, device, DTYPES["fp32"], "gelu")
    found = []
    for inside in (True, False):
        inputs = [t.detach().requires_grad_() for t in case.inputs]
        with torch.autocast(device, torch.bfloat16):
            y = linear_act(*inputs, "gelu")
            if inside:
                y.backward(case.dy.bfloat16())
        if not inside:
            y.backward(case.dy.bfloat16())
        found.append([t.grad for t in inputs])
    assert all(map(torch.equal, *found))


def cuda_tensor(dtype):
    """All that product_math looks at, for machines without a GPU."""
    return types.SimpleNamespace(is_cuda=True, dtype=dtype)


def test_tf32_follows_both_of_torchs_switches(run_python):
    """In a process of its own: torch refuses to read the older switch once the newer was set."""
    run_python(
        """
        import torch
        from test_linear_act import cuda_tensor
        from fusewise.functional._products import product_math

        def tf32(dtype=torch.float32):
            return product_math(cuda_tensor(dtype))[0]

        matmul = torch.backends.cuda.matmul
        assert tf32() is False  # torch's default
        for value in (True, False):
            matmul.allow_tf32 = value
            assert tf32() is value and tf32(torch.float64) is tf32(torch.float16) is False
        for value in ("high", "medium", "highest"):
            torch.set_float32_matmul_precision(value)
            assert tf32() is (value != "highest")
        for value in ("tf32", "ieee", "tf32"):
            matmul.fp32_precision = value
            assert tf32() is (value == "tf32") and tf32(torch.bfloat16) is False
        """
    )


@pytest.mark.parametrize("name", ("fp16", "bf16"))
def test_sums_of_halves_follow_torchs_switch(name):
    dtype = DTYPES[name][0]
    other = torch.bfloat16 if name == "fp16" else torch.float16
    matmul = torch.backends.cuda.matmul
    switch = f"allow_{name}_reduced_precision_reduction"
    before = getattr(matmul, switch)
    try:
        for value in (False, True):
            setattr(matmul, switch, value)
            assert product_math(cuda_tensor(dtype))[1] is value
            assert product_math(cuda_tensor(other))[1] is True
            assert product_math(cuda_tensor(torch.float32))[1] is True
    finally:
        setattr(matmul, switch, before)


def test_deterministic_algorithms_measure_nothing(device):
    case = make_case((9,), 24, 16, device, activation="gelu")
    assert product_math(cuda_tensor(torch.float32))[2] is True
    torch.use_deterministic_algorithms(True)
    choices = pathlib.Path(os.environ["XDG_CACHE_HOME"], "fusewise", "products")
    before = choices.read_text() if choices.exists() else None
    try:
        assert product_math(cuda_tensor(torch.float32))[2] is False
        case.check_every_implementation()
    finally:
        torch.use_deterministic_algorithms(False)
    assert (choices.read_text() if choices.exists() else None) == before


def test_settings_of_gpus_do_not_matter_on_the_cpu():
    assert product_math(torch.ones(1)) == MATH


# --- torch.compile and torch.export ------------------------------------------------------------


@pytest.mark.parametrize("activation", ("relu", "gelu"))
def test_compile_fullgraph_with_dynamic_batch(device, activation):
    torch._dynamo.reset()
    module = fusewise.nn.LinearAct(12, 9, activation=activation, device=device)
    compiled = torch.compile(module, fullgraph=True)

    def step(fn, batch):
        torch.manual_seed(batch)
        x = torch.randn(batch, 3, 12, device=device).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        y = fn(x)
        return [y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]

    step(compiled, 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in (3, 5, 8):
            ours, plain = step(compiled, batch), step(module, batch)
            assert ours[0].stride() == plain[0].stride()
            torch.testing.assert_close(ours, plain)


def test_compile_without_gradient(device):
    torch._dynamo.reset()
    case = make_case((3,), 6, 5, device)
    compiled = torch.compile(linear_act, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*case.arguments), linear_act(*case.arguments))


def test_compile_under_autocast(device):
    torch._dynamo.reset()
    case = make_case((3,), 6, 5, device, activation="silu")
    compiled = torch.compile(linear_act, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16):
        case.dy = case.dy.bfloat16()
        ours, plain = gradients(case, compiled), gradients(case)
    for name in OUTPUTS:
        torch.testing.assert_close(ours[name], plain[name])


def test_compile_refuses_bad_shapes_while_tracing(device):
    torch._dynamo.reset()
    case = make_case((3,), 6, 5, device)
    compiled = torch.compile(linear_act, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"w: expected \[N, 6\], got \[5, 4\]"):
        compiled(case.x, case.w[:, :4], None)


def test_compiled_functions_follow_the_settings(device):
    """A forced name is a constant of the graph, and a change of it compiles anew."""
    torch._dynamo.reset()
    case = make_case((3,), 6, 5, device)
    name = case.implementations()[-1]["linear_act_backward"]
    forced = []

    def backend(graph, _):
        nodes = [n for n in graph.graph.nodes if "linear_act" in str(n.target)]
        forced.extend(node.args[-1] for node in nodes)
        return graph

    compiled = torch.compile(linear_act, fullgraph=True, backend=backend)
    forward = case.implementations()[0]["linear_act"]
    compiled(*case.arguments)
    with fusewise.implementation(linear_act=forward, linear_act_backward=name):
        compiled(*case.arguments)
    assert forced == ["", forward]


def test_func_transform_inside_compile(device):
    torch._dynamo.reset()
    case = make_case((3,), 6, 5, device, DTYPES["fp64"], "silu")

    def slope(fn):
        return lambda x, w, b: torch.func.grad(lambda x: fn(x, w, b, "silu").square().sum())(x)

    compiled = torch.compile(slope(linear_act), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*case.inputs), slope(eager)(*case.inputs))


def test_export_with_dynamic_batch(device):
    module = fusewise.nn.LinearAct(12, 9, device=device).eval()
    x = torch.randn(4, 12, device=device)
    batch = torch.export.Dim("batch", min=1, max=1024)
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
        for n in (1, 4, 9):
            x = torch.randn(n, 12, device=device)
            assert torch.equal(program.module()(x), module(x))


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
