"""Builds, tests, sanitizes and measures on a GPU, and writes what happened to gpu-results/.

    python3 tools/gpu.py [build] [test] [sanitize] [bench] [--bench "ARGUMENTS"]

Without steps all four, in that order; tests and sanitizers run side by side, as nothing is timed
there. A step that fails is recorded and the next one runs; any failure makes the exit code 1.
Installs nothing. summary.md is meant for docs/results/.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "gpu-results"
CTEST_BINARY = ROOT / "build" / "dev" / "tests" / "cpp" / "fusewise_tests"
# The first CMake on the path may be a system's old one; one beside this Python is ours.
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")])
    ),
}
SHARES = 12  # of the Python tests, side by side
SANITIZERS = ("memcheck", "racecheck", "synccheck")


@dataclass
class Outcome:
    step: str
    passed: bool
    seconds: float
    detail: str


def run(step: str, command: list, timeout: int, show: bool = True, **environment) -> Outcome:
    """Runs a command with its output in gpu-results/<step>.log and, where `show`, on the screen."""
    print(f"\n=== {step}: {' '.join(map(str, command))}", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a timeout ends the children too
    )

    def stop():
        # The benchmark keeps what it has on the first of them.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, stop)
    timer.start()
    try:
        with (OUT / f"{step}.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                if show:
                    print(line, end="", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:  # interrupted
            os.killpg(process.pid, signal.SIGKILL)
    seconds = round(time.monotonic() - begin, 1)
    detail = f"stopped after {timeout} s" if seconds >= timeout else f"exit code {code}"
    return Outcome(step, code == 0, seconds, detail)


def build() -> list[Outcome]:
    configure = run(
        "configure",
        ["cmake", "--preset", "dev", "-DFUSEWISE_CUDA=ON", f"-DPython_EXECUTABLE={sys.executable}"],
        timeout=60,
    )
    if not configure.passed:
        return [configure]
    return [configure, run("build", ["cmake", "--build", "--preset", "dev"], timeout=240)]


@contextmanager
def shared_gpu():
    """What the tests' processes get in their environment. Without the multi-process service, a GPU
    serves one process at a time, for milliseconds each, and ten of them mostly wait."""
    control = shutil.which("nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        environment = dict.fromkeys(names, folder)
        if (
            not control
            or subprocess.run([control, "-d"], env=ENVIRONMENT | environment).returncode != 0
        ):
            print("the multi-process service does not run: tests take longer")
            yield {}
            return
        try:
            yield environment
        finally:
            subprocess.run([control], env=ENVIRONMENT | environment, input="quit\n", text=True)


def test(**environment) -> list[Callable[[], Outcome]]:
    ctest = ["ctest", "--preset", "dev", "-j", "4", "--output-junit", OUT / "ctest.xml"]
    pytest = [sys.executable, "-m", "pytest", "-q", "--device=cuda"]

    def counted(step: str, command: list) -> Outcome:
        # Several at once: with all cores each, they would only wait for each other.
        threads = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        outcome = run(step, command, timeout=400, show=False, **threads, **environment)
        outcome.detail = count_tests(OUT / f"{step}.xml") or outcome.detail
        return outcome

    def python_tests(step: str, which: list) -> Callable[[], Outcome]:
        return lambda: counted(step, [*pytest, *which, f"--junitxml={OUT / f'{step}.xml'}"])

    # Those of tests/gpu need most of the memory, so they run one after the other.
    return [
        lambda: counted("ctest", ctest),
        *(
            python_tests(f"pytest-{i}", ["tests/python", f"--share={i}/{SHARES}"])
            for i in range(SHARES)
        ),
        python_tests("pytest-gpu", ["tests/gpu"]),
    ]


def count_tests(junit: Path) -> str | None:
    """ "120 passed, 3 skipped, 0 failed", or None where there is no report."""
    if not junit.is_file():
        return None
    cases = list(ET.parse(junit).getroot().iter("testcase"))
    failed = sum(
        case.find("failure") is not None
        or case.find("error") is not None
        or case.get("status") == "fail"
        for case in cases
    )
    skipped = sum(case.find("skipped") is not None for case in cases)
    return f"{len(cases) - failed - skipped} passed, {skipped} skipped, {failed} failed"


def sanitize() -> list[Callable[[], Outcome]]:
    """Every checker over a short list of Python calls, and over the C++ tests made for it."""
    if shutil.which("compute-sanitizer") is None:
        missing = Outcome("sanitize", False, 0, "compute-sanitizer is not on the path")
        return [lambda: missing]
    programs = {
        family: [sys.executable, "tools/sanitizer_calls.py", family]
        for family in ("squeeze_excite", "linear_act", "autoencoder")
    }
    if CTEST_BINARY.is_file():
        programs["cpp"] = [CTEST_BINARY, "--gtest_filter=*Cuda*Short*"]

    def check(tool: str, name: str) -> Outcome:
        checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        # With its cache, torch hands out pieces of large blocks, and nothing is out of bounds.
        uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        step = f"{tool}-{name}"
        outcome = run(step, [*checker, *programs[name]], timeout=400, show=False, **uncached)
        found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", (OUT / f"{step}.log").read_text())
        outcome.detail += f", {found[-1] if found else 'no summary'}"
        return outcome

    jobs = [(tool, name) for tool in SANITIZERS for name in programs]
    return [partial(check, tool, name) for tool, name in jobs]


def side_by_side(jobs: list[Callable[[], Outcome]]) -> list[Outcome]:
    with ThreadPoolExecutor(max(len(jobs), 1)) as pool:
        outcomes = list(pool.map(lambda job: job(), jobs))
    for outcome in outcomes:
        log = OUT / f"{outcome.step}.log"
        if not outcome.passed and log.is_file():
            print(f"\n=== {outcome.step} failed:\n{log.read_text()[-4000:]}")
    return outcomes


def bench(arguments: str) -> Outcome:
    command = [sys.executable, "-m", "fusewise", "bench", "--full", "--device", "cuda"]
    out = OUT.relative_to(ROOT) / "bench"
    return run("bench", [*command, *arguments.split(), "--out", out], timeout=420)


STEPS = ("build", "test", "sanitize", "bench")


def summarize(steps: list[str], bench_arguments: str, outcomes: list[Outcome]) -> None:
    described = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json; from fusewise.bench.environment import describe;"
            "print(json.dumps(describe('cuda')))",
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    environment = json.loads(described.stdout) if described.returncode == 0 else {}
    command = "make gpu"
    if steps != list(STEPS):
        command += f' STEPS="{" ".join(steps)}"'
    if bench_arguments:
        command += f' ARGS="{bench_arguments}"'
    results = OUT / "bench" / "results.json"
    measured = "bench" in steps and results.is_file()
    summary = {
        "command": command,
        "environment": environment,
        "passed": all(outcome.passed for outcome in outcomes),
        "steps": [asdict(outcome) for outcome in outcomes],
        "bench": json.loads(results.read_text()) if measured else None,
    }
    (OUT / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

    lines = [f"# `{command}`: {'passed' if summary['passed'] else 'FAILED'}", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines += ["", "| step | | seconds | |", "| --- | --- | ---: | --- |"]
    lines += [
        f"| {o.step} | {'passed' if o.passed else 'FAILED'} | {o.seconds} | {o.detail} |"
        for o in outcomes
    ]
    lines.append("")
    if measured:
        lines.append((OUT / "bench" / "summary.md").read_text().replace("# ", "## "))
    (OUT / "summary.md").write_text("\n".join(lines))
    print("\n" + "\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--bench", default="", help="arguments of the benchmark, as one string")
    options = parser.parse_args()
    unknown = [step for step in options.steps if step not in STEPS]
    if unknown:
        parser.error(f"unknown step {unknown[0]}; there are: {', '.join(STEPS)}")
    steps = [step for step in STEPS if step in options.steps] or list(STEPS)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    outcomes: list[Outcome] = []
    try:
        if "build" in steps:
            outcomes += build()
        with shared_gpu() if "test" in steps else nullcontext() as environment:
            jobs = test(**environment) if "test" in steps else []
            jobs += sanitize() if "sanitize" in steps else []
            outcomes += side_by_side(jobs)
        if "bench" in steps:
            outcomes.append(bench(options.bench))
    finally:
        summarize(steps, options.bench, outcomes)
    return int(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
