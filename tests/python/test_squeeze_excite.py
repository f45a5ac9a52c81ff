"""Squeeze-and-Excitation: right numbers on every way, and at home in torch."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusewise
from fusewise.functional import squeeze_excite
from probes import Calls, resident_bytes
from reference import (
    ACTIVATIONS,
    DTYPES,
    GATES,
    LAYOUTS,
    OUTPUTS,
    eager,
    gradients,
    make_case,
    same_bits,
    with_silu,
)

forward_op = torch.ops.fusewise._squeeze_excite.default
backward_op = torch.ops.fusewise._squeeze_excite_backward.default


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accuracy_by_dtype_and_layout(device, dtypes, layout):
    make_case((3, 24, 9, 10), 6, device, DTYPES[dtypes], layout).check_every_implementation()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bias", list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize("convolution", (False, True), ids=("matrix", "convolution"))
def test_accuracy_by_function(device, activation, gate, bias, convolution):
    case = make_case(
        (4, 33, 7, 7),
        9,
        device,
        layout="channels_last",
        activation=activation,
        gate=gate,
        bias=bias,
        convolution=convolution,
    )
    case.check_every_implementation()


@pytest.mark.parametrize("dtypes", ("fp32", "fp16", "bf16-fp32"))
@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
@pytest.mark.parametrize(
    "shape, reduced",
    [
        ((1, 1, 1, 1), 1),
        ((7, 1, 5, 3), 2),
        ((2, 3, 1, 1), 5),
        ((3, 65, 11, 13), 3),
        ((1, 8, 113, 97), 4),
        ((2, 640, 4, 4), 40),
        ((33, 16, 8, 8), 64),
    ],
    ids=str,
)
def test_accuracy_by_shape(device, dtypes, layout, shape, reduced):
    make_case(shape, reduced, device, DTYPES[dtypes], layout).check_every_implementation()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dy_layout", LAYOUTS)
def test_gradient_in_another_layout(device, layout, dy_layout):
    case = make_case((2, 16, 6, 5), 4, device, DTYPES["fp16"], layout, dy_layout)
    case.check_every_implementation()


@pytest.mark.parametrize("convolution", (False, True), ids=("matrix", "convolution"))
def test_weights_in_any_layout(device, convolution):
    case = make_case((2, 12, 5, 4), 5, device, convolution=convolution)
    dense = case.check()
    case.w1 = case.w1.transpose(0, 1).contiguous().transpose(0, 1)
    case.w2 = torch.cat([case.w2, case.w2], 1)[:, ::2].copy_(case.w2)
    case.b1 = torch.stack([case.b1, case.b1], 1)[:, 0]
    assert not case.w1.is_contiguous() and not case.w2.is_contiguous()
    strided = case.check()
    for name in OUTPUTS:
        assert torch.equal(dense[name], strided[name])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("layout", ("nchw", "channels_last", "sliced"))
def test_gradcheck(device, activation, gate, layout):
    case = make_case(
        (2, 5, 3, 2), 3, device, DTYPES["fp64"], layout, activation=activation, gate=gate
    )
    inputs = [t.requires_grad_() for t in case.inputs]
    for choice in case.implementations():
        with fusewise.implementation(**choice):
            assert torch.autograd.gradcheck(lambda *t: squeeze_excite(*t, activation, gate), inputs)


def test_results_do_not_depend_on_the_number_of_threads():
    case = make_case((5, 48, 33, 31), 12, dtypes=DTYPES["fp32"])
    many = gradients(squeeze_excite, case)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gradients(squeeze_excite, case)
    finally:
        torch.set_num_threads(before)
    for name in OUTPUTS:
        assert same_bits(many[name], one[name]), name


def test_another_process_gets_the_same_bits(device, run_python):
    program = f"""
        import hashlib, torch
        from reference import gradients, make_case, squeeze_excite
        torch.manual_seed(0)
        case = make_case((3, 40, 17, 19), 10, "{device}")
        found = [t.cpu().numpy().tobytes() for t in gradients(squeeze_excite, case).values()]
        print(hashlib.sha256(b"".join(found)).hexdigest())
    """
    assert len({run_python(program) for _ in range(2)}) == 1


# --- the operators themselves ------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_results_are_those_of_empty_like(device, layout):
    case = make_case((2, 6, 4, 5), 3, device, layout=layout)
    expected = torch.empty_like(case.x).stride()
    y, saved = forward_op(*case.arguments, True, "")
    arguments = (case.dy, case.x, case.w1, case.w2, saved, "silu", "sigmoid", 0b11111, "")
    dx = backward_op(*arguments)[0]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake_y, fake_saved = forward_op(*case.arguments, True, "")
        fake_dx = backward_op(*arguments)[0]
    assert y.stride() == dx.stride() == fake_y.stride() == fake_dx.stride() == expected
    assert saved.shape == fake_saved.shape == (2 * (2 * 6 + 3),)
    assert saved.dtype == fake_saved.dtype == torch.float32


def test_saved_holds_pooled_hidden_and_gates(device):
    case = make_case((3, 6, 4, 5), 2, device)
    _, saved = forward_op(*case.arguments, True, "")
    pooled = case.x.mean((2, 3))
    hidden = torch.nn.functional.linear(pooled, case.w1, case.b1)
    gates = eager(torch.ones_like(case.x) * pooled[:, :, None, None], *case.arguments[1:])
    gates = gates[:, :, 0, 0] / pooled
    torch.testing.assert_close(saved, torch.cat([t.flatten() for t in (pooled, hidden, gates)]))
    assert len(forward_op(*case.arguments, False, "")) == 1


@pytest.mark.parametrize("dtypes", ("fp32", "fp64", "bf16-fp32"))
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_opcheck_forward(device, dtypes, bias):
    case = make_case((2, 6, 4, 5), 3, device, DTYPES[dtypes], "channels_last", bias=(bias, bias))
    for save in (True, False):
        torch.library.opcheck(forward_op, (*case.arguments, save, ""))


@pytest.mark.parametrize("needed", [0b11111, 0b1, 0])
def test_opcheck_backward(device, needed):
    case = make_case((2, 6, 4, 5), 3, device, layout="channels_last", convolution=True)
    saved = forward_op(*case.arguments, True, "")[1]
    arguments = (case.dy, case.x, case.w1, case.w2, saved, "silu", "sigmoid", needed, "")
    torch.library.opcheck(backward_op, arguments)


def test_saved_on_another_device(device):
    """As a hook on saved tensors might bring it back."""
    case = make_case((2, 6, 4, 5), 3, device)
    saved = forward_op(*case.arguments, True, "")[1]
    rest = (case.x, case.w1, case.w2, saved.to("meta"), "silu", "sigmoid", 0b11111, "")
    with pytest.raises(RuntimeError, match="^saved: expected a tensor on .*, got one on meta"):
        backward_op(case.dy, *rest)
    if device == "cuda":
        with pytest.raises(
            RuntimeError, match="^saved: expected a tensor on cuda:0, got one on cpu"
        ):
            backward_op(case.dy, *rest[:3], saved.cpu(), *rest[4:])


def test_gradients_of_the_formula_on_meta_tensors():
    case = make_case((2, 6, 4, 5), 3, "meta")
    x = case.x.requires_grad_()
    (dx,) = torch.autograd.grad(with_silu(x, *case.inputs[1:]).sum(), x, create_graph=True)
    assert dx.is_meta and dx.shape == x.shape


def test_opcheck_explain(device):
    case = make_case((2, 6, 4, 5), 3, device)
    explain = torch.ops.fusewise._squeeze_excite_explain.default
    torch.library.opcheck(explain, (*case.arguments, False, False, ""), test_utils="test_schema")


def test_meta_tensors_get_shapes_and_strides():
    case = make_case((2, 6, 4, 5), 3, "meta", DTYPES["fp16-fp32"], "channels_last")
    x = case.x.requires_grad_()
    y = squeeze_excite(x, *case.arguments[1:])
    y.sum().backward()
    assert y.device.type == "meta" and y.dtype == torch.float16
    assert y.stride() == x.grad.stride() == x.stride()


# --- gradients only where they are wanted ------------------------------------------------------


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=5)))
def test_only_the_wanted_gradients_are_computed(device, wanted):
    case = make_case((2, 6, 4, 5), 3, device)
    full = gradients(squeeze_excite, case)
    inputs = [t.detach().requires_grad_(need) for t, need in zip(case.inputs, wanted, strict=True)]
    with Calls() as calls:
        y = with_silu(*inputs)
        if any(wanted):
            y.backward(case.dy)
    forward, *backward = calls.seen
    assert forward[0] is forward_op and forward[1][7] == any(wanted)  # save
    assert y.requires_grad == any(wanted)
    for tensor, name, need in zip(inputs, OUTPUTS[1:], wanted, strict=True):
        assert (tensor.grad is not None) == need
        if need:  # perhaps from another implementation, so not to the last bit
            torch.testing.assert_close(tensor.grad, full[name])
    if any(wanted):
        ((op, arguments, results),) = backward
        assert op is backward_op
        assert arguments[7] == sum(1 << i for i, need in enumerate(wanted) if need)
        shapes = [t.shape for t, need in zip(inputs, wanted, strict=True) if need]
        assert [result.shape for result in results] == shapes


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_nothing_is_saved_without_gradients(device, mode):
    case = make_case((2, 6, 4, 5), 3, device)
    inputs = [t.requires_grad_() for t in case.inputs]
    expected = with_silu(*inputs)
    with mode(), Calls() as calls:
        y = with_silu(*inputs)
    ((op, arguments, results),) = calls.seen
    assert op is forward_op and arguments[7] is False and len(results) == 1
    assert not y.requires_grad and torch.equal(y, expected)


def test_what_is_kept_for_backward(device):
    """x and the weights themselves, one packed fp32 tensor, and no other memory."""
    case = make_case((2, 6, 4, 5), 3, device, DTYPES["fp16"])
    inputs = [t.requires_grad_() for t in case.inputs]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = with_silu(*inputs)
    known = {t.data_ptr() for t in inputs}
    own = [t for t in kept if t.data_ptr() not in known]
    assert [(t.dtype, t.numel()) for t in own] == [(torch.float32, 2 * (2 * 6 + 3))]
    y.backward(case.dy)
    assert torch.equal(inputs[0].grad, gradients(squeeze_excite, case)["dx"])


def test_backward_reads_what_the_hooks_give_back(device):
    """Nothing large travels outside save_for_backward: tensors moved away and back still work."""
    case = make_case((2, 6, 4, 5), 3, device)
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    with torch.autograd.graph.save_on_cpu():
        y = with_silu(*inputs)
    y.backward(case.dy)
    for tensor, name in zip(inputs, OUTPUTS[1:], strict=True):
        assert torch.equal(tensor.grad, gradients(squeeze_excite, case)[name])


@pytest.mark.parametrize("reentrant", (False, True), ids=("new", "reentrant"))
def test_checkpointing(device, reentrant):
    case = make_case((2, 6, 4, 5), 3, device)

    def checkpointed(*arguments):
        return checkpoint(with_silu, *arguments, use_reentrant=reentrant)

    plain, again = gradients(squeeze_excite, case), None
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    y = checkpointed(*inputs)
    y.backward(case.dy)
    again = {"y": y, **{n: t.grad for n, t in zip(OUTPUTS[1:], inputs, strict=True)}}
    for name in OUTPUTS:
        assert torch.equal(plain[name], again[name]), name


def test_one_tensor_as_both_weights(device):
    """Each use has its own gradient, and they add up: once, and through a second derivative."""
    case = make_case((2, 6, 4, 5), 6, device, DTYPES["fp64"])
    results = []
    for fn in (eager, with_silu):
        x, w = case.x.detach().requires_grad_(), case.w1.detach().requires_grad_()
        y = fn(x, w, case.b1, w, case.b2)
        first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        results.append([*first, *torch.autograd.grad(penalty, (x, w))])
    torch.testing.assert_close(results[0], results[1])


def test_distributed_data_parallel(device, tmp_path):
    """One process is enough to see that gradients arrive through DDP's hooks."""
    backend = "gloo" if device == "cpu" else "nccl"
    module = fusewise.nn.SqueezeExcitation(12, 3, "silu", device=device)
    x = torch.randn(4, 12, 6, 5, device=device)
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(module)
        parallel(x).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close([p.grad for p in module.parameters()], expected)


