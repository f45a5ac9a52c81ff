"""Builds, tests, sanitizes, fuzzes and measures on a GPU, in parts.

    python3 tools/gpu.py [PART ...] [--again] [--commit NAME] [--bench "ARGUMENTS"]
    python3 tools/gpu.py --list
    python3 tools/gpu.py --summary [FOLDER ...]

Without parts it runs all of them, but for the sweep over many models, and writes the summary. It
first builds what is missing. Then all tests run beside each other, then the sanitizers, then one
benchmark after the other. A part that has passed with the same sources is skipped, unless --again
is given. The result of a part is gpu-results/parts/PART.json. Its logs, and the benchmark's output,
are in PART.tar.gz next to it. If a part fails, the failure is recorded and the next part runs; any
failure makes the exit code 1. A sweep that takes longer than a part may has failed as incomplete;
the part's next run goes on.
Nothing is installed. The summary covers all result files in the folders, by default those in
gpu-results/parts. It is meant for docs/results/.
"""

import argparse
import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import gpu_parts
from gpu_parts import ROOT, Job, Part
from gpu_records import (
    SLOWEST,
    Failure,
    Record,
    Step,
    Tests,
    counted,
    last_lines,
    print_failures,
    read_records,
    read_tests,
    state,
    summary,
)

OUT = ROOT / "gpu-results"
SECONDS = 480  # limit for one job of a part
PROCESSES = os.cpu_count() or 1  # at once; most of a test's time is Python on one core
LARGE_JOBS = threading.Lock()
NO_TESTS = 5  # pytest's exit code if a share has no tests
# The first CMake on the path may be an old one of the system. Prefer the one next to this Python.
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")])
    ),
}


