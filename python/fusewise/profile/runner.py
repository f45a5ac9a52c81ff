"""One profile, from the name of a model to its `Profile`."""

import os
import warnings
from dataclasses import dataclass

from .._usage import UsageError
from ..bench import environment, floor
from ..bench.measure import LoopTimer, interleave
from ..bench.statistics import summary
from . import analysis
from .model import make_subject
from .record import count_work, record

_SECONDS = 3.0  # for the recorded steps together
_MOST_STEPS = 5


@dataclass(frozen=True)
class Options:
    model: str
    inputs: tuple[str, ...] = ()
    device: str = ""
    """"cpu" or "cuda"; empty: the GPU where torch has one."""
    train: bool = False
    amp: bool = False
    channels_last: bool = False
    arguments: tuple[str, ...] = ()
    """The command line, to be written down."""


def run(options: Options) -> analysis.Profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of every missing GPU
    device = _device(options.device)
    settings = (options.train, options.amp, options.channels_last)
    subject = make_subject(options.model, options.inputs, device, *settings)
    dtype = str(subject.dtype).removeprefix("torch.")
    ceilings = floor.measure_ceilings(device, {dtype})

    timer = LoopTimer(lambda _: subject.step(), 1, device)
    times = summary(interleave({"step": timer}, rounds=15, budget=_SECONDS)["step"])
    steps = max(1, min(_MOST_STEPS, round(_SECONDS * 1e6 / times["median"])))
    work = count_work(subject)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler, about itself
        pieces, busy, trace = record(subject, steps, device)
    if not pieces:
        raise UsageError(f"{options.model}: nothing to profile, no operator ran")

    on_gpu = device == "cuda"
    modules = analysis.module_kinds(subject.model, pieces, steps, work, ceilings, dtype)
    return analysis.Profile(
        command=environment.command(list(options.arguments)),
        environment=environment.describe(device),
        model=options.model,
        device=device,
        train=options.train,
        amp=options.amp,
        channels_last=options.channels_last,
        ceilings=ceilings,
        dtype=dtype,
        wall_us=times["median"],
        wall_spread=tuple(times["quartiles"]),
        work_us=sum(end - start for start, end in busy) / steps
        if on_gpu
        else sum(piece.us for piece in pieces) / steps,
        launches=len(pieces) / steps,
        kinds=analysis.kinds(pieces, steps),
        conversions=analysis.conversions(pieces, steps),
        modules=modules,
        outside_us=sum(piece.us for piece in pieces if not piece.modules) / steps,
        gaps=analysis.gaps(busy, steps),
        trace=trace,
    )


def _device(device: str) -> str:
    """Any model may be profiled where torch has a GPU, with or without fusewise's kernels."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no GPU was found; --device cpu profiles on the CPU")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")
