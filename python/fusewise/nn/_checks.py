"""Checks that several modules make of their arguments."""

from numbers import Integral

import torch

from .._ops import ACTIVATIONS

_DTYPES = (None, torch.float32, torch.float64, torch.float16, torch.bfloat16)


def whole(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, Integral):
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


def plain_linear(name: str, module: torch.nn.Module) -> None:
    """That calling a linear layer does nothing but its product: no hooks, as those of pruning and
    spectral norms, and no parametrisation, none of which the fused operator would run."""
    if type(module) is not torch.nn.Linear:
        raise TypeError(f"{name}: expected a torch.nn.Linear, got {type(module).__name__}")
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooks or not isinstance(module.weight, torch.nn.Parameter):
        raise ValueError(
            f"{name}: has hooks or parametrisations (pruning, weight or spectral norm), which a "
            "fused layer would not run; remove them first"
        )


def activation_of(module: torch.nn.Module) -> str:
    """The name of what one of torch's modules computes; a ValueError where there is none."""
    if isinstance(module, torch.nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    known = {torch.nn.ReLU: "relu", torch.nn.SiLU: "silu", torch.nn.Identity: "identity"}
    if type(module) not in known:
        raise ValueError(
            f"activation: expected ReLU, GELU, SiLU or Identity, got {type(module).__name__}"
        )
    return known[type(module)]
