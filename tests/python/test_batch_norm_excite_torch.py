"""BatchNorm + activation + Squeeze-and-Excitation inside torch: autocast, compile, export,
transforms, hooks, and what is kept for backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fusewise
import reference
from batch_norm_excite_reference import make_case
from batch_norm_reference import ACTIVATIONS
from fusewise import _ops
from fusewise.functional import batch_norm_excite
from probes import Calls
from reference import DTYPES, LAYOUTS, same_bits
from test_fakes import expect_as_told

forward_op = torch.ops.fusewise._batch_norm_excite.default
backward_op = torch.ops.fusewise._batch_norm_excite_backward.default
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


class Chain(nn.Module):
    """A norm, an activation and an excitation with parameters of their own, as one operator or as
    torch's layers."""

    def __init__(self, channels=6, reduced=4, ours=True, momentum=0.1, activation="silu"):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm2d(channels, momentum=momentum)
        self.fc1 = nn.Conv2d(channels, reduced, 1)
        self.fc2 = nn.Conv2d(reduced, channels, 1)
        self.ours, self.activation = ours, activation

    def forward(self, x):
        norm, fc1, fc2 = self.norm, self.fc1, self.fc2
        if not self.ours:
            a = ACTIVATIONS[self.activation](norm(x))
            return a * fc2(F.silu(fc1(F.adaptive_avg_pool2d(a, 1)))).sigmoid()
        return batch_norm_excite(
            x,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            fc1.weight,
            fc1.bias,
            fc2.weight,
            fc2.bias,
            activation=self.activation,
            training=norm.training,
            momentum=norm.momentum,
            num_batches_tracked=norm.num_batches_tracked if norm.training else None,
        )


def pair(device, **options):
    return Chain(**options).to(device), Chain(ours=False, **options).to(device)


def step(fn, x, parameters):
    """The result and the gradients of a training step."""
    x = x.detach().requires_grad_()
    y = fn(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *parameters))]


def image(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype)


def expect_the_same_state(one, other):
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, msg=name)


# --- autocast and checkpointing -----------------------------------------------------------------


@pytest.mark.parametrize("dtypes", ["fp32", "fp16-fp32", "fp64"])
def test_autocast_changes_nothing(device, dtypes):
    case = make_case((2, 6, 4, 5), 3, device, DTYPES[dtypes])
    plain = case.results().outputs

    def transformed():
        tensors = {name: getattr(case, name) for name in case.names[1:]}
        return torch.func.vmap(lambda x: case.ours(None, None, x, **tensors))(case.x[None])[0]

    without = transformed()
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = case.results().outputs
        assert torch.equal(transformed(), without)
    for name, value in plain.items():
        assert value.dtype == cast[name].dtype and torch.equal(value, cast[name]), name


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_checkpointing_updates_the_statistics_again(device, reentrant):
    """The recomputation is another forward, for torch's layers as well."""
    models, found = pair(device), []
    x = image(4, 6, 5, 4, device=device).requires_grad_()
    for model in models:
        x.grad = None
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)
    assert models[0].norm.num_batches_tracked == 2
    expect_the_same_state(*models)


# --- torch.compile and torch.export -------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
def test_compile_updates_the_statistics(device, momentum):
    """With Inductor, for batches of any size."""
    torch._dynamo.reset()
    ours, theirs = pair(device, momentum=momentum)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    for n, side in ((3, 5), (2, 6), (7, 4)):
        x = image(n, 6, side, side, device=device).to(memory_format=torch.channels_last)
        found, right = (
            step(fn, x, model.parameters()) for fn, model in ((compiled, ours), (theirs, theirs))
        )
        assert found[0].stride() == x.stride()
        torch.testing.assert_close(found, right)
    expect_the_same_state(ours, theirs)


