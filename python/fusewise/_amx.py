"""Keeps torch from AMX instructions on machines that announce them and then refuse them.

oneDNN computes torch's bfloat16 products on the CPU. On some virtual machines it picks AMX, and the
process dies of an illegal instruction, with or without fusewise.
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
    """Tries a product in a child process, and limits oneDNN to AVX-512 where that dies.

    Takes effect before the first bfloat16 product of this process, and in its children. Costs
    nothing where the CPU announces no AMX. Returns whether the limit was set; one that the user has
    set stays.
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
