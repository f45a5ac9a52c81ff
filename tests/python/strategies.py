"""Strategies of hypothesis that several tests share."""

import torch
from hypothesis import strategies as st


@st.composite
def relaid(draw, like):
    """A function that gives a tensor of `like`'s shape random strides: any order of dimensions,
    steps, room between and before the elements, and dimensions of stride 0."""
    rank = len(like)
    order = draw(st.permutations(range(rank)))
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 1, 2, 3])] * rank))
    margins = draw(st.tuples(*[st.sampled_from([0, 0, 1, 5])] * rank))
    offset = draw(st.integers(0, 8))
    every = tuple(range(rank))
    flat = draw(st.sampled_from([(), (), (), every[:1], every[-2:], every]))  # expanded dimensions

    def relay(t):
        for dim in flat:
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
        room = [t.shape[d] * steps[d] + margins[d] for d in order]
        memory = t.new_empty(torch.Size(room).numel() + offset)[offset:].view(room)
        memory = memory.permute([order.index(d) for d in every])
        for d in every:
            memory = memory.narrow(d, margins[d], t.shape[d] * steps[d])
            memory = memory[(slice(None),) * d + (slice(None, None, steps[d]),)]
        return memory.copy_(t).expand(like)

    return relay


def moved(t, device):
    """A tensor on a device, strides kept."""
    if t is None or t.device.type == device:
        return t
    memory = t.as_strided((t.untyped_storage().size() // t.element_size(),), (1,), 0)
    return memory.to(device).as_strided(t.shape, t.stride(), t.storage_offset())
