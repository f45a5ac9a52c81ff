"""The floor (speed of light): the least time in which this machine could do a call's work."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .families.family import Traffic

BYTES = "bytes"
# Keeps rounding from pushing a raised ceiling below the rate that raised it.
_ABOVE_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that the machine reached in the same run."""

    bytes_per_second: float
    """Memory bandwidth, reads plus writes."""
    operations_per_second: dict[str, float]
    """GEMM throughput, by dtype."""
    raised: dict[str, str] = field(default_factory=dict)
    """For "bytes" or a dtype: the contender that was faster than every yardstick."""

    def floor(self, moved: int, operations: int, dtype: str) -> dict:
        """The longer of the two times, because memory traffic and arithmetic can overlap."""
        times = {
            BYTES: moved / self.bytes_per_second * 1e6,
            "operations": operations / self.operations_per_second[dtype] * 1e6,
        }
        bound = max(times, key=times.__getitem__)
        return {"bytes": moved, "operations": operations, "us": times[bound], "bound": bound}

    def raised_by(self, rows: list[dict]) -> "Ceilings":
        """Raises the ceilings until no contender of these rows is faster than its floor.

        A yardstick can be slower than a contender, because it runs at other moments and sizes.
        """
        rates = {BYTES: self.bytes_per_second, **self.operations_per_second}
        raised = {}
        for row in rows:
            amounts = {BYTES: row["floor"]["bytes"], row["dtype"]: row["floor"]["operations"]}
            for name, clock, us in _medians(row):
                for key, amount in amounts.items():
                    reached = amount / (us * 1e-6)
                    if reached > rates[key]:
                        rates[key] = reached * _ABOVE_ROUNDING
                        raised[key] = f"{name} in {row['case']} {row['mode']}, {clock} time"
        moved = rates.pop(BYTES)
        final = float32_for_all(rates)
        by_own = {key: by for key, by in raised.items() if key == BYTES or final[key] == rates[key]}
        return Ceilings(moved, final, by_own)


def float32_for_all(rates: dict[str, float]) -> dict[str, float]:
    """Half-precision dtypes and TF32 get at least float32's rate, as they may be computed in it."""
    return {
        name: rate if name == "float64" else max(rate, rates["float32"])
        for name, rate in rates.items()
    }


def set_floors(rows: list[dict], ceilings: Ceilings) -> Ceilings:
    """Recomputes the floor of every row; returns the ceilings as raised by the rows themselves."""
    ceilings = ceilings.raised_by(rows)
    for row in rows:
        counted = row["floor"]
        row["floor"] |= ceilings.floor(counted["bytes"], counted["operations"], row["dtype"])
    return ceilings


def memory_bytes(traffic: Traffic, buffers: int, cache: int) -> int:
    """The bytes of a call that must cross memory, out of those that it touches.

    One rule: what fits in the cache is still there when it is touched again. Weights are touched
    again by the next call, and x by backward; of these, what exceeds the cache counts. Inputs and
    outputs are touched again when their buffer's turn comes. Of these, each byte counts once, and
    nothing counts if all buffers together fit in the cache.
    """
    moved = traffic.data if buffers * traffic.data > cache else 0
    return moved + max(0, traffic.weights - cache) + max(0, traffic.again - cache)


def cache_bytes(device: str) -> int:
    """Size of the last-level cache; on a CPU, of all that the cores of this process have."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).L2_cache_size
    return _cpu_cache_bytes(Path("/sys/devices/system/cpu"), os.sched_getaffinity(0))


def _cpu_cache_bytes(folder: Path, cores: set[int]) -> int:
    """A cache that several cores share is counted once."""
    found: dict[str, int] = {}
    for core in cores:
        caches = (folder / f"cpu{core}" / "cache").glob("index*")
        last = max(caches, key=lambda cache: int((cache / "level").read_text()), default=None)
        if last:
            size = int((last / "size").read_text().strip().rstrip("K")) << 10
            found[(last / "shared_cpu_list").read_text()] = size
    return sum(found.values()) or 32 << 20


def _medians(row: dict):
    """Contender, clock and median time of everything that was timed."""
    for name, contender in row.get("contenders", {}).items():
        for clock in ("gpu", "wall"):
            if clock in contender:
                yield name, clock, contender[clock]["median"]
