"""What torch is set to for matrix products, and the dtype that they are computed in."""

import contextlib

import torch
from torch import Tensor


def product_math(x: Tensor) -> tuple[bool, bool, bool]:
    """TF32 or not, sums of halves in half or not, algorithms measured or not.

    `torch.backends.cuda.matmul.fp32_precision` tells what both of torch's switches for TF32 say;
    the older one cannot even be read once the newer was set. `torch.compile` takes all three as
    constants and traces again when one changes.
    """
    if not x.is_cuda:
        return False, True, True
    matmul = torch.backends.cuda.matmul
    tf32 = x.dtype == torch.float32 and matmul.fp32_precision == "tf32"
    reduced_sums = True
    if x.dtype == torch.float16:
        reduced_sums = bool(matmul.allow_fp16_reduced_precision_reduction)
    elif x.dtype == torch.bfloat16:
        reduced_sums = bool(matmul.allow_bf16_reduced_precision_reduction)
    return tf32, reduced_sums, not torch.are_deterministic_algorithms_enabled()


def cast_inputs(x: Tensor, parameters: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """x and the parameters in the dtype of the product: autocast's, where it is on and x is not
    float64, else x's own, to which float32 parameters beside half x are rounded."""
    device = x.device.type
    dtype = x.dtype
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        if x.dtype != dtype:
            x = x.to(dtype)
        rounded = (torch.float32, torch.float16, torch.bfloat16)
    elif dtype in (torch.float16, torch.bfloat16):
        rounded = (torch.float32,)
    else:
        return x, parameters
    return x, [
        t.to(dtype) if t is not None and t.dtype != dtype and t.dtype in rounded else t
        for t in parameters
    ]


def without_autocast(x: Tensor):
    """For torch's own operators in a place where x has its dtype already. Meta has no autocast."""
    device = x.device.type
    return contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
