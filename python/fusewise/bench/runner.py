"""Runs the cases one after the other: first the correctness check, then the timing."""

import gc
import math
import time
from pathlib import Path

import torch

import fusewise

from . import environment, floor, schema, zoo
from .baselines import COMPILED, OURS, WALL_ONLY, calls, functions, precompile
from .families import FAMILIES, Family
from .families.family import FORWARD, Case
from .host import host
from .measure import Call, GraphTimer, LoopTimer, interleave, keep_memory, peak_bytes
from .progress import Progress
from .resume import kept_rows, left, modes
from .statistics import median, ratio_of_sums, summary
from .tasks import Options, Task, plan
from .verify import Verification
from .yardsticks import Yardsticks

_MOST_BUFFERS = 64
_CPU_BUFFER_BYTES = 1 << 30
_SAVE_SECONDS = 20
_YARDSTICK_SECONDS = 5  # between samples of the yardsticks


class Broken(Exception):
    """An unexpected error ended the run. It is the `__cause__`; `results` has the finished rows."""

    def __init__(self, results: dict):
        super().__init__("the benchmark ended with an error")
        self.results = results


def run(options: Options, progress: Progress, folder: Path | None = None) -> dict:
    """The results in the form of results.json. After an interrupt, the rows finished so far.

    With a folder, the run goes on with the rows of its results.json, and saves its own there now
    and then.
    """
    options, tasks = plan(options)
    results = {
        "schema": schema.VERSION,
        "command": environment.command(list(options.arguments)),
        "environment": environment.describe(options.device),
        "device": options.device,
        "set": options.size,
        "baselines": list(options.baselines),
        "interrupted": False,
        "rows": [],
        "sums": [],
    }
    saved = folder / "results.json" if folder else None
    if saved:
        results["rows"] = kept_rows(saved, results, tasks)
    try:
        _run(options, tasks, results, progress, saved)
    except KeyboardInterrupt:
        results["interrupted"] = True
    except Exception as error:
        results["interrupted"] = True
        raise Broken(_ended(results, tasks)) from error
    finally:
        gc.unfreeze()
    return _ended(results, tasks)


def _ended(results: dict, tasks: list[Task]) -> dict:
    here = results["environment"]
    here["load"] = max(here["load"], environment.load())  # it may have risen during the run
    results["sums"] = list(sums(results["rows"], [task.case for task in tasks]))
    if results["set"] == "zoo":
        results["models"] = zoo.means(results["rows"])
        results["left"] = len(left(tasks, results["rows"]))
    return results


def _run(
    options: Options, tasks: list[Task], results: dict, progress: Progress, saved: Path | None
) -> None:
    device, begin = options.device, time.monotonic()
    if device == "cpu":
        keep_memory()
    progress.start("the machine's own ceilings: copies and matrix products", 1)
    dtypes = {task.case.dtype_name for task in tasks} | {row["dtype"] for row in results["rows"]}
    yardsticks = Yardsticks(device, dtypes)
    progress.advance()
    if earlier := len(results["rows"]):
        _set_rows(results, results["rows"], yardsticks)
    tasks = left(tasks, results["rows"])
    if compiled := [task.case for task in tasks if set(COMPILED).intersection(task.baselines)]:
        progress.start("torch.compile of every case, in parallel", len(compiled))
        for _ in precompile(compiled, device, options.baselines):
            progress.advance()
    what = f"measuring; {earlier} rows were measured before" if earlier else "measuring"
    progress.start(what, sum(len(modes(task)) for task in tasks))
    save, sample = time.monotonic() + _SAVE_SECONDS, 0.0
    for task in tasks:
        with task.case.precision():
            for row in _measure(FAMILIES[task.case.family], task, device, progress):
                _set_rows(results, [*results["rows"], row], yardsticks)
                progress.row(row)
        if time.monotonic() > sample:
            yardsticks.sample()
            sample = time.monotonic() + _YARDSTICK_SECONDS
        _set_rows(results, results["rows"], yardsticks)
        if saved and time.monotonic() > save:
            schema.write(results, saved)
            save = time.monotonic() + _SAVE_SECONDS
        gc.collect()
        gc.freeze()  # the next collection only looks at what the next case makes
        if device == "cuda":
            torch.cuda.empty_cache()
        if options.minutes and time.monotonic() - begin > 60 * options.minutes:
            break


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


def _measure(family, task, device, progress):
    """Yields a row for each mode. The floor's time is filled in once the ceilings are known."""
    case = task.case
    progress.now(f"{case.name}: data and reference")
    buffers = _buffers(family, case, device)
    try:
        workload = family.build(case, device, buffers)
        contenders = functions(workload, task.baselines)
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
            times = _time(case, mode, timed, workload, device, task.effort, progress)
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
        **({"models": case.models} if case.models else {}),
        **({"held_out": True} if case.held_out else {}),
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
    if device == "cpu" or effort.wall:
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