# --- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", ("fp32", "fp16-fp32", "bf16-fp32", "fp64"))
def test_autocast_changes_nothing(device, dtypes):
    case = make_case((2, 6, 4, 5), 3, device, DTYPES[dtypes])
    plain = gradients(squeeze_excite, case)
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = gradients(squeeze_excite, case)
        y = torch.func.vmap(lambda x: squeeze_excite(x, *case.arguments[1:]))(case.x[None])
    torch.testing.assert_close(y[0], plain["y"])  # the way of torch.func casts nothing either
    for name in OUTPUTS:
        assert plain[name].dtype == cast[name].dtype and torch.equal(plain[name], cast[name]), name


# --- torch.compile and torch.export ------------------------------------------------------------


@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
def test_compile_fullgraph_with_dynamic_batch(device, layout):
    torch._dynamo.reset()
    module = fusewise.nn.SqueezeExcitation(12, 3, "silu", device=device)
    compiled = torch.compile(module, fullgraph=True)

    def step(fn, batch):
        x = LAYOUTS[layout](torch.randn(batch, 12, 6, 5, device=device)).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        torch.manual_seed(batch)
        y = fn(x)
        found = torch.autograd.grad(y.square().sum(), (x, *module.parameters()))
        return [y, *found]

    torch.manual_seed(1)
    step(compiled, 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in (3, 5, 8):
            torch.manual_seed(batch)
            ours = step(compiled, batch)
            torch.manual_seed(batch)
            plain = step(module, batch)
            assert ours[0].stride() == plain[0].stride()
            torch.testing.assert_close(ours, plain)


def test_compile_without_gradient(device):
    torch._dynamo.reset()
    case = make_case((3, 6, 4, 5), 3, device)
    compiled = torch.compile(squeeze_excite, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*case.arguments), squeeze_excite(*case.arguments))


