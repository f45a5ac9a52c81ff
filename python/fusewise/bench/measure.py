"""Timers, and the loop that interleaves their samples."""

import ctypes
import functools
import time
from collections.abc import Callable

import torch

from .._capturing import without_garbage_collection
from .._torch_private import sleep_on_gpu
from .statistics import median

# Only decides how much one disturbance weighs in a sample.
_GRAPH_CALLS = 20
_SAMPLE_SECONDS = 0.01
_HOST_CALLS = 10  # at most in flight; far fewer kernels than a GPU's queue holds
_MIN_ROUNDS = 5

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h
_CU_GRAPH_NODE_TYPE_KERNEL = 0  # from cuda.h

Call = Callable[[int], object]
"""Runs once on the i-th of several rotating buffers, and returns the result."""


def keep_memory() -> None:
    """Makes the C library keep freed memory.

    Otherwise it returns large blocks to the system at once. The page faults when they are allocated
    again would cost every contender the same and hide the differences.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)


class GraphTimer:
    """GPU time, from a CUDA graph of several calls, so that host launch time is not counted.

    20 calls or more, unless `calls` says otherwise: a long call needs no others to be timed well.
    """

    def __init__(self, call: Call, buffers: int, calls: int = _GRAPH_CALLS):
        self._call = call  # keeps the tensors alive: a graph only has their addresses
        self._calls = buffers * -(-calls // buffers)
        _warm_up(call, buffers)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Each output lives until its buffer's turn comes again. If it were freed at once, every
        # call would write to the same memory, which would stay in the cache.
        kept: list[object] = [None] * buffers
        with without_garbage_collection(), torch.cuda.graph(self._graph):
            for i in range(self._calls):
                kept[i % buffers] = None
                kept[i % buffers] = call(i % buffers)
        self._graph.instantiate()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._sleep_cycles = 0
        self()
        begin = time.perf_counter()
        self._graph.replay()
        launch = time.perf_counter() - begin
        torch.cuda.synchronize()
        # The GPU sleeps while the host launches the graph. Otherwise a large graph would start
        # running before it is completely launched. 2 GHz is the highest clock of any of these GPUs.
        self._sleep_cycles = int((2 * launch + 50e-6) * 2e9)

    def __call__(self) -> float:
        """One sample, in µs per call."""
        if self._sleep_cycles:
            sleep_on_gpu(self._sleep_cycles)
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / self._calls

    def kernels(self) -> int:
        """How many kernels a call launches, without copies and fills by the driver.

        Counted in the graph: a profiler would affect the timings that follow.
        """
        driver = ctypes.CDLL("libcuda.so.1")
        graph = ctypes.c_void_p(self._graph.raw_cuda_graph())
        count = ctypes.c_size_t()
        _driver_call(driver.cuGraphGetNodes, graph, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        _driver_call(driver.cuGraphGetNodes, graph, nodes, ctypes.byref(count))
        kernels = 0
        for node in nodes:
            kind = ctypes.c_int()
            _driver_call(driver.cuGraphNodeGetType, ctypes.c_void_p(node), ctypes.byref(kind))
            kernels += kind.value == _CU_GRAPH_NODE_TYPE_KERNEL
        return round(kernels / self._calls)


class Replay:
    """The call as a CUDA graph, one per buffer, captured on first use.

    The host only has to launch the graph.
    """

    def __init__(self, call: Call, buffers: int):
        self._call, self._buffers = call, buffers
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._results: list[object] = []

    def __call__(self, i: int) -> object:
        if not self._graphs:
            self._capture()
        self._graphs[i].replay()
        return self._results[i]

    def _capture(self) -> None:
        _warm_up(self._call, self._buffers)
        pool = torch.cuda.graph_pool_handle()  # shared: graphs never run concurrently
        graphs, results = [], []
        with without_garbage_collection():
            for i in range(self._buffers):
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[i], pool=pool):
                    results.append(self._call(i))
        self._graphs, self._results = graphs, results


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all: torch keeps a cuBLAS workspace for every stream that a GEMM has run on."""
    return torch.cuda.Stream(device)


def _warm_up(call: Call, buffers: int) -> None:
    """Warms up on a side stream, as graph capture requires."""
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            call(i % buffers)
    torch.cuda.current_stream().wait_stream(side)


def _driver_call(function, *arguments) -> None:
    if error := function(*arguments):
        raise RuntimeError(f"{function.__name__} failed with CUDA error {error}")


class LoopTimer:
    """Wall time of a plain loop of calls, as a user writes it, with a device sync at the end.

    Each sample continues with the next buffers, so that a short sample does not always use the same
    few. Outputs live until their buffer's turn comes again, as in GraphTimer.
    """

    def __init__(self, call: Call, buffers: int, device: str):
        self._call = call
        self._kept: list[object] = [None] * buffers
        self._turn = 0
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._calls = buffers  # the first round allocates the outputs' memory from the system
        self()
        self._calls = 3
        seconds = self() * 1e-6
        self._calls = max(1, min(50, round(_SAMPLE_SECONDS / seconds)))

    def __call__(self) -> float:
        """One sample, in µs per call."""
        kept, buffers = self._kept, len(self._kept)
        self._wait()
        begin = time.perf_counter()
        for i in range(self._turn, self._turn + self._calls):
            kept[i % buffers] = None
            kept[i % buffers] = self._call(i % buffers)
        self._wait()
        us = (time.perf_counter() - begin) * 1e6 / self._calls
        self._turn += self._calls
        return us


class HostTimer:
    """Host time: the time until a call returns.

    On a GPU the kernels may still be queued or running at that point. The timer pauses after every
    few calls and lets the device finish, so that the host never waits for a full queue. On a CPU
    the time includes the computation itself.
    """

    def __init__(self, call: Call, device: str):
        self._call = call
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._batches = 1
        self()  # the first calls choose algorithms and allocate memory
        seconds = self() * 1e-6 * _HOST_CALLS
        self._batches = max(1, min(50, round(_SAMPLE_SECONDS / seconds)))

    def __call__(self) -> float:
        """One sample, in µs per call: the median of several batches, robust to disturbances."""
        call, taken = self._call, []
        for _ in range(self._batches):
            self._wait()
            begin = time.perf_counter()
            for _ in range(_HOST_CALLS):
                call(0)
            taken.append(time.perf_counter() - begin)
        self._wait()
        return median(taken) * 1e6 / _HOST_CALLS


def interleave(
    timers: dict[str, Callable[[], float]], rounds: int, budget: float
) -> dict[str, list[float]]:
    """Samples of all timers, taken in turns, so that drift of the machine affects all alike.

    A timer that has used up its budget, in seconds, skips the remaining rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in timers}
    spent = dict.fromkeys(timers, 0.0)
    order = list(timers)
    for done in range(rounds):
        for name in order:
            if done >= _MIN_ROUNDS and spent[name] > budget:
                continue
            begin = time.perf_counter()
            samples[name].append(timers[name]())
            spent[name] += time.perf_counter() - begin
        order = order[1:] + order[:1]
    return samples


def peak_bytes(call: Call) -> int:
    """Peak GPU memory of a call, beyond what was allocated before it."""
    call(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
