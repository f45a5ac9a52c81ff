"""Replaces modules of a model by fused ones where that is verified and measured to be faster."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .registry import Choice, register

if TYPE_CHECKING:
    from .report import Report

__all__ = ["optimize", "register"]


def optimize(
    model: nn.Module,
    example_inputs: Tensor | Sequence | dict[str, object],
    *,
    training: bool | None = None,
    amp: bool | torch.dtype | None = None,
    include: Choice | Iterable[Choice] | None = None,
    exclude: Choice | Iterable[Choice] | None = None,
    min_gain: float = 1.02,
    verify: bool = True,
    compile: bool = False,
    graph: bool = False,
    inplace: bool = False,
) -> tuple[nn.Module, "Report"]:
    """Swaps the parts of a model that are right and faster as fused operators, and reports on each.

    Each candidate is verified and measured on the inputs that it gets in the model. Then the whole
    model is, before and after. If it is not faster, nothing is swapped.

    Everything runs on scratch copies. Whether the call succeeds or fails, parameters, buffers,
    `.grad` and all random-number states are as before. Under torch.distributed all processes must
    make the call; rank 0 measures, and all swap the same. Wrap the result in DDP, or shard it with
    `fully_shard`, afterwards.

    Args:
        model: A `torch.nn.Module` on one device.
        example_inputs: What the model is called with, in the real sizes: a tensor, a tuple of
            arguments, or a dict of keyword arguments. Images are `[N, C, H, W]`.
        training: Whether forward and backward are measured, not forward alone. None: the model's
            mode.
        amp: Autocast: True (fp16 on a GPU, bf16 on a CPU), False, or a dtype. None: as it is set at
            the call.
        include: Names of modules, such as "layer1" or "layer*.bn1", or classes, or several of them.
            Only these and what is inside of them is swapped. None: everything.
        exclude: Likewise what is left alone.
        min_gain: How many times as fast a fused operator must be to be swapped in.
        verify: Whether results and gradients are checked. Without it, only times decide.
        compile: Whether the model is also measured as compiled by torch.compile, with and without
            the swaps; the fastest variant is returned.
        graph: Whether the result is returned as `fusewise.graphed` where that is faster. Needs a
            GPU.
        inplace: Whether the model itself is changed. By default the result is a new tree of modules
            that shares its parameters and buffers; the model stays as it was.

    Returns:
        The model to use, and a report: `print(report)`, `report.to_html(path)`, `report.to_json()`,
        `report.to_dict()`. `report.restore()` gives the original model back.

    Raises:
        ValueError, TypeError: Naming the argument: inputs that do not run through the model or
            make its output NaN or infinite, a model on several devices, a scripted or compiled
            model.

    Example:
        >>> import torch, fusewise
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU())
        >>> fused, report = fusewise.optimize(model, torch.randn(256, 64), training=True)
        >>> fused.state_dict().keys() == model.state_dict().keys()
        True
        >>> [row.pattern for row in report.rows]
        ['Linear + activation']
    """
    from .options import Options
    from .run import run

    options = Options(training, amp, include, exclude, min_gain, verify, compile, graph, inplace)
    return run(model, example_inputs, options)
