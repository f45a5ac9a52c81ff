"""Hypothesis strategies that several tests share."""

from hypothesis import strategies as st

from layouts import MARGINS, STEPS, Relay, expanded_dimensions


@st.composite
def relaid(draw, like):
    """A function that gives a tensor of `like`'s shape random strides."""
    rank = len(like)
    return Relay(
        order=draw(st.permutations(range(rank))),
        steps=draw(st.tuples(*[st.sampled_from(STEPS)] * rank)),
        margins=draw(st.tuples(*[st.sampled_from(MARGINS)] * rank)),
        offset=draw(st.integers(0, 8)),
        expanded=draw(st.sampled_from(expanded_dimensions(rank))),
    )
