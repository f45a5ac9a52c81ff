"""Residual blocks of torchvision and timm: BatchNorm + sum (+ activation) as one call.

A residual block passes the residual to the fused norm, so its forward must change. Each block has a
subclass with that forward; the blocks keep their submodules. The subclasses are in a module per
library, imported only if a model has a module of that library.
"""

import importlib
from collections.abc import Iterator

from torch import nn

from ..nn import BatchNormAct2d
from ..nn._checks import full_name, unhooked
from ..nn._others import TIMMS_NORM
from .candidate import Candidate, Chain, Refused, Skipped, Slot
from .chains import activation_of

_PATTERN = "BatchNorm + sum"
_LIBRARIES = {"torchvision": "torchvision_blocks", "timm": "timm_blocks"}


def residual_blocks(name: str, module: nn.Module, training: bool) -> Iterator[Candidate | Skipped]:
    """The candidate that a module is as a whole. `name` is the module's."""
    block = _fused_class(type(module))
    norms = block and block.fused_norms(module)
    if not norms:
        return
    prefix = f"{name}." if name else ""
    try:
        unhooked(name or "model", module)
        if block.drops(module) and (training or not block.can_drop):
            raise Refused("stochastic depth with p > 0 stands between the norm and the sum")
    except ValueError as error:
        yield Skipped(name, _PATTERN, str(error))
        return
    slots = tuple(_slot(prefix, norm, activation) for norm, activation in norms.items())
    used = tuple(prefix + activation for activation in {*norms.values()} - {None})
    yield Candidate(name, _PATTERN, slots, block=block, touched=used)


def _slot(prefix: str, norm: str, activation: str | None) -> Slot:
    def make(root: nn.Module) -> tuple[nn.Module, nn.Module]:
        theirs = root.get_submodule(prefix + norm)
        if full_name(type(theirs)) == TIMMS_NORM:
            return Chain(theirs), BatchNormAct2d.from_module(theirs)
        if activation is None:
            return Chain(theirs), BatchNormAct2d.from_batch_norm(theirs, "identity")
        behind = root.get_submodule(prefix + activation)
        fused = BatchNormAct2d.from_batch_norm(theirs, activation_of(behind))
        return Chain(theirs, behind), fused

    return Slot(prefix + norm, make)


def _fused_class(kind: type[nn.Module]):
    library = _LIBRARIES.get(kind.__module__.partition(".")[0])
    if library is None:
        return None
    try:
        return importlib.import_module(f".{library}", __package__).FUSED.get(kind)
    except ImportError:  # a version of the library that has other blocks
        return None