def test_compile_refuses_bad_shapes_while_tracing(device):
    torch._dynamo.reset()
    case = make_case((3, 6, 4, 5), 3, device)
    compiled = torch.compile(squeeze_excite, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"w2: expected \[6, 3\] or .*, got \[5, 3\]"):
        compiled(case.x, case.w1, None, case.w2[:5], None, "silu")


def test_export_with_dynamic_batch(device):
    module = fusewise.nn.SqueezeExcitation(12, 3, "silu", device=device).eval()
    x = torch.randn(4, 12, 6, 5, device=device)
    batch = torch.export.Dim("batch", min=1, max=1024)
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
        for n in (1, 4, 9):
            x = torch.randn(n, 12, 6, 5, device=device)
            assert torch.equal(program.module()(x), module(x))


def test_host_memory_is_flat_over_many_calls():
    """A few lost bytes a call are megabytes here, and gigabytes in a long training."""
    case = make_case((1, 8, 2, 2), 2)
    learned = [tensor.detach().requires_grad_() for tensor in case.inputs]

    def work(calls):
        for _ in range(calls):
            with_silu(*case.inputs)
        for _ in range(calls // 10):
            torch.autograd.grad(with_silu(*learned).sum(), learned)

    work(2000)
    before = resident_bytes()
    work(20_000)
    assert resident_bytes() - before < 2**20