def test_compile_of_inference_with_a_dynamic_batch(device):
    """And with an absent weight, whose gradients have no tensor to take their type from."""
    torch._dynamo.reset()
    case = make_case((3, 6, 4, 5), 4, device, DTYPES["fp64"], affine=(False, True))
    tensors = {n: getattr(case, n) for n in case.names[1:] if getattr(case, n) is not None}
    learned = [t.requires_grad_() for t in tensors.values()]

    def call(x):
        return case.ours(*case.statistics, x, **tensors)

    for case.training in (False, True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for n in (3, 5, 8):
            x = image(n, 6, 4, 5, device=device, dtype=torch.float64)
            if n != 3:
                torch._dynamo.mark_dynamic(x, 0)
            found, right = (step(fn, x, learned) for fn in (compiled, call))
            torch.testing.assert_close(found, right)


def test_compile_refuses_bad_shapes_while_tracing(device):
    torch._dynamo.reset()
    case = make_case((3, 6, 4, 5), 4, device)
    compiled = torch.compile(batch_norm_excite, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"w2: expected \[6, 4\] or .*, got \[5, 4\]"):
        compiled(case.x, None, None, None, None, case.w1, None, case.w2[:5], None, training=True)


@TRAINING
def test_export_with_a_dynamic_batch(device, training):
    """The running statistics are buffers that the exported program updates."""
    ours = Chain().to(device).train(training)
    exported = torch.export.export(
        ours,
        (image(3, 6, 5, 4, device=device),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
    ).module()
    x = image(7, 6, 5, 4, device=device)
    torch.testing.assert_close(exported(x), ours(x))
    for name, value in ours.named_buffers():
        torch.testing.assert_close(dict(exported.named_buffers())[name], value)


@TRAINING
@pytest.mark.parametrize("weight", [True, False], ids=["weight", "none"])
def test_opcheck(device, weight, training):
    case = make_case((2, 6, 4, 5), 3, device, layout="channels_last", affine=(weight, True))
    tensors = (getattr(case, name) for name in case.names[1:])
    counter = torch.tensor(3, device=device)
    numbers = ("silu", "relu", "hardsigmoid", training, 0.1, 1e-5)
    arguments = (case.x, *case.statistics, *tensors, counter, *numbers)
    tests = ("test_schema", "test_faketensor")
    for save in (True, False):
        torch.library.opcheck(forward_op, (*arguments, save, ""), test_utils=tests)
    _, saved = forward_op(*arguments, True, "")
    read = (case.dy, case.x, case.weight, case.bias, case.w1, case.w2, saved, *numbers[:4])
    for needed in (0b111110001 | 8 * weight, 0b101000000, 0):
        torch.library.opcheck(backward_op, (*read, needed, ""))


@pytest.mark.parametrize("layout", ["nchw", "channels_last", "sliced", "transposed"])
@pytest.mark.parametrize("dtypes", ["fp32", "fp64", "bf16-fp32"])
def test_fakes(device, layout, dtypes):
    """What tracers are told of the results."""
    operator = _ops.BATCH_NORM_EXCITE
    numbers = ("silu", "silu", "sigmoid", True)
    for weight in (True, False):
        affine = (weight, not weight)
        case = make_case((2, 8, 3, 4), 5, device, DTYPES[dtypes], layout, affine=affine)
        tensors = {name: getattr(case, name) for name in case.names}
        tensors |= {n: tensors[n].T.contiguous().T for n in ("w1", "w2")}  # as nobody keeps them
        x, *others = tensors.values()
        arguments = (x, *case.statistics, *others, None, *numbers, 0.1, 1e-5)
        for save in (False, True):
            expect_as_told(operator.forward, *arguments, save, "")
        _, saved = operator.forward(*arguments, True, "")
        read = (case.dy, x, case.weight, case.bias, tensors["w1"], tensors["w2"], saved, *numbers)
        for needed in (0b111100001 | (8 if weight else 16), 0b101000000):
            expect_as_told(operator.backward, *read, needed, "")


# --- gradients only where they are wanted -------------------------------------------------------


def test_only_the_wanted_gradients_are_computed(device):
    case = make_case((2, 6, 4, 5), 3, device)
    full = case.results().outputs
    index = [_ops.BATCH_NORM_EXCITE.index[name] for name in case.names]
    subsets = [*itertools.product((False, True), repeat=len(case.names))]
    for wanted in (*subsets[:8], *subsets[8:-8:5], *subsets[-8:]):
        tensors = {
            name: getattr(case, name).detach().requires_grad_(need)
            for name, need in zip(case.names, wanted, strict=True)
        }
        with Calls() as calls:
            y = case.ours(*(t.clone() for t in case.statistics), **tensors)
            if any(wanted):
                y.backward(case.dy)
        forward, *backward = calls.seen
        assert forward[0] is forward_op and forward[1][-2] == any(wanted)  # save
        assert y.requires_grad == any(wanted) and len(backward) == any(wanted)
        for name, tensor in tensors.items():
            assert (tensor.grad is not None) == tensor.requires_grad
            if tensor.requires_grad:
                torch.testing.assert_close(tensor.grad, full[f"d{name}"])
        for op, arguments, results in backward:
            assert op is backward_op and len(results) == sum(wanted)
            assert arguments[-2] == sum(
                1 << i for i, need in zip(index, wanted, strict=True) if need
            )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@TRAINING
def test_nothing_is_saved_without_gradients(device, mode, training):
    model = Chain().to(device).train(training)
    x = image(2, 6, 4, 5, device=device, dtype=torch.float32)
    expected = model(x)
    with mode(), Calls() as calls:
        y = model(x)
    ((op, arguments, results),) = calls.seen
    assert op is forward_op and arguments[-2] is False and results[1].numel() == 0
    assert not y.requires_grad
    torch.testing.assert_close(y, expected)


def test_what_is_kept_for_backward(device):
    """x and the parameters themselves, one packed fp32 tensor, and no other memory."""
    case = make_case((2, 6, 4, 5), 3, device, DTYPES["fp16"])
    tensors = {name: getattr(case, name).requires_grad_() for name in case.names}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = case.ours(*(t.clone() for t in case.statistics), **tensors)
    known = {t.data_ptr() for t in tensors.values()}
    own = [t for t in kept if t.data_ptr() not in known]
    assert [(t.dtype, t.numel()) for t in own] == [(torch.float32, 2 * 6 + 2 * (2 * 6 + 3))]
    y.backward(case.dy)
    assert same_bits(case.x.grad, case.results().outputs["dx"])


def unstacked(t):
    return torch.stack([t, t], -1)[..., 0]


def other_layout(t):
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() == 4 else t


@pytest.mark.parametrize(
    "hook", [unstacked, other_layout, None], ids=["strided", "layout", "moved"]
)
def test_backward_reads_what_the_hooks_give_back(device, hook):
    """Nothing large travels outside save_for_backward; a second backward works too."""
    case = make_case((2, 6, 4, 5), 3, device, DTYPES["fp64"])
    tensors = {name: getattr(case, name).requires_grad_() for name in case.names}

    def differentiated(hooks):
        with hooks:
            y = case.ours(*(t.clone() for t in case.statistics), **tensors)
        once = torch.autograd.grad(y, list(tensors.values()), case.dy, retain_graph=True)
        graph = torch.autograd.grad(y, list(tensors.values()), case.dy, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in graph), list(tensors.values()))
        return [*once, *graph, *twice]

    graph = torch.autograd.graph
    hooks = graph.saved_tensors_hooks(lambda t: t, hook) if hook else graph.save_on_cpu()
    plain = differentiated(graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    torch.testing.assert_close(differentiated(hooks), plain)


def test_strides_of_results_are_those_of_empty_like(device):
    for layout in LAYOUTS:
        case = make_case((2, 6, 4, 5), 3, device, layout=layout, dy_layout="transposed")
        found = case.results().outputs
        expected = torch.empty_like(case.x).stride()
        assert found["y"].stride() == found["dx"].stride() == expected, layout


def test_meta_tensors_get_shapes_and_strides():
    case = make_case((2, 6, 4, 5), 3, "cpu", DTYPES["fp16-fp32"], "channels_last")
    tensors = {n: getattr(case, n).to("meta").requires_grad_() for n in case.names}
    y = case.ours(*(t.to("meta") for t in case.statistics), **tensors)
    y.sum().backward()
    x = tensors["x"]
    assert y.is_meta and y.dtype == torch.float16
    assert y.stride() == x.grad.stride() == x.stride()


# --- torch.func ---------------------------------------------------------------------------------


def test_transforms(device):
    """torch.func sees torch's own operators."""
    case = make_case((3, 4, 3, 3), 2, device, DTYPES["fp64"])
    x, t = case.x, torch.randn_like(case.x)
    tensors = {name: getattr(case, name) for name in case.names[1:]}

    def ours(x, w1=case.w1):
        return case.ours(None, None, x, **(tensors | {"w1": w1}))

    def theirs(x, w1=case.w1):
        return case.eager(None, None, x, **(tensors | {"w1": w1}))

    for fn in (
        lambda f: torch.func.jvp(f, (x,), (t,))[1],
        lambda f: torch.func.vjp(f, x)[1](t)[0],
        lambda f: torch.func.grad(lambda w1: f(x, w1).square().sum())(case.w1),
        lambda f: torch.func.vmap(f)(torch.stack([x, t])),
        lambda f: torch.func.jacfwd(lambda w1: f(x, w1).sum())(case.w1),
    ):
        torch.testing.assert_close(fn(ours), fn(theirs))


def test_a_batch_of_gradients(device):
    case = make_case((3, 4, 3, 3), 2, device, DTYPES["fp64"])
    tensors = {name: getattr(case, name).requires_grad_() for name in case.names}
    y = case.ours(*(t.clone() for t in case.statistics), **tensors)
    rows, inputs = torch.stack([case.dy, -2 * case.dy]), list(tensors.values())
    found = torch.autograd.grad(y, inputs, rows, is_grads_batched=True, retain_graph=True)
    single = torch.autograd.grad(y, inputs, case.dy)
    for batch, right in zip(found, single, strict=True):
        torch.testing.assert_close(batch, torch.stack([right, -2 * right]))


@TRAINING
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "hidden_activation, gate",
    [("silu", "sigmoid"), ("relu", "hardsigmoid"), ("hardswish", "sigmoid")],
)
def test_the_formula_gives_the_same(device, activation, hidden_activation, gate, training):
    """Values by jvp and gradients by a graph of the backward, against the operator's own."""
    case = make_case(
        (3, 5, 3, 4),
        8,
        device,
        DTYPES["fp64"],
        activation=activation,
        hidden_activation=hidden_activation,
        gate=gate,
    )
    if training:
        case.running_mean = case.running_var = None  # transforms cannot write to them
    else:
        case.training = False
        case.leave_hidden_kinks()
    statistics = case.statistics
    tensors = {name: getattr(case, name).requires_grad_() for name in case.names}
    y = case.ours(*statistics, **tensors)
    inputs = list(tensors.values())
    expected = torch.autograd.grad(y, inputs, case.dy, retain_graph=True)
    found = torch.autograd.grad(y, inputs, case.dy, create_graph=True)
    torch.testing.assert_close([t.detach() for t in found], list(expected))

    def loss(*given):
        return case.ours(*statistics, **dict(zip(tensors, given, strict=True)))

    plain = tuple(t.detach() for t in inputs)
    tangents = tuple(torch.ones_like(t) for t in plain)
    value, slope = torch.func.jvp(loss, plain, tangents)
    torch.testing.assert_close(value, y.detach())
    sums = sum(gradient.sum() for gradient in expected)
    torch.testing.assert_close((slope * case.dy).sum(), sums)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_forward_mode_updates_the_statistics(device, momentum):
    case = make_case((3, 5, 3, 4), 4, device, DTYPES["fp64"])
    tensors = [getattr(case, name) for name in case.names]
    found = []
    for dual in (True, False):
        mean, var = (t.clone() for t in case.statistics)
        counter = torch.tensor(3, device=device)
        options = {"momentum": momentum, "num_batches_tracked": counter, "training": True}
        with forward_ad.dual_level():
            x = forward_ad.make_dual(case.x, torch.ones_like(case.x)) if dual else case.x
            y = batch_norm_excite(x, mean, var, *tensors[1:], **options)
            found.append([forward_ad.unpack_dual(t).primal for t in (y, mean, var, counter)])
    torch.testing.assert_close(*found)
    assert found[0][-1] == 4


# --- torch's own operators ----------------------------------------------------------------------


@TRAINING
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_forced_torch_is_torchs_own(device, dtype, training):
    """The same bits, also under autocast."""
    ours, theirs = (model.train(training) for model in pair(device))
    x = image(4, 6, 5, 4, device=device)
    with torch.autocast(device, dtype, enabled=dtype is not None):
        with fusewise.implementation("torch"), Calls() as calls:
            found = step(ours, x, ours.parameters())
        right = step(theirs, x, theirs.parameters())
    assert not calls.seen
    torch.testing.assert_close(found, right)
    expect_the_same_state(ours, theirs)


@TRAINING
def test_tracers_see_torchs_operators(device, training):
    ours, theirs = (model.train(training) for model in pair(device))
    x = image(4, 6, 5, 4, device=device)
    with fusewise.implementation("torch"):
        traced = [
            torch.jit.trace(ours, x, check_trace=False),
            torch.fx.symbolic_trace(ours),
        ]
    assert "fusewise" not in traced[1].code
    assert "fusewise::" not in str(traced[0].inlined_graph)
    for model in traced:
        torch.testing.assert_close(model(x), theirs(x), msg=str(type(model)))


def test_tracers_outside_are_refused():
    model, x = Chain(), image(2, 6, 4, 5)
    with pytest.raises(TypeError, match=r"batch_norm_excite: torch.fx cannot trace a fused oper"):
        torch.fx.symbolic_trace(model)
    with pytest.raises(RuntimeError, match="torch.jit.script cannot compile"):
        torch.jit.script(batch_norm_excite)
    with pytest.raises(RuntimeError, match="batch_norm_excite: ONNX has no such operator"):
        torch.onnx.export(model, (x,), "/dev/null", dynamo=False)


def test_nothing_can_be_forced_under_a_transform(device):
    case = make_case((2, 6, 4, 5), 3, device)
    tensors = {name: getattr(case, name) for name in case.names[1:]}
    call = torch.func.vmap(lambda x: case.ours(None, None, x, **tensors))
    name = case.implementations()[0]["batch_norm_excite"]
    with (
        fusewise.implementation(batch_norm_excite=name),
        pytest.raises(RuntimeError, match=f"implementation: '{name}' was forced"),
    ):
        call(torch.stack([case.x, case.x]))


def test_explain(device):
    case = make_case((2, 6, 4, 5), 3, device)
    records = case.explained()
    assert [(r.operator, r.direction) for r in records] == [
        ("batch_norm_excite", "forward"),
        ("batch_norm_excite", "backward"),
    ]
    with fusewise.implementation(batch_norm_excite="torch"):
        assert [record.chosen for record in case.explained()] == ["torch", "torch"]


def test_eager_is_a_model_of_torchs(device):
    """The tests' own baseline is what torch's layers compute."""
    ours, theirs = pair(device)
    x = image(4, 6, 5, 4, device=device)
    excitation = (theirs.fc1.weight, theirs.fc1.bias, theirs.fc2.weight, theirs.fc2.bias)
    right = reference.eager(F.silu(ours.norm(x)), *excitation)
    torch.testing.assert_close(theirs(x), right)
