"""Reads torch's settings for GEMMs (TF32, reduced-precision sums, autocast); casts the inputs."""

import contextlib

import torch
from torch import Tensor

from .._torch_private import (
    allows_bf16_reduced_sums,
    allows_fp16_reduced_sums,
    constant_when_compiled,
    fp32_precision,
    is_any_autocast_enabled,
)

_HALF = (torch.float16, torch.bfloat16)
_NOTHING = contextlib.nullcontext()


@constant_when_compiled
def _torch_settings(dtype: torch.dtype, operator: str) -> tuple[bool, bool, bool]:
    tf32, reduced_sums = False, True
    if dtype == torch.float32:
        tf32 = fp32_precision("cuda", operator) == "tf32"
    elif dtype == torch.float16:
        reduced_sums = allows_fp16_reduced_sums()[0]
    elif dtype == torch.bfloat16:
        reduced_sums = allows_bf16_reduced_sums()[0]
    return tf32, reduced_sums, not torch.are_deterministic_algorithms_enabled()


def product_math(x: Tensor, operator: str = "matmul") -> tuple[bool, bool, bool]:
    """What is allowed: TF32, reduced-precision sums in fp16 and bf16, autotuning.

    operator: "matmul" or "conv", whose setting for TF32 counts. `torch.compile` reads the settings
    once, when it traces. It does not retrace when they change.
    """
    return _torch_settings(x.dtype, operator) if x.is_cuda else (False, True, True)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts x to; None if autocast is off or does not apply to x."""
    if not is_any_autocast_enabled():
        return None
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    casts = x.dtype.is_floating_point and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else None


def cast_inputs(x: Tensor, parameters: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Casts x and the parameters to the dtype of the GEMM.

    Under autocast that is autocast's dtype, unless x is float64. Otherwise it is x's own dtype;
    float32 parameters of an fp16 or bf16 x are rounded to it.
    """
    if dtype := autocast_dtype(x):
        x = x.to(dtype)
        which = (torch.float32, *_HALF)
    elif x.dtype in _HALF:
        which = (torch.float32,)
    else:
        return x, parameters
    dtype = x.dtype
    return x, [
        t.to(dtype) if t is not None and t.dtype != dtype and t.dtype in which else t
        for t in parameters
    ]


def without_autocast(x: Tensor):
    """Disables autocast, which would round x again before torch's own GEMMs."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)
