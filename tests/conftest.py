"""Shared by all Python tests: the devices they run on, and a reproducible hypothesis profile."""

import os
import subprocess
import sys
import tempfile
import textwrap

# OpenMP reads this when torch loads it. Threads that spin while they wait take cores from threads
# that work. Next to another job, a test of seconds would then take minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402
import torch  # noqa: E402

from fusewise._amx import avoid_broken_amx  # noqa: E402

try:
    import hypothesis
except ImportError:  # a GPU machine may only have torch and pytest; test_property.py then skips
    hypothesis = None

if hypothesis:
    hypothesis.settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.register_profile(
        "explore", hypothesis.settings.get_profile("repeatable"), derandomize=False
    )
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


avoid_broken_amx()

# Autotuning starts from an empty cache, and the user's own tuning cache is not touched.
_CACHE = tempfile.TemporaryDirectory(prefix="fusewise-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name


def pytest_addoption(parser):
    parser.addoption("--device", choices=("all", "cpu", "cuda"), default="all")
    parser.addoption("--share", metavar="I/N", help="every Nth test, from the Ith (0 to N - 1) on")


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--device")
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        metafunc.parametrize("device", [d for d in devices if wanted in ("all", d)])


def tests_of_this_device(config, items):
    """With --device=cuda, tests/python without those that a machine without a GPU runs as well."""
    if config.getoption("--device") != "cuda":
        return items
    return [
        item
        for item in items
        if item.path.parent.name != "python"
        or "device" in item.fixturenames
        or item.get_closest_marker("any_device")
    ]


def pytest_collection_modifyitems(config, items):
    items[:] = tests_of_this_device(config, items)
    if share := config.getoption("--share"):
        first, count = map(int, share.split("/"))
        items[:] = items[first::count]
    missing = pytest.mark.skip(reason=f"needs two GPUs, found {torch.cuda.device_count()}")
    for item in items:
        if "two_gpus" in item.keywords and torch.cuda.device_count() < 2:
            item.add_marker(missing)


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def few_threads():
    """One thread: with small matrices on busy cores, more would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_LEAVE = """
import sys as _sys
if "torch" in _sys.modules and _sys.modules["torch"].cuda.is_initialized():
    import leaving
    leaving.leave()
"""


@pytest.fixture(scope="session")
def run_python():
    """Runs a program in a new interpreter with the same sys.path; fails if the program fails."""

    def run(program, **environment):
        prelude = f"import sys\nsys.path[:0] = {sys.path!r}\n"
        done = subprocess.run(
            [sys.executable, "-c", prelude + textwrap.dedent(program) + _LEAVE],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
