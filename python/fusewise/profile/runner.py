"""Makes a `Profile` from the name of a model."""

import os
import warnings
from dataclasses import dataclass, replace

import torch

from .._usage import UsageError
from ..bench import environment
from ..bench.measure import LoopTimer, interleave, keep_memory
from ..bench.progress import Progress
from ..bench.statistics import summary
from ..bench.yardsticks import measure_ceilings
from . import analysis
from .model import make_subject
from .record import Recording, behind_linears, count_work, record

_SECONDS = 3.0  # for all recorded steps together
_MOST_STEPS = 5


@dataclass(frozen=True)
class Options:
    model: str
    inputs: tuple[str, ...] = ()
    device: str = ""
    """"cpu" or "cuda". Empty: the GPU if torch has one."""
    train: bool = False
    amp: bool = False
    channels_last: bool = False
    arguments: tuple[str, ...] = ()
    """The command line, stored with the profile."""


def run(options: Options, progress: Progress) -> analysis.Profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports every missing GPU
    device = _device(options.device)
    if device == "cpu":
        keep_memory()
    progress.start(f"profiling {options.model}", 4)
    progress.now("the model and its first step")
    settings = (options.train, options.amp, options.channels_last)
    subject = make_subject(options.model, options.inputs, device, *settings)
    here = environment.describe(device)
    dtype = str(subject.dtype).removeprefix("torch.")
    progress.advance()
    progress.now("the machine's own ceilings: copies and matrix products")
    ceilings = measure_ceilings(device, {dtype})

    progress.advance()
    progress.now("steps without the profiler")
    timer = LoopTimer(lambda _: subject.step(), 1, device)
    times = summary(interleave({"step": timer}, rounds=15, budget=_SECONDS)["step"])
    steps = max(1, min(_MOST_STEPS, round(_SECONDS * 1e6 / times["median"])))
    progress.advance()
    progress.now("steps under the profiler")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's warnings about itself
        plain = record(subject, steps, device, marked=False)
        marked = record(subject, steps, device, marked=True)
    progress.advance()
    if not marked.pieces:
        raise UsageError(
            f"{options.model}: nothing was recorded; does it compute anything, and on a GPU, may "
            "this user read its performance counters?"
        )

    work_us = _work_us(plain, times["median"], steps, device)
    # Recording makes operators slower. Only their shares are kept, scaled to the unrecorded time.
    scale = work_us / sum(piece.us for piece in marked.pieces)
    pieces = [replace(piece, us=piece.us * scale) for piece in marked.pieces]
    return analysis.Profile(
        command=environment.command(list(options.arguments)),
        environment=here,
        model=options.model,
        device=device,
        train=options.train,
        amp=options.amp,
        channels_last=options.channels_last,
        ceilings=ceilings,
        dtype=dtype,
        wall_us=times["median"],
        wall_spread=tuple(times["quartiles"]),
        work_us=work_us,
        launches=len(plain.pieces) / steps,
        kinds=analysis.kinds(pieces),
        conversions=analysis.conversions(pieces, steps),
        modules=analysis.module_kinds(subject.model, pieces, count_work(subject), ceilings, dtype),
        outside_us=sum(piece.us for piece in pieces if not piece.modules),
        gaps=analysis.gaps(plain.busy, steps),
        trace=marked.trace,
        fusable=analysis.fusable(subject.model, pieces, behind_linears(subject)),
    )


def _work_us(plain: Recording, wall_us: float, steps: int, device: str) -> float:
    """The part of a step of `wall_us` in which a kernel or an operator runs."""
    if device == "cuda":  # the profiler does not slow kernels down
        return sum(end - start for start, end in plain.busy) / steps
    return wall_us * sum(piece.us for piece in plain.pieces) / plain.us


def _device(device: str) -> str:
    """Profiling only needs torch's GPU support; fusewise's own kernels need not run there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no GPU was found; use --device cpu to profile on the CPU")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")
