"""Runs the cases one after the other: first the correctness check, then the timing."""

import gc
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import fusewise

from .._usage import UsageError
from . import environment, floor
from .baselines import (
    COMPILED,
    OURS,
    WALL_ONLY,
    calls,
    default_baselines,
    functions,
    precompile,
)
from .cases import read, recast, select
from .families import FAMILIES, Family
from .families.family import FORWARD, Case
from .host import host
from .measure import Call, GraphTimer, LoopTimer, interleave, keep_memory, peak_bytes
from .progress import Progress
from .schema import VERSION
from .statistics import median, ratio_of_sums, summary
from .verify import Verification
from .yardsticks import Yardsticks

_MOST_BUFFERS = 64
_CPU_BUFFER_BYTES = 1 << 30


@dataclass(frozen=True)
class Options:
    families: tuple[str, ...] = tuple(FAMILIES)
    device: str = ""
    """"cpu" or "cuda". Empty: the GPU if there is one that fusewise can use."""
    size: str = "quick"
    baselines: tuple[str, ...] = ()
    """Empty: all that exist for the device."""
    filter: str | None = None
    cases: Path | None = None
    """A file of cases that replaces the families' own."""
    dtype: str | None = None
    layout: str | None = None
    """The dtype and layout for every case. None: as the case itself says."""
    arguments: tuple[str, ...] = ()
    """The command line, stored with the results."""


@dataclass(frozen=True)
class Effort:
    """How long one row may take: rounds of interleaved samples, and seconds per timer."""

    rounds: int
    budget: float


_EFFORT = {"quick": Effort(15, 0.4), "full": Effort(21, 0.2)}


class Broken(Exception):
    """An unexpected error ended the run. It is the `__cause__`; `results` has the finished rows."""

    def __init__(self, results: dict):
        super().__init__("the benchmark ended with an error")
        self.results = results


def run(options: Options, progress: Progress) -> dict:
    """The results in the form of results.json. After an interrupt, the rows finished so far."""
    options, cases = plan(options)
    results = {
        "schema": VERSION,
        "command": environment.command(list(options.arguments)),
        "environment": environment.describe(options.device),
        "device": options.device,
        "set": options.size,
        "baselines": list(options.baselines),
        "interrupted": False,
        "rows": [],
        "sums": [],
    }
    try:
        _run(options, cases, results, progress)
    except KeyboardInterrupt:
        results["interrupted"] = True
    except Exception as error:
        results["interrupted"] = True
        raise Broken(_ended(results, cases)) from error
    return _ended(results, cases)


def plan(options: Options) -> tuple[Options, list[Case]]:
    """Fills in the open options and selects the cases; raises UsageError if they make no sense."""
    device = usable_device(options.device)
    baselines = options.baselines or default_baselines(device, options.families)
    options = replace(options, device=device, baselines=baselines)
    return options, _cases(options)


def _ended(results: dict, cases: list[Case]) -> dict:
    here = results["environment"]
    here["load"] = max(here["load"], environment.load())  # it may have risen during the run
    results["sums"] = list(sums(results["rows"], cases))
    return results


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
        raise UsageError(
            f"no case of {', '.join(options.families)}{matching} in {where} for {options.device}"
        )
    cases = recast(cases, options.dtype, options.layout)
    if options.device == "cpu" and any(case.tf32 for case in cases):
        raise UsageError("tf32: expected a GPU, got the CPU; use float32 there")
    return cases


def _run(options: Options, cases: list[Case], results: dict, progress: Progress) -> None:
    device = options.device
    if device == "cpu":
        keep_memory()
    progress.start("the machine's own ceilings: copies and matrix products", 1)
    yardsticks = Yardsticks(device, {case.dtype_name for case in cases})
    progress.advance()
    if set(COMPILED).intersection(options.baselines):
        progress.start("torch.compile of every case, in parallel", len(cases))
        for _ in precompile(cases, device, options.baselines):
            progress.advance()
    progress.start("measuring", sum(len(FAMILIES[case.family].modes(case)) for case in cases))
    for case in cases:
        with case.precision():
            for row in _measure(FAMILIES[case.family], case, options, progress):
                _set_rows(results, [*results["rows"], row], yardsticks)
                progress.row(row)
        yardsticks.sample()
        _set_rows(results, results["rows"], yardsticks)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _set_rows(results: dict, rows: list[dict], yardsticks: Yardsticks) -> None:
    """Stores the rows with recomputed floors.

    Done after every row, because a run may be interrupted at any time and the floors must match the
    latest ceilings.
    """
    ceilings = floor.set_floors(rows, yardsticks.ceilings())
    results["rows"] = rows
    results["ceilings"] = {
        "copy_bytes_per_second": ceilings.bytes_per_second,
        "matrix_operations_per_second": ceilings.operations_per_second,
        "raised": ceilings.raised,
    }