def run(
    job: Job, log: Path, timeout: float, show: bool, part: str, **environment
) -> tuple[int, Step]:
    """Runs a command; writes its output to `log` and, with `show`, to the screen.

    Returns the exit code and the step's result.
    """
    print(f"=== {part}, {job.step}: {' '.join(map(str, job.command))}", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(
        list(map(str, job.command)),
        cwd=ROOT,
        env=ENVIRONMENT | job.environment | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a timeout also ends the children
    )
    stopped = threading.Event()

    def stop():
        stopped.set()
        # On the first SIGINT the benchmark saves the results that it has.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, stop)
    timer.start()
    try:
        with log.open("w") as file:
            for line in process.stdout:
                file.write(line)
                if show:
                    print(line, end="", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:  # interrupted
            os.killpg(process.pid, signal.SIGKILL)
    detail = f"stopped after {timeout:.0f} s" if stopped.is_set() else f"exit code {code}"
    text = log.read_text()
    if job.found and (found := re.findall(job.found, text)):
        detail += f", {found[-1]}"
    if problem := job.problem(text):
        detail += f", {problem}"
    passed = code == 0 and not stopped.is_set() and not problem
    return code, Step(job.step, passed, round(time.monotonic() - begin, 1), detail)


@contextmanager
def shared_gpu():
    """Starts the multi-process service (MPS); yields the environment that the tests need for it.

    Without MPS a GPU serves one process at a time, in slices of milliseconds, and ten processes
    mostly wait.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        environment = dict.fromkeys(names, folder)
        if (
            not control
            or subprocess.run([control, "-d"], env=ENVIRONMENT | environment).returncode != 0
        ):
            print("CUDA MPS could not be started; the tests take longer")
            yield {}
            return
        try:
            yield environment
        finally:
            subprocess.run([control], env=ENVIRONMENT | environment, input="quit\n", text=True)


def build(out: Path) -> tuple[list[Step], list[Failure]]:
    configure = ["cmake", "--preset", "dev", "-DFUSEWISE_CUDA=ON"]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    steps = []
    for name, command in (
        ("configure", configure),
        ("build", ["cmake", "--build", "--preset", "dev"]),
    ):
        log = out / f"{name}.log"
        steps.append(run(Job(name, command), log, SECONDS / 2, True, "build")[1])
        if not steps[-1].passed:
            return steps, [Failure(name, last_lines(log.read_text()))]
    return steps, []


def run_stage(stage: str, parts: list[Part], arguments: str, again: bool) -> Iterator[Record]:
    """Runs the parts of a stage, whose jobs share the machine; yields a record as a part ends."""
    shared = shared_gpu() if stage == gpu_parts.TESTS else nullcontext({})
    at_once = 1 if stage == gpu_parts.ALONE else len(parts)
    jobs = ThreadPoolExecutor(PROCESSES)
    with shared as environment, jobs, ThreadPoolExecutor(at_once) as pool:
        running = [
            pool.submit(run_part, part, arguments, again, jobs, environment) for part in parts
        ]
        yield from (done.result() for done in as_completed(running))


def run_jobs(
    part: Part, out: Path, arguments: str, pool: ThreadPoolExecutor, environment: dict
) -> tuple[list[Step], Tests]:
    """Runs the jobs of a part in the pool."""

    def one(job: Job) -> tuple[Step, Tests | None]:
        log = out / f"{job.step}.log"
        with LARGE_JOBS if job.large else nullcontext():
            show = part.stage == gpu_parts.ALONE
            code, step = run(job, log, SECONDS, show, part.name, **environment)
        found = read_tests(out / f"{job.step}.xml")
        if found is not None:
            step.passed |= code == NO_TESTS and not found.counts
            counts = counted(found.counts)
            step.detail = counts if step.passed else f"{step.detail}, {counts}"
        return step, found

    steps, tests = [], Tests()
    for step, found in pool.map(one, part.jobs(out, arguments)):
        steps.append(step)
        if found is not None:
            tests.add(found)
        if not step.passed and not (found and found.failures):
            ended = last_lines((out / f"{step.step}.log").read_text())
            tests.failures.append(Failure(step.step, f"{step.detail}\n{ended}"))
    if list(out.glob("*.xml")) and not tests.counts["passed"] and not tests.failures:
        tests.failures.append(Failure(part.name, f"no test ran: {counted(tests.counts)}"))
    return steps, tests


def run_part(
    part: Part, arguments: str, again: bool, pool: ThreadPoolExecutor, environment: dict
) -> Record:
    out = OUT / part.name
    if again or not part.resumes:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    tests = Tests()
    if part.name == "build":
        steps, tests.failures = build(out)
    elif missing := gpu_parts.missing_tool(part):
        steps, tests.failures = [], [Failure(part.name, missing)]
    else:
        steps, tests = run_jobs(part, out, arguments, pool, environment)
    machine = {} if part.name == "build" else describe()
    written = out / "bench" / "summary.md"
    record = Record(
        part=part.name,
        passed=not tests.failures and all(step.passed for step in steps),
        seconds=round(sum(step.seconds for step in steps), 1),
        finished=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
        commit=machine.get("commit") or commit(),
        digest=gpu_parts.digest(part),
        arguments=arguments if part.name.startswith("bench-") else "",
        environment=machine,
        steps=steps,
        counts=dict(tests.counts),
        skipped=dict(tests.skipped),
        slowest=sorted(tests.seconds.items(), key=lambda e: -e[1])[:SLOWEST],
        failures=tests.failures,
        text=written.read_text() if written.is_file() else "",
    )
    with tarfile.open(archive(part.name), "w:gz") as tar:
        tar.add(out, part.name)
    return record


def archive(name: str) -> Path:
    (OUT / "parts").mkdir(parents=True, exist_ok=True)
    return OUT / "parts" / f"{name}.tar.gz"


@functools.cache
def describe() -> dict:
    """The machine; raises SystemExit if it has no GPU that torch can use."""
    program = (
        "import json; from fusewise.bench.environment import describe;"
        "print(json.dumps(describe('cuda')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(
            f"gpu: fusewise or the GPU cannot be used on this machine: {done.stderr.strip()[-600:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def commit() -> str:
    """The commit, for the case that the library, which could tell it, is not built."""
    if named := ENVIRONMENT.get("FUSEWISE_COMMIT"):
        return named
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


@contextmanager
def one_at_a_time():
    """Runs with different parts may share a tree, but not its build."""
    OUT.mkdir(exist_ok=True)
    with (OUT / "build.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_parts(parts: list[Part], again: bool, arguments: str) -> bool:
    """Whether all parts passed: now, or earlier with the same sources."""
    known = read_records([OUT / "parts"])
    done = []

    def passed_before(part: Part) -> bool:
        benchmarks = arguments if part.name.startswith("bench-") else ""
        return state(known.get(part.name), gpu_parts.digest(part), benchmarks) == "passed"

    def run_all(stage: str, members: list[Part]) -> None:
        for record in run_stage(stage, members, arguments, again):
            # A build that had nothing to do keeps the record, and the time, of the real build.
            if record.part != "build" or not (record.passed and passed_before(builds)):
                record.write(OUT / "parts" / f"{record.part}.json")
            print(told(record), flush=True)
            done.append(record)

    builds = gpu_parts.all_parts()["build"]
    with one_at_a_time():
        run_all(gpu_parts.ALONE, [builds])
    left = []
    if done[0].passed:
        describe()
        for part in parts:
            if part is not builds and passed_before(part) and not again:
                print(f"{part.name}: passed already for these sources; AGAIN=1 runs it again")
            elif part.name != "build":
                left.append(part)
    for stage in (gpu_parts.TESTS, gpu_parts.SANITIZED, gpu_parts.ALONE):
        if members := [part for part in left if part.stage == stage]:
            run_all(stage, members)
    print_failures(done)
    print()
    for record in done:
        print(told(record))
    return all(record.passed for record in done)


def told(record: Record) -> str:
    counts = counted(record.counts) if record.counts else ""
    word = "passed" if record.passed else "FAILED"
    return f"{record.part}: {word}, {record.seconds:.0f} s {counts}".rstrip()


def list_parts() -> None:
    """Lists the parts and how long each last took, here or according to a stored summary."""
    records = read_records([OUT / "parts"])
    kept = {}
    for path in sorted((ROOT / "docs" / "results").glob("*/parts.json")):
        kept |= json.loads(path.read_text())
    for name, part in gpu_parts.all_parts().items():
        record = records.get(name)
        seconds = record.seconds if record else kept.get(name, {}).get("seconds")
        took = f"{seconds:4.0f} s" if seconds is not None else "   ? s"
        word = state(record, gpu_parts.digest(part)) if record else ""
        print(f"{name:24} {took}  {word}".rstrip())


def write_summary(folders: list[Path]) -> bool:
    """Writes summary.md, and parts.json with the figures that `list_parts` reads."""
    records = read_records(folders)
    digests = {
        name: gpu_parts.digest(part)
        for name, part in gpu_parts.all_parts().items()
        if name in records or not part.asked
    }
    good, page = summary(records, digests)
    OUT.mkdir(exist_ok=True)
    (OUT / "summary.md").write_text(page)
    figures = {
        name: {key: asdict(record)[key] for key in ("passed", "seconds", "commit", "digest")}
        for name, record in records.items()
    }
    (OUT / "parts.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(page)
    print(f"written to {OUT.name}/summary.md and parts.json")
    return good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="PART", help="parts to run (default: all, then the summary)"
    )
    parser.add_argument("--list", action="store_true", help="list the parts and how long they take")
    parser.add_argument(
        "--summary", action="store_true", help="run nothing; summarise the records in these folders"
    )
    parser.add_argument("--again", action="store_true", help="also run parts that passed already")
    parser.add_argument("--commit", help="name of the tested commit, if git cannot tell")
    parser.add_argument("--bench", default="", help="arguments for the benchmark, as one string")
    options = parser.parse_args(arguments)
    if options.commit:
        ENVIRONMENT["FUSEWISE_COMMIT"] = options.commit
    if options.list:
        list_parts()
        return 0
    if options.summary:
        return int(not write_summary([Path(name) for name in options.names] or [OUT / "parts"]))
    parts = gpu_parts.all_parts()
    if unknown := [name for name in options.names if name not in parts]:
        parser.error(f"unknown part {unknown[0]}; there are: {', '.join(parts)}")
    chosen = [
        part
        for name, part in parts.items()
        if name in options.names or not (options.names or part.asked)
    ]
    good = run_parts(chosen, options.again, options.bench)
    if not options.names:
        good &= write_summary([OUT / "parts"])
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
