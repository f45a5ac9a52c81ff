"""Stacks of linear + activation: right numbers on every way, and at home in torch."""

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusewise
from fusewise.functional import linear_act, mlp
from linear_reference import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    MATH,
    check_together,
    eager_mlp,
    gradient_penalty,
    gradients,
    make_mlp_case,
    same_bits,
)
from probes import Calls

pytestmark = pytest.mark.usefixtures("few_threads")

forward_op = torch.ops.fusewise._mlp.default
backward_op = torch.ops.fusewise._mlp_backward.default

SIZES = (12, 20, 9, 5)

# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_accuracy_by_dtype_and_activation(device, dtypes, activation, bias):
    for final in ("identity", activation):
        case = make_mlp_case((17,), SIZES, device, DTYPES[dtypes], activation, final, bias)
        case.check_every_implementation()


@pytest.mark.parametrize("pair", list(itertools.permutations(ACTIVATIONS, 2)), ids=str)
def test_any_two_activations(device, pair):
    make_mlp_case((7,), SIZES, device, DTYPES["fp32"], *pair).check_every_implementation()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(device, layout):
    for activation in ("relu", "gelu_tanh"):
        for name in ("layout", "dy_layout"):
            case = make_mlp_case((2, 5), SIZES, device, activation=activation, **{name: layout})
            case.check_every_implementation()
        case = make_mlp_case((7,), SIZES, device, activation=activation)
        case.w = [LAYOUTS[layout](w) for w in case.w]
        case.check_every_implementation()


@pytest.mark.parametrize("sizes", [(5, 3), (1, 1, 1), (65, 129, 3, 1, 65), (16,) * 9], ids=str)
@pytest.mark.parametrize("leading", [(), (1,), (3,), (65,), (2, 3), (1, 2, 1, 2, 2, 1)], ids=str)
def test_any_depth_and_leading_shape(device, sizes, leading):
    for activation in ("relu", "silu"):
        # Of few rows the largest error is luck, ours and torch's: several draws together.
        check_together(
            *(make_mlp_case(leading, sizes, device, activation=activation) for _ in range(4))
        )


@pytest.mark.parametrize(
    "leading, sizes",
    [((0,), SIZES), ((3,), (0, 4, 2)), ((3,), (4, 0, 2)), ((3,), (4, 5, 0)), ((2, 0), (4, 5, 3))],
    ids=str,
)
def test_nothing_to_do_as_in_torch(device, leading, sizes):
    for activation in ACTIVATIONS:
        case = make_mlp_case(leading, sizes, device, activation=activation)
        case.check_every_implementation()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the switch for oneDNN
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf_propagate_as_in_torch(device, value, activation):
    for name, dtypes in itertools.product(("x", "w", "b", "dy"), ("fp32", "bf16")):
        case = make_mlp_case((5,), SIZES, device, DTYPES[dtypes], activation, "relu")
        tensor = getattr(case, name)
        tensor = tensor[1] if isinstance(tensor, list) else tensor
        tensor[(1,) * tensor.dim()] = value
        with torch.backends.mkldnn.flags(enabled=False):  # its gelu makes NaN of inf, torch's not
            case.expected()
        case.check_every_implementation()


def test_exact_zeros_in_hidden_layers(device):
    """Hidden relus are told by their outputs: 0 lets no gradient through."""
    case = make_mlp_case((6,), (4, 24, 3), device)
    case.w[0] = torch.zeros_like(case.w[0])
    case.b[0] = (torch.arange(24, device=device) % 3 - 1).float()
    case.check_every_implementation()
    found = gradients(case)["db0"]
    assert not found[case.b[0] <= 0].any() and found[case.b[0] > 0].all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(device, activation):
    case = make_mlp_case((3,), (4, 5, 2), device, DTYPES["fp64"], activation, "silu")
    inputs = [t.requires_grad_() for t in case.inputs]
    for choice in case.implementations():
        with fusewise.implementation(**choice):
            assert torch.autograd.gradcheck(lambda *t: case.call(mlp, t), inputs, fast_mode=True)


