"""What bad and unusual input gets from linear_act and mlp, row by row of the table in
docs/specification.md. What gets the right answer is in test_linear_act.py and test_mlp.py."""

import re

import numpy
import pytest
import torch

from fusewise.functional import linear_act, mlp
from linear_reference import DTYPES, make_case, make_mlp_case, same_bits
from test_bad_input import _differentiable, _nested, _quantized, _sparse

MATH = (False, True, True)
WORDS = "'identity', 'relu', 'gelu', 'gelu_tanh' or 'silu'"


def replaced(case, **changes):
    """The arguments of a good call with some of them changed."""
    named = dict(zip(("x", "w", "b", "activation"), case.arguments, strict=True))
    return [*(named | changes).values()]


def ways(fn, arguments):
    """Without and with gradient, traced, and under a transform of torch.func."""

    def mapped(change, values=arguments):
        for value in values:
            if isinstance(value, list):
                yield list(mapped(change, value))
            else:
                yield change(value) if isinstance(value, torch.Tensor) else value

    def learned(t):
        return t.detach().requires_grad_() if _differentiable(t) else t

    return (
        lambda: fn(*arguments),
        lambda: fn(*mapped(learned)),
        lambda: fn(*mapped(lambda t: t.to("meta"))),
        lambda: torch.func.vmap(lambda _: fn(*arguments))(torch.ones(2)),
    )


def tensors_in(arguments):
    for value in arguments:
        if isinstance(value, list):
            yield from tensors_in(value)
        elif isinstance(value, torch.Tensor):
            yield value


def assert_refused(arguments, name, *mentions, fn=linear_act, kinds=(RuntimeError, ValueError)):
    """Every way in refuses with an error that names the argument, and changes nothing."""
    before = [t.clone() for t in tensors_in(arguments)]
    for way in ways(fn, arguments):
        with pytest.raises(kinds) as error:
            way()
        message = str(error.value)
        assert re.match(rf"{name}: ", message), message
        for mention in mentions:
            assert mention in message, message
    assert all(map(same_bits, before, tensors_in(arguments)))


@pytest.fixture
def case(device):
    return make_case((2, 3), 6, 4, device)


@pytest.fixture
def stack(device):
    return make_mlp_case((3,), (6, 5, 4), device)


# --- wrong rank, sizes that disagree, mixed devices, integer or complex dtype -------------------


def test_a_scalar_x(case, device):
    x = torch.tensor(1.0, device=device)
    assert_refused(replaced(case, x=x), "x", "expected [..., K], got []")


@pytest.mark.parametrize(
    "name, shape",
    [
        ("w", ()),
        ("w", (6,)),
        ("w", (4, 6, 1)),
        ("w", (1,) * 7),
        ("w", (4, 5)),
        ("w", (6, 4)),
        ("w", (4, 0)),
        ("b", ()),
        ("b", (1,)),
        ("b", (6,)),
        ("b", (0,)),
        ("b", (4, 1)),
        ("b", (1, 4)),
        ("x", (2, 3, 5)),
        ("x", (4,)),
        ("x", (6, 0)),
    ],
    ids=str,
)
def test_wrong_rank_or_size(case, device, name, shape):
    wrong = torch.ones(shape, device=device)
    blamed = "w" if name == "x" else name  # x says what w must be
    assert_refused(replaced(case, **{name: wrong}), blamed, "expected ", "got ")


@pytest.mark.parametrize("name", ["x", "w", "b"])
def test_mixed_devices(case, name):
    wrong = getattr(case, name).to("meta")
    for needs in (False, True):
        arguments = replaced(case, **{name: wrong})
        arguments[1] = arguments[1].detach().requires_grad_(needs)
        with pytest.raises(RuntimeError, match=r"^[xwb]: expected a tensor on \w+.*got one on"):
            linear_act(*arguments)


