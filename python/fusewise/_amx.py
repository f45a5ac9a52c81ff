"""Keeps torch from using AMX on machines that report AMX but cannot execute it.

torch computes bfloat16 GEMMs on the CPU with oneDNN. On some virtual machines oneDNN picks AMX and
the process dies of an illegal instruction, with or without fusewise.
"""

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

_TRIAL = """
import torch
x = torch.ones(64, 96, dtype=torch.bfloat16)
torch.nn.functional.linear(x, x)
"""


def avoid_broken_amx() -> bool:
    """Tries a GEMM in a child process; if the child dies, limits oneDNN to AVX-512.

    Call it before the first bfloat16 GEMM of this process; child processes inherit the limit. It
    costs nothing if the CPU does not report AMX. A limit that the user has set is kept. Returns
    whether this call has set the limit.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not _announces_amx():
        return False
    if not _a_product_dies():
        return False
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
    return True


@cache
def _a_product_dies() -> bool:
    trial = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True)
    return trial.returncode == -signal.SIGILL


def _announces_amx() -> bool:
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
