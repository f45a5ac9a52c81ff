"""The floor: the least time in which this machine could move the bytes and do the operations."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .families.family import Case
from .measure import GraphTimer, LoopTimer, interleave
from .statistics import median


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached in the same run."""

    bytes_per_second: float
    """Read and written, of the fastest copy."""
    operations_per_second: dict[str, float]
    """Of the vendor's matrix product, by dtype."""

    def floor(self, moved: int, operations: int, dtype: str) -> dict:
        """Bytes and operations may overlap, so the floor is the longer of the two times."""
        times = {
            "bytes": moved / self.bytes_per_second * 1e6,
            "operations": operations / self.operations_per_second[dtype] * 1e6,
        }
        bound = max(times, key=times.__getitem__)
        return {"bytes": moved, "operations": operations, "us": times[bound], "bound": bound}


def measure_ceilings(device: str, dtypes: set[str]) -> Ceilings:
    """For half types the higher of their own and float32's rate: they may be computed in it."""
    rates = {name: matrix_rate(device, name) for name in sorted(dtypes | {"float32"})}
    return Ceilings(
        copy_bandwidth(device),
        {
            name: rate if name == "float64" else max(rate, rates["float32"])
            for name, rate in rates.items()
        },
    )


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
    ways = {
        "copy": _timer(lambda _: target.copy_(source), device),
        "kernel": _timer(lambda _: torch.neg(source, out=target), device),
    }
    times = interleave(ways, rounds=10, budget=1.0)
    return 2 * size / (min(map(median, times.values())) * 1e-6)


def matrix_rate(device: str, dtype: str) -> float:
    """Additions and multiplications per second of a large product, TF32 as torch is set."""
    size = (4096 if dtype in ("float32", "float64") else 8192) if device == "cuda" else 1024
    case = Case("", "", (), dtype)
    kind = {"dtype": case.dtype, "device": device}
    left, right, product = (torch.ones(size, size, **kind) for _ in range(3))
    with case.precision():
        timer = _timer(lambda _: torch.mm(left, right, out=product), device)
        samples = interleave({"product": timer}, rounds=10, budget=0.5)["product"]
    return 2 * size**3 / (median(samples) * 1e-6)


def _timer(call, device: str):
    return GraphTimer(call, 1) if device == "cuda" else LoopTimer(call, 1, device)
