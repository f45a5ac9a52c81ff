"""Timing without waiting: a GPU's work is only enqueued when the call returns."""

import time

import torch

from ..bench.measure import interleave
from .lesson import Finding, Lesson, Samples, interval, ratio, table

_WITHOUT, _WITH = "timed without waiting", "timed to its end"


def measure(device: str) -> Samples:
    size = 4096 if device == "cuda" else 512
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.mm(left, right)

    def timer(waits: bool):
        def once() -> float:
            wait()
            begin = time.perf_counter()
            torch.mm(left, right)
            if waits:
                wait()
            return (time.perf_counter() - begin) * 1e6

        return once

    return interleave({_WITHOUT: timer(False), _WITH: timer(True)}, 21, 1.0)


def conclude(samples: Samples, device: str) -> Finding:
    shown = table("A matrix product, timed in two ways", samples)
    if device == "cpu":
        said = (
            "On a CPU this mistake is not possible: a call returns when its work is done, so both "
            "ways time the same thing. On a GPU a call returns when its work is enqueued."
        )
        return Finding(shown, [said], False)
    found = ratio(samples, _WITH, _WITHOUT)
    if found.verdict != "faster":
        said = "Both ways give the same here: launching takes as long as the work."
        return Finding(shown, [said], False)
    said = (
        f"The product takes {interval(found)} as long as the timing without waiting says, because "
        "that one measured only the launch. Call torch.cuda.synchronize before reading a clock."
    )
    return Finding(shown, [said], True)


LESSON = Lesson("timing without waiting for the GPU", measure, conclude)
