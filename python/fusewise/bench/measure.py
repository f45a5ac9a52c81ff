"""Timers, and the loop that takes turns between them."""

import ctypes
import time
from collections.abc import Callable

import torch

from .._torch_private import sleep_on_gpu
from .statistics import median

# Decides nothing but how much a single stray event weighs in one sample.
_GRAPH_CALLS = 20
_SAMPLE_SECONDS = 0.01
_HOST_CALLS = 10  # in flight at most: far fewer kernels than a GPU's queue holds
_MIN_ROUNDS = 5

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h
_CU_GRAPH_NODE_TYPE_KERNEL = 0  # from cuda.h

Call = Callable[[int], object]
"""Runs once on the i-th of several rotating buffers, and returns what it made."""


def keep_memory() -> None:
    """Makes the C library keep freed memory. Otherwise it gives large blocks back at once, and the
    page faults of getting them again, equal for everyone, hide what is measured."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)


class GraphTimer:
    """GPU time: a CUDA graph of at least 20 calls, so that no launch on the host is counted."""

    def __init__(self, call: Call, buffers: int):
        self._call = call  # keeps its tensors: a graph knows nothing but their addresses
        self._calls = buffers * -(-_GRAPH_CALLS // buffers)
        _warm_up(call, buffers)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Outputs live until their buffer's turn comes again. Freed at once, every call would write
        # to the same memory, and that would stay in the cache.
        kept: list[object] = [None] * buffers
        with torch.cuda.graph(self._graph):
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
        # The GPU sleeps while the host launches the graph (2 GHz is the fastest any of them runs),
        # else a large graph would start before it is wholly there.
        self._sleep_cycles = int((2 * launch + 50e-6) * 2e9)

    def __call__(self) -> float:
        """One sample, in µs a call."""
        if self._sleep_cycles:
            sleep_on_gpu(self._sleep_cycles)
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / self._calls

    def kernels(self) -> int:
        """How many kernels a call launches, copies and fills by the driver not counted.

        From the graph itself: a profiler would leave its traces in what is timed afterwards.
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
    """The same call as a CUDA graph, one for each buffer, captured when it is first asked for: what
    is left to the host is to launch it."""

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
        pool = torch.cuda.graph_pool_handle()  # shared: they are replayed one after the other
        graphs, results = [], []
        for i in range(self._buffers):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[i], pool=pool):
                results.append(self._call(i))
        self._graphs, self._results = graphs, results


def _warm_up(call: Call, buffers: int) -> None:
    """On a stream of its own, as a capture wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            call(i % buffers)
    torch.cuda.current_stream().wait_stream(side)


def _driver_call(function, *arguments) -> None:
    if error := function(*arguments):
        raise RuntimeError(f"{function.__name__} failed with CUDA error {error}")


class LoopTimer:
    """Wall time: a loop of calls as a user writes it, and a wait for the device at its end.

    Buffers take turns from one sample to the next, so that a short sample does not meet the same
    few, and outputs live until their buffer's turn comes again, as a GraphTimer's do.
    """

    def __init__(self, call: Call, buffers: int, device: str):
        self._call = call
        self._kept: list[object] = [None] * buffers
        self._turn = 0
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._calls = buffers  # the first turn gets memory for outputs from the system
        self()
        self._calls = 3
        seconds = self() * 1e-6
        self._calls = max(1, min(50, round(_SAMPLE_SECONDS / seconds)))

    def __call__(self) -> float:
        """One sample, in µs a call."""
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
    """Host time: until a call returns. On a GPU its kernels may still wait or run then; the clock
    stands still while the device finishes, after few calls, so that the host never waits for a full
    queue. On a CPU the call's own arithmetic is part of it."""

    def __init__(self, call: Call, device: str):
        self._call = call
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._batches = 1
        self()  # the first calls choose algorithms and get memory from the system
        seconds = self() * 1e-6 * _HOST_CALLS
        self._batches = max(1, min(50, round(_SAMPLE_SECONDS / seconds)))

    def __call__(self) -> float:
        """One sample, in µs a call: the median of some batches, which others disturb least."""
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
    """Samples of every timer, taken in turns, so that a drift of the machine meets all of them.

    A timer that has used up its budget of seconds sits the remaining rounds out.
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
    """The most GPU memory that a call holds beyond what was there before it."""
    call(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
