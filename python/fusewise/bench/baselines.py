"""The functions that run on a case: ours, and the baselines that it is compared with."""

import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from .._torch_private import compile_on_one_thread
from .families import FAMILIES
from .families.family import BOTH, FORWARD, GRAPHED, REDUCE_OVERHEAD, STEP, Case, Workload
from .measure import Call, Replay

OURS = "fusewise"
BASELINES = ("eager", "compile", "naive")
COMPILED = ("compile", REDUCE_OVERHEAD)
# These bound our time from below: "products" computes less than ours, "graphed" is ours without the
# host's part. Being slower than they are does not count as a loss.
BOUNDS = ("products", GRAPHED)
# These are CUDA graphs, which cannot be captured in another graph, so they have no GPU time.
WALL_ONLY = (REDUCE_OVERHEAD, GRAPHED)

# This logger warns about a missing GPU in every process that compiles for the CPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def default_baselines(device: str, families: tuple[str, ...]) -> tuple[str, ...]:
    own = (name for family in families for name in FAMILIES[family].baselines)
    return (*(BASELINES if device == "cuda" else BASELINES[:2]), *dict.fromkeys(own))


def all_baselines() -> tuple[str, ...]:
    return default_baselines("cuda", tuple(FAMILIES))


def functions(workload: Workload, baselines: tuple[str, ...]) -> dict[str, Callable | str]:
    """Ours and the baselines by name. A string instead of a function says why it is missing."""
    found = dict(workload.functions)
    torch.compiler.reset()  # otherwise earlier cases count towards the recompilation limit
    if "compile" not in found:  # otherwise the family gives a reason
        found["compile"] = torch.compile(workload.functions["eager"], dynamic=False)
        if workload.inputs[0][0].device.type == "cpu" and not shutil.which("g++"):
            found["compile"] = "needs g++"
    return {name: found[name] for name in (OURS, *baselines) if name in found}


def calls(functions: dict[str, Callable | str], workload: Workload, mode: str):
    """For each name: the call for a mode, or a string that says why there is none."""
    found: dict[str, Call | str] = {}
    for name, function in functions.items():
        if mode != FORWARD and name in workload.forward_only:
            found[name] = "forward only"
        elif isinstance(function, str):
            found[name] = function
        else:
            found[name] = caller(function, workload, mode)
            if name == GRAPHED:
                found[name] = Replay(found[name], len(workload.inputs))
    return found


def caller(function: Callable, workload: Workload, mode: str) -> Call:
    """A call on the i-th buffer that returns the output and, if the mode has any, gradients."""

    def forward(i: int):
        with torch.no_grad():
            return (function(*workload.inputs[i], *workload.weights),)

    def forward_and_backward(i: int):
        learned = (*workload.inputs[i], *workload.weights)
        y = function(*learned)
        return (y, *torch.autograd.grad(y, learned, workload.gradients[i], allow_unused=True))

    def train_step(i: int):
        for weight in workload.weights:
            weight.grad = None
        loss = function(*workload.inputs[i], *workload.weights)
        loss.backward()
        return (loss.detach(), *(weight.grad for weight in workload.weights))

    return {FORWARD: forward, BOTH: forward_and_backward, STEP: train_step}[mode]


def precompile(cases: list[Case], device: str, baselines: tuple[str, ...]):
    """Fills torch.compile's disk cache from several processes; yields as each case is done.

    Nothing is measured meanwhile, so the processes may use all cores. A failure here is not
    reported: it happens again, and is reported, when the case is measured.
    """
    # The largest first, so that none of them runs alone at the end.
    cases = sorted(cases, key=lambda case: -case.shape[0] * case.shape[1])
    context = multiprocessing.get_context("spawn")
    workers = min(8, len(cases), len(os.sched_getaffinity(0)))
    # Ctrl-C reaches the whole process group; these processes should end without a traceback.
    quiet = (signal.SIGINT, signal.SIG_DFL)
    pool = ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=quiet)
    try:
        for future in [pool.submit(_compile_case, case, device, baselines) for case in cases]:
            future.exception()
            yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _compile_case(case: Case, device: str, baselines: tuple[str, ...]) -> None:
    compile_on_one_thread()  # the parallelism is across processes
    family = FAMILIES[case.family]
    workload = family.build(case, device, 1)
    compiled = functions(workload, tuple(name for name in COMPILED if name in baselines))
    with case.precision():
        for mode in family.modes(case):
            for name, call in calls(compiled, workload, mode).items():
                if name in COMPILED and callable(call):
                    call(0)
