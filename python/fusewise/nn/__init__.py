"""Modules around the fused operators, with the names and state dicts of those they stand for."""

from .linear_act import LinearAct
from .mlp import MLP
from .squeeze_excitation import SqueezeExcitation

__all__ = ["MLP", "LinearAct", "SqueezeExcitation"]
