"""The parts of `make gpu`: what each part runs, and which source files it tests."""

import hashlib
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARES = 6  # processes for a family's tests in tests/python
GPU_SHARES = 3  # processes for a family's tests in tests/gpu
CPP_SHARES = 5  # processes for each sanitizer of the C++ tests
LARGE = "2_to_the_31"  # these tests take 45 GiB each, so they run one after the other
TESTS, SANITIZED, ALONE = "tests", "sanitized", "alone"  # stages, in this order
SANITIZERS = ("memcheck", "racecheck", "synccheck")
REST = "rest"  # tests that belong to no family


@dataclass(frozen=True)
class Family:
    words: tuple[str, ...]
    """A file with one of these words in its path belongs to the family."""
    bench: tuple[str, ...]
    """Its operators' names in `fusewise bench`, if it has a benchmark there."""
    uses: tuple[str, ...] = ()
    """Families whose files its own sources include."""
    kernels: bool = True
    """Whether it has kernels, for the sanitizers and a benchmark."""


FAMILIES = {
    "squeeze_excite": Family(("squeeze_excit",), ("squeeze_excite",)),
    "linear": Family(("linear", "mlp", "gemm"), ("linear_act", "mlp")),
    "autoencoder": Family(("autoencoder",), ("autoencoder",), uses=("linear",)),
    "batch_norm": Family(("batch_norm",), ("batch_norm_act",)),
    "batch_norm_excite": Family(
        ("batch_norm_excite",), ("batch_norm_excite",), uses=("batch_norm", "squeeze_excite")
    ),
    "linet": Family(
        ("linet", "li_conv", "li_batch_norm", "li_blocks", "li_resnet", "im2col"),
        (),
        uses=("batch_norm", "linear"),
    ),
    "optimize": Family(
        ("optimize", "rewrite"),
        (),
        uses=("squeeze_excite", "linear", "batch_norm", "batch_norm_excite"),
        kernels=False,
    ),
}
FUZZED = (
    "squeeze_excite",
    "linear_act",
    "mlp",
    "autoencoder",
    "batch_norm_act",
    "batch_norm_excite",
)
FUZZ_CALLS = 150
ZOO = "squeeze_excite"  # the family with a sweep over common models
ZOO_MINUTES = 7  # its pieces; the rest of a part's time is for compiling and the report
MODEL_MINUTES = 6  # for `optimize` on whole models, the last of which may take a minute longer


@dataclass(frozen=True)
class Job:
    """One command of a part."""

    step: str
    command: list
    environment: dict = field(default_factory=dict)
    found: str = ""
    """A regular expression for the text of the log that goes into the summary."""
    problem: Callable[[str], str] = lambda log: ""
    """Finds a failure in the log that the exit code does not show."""
    large: bool = False
    """Whether it needs a third of the GPU's memory. One such job runs at a time."""


@dataclass(frozen=True)
class Part:
    name: str
    jobs: Callable[[Path, str], list[Job]]
    """Makes the jobs from the output folder and the arguments of the benchmark."""
    sources: Callable[[], Iterable[Path]]
    stage: str = ALONE
    """Parts of the same stage run at the same time, except in the stage `ALONE`."""
    resumes: bool = False
    """Whether a run goes on with the results of the last one, which was incomplete."""
    asked: bool = False
    """Whether it only runs where it is named."""


def owner(path: Path) -> str | None:
    """The family that a file belongs to; None if it belongs to all of them. The first word in the
    path decides, so a folder counts before the file's name; the longest of words in one place."""
    text = path.relative_to(ROOT).as_posix() if path.is_absolute() else path.as_posix()
    words = ((word, name) for name, family in FAMILIES.items() for word in family.words)
    found = [(text.index(word), -len(word), name) for word, name in words if word in text]
    return min(found, default=(0, 0, None))[-1]


# --- sources --------------------------------------------------------------------------------------

COMPILED = ("CMakeLists.txt", "CMakePresets.json", "cmake", "include", "src", "bindings")
PACKAGE = "python/fusewise"
# The parts of the package that measure and report. Tests of operators do not depend on them.
MEASURING = tuple(f"{PACKAGE}/{name}/" for name in ("bench", "lessons", "profile", "report"))
REFERENCES = (f"{PACKAGE}/bench/accuracy.py", f"{PACKAGE}/bench/families/")


