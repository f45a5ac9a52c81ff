"""Checks that several modules make of their arguments."""

from numbers import Integral

import torch

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
    """Asked after a function has failed, which blames w: in a module that is right by itself."""
    if not x.is_nested and x.dim() > 0 and x.shape[-1] != features:
        raise RuntimeError(f"x: expected {features} features, got {x.shape[-1]}") from error


def plain_linear(name: str, module: torch.nn.Module) -> None:
    """That calling a linear layer does nothing but its product: no hooks, as those of pruning and
    spectral norms, and no parametrisation, none of which the fused operator would run."""
    if type(module) is not torch.nn.Linear:
        raise TypeError(f"{name}: expected a torch.nn.Linear, got {type(module).__name__}")
    unhooked(name, module)
    if not isinstance(module.weight, torch.nn.Parameter):
        _refuse_hooks(name)


def unhooked(name: str, module: torch.nn.Module) -> None:
    before = module._forward_pre_hooks or module._backward_pre_hooks
    if before or module._forward_hooks or module._backward_hooks:
        _refuse_hooks(name)


def _refuse_hooks(name: str) -> None:
    raise ValueError(
        f"{name}: has hooks or parametrisations (pruning, weight or spectral norm), which a "
        "fused layer would not run; remove them first"
    )


def activation_of(name: str, module: torch.nn.Module, others: str = "") -> str:
    """The name of what one of torch's modules computes; a ValueError where there is none."""
    known = {
        torch.nn.ReLU: "relu",
        torch.nn.GELU: "gelu",
        torch.nn.SiLU: "silu",
        torch.nn.Identity: "identity",
    }
    if type(module) not in known:
        kinds = f"{others}ReLU, GELU, SiLU or Identity"
        raise ValueError(f"{name}: expected {kinds}, got {type(module).__name__}")
    unhooked(name, module)
    kind = known[type(module)]
    return "gelu_tanh" if kind == "gelu" and module.approximate == "tanh" else kind
