"""How the tests run beside other jobs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="looks at GNU's OpenMP")
def test_threads_that_wait_do_not_spin():
    """As OpenMP itself tells it when torch, loaded by tests/conftest.py, loads it."""
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "--collect-only", "-q", __file__],
        env=environment | {"OMP_DISPLAY_ENV": "TRUE"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = [line for line in done.stderr.splitlines() if "OMP_WAIT_POLICY" in line]
    assert told and all("PASSIVE" in line for line in told), done.stderr
