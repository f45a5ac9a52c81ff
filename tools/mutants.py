"""Plants the small bugs of tests/mutants.json, one at a time, and runs the test that must see each.

    python3 tools/mutants.py [PATTERN ...] [--jobs N] [--list] [--resume]

Works in scratch copies of the tree under build/mutants, one per job, built for the CPU only. After
the first build they are built incrementally. PATTERN selects mutants by a part of their name,
family or file. The exit code is 1 if a mutant survives or does not build, or if its test fails
without it. Writes build/mutants/summary.md. --resume skips the mutants that an earlier run on the
same tree has killed.
"""

import argparse
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = "tests/mutants.json"
OUT = ROOT / "build" / "mutants"
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*-results", "__pycache__", ".*_cache", ".hypothesis", "*.so"
)
COMPILED = (".cpp", ".h")
CHUNK = 4  # mutants of one file that a job takes at once, so that only this file is recompiled
PYTEST_FAILED, PYTEST_NOTHING = 1, 5  # exit codes
BUILD_SECONDS, TEST_SECONDS, ALL_TESTS_SECONDS = 600, 180, 1200

KILLED_TABLE = "| mutant | family | seconds | killed by |"
KILLED, SURVIVED, BROKEN, NOT_RUN = "killed", "survived", "broken", "not run"


@dataclass(frozen=True)
class Mutant:
    """One small bug.

    `test` is `test_file.py::test_name` of tests/python, or `Suite.Name` of the C++ tests. `needs`
    is a flag of /proc/cpuinfo; on a CPU without it the mutated code never runs.
    """

    name: str
    family: str
    file: str
    before: str
    after: str
    test: str
    needs: str = ""

    @property
    def compiled(self) -> bool:
        return self.file.endswith(COMPILED)

    @property
    def by_pytest(self) -> bool:
        return ".py" in self.test


@dataclass
class Outcome:
    mutant: Mutant
    verdict: str
    seconds: float
    detail: str = ""


def read_list(root: Path = ROOT) -> list[Mutant]:
    return [Mutant(**entry) for entry in json.loads((root / LIST).read_text())]


# --- the list itself ----------------------------------------------------------------------------


