"""The autoencoder at home in torch: autocast, torch.compile, settings and transforms."""

import pytest
import torch
from torch.autograd import forward_ad

import fusewise
from autoencoder_reference import (
    DTYPES,
    OUTPUTS,
    SMALL,
    Case,
    autoencoder,
    eager,
    gradients,
    make_case,
)
from fusewise.functional._products import product_math
from fusewise.models import SpectralShapeAutoencoder
from probes import Calls

# --- autocast and TF32 -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output", OUTPUTS)
def test_autocast_takes_its_dtype(device, dtype, output):
    case = make_case(20, SMALL, device, output=output)
    half = Case(case.x.to(dtype), case.weights, case.gradient, output)
    half.gradient = case.gradient.to(half.dtypes()[0])
    case.gradient = half.gradient.to(case.gradient.dtype)
    with torch.autocast(device, dtype=dtype):
        cast = gradients(autoencoder, case)
        transformed = torch.func.vmap(lambda x: autoencoder(x, *case.weights, output=output))(
            case.x[None]
        )[0]
    right = half.check()
    assert cast[output].dtype == transformed.dtype == right[output].dtype
    half.check_one(output, transformed)  # by the formula, which rounds at other places
    for name in right:
        assert torch.equal(cast[name], right[name].to(cast[name].dtype)), name
    assert cast["dx"].dtype == cast["dbasis"].dtype == torch.float32


def test_autocast_never_casts_float64(device):
    case = make_case(7, SMALL, device, DTYPES["fp64"])
    with torch.autocast(device, dtype=torch.bfloat16):
        assert autoencoder(*case.inputs).dtype == torch.float64


def test_autocast_casts_half_weights_of_another_kind(device):
    case = make_case(7, SMALL, device, DTYPES["fp16"])
    with torch.autocast(device, dtype=torch.bfloat16):
        assert autoencoder(*case.inputs).dtype == torch.bfloat16


def test_tf32_is_as_torch_is_set():
    """The setting reaches the operator where there is a GPU; on a CPU it is not asked for."""
    case = make_case(7, SMALL)
    with Calls() as calls:
        autoencoder(*case.inputs)
    assert calls.seen[0][1][-3] is False
    if torch.cuda.is_available():
        case = make_case(7, SMALL, "cuda")
        with Calls() as calls:
            autoencoder(*case.inputs)
        assert calls.seen[0][1][-3] == product_math(case.x)[0]


# --- torch.compile and torch.export ------------------------------------------------------------


@pytest.mark.parametrize(
    "method, backend",
    # To inductor, which takes its time, the three are one: an operator that it calls.
    [("forward", "inductor"), ("encode", "aot_eager"), ("anomaly_score", "aot_eager")],
)
def test_compile_fullgraph_with_dynamic_batch(device, method, backend):
    torch._dynamo.reset()
    module = SpectralShapeAutoencoder(6, 3, 4, 5, device=device)
    plain = getattr(module, method)
    compiled = torch.compile(plain, fullgraph=True, backend=backend)

    def step(fn, rows):
        torch.manual_seed(rows)
        x = torch.randn(rows, 18, device=device).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        result = fn(x)
        learned = (x, *module.parameters())
        found = torch.autograd.grad(result.square().sum(), learned, materialize_grads=True)
        return [result, *found]

    step(compiled, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (3, 5, 8):
            torch.testing.assert_close(step(compiled, rows), step(plain, rows))


@pytest.mark.parametrize("frozen", [(), ("slice_encoder.1.weight", "global_basis")])
def test_compile_fullgraph_of_a_train_step(device, frozen):
    """x needs no gradient, and some weights may not either."""
    torch._dynamo.reset()
    module = SpectralShapeAutoencoder(6, 3, 4, 5, device=device)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    learned = [p for p in module.parameters() if p.requires_grad]
    x = torch.randn(7, 18, device=device)
    compiled = torch.compile(module.anomaly_score, fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(fn(x).mean(), learned) for fn in (compiled, module.anomaly_score)
    )
    torch.testing.assert_close(found, expected)


def test_compile_without_gradient(device):
    torch._dynamo.reset()
    case = make_case(7, SMALL, device)
    compiled = torch.compile(autoencoder, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*case.inputs), autoencoder(*case.inputs))


def test_compile_refuses_bad_shapes_while_tracing(device):
    torch._dynamo.reset()
    case = make_case(7, SMALL, device)
    compiled = torch.compile(autoencoder, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"x: expected \[N, 18\] or \[N, 3, 6\], got \[\w+, 17\]"):
        compiled(case.x[:, 1:], *case.weights)


