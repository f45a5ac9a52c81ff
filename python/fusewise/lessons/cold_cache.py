"""Reusing one buffer: a benchmark that measures the cache instead of memory."""

import math

import torch

from ..bench.floor import cache_bytes
from ..bench.measure import GraphTimer, LoopTimer, interleave
from .lesson import Finding, Lesson, Samples, interval, ratio, table

_WARM, _COLD = "one buffer over and over", "buffers in turn, 3 times the cache"


def measure(device: str) -> Samples:
    cache = cache_bytes(device)
    elements = buffer_bytes(cache) // 4
    buffers = math.ceil(3 * cache / (2 * elements * 4))
    pairs = [tuple(torch.ones(elements, device=device) for _ in range(2)) for _ in range(buffers)]

    def timer(count: int):
        def call(i):
            source, target = pairs[i]
            return torch.neg(source, out=target)

        return GraphTimer(call, count) if device == "cuda" else LoopTimer(call, count, device)

    return interleave({_WARM: timer(1), _COLD: timer(buffers)}, 15, 1.0)


def buffer_bytes(cache: int) -> int:
    """Input and output together fill an eighth of the cache."""
    return cache // 16


def conclude(samples: Samples, device: str) -> Finding:
    moved = 2 * buffer_bytes(cache_bytes(device))
    title = f"y = -x, {moved / 1e6:.3g} MB read and written"
    shown = table(title, samples, "GB/s", moved / 1e3)
    found = ratio(samples, _COLD, _WARM)
    if found.verdict != "faster":
        said = "This machine does not show the effect: its cache is not faster than its memory."
        return Finding(shown, [said], False)
    said = (
        f"From memory it takes {interval(found)} as long as from the cache. In a network, what a "
        "layer reads has left the cache already: use several buffers in turn, or you measure the "
        "cache."
    )
    return Finding(shown, [said], True)


LESSON = Lesson("reusing one buffer measures the cache", measure, conclude)