def problems(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with the entries: each with its name and what to do."""
    found = [
        f"{name}: the name appears {count} times, expected once"
        for name, count in Counter(mutant.name for mutant in mutants).items()
        if count > 1
    ]
    for mutant in mutants:
        path = root / mutant.file
        count = path.read_text().count(mutant.before) if path.is_file() else -1
        if count != 1:
            said = f"{mutant.before!r} appears {count} times, expected once"
            if count < 0:
                said = "there is no such file"
            found.append(f"{mutant.name}: {mutant.file}: {said}; correct the entry")
        if mutant.before == mutant.after:
            found.append(f"{mutant.name}: changes nothing")
        if not _test_exists(mutant, root):
            found.append(f"{mutant.name}: there is no test {mutant.test}")
    return found


def _test_exists(mutant: Mutant, root: Path) -> bool:
    if mutant.by_pytest:
        file, _, name = mutant.test.partition("::")
        name = re.escape(name.partition("[")[0])
        path = root / "tests" / "python" / file
        return path.is_file() and bool(re.search(rf"^def {name}\(", path.read_text(), re.M))
    suite, _, name = map(re.escape, mutant.test.partition("."))
    pattern = re.compile(rf"^TEST(_P|_F)?\({suite},\s+{name}\)", re.M)
    return any(pattern.search(path.read_text()) for path in (root / "tests" / "cpp").glob("*.cpp"))


def reason_not_to_run(mutant: Mutant, flags: set[str], gtest: bool) -> str:
    if mutant.needs and mutant.needs not in flags:
        return f"this CPU has no {mutant.needs}"
    return "" if gtest or mutant.by_pytest else "GoogleTest was not found"


# --- scratch copies -----------------------------------------------------------------------------


class Scratch:
    """A copy of the tree with its own build."""

    def __init__(self, number: int, cores: int):
        self.folder = OUT / f"job-{number}"
        self._build = self.folder / "build" / "dev"
        self._cores = cores
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(self.folder / "python"), os.environ.get("PYTHONPATH")])
            ),
            # Python trusts a cached .pyc by the source's size and time, which two mutants may
            # share.
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GTEST_BRIEF": "1",
            "GTEST_FAIL_FAST": "1",
            # With these, ccache recognises the same sources in another copy.
            "CCACHE_BASEDIR": str(self.folder),
            "CCACHE_NOHASHDIR": "1",
        }

    def prepare(self, cores: int | None = None) -> str:
        """Copies and builds, on `cores` cores; returns the error output, or '' on success."""
        self._copy()
        define = ["-DFUSEWISE_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
        code, said = self._run(["cmake", "--preset", "dev", *define], BUILD_SECONDS)
        tests = ["fusewise_tests"] * self.has_gtest()
        for target in ("fusewise_torch", "fusewise_naive_cpu", *tests):
            if code == 0:
                code, said = self._make(target, cores)
        return "" if code == 0 else said

    def has_gtest(self) -> bool:
        return "SKIPPED" not in (self.folder / "build" / "configured.log").read_text()

    def try_out(self, mutant: Mutant) -> tuple[str, str]:
        path = self.folder / mutant.file
        original = path.read_text()
        try:
            path.write_text(original.replace(mutant.before, mutant.after))
            if mutant.compiled:
                target = "fusewise_torch" if mutant.by_pytest else "fusewise_tests"
                code, said = self._make(target)
                if code != 0:
                    return BROKEN, f"does not build: {said}"
            return self._verdict(mutant)
        finally:
            path.write_text(original)

    def _verdict(self, mutant: Mutant) -> tuple[str, str]:
        code, said = self.test([mutant.test], TEST_SECONDS)
        if code == 0:
            return SURVIVED, f"{mutant.test} passes"
        if code is None:
            return KILLED, f"did not end within {TEST_SECONDS} s"
        if code < 0:
            return KILLED, signal.Signals(-code).name
        if mutant.by_pytest and code != PYTEST_FAILED:
            return BROKEN, f"{mutant.test} cannot be run: {said}"
        return KILLED, ""

    def test(self, tests: list[str], timeout: int) -> tuple[int | None, str]:
        """Runs tests of one kind, pytest or GoogleTest."""
        if ".py" in tests[0]:
            paths = [f"tests/python/{test}" for test in tests]
            options = ["-x", "-q", "-p", "no:cacheprovider", "--device=cpu"]
            return self._run([sys.executable, "-m", "pytest", *options, *paths], timeout)
        program = self._build / "tests" / "cpp" / "fusewise_tests"
        wanted = ":".join(f"{test}:*/{test}/*" for test in tests)  # plain or parametrised
        return self._run([program, f"--gtest_filter={wanted}"], timeout)

    def _copy(self) -> None:
        """Writes only files that differ, so that only these are newer than what was built."""
        fresh = self.folder.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(ROOT, fresh, ignore=NOT_COPIED)
        wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
        for relative in wanted:
            path, content = self.folder / relative, (fresh / relative).read_bytes()
            if not path.is_file() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod((fresh / relative).stat().st_mode)
        for path in self.folder.rglob("*"):
            relative = path.relative_to(self.folder)
            ours = relative.parts[0] == "build" or path.suffix == ".so"
            if path.is_file() and relative not in wanted and not ours:
                path.unlink()
        shutil.rmtree(fresh)

    def _make(self, target: str, cores: int | None = None) -> tuple[int | None, str]:
        command = ["cmake", "--build", "--preset", "dev", "-j", cores or self._cores, "--target"]
        return self._run([*command, target], BUILD_SECONDS)

    def _run(self, command: list, timeout: int) -> tuple[int | None, str]:
        """The exit code, or None after a timeout, and the end of the output."""
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that a timeout also ends the children
        )
        try:
            said, _ = process.communicate(timeout=timeout)
            if command[:2] == ["cmake", "--preset"]:
                (self.folder / "build").mkdir(exist_ok=True)
                (self.folder / "build" / "configured.log").write_text(said)
            return process.returncode, said[-1500:]
        except subprocess.TimeoutExpired:
            return None, f"did not end within {timeout} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# --- the run ------------------------------------------------------------------------------------


def prepare(jobs: int) -> list[Scratch]:
    """With ccache, the first copy is built alone on all cores; the others reuse its objects."""
    cores = len(os.sched_getaffinity(0))
    copies = [Scratch(number, max(1, cores // jobs)) for number in range(jobs)]
    alone = 1 if shutil.which("ccache") else 0
    failures = [copy.prepare(cores) for copy in copies[:alone]]
    with ThreadPoolExecutor(jobs) as pool:
        failures += pool.map(Scratch.prepare, copies[alone:])
    for failure in filter(None, failures):
        raise SystemExit(f"the tree does not build even without a bug:\n{failure}")
    return copies


def check_tests(copies: list[Scratch], mutants: list[Mutant]) -> dict[str, tuple[str, str]]:
    """The tests that cannot judge a mutant, with the reason: each test must pass without a bug."""
    by_file: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        file = mutant.test.partition("::")[0] if mutant.by_pytest else ""
        by_file.setdefault(file, {})[mutant.test] = None
    free: queue.SimpleQueue = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def check(tests: list[str]) -> dict[str, tuple[str, str]]:
        copy = free.get()
        try:
            code, said = copy.test(tests, ALL_TESTS_SECONDS)
        finally:
            free.put(copy)
        if code == 0:
            return {}
        if len(tests) > 1:  # find out which of them failed
            return {name: why for test in tests for name, why in check([test]).items()}
        if code == PYTEST_NOTHING:
            return {tests[0]: (NOT_RUN, "its tests are skipped here")}
        return {tests[0]: (BROKEN, f"{tests[0]} fails without a bug: {said}")}

    with ThreadPoolExecutor(len(copies)) as pool:
        found = pool.map(check, [list(tests) for tests in by_file.values()])
        return {test: why for each in found for test, why in each.items()}


def chunks(mutants: list[Mutant]) -> queue.SimpleQueue:
    """Python files first: after a compiled mutant, the built library no longer fits these."""
    found: queue.SimpleQueue = queue.SimpleQueue()
    ordered = sorted(mutants, key=lambda mutant: (mutant.compiled, mutant.file))
    files = dict.fromkeys(mutant.file for mutant in ordered)
    for file in files:
        own = [mutant for mutant in ordered if mutant.file == file]
        for first in range(0, len(own), CHUNK):
            found.put(own[first : first + CHUNK])
    return found


def run(copies: list[Scratch], mutants: list[Mutant], keep) -> None:
    waiting, lock = chunks(mutants), threading.Lock()
    done = 0

    def work(copy: Scratch) -> None:
        nonlocal done
        while True:
            try:
                chunk = waiting.get_nowait()
            except queue.Empty:
                return
            for mutant in chunk:
                begin = time.monotonic()
                verdict, detail = copy.try_out(mutant)
                seconds = round(time.monotonic() - begin, 1)
                with lock:
                    done += 1
                    keep(Outcome(mutant, verdict, seconds, detail))
                    count = f"{done:{len(str(len(mutants)))}}/{len(mutants)}"
                    shown = "" if verdict == KILLED else f": {detail}"
                    line = f"[{count}] {verdict:8} {seconds:5.1f} s  {mutant.name}{shown}"
                    print(line, flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        for job in [pool.submit(work, copy) for copy in copies]:
            job.result()


def tree_digest() -> str:
    """A hash of everything that a scratch copy contains."""
    digest = hashlib.sha256()

    def walk(folder: Path) -> None:
        names = os.listdir(folder)
        for name in sorted(set(names) - NOT_COPIED(str(folder), names)):
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                walk(path)
            elif path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())

    walk(ROOT)
    return digest.hexdigest()


def killed_before(tree: str) -> set[str]:
    file = OUT / "results.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    if results.get("tree") != tree:
        return set()
    return {each["name"] for each in results["outcomes"] if each["verdict"] == KILLED}


def write(tree: str, outcomes: list[Outcome], seconds: float) -> None:
    results = [
        asdict(o.mutant) | {"verdict": o.verdict, "seconds": o.seconds, "detail": o.detail}
        for o in outcomes
    ]
    text = json.dumps({"tree": tree, "outcomes": results}, indent=1)
    (OUT / "results.json").write_text(text + "\n")
    (OUT / "summary.md").write_text("\n".join(summary(outcomes, seconds)) + "\n")


def summary(outcomes: list[Outcome], seconds: float) -> list[str]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    verdicts = (KILLED, SURVIVED, BROKEN, NOT_RUN)
    lines = ["# Mutants", "", ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts)]
    lines[-1] += f"; {len(outcomes)} in all, {seconds:.0f} s."
    left = [outcome for outcome in outcomes if outcome.verdict != KILLED]
    if left:
        lines += ["", "| not killed | file | why |", "| --- | --- | --- |"]
        for o in left:
            why = " ".join(o.detail.split()).replace("|", "\\|")[-300:]
            lines.append(f"| {o.mutant.name} | {o.mutant.file} | {o.verdict}: {why} |")
    lines += ["", "| family | killed | of |", "| --- | ---: | ---: |"]
    families = Counter(o.mutant.family for o in outcomes)
    dead = Counter(o.mutant.family for o in outcomes if o.verdict == KILLED)
    lines += [f"| {name} | {dead[name]} | {families[name]} |" for name in sorted(families)]
    lines += ["", KILLED_TABLE, "| --- | --- | ---: | --- |"]
    for o in sorted(outcomes, key=lambda o: (o.mutant.family, o.mutant.name)):
        if o.verdict == KILLED:
            by = o.mutant.test + (f" ({o.detail})" if o.detail else "")
            lines.append(f"| {o.mutant.name} | {o.mutant.family} | {o.seconds} | {by} |")
    return lines


def cpu_flags() -> set[str]:
    found = re.search(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN",
        help="run mutants whose name, family or file contains it (default: all)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument(
        "--resume", action="store_true", help="skip mutants that an earlier run killed"
    )
    options = parser.parse_args(arguments)
    mutants = read_list()
    if wrong := problems(mutants):
        parser.error("\n".join([f"{LIST}:", *wrong]))
    if options.patterns:
        mutants = [
            mutant
            for mutant in mutants
            if any(p in f"{mutant.name} {mutant.family} {mutant.file}" for p in options.patterns)
        ]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.family:15} {mutant.name:45} {mutant.file}: {mutant.test}")
        return 0

    begin = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    tree = tree_digest()
    outcomes = []
    known = killed_before(tree) if options.resume else set()
    outcomes += [Outcome(m, KILLED, 0, "in an earlier run") for m in mutants if m.name in known]
    mutants = [mutant for mutant in mutants if mutant.name not in known]

    def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)
        write(tree, outcomes, time.monotonic() - begin)

    if mutants:
        jobs = max(1, min(options.jobs, len(mutants)))
        print(f"building {jobs} copies of the tree", flush=True)
        copies = prepare(jobs)
        print(f"{time.monotonic() - begin:.0f} s; running the tests without a bug", flush=True)
        flags, gtest = cpu_flags(), copies[0].has_gtest()
        left = []
        for mutant in mutants:
            if reason := reason_not_to_run(mutant, flags, gtest):
                keep(Outcome(mutant, NOT_RUN, 0, reason))
            else:
                left.append(mutant)
        unusable = check_tests(copies, left)
        for mutant in left:
            if mutant.test in unusable:
                verdict, detail = unusable[mutant.test]
                keep(Outcome(mutant, verdict, 0, detail))
        left = [mutant for mutant in left if mutant.test not in unusable]
        print(f"{time.monotonic() - begin:.0f} s; {len(left)} mutants", flush=True)
        run(copies, left, keep)
    write(tree, outcomes, time.monotonic() - begin)
    told = "\n".join(summary(outcomes, time.monotonic() - begin)[2:])
    print(f"\n{told.partition(KILLED_TABLE)[0]}\n{(OUT / 'summary.md').relative_to(ROOT)}")
    return int(any(outcome.verdict in (SURVIVED, BROKEN) for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