def test_the_same_as_its_layers(device):
    """To the last bit where both take the same products."""
    for activation in ACTIVATIONS:
        case = make_mlp_case((33,), SIZES, device, DTYPES["fp64"], activation, "relu")
        with torch.no_grad():
            y = case.x
            for i, (w, b) in enumerate(zip(case.w, case.b, strict=True)):
                y = linear_act(y, w, b, "relu" if i + 1 == len(case.w) else activation)
            assert torch.equal(mlp(*case.arguments), y)


# --- the operators themselves ------------------------------------------------------------------


def operator_arguments(case, save=True):
    kinds = (case.activation, case.final_activation)
    return case.x, case.w, case.b or [], *kinds, save, *MATH, ""


@pytest.mark.parametrize("activation", ("relu", "gelu"))
def test_opcheck(device, activation):
    for bias in (True, False):
        case = make_mlp_case((4,), (6, 5, 3), device, activation=activation, bias=bias)
        torch.library.opcheck(forward_op, operator_arguments(case, False))
        torch.library.opcheck(forward_op, operator_arguments(case))
        saved = forward_op(*operator_arguments(case))[1]
        kinds = (activation, "identity")
        for dx, needs in ((True, [1, 1, 1, 1]), (False, [0, 1, 0, 0]), (True, [0, 0, 0, 0])):
            arguments = (case.dy, case.x, case.w, saved, *kinds, dx, needs, *MATH, "")
            torch.library.opcheck(backward_op, arguments)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("final", ("identity", "relu", "silu"))
def test_traced_results_look_like_real_ones(device, activation, final):
    case = make_mlp_case((2, 3), SIZES, device, DTYPES["fp16"], activation, final, layout="stepped")
    kinds = (activation, final)

    def both():
        y, saved = forward_op(*operator_arguments(case))
        needs = [1] * 6
        found = backward_op(case.dy, case.x, case.w, saved, *kinds, True, needs, *MATH, "")
        return [y, *saved, *found]

    real = both()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = both()
    assert len(real) == len(fake)
    for ours, traced in zip(real, fake, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (
            traced.shape,
            traced.stride(),
            traced.dtype,
        )
    assert real[0].is_contiguous() and real[0].shape == (2, 3, 5)


def test_meta_tensors_get_shapes_and_dtypes():
    case = make_mlp_case((2, 3), SIZES, "meta", DTYPES["fp16-fp32"])
    inputs = [t.requires_grad_() for t in case.inputs]
    y = case.call(mlp, inputs)
    y.sum().backward()
    assert y.is_meta and y.dtype == torch.float16 and y.shape == (2, 3, 5)
    assert inputs[1].grad.dtype == torch.float32


# --- gradients only where they are wanted ------------------------------------------------------


@pytest.mark.parametrize("activation", ("relu", "gelu"))
@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=5)), ids=str)
def test_only_the_wanted_gradients_are_computed(device, activation, wanted):
    """x, two weights, two biases."""
    case = make_mlp_case((4,), (6, 5, 3), device, activation=activation)
    full = gradients(case)
    inputs = [t.detach().requires_grad_(need) for t, need in zip(case.inputs, wanted, strict=True)]
    with Calls() as calls:
        y = case.call(mlp, inputs)
        if any(wanted):
            y.backward(case.dy)
    forward, *backward = calls.seen
    assert forward[0] is forward_op and forward[1][5] == any(wanted)  # save
    assert y.requires_grad == any(wanted)
    for tensor, name, need in zip(inputs, case.names, wanted, strict=True):
        assert (tensor.grad is not None) == need
        if need:
            torch.testing.assert_close(tensor.grad, full[f"d{name}"])
    if any(wanted):
        ((op, _, results),) = backward
        assert op is backward_op
        assert [result.numel() > 0 for result in results] == list(wanted)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_nothing_is_saved_without_gradients(device, mode):
    case = make_mlp_case((4,), SIZES, device, activation="gelu")
    inputs = [t.requires_grad_() for t in case.inputs]
    with mode(), Calls() as calls:
        y = case.call(mlp, inputs)
    ((op, arguments, (_, saved)),) = calls.seen
    assert op is forward_op and arguments[5] is False and not saved and not y.requires_grad


