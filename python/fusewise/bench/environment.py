"""The environment of a result: enough to repeat it, nothing that identifies a user or a host."""

import hashlib
import os
import platform
import shlex
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

import fusewise

_SOURCES = ("include", "src", "bindings", "cmake", "python/fusewise", "benchmarks")


def describe(device: str) -> dict:
    found = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit() or "unknown",
        "sources": sources(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": load(),
        "os": os_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fusewise": fusewise.__version__,
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name(0)
        found["driver"] = driver()
        found["cuda"] = torch.version.cuda
    return found


def load(seconds: float = 0.5) -> float:
    """How many cores other processes use now. The load average would still include the build."""

    def busy() -> int:
        user, nice, system, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
        return user + nice + system + sum(rest[2:])  # without idle and iowait

    before = busy()
    time.sleep(seconds)
    return round((busy() - before) / os.sysconf("SC_CLK_TCK") / seconds, 1)


def busy_machine(environment: dict) -> list[str]:
    """A warning for CPU results, if other processes used the machine."""
    others, cores = environment.get("load", 0), environment.get("cores", 1)
    if others <= cores / 4:
        return []
    return [
        f"BUSY MACHINE: other processes used {others} of {cores} cores; these figures are unsteady"
    ]


def commit() -> str | None:
    """The commit of this source tree; FUSEWISE_COMMIT overrides what git says."""
    if named := os.environ.get("FUSEWISE_COMMIT"):
        return named
    if (root := _source_tree()) is None:  # perhaps installed inside another repository
        return None
    revision = _output("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    if revision is None:
        return None
    changed = _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no")
    return f"{revision} with local changes" if changed else revision


def _source_tree() -> Path | None:
    """The folder of the source tree; None if this package is installed."""
    root = Path(__file__).parents[3]
    return root if (root / "include" / "fusewise").is_dir() else None


def sources() -> str:
    """A digest of what is measured. It also tells trees without a commit, or with local changes,
    from each other.

    In a source tree it leaves the compiled libraries out: nvcc does not make the same bytes twice.
    """
    root, package = _source_tree(), Path(__file__).parents[1]
    folders = [root / name for name in _SOURCES] if root else [package]
    left = {"__pycache__", "_lib"} if root else {"__pycache__"}
    hashed = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not left & set(name.parts):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                hashed.update(f"{name.as_posix()} {content}\n".encode())
    return hashed.hexdigest()[:16]


def driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def cpu_model() -> str:
    return cpu_field("model name") or platform.machine()


def cpu_field(name: str) -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def command(arguments: list[str]) -> str:
    """The command line with relative paths, so that it reveals nothing about the machine."""
    return shlex.join(["fusewise", *(_relative(argument) for argument in arguments)])


def _relative(argument: str) -> str:
    flag, equals, value = argument.rpartition("=")
    if not value.startswith(("/", "~")):
        return argument
    inside = Path(value).is_relative_to(Path.cwd())
    return (
        flag + equals + (str(Path(value).relative_to(Path.cwd())) if inside else Path(value).name)
    )


def _output(*arguments) -> str | None:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0]