@pytest.mark.parametrize("name", ["x", "w", "b"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_integer_or_complex_dtype(case, name, dtype):
    assert_refused(replaced(case, **{name: getattr(case, name).to(dtype)}), name, "expected")


@pytest.mark.parametrize(
    "x, weights",
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float64),
    ],
    ids=str,
)
def test_weights_of_another_dtype(device, x, weights):
    case = make_case((3,), 6, 4, device, (x, weights))
    assert_refused(list(case.arguments), "w", "expected x's dtype")
    assert_refused(replaced(case, w=case.w.to(x)), "b", "expected x's dtype")


def test_an_integer_under_autocast(case, device):
    with (
        torch.autocast(device, torch.bfloat16),
        pytest.raises(RuntimeError, match="^x: expected a floating dtype, got int64"),
    ):
        linear_act(case.x.long(), case.w, case.b)


@pytest.mark.parametrize("value", ["tanh", "", "ReLU", "gelu tanh"])
def test_unknown_activation(case, value):
    assert_refused(replaced(case, activation=value), "activation", f"got '{value}'", "'gelu_tanh'")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"x": numpy.zeros((2, 6), "float32")}, "x: expected a tensor, got numpy.ndarray"),
        ({"x": [1.0]}, "x: expected a tensor, got list"),
        ({"x": None}, "x: expected a tensor, got None"),
        ({"w": None}, "w: expected a tensor, got None"),
        ({"w": 3}, "w: expected a tensor, got int"),
        ({"b": 0.0}, "b: expected a tensor or None, got float"),
        ({"activation": torch.nn.ReLU}, f"activation: expected {WORDS}, got <class"),
        ({"activation": None}, f"activation: expected {WORDS}, got None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_are_no_tensors_and_no_texts(case, change, said):
    arguments = replaced(case, **change)
    unlearned, learned, _, transformed = ways(linear_act, arguments)
    for way in (unlearned, learned, transformed):
        with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
            way()


@pytest.mark.parametrize("kind", [_sparse, _nested, _quantized])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_another_kind(kind):
    case = make_case((2, 3), 6, 4)
    with pytest.raises(RuntimeError, match="^x: expected a (dense tensor|floating dtype), got"):
        linear_act(*replaced(case, x=kind(case.x)))


def test_what_backward_is_handed(case):
    """Autograd refuses most; the operator itself must hold too."""
    forward = torch.ops.fusewise._linear_act
    backward = torch.ops.fusewise._linear_act_backward
    saved = forward(*case.arguments, *MATH, True, "")[1]
    rest = ("relu", *MATH, 0b111, "")
    for dy in (case.dy[..., :3], case.dy[:1], case.dy.double()):
        with pytest.raises(RuntimeError, match="^dy: expected"):
            backward(dy, case.x, case.w, saved, *rest)
    with pytest.raises(RuntimeError, match="^gradient: expected a floating dtype, got int64"):
        backward(case.dy.long(), case.x, case.w, saved, *rest)
    for wrong in (saved[:-1], saved.float(), case.dy.double()):
        with pytest.raises(RuntimeError, match="^saved: expected the 6 uint8 values"):
            backward(case.dy, case.x, case.w, wrong, *rest)
    with pytest.raises(RuntimeError, match="^saved: expected the 24 float32 values"):
        backward(case.dy, case.x, case.w, saved, "gelu", *rest[1:])


def test_out_of_memory_is_torchs_own_error():
    """An expanded x costs nothing, its result 2^50 bytes. On a GPU: tests/gpu."""
    x = torch.zeros(1, 0).expand(2**24, 0)
    w = torch.zeros(2**24, 0)
    for gradient in (False, True):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            linear_act(x, w.requires_grad_(gradient), None, "gelu")
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            mlp(x, [w, torch.ones(1, 2**24)], None, "gelu")


# --- stacks -------------------------------------------------------------------------------------


def stack_with(stack, **changes):
    named = dict(
        zip(
            ("x", "weights", "biases", "activation", "final_activation"),
            stack.arguments,
            strict=True,
        )
    )
    return [*(named | changes).values()]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "name, change",
    [
        ("w", lambda t: t[:, 1:]),
        ("w", lambda t: t[0]),
        ("w", lambda t: t.double()),
        ("w", lambda t: t.long()),
        ("b", lambda t: t[1:]),
        ("b", lambda t: t[:, None]),
        ("b", lambda t: t.half()),
    ],
    ids=["columns", "rank", "dtype", "integer", "b_size", "b_rank", "b_dtype"],
)
def test_a_layer_that_does_not_fit(stack, layer, name, change):
    which = "weights" if name == "w" else "biases"
    changed = list(stack.w if name == "w" else stack.b)
    changed[layer] = change(changed[layer])
    arguments = stack_with(stack, **{which: changed})
    before = [t.clone() for t in tensors_in(arguments)]
    for way in ways(mlp, arguments):
        with pytest.raises(RuntimeError, match=rf"^layer {layer}: {name}: expected"):
            way()
    assert all(map(same_bits, before, tensors_in(arguments)))


