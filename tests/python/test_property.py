"""Random shapes, strides, dtypes and functions, all under the one accuracy rule."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import ACTIVATIONS, DTYPES, GATES, gradients, make_case, squeeze_excite


@st.composite
def relaid(draw, like):
    """A function that gives a tensor of `like`'s shape random strides: any order of dimensions,
    steps, room between and before the elements, and dimensions of stride 0."""
    order = draw(st.permutations(range(4)))
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 1, 2, 3])] * 4))
    margins = draw(st.tuples(*[st.sampled_from([0, 0, 1, 5])] * 4))
    offset = draw(st.integers(0, 8))
    flat = draw(st.sampled_from([(), (), (), (0,), (2, 3), (0, 1, 2, 3)]))  # expanded dimensions

    def relay(t):
        for dim in flat:
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
        room = [t.shape[d] * steps[d] + margins[d] for d in order]
        memory = t.new_empty(torch.Size(room).numel() + offset)[offset:].view(room)
        inverse = [order.index(d) for d in range(4)]
        memory = memory.permute(inverse)
        for d in range(4):
            memory = memory.narrow(d, margins[d], t.shape[d] * steps[d])
            memory = memory[(slice(None),) * d + (slice(None, None, steps[d]),)]
        return memory.copy_(t).expand(like)

    return relay


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
    if device == "cpu":
        return case

    def move(t):
        if t is None:
            return None
        memory = t.as_strided((t.untyped_storage().size() // t.element_size(),), (1,), 0)
        return memory.to(device).as_strided(t.shape, t.stride(), t.storage_offset())

    moved = (move(t) for t in (*case.inputs, case.dy))
    return type(case)(*moved, case.activation, case.gate)


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
            return squeeze_excite(*tensors, "silu").shape
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
