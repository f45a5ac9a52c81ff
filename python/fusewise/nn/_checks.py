"""Argument checks shared by the modules."""

from collections.abc import Sequence
from numbers import Integral

import torch
from torch.nn.utils.parametrize import is_parametrized

from .._ops import ACTIVATIONS

_DTYPES = (None, torch.float32, torch.float64, torch.float16, torch.bfloat16)


def whole(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def true_or_false(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        names = ", ".join(map(repr, known[:-1]))
        raise ValueError(f"{name}: expected {names} or {known[-1]!r}, got {value!r}")


def activation_name(name: str, value: str) -> None:
    one_of(name, value, ACTIVATIONS)


def floating(dtype: torch.dtype | None) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected a floating dtype, got {dtype}")


def blame_x(error: RuntimeError, x: torch.Tensor, features: int) -> None:
    """Reports a wrong input size as an error about x.

    Called after the function has failed. The function reports w, but a module's own weight is
    right.
    """
    if not x.is_nested and x.dim() > 0 and x.shape[-1] != features:
        raise RuntimeError(f"x: expected {features} features, got {x.shape[-1]}") from error


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def plain_linear(name: str, module: torch.nn.Module) -> None:
    """Raises unless calling the layer computes `x @ weight.T + bias` and nothing else.

    Hooks (pruning, spectral norm) and parametrisations are refused: a fused operator does not run
    them.
    """
    _plain(name, module, torch.nn.Linear)


def plain_convolution(name: str, module: torch.nn.Module) -> None:
    """The same for a 1x1 convolution."""
    _plain(name, module, torch.nn.Conv2d)
    found = module.kernel_size, module.stride, module.padding, module.groups
    if found != ((1, 1), (1, 1), (0, 0), 1):
        raise ValueError(
            f"{name}: expected kernel 1x1, stride 1, no padding, 1 group, got {module}"
        )


def _plain(name: str, module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    if is_parametrized(module):
        _refuse_hooks(name)
    if type(module) is not kind:
        expected = f"torch.nn.{kind.__name__}"
        raise TypeError(f"{name}: expected a {expected}, got {full_name(type(module))}")
    unhooked(name, module)
    if not isinstance(module.weight, torch.nn.Parameter):
        _refuse_hooks(name)


def unhooked(name: str, module: torch.nn.Module) -> None:
    before = module._forward_pre_hooks or module._backward_pre_hooks
    if before or module._forward_hooks or module._backward_hooks:
        _refuse_hooks(name)
    if "forward" in module.__dict__:
        raise ValueError(
            f"{name}: overrides forward, which a fused layer would not call; remove that first"
        )


def _refuse_hooks(name: str) -> None:
    raise ValueError(
        f"{name}: has hooks or parametrisations (pruning, weight or spectral norm), which a "
        "fused layer would not run; remove them first"
    )


# torch's module for each function. timm has its own classes for some of them.
_TORCHS = {
    "relu": torch.nn.ReLU,
    "relu6": torch.nn.ReLU6,
    "gelu": torch.nn.GELU,
    "silu": torch.nn.SiLU,
    "identity": torch.nn.Identity,
    "hardswish": torch.nn.Hardswish,
    "sigmoid": torch.nn.Sigmoid,
    "hardsigmoid": torch.nn.Hardsigmoid,
}
_TIMMS = {
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.HardSigmoid": "hardsigmoid",
    "timm.layers.activations.HardSwish": "hardswish",
    "timm.layers.activations.Sigmoid": "sigmoid",
    "timm.layers.activations.Swish": "silu",
    "timm.layers.activations_me.HardSigmoidMe": "hardsigmoid",
    "timm.layers.activations_me.HardSwishMe": "hardswish",
    "timm.layers.activations_me.SwishMe": "silu",
}
_FUNCTIONS = {full_name(kind): name for name, kind in _TORCHS.items()} | _TIMMS


def function_of(name: str, module: torch.nn.Module, known: Sequence[str], others: str = "") -> str:
    """The name of the function that a module without parameters computes.

    Raises ValueError if it is not in `known`. `others` names further classes that the caller
    accepts; the error message lists them too.
    """
    kind = full_name(type(module))
    found = _FUNCTIONS.get(kind)
    if found == "gelu" and getattr(module, "approximate", "none") == "tanh":
        found = "gelu_tanh"
    if found not in known:
        kinds = [_TORCHS[each].__name__ for each in _TORCHS if each in known]
        expected = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
        raise ValueError(f"{name}: expected {others}{expected}, got {kind}")
    unhooked(name, module)
    return found


def activation_of(name: str, module: torch.nn.Module, others: str = "") -> str:
    """The name of the activation that a module after a linear layer computes."""
    return function_of(name, module, ACTIVATIONS, others)
