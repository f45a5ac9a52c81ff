"""What a run measures: its options, and the cases that they select."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .._usage import UsageError
from . import zoo
from .baselines import default_baselines
from .cases import matches, read, recast, select
from .families import FAMILIES
from .families.family import Case


@dataclass(frozen=True)
class Options:
    families: tuple[str, ...] = tuple(FAMILIES)
    device: str = ""
    """"cpu" or "cuda". Empty: the GPU if there is one that fusewise can use."""
    size: str = "quick"
    """"quick", "full" or "zoo"."""
    baselines: tuple[str, ...] = ()
    """Empty: all that exist for the device."""
    filter: str | None = None
    cases: Path | None = None
    """A file of cases that replaces the families' own."""
    dtype: str | None = None
    layout: str | None = None
    """The dtype and layout for every case. None: as the case itself says."""
    minutes: float | None = None
    """With "zoo": after this time no further case starts. None: all cases."""
    arguments: tuple[str, ...] = ()
    """The command line, stored with the results."""


@dataclass(frozen=True)
class Effort:
    """How long one row may take: rounds of interleaved samples, and seconds per timer."""

    rounds: int
    budget: float
    wall: bool = True
    """Whether wall time is measured on a GPU too."""
    gpu: bool = True
    """Whether GPU time is measured, which needs a call that a CUDA graph can capture."""


@dataclass(frozen=True)
class Task:
    """A case, and how it is measured."""

    case: Case
    baselines: tuple[str, ...]
    effort: Effort


_EFFORT = {"quick": Effort(15, 0.4), "full": Effort(21, 0.2)}
# At most half a second of GPU time a row, for ours and eager.
_ZOO_EFFORT = Effort(15, 0.25, wall=False)


def plan(options: Options) -> tuple[Options, list[Task]]:
    """Fills in the open options and selects the cases; raises UsageError if they make no sense."""
    device = usable_device(options.device)
    if options.size == "zoo":
        return _zoo(replace(options, device=device, baselines=zoo.BASELINES), options)
    if options.minutes is not None:
        raise UsageError("--minutes: only --zoo goes on where it stopped; leave it out")
    baselines = options.baselines or default_baselines(device, options.families)
    options = replace(options, device=device, baselines=baselines)
    effort = _EFFORT[options.size]
    return options, [Task(case, baselines, effort) for case in _cases(options)]


def _zoo(options: Options, given: Options) -> tuple[Options, list[Task]]:
    if options.families != (zoo.FAMILY,):
        raise UsageError(f"--zoo: expected the family {zoo.FAMILY} alone")
    if given.cases or given.dtype or given.layout or given.baselines:
        raise UsageError("--zoo: takes no --cases, --dtype, --layout or --baseline")
    if options.minutes is not None and not options.minutes > 0:
        raise UsageError(f"--minutes: expected a positive number, got {options.minutes:g}")
    tasks = [
        Task(case, zoo.BASELINES, replace(_ZOO_EFFORT, wall=True))
        if compared
        else Task(case, zoo.BASELINES[:1], _ZOO_EFFORT)
        for case, compared in zoo.sweep(options.device)
        if options.filter is None or matches(case.name, options.filter)
    ]
    if not tasks:
        raise UsageError(f"no case of the zoo matches --filter {options.filter}")
    return options, tasks


def usable_device(device: str) -> str:
    """The device that was asked for; otherwise the GPU if there is one that fusewise can use."""
    if device == "cuda" and (reason := _cuda_missing()):
        raise UsageError(f"--device cuda: {reason}; use --device cpu to measure on the CPU")
    return device or ("cpu" if _cuda_missing() else "cuda")


def _cases(options: Options) -> list[Case]:
    which = (options.device, options.size, options.filter)
    if options.cases:
        cases = read(options.cases, *which)
    else:
        cases = [case for family in options.families for case in select(family, *which)]
    cases = [case for case in cases if case.family in options.families]
    if not cases:
        where = options.cases or f"the {options.size} set"
        matching = f" that matches --filter {options.filter}" if options.filter else ""
        families = ", ".join(options.families)
        advice = "" if options.cases or options.size != "quick" else "; --full has more cases"
        raise UsageError(
            f"there is no case of {families}{matching} in {where} for {options.device}{advice}"
        )
    cases = recast(cases, options.dtype, options.layout)
    if options.device == "cpu" and any(case.tf32 for case in cases):
        raise UsageError("tf32: expected a GPU, got the CPU; use float32 there")
    return cases


def _cuda_missing() -> str | None:
    """Why a GPU cannot be used for measuring, or None."""
    from fusewise._ops import CUDA_MISSING

    if CUDA_MISSING:
        return CUDA_MISSING
    return None if torch.cuda.is_available() else "no GPU was found"
