"""The host time of a call, next to that of an operator that does nothing.

The time of an empty operator with the same number of tensors is torch's own overhead: the
dispatcher and autograd. Only a CUDA graph removes that overhead.
"""

from functools import cache

import torch
from torch import Tensor

from .._usage import UsageError
from ..functional._transforms import direct_apply
from .baselines import OURS, caller
from .families.family import STEP, Workload
from .measure import Call, LoopTimer, interleave
from .naive import naive_library
from .statistics import median


def host(row: dict, tensors: int, device: str) -> dict | None:
    """For a row with GPU and wall times: wall time minus GPU time, and the empty operator's time.

    None if the row has only one of the two clocks.
    """
    ours = row["contenders"][OURS]
    if not {"gpu", "wall"} <= ours.keys():
        return None
    return {
        "overhead_us": ours["wall"]["median"] - ours["gpu"]["median"],
        "empty_us": empty_us(device, tensors, row["mode"]),
    }


@cache
def empty_us(device: str, tensors: int, mode: str) -> float:
    """Wall time of an empty call in this mode, with `tensors` inputs.

    Like our operators it has one result and a gradient for each input.
    """
    timer = LoopTimer(empty_call(device, tensors, mode), 1, device)
    return median(interleave({"empty": timer}, rounds=15, budget=0.2)["empty"])


def empty_call(device: str, tensors: int, mode: str) -> Call:
    data, *weights = (torch.zeros((), device=device, requires_grad=True) for _ in range(tensors))
    data.requires_grad_(mode != STEP)  # in a train step only the weights get gradients
    gradients = [torch.ones((), device=device)]
    return caller(empty, Workload([(data,)], gradients, tuple(weights), {}), mode)


def empty(*tensors: Tensor) -> Tensor:
    """The empty operator, called as in `fusewise.functional`: directly or by autograd.Function."""
    if torch.is_grad_enabled():
        return _apply(*tensors)
    return operator(len(tensors), 1)(*tensors)


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return operator(len(tensors), 1)(*tensors)

    @staticmethod
    def backward(ctx, gradient):
        tensors = ctx.saved_tensors
        return operator(len(tensors) + 1, len(tensors))(*tensors, gradient)


_apply = direct_apply(_Empty)


@cache
def operator(inputs: int, outputs: int):
    """From benchmarks/naive/empty.cpp: takes `inputs` tensors and returns `outputs` new scalars."""
    if naive_library("cpu") is None:
        raise UsageError("the empty operators were not built; run `make build`")
    return getattr(torch.ops.fusewise_empty, f"empty_{inputs}_{outputs}").default
