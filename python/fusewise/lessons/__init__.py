"""`fusewise lesson`: common mistakes in measuring and optimising, shown on the user's own machine.

docs/lessons/ has a page for each. The naive kernels here are typical first attempts; the library
itself never uses them.
"""

from dataclasses import replace

from ..bench import environment
from ..bench.measure import keep_memory
from ..bench.tasks import usable_device
from . import amdahl, asynchronous, cold_cache, layout, naive_gemm, packing
from .lesson import Finding, Lesson

LESSONS: dict[str, Lesson] = {
    "asynchronous": asynchronous.LESSON,
    "naive-gemm": naive_gemm.LESSON,
    "amdahl": amdahl.LESSON,
    "layout": layout.LESSON,
    "packing": packing.LESSON,
    "cold-cache": cold_cache.LESSON,
}


def run(name: str, device: str) -> Finding:
    """Measures and draws the conclusion. An empty `device` means the GPU if there is one."""
    device = usable_device(device)
    here = environment.describe(device)
    if device == "cpu":
        keep_memory()
    found = LESSONS[name].conclude(LESSONS[name].measure(device), device)
    busy = environment.busy_machine(here) if device == "cpu" else []
    return replace(found, lines=[*busy, *found.lines])


__all__ = ["LESSONS", "Finding", "Lesson", "run"]
