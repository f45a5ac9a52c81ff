"""The floor: the time in which this machine's memory can move the bytes that must move."""

from pathlib import Path

import torch

from .measure import GraphTimer, LoopTimer, interleave
from .statistics import median


def cache_bytes(device: str) -> int:
    """Size of the last cache before memory."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max(
        (int(path.read_text().strip().rstrip("K")) << 10 for path in sizes), default=32 << 20
    )


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of the fastest copy far larger than any cache.

    On an H200 the driver's own copy reached 2.7 TB/s and a kernel 4.0: a floor must be the lower.
    """
    size = 1 << (30 if device == "cuda" else 28)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)

    def timer(copy):
        return GraphTimer(copy, 1) if device == "cuda" else LoopTimer(copy, 1, device)

    ways = {
        "copy": timer(lambda _: target.copy_(source)),
        "kernel": timer(lambda _: torch.neg(source, out=target)),
    }
    times = interleave(ways, rounds=10, budget=1.0)
    return 2 * size / (min(map(median, times.values())) * 1e-6)
