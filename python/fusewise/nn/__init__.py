"""Modules for the fused operators, with the parameter names of the modules they replace."""

from .linear_act import LinearAct
from .mlp import MLP
from .squeeze_excitation import SqueezeExcitation

__all__ = ["MLP", "LinearAct", "SqueezeExcitation"]
