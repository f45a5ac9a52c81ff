"""The output of `fusewise info`: what a bug report needs, without anything that identifies a
host."""

import functools
import platform
from collections import Counter

import torch

import fusewise

from . import functional
from ._explain import Record
from ._ops import CUDA_MISSING, OPERATOR_NAMES, build_info
from .bench import environment
from .bench.baselines import OURS
from .bench.cases import recast
from .bench.families import FAMILIES
from .bench.families.family import DTYPES, LAYOUTS

_INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")


def lines() -> list[str]:
    found = {
        "fusewise": fusewise.__version__,
        "commit": environment.commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": environment.os_name(),
        "cpu": environment.cpu_model(),
        "instruction sets": " ".join(
            name
            for name in _INSTRUCTION_SETS
            if name in (environment.cpu_field("flags") or "").split()
        ),
        "instruction set in use": _in_use(),
        "gpu": ", ".join(map(_gpu, range(torch.cuda.device_count()))) or "none",
        "driver": environment.driver(),
    }
    if CUDA_MISSING:
        found["CUDA kernels"] = f"not available: {CUDA_MISSING}"
    for key, value in build_info().items():
        found[f"built: {key}"] = value
    text = [f"{key}: {value}" for key, value in found.items() if value]
    for device in ["cpu"] + ["cuda"] * (not CUDA_MISSING and torch.cuda.is_available()):
        records = [record for call in _samples(device) for record in fusewise.explain(call)]
        for operator in OPERATOR_NAMES:
            for direction in ("forward", "backward"):
                asked = [r for r in records if (r.operator, r.direction) == (operator, direction)]
                text += _implementations(f"{operator} {direction} on {device}", asked)
    text.append('every operator: "torch" runs torch\'s own operators instead, if it is forced')
    return text


def _in_use() -> str:
    """The instruction set that the chosen CPU kernels were compiled for, by implementation name."""
    return fusewise.explain(next(_samples("cpu")))[0].chosen


def _implementations(title: str, asked: list[Record]) -> list[str]:
    """For each implementation: how many of the sample calls it takes, and why it declines the
    rest."""
    used = Counter(record.chosen for record in asked)
    text = [f"{title}, fastest first:"]
    for place, candidate in enumerate(asked[0].candidates):
        reasons = Counter(record.candidates[place].reason for record in asked)
        takes = f"takes {reasons.pop('', 0)} of {len(asked)} sample calls"
        why = "".join(f"; declines {count}: {reason}" for reason, count in reasons.items())
        text.append(f"  {candidate.name}: {takes}, used for {used[candidate.name]}{why}")
    return text


def _samples(device: str):
    """Calls of every operator: those of `fusewise check`, and of what it does not have."""
    for family in FAMILIES.values():
        for dtype in DTYPES:
            for layout in family.layouts:
                for case in recast(list(family.checked), dtype, layout):
                    workload = family.build(case, device, 1)
                    yield lambda w=workload: w.functions[OURS](*w.inputs[0], *w.weights)
    for dtype in DTYPES:
        for layout in LAYOUTS.values():
            kind = {"dtype": getattr(torch, dtype), "device": device}
            images = [torch.zeros(2, c, 9, 7, **kind).to(memory_format=layout) for c in (3, 1)]
            weights = [torch.zeros(8, c, 3, 3, **kind).requires_grad_() for c in (3, 1)]
            mix = [torch.zeros(8, 8, **kind).requires_grad_() for _ in images]
            yield functools.partial(functional.li_conv, images, weights, mix, padding=1)


def _gpu(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"
