"""The arguments of `optimize`, and what they must be."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import nn

from .._ops import dtensor_error
from ..nn._parts import hooks_everywhere
from .registry import Choice
from .setting import Setting
from .together import processes
from .trees import is_compiled


@dataclass(frozen=True)
class Options:
    training: bool | None = None
    amp: bool | torch.dtype | None = None
    include: Choice | Iterable[Choice] | None = None
    exclude: Choice | Iterable[Choice] | None = None
    min_gain: float = 1.02
    verify: bool = True
    compile: bool = False
    graph: bool = False
    inplace: bool = False

    def check(self) -> None:
        number = isinstance(self.min_gain, Real) and not isinstance(self.min_gain, bool)
        if not number or not 0 < self.min_gain < math.inf:
            raise ValueError(f"min_gain: expected a number above 0, got {self.min_gain!r}")
        for name in ("training", "verify", "compile", "graph", "inplace"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "training" and value is None):
                raise TypeError(f"{name}: expected True or False, got {value!r}")

    def check_setting(self, setting: Setting, model: nn.Module) -> None:
        if self.graph and setting.device != "cuda":
            raise ValueError(f"graph: expected a model on a GPU, got one on {setting.device}")
        if self.graph and setting.training != model.training:
            raise ValueError("graph: expected training to be the model's mode; call train() first")


def check_model(model: nn.Module, training: bool) -> None:
    """Raises an error that says what to do if `optimize` cannot work on a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "model: expected an ordinary module, got a scripted one; pass the module that was "
            "scripted, and use torch.compile or torch.export on the result, because "
            "torch.jit.script cannot compile fused operators"
        )
    if is_compiled(model):
        raise TypeError(
            "model: expected an ordinary module, got a compiled one; pass the module itself and "
            "compile=True"
        )
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            raise TypeError(
                f"model: expected a model that is not wrapped yet, got {type(module).__name__}"
                f"{f' at {name}' if name else ''}; optimize it first, or pass inplace=True"
            )
        if processes() > 1 and training and _synchronises(module):
            raise ValueError(
                f"model: {name} shares its statistics with other processes, and only one process "
                "measures; call fusewise.nn.convert_sync_batchnorm after optimize"
            )
    for name, parameter in model.named_parameters():
        if dtensor_error(name, parameter):
            raise TypeError(
                f"model: expected plain parameters, got a DTensor, {name}; call optimize before "
                "fully_shard"
            )
    if why := hooks_everywhere():
        raise ValueError(f"model: {why}; remove them first")


def _synchronises(module: nn.Module) -> bool:
    group = getattr(module, "process_group", None)  # ours; torch's None is the group of all
    return isinstance(module, nn.SyncBatchNorm) or group is not None
