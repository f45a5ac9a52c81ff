"""Observes more than results: which fused operators run, and the memory of the process."""

import resource

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Records every fused operator that runs, with arguments and results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "fusewise":
            self.seen.append((func, args, result))
        return result


def resident_bytes() -> int:
    """Resident host memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