@pytest.mark.parametrize("frames", [False, True], ids=["rows", "frames"])
def test_export_with_dynamic_batch(device, frames):
    module = SpectralShapeAutoencoder(6, 3, 4, 5, device=device).eval()
    shape = (3, 6) if frames else (18,)
    batch = torch.export.Dim("batch", min=1, max=1024)
    with torch.no_grad():
        x = torch.randn(4, *shape, device=device)
        program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
        for rows in (1, 4, 9):
            x = torch.randn(rows, *shape, device=device)
            assert torch.equal(program.module()(x), module(x))


# --- settings ----------------------------------------------------------------------------------


def test_explain_tells_forward_and_backward(device):
    case = make_case(7, SMALL, device)
    case.x.requires_grad_()
    explanation = fusewise.explain(autoencoder, *case.inputs)
    assert [(r.operator, r.direction) for r in explanation] == [
        ("autoencoder", "forward"),
        ("autoencoder", "backward"),
    ]
    for record in explanation:
        assert not record.candidates[-1].reason  # the last takes every call
        assert record.input.startswith(f"[7, 18] float32 {device}")
    with torch.no_grad():
        assert len(fusewise.explain(autoencoder, *case.inputs)) == 1


def test_an_unknown_implementation_is_an_error(device):
    case = make_case(7, SMALL, device)
    with (
        fusewise.implementation(autoencoder="magic"),
        pytest.raises(RuntimeError, match="none named 'magic'"),
    ):
        autoencoder(*case.inputs)


def test_nothing_can_be_forced_under_a_transform():
    case = make_case(7, SMALL)
    with (
        fusewise.implementation(autoencoder="portable"),
        pytest.raises(RuntimeError, match="implementation: 'portable' was forced"),
    ):
        torch.func.vmap(lambda x: autoencoder(x, *case.weights))(case.x[None])


# --- transforms and double backward ------------------------------------------------------------


@pytest.fixture(params=OUTPUTS)
def double(request, device):
    return make_case(3, SMALL, device, DTYPES["fp64"], output=request.param)


def test_func_grad_jvp_and_vmap(double):
    def run(fn):
        def call(*inputs):
            return fn(*inputs, output=double.output)

        def loss(*inputs):
            return call(*inputs).square().sum()

        every = tuple(range(12))
        if double.output == "latent":  # the decoder is not asked
            every = every[:-2]
        torch.manual_seed(1)
        tangents = tuple(torch.randn_like(t) for t in double.inputs)
        batch = torch.stack([double.x, 2 * double.x])
        return (
            torch.func.grad(loss, every)(*double.inputs),
            torch.func.jvp(call, double.inputs, tangents),
            torch.func.vmap(lambda x: call(x, *double.weights))(batch),
        )

    torch.testing.assert_close(run(autoencoder), run(eager))


def test_forward_mode_ad(double):
    tangent = torch.randn_like(double.x)
    results = []
    for fn in (autoencoder, eager):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(double.x, tangent)
            result = fn(dual, *double.weights, output=double.output)
            results.append(forward_ad.unpack_dual(result).tangent)
    torch.testing.assert_close(*results)


def test_batched_gradients(double):
    x = double.x.requires_grad_()
    many = torch.randn(4, *double.gradient.shape, dtype=x.dtype, device=x.device)
    results = [
        torch.autograd.grad(
            fn(*double.inputs, output=double.output), x, many, is_grads_batched=True
        )[0]
        for fn in (autoencoder, eager)
    ]
    torch.testing.assert_close(*results)


def test_double_backward_is_right(double):
    inputs = [t.requires_grad_() for t in double.inputs]

    def call(*inputs):
        return autoencoder(*inputs, output=double.output)

    # By torch's own derivatives of the formula: along random directions is enough.
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def gradient_penalty(fn, case):
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    result = fn(*inputs, output=case.output)
    (slope,) = torch.autograd.grad(result.sum(), inputs[0], create_graph=True)
    loss = (slope.norm(dim=1) - 1).square().mean() + result.mean()
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def test_gradient_penalty_is_right(double):
    torch.testing.assert_close(
        gradient_penalty(autoencoder, double), gradient_penalty(eager, double)
    )


def test_gradient_penalty_under_compile_is_an_error(device):
    torch._dynamo.reset()
    case = make_case(5, SMALL, device)
    compiled = torch.compile(autoencoder, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
        gradient_penalty(compiled, case)