class Kept(list):
    """What save_for_backward is given."""

    def add(self, t):
        self.append(t)
        return t


def test_what_is_kept_for_backward(device):
    """With relu: the hidden outputs, and a bit an element of the last layer."""
    m, sizes = 16, (8, 24, 40, 32)
    for final, bits in (("identity", 0), ("relu", m * 32 // 8)):
        case = make_mlp_case((m,), sizes, device, DTYPES["bf16"], "relu", final)
        inputs = [t.detach().requires_grad_() for t in case.inputs]
        kept = Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept.add, lambda t: t):
            y = case.call(mlp, inputs)
        known = {t.data_ptr() for t in inputs}
        own = sum(t.nbytes for t in kept if t.data_ptr() not in known)
        assert own == 2 * m * (24 + 40) + bits
        y.backward(case.dy)


def test_batched_gradients(device):
    """Backward for many gradients at once, as autograd.functional.jacobian(vectorize=True) asks."""
    case = make_mlp_case((3,), (4, 5, 2), device, DTYPES["fp64"], "gelu")

    def jacobian(fn):
        return torch.autograd.functional.jacobian(
            lambda *inputs: case.call(fn, inputs), case.inputs, vectorize=True
        )

    torch.testing.assert_close(jacobian(mlp), jacobian(eager_mlp))


def test_dy_is_not_written_to(device):
    """Gradients between the layers are overwritten; the one from outside never is."""
    for activation, layers in itertools.product(ACTIVATIONS, (1, 2, 3)):
        case = make_mlp_case((8,), SIZES[: layers + 1], device, activation=activation)
        case.final_activation = activation
        before = [t.clone() for t in (*case.inputs, case.dy)]
        gradients(case)
        assert all(map(same_bits, before, (*case.inputs, case.dy)))


def test_backward_twice(device):
    """What is kept survives a backward."""
    for activation in ACTIVATIONS:
        case = make_mlp_case((8,), SIZES, device, activation=activation)
        inputs = [t.detach().requires_grad_() for t in case.inputs]
        y = case.call(mlp, inputs)
        first = torch.autograd.grad(y, inputs, case.dy, retain_graph=True)
        again = torch.autograd.grad(y, inputs, case.dy)
        assert all(map(same_bits, first, again))


def test_backward_reads_what_the_hooks_give_back(device):
    for activation in ("relu", "silu"):
        case = make_mlp_case((4,), SIZES, device, activation=activation)
        inputs = [t.detach().requires_grad_() for t in case.inputs]
        with torch.autograd.graph.save_on_cpu():
            y = case.call(mlp, inputs)
        y.backward(case.dy)
        expected = gradients(case)
        for tensor, name in zip(inputs, case.names, strict=True):
            assert torch.equal(tensor.grad, expected[f"d{name}"])


@pytest.mark.parametrize("reentrant", (False, True), ids=("new", "reentrant"))
def test_checkpointing(device, reentrant):
    case = make_mlp_case((4,), SIZES, device, activation="gelu")
    plain = gradients(case)
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    y = checkpoint(lambda *t: case.call(mlp, t), *inputs, use_reentrant=reentrant)
    y.backward(case.dy)
    for name, tensor in zip(case.names, inputs, strict=True):
        assert torch.equal(plain[f"d{name}"], tensor.grad), name


def test_one_weight_in_two_layers(device):
    """Each use has its own gradient, and they add up: once, and through a second derivative."""
    case = make_mlp_case((4,), (6, 6, 6), device, DTYPES["fp64"])
    results = []
    for fn in (eager_mlp, mlp):
        x, w = case.x.detach().requires_grad_(), case.w[0].detach().requires_grad_()
        y = fn(x, [w, w], None, "silu", "gelu")
        first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        results.append([*first, *torch.autograd.grad(penalty, (x, w))])
    torch.testing.assert_close(*results)


# --- double backward, torch.func ---------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_double_backward_is_right(device, activation):
    case = make_mlp_case((2,), (3, 4, 2), device, DTYPES["fp64"], activation)
    inputs = [t.requires_grad_() for t in case.inputs]
    assert torch.autograd.gradgradcheck(lambda *t: case.call(mlp, t), inputs, fast_mode=True)
    torch.testing.assert_close(gradient_penalty(case, mlp), gradient_penalty(case, eager_mlp))


def test_gradient_penalty_with_frozen_weights(device):
    """Unlike a single layer a stack keeps its x: frozen weights are no hindrance."""
    case = make_mlp_case((4,), SIZES, device, DTYPES["fp64"], "silu")
    found = []
    for fn in (mlp, eager_mlp):
        x = case.x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(fn(x, *case.arguments[1:]).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_func_transforms(device):
    case = make_mlp_case((4,), (6, 5, 3), device, DTYPES["fp64"], "gelu")

    def loss(fn):
        return lambda *t: case.call(fn, t).square().sum()

    def per_sample(fn):
        def one(w, row):
            return fn(row, [w, case.w[1]], case.b, "gelu").square().sum()

        return torch.func.vmap(torch.func.grad(one), (None, 0))(case.w[0], case.x)

    tangents = tuple(torch.randn_like(t) for t in case.inputs)
    found = [
        (
            torch.func.grad(loss(fn), tuple(range(5)))(*case.inputs),
            torch.func.jvp(loss(fn), case.inputs, tangents),
            per_sample(fn),
        )
        for fn in (mlp, eager_mlp)
    ]
    torch.testing.assert_close(*found)


# --- autocast, compile, export -----------------------------------------------------------------


def test_autocast_rounds_as_torch_does(device):
    dtype = torch.bfloat16 if device == "cpu" else torch.float16
    for activation in ACTIVATIONS:
        case = make_mlp_case((9,), SIZES, device, activation=activation)
        case.dy = case.dy.to(dtype)
        with torch.autocast(device, dtype):
            ours, theirs = gradients(case), gradients(case, eager_mlp)
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            scale = theirs[name].abs().max().item()
            torch.testing.assert_close(ours[name], theirs[name], atol=0.03 * scale, rtol=0.03)
        assert ours["y"].dtype == dtype and ours["dw0"].dtype == torch.float32


@pytest.mark.parametrize("activation", ("relu", "gelu"))
def test_compile_fullgraph_with_dynamic_batch(device, activation):
    torch._dynamo.reset()
    module = fusewise.nn.MLP([12, 9, 7], activation=activation, device=device)
    compiled = torch.compile(module, fullgraph=True)

    def step(fn, batch):
        torch.manual_seed(batch)
        x = torch.randn(batch, 12, device=device).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        y = fn(x)
        return [y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]

    step(compiled, 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in (3, 5, 8):
            ours, plain = step(compiled, batch), step(module, batch)
            assert ours[0].stride() == plain[0].stride()
            torch.testing.assert_close(ours, plain)


def test_export_with_dynamic_batch(device):
    module = fusewise.nn.MLP([12, 9, 7], device=device).eval()
    x = torch.randn(4, 12, device=device)
    batch = torch.export.Dim("batch", min=1, max=1024)
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
        for n in (1, 4, 9):
            x = torch.randn(n, 12, device=device)
            assert torch.equal(program.module()(x), module(x))


def test_explain_tells_of_every_layer(device):
    case = make_mlp_case((4,), SIZES, device)
    x = case.x.requires_grad_()
    records = fusewise.explain(mlp, x, *case.arguments[1:])
    assert [r.direction for r in records] == ["forward", "backward"] * 3
    assert [r.input.split("]")[0] for r in records[::2]] == ["[4, 12", "[4, 20", "[4, 9"]
    name = records[-1].able[-1]
    with fusewise.implementation(linear_act_backward=name):
        assert [r.chosen for r in fusewise.explain(mlp, x, *case.arguments[1:])][1::2] == [name] * 3