def test_layers_that_do_not_fit_each_other(stack):
    wrong = [stack.w[0], stack.w[0]]
    with pytest.raises(RuntimeError, match=r"^layer 1: w: expected \[N, 5\], got \[5, 6\]"):
        mlp(stack.x, wrong, None)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"x": None}, "x: expected a tensor, got NoneType"),
        ({"weights": None}, "weights: expected a list of tensors, got NoneType"),
        ({"weights": torch.ones(2, 6, 6)}, "weights: expected a list of tensors, got Tensor"),
        ({"weights": [torch.ones(5, 6), None]}, "weights: expected tensors, got NoneType in place"),
        ({"biases": torch.ones(2, 5)}, "biases: expected a list of tensors, got Tensor"),
        ({"biases": [None, torch.ones(4)]}, "biases: expected tensors, got NoneType in place 0"),
        ({"activation": None}, f"activation: expected {WORDS}, got None"),
        ({"final_activation": 1}, f"final_activation: expected {WORDS}, got 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_of_a_stack_that_are_no_tensors_and_no_texts(stack, change, said):
    for needs in (False, True):
        arguments = stack_with(stack, **change)
        if isinstance(arguments[0], torch.Tensor):
            arguments[0] = arguments[0].detach().requires_grad_(needs)
        with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
            mlp(*arguments)


def test_numbers_of_layers(stack):
    with pytest.raises(ValueError, match="^weights: expected at least one"):
        mlp(stack.x, [])
    with pytest.raises(ValueError, match="^biases: expected 2, one per weight, got 1"):
        mlp(stack.x, stack.w, stack.b[:1])
    with pytest.raises(RuntimeError, match=f"^activation: expected {WORDS}, got 'tanh'"):
        mlp(stack.x, stack.w, stack.b, "tanh")
    with pytest.raises(RuntimeError, match=f"^final_activation: expected {WORDS}, got 'tanh'"):
        mlp(stack.x, stack.w, stack.b, "relu", "tanh")


def test_what_a_stacks_backward_is_handed(stack):
    forward, backward = torch.ops.fusewise._mlp, torch.ops.fusewise._mlp_backward
    kinds = ("gelu", "relu")
    _, saved = forward(stack.x, stack.w, stack.b, *kinds, True, *MATH, "")
    rest = (*kinds, True, [1] * 4, *MATH, "")
    with pytest.raises(RuntimeError, match="^saved: expected the 3 tensors that forward saved"):
        backward(stack.dy, stack.x, stack.w, saved[1:], *rest)
    with pytest.raises(RuntimeError, match=r"^layer 1: \w+: expected"):
        backward(stack.dy[:2], stack.x, stack.w, saved, *rest)


def test_mixed_devices_in_a_stack(stack):
    for place in range(2):
        weights = list(stack.w)
        weights[place] = weights[place].to("meta")
        with pytest.raises(
            RuntimeError, match=r"^layer \d: \w+: expected a tensor on .*got one on"
        ):
            mlp(stack.x, weights, stack.b)


def test_weights_of_two_dtypes(device):
    """float32 beside half is rounded, each by itself."""
    case = make_mlp_case((3,), (6, 5, 4), device, DTYPES["fp16"])
    mixed = [case.w[0].float(), case.w[1]]
    assert torch.equal(mlp(case.x, mixed, case.b), mlp(case.x, case.w, case.b))
