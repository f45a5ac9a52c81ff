"""What the capture of a CUDA graph does not bear: garbage collection, and waiting for the GPU."""

import contextlib
import gc
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_captures = 0  # at the moment, in all threads
_was_enabled = False  # before the first of them


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A `with` block in which a graph can be captured. A collection there might destroy an earlier
    graph that is part of a reference cycle, and CUDA would then invalidate the capture."""
    global _captures, _was_enabled
    gc.collect()
    with _lock:
        if _captures == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if _captures == 0 and _was_enabled:
                gc.enable()


class WaitsForTheGpu(RuntimeError):
    """A call made the host wait for the GPU."""


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """A `with` block in which a call that waits for the GPU raises WaitsForTheGpu."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise WaitsForTheGpu(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
