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


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        names = ", ".join(map(repr, known[:-1]))
        raise ValueError(f"{name}: expected {names} or {known[-1]!r}, got {value!r}")


def activation_name(name: str, value: str) -> None:
    one_of(name, value, ACTIVATIONS)


def floating(dtype: torch.dtype | None) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected a floating dtype, got {dtype}")


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
