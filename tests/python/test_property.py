"""Squeeze-and-Excitation on random shapes, strides, dtypes and functions, by the accuracy rule."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from layouts import moved  # noqa: E402
from reference import (  # noqa: E402
    ACTIVATIONS,
    DTYPES,
    GATES,
    gradients,
    make_case,
    squeeze_excite,
)
from strategies import relaid  # noqa: E402


@st.composite
def cases(draw):
    shape = tuple(draw(st.tuples(st.integers(1, 4), st.integers(1, 40), *[st.integers(1, 9)] * 2)))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    case = make_case(
        shape,
        draw(st.integers(1, 12)),
        dtypes=DTYPES[draw(st.sampled_from(sorted(DTYPES)))],
        activation=draw(st.sampled_from(ACTIVATIONS)),
        gate=draw(st.sampled_from(GATES)),
        bias=(draw(st.booleans()), draw(st.booleans())),
        convolution=draw(st.booleans()),
    )
    case.x = draw(relaid(shape))(case.x)
    case.dy = draw(relaid(shape))(case.dy)
    return case


def on(device, case):
    """The case on a device, strides kept."""
    tensors = (moved(t, device) for t in (*case.inputs, case.dy))
    return type(case)(*tensors, case.activation, case.gate)


@settings(max_examples=150)
@given(case=cases())
def test_any_call_is_right(device, case):
    case = on(device, case)
    case.check_every_implementation()
    ours = gradients(squeeze_excite, case)
    assert ours["y"].stride() == ours["dx"].stride() == torch.empty_like(case.x).stride()


@settings(max_examples=100)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)),
    w1=st.lists(st.integers(0, 5), max_size=5),
    b1=st.none() | st.lists(st.integers(0, 5), max_size=2),
    w2=st.lists(st.integers(0, 5), max_size=5),
    b2=st.none() | st.lists(st.integers(0, 5), max_size=2),
)
@example(shape=(2, 3, 1, 1), w1=[2, 3], b1=[2], w2=[3, 2], b2=[3])
def test_any_shapes_are_right_or_refused(device, shape, w1, b1, w2, b2):
    """The same verdict from the kernels and from the fake, and never a crash."""

    def attempt(where):
        tensors = [
            None if s is None else torch.ones(s, device=where) for s in (shape, w1, b1, w2, b2)
        ]
        try:
            return squeeze_excite(*tensors, activation="silu").shape
        except RuntimeError as error:
            return str(error).split(":")[0]

    verdict = attempt(device)
    assert verdict == attempt("meta")
    c = shape[1]
    r = w1[0] if w1 else 0
    fits = (
        min(c, r, shape[2], shape[3]) >= 1
        and w1 in ([r, c], [r, c, 1, 1])
        and w2 in ([c, r], [c, r, 1, 1])
        and b1 in (None, [r])
        and b2 in (None, [c])
    )
    assert (verdict == shape) == fits


def test_the_strategy_reaches_odd_strides():
    """The random layouts are what they claim to be."""
    seen = []

    @settings(max_examples=60, database=None)
    @given(case=cases())
    def collect(case):
        seen.append((case.x.is_contiguous(), 0 in case.x.stride(), case.x.data_ptr() % 16 == 0))
        assert gradients(squeeze_excite, case)["y"].shape == case.x.shape

    collect()
    for property_ in zip(*seen, strict=True):
        assert set(property_) == {True, False}