def _measure(family, case, options, progress):
    """Yields a row for each mode. The floor's time is filled in once the ceilings are known."""
    device = options.device
    progress.now(f"{case.name}: data and reference")
    buffers = _buffers(family, case, device)
    try:
        workload = family.build(case, device, buffers)
        contenders = functions(workload, options.baselines)
        by_mode = {mode: calls(contenders, workload, mode) for mode in family.modes(case)}
        checks = _check(family, case, workload, by_mode, progress)
    except Exception as error:
        if not _out_of_memory(error):
            raise
        for mode in family.modes(case):
            yield {**_describe(family, case, mode, buffers, device), "failed": "out of memory"}
        return
    for mode, candidates in by_mode.items():
        row = _describe(family, case, mode, buffers, device)
        ours = checks[mode][OURS]
        if isinstance(ours, str):
            yield {**row, "failed": ours}
            continue
        row["check"] = {"tensor": ours.tensor, "error": ours.error, "allowed": ours.allowed}
        row["implementation"] = _implementation(candidates[OURS])
        row["contenders"] = {
            name: {"unavailable": check}
            for name, check in checks[mode].items()
            if isinstance(check, str)
        }
        timed = {
            name: candidates[name]
            for name, check in checks[mode].items()
            if not isinstance(check, str)
        }
        try:
            times = _time(case, mode, timed, workload, device, _EFFORT[options.size], progress)
        except Exception as error:
            if not _out_of_memory(error):
                raise
            del row["contenders"]
            yield {**row, "failed": "out of memory while measuring"}
            continue
        row["contenders"] |= times
        row["against"] = {name: ratios(row, name) for name in times if name != OURS}
        row["host"] = host(row, len(workload.inputs[0]) + len(workload.weights), device)
        yield row


def _out_of_memory(error: Exception) -> bool:
    """On a GPU torch raises its own exception type; on a CPU only the message tells."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def _buffers(family: Family, case: Case, device: str) -> int:
    """Enough buffers to exceed the cache three times, within limits on number and memory."""
    traffic = family.traffic(case, FORWARD)
    touched = traffic.data + traffic.weights
    wanted = math.ceil(3 * floor.cache_bytes(device) / touched)
    if device == "cpu":
        wanted = min(wanted, _CPU_BUFFER_BYTES // touched)
    return max(1, min(wanted, _MOST_BUFFERS))


def _describe(family: Family, case: Case, mode: str, buffers: int, device: str) -> dict:
    traffic = family.traffic(case, mode)
    moved = floor.memory_bytes(traffic, buffers, floor.cache_bytes(device))
    return {
        "family": case.family,
        "case": case.name,
        "mode": mode,
        "shape": list(case.shape),
        "dtype": case.dtype_name,
        "layout": case.layout,
        "parameters": case.extra,
        "group": case.group,
        "count": case.count,
        "floor": {
            "bytes": moved,
            "touched_bytes": traffic.data + traffic.weights,
            "operations": family.operations(case, mode),
        },
        "host": None,
    }


def _check(family, case, workload, by_mode, progress) -> dict[str, dict]:
    """For each mode and contender: the passed check, or the reason why it cannot be timed."""
    verification = Verification(family, case, workload)
    checks: dict[str, dict] = {}
    for mode, candidates in by_mode.items():
        verification.eager(mode)  # a failure here must not be blamed on a baseline
        checks[mode] = {}
        for name, call in candidates.items():
            progress.now(f"{case.name} {mode}: checking {name}")
            if isinstance(call, str):
                checks[mode][name] = call
                continue
            try:
                if name in workload.unchecked:
                    call(0)
                    checks[mode][name] = None
                    continue
                check = verification.check(call, mode, name)
            except Exception as error:  # note in the row that this baseline cannot run, and go on
                if _out_of_memory(error):
                    raise
                checks[mode][name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]
                continue
            checks[mode][name] = check if check.passed else f"WRONG: {check}"
    return checks


def _implementation(call: Call) -> dict[str, dict]:
    """For each direction: the implementation that ran, and why others declined."""
    return {
        record.direction: {
            "chosen": record.chosen,
            "declined": {
                candidate.name: candidate.reason
                for candidate in record.candidates
                if candidate.reason
            },
        }
        for record in fusewise.explain(call, 0)
    }


def _time(case, mode, timed, workload, device, effort, progress) -> dict[str, dict]:
    """Each contender's wall time in µs; on CUDA also its GPU time, peak memory and kernels."""
    found: dict[str, dict] = {name: {} for name in timed}
    buffers = len(workload.inputs)
    progress.now(f"{case.name} {mode}: wall time of {', '.join(timed)}")
    loops = {name: LoopTimer(call, buffers, device) for name, call in timed.items()}
    for name, samples in interleave(loops, effort.rounds, effort.budget).items():
        found[name]["wall"] = summary(samples)
    del loops  # frees the outputs that the timers keep
    if device == "cuda":
        alone = {name: call for name, call in timed.items() if name not in WALL_ONLY}
        for name, call in alone.items():
            found[name]["peak_bytes"] = peak_bytes(call)
        torch.cuda.empty_cache()
        progress.now(f"{case.name} {mode}: GPU time of {', '.join(alone)}")
        graphs = {name: GraphTimer(call, buffers) for name, call in alone.items()}
        for name, samples in interleave(graphs, effort.rounds, effort.budget).items():
            found[name]["gpu"] = summary(samples)
            found[name]["kernels"] = graphs[name].kernels()
    return found


