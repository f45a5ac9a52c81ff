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
    """Bytes per second, read and written, of a copy far larger than any cache."""
    size = 1 << (30 if device == "cuda" else 28)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)

    def copy(_):
        target.copy_(source)

    timer = GraphTimer(copy, 1) if device == "cuda" else LoopTimer(copy, 1, device)
    times = interleave({"copy": timer}, rounds=10, budget=2.0)["copy"]
    return 2 * size / (median(times) * 1e-6)
