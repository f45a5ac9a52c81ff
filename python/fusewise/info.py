"""What `fusewise info` prints: everything a bug report needs, and nothing that names a host."""

import torch

import fusewise

from ._ops import CUDA_MISSING, build_info
from .bench import environment

_INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")


# A small call of each operator, to ask which implementations there are.
_EXAMPLES = (
    lambda device: fusewise.nn.SqueezeExcitation(8, 2, device=device)(
        torch.zeros(1, 8, 2, 2, device=device)
    ),
)


def lines() -> list[str]:
    found = {
        "fusewise": fusewise.__version__,
        "torch": torch.__version__,
        "os": environment.os_name(),
        "cpu": environment.cpu_model(),
        "instruction sets": " ".join(
            name
            for name in _INSTRUCTION_SETS
            if name in (environment.cpu_field("flags") or "").split()
        ),
        "gpu": ", ".join(map(_gpu, range(torch.cuda.device_count()))) or "none",
    }
    if CUDA_MISSING:
        found["CUDA kernels"] = f"not available: {CUDA_MISSING}"
    for key, value in build_info().items():
        found[f"built: {key}"] = value
    text = [f"{key}: {value}" for key, value in found.items()]
    for example in _EXAMPLES:
        for device in ["cpu"] + ["cuda"] * (not CUDA_MISSING and torch.cuda.is_available()):
            for record in fusewise.explain(example, device):
                names = ", ".join(candidate.name for candidate in record.candidates)
                what = f"{record.operator} {record.direction} on {device}"
                text.append(f"{what}, fastest first: {names}")
    return text


def _gpu(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"