def ratios(row: dict, name: str) -> dict[str, dict]:
    """Our speed-up over a baseline, for each clock that the baseline was timed with."""
    return {
        clock: ratio_of_sums([(1, *_samples(row, name, clock))]).as_dict()
        for clock in _clocks(row, name)
    }


def _clocks(row: dict, name: str) -> list[str]:
    return [clock for clock in ("gpu", "wall") if clock in row["contenders"][name]]


def _samples(row: dict, name: str, clock: str) -> tuple[list[float], list[float]]:
    return tuple(row["contenders"][who][clock]["samples"] for who in (name, OURS))


def sums(rows: list[dict], cases: list[Case]):
    """A row for each group and mode, if every case of the group was measured."""
    for group in dict.fromkeys(case.group for case in cases if case.group):
        members = {case.name for case in cases if case.group == group}
        for mode in dict.fromkeys(row["mode"] for row in rows):
            parts = [
                row
                for row in rows
                if row["case"] in members and row["mode"] == mode and "against" in row
            ]
            if len(parts) == len(members):
                yield _sum(group, mode, parts)


def _sum(group: str, mode: str, parts: list[dict]) -> dict:
    def total(name: str, clock: str) -> float:
        return sum(
            row["count"] * median(row["contenders"][name][clock]["samples"]) for row in parts
        )

    clocks = _clocks(parts[0], OURS)
    names = [
        name
        for name in parts[0]["against"]
        if all(clock in row["against"].get(name, {}) for row in parts for clock in clocks)
    ]
    return {
        "group": group,
        "mode": mode,
        "cases": len(parts),
        "count": sum(row["count"] for row in parts),
        "floor": {
            key: sum(row["count"] * row["floor"][key] for row in parts)
            for key in ("bytes", "operations", "us")
        },
        "contenders": {
            name: {clock: {"median": total(name, clock)} for clock in clocks}
            for name in (OURS, *names)
        },
        "against": {
            name: {
                clock: ratio_of_sums(
                    [(row["count"], *_samples(row, name, clock)) for row in parts]
                ).as_dict()
                for clock in clocks
            }
            for name in names
        },
    }


def _cuda_missing() -> str | None:
    """Why a GPU cannot be used for measuring, or None."""
    from fusewise._ops import CUDA_MISSING

    if CUDA_MISSING:
        return CUDA_MISSING
    return None if torch.cuda.is_available() else "no GPU was found"
