"""Synthetic scenes whose class no single view shows.

An object stands on a table. Three things about it are drawn at random, and each view shows one:

- RGB: its colour, warm or cold. The light comes from any side, so that shading tells nothing about
  relief: a bump lit from the left looks like a hollow lit from the right.
- depth: the relief of its front, a bump or a hollow.
- orthogonal, the heights seen from above: whether a second object is hidden behind it.

There are four classes. Each has one combination of the three and its opposite. A single view says
nothing about the class, two views halve the choice, and three decide it.
"""

import math

import torch
from torch import Tensor

STREAMS = {"rgb": 3, "depth": 1, "orthogonal": 1}
CLASSES = ("A", "B", "C", "D")


def scenes(count: int, size: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Images of every stream, `[count, channels, size, size]` from 0 to 1, and the labels."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        values = torch.rand(count, *(shape or (1, 1, 1)), generator=generator)
        return low + (high - low) * values

    def noise(channels):
        return torch.randn(count, channels, size, size, generator=generator)

    warm, bump, company = torch.randint(2, (3, count, 1, 1, 1), generator=generator).bool()
    line = torch.linspace(-1, 1, size)
    y, x = line[:, None], line
    left, up, radius = uniform(-0.4, 0.4), uniform(-0.3, 0.3), uniform(0.4, 0.55)
    across, along = (
        (x - left) / radius,
        (y - up) / radius,
    )  # from the middle of the object, in radii
    inside = across.square() + along.square() < 1
    height = (1 - across.square() - along.square()).clamp(min=0).sqrt()
    height = torch.where(bump, height, -height)

    light = uniform(0, 2 * math.pi)
    shade = 0.25 * (across * light.cos() + along * light.sin()) * torch.where(bump, 1.0, -1.0)
    tone = torch.where(warm, uniform(0.0, 0.1), uniform(0.55, 0.65))
    colour = hue(tone) * uniform(0.6, 0.9) * (1 + shade)
    table = hue(uniform(0.0, 1.0)) * 0.15 + uniform(0.2, 0.5) + uniform(-0.1, 0.1) * y
    rgb = torch.where(inside, colour, table) + 0.05 * noise(3)

    slope = uniform(-0.1, 0.1) * x + uniform(-0.1, 0.1) * y
    depth = uniform(0.4, 0.6) + slope - 0.15 * height * inside + 0.03 * noise(1)

    # From above, a row further up is further away from the camera.
    distance = uniform(0.1, 0.5)
    behind = distance - 0.8 * radius - 0.15
    tall = uniform(0.5, 0.9) * disk(x - left, y - distance, 0.6 * radius)
    second = uniform(0.5, 0.9) * disk(x - left, y - behind, uniform(0.18, 0.25)) * company
    orthogonal = 0.1 + torch.maximum(tall, second) + 0.05 * noise(1)

    labels = 2 * (warm ^ bump) + (bump ^ company).int()
    shape = -1, -1, size, size
    images = [image.expand(shape).clamp(0, 1).contiguous() for image in (rgb, depth, orthogonal)]
    return images, labels.flatten().long()


def hue(tone: Tensor) -> Tensor:
    """The saturated colour of a hue from 0 to 1, `[N, 1, 1, 1]` to `[N, 3, 1, 1]`."""
    shifts = torch.tensor([0.0, 2 / 3, 1 / 3]).view(1, 3, 1, 1)
    return (((tone + shifts) % 1 * 6 - 3).abs() - 1).clamp(0, 1)


def disk(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    return x.square() + y.square() < radius.square()
