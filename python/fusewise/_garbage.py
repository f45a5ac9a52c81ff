"""Python's garbage collector, while a CUDA graph is captured."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A `with` block in which a graph can be captured. A collection there might destroy an earlier
    graph that is part of a reference cycle, and CUDA would then invalidate the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
