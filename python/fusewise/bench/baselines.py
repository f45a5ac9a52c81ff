"""What a case is run with: ours, and the baselines it is compared with."""

import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from .families import FAMILIES
from .families.family import BOTH, MODES, Case, Workload
from .measure import Call

OURS = "fusewise"
BASELINES = ("eager", "compile", "naive")
# What computes less than ours, and so bounds it; not to be faster than it is no loss.
BOUNDS = ("products",)

# It warns of a missing GPU in every process that compiles for the CPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def default_baselines(device: str, families: tuple[str, ...]) -> tuple[str, ...]:
    own = (name for family in families for name in FAMILIES[family].baselines)
    return (*(BASELINES if device == "cuda" else BASELINES[:2]), *dict.fromkeys(own))


def all_baselines() -> tuple[str, ...]:
    return default_baselines("cuda", tuple(FAMILIES))


def functions(workload: Workload, baselines: tuple[str, ...]) -> dict[str, Callable | str]:
    """Ours and the baselines by name; a string in place of a function says why it is not there."""
    found = dict(workload.functions)
    torch._dynamo.reset()  # else earlier cases count towards the limit of recompilations
    found["compile"] = torch.compile(workload.functions["eager"], dynamic=False)
    if workload.inputs[0][0].device.type == "cpu" and not shutil.which("g++"):
        found["compile"] = "needs g++"
    return {name: found[name] for name in (OURS, *baselines) if name in found}


def caller(function: Callable, workload: Workload, mode: str) -> Call:
    """A call on the i-th buffer that returns the output and, where the mode says so, gradients."""

    def forward(i: int):
        with torch.no_grad():
            return (function(*workload.inputs[i], *workload.weights),)

    def forward_and_backward(i: int):
        learned = (*workload.inputs[i], *workload.weights)
        y = function(*learned)
        return (y, *torch.autograd.grad(y, learned, workload.gradients[i], allow_unused=True))

    return forward_and_backward if mode == BOTH else forward


def precompile(cases: list[Case], device: str):
    """Lets several processes fill torch.compile's cache on disk; yields as each case is done.

    The processes that measure nothing may use all cores. What fails here fails again, and is
    reported, where it is measured.
    """
    # The largest first, so that none of them is left for the end.
    cases = sorted(cases, key=lambda case: -case.shape[0] * case.shape[1])
    context = multiprocessing.get_context("spawn")
    workers = min(8, len(cases), len(os.sched_getaffinity(0)))
    # Ctrl-C reaches the whole process group; these have nothing to say about it.
    quiet = (signal.SIGINT, signal.SIG_DFL)
    pool = ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=quiet)
    try:
        for future in [pool.submit(_compile_case, case, device) for case in cases]:
            future.exception()
            yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _compile_case(case: Case, device: str) -> None:
    torch._inductor.config.compile_threads = 1  # the processes are the parallelism
    workload = FAMILIES[case.family].build(case, device, 1)
    compiled = functions(workload, ("compile",))["compile"]
    with case.precision():
        for mode in MODES:
            caller(compiled, workload, mode)(0)
