"""Tensors in random memory layouts. Does not use hypothesis, which not every GPU machine has."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

STEPS = (1, 1, 1, 2, 3)
MARGINS = (0, 0, 1, 5)


def expanded_dimensions(rank):
    """Choices of dimensions that get stride 0; mostly none."""
    every = tuple(range(rank))
    return (), (), (), every[:1], every[-2:], every


@dataclass(frozen=True)
class Relay:
    """Gives a tensor random strides: any order of dimensions, steps, gaps between and before the
    elements, and dimensions of stride 0."""

    order: Sequence
    steps: tuple
    margins: tuple
    offset: int
    expanded: tuple

    @staticmethod
    def drawn(rng, rank):
        """A random layout from a `random.Random`."""
        return Relay(
            order=tuple(rng.sample(range(rank), rank)),
            steps=tuple(rng.choice(STEPS) for _ in range(rank)),
            margins=tuple(rng.choice(MARGINS) for _ in range(rank)),
            offset=rng.randint(0, 8),
            expanded=rng.choice(expanded_dimensions(rank)),
        )

    def __call__(self, t):
        like = t.shape
        for dim in self.expanded:
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
        room = [t.shape[d] * self.steps[d] + self.margins[d] for d in self.order]
        memory = t.new_empty(torch.Size(room).numel() + self.offset)[self.offset :].view(room)
        memory = memory.permute([self.order.index(d) for d in range(t.dim())])
        for d in range(t.dim()):
            memory = memory.narrow(d, self.margins[d], t.shape[d] * self.steps[d])
            memory = memory[(slice(None),) * d + (slice(None, None, self.steps[d]),)]
        return memory.copy_(t).expand(like)


def moved(t, device):
    """Moves a tensor to a device and keeps its strides."""
    if t is None or t.device.type == device:
        return t
    memory = t.as_strided((t.untyped_storage().size() // t.element_size(),), (1,), 0)
    return memory.to(device).as_strided(t.shape, t.stride(), t.storage_offset())
