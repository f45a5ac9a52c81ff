"""The host's part of a call, beside that of an operator which does nothing.

What an empty operator with as many tensors takes is torch's own part: the dispatcher and autograd.
Only a CUDA graph takes that away.
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
    """Of a row that was timed by both clocks: by how much its wall time exceeds its GPU time, and
    the wall time of the empty operator; None where there is one clock only."""
    ours = row["contenders"][OURS]
    if not {"gpu", "wall"} <= ours.keys():
        return None
    return {
        "overhead_us": ours["wall"]["median"] - ours["gpu"]["median"],
        "empty_us": empty_us(device, tensors, row["mode"]),
    }


@cache
def empty_us(device: str, tensors: int, mode: str) -> float:
    """Wall time of a call in this mode; `tensors` are those that go in. As ours, it has one result,
    and a gradient for each input."""
    timer = LoopTimer(empty_call(device, tensors, mode), 1, device)
    return median(interleave({"empty": timer}, rounds=15, budget=0.2)["empty"])


def empty_call(device: str, tensors: int, mode: str) -> Call:
    data, *weights = (torch.zeros((), device=device, requires_grad=True) for _ in range(tensors))
    data.requires_grad_(mode != STEP)  # where the weights alone learn
    gradients = [torch.ones((), device=device)]
    return caller(empty, Workload([(data,)], gradients, tuple(weights), {}), mode)


def empty(*tensors: Tensor) -> Tensor:
    """As `fusewise.functional` calls its operators: directly, or in an autograd.Function."""
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
    """From benchmarks/naive/empty.cpp: takes so many tensors and returns as many new scalars."""
    if naive_library("cpu") is None:
        raise UsageError("the empty operators were not built; run `make build`")
    return getattr(torch.ops.fusewise_empty, f"empty_{inputs}_{outputs}").default
