"""Linear + activation: gradients where they are wanted, double backward and transforms."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fusewise.functional import linear_act
from linear_reference import (
    ACTIVATIONS,
    DTYPES,
    OUTPUTS,
    eager,
    gradient_penalty,
    gradients,
    make_case,
)
from probes import Calls

pytestmark = pytest.mark.usefixtures("few_threads")

forward_op = torch.ops.fusewise._linear_act.default
backward_op = torch.ops.fusewise._linear_act_backward.default


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
        ((op, arguments, results),) = calls.seen
        assert op is forward_op and arguments[7] is False and len(results) == 1
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
    with pytest.raises(RuntimeError, match="^linear_act: a second backward .* need x, "):
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
