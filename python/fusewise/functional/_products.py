"""What torch is set to for matrix products, and the dtype that they are computed in."""

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
def _torch_settings(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    tf32, reduced_sums = False, True
    if dtype == torch.float32:
        tf32 = fp32_precision("cuda", "matmul") == "tf32"
    elif dtype == torch.float16:
        reduced_sums = allows_fp16_reduced_sums()[0]
    elif dtype == torch.bfloat16:
        reduced_sums = allows_bf16_reduced_sums()[0]
    return tf32, reduced_sums, not torch.are_deterministic_algorithms_enabled()


def product_math(x: Tensor) -> tuple[bool, bool, bool]:
    """TF32 or not, sums of halves in half or not, algorithms measured or not.

    `torch.compile` takes what is set when it traces, and does not trace again when that changes.
    """
    return _torch_settings(x.dtype) if x.is_cuda else (False, True, True)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast wants x to be; None where it is off, or is nothing for x."""
    if not is_any_autocast_enabled():
        return None
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    casts = x.dtype.is_floating_point and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else None


def cast_inputs(x: Tensor, parameters: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """x and the parameters in the dtype of the product: autocast's, where it is on and x is not
    float64, else x's own, to which float32 parameters beside half x are rounded."""
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
    """For what hands x to torch's own products, which autocast would round once more."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)
