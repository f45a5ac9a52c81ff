"""A fast part, a slow whole: what a speed-up of a part does for all of it."""

import torch
from torch import nn

from ..bench.families.squeeze_excite import eager, fused
from ..bench.statistics import median
from ..profile.analysis import amdahl
from .lesson import Finding, Lesson, Samples, interval, ratio, sample, table

_PART, _FAST_PART = "the part, eager", "the part, fused"
_WHOLE, _FAST_WHOLE = "the whole, eager", "the whole, with the fused part"


def measure(device: str) -> Samples:
    # Larger than the caches, so that the part reads from memory when timed alone, as in the whole.
    shape = (64, 128, 56, 56) if device == "cuda" else (16, 64, 56, 56)
    channels = shape[1]
    kind = {"device": device, "dtype": torch.float16 if device == "cuda" else torch.float32}
    x = torch.randn(shape, **kind).requires_grad_()
    dy = torch.randn(shape, **kind)
    weights = [
        torch.randn(size, **kind).mul_(0.1).requires_grad_()
        for size in ((8, channels, 1, 1), (8,), (channels, 8, 1, 1), (channels,))
    ]
    convolution = nn.Conv2d(channels, channels, 3, padding=1, **kind)
    parameters = [*weights, *convolution.parameters()]

    def part(function):
        return lambda: torch.autograd.grad(function(x, *weights), [x, *weights], dy)

    def whole(function):
        def run():
            return torch.autograd.grad(function(convolution(x), *weights), [x, *parameters], dy)

        return run

    calls = {_PART: part(eager), _FAST_PART: part(fused)}
    return sample({**calls, _WHOLE: whole(eager), _FAST_WHOLE: whole(fused)}, device)


def conclude(samples: Samples, device: str) -> Finding:
    title = "Squeeze-and-Excitation after a convolution, forward and backward"
    shown = table(title, samples)
    part = ratio(samples, _PART, _FAST_PART)
    whole = ratio(samples, _WHOLE, _FAST_WHOLE)
    share = median(samples[_PART]) / median(samples[_WHOLE])
    said = (
        f"The part became {interval(part)} as fast. It took {share:.0%} of the whole. Amdahl's "
        f"law, 1 / (1 - s + s / k), predicts {amdahl(share, part.value):.2f} times for the whole, "
        f"and {1 / (1 - share):.2f} times if the part took no time. Measured: {interval(whole)}."
    )
    seen = whole.value < part.value
    if not seen:
        said += " The whole gained as much as the part: something else changed too, or it is noise."
    return Finding(shown, [said], seen)


LESSON = Lesson("a fast part, a slow whole", measure, conclude)
