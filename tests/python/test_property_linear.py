"""linear_act and mlp on random shapes, strides, dtypes and activations, under the accuracy rule."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from fusewise.functional import linear_act, mlp  # noqa: E402
from layouts import moved  # noqa: E402
from linear_reference import (  # noqa: E402
    ACTIVATIONS,
    DTYPES,
    Case,
    MlpCase,
    gradients,
    make_case,
    make_mlp_case,
)
from strategies import relaid  # noqa: E402

SIZES = st.integers(1, 40)
LEADING = st.lists(st.integers(1, 6), min_size=1, max_size=3)
KINDS = st.sampled_from(sorted(ACTIVATIONS))


@st.composite
def linear_cases(draw):
    leading, k, n = draw(LEADING), draw(SIZES), draw(SIZES)
    torch.manual_seed(draw(st.integers(0, 2**31)))
    case = make_case(
        leading,
        k,
        n,
        dtypes=DTYPES[draw(st.sampled_from(sorted(DTYPES)))],
        activation=draw(KINDS),
        bias=draw(st.booleans()),
    )
    x = draw(relaid((*leading, k)))(case.x)
    w = draw(relaid((n, k)))(case.w)
    dy = draw(relaid((*leading, n)))(case.dy)
    return Case(x, w, case.b, dy, case.activation)


@st.composite
def mlp_cases(draw):
    leading = draw(LEADING)
    sizes = draw(st.lists(SIZES, min_size=2, max_size=4))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    case = make_mlp_case(
        leading,
        sizes,
        dtypes=DTYPES[draw(st.sampled_from(["fp32", "fp64", "bf16", "fp16"]))],
        activation=draw(KINDS),
        final_activation=draw(KINDS),
        bias=draw(st.booleans()),
    )
    x = draw(relaid((*leading, sizes[0])))(case.x)
    dy = draw(relaid((*leading, sizes[-1])))(case.dy)
    weights = [draw(relaid(w.shape))(w) for w in case.w]
    return MlpCase(x, weights, case.b, dy, case.activation, final_activation=case.final_activation)


def on(device, case):
    """The case on a device, strides kept."""
    for name in ("x", "dy"):
        setattr(case, name, moved(getattr(case, name), device))
    if isinstance(case, MlpCase):
        case.w = [moved(w, device) for w in case.w]
        case.b = case.b and [moved(b, device) for b in case.b]
    else:
        case.w, case.b = moved(case.w, device), moved(case.b, device)
    return case


def strides(t):
    """Those that are ever taken."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


@settings(max_examples=60)
@given(case=linear_cases())
def test_any_call_of_linear_act_is_right(device, case):
    case = on(device, case)
    case.check_every_implementation()
    assert strides(gradients(case)["dx"]) == strides(torch.empty_like(case.x))


@settings(max_examples=40)
@given(case=mlp_cases())
def test_any_call_of_mlp_is_right(device, case):
    case = on(device, case)
    case.check()
    assert strides(gradients(case)["dx"]) == strides(torch.empty_like(case.x))


def verdict(fn, device, *shapes):
    """The shape of the result, or which argument is refused."""
    tensors = [None if s is None else torch.ones(s, device=device) for s in shapes]
    try:
        return fn(*tensors).shape
    except RuntimeError as error:
        return str(error).rpartition("layer ")[2].split(": expected")[0]


@settings(max_examples=80)
@given(
    x=st.lists(st.integers(0, 4), max_size=3),
    w=st.lists(st.integers(0, 4), max_size=3),
    b=st.none() | st.lists(st.integers(0, 4), max_size=2),
)
@example(x=[2, 3], w=[4, 3], b=[4])
@example(x=[], w=[4, 3], b=None)
def test_any_shapes_of_linear_act_are_right_or_refused(device, x, w, b):
    """The same verdict from the kernels and from the fake, and never a crash."""
    found = verdict(linear_act, device, x, w, b)
    assert found == verdict(linear_act, "meta", x, w, b)
    fits = bool(x) and len(w) == 2 and w[1] == x[-1] and b in (None, w[:1])
    assert (found == (*x[:-1], *w[:1])) == fits


@settings(max_examples=60)
@given(
    x=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    weights=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3),
)
@example(x=[2, 3], weights=[[2, 3], [1, 2]])
def test_any_shapes_of_mlp_are_right_or_refused(device, x, weights):
    def stack(x, *weights):
        return mlp(x, list(weights))

    found = verdict(stack, device, x, *weights)
    assert found == verdict(stack, "meta", x, *weights)
    inputs = [x[-1], *(w[0] for w in weights)]
    fits = all(len(w) == 2 and w[1] == k for w, k in zip(weights, inputs, strict=False))
    assert (found == (*x[:-1], inputs[-1])) == fits


def test_the_strategies_reach_odd_strides():
    """The random layouts are what they claim to be."""
    seen = []

    @settings(max_examples=60, database=None)
    @given(case=linear_cases())
    def collect(case):
        for t in (case.x, case.w, case.dy):
            seen.append((t.is_contiguous(), 0 in t.stride(), t.data_ptr() % 16 == 0))

    collect()
    for property_ in zip(*seen, strict=True):
        assert set(property_) == {True, False}
