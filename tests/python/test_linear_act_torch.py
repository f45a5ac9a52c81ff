"""Linear + activation at home in torch: autocast, its settings, torch.compile and torch.export."""

import os
import pathlib
import types

import pytest
import torch

import fusewise
from fusewise.bench.accuracy import Results
from fusewise.functional import linear_act
from fusewise.functional._products import product_math
from linear_reference import (
    ACTIVATIONS,
    DTYPES,
    MATH,
    OUTPUTS,
    assert_right,
    eager,
    gradients,
    make_case,
)

pytestmark = pytest.mark.usefixtures("few_threads")


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
        from test_linear_act_torch import cuda_tensor
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