def files(*names: str) -> list[Path]:
    """Files of the source tree, without build products and caches."""
    found = []
    for name in names:
        path = ROOT / name
        found += [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    left = ("__pycache__", "_lib")
    return sorted(p for p in found if not any(part in left for part in p.parts))


def operators(family: str | None = None) -> list[Path]:
    """The sources that compute. With a family, the other families' own files are left out."""
    package = [p for p in files(PACKAGE) if computes(p.relative_to(ROOT).as_posix())]
    return of_family(family, files(*COMPILED) + package)


def computes(path: str) -> bool:
    return not path.startswith(MEASURING) or path.startswith(REFERENCES)


def of_family(family: str | None, paths: list[Path]) -> list[Path]:
    if family is None:
        return paths
    own = (None, family, *FAMILIES[family].uses)
    return [path for path in paths if owner(path) in own]


def test_files(folder: str, family: str) -> list[Path]:
    """The tests of a family, or those that belong to none."""
    wanted = None if family == REST else family
    return [p for p in sorted((ROOT / folder).glob("test_*.py")) if owner(p) == wanted]


def helpers(*folders: str) -> list[Path]:
    """The helper modules that tests share."""
    paths = files("tests/conftest.py", *folders)
    return [p for p in paths if p.suffix == ".py" and not p.name.startswith("test_")]


def digest(part: Part) -> str:
    """A hash of all files that the part tests or runs."""
    hashed = hashlib.sha256()
    for path in sorted(set(part.sources())):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        hashed.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return hashed.hexdigest()[:16]


# --- parts ----------------------------------------------------------------------------------------


def pytest_jobs(paths: list[Path], out: Path, shares: int) -> list[Job]:
    # Several processes run at once. With all cores each, they would only wait for each other.
    threads = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--device=cuda"]
    command += [path.relative_to(ROOT) for path in paths]
    chosen = {f"share-{i}": [f"--share={i}/{shares}"] for i in range(shares)}
    if any(LARGE in path.read_text() for path in paths):
        chosen = {step: [*options, "-k", f"not {LARGE}"] for step, options in chosen.items()}
        chosen["large"] = ["-k", LARGE]
    return [
        Job(
            step,
            [*command, *options, f"--junitxml={out / f'{step}.xml'}"],
            threads,
            large=step == "large",
        )
        for step, options in chosen.items()
    ]


def ctest_jobs(out: Path, _: str) -> list[Job]:
    command = ["ctest", "--preset", "dev", "-j", "4", "--output-junit", out / "ctest.xml"]
    return [Job("ctest", command, {"OMP_NUM_THREADS": "2"})]


def sanitizer_jobs(program: list, shares: int = 1) -> list[Job]:
    """`shares`: processes for each tool, which share the tests of a GoogleTest program."""

    def command(tool):
        checker = ["compute-sanitizer", "--tool", tool]
        if tool != "racecheck":  # not all of its findings are failures
            checker += ["--error-exitcode", "9"]
        return [*checker, *program]

    # torch's caching allocator cuts tensors from large blocks, which would hide out-of-bounds
    # accesses.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    summary = r"(?:ERROR|RACECHECK) SUMMARY: (.*)"
    problems = {"racecheck": own_hazards}
    jobs = []
    for tool, share in itertools.product(SANITIZERS, range(shares)):
        name = tool if shares == 1 else f"{tool}-{share}"
        share_of_tests = {"GTEST_TOTAL_SHARDS": str(shares), "GTEST_SHARD_INDEX": str(share)}
        problem = problems.get(tool, Job.problem)
        jobs.append(Job(name, command(tool), uncached | share_of_tests, summary, problem))
    return jobs


def own_hazards(log: str) -> str:
    """The hazards that racecheck found outside of cuBLAS's nvjet_* kernels.

    Those kernels order their asynchronous copies by barriers that racecheck does not follow. They
    cannot be excluded by name, because racecheck then fails itself ("failed to handle a hardware
    exception").
    """
    places = re.findall(r"Race reported between .*? at (.*?)\+0x", log)
    own = sorted({place for place in places if not place.startswith("nvjet_")})
    if "RACECHECK SUMMARY" not in log:
        return "no summary"
    return f"hazards in {', '.join(own)}" if own else ""


def bench_jobs(names: tuple[str, ...], size: tuple, out: Path, arguments: str) -> list[Job]:
    command = [sys.executable, "-m", "fusewise", "bench", *names, *size, "--device", "cuda"]
    folder = (out / "bench").relative_to(ROOT)
    command += [*arguments.split(), "--out", folder]
    return [Job("bench", command, problem=incomplete)]


def incomplete(log: str) -> str:
    """What a sweep says that stopped before its end; the next run of the part goes on."""
    return "\n".join(re.findall(r"^INCOMPLETE: .*", log, re.MULTILINE))


def linet_step_jobs(out: Path, _: str) -> list[Job]:
    command = [sys.executable, "benchmarks/linet_step.py", "--device=cuda", "--dtype=float16"]
    command += ["--cudnn-benchmark", "--compile", f"--out={out / 'linet_step.json'}"]
    return [Job("bench", command, found=r"(fusewise .*)")]


def fuzz_jobs(out: Path, _: str) -> list[Job]:
    command = [sys.executable, "tools/fuzz_calls.py", "--device=cuda", f"--calls={FUZZ_CALLS}"]
    threads = {"OMP_NUM_THREADS": "2"}
    return [Job(name, [*command, name], threads, rf"{name}: (.* calls, .*)") for name in FUZZED]


def python_part(kind: str, folder: str, family: str, shares: int) -> Part:
    tests = test_files(folder, family)
    shared = helpers("tests/python", folder)

    def sources():
        if family == REST:  # these tests may read any file
            every = ("examples", "benchmarks", "tools", "pyproject.toml")
            return [*files(*COMPILED, PACKAGE, *every), *shared, *tests]
        return [*operators(family), *of_family(family, shared), *tests]

    return Part(
        f"{kind}-{family}", lambda out, _: pytest_jobs(tests, out, shares), sources, stage=TESTS
    )


def sanitizer_part(family: str) -> Part:
    script = "tools/sanitizer_calls.py"
    return Part(
        f"sanitize-{family}",
        lambda out, _: sanitizer_jobs([sys.executable, script, family]),
        lambda: [*operators(family), *files(script)],
        stage=SANITIZED,
    )


def bench_part(family: str) -> Part:
    return Part(
        f"bench-{family}",
        lambda out, arguments: bench_jobs(FAMILIES[family].bench, ("--full",), out, arguments),
        lambda: bench_sources(family),
    )


def zoo_part() -> Part:
    size = ("--zoo", "--minutes", ZOO_MINUTES)
    return Part(
        f"bench-{ZOO}-zoo",
        lambda out, arguments: bench_jobs(FAMILIES[ZOO].bench, size, out, arguments),
        lambda: bench_sources(ZOO),
        resumes=True,
        asked=True,
    )


def optimize_part() -> Part:
    """`fusewise.optimize` on whole models. Each report is kept; the next run goes on."""

    def jobs(out: Path, arguments: str) -> list[Job]:
        command = [sys.executable, "benchmarks/optimize_models.py", "--device=cuda"]
        command += ["--minutes", MODEL_MINUTES, *arguments.split(), "--out", out / "bench"]
        return [Job("bench", command, problem=incomplete)]

    return Part("bench-optimize", jobs, lambda: bench_sources("optimize"), resumes=True, asked=True)


def bench_sources(family: str) -> list[Path]:
    return of_family(family, files(*COMPILED, PACKAGE, "benchmarks"))


def cpp_sources() -> list[Path]:
    return files(*COMPILED, "tests/cpp", "benchmarks/naive")


def all_parts() -> dict[str, Part]:
    """All parts by name. `build` has no jobs: every run builds, and then runs stage after stage."""
    binary = ROOT / "build" / "dev" / "tests" / "cpp" / "fusewise_tests"
    cpp_program = [binary, "--gtest_filter=*Cuda*Short*"]
    with_rest = (*FAMILIES, REST)
    with_kernels = [name for name, family in FAMILIES.items() if family.kernels]
    parts = [
        Part("build", lambda out, _: [], cpp_sources),
        Part("cpp", ctest_jobs, cpp_sources, stage=TESTS),
        Part(
            "fuzz",
            fuzz_jobs,
            lambda: [*operators(), *helpers("tests/python"), *files("tools/fuzz_calls.py")],
            stage=TESTS,
        ),
        *(python_part("tests", "tests/python", family, SHARES) for family in with_rest),
        *(python_part("gpu", "tests/gpu", family, GPU_SHARES) for family in with_rest),
        *(sanitizer_part(family) for family in with_kernels),
        Part(
            "sanitize-cpp",
            lambda out, _: sanitizer_jobs(cpp_program, CPP_SHARES),
            cpp_sources,
            stage=SANITIZED,
        ),
        *(bench_part(family) for family in FAMILIES if FAMILIES[family].bench),
        Part(
            "bench-linet",
            linet_step_jobs,
            lambda: [
                *operators("linet"),
                *files("benchmarks/linet_step.py", "benchmarks/linet_packed.py"),
                *files("tests/python/linet_reference.py"),
            ],
        ),
        zoo_part(),
        optimize_part(),
    ]
    return {part.name: part for part in parts}


def missing_tool(part: Part) -> str | None:
    """The tool that the part needs and this machine does not have, or None."""
    if part.name.startswith("sanitize-") and shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on the path"
    return None
