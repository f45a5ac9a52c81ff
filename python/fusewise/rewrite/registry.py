"""Conversions of single modules: those that come with fusewise, and the user's own."""

from collections.abc import Callable

from torch import nn

from ..nn import MLP, BatchNormAct2d, SqueezeExcitation
from ..nn._checks import full_name
from ..nn._others import OTHER_EXCITATIONS, SQUEEZE_EXCITATIONS, TIMMS_MLP, TIMMS_NORM

Choice = str | type[nn.Module]
"""A name of modules, with wildcards, or a class."""
Convert = Callable[[nn.Module], nn.Module]

_OWN: dict[type[nn.Module], Convert] = {}
_STACKS = (
    TIMMS_MLP,
    "torchvision.ops.misc.MLP",
    "torchvision.models.vision_transformer.MLPBlock",
)


def register(kind: type[nn.Module], convert: Convert | None = None) -> Convert:
    """Adds a pattern of your own to `fusewise.optimize`; also usable as a decorator.

    Args:
        kind: The class of the modules to replace. Subclasses are left alone.
        convert: Takes such a module and returns the one to run instead, which is called alike. It
            has the same parameters and buffers, the very objects, under the same names. It may
            raise ValueError or TypeError: the message becomes the reason in the report.

    Returns:
        `convert`.

    Example:
        >>> import torch, fusewise
        >>> class Scale(torch.nn.Module):
        ...     pass
        >>> @fusewise.rewrite.register(Scale)
        ... def fused_scale(module):
        ...     raise ValueError("there is nothing to gain")
    """
    if convert is None:
        return lambda function: register(kind, function)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"kind: expected a class of modules, got {kind!r}")
    if not callable(convert):
        raise TypeError(f"convert: expected a function, got {convert!r}")
    _OWN[kind] = convert
    return convert


def has_own_pattern(module: nn.Module) -> bool:
    """Whether the user registered a pattern for its class."""
    return type(module) in _OWN


def conversion(module: nn.Module) -> tuple[str, Convert] | None:
    """The name of the pattern that matches a single module, and its conversion."""
    if convert := _OWN.get(type(module)):
        return type(module).__name__, convert
    kind = full_name(type(module))
    if kind in SQUEEZE_EXCITATIONS or kind in OTHER_EXCITATIONS:
        return "Squeeze-and-Excitation", _excitation
    if kind == TIMMS_NORM and type(module.act) is not nn.Identity:  # else it may end a block
        return "BatchNorm + activation", BatchNormAct2d.from_module
    if kind in _STACKS or _is_stack(module):
        return "stack of Linear + activation", _stack
    return None


def _excitation(module: nn.Module) -> nn.Module:
    return SqueezeExcitation.from_module(module, keep_names=True)


def _stack(module: nn.Module) -> nn.Module:
    return MLP.from_sequential(module, keep_names=True)


def _is_stack(module: nn.Module) -> bool:
    """Whether it is a plain Sequential of linear layers and of layers without parameters."""
    if type(module) is not nn.Sequential:
        return False
    linears = sum(type(child) is nn.Linear for child in module)
    return linears > 1 and all(
        type(child) is nn.Linear or not any(True for _ in child.parameters()) for child in module
    )
