"""What the tests of several families on a GPU share."""

import gc
import resource
import time

import torch


def slow_down(milliseconds=20):
    """Keeps the current stream busy, so that work on a wrong stream overtakes it."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def comes_back_to(bytes_before):
    """Whether no more memory is allocated than before. autograd's thread may still be about to let
    go of what a backward had that failed."""
    end = time.monotonic() + 5
    while allocated() != bytes_before and time.monotonic() < end:
        time.sleep(0.01)
    return allocated() == bytes_before


def fails_with_out_of_memory(fn):
    """Whether `fn` raises torch's own error; keeps no frame, and so no tensor, alive."""
    try:
        fn()
    except torch.OutOfMemoryError as error:
        return "out of memory" in str(error)
    return False


def peak(step):
    """The most memory that a step needs beyond what is there before it."""
    step()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def resident():
    """Bytes of host memory that the process holds."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
